"""The description of a backend: a runtime that steps and transformed models can be written for.

A backend is one file or folder of this package. No other code mentions it by name: command line, help, errors,
documentation and tests read the registry (``gradgraph.backends``). To keep listing backends fast, neither this file nor
the files of backends import large modules; forms and rewrites are loaded when a model is written. ``engine.py`` applies
a ``Lowering`` in this order::

    before → [forms of nodes that the layout does not support → layout] for each layout → forms of all nodes → after
           → clean-up → last

A named operator to which no form applies is written in its portable form.
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
    """An alternative memory layout for chains of nodes.

    Attributes:
        may_take: whether a node supports the layout; such nodes get their forms only after the layout's rewrites.
        rewrites: the rewrites that select nodes and convert them to the layout.
    """

    may_take: Callable[[ir.Node], bool]
    rewrites: tuple[Rewrite, ...]


def _no_forms() -> Forms:
    from gradgraph.backends.forms import Forms

    return Forms()


def _no_nodes(model: ir.Model) -> Collection[ir.Node]:
    """Return no nodes, the default of ``Lowering.on_host``."""
    return ()


@dataclass(frozen=True)
class Lowering:
    """The forms and rewrites of one backend.

    Attributes:
        before: rewrites of the saved graph, with named operators as single nodes.
        forms: the table for single nodes.
        layouts: see :class:`Layout`.
        after: rewrites of the lowered graph, before the clean-up.
        last: rewrites after the clean-up.
        on_host: returns the nodes that a provider leaves to the CPU by design, such as arithmetic on shapes; they are
            not checked against the backend's table.
    """

    before: tuple[Rewrite, ...] = ()
    forms: Forms = field(default_factory=_no_forms)
    layouts: tuple[Layout, ...] = ()
    after: tuple[Rewrite, ...] = ()
    last: tuple[Rewrite, ...] = ()
    on_host: Callable[[ir.Model], Collection[ir.Node]] = _no_nodes


def lowering_in(module: str) -> Callable[[], Lowering]:
    """Return a function that, when called, imports ``LOWERING`` from ``module``."""
    return lambda: cast(Lowering, importlib.import_module(module).LOWERING)


@dataclass(frozen=True)
class Backend:
    """One runtime, or one way to use it.

    Attributes:
        name: the name for users, ``backend="…"``.
        about: its purpose, in one sentence, for help and documentation.
        load: imports and returns the forms and rewrites; called when the first model is written.
        extends: the backend whose forms are used if this backend has none for a node.
        provider: onnxruntime's execution provider for it; a Trainer on that provider lowers for this backend.
        only_there: whether files written for it run only on its provider.
        keeps_functions: whether named operators stay calls of model-local functions, without lowering.
        for_steps: whether a saved step may be written for it; transformed models always may.
        machine: returns the hardware feature that files written on this machine require, such as ``nchwc16``; empty if
            they run on any hardware.
        for_all: whether its files should run in every tested runtime; operators that some runtime does not support are
            then only logged.
        needs: the session options that its files require, in words; empty if there are none.
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
        """The forms and rewrites of this backend, loaded on first access."""
        return self.load()

    @property
    def has_table(self) -> bool:
        """Whether there is a table of the operators that the runtime supports."""
        return self.for_all or (Path(__file__).parent / "tables" / f"{self.name}.toml").exists()

    @property
    def table(self) -> Table | None:
        """The table of the operators that the runtime supports, from ``tables/<name>.toml``; None if there is none."""
        from gradgraph.backends.capability import everywhere, table_of

        return everywhere() if self.for_all else table_of(self.name)

    def takes(self, nodes: Iterable[ir.Node]) -> bool:
        """Return whether the runtime supports all ``nodes``, by its table; "portable" supports standard nodes."""
        table = None if self.for_all else self.table
        return table is None or all(table.verdict(node).kind not in ("refused", "wrong") for node in nodes)

    def forms_of(self, node: ir.Node) -> list[Form]:
        """Return the forms for ``node``, best first; forms of the extended backend come last."""
        inherited = self.extends.forms_of(node) if self.extends is not None else []
        return [*self.lowering.forms.of(node), *inherited]

    def adds_forms(self, node: ir.Node) -> bool:
        """Return whether this backend itself, not only the backend it extends, has forms for ``node``."""
        return self.extends is not None and bool(self.lowering.forms.of(node))
