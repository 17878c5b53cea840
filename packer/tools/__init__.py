"""Tools around sets and training: they import everything else, and only the command line and `packer` import them.

advise      what to pack for a training job                   diagnose   which stage of a loader limits it
simulate    what a job of many nodes would read               monitor    what a run uses, over time
doctor      what is ready in this environment                 report     their pages and charts
"""
