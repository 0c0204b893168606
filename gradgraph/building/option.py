"""Options, each defined once, by a field of a dataclass and its metadata.

The metadata of a field are the accepted kind of value, its description in the Python documentation, and the
corresponding options of the command line and of recipes. Options of builds are fields of ``BuildOptions``, those of
runs fields of ``gradgraph.Run``. The decorator ``called_with`` gives a function these fields as arguments.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from gradgraph.arguments import (
    FLAG,
    NAMES,
    NUMBER,
    PATH,
    TEXT,
    WHOLE,
    Kind,
    bound,
    found_at,
    instance,
    meant,
    number,
    one_of,
    whole,
)
from gradgraph.errors import ArgumentError, in_python, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[R], R]:
        return lambda decorator: decorator


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
D = TypeVar("D", bound="DataclassInstance")
O_co = TypeVar("O_co", bound="DataclassInstance", covariant=True)

Takes = Literal[
    "text", "flag", "number", "share", "seconds", "whole", "count", "path", "batch size",
    "list", "paths", "columns", "arguments", "kinds", "groups", "sizes",
]  # fmt: skip
Section = Literal["model", "data", "loss", "optimizer", "schedule", "training", "output"]
TABLES = ("arguments", "kinds", "groups", "sizes")  # kinds of arguments that are a table in a recipe
_SIZE = Kind(
    'a whole number of at least 1, or "auto"',
    lambda value: whole(1).fits(value) or (isinstance(value, str) and value.startswith("auto")),
)
_PATHS = Kind(
    "a path, or a list of paths",
    lambda value: PATH.fits(value) or (isinstance(value, Sequence) and all(map(PATH.fits, value))),
)
KINDS: dict[str, Kind] = {
    "text": TEXT, "flag": FLAG, "number": NUMBER, "share": number(0), "seconds": number(0, above=True), "whole": WHOLE,
    "count": whole(1), "path": PATH, "batch size": _SIZE, "paths": _PATHS, "columns": NAMES,
    **dict.fromkeys(TABLES, instance(Mapping, "a dict")),
}  # fmt: skip
"The type of an option's Python value, by the kind of its command-line argument (see ``Takes``)."
_KEY = "gradgraph.option"
_WIDTH = 120 - len("    ")  # characters in a line of a docstring


@dataclass(frozen=True)
class Shell:
    """A command-line option for a build option, or for a part of one.

    Attributes:
        section: its section in the help, which is also its table in recipes.
        help: its help text; by default the description of the field.
        takes: the kind of its argument. A "count" is at least 1, a "share" at least 0, and "seconds" are above 0;
            "list" and the kinds after it may be repeated.
        name: its parameter name, such as ``loss_option``; by default the name of the field. A flag ``no_…`` is the
            opposite of its field.
        flags: its flags, such as ``-o --out``; by default ``--`` and its name.
        key: its key in a recipe's table, if different from ``name``.
        metavar: the placeholder for its argument in the help.
        names: the table of accepted names, such as ``losses:LOSSES``, then further names.
        strict: whether the command line rejects all other names.
        choices: all accepted texts, if they are few.
        default: the default that the help shows; None if it shows none.
        span: the smallest and the largest number.
        of: the option to which these arguments belong, such as "loss" for ``--loss-option``. If a command line
            overrides that option of a recipe, the recipe's arguments are dropped.
        required: whether the command line requires it.
        field: the name of its field, which :func:`spellings` fills in.
        in_runs: whether the option also applies when a finished step is trained.
    """

    section: Section
    help: str = ""
    takes: Takes = "text"
    name: str = ""
    flags: str = ""
    key: str = ""
    metavar: str | None = None
    names: tuple[str, ...] = ()
    strict: bool = False
    choices: tuple[str, ...] = ()
    default: Any = None
    span: tuple[int, int] | None = None
    of: str = ""
    required: bool = False
    in_runs: bool = False
    field: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """The table of the option in recipes, and its key there."""
        return self.section, self.key or self.name

    @property
    def is_opposite(self) -> bool:
        """Whether the option is a flag that sets its field to the opposite."""
        return self.takes == "flag" and self.name.startswith("no_")

    @property
    def unset(self) -> Any:
        """The value of an option that is not given."""
        if self.default is not None:
            return self.default
        if self.takes in TABLES:
            return {}
        return () if self.takes in ("list", "paths", "columns") else False if self.takes == "flag" else None


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


def spelled(
    help: str,
    section: Section,
    takes: Takes = "text",
    *,
    kind: Kind | None = None,
    default: Any = MISSING,
    shows: bool = True,
    in_shell: str = "",
    **shell: Any,
) -> Any:
    """Return a field with one command-line option, which has the same default.

    Args:
        help: its description.
        section, takes, shell: as for :class:`Shell`.
        kind: the type of its Python value; by default one of its choices or the type for ``takes``. None is also
            valid if it is the default.
        default: its default; a dict is copied.
        shows: whether the help shows the default.
        in_shell: its help text on the command line, if it differs.
    """
    if kind is None:
        kind = one_of(shell["choices"]) if "choices" in shell else KINDS.get(takes)
        kind = kind.or_none() if kind is not None and default is None else kind
    shown = default if shows and isinstance(default, str | float | int) and takes != "flag" else None
    given = {"default_factory": dict} if isinstance(default, dict) else {"default": default}
    return option(help, kind, Shell(section, in_shell, takes, default=shown, **shell), **given)


@dataclass_transform(field_specifiers=(option, spelled), frozen_default=True)
def options(cls: type[C]) -> type[C]:
    """Turn a class whose fields are options into a frozen dataclass."""
    return dataclass(frozen=True)(cls)


def option_of(of: Field[Any]) -> Option | None:
    """Return the option of a field; None for other fields."""
    return of.metadata.get(_KEY)


def changed_options(given: D, changes: Mapping[str, Any], what: str) -> D:
    """Return a copy with ``changes`` (values by option) applied; raise ArgumentError for an unknown option.

    ``what`` is the name of the options in the message.
    """
    known = [f.name for f in fields(given)]
    for name in changes:
        if name not in known:
            raise ArgumentError(f"{what} has no option '{shown(name)}'{meant(name, known)}")
    return replace(given, **changes)


def documented(cls: type[C]) -> type[C]:
    """Add the descriptions of the fields of an options class to its docstring, as the section "Args"."""
    cls.__doc__ = _with_arguments(cls.__doc__ or "", fields(cls))  # type: ignore[arg-type]
    return cls


def default_of(of: Field[Any]) -> Any:
    """Return the default of a field; ``inspect.Parameter.empty`` if it has none."""
    if of.default_factory is not MISSING:
        return of.default_factory()
    return inspect.Parameter.empty if of.default is MISSING else of.default


def spellings(of: type[DataclassInstance]) -> dict[str, Shell]:
    """Return the command-line options of an options class, by parameter name."""
    known = [(f.name, option_of(f)) for f in fields(of)]
    every = [replace(shell, field=name, name=shell.name or name, help=shell.help or one.help)
             for name, one in known if one is not None for shell in one.shell]  # fmt: skip
    return {shell.name: shell for shell in every}


def check_options(given: DataclassInstance) -> None:
    """Raise ArgumentError if the value of a field is not of the kind of its option."""
    for f in fields(given):
        if (one := option_of(f)) is not None:
            one.check(f.name, getattr(given, f.name))


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
        call.__doc__ = _with_arguments(function.__doc__ or "", every)
        return call

    return decorate


def _parameter(of: Field[Any]) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if of.kw_only is True else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(of.name, kind, default=default_of(of), annotation=of.type)


def _with_arguments(text: str, of: Sequence[Field[Any]]) -> str:
    """Return a docstring with the section "Args", made from the descriptions of the options."""
    words = {f.name: in_python(one.help.replace("; repeatable", "")) for f in of if (one := option_of(f)) is not None}
    head, raises, tail = text.partition("\n    Raises:")
    arguments = "\n".join(
        textwrap.fill(f"{name}: {said}", _WIDTH + 4, initial_indent=" " * 8, subsequent_indent=" " * 12,
                      break_long_words=False, break_on_hyphens=False)
        for name, said in words.items()
    )  # fmt: skip
    return f"{head.rstrip()}\n\n    Args:\n{arguments}\n{raises}{tail}"
