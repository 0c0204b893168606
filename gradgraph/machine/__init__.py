"""The machine that the package runs on: processor, caches, programs, memory limits, the garbage collector, libraries.

It knows no graph and no file format.
"""
