"""Gradient rules by family. Importing this package fills ``gradgraph.registry``; its table of contents:"""

from gradgraph.rules import conv, elementwise, linalg, shape, softmax

__all__ = ["conv", "elementwise", "linalg", "shape", "softmax"]
