"""`python -m ffmem` is the `ffmem` command."""

from ffmem.cli import main

main()
