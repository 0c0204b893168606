"""A backend describes one runtime that a step or a transformed model may be written for.

A backend is one file or folder of this room, and nothing elsewhere names it: command line, help, errors, documents and
tests ask the registry (``gradgraph.backends``). This file and those that describe a backend import nothing large, so
that backends can be listed at once; forms and rewrites are loaded when a model is written. ``engine.py`` does what a
``Lowering`` says, in this order::

    before → [forms of nodes that no layout may take → layout] for each layout → forms of all nodes → after
           → clean-up → last

A named operator that no form serves is written in its portable form.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import onnx_ir as ir

    from gradgraph.backends.capability import Table
    from gradgraph.backends.forms import Form, Forms
    from gradgraph.passes.rewrites import Rewrite


@dataclass(frozen=True)
class Layout:
    """Another way in which tensors may lie in memory, for chains of nodes rather than for single ones.

    Attributes:
        may_take: whether a node can compute in it; such nodes get their forms only afterwards.
        rewrites: those that decide, and write what they have decided.
    """

    may_take: Callable[[ir.Node], bool]
    rewrites: tuple[Rewrite, ...]


def _no_forms() -> Forms:
    from gradgraph.backends.forms import Forms

    return Forms()


def _no_nodes(model: ir.Model) -> Collection[ir.Node]:
    """Return none."""
    return ()


@dataclass(frozen=True)
class Lowering:
    """The forms and rewrites that models are written with for one backend.

    Attributes:
        before: rewrites of the graph as it is saved, with named operators as single nodes.
        forms: the table for single nodes.
        layouts: see :class:`Layout`.
        after: rewrites of the lowered graph, before unread nodes go and equal ones merge.
        last: rewrites of what is then left.
        on_host: returns the nodes that a provider leaves to the CPU by design, such as arithmetic on shapes; the
            backend's table is not asked about them.
    """

    before: tuple[Rewrite, ...] = ()
    forms: Forms = field(default_factory=_no_forms)
    layouts: tuple[Layout, ...] = ()
    after: tuple[Rewrite, ...] = ()
    last: tuple[Rewrite, ...] = ()
    on_host: Callable[[ir.Model], Collection[ir.Node]] = _no_nodes


def lowering_in(module: str) -> Callable[[], Lowering]:
    """Return what imports ``LOWERING`` from that module, when it is called."""
    return lambda: cast(Lowering, importlib.import_module(module).LOWERING)


@dataclass(frozen=True)
class Backend:
    """One runtime, or one way to use it.

    Attributes:
        name: as users write it, ``backend="…"``.
        about: what it is for, in one sentence for help and documents.
        load: imports and returns the forms and rewrites; called when the first model is written.
        extends: the backend whose forms serve where this one has none.
        provider: onnxruntime's execution provider that this is for; a Trainer on it lowers for this backend.
        only_there: what is written runs on no other provider.
        keeps_functions: named operators stay calls of model-local functions, and the model is not lowered.
        for_steps: whether a saved step may be written for it; transformed models may always be.
        machine: returns what a file that is written here demands of the machine that runs it; empty for nothing.
        for_all: what is written should run in every runtime that was tested; what some of them lack is told only.
        needs: what a session must be opened with to run such a file, in words; empty for nothing.
    """

    name: str
    about: str
    load: Callable[[], Lowering] = Lowering
    extends: Backend | None = None
    provider: str | None = None
    only_there: bool = False
    keeps_functions: bool = False
    for_steps: bool = True
    machine: Callable[[], str] = str
    needs: str = ""
    for_all: bool = False

    @functools.cached_property
    def lowering(self) -> Lowering:
        """The forms and rewrites that models are written with."""
        return self.load()

    @property
    def has_table(self) -> bool:
        """Is anything known of what the runtime can do?"""
        return self.for_all or (Path(__file__).parent / "tables" / f"{self.name}.toml").exists()

    @property
    def table(self) -> Table | None:
        """The table of what the runtime can do, from ``tables/<name>.toml``; None where nobody has found out."""
        from gradgraph.backends.capability import everywhere, table_of

        return everywhere() if self.for_all else table_of(self.name)

    def takes(self, nodes: Iterable[ir.Node]) -> bool:
        """Does the runtime take all of these, by its table? "portable", which is for any, takes standard nodes."""
        table = None if self.for_all else self.table
        return table is None or all(table.verdict(node).kind not in ("refused", "wrong") for node in nodes)

    def forms_of(self, node: ir.Node) -> list[Form]:
        """The forms for ``node``, the best one first; those of the backend that this one extends come after its own."""
        inherited = self.extends.forms_of(node) if self.extends is not None else []
        return [*self.lowering.forms.of(node), *inherited]

    def adds_forms(self, node: ir.Node) -> bool:
        """Has it forms for ``node`` that the backend which it extends has not?"""
        return self.extends is not None and bool(self.lowering.forms.of(node))
