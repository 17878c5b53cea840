"""A double: the modules that `readers.rocal` uses, and those that a first-time user of rocAL would use."""
