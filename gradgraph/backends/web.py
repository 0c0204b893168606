"""onnxruntime's JavaScript siblings, which run the same file as every onnxruntime."""

from __future__ import annotations

from gradgraph.backends.backend import Backend

WEB = Backend(name="web", about="the same file as auto; the name says what it is for", keeps_functions=True)
