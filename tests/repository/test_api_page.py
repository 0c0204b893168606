"""The API reference is what the docstrings say, and every public name has one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.pages.api_page import GIVEN, PAGES, is_told_by_its_class, members, page, plain, public

MODULES = [part for _, parts in PAGES.values() for part in parts if isinstance(part, ModuleType)]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_no_addresses(name: str) -> None:
    assert " at 0x" not in page(name)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    assert [n for name, thing in public(module) if callable(thing) for n in untold(name, thing)] == []


def test_so_has_what_they_give() -> None:
    assert [n for name, thing in GIVEN.items() for n in untold(name, thing)] == []


def untold(name: str, thing: Any) -> Iterator[str]:
    """The name, and those of methods, without a docstring; a dataclass makes one up where nobody writes one."""
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    if not own or own.startswith(f"{name}("):
        yield name
    for member_name, member in members(thing) if inspect.isclass(thing) else ():
        if not plain(member).__doc__ and not is_told_by_its_class(member_name, thing):
            yield f"{name}.{member_name}"


def test_docstrings_become_markdown() -> None:
    from tests.pages.api_page import markdown

    text = """Fits ``x`` as :meth:`fit` does::

        y = f(x)

    Args:
        x, y: arrays;
            of any size.
        **more: the rest.

    Returns:
        A number.

    Raises:
        DataError: it does not fit.

    The end."""
    assert markdown(text) == [
        "Fits `x` as `fit` does:", "", "```", "y = f(x)", "```", "", "**Arguments**", "", "- `x`, `y`: arrays;",
        "  of any size.", "- `**more`: the rest.", "", "**Returns**", "", "A number.", "", "**Raises**", "",
        "- `DataError`: it does not fit.", "", "The end.",
    ]  # fmt: skip
