"""`python -m packer`: the command line."""

from packer.cli import main

main()
