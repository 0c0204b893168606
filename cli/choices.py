"""The kinds of value that options take, and the names that some of them choose from, read from their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)


class BatchSize(click.ParamType[int | str]):
    """Samples of a batch: a number, or ``auto`` with a limit on memory or without."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, str) and value.startswith("auto"):
            return value
        return click.IntRange(min=1).convert(value, param, ctx)


BATCH_SIZE = BatchSize()


class Listed(click.Choice[str]):
    """One of some names, which are read from their table when they are asked for: importing it takes time."""

    def __init__(self, read: Callable[[], Iterable[str]]) -> None:
        self._read = read
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self._read())

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if param is not None and value == param.default:  # which need not be looked up
            return value
        return super().convert(value, param, ctx)


class Briefly(Listed):
    """Likewise, with names too many for one line."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"


class Suggested(Briefly):
    """Names of which others are refused where they are looked up, as in Python."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value


class Named(click.Option):
    """An option whose help ends with the names that it takes."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or not isinstance(self.type, Listed):
            return record
        return record[0], f"{record[1]}  One of {', '.join(self.type.choices)}."


def _backends() -> Iterable[str]:
    from gradgraph.backends import BACKENDS

    return BACKENDS


def _step_backends() -> Iterable[str]:
    from gradgraph.backends import step_backends

    return step_backends()


def _checked_backends() -> Iterable[str]:
    from gradgraph.backends import checked_backends

    return checked_backends()


def _losses() -> Iterable[str]:
    from gradgraph.building.objective import OWN_LOSS
    from gradgraph.losses import LOSSES

    return (*LOSSES, OWN_LOSS)


def _metrics() -> Iterable[str]:
    from gradgraph.metrics import METRICS

    return METRICS


def _precisions() -> Iterable[str]:
    from gradgraph.passes.autocast import PRECISIONS

    return PRECISIONS


def _optimizers() -> Iterable[str]:
    from gradgraph.optim.recipes import RECIPES

    return RECIPES


BACKENDS, STEP_BACKENDS, CHECKED_BACKENDS = Briefly(_backends), Briefly(_step_backends), Briefly(_checked_backends)
LOSSES, METRICS, OPTIMIZERS = Suggested(_losses), Suggested(_metrics), Suggested(_optimizers)
PRECISIONS = Suggested(_precisions)
