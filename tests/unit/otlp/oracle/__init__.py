"""The plain way between OTLP and Arrow, message by message: the oracle for the columns of `penstock.otlp`."""
