"""The command line: ``gradgraph build``, ``train``, ``export`` and other commands.

Each command is a module, which is imported when the command is invoked, so that ``gradgraph --help`` is fast. A command
parses its options, calls the library and prints: results to stdout, progress and notes to stderr. All errors are
handled in ``gradgraph.cli.app.run``.
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
    except KeyboardInterrupt:  # during the import
        os.write(2, b"interrupted\n")
        code = INTERRUPTED
    if code == INTERRUPTED:  # exit without the clean-up of libraries, which may have been interrupted halfway
        os._exit(code)
    sys.exit(code)
