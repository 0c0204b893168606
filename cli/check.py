"""``gradgraph check``: check a model's gradients by finite differences, or whether a runtime supports the model."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import CHECKED_BACKENDS, PATH, Named
from gradgraph.cli.command import Command
from gradgraph.cli.options import build_option
from gradgraph.errors import DataError, ModelError, UnsupportedOperatorError, shown
from gradgraph.machine.limits import limited_memory

if TYPE_CHECKING:
    from gradgraph.verify.check_backend import BackendReport
    from gradgraph.verify.check_gradients import Report, TensorCheck


@click.command("check", cls=Command)
@click.argument("model", type=PATH)
@click.option(
    "--backend",
    cls=Named,
    type=CHECKED_BACKENDS,
    help="Do not run the model; list the nodes that this runtime would reject, run on the CPU, or compute incorrectly.",
)
@click.option(
    "--wrt",
    multiple=True,
    metavar="GLOB",
    help="Inputs and parameters to differentiate with respect to; repeatable. Default: all differentiable ones.",
)
@click.option("--output", "target", metavar="NAME", help="Output to differentiate. Default: all.")
@click.option("--data", type=PATH, help="Inputs to check at (.npz, or a folder of .npy). Default: random.")
@click.option(
    "--rows", type=click.IntRange(min=1), default=4, show_default=True, help="Number of samples of --data to use."
)
@build_option("size")
@build_option("seed")
@click.option("--seconds", type=click.IntRange(min=1), default=300, show_default=True, help="Time limit in seconds.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0.1),
    metavar="GB",
    help="Memory limit. Default: 1 GB plus 16 times the size of the file.",
)
@output.json_option
def command(
    model: Path,
    backend: str | None,
    wrt: tuple[str, ...],
    target: str | None,
    data: Path | None,
    rows: int,
    size: dict[str, Any],
    seed: int,
    seconds: int,
    memory: float | None,
    as_json: bool,
) -> None:
    """Validate MODEL (.onnx) and check its gradients against finite differences, tensor by tensor.

    Examples:
      gradgraph check model.onnx
      gradgraph check model.onnx --wrt 'conv1.*' --data train.npz --json
      gradgraph check step/ --backend coreml

    All problems of the model itself are listed in one run. The exit code is 1 if there are any, or if a
    gradient is wrong. Values are computed in float64. If ONNX's reference implementation cannot run the model,
    onnxruntime computes them in float32, with a wider tolerance, and the report says so.

    Dynamic dimensions get small sizes by default; set them with --size. A check that exceeds --seconds or --memory
    stops with an error.

    With --backend, MODEL (or a step folder) is compared with that runtime's operator support table; nothing is run.
    The exit code is 1 if a node would be rejected or computed incorrectly. CPU fallbacks and untested nodes are
    listed, but are not failures.
    """
    if backend is not None:
        if wrt or target or data is not None:
            raise click.UsageError("--wrt, --output and --data have no effect with --backend; omit them")
        from gradgraph.verify.check_backend import check_backend

        found = check_backend(model, backend)
        if as_json:
            output.emit_json({"ok": found.ok, "counts": found.counts, **dataclasses.asdict(found)})
        else:
            _print_findings(found)
        raise click.exceptions.Exit(int(not found.ok))
    from gradgraph.data.arrays.numpy_files import load_arrays
    from gradgraph.verify.check_gradients import check_gradients
    from gradgraph.verify.diagnose import diagnose

    feeds = None
    if data is not None:
        feeds = {name: array[:rows] if array.ndim else array for name, array in load_arrays(data).items()}
    try:
        with _bounded(model, seconds, memory), output.progress("tensors") as advance:
            report = check_gradients(
                model, feeds, output=target, wrt=list(wrt) or None, sizes=size or None, seed=seed, progress=advance
            )
    except (ModelError, UnsupportedOperatorError) as error:
        findings = diagnose(model, list(wrt) or None, target)
        if len(findings) < 2:  # the error already states a single finding
            raise
        for finding in findings:
            output.error(str(finding))
        words = f"{len(findings)} problems prevent computing the gradients of '{shown(model)}'"
        raise ModelError(words, findings, remedy="fix each, or export the model again") from error
    if as_json:
        output.emit_json({"ok": report.ok, **dataclasses.asdict(report)})
    else:
        _print_report(report)
    if not report.ok:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _bounded(model: Path, seconds: int, memory: float | None) -> Iterator[None]:
    """Limit the time and (on Linux) the memory of the check in this context, as a model may require any amount."""
    held = sum(f.stat().st_size for f in model.parent.glob(f"{glob.escape(model.name)}*") if f.is_file())
    most = int(memory * 1e9) if memory else 1_000_000_000 + 16 * held

    def stop() -> None:
        output.error(f"checking '{shown(model)}' took longer than {seconds} seconds; pass small sizes with --size, or "
                     "raise --seconds")  # fmt: skip
        os._exit(1)  # nothing else ends a process that is inside a library's loop

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    try:
        with limited_memory(most):
            timer.start()
            yield
    except MemoryError:
        raise DataError(
            f"checking '{shown(model)}' took more than {most / 1e9:.3g} GB of memory",
            remedy="pass small sizes with --size, or raise --memory",
        ) from None
    finally:
        timer.cancel()


_SAID = {"untried": "not tested", "falls back": "CPU fallback", "refused": "rejected", "wrong": "computed incorrectly"}


def _print_findings(report: BackendReport) -> None:
    for note in report.notes:
        output.say(f"note: {note}")
    if not report.tested:
        output.say(f"note: this runtime's support table was not tested by gradgraph; its source: {report.source}")
    if report.findings:
        rows = ((f.file, f.node, f.verdict, f.reason) for f in report.findings)
        output.emit_table(["file", "node", "verdict", "reason"], rows)
    counts = ", ".join(f"{count} {_SAID[verdict]}" for verdict, count in report.counts.items())
    what = f"{report.runtime}, {report.nodes} nodes: {counts or 'all are supported according to its table'}"
    if report.ok:
        output.say(what)
    else:
        output.error(what)


def _verdict(tensor: TensorCheck) -> str:
    if not tensor.ok:
        return "WRONG"
    if tensor.kink:
        return "ok (next to a kink)" if tensor.resolved else "undecided (too close to a kink)"
    return "ok" if tensor.resolved else "ok (too small to decide)"


def _print_report(report: Report) -> None:
    if report.reason:
        output.say(f"note: checked with onnxruntime in float32, because {report.reason}")
    rows = []
    for t in report.tensors:
        rows.append((t.name, list(t.shape), f"{t.analytic:.6g}", f"{t.numeric:.6g}", f"{t.error:.1e}", _verdict(t)))
    numeric = ["gradient", "difference", "error"]
    output.emit_table(["tensor", "shape", *numeric, "ok"], rows, numeric)
    for finding in report.findings:
        output.say(f"note: {finding}")
    wrong = [t.name for t in report.tensors if not t.ok]
    what = f"{len(report.tensors)} tensors, {report.precision}, tolerance {report.tolerance:g}"
    if wrong:
        output.error(f"{len(wrong)} of {what}: the gradient of '{shown(wrong[0])}' is wrong")
    else:
        output.say(f"all gradients agree with finite differences ({what})")
