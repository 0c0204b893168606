"""Gradient rules by family. Importing this package fills ``gradgraph.registry``; its table of contents:"""

from gradgraph.rules import elementwise, linalg

__all__ = ["elementwise", "linalg"]
