"""`python -m faircopy` is the command line."""

from faircopy.cli import main

main()
