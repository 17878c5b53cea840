"""Adapters of other libraries, one module each; the library itself is imported there alone."""
