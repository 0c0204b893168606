"""The host machine: processor, caches, programs, memory limits, the garbage collector, libraries.

It does not depend on graphs or file formats.
"""
