"""Tools around sets and training: they import everything else, and only the command line and `packer` import them.

    diagnose    which stage of a loader starves the training      monitor    what a run uses, over time
    simulate    what a job of many nodes would read
"""
