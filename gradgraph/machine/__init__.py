"""The host machine: processor, cache folder, subprocesses, memory limits, the garbage collector, libraries.

This package does not depend on graphs or file formats.
"""
