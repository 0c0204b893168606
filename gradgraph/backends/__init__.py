"""The registry of backends: every file or folder of this package that defines a ``Backend`` is registered here.

A backend defines rewrites, forms, and the limits of its runtime. Its forms are imported when a model is written for the
backend, not when backends are listed. Backends depend on named operators, but not on losses, data or sessions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from gradgraph.arguments import Table
from gradgraph.backends.backend import Backend
from gradgraph.errors import BuildError, shown, suggestion

SHARED = frozenset((
    "backend", "capability", "engine", "executed_order", "facts", "forms", "functions", "machine_requirements",
    "missing_kernels", "ort_operators", "shared_forms", "shared_rewrites", "stages", "static_facts",
))  # fmt: skip


def find_all() -> None:
    """Fill ``BACKENDS``: import every file and folder of this package except ``SHARED``, and collect their backends."""
    names = (m.name for m in pkgutil.iter_modules(__path__) if m.name not in SHARED)
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    BACKENDS.update(
        {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Backend)}
    )
    BACKENDS.order(sorted(BACKENDS))


BACKENDS: Table[Backend] = Table("backend")
find_all()


def register(backend: Backend) -> Backend:
    """Register a backend from outside this package, for help, choices and errors; return it.

    Raises:
        BuildError: if another backend already has this name.
    """
    known = BACKENDS.get(backend.name)
    return backend if known is backend else BACKENDS.add(backend.name, backend)


def step_backends() -> tuple[str, ...]:
    """Return the names of the backends that a step can be written for."""
    return tuple(name for name, backend in BACKENDS.items() if backend.for_steps)


def checked_backends() -> tuple[str, ...]:
    """Return the names of the backends whose runtimes have a table of supported operators."""
    return tuple(name for name, backend in BACKENDS.items() if backend.has_table)


def named(name: str, among: Iterable[str] = BACKENDS) -> Backend:
    """Return the backend called ``name``, which must be one of ``among``.

    Raises:
        BuildError: if no backend has this name.
    """
    known = tuple(among)
    if name not in known:
        raise BuildError(f"there is no backend '{shown(name)}'{suggestion(name, known)}")
    return BACKENDS[name]


def of_provider(provider: str) -> Backend:
    """Return the backend for sessions whose first execution provider is ``provider``, by default ``portable``."""
    own = (b for b in BACKENDS.values() if b.provider == provider and b.extends is None)
    return next(own, BACKENDS["portable"])
