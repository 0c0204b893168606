"""The command line: ``gradgraph build``, ``train``, ``export`` and the others.

Each command is one file, imported when the command is invoked, so that ``gradgraph --help`` is quick. A command parses,
calls one function and prints: what programs read goes to stdout, what people read while they wait goes to stderr.
Every error ends in one place (``gradgraph.cli.app.run``).
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from gradgraph.cli.exit_codes import INTERRUPTED

__all__ = ["main"]


def main() -> NoReturn:
    """Run the ``gradgraph`` command. Ctrl-C exits without a traceback at any time."""
    try:
        from gradgraph.cli.app import start

        code = start(sys.argv[1:])
    except KeyboardInterrupt:  # while that was imported
        os.write(2, b"interrupted\n")
        code = INTERRUPTED
    if code == INTERRUPTED:  # libraries that were stopped half-way are not asked to clean up
        os._exit(code)
    sys.exit(code)
