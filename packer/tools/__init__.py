"""Tools for sets and training. They import the other packages; only the command line and `packer` import them.

advise      how to pack images for a training job           diagnose   the stage of a loader that limits training
simulate    the reads of a job on many nodes                monitor    the utilisation of a machine over time
doctor      checks of this environment                      parity     differences of decoders from Pillow
view        a web page that shows samples                   report     report pages and charts
"""
