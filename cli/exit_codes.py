"""The exit codes of all commands: success, failure or finding, wrong command line, Ctrl-C."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
