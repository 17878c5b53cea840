"""Copies of a directory's files on this node's own disk or memory: made once per node, checked, shared, removed.

    sources   what to stage, and from where: a directory, or an address
    copies    the staging directory of a target, its copies; quota and clean-up
    session   one process: choose a target, copy or wait for who copies, use the copy

Nothing here knows what the files mean: `readers.staging` does. Neither obstore nor numpy is loaded.
"""
