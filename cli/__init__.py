"""The command line: ``gradgraph build``, ``train``, ``grad``, ``check``, ``export``, ``inspect``, ``ops``, ``demo``.

Each command is one file, imported when the command is invoked, so that ``gradgraph --help`` is quick. A command parses,
calls one function and prints: what programs read goes to stdout, what people read while they wait goes to stderr.
Every error ends in one place (``gradgraph.cli.app.run``).
"""

from gradgraph.cli.app import main

__all__ = ["main"]
