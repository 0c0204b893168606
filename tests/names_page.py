"""docs/reference/names.md, the README's row, and the tables of the pages of losses, metrics, precision and optimizers.

Run it to write them anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from gradgraph.frontend import functional, nn
from gradgraph.graph.builder import Builder
from gradgraph.losses import LOSSES, Loss
from gradgraph.metrics import METRICS
from gradgraph.optim import modifiers
from gradgraph.optim.recipes import FAMILIES, RECIPES
from gradgraph.optim.schedules import SCHEDULES
from gradgraph.passes.autocast import FOLLOWS, MOVES, PRODUCTS
from gradgraph.step.finishes import FINISHES

ROOT = Path(__file__).parents[1]
README, REFERENCE = ROOT / "README.md", ROOT / "docs" / "reference"
PAGE, OPTIMIZERS = REFERENCE / "names.md", REFERENCE / "optimizers.md"
LOSSES_PAGE = REFERENCE / "losses.md"
METRICS_PAGE = REFERENCE / "metrics.md"
PRECISION_PAGE = ROOT / "docs" / "how-to" / "mixed-precision.md"
HEAD = """# Losses, optimizers, layers

All that may be named, and what it takes. Names, arguments and defaults are PyTorch's. How they are used:
[training](../how-to/training.md), [networks in Python](../how-to/frontend.md).
"""
FOOT = "This page is made from the tables themselves by `python tests/names_page.py`.\n"
Table = Mapping[str, Callable[..., Any]]


def page() -> str:
    """The whole page."""
    links = {n: getattr(m, n) for m in (modifiers, *FAMILIES) for n in m.__all__ if n not in RECIPES}
    return "\n".join([
        HEAD,
        *_calls("Losses", "`gg.losses`: by name in `gg.build(model, loss=\"…\")` and `--loss`.", LOSSES),
        *_calls("Metrics", "`gg.metrics`: by name in `gg.build(model, metrics=\"…\")` and `--metric` "
                "([metrics](metrics.md)).", METRICS),
        *_calls("Optimizers", "`gg.optim`: by name in `gg.build(model, optimizer=\"…\")` and `--optimizer`. All take "
                "`groups`, `no_decay` and `layer_decay`, too ([optimizers](optimizers.md)).", RECIPES),
        *_calls("Links of a chain", "For optimizers of your own, in `gg.optim.chain(…)`.", links),
        *_calls("Schedules", "As `lr` of an optimizer.", SCHEDULES),
        *_families("Layers", "`gg.frontend.nn`", nn),
        *_families("Functions", "`gg.frontend.functional`", functional),
        FOOT,
    ])  # fmt: skip


def readme() -> str:
    """README.md with the names that the tables have."""
    row = f"Losses ({', '.join(LOSSES)}, or the model's own), optimizers ({', '.join(RECIPES)}, or your own chain)"
    return re.sub(r"Losses \(.*?, or your own chain\)", lambda found: row, README.read_text("utf-8"))


def optimizers() -> str:
    """docs/reference/optimizers.md with the table of optimizers."""
    rows = [f"| `{name}` | {_state(f)} | {_hyperparameters(f)} | {_first(f)} |" for name, f in RECIPES.items()]
    table = "\n".join(
        ["| optimizer | state | hyperparameters besides `lr` | what it is |\n|---|---|---|---|", *rows, ""]
    )
    return re.sub(r"\| optimizer \|.*?\n(?=\n)", lambda found: table, OPTIMIZERS.read_text("utf-8"), flags=re.DOTALL)


def _state(recipe: Callable[..., Any]) -> str:
    """What it keeps of a matrix, by the names of its slots; momentum on, where there is one."""
    momentum = {"momentum": 0.9} if "momentum" in inspect.signature(recipe).parameters else {}
    builder = Builder()
    weight = builder.wrap(ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape((2, 3))))
    sizes = {(2, 3): "n", (2, 1): "rows", (1, 3): "columns", (10, 2, 3): "10n"}
    slots = [s for link in recipe(**momentum).transforms for s in link.init(builder, [weight]).items()]
    return ", ".join(f"`{name}` {sizes[tuple(first.shape)]}" for name, (first,) in slots if first is not None) or "none"


def _hyperparameters(recipe: Callable[..., Any]) -> str:
    given = inspect.signature(recipe).parameters.values()
    return ", ".join(f"`{p.name}`" for p in given if p.name != "lr" and p.kind is not p.KEYWORD_ONLY)


def losses_page() -> str:
    """docs/reference/losses.md with the table of the losses that have a name."""
    rows = [f"| `{name}({_arguments(f)})` | {_first(f)} | {_compared(f())} |" for name, f in LOSSES.items()]
    table = "\n".join(["| call | formula | reads, and its targets |", "|---|---|---|", *rows])
    return re.sub(r"(<!-- table -->\n).*(\n<!-- end -->)", lambda found: found[1] + table + found[2],
                  LOSSES_PAGE.read_text("utf-8"), flags=re.DOTALL)  # fmt: skip


def metrics_page() -> str:
    """docs/reference/metrics.md with the tables of metrics and of finishes."""
    rows = [f"| `{name}({_arguments(f)})` | {_first(f)} |" for name, f in METRICS.items()]
    finishes = [f"| `{name}` | {_first(f)} |" for name, f in FINISHES.items()]
    tables = [["| metric | what it is |", "|---|---|", *rows], ["| finish | of the sums |", "|---|---|", *finishes]]
    text = METRICS_PAGE.read_text("utf-8")
    for title, table in zip(("metrics", "finishes"), tables, strict=True):
        marks = rf"(<!-- {title} -->\n).*(\n<!-- end of {title} -->)"
        text = re.sub(marks, lambda found, table=table: found[1] + "\n".join(table) + found[2], text, flags=re.DOTALL)
    return text


def precision_page() -> str:
    """docs/how-to/mixed-precision.md with the table of operators."""
    computed = {
        "the low precision": PRODUCTS,
        "that of what they read; they give its numbers on": MOVES,
        "that of what they read, rounded": FOLLOWS,
    }
    rows = [f"| {what} | {', '.join(f'`{name}`' for name in sorted(names))} |" for what, names in computed.items()]
    rows.append("| float32 | all others |")
    table = "\n".join(["| computed in | operators |", "|---|---|", *rows])
    return re.sub(r"(<!-- operators -->\n).*(\n<!-- end of operators -->)", lambda found: found[1] + table + found[2],
                  PRECISION_PAGE.read_text("utf-8"), flags=re.DOTALL)  # fmt: skip


def _compared(loss: Loss) -> str:
    """What it reads and compares with, as one cell of a table."""
    several = f"outputs {', '.join(loss.reads)}; " if len(loss.reads) > 1 else ""
    targets = [t.words if i == 0 else f"`{t.name}`: {t.words}" for i, t in enumerate(loss.targets)]
    return several + ("; ".join(targets) or "no target")


def _calls(title: str, where: str, table: Table) -> list[str]:
    rows = [f"| `{name}({_arguments(f)})` | {_first(f)} |" for name, f in table.items()]
    return [f"## {title}\n\n{where}\n\n| call | what it is |\n|---|---|", *rows, ""]


def _arguments(function: Callable[..., Any]) -> str:
    given = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given)


def _first(thing: Any) -> str:
    """The first paragraph of a docstring, as one cell of a table."""
    text = inspect.cleandoc(thing.__doc__).split("\n\n")[0]
    return " ".join(text.split()).replace("``", "`").replace("|", r"\|")


def _families(title: str, where: str, face: ModuleType) -> list[str]:
    """One row for each file that ``face`` gathers."""
    gathered = [m for m in vars(face).values() if inspect.ismodule(m) and set(m.__all__) <= set(face.__all__)]
    rows = [f"| {_first(m).rstrip('.')} | {', '.join(sorted(m.__all__, key=str.lower))} |"
            for m in gathered]  # fmt: skip
    return [f"## {title}\n\n{where}, one row a file.\n\n| what they are | names |\n|---|---|", *rows, ""]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    OPTIMIZERS.write_text(optimizers(), "utf-8")
    README.write_text(readme(), "utf-8")
    LOSSES_PAGE.write_text(losses_page(), "utf-8")
    METRICS_PAGE.write_text(metrics_page(), "utf-8")
    PRECISION_PAGE.write_text(precision_page(), "utf-8")
