"""Copies of a directory's files on this node's local disk or in its memory: one per node, checked, shared, removed.

    sources   the files to stage, and where they come from: a directory or an address
    copies    the staging directory of a target and its copies; quota and clean-up
    session   one process: choose a target, copy or wait for the process that copies, use the copy

This package does not interpret the files; `readers.staging` does. Neither obstore nor numpy is loaded.
"""
