"""The language of build options: a field of ``StepOptions`` says all that anybody knows of an option.

Its kind, its words in Python's documentation, and its spelling on the command line and in recipes are metadata of the
field. ``called_with`` makes a function that takes such fields as its arguments.
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
_WIDTH = 120 - len("    ")  # of a docstring


@dataclass(frozen=True)
class Shell:
    """An option of the command line, which is a build option or a part of one.

    Attributes:
        section: of the help, and the table of recipes.
        help: its words in the help.
        takes: what follows it. A "count" is at least 1; all from "list" on may be repeated.
        name: as a parameter, such as ``loss_option``; by default that of the field.
        key: its name in the table of a recipe, where it is another one.
        metavar: what follows it, in the help.
        names: the table of the names that it takes, such as ``losses:LOSSES``, and names beside those of the table.
        strict: the command line refuses other names itself.
        default: shown in the help.
        span: the least and the greatest number.
        of: the option whose arguments these are: they go when a command line chooses another one.
        in_runs: it belongs to a run of a finished step, too.
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
        help: its paragraph in the docstring of ``gradgraph.build``.
        kind: of its value, or where that stands, such as ``autodiff.recomputation:KEEP``.
        shell: its spellings on the command line: none, one, or one for each part.
    """

    help: str
    kind: Kind | str | None
    shell: tuple[Shell, ...]

    def check(self, name: str, value: Any) -> None:
        """Raise ArgumentError if ``value`` is of another kind."""
        kind = found_at(self.kind) if isinstance(self.kind, str) else self.kind
        if kind is not None:
            kind.check(name, value)


def option(
    help: str, kind: Kind | str | None = None, *shell: Shell, default: Any = MISSING, default_factory: Any = MISSING
) -> Any:
    """Make a field of a class of options; without a default it has to be given."""
    given: dict[str, Any] = {"default": default, "default_factory": default_factory}
    return field(**given, metadata={_KEY: Option(help, kind, shell)})


@dataclass_transform(field_specifiers=(option,), frozen_default=True)
def options(cls: type[C]) -> type[C]:
    """Make a frozen dataclass of a class whose fields are options."""
    return dataclass(frozen=True)(cls)


def option_of(of: Field[Any]) -> Option | None:
    """The option that a field is; None of another field."""
    return of.metadata.get(_KEY)


def default_of(of: Field[Any]) -> Any:
    """The default of a field; ``inspect.Parameter.empty`` if it has none."""
    if of.default_factory is not MISSING:
        return of.default_factory()
    return inspect.Parameter.empty if of.default is MISSING else of.default


def spellings(of: type[DataclassInstance]) -> dict[str, Shell]:
    """The options of the command line that a class of options has, by their names as parameters."""
    known = [(f.name, option_of(f)) for f in fields(of)]
    return {shell.name or name: shell for name, one in known if one is not None for shell in one.shell}


def called_with(made: Callable[P, O_co]) -> Callable[[Callable[[O_co], R]], Callable[P, R]]:
    """Let a function of a class of options take their fields as its arguments, and document each of them.

    Type checkers and editors see the fields, too.
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
    """The section of a docstring that says what each argument is."""
    return "\n".join(
        textwrap.fill(f"{name}: {said}", _WIDTH + 4, initial_indent=" " * 8, subsequent_indent=" " * 12,
                      break_long_words=False, break_on_hyphens=False)
        for name, said in words.items()
    )  # fmt: skip
