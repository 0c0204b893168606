"""``python -m gradgraph``: the ``gradgraph`` command."""

from gradgraph.cli import main

main()
