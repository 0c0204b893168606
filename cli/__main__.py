"""``python -m gradgraph.cli``, for use where the ``gradgraph`` command is not installed."""

from gradgraph.cli import main

main()
