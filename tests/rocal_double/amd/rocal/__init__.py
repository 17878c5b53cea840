"""A double: the modules that `readers.rocal` uses, and those that a naive user of rocAL would."""
