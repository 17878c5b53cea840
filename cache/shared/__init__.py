"""A cache that all processes of a node share: one memory segment, filled once, read without locks or copies."""
