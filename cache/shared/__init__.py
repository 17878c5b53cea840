"""Bytes that all processes of a node share: one segment of memory, filled once, read without a lock or a copy."""
