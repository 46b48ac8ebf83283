"""`python -m kvtier`: the `kvtier` command."""

from kvtier.cli.main import main

main()
