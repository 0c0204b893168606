"""The tables of names on the pages of losses, metrics, optimizers, images, ranks and mixed precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnx_ir as ir

from gradgraph.data.augment import AUGMENTATIONS, spec_augment
from gradgraph.graph.builder import Builder
from gradgraph.losses import LOSSES, Loss
from gradgraph.metrics import METRICS
from gradgraph.optim import modifiers
from gradgraph.optim.recipes import FAMILIES, RECIPES
from gradgraph.optim.schedules import SCHEDULES
from gradgraph.parallel.data_parallel import COMPRESSIONS
from gradgraph.passes.autocast import FOLLOWS, MOVES, PRODUCTS
from gradgraph.step.finishes import FINISHES
from tests.pages.marked import Marked, listed, table

Table = Mapping[str, Callable[..., Any]]
MORE = "Details: `help({})` for one of them, or the table on the site (`make docs`)."


def losses() -> str:
    """The losses that have a name."""
    rows = [f"| `{name}({_arguments(f)})` | {_first(f)} | {_compared(f())} |" for name, f in LOSSES.items()]
    return table("call", "formula", "outputs read, and targets", rows=rows)


def metrics() -> str:
    """The metrics."""
    return table("metric", "definition", rows=_calls(METRICS))


def finishes() -> str:
    """How metrics are computed from sums."""
    return table(
        "finish", "computed from the sums", rows=[f"| `{name}` | {_first(f)} |" for name, f in FINISHES.items()]
    )


def optimizers() -> str:
    """The optimizers, with what they keep."""
    rows = [f"| `{name}({_arguments(f)})` | {_state(f)} | {_first(f)} |" for name, f in RECIPES.items()]
    return table("call", "state", "description", rows=rows)


def links() -> Table:
    """The transforms of ``gg.optim.chain``."""
    return {n: getattr(m, n) for m in (modifiers, *FAMILIES) for n in m.__all__ if n not in RECIPES}


def augmentations() -> Table:
    """The augmentations of images."""
    return {name: make for name, make in AUGMENTATIONS.items() if make.__module__ != spec_augment.__module__}


def precision() -> str:
    """The operators by the precision that they are computed in."""
    computed = {
        "low precision": PRODUCTS,
        "the precision of their inputs, values unchanged": MOVES,
        "the precision of their inputs, rounded": FOLLOWS,
    }
    rows = [f"| {what} | {', '.join(f'`{name}`' for name in sorted(names))} |" for what, names in computed.items()]
    return table("computed in", "operators", rows=[*rows, "| float32 | all others |"])


def _plain(page: str, title: str, found: Callable[[], Table], columns: tuple[str, str], more: str) -> Marked:
    return Marked(page, title, lambda: table(*columns, rows=_calls(found())), lambda: listed(found(), more))


def _calls(found: Table) -> list[str]:
    return [f"| `{name}({_arguments(f)})` | {_first(f)} |" for name, f in found.items()]


def _state(recipe: Callable[..., Any]) -> str:
    """What it keeps of a matrix, by the names of its slots; momentum on, where there is one."""
    momentum = {"momentum": 0.9} if "momentum" in inspect.signature(recipe).parameters else {}
    builder = Builder()
    weight = builder.wrap(ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape((2, 3))))
    sizes = {(2, 3): "n", (2, 1): "rows", (1, 3): "columns", (10, 2, 3): "10n"}
    slots = [s for link in recipe(**momentum).transforms for s in link.init(builder, [weight]).items()]
    return ", ".join(f"`{name}` {sizes[tuple(first.shape)]}" for name, (first,) in slots if first is not None) or "none"


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


LOSSES_PAGE, METRICS_PAGE, OPTIMIZERS_PAGE = (f"docs/reference/{n}.md" for n in ("losses", "metrics", "optimizers"))
WHAT = ("call", "description")
MARKED = [
    Marked(LOSSES_PAGE, "losses", losses, partial(listed, LOSSES, MORE.format("gg.losses.mse"))),
    Marked(METRICS_PAGE, "metrics", metrics, partial(listed, METRICS, MORE.format("gg.metrics.f1"))),
    Marked(METRICS_PAGE, "finishes", finishes, partial(listed, FINISHES, "The site (`make docs`) has their formulas.")),
    Marked(OPTIMIZERS_PAGE, "optimizers", optimizers, partial(listed, RECIPES, MORE.format("gg.optim.adamw"))),
    _plain(OPTIMIZERS_PAGE, "links", links, WHAT, MORE.format("gg.optim.scale_by_adam")),
    _plain(OPTIMIZERS_PAGE, "schedules", lambda: SCHEDULES, WHAT, MORE.format("gg.optim.cosine")),
    _plain("docs/how-to/images.md", "augmentations", augmentations, ("call", "what it does"),
           MORE.format("gg.augment.flip")),
    _plain("docs/how-to/many-machines.md", "compressions", lambda: COMPRESSIONS, ("call", "what is sent"),
           "`gradgraph train --help` names them, too. The site (`make docs`) has a table of them."),
    Marked("docs/how-to/mixed-precision.md", "operators", precision, precision),
]  # fmt: skip
