"""The simple conversion between OTLP and Arrow, message by message: the oracle for `penstock.otlp`."""
