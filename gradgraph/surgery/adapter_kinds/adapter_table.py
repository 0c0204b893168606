"""The table of kinds of adapters, filled: each file of this room that adds one to ``KINDS`` is found here."""

from __future__ import annotations

import importlib
import pkgutil

from gradgraph.surgery import adapter_kinds
from gradgraph.surgery.adapter_kinds.kind import KINDS as KINDS
from gradgraph.surgery.adapter_kinds.kind import Kind as Kind

for _file in pkgutil.iter_modules(adapter_kinds.__path__):
    importlib.import_module(f"{adapter_kinds.__name__}.{_file.name}")
KINDS.order(sorted(KINDS))
