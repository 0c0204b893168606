"""Validation of the arguments of public functions: a wrong type raises a one-sentence error before any work is done."""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import inspect
import math
import numbers
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from gradgraph.errors import ArgumentError, BuildError, bare, listed, shown, suggestion
from gradgraph.rivals.keywords import advice
from gradgraph.rivals.objects import advice_on, described_foreign, library_of, name_in_library

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
E = TypeVar("E")


@dataclass(frozen=True)
class Kind:
    """A kind of value that an argument may have.

    Attributes:
        words: the description of the kind, which follows "should be" in messages.
        fits: returns whether a value is of this kind.
    """

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> Kind:
        return Kind(self.words, lambda value: value is None or self.fits(value))

    def check(self, name: str, value: Any) -> None:
        if not self.fits(value):
            raise ArgumentError(f"{name} is {described(value)}; it should be {self.words}{advice_on(value)}")


def checked(**kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that calls check the arguments named in ``kinds``.

    Raises:
        ArgumentError: in a call, if an argument is of the wrong kind, or the function has no argument of a given name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in bound(function, signature, args, kwargs).arguments.items():
                if name in kinds:
                    kinds[name].check(name, value)
            return function(*args, **kwargs)

        return call

    return decorate


def bound(
    function: Callable[..., Any], signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind the arguments of a call of ``function`` to the names in ``signature``.

    Raises:
        ArgumentError: if the function has no argument of a given name; the message suggests a similar name.
        TypeError: if an argument is missing, or there are too many.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        known = [name for name in signature.parameters if name != "self"]
        takes_words = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        called = function.__qualname__.removesuffix(".__init__")
        by_place = known[: len(args) - ("self" in signature.parameters)]
        for name in kwargs:
            if name not in known and not (takes_words and advice(name) is None):
                raise ArgumentError(f"{called} has no argument '{shown(name)}'{meant(name, known)}") from None
            if name in by_place:
                first = listed(by_place)
                raise ArgumentError(
                    f"{called} got '{shown(name)}' twice, by position and by name; its first arguments are {first}"
                ) from None
        raise


def meant(word: str, known: Sequence[str]) -> str:
    """Return a suffix for the message that ``word`` is unknown: a similar name, or gradgraph's equivalent of it."""
    near, elsewhere = suggestion(word, known), advice(word, known)
    if elsewhere is None:
        return near
    return f"{near} {elsewhere[0].upper()}{elsewhere[1:]}" if _asks(near) and not _asks(elsewhere) else f"; {elsewhere}"


def _asks(words: str) -> bool:
    return "did you mean" in words


def described(value: Any) -> str:
    """Describe ``value`` in a few words, such as ``an array of shape [2, 3]``, without printing arrays or tables."""
    if value is None or isinstance(value, bool | int | float | str):
        return shown(repr(value))
    if isinstance(value, type):
        return f"the class {shown(value.__name__)}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {shown(value.__name__)}"
    kind = shown(type(value).__name__.removeprefix("nd"))  # NumPy's arrays are called ndarray
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and all(isinstance(d, int) for d in shape):
        return f"{article} {kind} of shape {shown(list(shape))}"
    if isinstance(value, list | tuple | set | frozenset) and value:
        return f"{article} {kind} of {shown(type(next(iter(value))).__name__)}"
    return f"{article} {kind}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_") or (_is_whole(value) and value in (0, 1))


def _is_number(value: Any) -> bool:
    scalar = getattr(value, "shape", None) == () and hasattr(value, "__float__") and not isinstance(value, str)
    return scalar or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _are_numbers(value: Any) -> bool:
    listed = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    return listed and all(map(_is_number, value))


def _are_names(value: Any) -> bool:
    listed = isinstance(value, Collection) and not isinstance(value, bytes | Mapping) and not hasattr(value, "shape")
    return isinstance(value, str) or (listed and all(isinstance(name, str) for name in value))


TEXT = Kind("a name", lambda value: isinstance(value, str))
NAMES = Kind("a name or glob, or a list of them", _are_names)
WHOLE = Kind("a whole number that 64 bits can hold", lambda value: _is_whole(value) and -(1 << 63) <= value < 1 << 63)
ABOVE_ZERO = Kind("a whole number above zero", lambda value: WHOLE.fits(value) and value > 0)
NUMBER = Kind("a number", _is_number)
FINITE = Kind("a finite number", lambda value: _is_number(value) and math.isfinite(value))
NUMBERS = Kind("a list of numbers", _are_numbers)
FLAG = Kind("True or False", _is_flag)
PATH = Kind("a path", lambda value: isinstance(value, str | os.PathLike))
FUNCTION = Kind("a function", callable)


def instance(kind: Any, words: str) -> Kind:
    return Kind(words, lambda value: isinstance(value, kind))


def whole(least: int) -> Kind:
    """Return the kind of whole numbers of at least ``least``."""
    return Kind(f"a whole number of at least {least}", lambda value: WHOLE.fits(value) and value >= least)


def number(least: float, most: float = math.inf, above: bool = False) -> Kind:
    """Return the kind of numbers from ``least`` to ``most``; ``above`` excludes ``least`` itself."""
    end = "" if most == math.inf else f" and at most {most:g}"
    return Kind(
        f"a number {'above' if above else 'of at least'} {least:g}{end}",
        lambda value: FINITE.fits(value) and (least < value if above else least <= value) and value <= most,
    )


def one_of(names: tuple[str, ...]) -> Kind:
    """Return the kind of texts that are one of ``names``."""
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def found_at(place: str) -> Any:
    """Import the object at ``place``, such as ``losses:LOSSES``: a module of the package, and a name in it."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"gradgraph.{module}"), name)


# --- values that users give by name: a loss, an optimizer, tensors ------------------------------------------


class Table(dict[str, E]):
    """A dict of entries by name, such as the table of all losses, backends or adapter kinds.

    Args:
        what: the word for an entry in messages, such as "loss".
        known_as: for names in other libraries, the name of the entry here, or advice if there is no such entry; used in
            messages.
    """

    def __init__(self, what: str, known_as: Mapping[str, str] = {}) -> None:
        super().__init__()
        self.what = what
        self._known_as = {bare(name): entry for name, entry in known_as.items()}

    def add(self, name: str, entry: E) -> E:
        """Add ``entry`` under a name.

        Raises:
            BuildError: if there is already an entry of this name, or the name is not valid.
        """
        TEXT.check(f"the name of a {self.what}", name)
        if not name.replace("-", "_").isidentifier():
            raise BuildError(f"'{shown(name)}' is not a valid name for a {self.what}; use a letter, followed by "
                             "letters, digits and underscores")  # fmt: skip
        if name in self:
            raise BuildError(f"there is a {self.what} '{shown(name)}' already; choose another name")
        self[name] = entry
        return entry

    def order(self, names: Iterable[str]) -> None:
        """Move the entries ``names`` to the end of the table, in this order, to make it independent of imports."""
        for name in list(names):
            self[name] = self.pop(name)

    def named(self, name: str) -> E:
        """Return the entry called ``name``.

        Raises:
            BuildError: if there is no such entry; the message suggests a similar one.
        """
        TEXT.check(f"the {self.what}", name)
        if name in self:
            return self[name]
        raise BuildError(f"there is no {self.what} '{shown(name)}'{self.hint(name)}")

    def hint(self, name: str) -> str:
        """Return a suffix for the message that ``name`` is unknown: a similar entry, or advice."""
        known = self.known_as(name)
        if known is None:
            return suggestion(name, self)
        return f"; did you mean '{known}'?" if known in self else f"; {known}"

    def known_as(self, name: str) -> str | None:
        """Return the entry that other libraries call ``name``, or advice; None if unknown."""
        alike = {**{bare(entry): entry for entry in self}, **self._known_as}
        return alike.get(bare(name)) or alike.get(bare(name).removesuffix("loss"))


class Makers(Table[Callable[..., T]]):
    """A table of functions that create objects, such as losses or optimizers, by name.

    Args:
        what: the word for a created object in messages, such as "loss".
        wanted: the class of the created objects.
        module: the public module that contains the functions, for messages.
        example: an example of a call, for messages.
        known_as: as for ``Table``.
    """

    def __init__(self, what: str, wanted: Any, module: str, example: str, known_as: Mapping[str, str] = {}) -> None:
        super().__init__(what, known_as)
        self._wanted, self._module, self._example = wanted, module, example

    def check_arguments(self, name: str, given: Iterable[str]) -> None:
        """Raise BuildError unless the function called ``name`` has arguments of all these names."""
        known = inspect.signature(self.named(name)).parameters
        for key in given:
            if key not in known:
                raise BuildError(f"the {self.what} {name} has no argument '{shown(key)}'{suggestion(key, known)}")

    def by_name(self, name: str, **arguments: Any) -> T:
        """Create the object called ``name``.

        Raises:
            BuildError: if the name or an argument is unknown, or an argument is missing; the message suggests a remedy.
        """
        self.check_arguments(name, arguments)
        parameters = inspect.signature(self[name]).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if missing := [p.name for p in needed if p.name not in arguments]:
            example = ", ".join(f"{key}=…" for key in missing)
            raise BuildError(f"the {self.what} {name} needs {listed(missing)}; write {name}({example})")
        return self[name](**arguments)

    def typed(self, text: str, more: Mapping[str, Any] = {}) -> T:
        """Create the object for ``text``, a name such as ``f1`` or a call such as ``top_k(k=3)``.

        ``more`` are further arguments.

        Raises:
            BuildError: if ``text`` is not a name or a call, or an argument is given twice.
        """
        name, arguments = self.written(text, more)
        return self.by_name(name, **arguments)

    def written(self, text: str, *more: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the name in ``text``, and the arguments in it and in ``more``.

        Raises:
            BuildError: as for :meth:`typed`.
        """
        name, arguments = self._call(text) if "(" in text else (text, {})
        for given in more:
            for key, value in given.items():
                if key in arguments:
                    raise BuildError(f"the {self.what} {shown(name)} is given '{shown(key)}' twice; give it once")
                arguments[key] = value
        return name, arguments

    def _call(self, text: str) -> tuple[str, dict[str, Any]]:
        try:
            call = ast.parse(text, mode="eval").body
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                known = inspect.signature(self.named(call.func.id)).parameters
                given = {**dict(zip(known, call.args, strict=False)), **{k.arg or "": k.value for k in call.keywords}}
                if len(call.args) <= len(known):
                    return call.func.id, {k: ast.literal_eval(value) for k, value in given.items()}
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
        raise BuildError(
            f"'{shown(text)}' is not a valid {self.what}; write a name, or a call such as '{self._example}'"
        )

    def given(self, value: Any) -> T:
        """Return ``value`` if it is an object of the wanted class, or create the object that a string names.

        Raises:
            BuildError: if ``value`` is anything else, such as a function that was passed instead of its result.
        """
        if isinstance(value, str):
            return self.typed(value)
        if not isinstance(value, self._wanted):
            ours = self.known_as(name_in_library(value)) if library_of(value) else None
            if ours is not None:
                said = f"that is {self._module}.{ours}" if ours in self else ours
                raise BuildError(f"the {self.what} is {described_foreign(value)}; {said}")
            raise BuildError(
                f"the {self.what} is {described(value)}; pass a name, or the result of a call such as "
                f"{self._module}.{self._example}"
            )
        made: T = value
        return made


def as_names(names: str | Iterable[str]) -> list[str]:
    """Return ``names`` as a list; a single string becomes a list of one name."""
    return [names] if isinstance(names, str) else list(names)


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the ``names`` that match the glob ``pattern``; only ``pattern`` itself if it is one of the names."""
    return [pattern] if pattern in names else fnmatch.filter(names, pattern)
