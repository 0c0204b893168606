"""Build options, each defined by a field of ``StepOptions`` and its metadata.

The metadata of a field are the accepted kind of value, its description in the Python documentation, and the
corresponding options of the command line and of recipes. The decorator ``called_with`` gives a function these fields as
arguments.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from gradgraph.arguments import Kind, bound, found_at

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[R], R]:
        return lambda decorator: decorator


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
O_co = TypeVar("O_co", bound="DataclassInstance", covariant=True)

Takes = Literal["text", "flag", "number", "whole", "count", "list", "arguments", "groups", "sizes"]
Section = Literal["model", "data", "loss", "optimizer", "schedule", "training"]
_KEY = "gradgraph.option"
_WIDTH = 120 - len("    ")  # characters in a line of a docstring


@dataclass(frozen=True)
class Shell:
    """A command-line option for a build option, or for a part of one.

    Attributes:
        section: its section in the help, which is also its table in recipes.
        help: its help text.
        takes: the kind of its argument. A "count" is at least 1; "list" and the kinds after it may be repeated.
        name: its parameter name, such as ``loss_option``; by default the name of the field.
        key: its key in a recipe's table, if different from ``name``.
        metavar: the placeholder for its argument in the help.
        names: the table of accepted names, such as ``losses:LOSSES``, then further names.
        strict: whether the command line rejects all other names.
        default: the default that the help shows.
        span: the smallest and the largest number.
        of: the option to which these arguments belong, such as "loss" for ``--loss-option``. If a command line
            overrides that option of a recipe, the recipe's arguments are dropped.
        in_runs: whether the option also applies when a finished step is trained.
    """

    section: Section
    help: str
    takes: Takes = "text"
    name: str = ""
    key: str = ""
    metavar: str | None = None
    names: tuple[str, ...] = ()
    strict: bool = False
    default: Any = None
    span: tuple[int, int] | None = None
    of: str = ""
    in_runs: bool = False


@dataclass(frozen=True)
class Option:
    """The metadata of a field.

    Attributes:
        help: its description in the docstring of ``gradgraph.build``.
        kind: the kind of its value, or the place where that is defined, such as ``autodiff.recomputation:KEEP``.
        shell: its command-line options.
    """

    help: str
    kind: Kind | str | None
    shell: tuple[Shell, ...]

    def check(self, name: str, value: Any) -> None:
        """Raise ArgumentError if ``value`` is not of the kind of this option; ``name`` is its name in the message."""
        kind = found_at(self.kind) if isinstance(self.kind, str) else self.kind
        if kind is not None:
            kind.check(name, value)


def option(
    help: str, kind: Kind | str | None = None, *shell: Shell, default: Any = MISSING, default_factory: Any = MISSING
) -> Any:
    """Return a field of an options class; it is required unless it has a default."""
    given: dict[str, Any] = {"default": default, "default_factory": default_factory}
    return field(**given, metadata={_KEY: Option(help, kind, shell)})


@dataclass_transform(field_specifiers=(option,), frozen_default=True)
def options(cls: type[C]) -> type[C]:
    """Turn a class whose fields are options into a frozen dataclass."""
    return dataclass(frozen=True)(cls)


def option_of(of: Field[Any]) -> Option | None:
    """Return the option of a field; None for other fields."""
    return of.metadata.get(_KEY)


def default_of(of: Field[Any]) -> Any:
    """Return the default of a field; ``inspect.Parameter.empty`` if it has none."""
    if of.default_factory is not MISSING:
        return of.default_factory()
    return inspect.Parameter.empty if of.default is MISSING else of.default


def spellings(of: type[DataclassInstance]) -> dict[str, Shell]:
    """Return the command-line options of an options class, by parameter name."""
    known = [(f.name, option_of(f)) for f in fields(of)]
    return {shell.name or name: shell for name, one in known if one is not None for shell in one.shell}


def called_with(made: Callable[P, O_co]) -> Callable[[Callable[[O_co], R]], Callable[P, R]]:
    """Decorate a function of an options object so that its parameters are the fields of the class ``made``.

    The signature and the "Args" section of its docstring are generated from the fields, for type checkers and editors,
    too.
    """

    def decorate(function: Callable[[O_co], R]) -> Callable[P, R]:
        every = fields(made)  # type: ignore[arg-type]
        signature = inspect.Signature(
            sorted(map(_parameter, every), key=lambda p: p.kind),
            return_annotation=inspect.signature(function).return_annotation,
        )

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound(function, signature, args, kwargs)
            return function(made(*args, **kwargs))

        call.__signature__ = signature  # type: ignore[attr-defined]
        words = {f.name: one.help for f in every if (one := option_of(f)) is not None}
        head, raises, tail = (function.__doc__ or "").partition("\n    Raises:")
        call.__doc__ = f"{head.rstrip()}\n\n    Args:\n{_arguments(words)}\n{raises}{tail}"
        return call

    return decorate


def _parameter(of: Field[Any]) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if of.kw_only is True else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(of.name, kind, default=default_of(of), annotation=of.type)


def _arguments(words: Mapping[str, str]) -> str:
    """Return the "Args" section of a docstring from the description of each argument."""
    return "\n".join(
        textwrap.fill(f"{name}: {said}", _WIDTH + 4, initial_indent=" " * 8, subsequent_indent=" " * 12,
                      break_long_words=False, break_on_hyphens=False)
        for name, said in words.items()
    )  # fmt: skip
