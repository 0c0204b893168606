"""``gradgraph tune``: time operator implementations on this machine and cache the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.options import device_option
from gradgraph.errors import BuildError, shown


@click.command("tune", cls=Command)
@click.argument("step", type=PATH)
@click.option("--batch-size", type=click.IntRange(1), help="Size of every dynamic dimension that --dim does not name.")
@click.option("--dim", multiple=True, metavar="NAME=SIZE", help="Size of one dynamic dimension; repeatable.")
@click.option("--threads", type=click.IntRange(1), help="Intra-op threads. Default: one per core.")
@device_option("time")
@output.json_option
def command(
    step: Path,
    batch_size: int | None,
    dim: tuple[str, ...],
    threads: int | None,
    device: Literal["auto", "cpu", "cuda"],
    as_json: bool,
) -> None:
    """Time all implementations of the operators of a STEP folder here, and cache the fastest for Trainer(tune=True).

    Example:
      gradgraph tune step/ --batch-size 64
    """
    from gradgraph.runtime.execution.session import Placement, RuntimeOptions
    from gradgraph.runtime.execution.tuner import Tuner, default_cache
    from gradgraph.step.step import Step

    definition = Step.load(step)
    sizes = _sizes(definition.manifest, batch_size, dim)
    placement = Placement.choose(device)
    rows: list[str] = []
    options = placement.settled(RuntimeOptions(threads=threads))
    tuner = Tuner(placement.trains_for(options), placement, options, default_cache(), rows.append)
    for train in definition.trains.values():
        tuner(train, sizes)
    if as_json:
        output.emit_json({"sizes": sizes, "backend": tuner.backend.name, "timed": len(rows), "choices": tuner.chosen})
        return
    for row in rows:
        output.emit(row)
    output.say(f"timed {len(rows)} operators for {tuner.backend.name}; {len(tuner.chosen)} choices in {tuner.cache}")


def _sizes(manifest: Any, batch_size: int | None, given: tuple[str, ...]) -> dict[str, int]:
    """Return the size of each dynamic dimension: from values such as ``batch=64``, otherwise ``batch_size``."""
    sizes: dict[str, int] = {}
    for text in given:
        name, _, size = text.partition("=")
        if not size.isdigit() or int(size) < 1:
            raise click.UsageError(f"'{shown(text)}' should be NAME=SIZE, such as batch=64")
        sizes[name] = int(size)
    specs = manifest.batch
    names = list(dict.fromkeys(d for s in specs for d in s.shape if isinstance(d, str)))
    for name in sizes:
        if name not in names:
            raise BuildError(
                f"the step has no dynamic dimension '{shown(name)}'; it has {', '.join(map(shown, names)) or 'none'}"
            )
    missing = [n for n in names if n not in sizes]
    if missing and batch_size is None:
        raise BuildError(
            f"the dimension '{shown(missing[0])}' is dynamic; set its size with --dim {shown(missing[0])}=SIZE, or "
            "all with --batch-size"
        )
    return sizes | dict.fromkeys(missing, batch_size or 1)
