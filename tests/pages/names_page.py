"""The tables of names on the pages of losses, metrics, optimizers and mixed precision.

Run it to write them anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from gradgraph.augment import AUGMENTATIONS, spec_augment
from gradgraph.graph.builder import Builder
from gradgraph.losses import LOSSES, Loss
from gradgraph.metrics import METRICS
from gradgraph.optim import modifiers
from gradgraph.optim.recipes import FAMILIES, RECIPES
from gradgraph.optim.schedules import SCHEDULES
from gradgraph.parallel.data_parallel import COMPRESSIONS
from gradgraph.passes.autocast import FOLLOWS, MOVES, PRODUCTS
from gradgraph.step.finishes import FINISHES

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
LOSSES_PAGE = REFERENCE / "losses.md"
METRICS_PAGE = REFERENCE / "metrics.md"
OPTIMIZERS_PAGE = REFERENCE / "optimizers.md"
IMAGES_PAGE = ROOT / "docs" / "how-to" / "images.md"
RANKS_PAGE = ROOT / "docs" / "how-to" / "many-machines.md"
PRECISION_PAGE = ROOT / "docs" / "how-to" / "mixed-precision.md"
Table = Mapping[str, Callable[..., Any]]


def optimizers_page() -> str:
    """docs/reference/optimizers.md with the tables of optimizers, links of chains and schedules."""
    rows = [f"| `{name}({_arguments(f)})` | {_state(f)} | {_first(f)} |" for name, f in RECIPES.items()]
    links = {n: getattr(m, n) for m in (modifiers, *FAMILIES) for n in m.__all__ if n not in RECIPES}
    text = _with_table(OPTIMIZERS_PAGE.read_text("utf-8"), "optimizers", "call", "state", "description", rows=rows)
    text = _with_table(text, "links", "call", "description", rows=_calls(links))
    return _with_table(text, "schedules", "call", "description", rows=_calls(SCHEDULES))


def images_page() -> str:
    """docs/how-to/images.md with the table of augmentations."""
    text = IMAGES_PAGE.read_text("utf-8")
    of_images = {name: make for name, make in AUGMENTATIONS.items() if make.__module__ != spec_augment.__module__}
    return _with_table(text, "augmentations", "call", "what it does", rows=_calls(of_images))


def ranks_page() -> str:
    """docs/how-to/many-machines.md with the table of compressions."""
    text = RANKS_PAGE.read_text("utf-8")
    return _with_table(text, "compressions", "call", "what is sent", rows=_calls(COMPRESSIONS))


def _with_table(text: str, title: str, *columns: str, rows: Iterable[str]) -> str:
    """The text with this table between the marks that have its title."""
    table = "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])
    marks = rf"(<!-- {title} -->\n).*(\n<!-- end of {title} -->)"
    return re.sub(marks, lambda found: found[1] + table + found[2], text, flags=re.DOTALL)


def _calls(table: Table) -> list[str]:
    return [f"| `{name}({_arguments(f)})` | {_first(f)} |" for name, f in table.items()]


def _state(recipe: Callable[..., Any]) -> str:
    """What it keeps of a matrix, by the names of its slots; momentum on, where there is one."""
    momentum = {"momentum": 0.9} if "momentum" in inspect.signature(recipe).parameters else {}
    builder = Builder()
    weight = builder.wrap(ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape((2, 3))))
    sizes = {(2, 3): "n", (2, 1): "rows", (1, 3): "columns", (10, 2, 3): "10n"}
    slots = [s for link in recipe(**momentum).transforms for s in link.init(builder, [weight]).items()]
    return ", ".join(f"`{name}` {sizes[tuple(first.shape)]}" for name, (first,) in slots if first is not None) or "none"


def losses_page() -> str:
    """docs/reference/losses.md with the table of the losses that have a name."""
    rows = [f"| `{name}({_arguments(f)})` | {_first(f)} | {_compared(f())} |" for name, f in LOSSES.items()]
    text = LOSSES_PAGE.read_text("utf-8")
    return _with_table(text, "losses", "call", "formula", "outputs read, and targets", rows=rows)


def metrics_page() -> str:
    """docs/reference/metrics.md with the tables of metrics and of finishes."""
    text = _with_table(METRICS_PAGE.read_text("utf-8"), "metrics", "metric", "definition", rows=_calls(METRICS))
    finishes = [f"| `{name}` | {_first(f)} |" for name, f in FINISHES.items()]
    return _with_table(text, "finishes", "finish", "computed from the sums", rows=finishes)


def precision_page() -> str:
    """docs/how-to/mixed-precision.md with the table of operators."""
    computed = {
        "low precision": PRODUCTS,
        "the precision of their inputs, values unchanged": MOVES,
        "the precision of their inputs, rounded": FOLLOWS,
    }
    rows = [f"| {what} | {', '.join(f'`{name}`' for name in sorted(names))} |" for what, names in computed.items()]
    rows.append("| float32 | all others |")
    return _with_table(PRECISION_PAGE.read_text("utf-8"), "operators", "computed in", "operators", rows=rows)


def _compared(loss: Loss) -> str:
    """What it reads and compares with, as one cell of a table."""
    several = f"outputs {', '.join(loss.reads)}; " if len(loss.reads) > 1 else ""
    targets = [t.words if i == 0 else f"`{t.name}`: {t.words}" for i, t in enumerate(loss.targets)]
    return several + ("; ".join(targets) or "no target")


def _arguments(function: Callable[..., Any]) -> str:
    given = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given)


def _first(thing: Any) -> str:
    """The first paragraph of a docstring, as one cell of a table."""
    text = inspect.cleandoc(thing.__doc__).split("\n\n")[0]
    return " ".join(text.split()).replace("``", "`").replace("|", r"\|")


PAGES = {
    IMAGES_PAGE: images_page,
    LOSSES_PAGE: losses_page,
    METRICS_PAGE: metrics_page,
    OPTIMIZERS_PAGE: optimizers_page,
    PRECISION_PAGE: precision_page,
    RANKS_PAGE: ranks_page,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), "utf-8")
