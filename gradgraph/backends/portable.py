"""Standard nodes only, for runtimes that know no model-local functions."""

from __future__ import annotations

from gradgraph.backends.backend import Backend

PORTABLE = Backend(name="portable", about="standard nodes only, for runtimes without functions", for_all=True)
