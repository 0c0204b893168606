"""Tables within pages, between two marks: git has their names there, and the site the whole tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Marked:
    """A table between ``<!-- title -->`` and ``<!-- end of title -->`` of a page.

    Attributes:
        page: the path of the page, from the root of the repository.
        title: which of its marks.
        table: makes the Markdown on the site.
        names: makes what the repository has in its place.
    """

    page: str
    title: str
    table: Callable[[], str]
    names: Callable[[], str]

    @property
    def marks(self) -> re.Pattern[str]:
        """The marks, and what stands between them."""
        return re.compile(rf"(?<=<!-- {self.title} -->\n).*?(?=\n<!-- end of {self.title} -->)", re.DOTALL)

    def write(self, folder: Path, content: str) -> None:
        """Replace what stands between the marks of the page in ``folder``."""
        path = folder / self.page
        text, found = self.marks.subn(lambda _: content, path.read_text("utf-8"))
        assert found == 1, f"{self.page} should have the marks of '{self.title}' once"
        path.write_text(text, "utf-8")


def table(*columns: str, rows: Iterable[str]) -> str:
    """A table in Markdown."""
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


def listed(names: Iterable[str], more: str) -> str:
    """Names as code, and a sentence on where to read more."""
    lines = textwrap.wrap(", ".join(f"`{name}`" for name in names) + ".", 120, break_on_hyphens=False)
    return "\n".join([*lines, "", more])
