"""Adapters for other libraries, with one module for each library; no other module imports it."""
