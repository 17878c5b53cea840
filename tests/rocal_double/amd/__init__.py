"""A double of rocAL's Python package, for tests; see `rocal_pybind`."""
