"""``python -m gradgraph.cli``, for where the ``gradgraph`` command is not installed."""

from gradgraph.cli import main

main()
