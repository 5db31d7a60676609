"""`python -m kvpp_connectors.cli`: the `kvpp` command where its script is not on the path."""

from kvpp_connectors.cli.main import main

main()
