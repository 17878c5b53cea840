"""Adapters for other libraries, one module each; only that module imports the library."""
