"""The exit codes of every command."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
