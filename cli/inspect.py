"""``gradgraph inspect``: show the contents of a model or a step folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import key_values, output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.errors import Finding, counted, listed, readable_bytes, shown


@click.command("inspect", cls=Command)
@click.argument("file", type=PATH)
@click.option("--train", multiple=True, metavar="GLOB", help="Show what would be trained with this option; repeatable.")
@click.option("--freeze", multiple=True, metavar="GLOB", help="Show what would be frozen with this option; repeatable.")
@click.option("--freeze-below", multiple=True, metavar="NAME",
              help="Show the parameters upstream of this value that would be frozen; repeatable.")  # fmt: skip
@click.option("--output", "target", metavar="NAME", help="Model output used by the loss. Default: the first one.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="For a step: MACs and memory estimate at this batch size."
)
@click.option("--size", multiple=True, callback=key_values.sizes, metavar="NAME=N",
              help="For a step: size of a dynamic dimension, such as sequence=128; repeatable.")  # fmt: skip
@click.option("--memory", "of_memory", is_flag=True, help="For a step: the breakdown of peak memory.")
@click.option("--html", "page", type=PATH, metavar="FILE", help="Write a page (.html) with graph, memory and weights.")
@click.option("--profile", is_flag=True, help="Time a step on a batch of --data, for the page.")
@click.option("--data", type=PATH, help="Samples for --profile: an .npz, a folder of .npy, images, ….")
@output.json_option
def command(
    file: Path,
    train: tuple[str, ...],
    freeze: tuple[str, ...],
    freeze_below: tuple[str, ...],
    target: str | None,
    batch_size: int | None,
    size: dict[str, int],
    of_memory: bool,
    page: Path | None,
    profile: bool,
    data: Path | None,
    as_json: bool,
) -> None:
    """Show the contents of FILE (.onnx), a step folder or a run's folder: inputs, outputs, weights, operators and their
    gradients.

    Examples:
      gradgraph inspect model.onnx --freeze 'backbone.*'
      gradgraph inspect model.onnx --freeze-below features
      gradgraph inspect step/ --batch-size 64
      gradgraph inspect step/ --memory --batch-size 8 --size sequence=128
      gradgraph inspect step/ --html step.html --profile --data train.npz

    For a step, --json prints its manifest and node counts ("train_written": before clean-up).
    The page is one file that needs no network, with a graph grouped by module in which each gradient is drawn
    next to its forward node. Without --profile, nothing is executed, and no file outside the model's folder is opened.
    """
    if profile != (data is not None) or (profile and page is None):
        raise click.UsageError(
            "--profile times a step for the page and requires --html and --data; give all three",
            click.get_current_context(),
        )
    if page is not None:
        _write_page(file, page, batch_size, size, data)
        if as_json:
            output.emit_json({"page": str(page)})
        return
    if file.is_dir():
        _inspect_step(file, batch_size, size, of_memory, as_json)
        return
    if of_memory:
        raise click.UsageError(
            f"--memory requires a step, but '{shown(file)}' is not a step folder; build one",
            click.get_current_context(),
        )
    from gradgraph.cli.describe import Selection, describe

    facts = describe(file, Selection(train, freeze, target, freeze_below))
    if as_json:
        output.emit_json(facts)
    else:
        _print_facts(facts)


def _write_page(file: Path, page: Path, batch_size: int | None, size: dict[str, int], data: Path | None) -> None:
    from gradgraph.export.step_page import save_page
    from gradgraph.step.step import Step

    if not file.is_dir():
        if data is not None:
            raise click.UsageError(f"--profile requires a step, but '{shown(file)}' is not a step folder; omit it")
        save_page(file, page)
    else:
        step, profiles = Step.load(file), None
        if data is not None:
            from gradgraph.runs.run_data import Reading
            from gradgraph.runtime.trainer import Trainer

            trainer = Trainer(step)
            samples = Reading(model=file).data(data, trainer.names)
            batch = dict(next(iter(trainer.prepare(samples, batch_size, shuffle=False).batches(0))))
            profiles = {name: trainer.profile(name or batch, batch if name else None) for name in step.manifest.parts}
        save_page(step, page, title=file.resolve().name, profiles=profiles, **_sizes(step, batch_size, size))
    output.say(f"wrote {page}; open it in a browser")


def _inspect_step(folder: Path, batch_size: int | None, size: dict[str, int], of_memory: bool, as_json: bool) -> None:
    from gradgraph.step.step import Step

    step = Step.load(folder)
    sizes = _sizes(step, batch_size, size)
    estimate: Any = None
    if of_memory:
        from gradgraph.runtime.execution.peak import peak

        estimate = peak(step, options=None, **sizes)
    elif sizes:
        from gradgraph.runtime.execution.memory import memory

        estimate = memory(step, options=None, **sizes)
    if as_json:
        known = {} if estimate is None else {"memory": estimate.as_data()}
        output.emit_json(json.loads(step.manifest.to_json()) | {"nodes": step.nodes} | known)
        return
    output.emit(step.summary(**sizes))
    if estimate is not None:
        output.emit(f"\nmemory\n{estimate}")


def _sizes(step: Any, batch_size: int | None, size: dict[str, int]) -> dict[str, int]:
    """Return the sizes of dynamic dimensions; print a note about dimensions without a size, which are assumed to be 1.

    ``batch_size`` applies to the symbolic first axis of the first input that has one.
    """
    from gradgraph.graph.shapes import size_factors

    opened = step.manifest.open_dimensions
    batch = next((d for spec in step.manifest.inputs for d in spec.shape[:1] if isinstance(d, str)), None)
    given = ({batch: batch_size} if batch_size is not None and batch is not None else {}) | size
    unsaid = [d for d in opened if not given.keys() & {d, *size_factors(d)}]
    if given and unsaid:
        output.say(
            f"note: {listed(unsaid)} {'is' if len(unsaid) == 1 else 'are'} assumed to be 1; set --size {unsaid[0]}=…"
        )
    return given


def _print_facts(facts: dict[str, Any]) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts["opset"].items())
    rows = {
        "producer": facts["producer"] or "unknown",
        "opset": f"{opsets} (IR {facts['ir_version']})",
        "nodes": f"{facts['nodes']:,}" + (f" and {facts['functions']} functions" if facts["functions"] else ""),
        "inputs": ", ".join(map(_signature, facts["inputs"])),
        "outputs": ", ".join(map(_signature, facts["outputs"])),
    }
    for what in ("columns", "classes"):
        named = facts["names"].get(what, {})
        rows |= {what: "; ".join(f"{name}: {listed(each)}" for name, each in named.items())} if named else {}
    for label, text in rows.items():
        output.emit(f"{label:10}{' '.join(shown(word) for word in text.split(' '))}")  # only single words are shortened
    _print_weights(facts["weights"])
    # tensors that might be mistaken for weights
    numbers = [n for n in facts["numbers"] if not n["dtype"].startswith(("int64", "int32", "bool"))]
    if numbers:
        output.emit("")
        table = ((n["name"], n["dtype"], _dims(n["shape"]), n["reason"]) for n in numbers)
        output.emit_table(["not trained unless named in full", "dtype", "shape", "reason"], table)
    output.emit("")
    output.emit_table(["operator", "count", "status"], ([*o.values()] for o in facts["operators"]), numeric=["count"])
    if facts["missing"]:
        output.emit("operators without a gradient between the trained weights and the output:")
        for node in facts["missing"]:
            output.emit(f"  {shown(node['operator'])} (node '{shown(node['node'])}')")
    for finding in facts["findings"]:
        output.say(f"note: {Finding(**finding)}")


def _print_weights(weights: list[dict[str, Any]]) -> None:
    if not weights:
        output.emit("weights   none")
        return
    output.emit("")
    rows = (
        (w["name"], w["dtype"], _dims(w["shape"]), readable_bytes(w["bytes"]), w["role"], w["reason"]) for w in weights
    )
    output.emit_table(["weight", "dtype", "shape", "size", "role", "reason"], rows, numeric=["size"])
    for role in ("trained", "frozen", "statistic"):
        chosen = [w for w in weights if w["role"] == role]
        if chosen:
            size = readable_bytes(sum(w["bytes"] for w in chosen))
            output.emit(f"{role}: {counted(len(chosen), 'tensor')}, {size}")


def _signature(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {tensor['dtype']}{_dims(tensor['shape'])}"


def _dims(shape: list[Any] | None) -> str:
    return "[…]" if shape is None else f"[{', '.join('?' if d is None else str(d) for d in shape)}]"
