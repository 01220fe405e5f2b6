"""Operator tools on a data directory: verify, backup, restore."""
