"""The options of ``gradgraph surgery`` that are about adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH, Briefly, Named
from gradgraph.errors import shown

Change = tuple[str, Callable[[Any], Any]]
_OPTIONS = [
    click.option("--lora", "adapted", multiple=True, metavar="GLOB", help="Adapters on these layers. Repeatable."),
    click.option("--kind", cls=Named, type=Briefly("surgery.adapter_kinds.adapter_table:KINDS"), default="lora",
                 show_default=True, help="With --lora."),
    click.option("--rank", type=click.IntRange(min=1), default=8, show_default=True, help="With --lora."),
    click.option("--alpha", type=float, help="With --lora: it counts alpha/rank times; twice the rank by default."),
    click.option("--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="With --lora."),
    click.option("--feedforward", multiple=True, metavar="GLOB", help="With ia3: of these, the input. Repeatable."),
    click.option("--adapter", type=PATH, metavar="FOLDER", help="Put in the adapters of a folder of PEFT."),
    click.option("--name", help="What adapters are called, where a model has several: of --lora, --adapter, --merge, "
                 "--save-adapter and --switchable."),
    click.option("--use", multiple=True, metavar="NAME=WEIGHT", help="How often adapters count. Repeatable."),
    click.option("--save-adapter", "saved", type=PATH, metavar="PATH", help="Also write the adapters: a folder "
                 "of PEFT, or a file .onnx_adapter of onnxruntime."),
    click.option("--merge", is_flag=True, help="Make adapters part of the weights."),
    click.option("--requantise", is_flag=True, help="With --merge: store weights that were quantised as they were."),
    click.option("--trained", type=PATH, metavar="FILE",
                 help="With --merge or --save-adapter: what training made of the weights."),
    click.option("--switchable", is_flag=True, help="Make adapters optional inputs, for onnxruntime's LoraAdapter."),
]  # fmt: skip


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def changes(
    ctx: click.Context,
    adapted: tuple[str, ...],
    adapter: Path | None,
    name: str | None,
    use: tuple[str, ...],
    saved: Path | None,
    merge: bool,
    requantise: bool,
    trained: Path | None,
    switchable: bool,
    seed: int,
    **low_rank: Any,
) -> Iterator[Change]:
    """What the options ask for, in words and as functions from model to model."""
    from gradgraph import surgery

    if trained is not None and not (merge or saved):
        raise click.UsageError("--trained is said of --merge and --save-adapter; add one of them, or leave it out", ctx)
    if requantise and not merge:
        raise click.UsageError("--requantise is said of --merge; add that, or leave it out", ctx)
    called: dict[str, Any] = {} if name is None else {"name": name}
    if adapted:
        said = f"adapters on {', '.join(adapted)}: a step of this model trains them alone"
        yield said, lambda m: surgery.lora(m, list(adapted), seed=seed, **called, **low_rank)
    if adapter is not None:
        yield f"adapters of {adapter}", lambda m: surgery.load_adapter(m, adapter, **called)
    if use:
        weights = dict(_weight(ctx, text) for text in use)
        yield f"adapters count {', '.join(use)}", lambda m: surgery.use_adapters(m, weights)
    if saved is not None:
        yield f"saved the adapters to {saved}", lambda m: _saved(m, saved, trained, name)
    if merge:
        yield "merged the adapters", lambda m: _merged(m, trained, name, requantise)
    if switchable:
        yield "adapters are optional inputs", lambda m: surgery.switchable(m, name=name)


def _weight(ctx: click.Context, text: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight, equals = 0.0, ""
    if not (name and equals):
        raise click.UsageError(f"--use '{shown(text)}' should be such as fr=0.5", ctx)
    return name, weight


def _saved(model: Any, path: Path, trained: Path | None, name: str | None) -> Any:
    from gradgraph import surgery

    surgery.save_adapter(model, path, trained, name=name)
    return model


def _merged(model: Any, trained: Path | None, name: str | None, requantise: bool) -> Any:
    from gradgraph import surgery

    errors: dict[str, float] = {}
    merged = surgery.merge_adapters(model, trained, names=name, requantise=requantise, errors=errors)
    for module, error in errors.items():
        output.say(f"{shown(module)}: rounded again, {error:.2%} off")
    return merged
