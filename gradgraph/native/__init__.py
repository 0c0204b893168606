"""Kernels in C++ for some operators of a step, built on the user's machine and only if asked for.

They are one more form each (``passes/lower/native.py``): never needed, never in a file. Here is what builds the
library and finds it again; ``kernel.h`` says how a kernel is written.
"""

from __future__ import annotations

from gradgraph.native.library import DOMAIN, Library, build, here

__all__ = ["DOMAIN", "Library", "build", "here"]
