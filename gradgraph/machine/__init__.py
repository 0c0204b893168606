"""What the package asks of the machine: processor, caches, programs, memory limits, the garbage collector, libraries.

It knows no graph and no file format.
"""
