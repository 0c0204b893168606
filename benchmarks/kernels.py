"""Times each native kernel against onnxruntime's, on the nodes of the benchmarks' training steps.

    python -m benchmarks.kernels                          print ratios for all small networks
    python -m benchmarks.kernels mobilenetv2 gpt --save   and merge them into docs/how-it-works/native.json

Only the kernels that a Trainer would use are timed, with ``--all`` also the others. A node is timed by itself, in two
sessions that take turns: with the native kernel, and in the form used without native kernels. With one thread, the
default, the clock is the processor time of that thread, so a busy machine hardly matters; Transposes, whose kernel
divides work that onnxruntime does not, are timed with ``--threads 2``. Rewrites of several nodes
(attention, fused activations, chains) are not timed here; ``benchmarks.run`` times whole steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

import gradgraph as gg
from benchmarks import networks
from benchmarks.results import DOCS
from benchmarks.workloads import ALL, WORKLOADS
from gradgraph.backends import BACKENDS
from gradgraph.backends.engine import lower, lowered, opened
from gradgraph.backends.forms import Call
from gradgraph.backends.ort_cpu.conv.conv_sequences import write_images
from gradgraph.backends.ort_native.library import DOMAIN
from gradgraph.backends.ort_native.native_transposes import is_faster, view_of, write_kernel
from gradgraph.files.models import to_proto
from gradgraph.frontend import from_torch
from gradgraph.graph.builder import Builder
from gradgraph.graph.nodes import is_standard
from gradgraph.graph.shapes import all_sizes
from gradgraph.machine.hardware import levels_in_use, processor
from gradgraph.passes.normal.edit import nodes_of
from gradgraph.rules.registry import key_of
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session
from gradgraph.runtime.execution.tuner import can_stand_alone, choice_of, model_of_node, serves

MEASURED = DOCS / "native.json"
STOCK, NATIVE = "ort-cpu", "ort-cpu-native"
OPTIMIZERS = {"gpt": "adamw", "cnn": "sgd(momentum=0.9)"}  # plain SGD for others
OTHER_DATA = np.ones(1 << 21, np.float32)  # 8 MB, more than a second-level cache
SECONDS, FEWEST, MOST = 0.15, 7, 300  # the time of a session, and the numbers of runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"by default {', '.join(WORKLOADS)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="time native forms that are not used for these sizes, too")
    parser.add_argument("--save", action="store_true", help=f"merge the results into {MEASURED.name}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.workloads) - set(ALL)):
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(ALL)}")
    seen: set[str] = set()
    rows = []
    for name in arguments.workloads or WORKLOADS:
        step = step_of(name)
        for candidate in chain(native_nodes(step, seen), transposes(step, seen)):
            if not (arguments.all or candidate.used):
                continue
            rows.append(row := {"workload": name, **timed(candidate, arguments.threads)})
            used = "used" if row["used"] else "-"
            print(f"{name:12} {row['ratio']:6.2f} {used:5} {row['form']} {row['sizes']}", flush=True)
    if arguments.save:
        save(rows, arguments.threads)


def step_of(name: str) -> ir.Model:
    """Return the training step of a workload, with known sizes, as native forms see it."""
    batch = ALL[name].batch()
    names = list(ALL[name].inputs)
    import torch

    inputs = tuple(torch.from_numpy(batch[n]) for n in names)
    model = from_torch(networks.make(name), inputs, input_names=names, output_names=["logits"], dynamic={})
    step = gg.build(model, loss=ALL[name].loss, optimizer=OPTIMIZERS.get(name, "sgd"))
    return write_images(opened(step.train, {}))


@dataclass(frozen=True)
class Candidate:
    """A node that a native kernel can compute.

    Attributes:
        node: of a model for onnxruntime alone.
        form: the name of the form, or of the rewrite, that inserts the kernel.
        used: whether a Trainer uses the kernel for these sizes.
        write: inserts the kernel into a model with only this node, in place.
        before: called before each run, untimed.
    """

    node: ir.Node
    form: str
    used: bool
    write: Callable[[ir.Model], object]
    before: Callable[[], object] = lambda: None


def native_nodes(model: ir.Model, seen: set[str]) -> Iterator[Candidate]:
    """Yield each node with a native form that supports it, once for all equal calls; ``seen`` is updated."""
    op = Builder()
    forms = BACKENDS[NATIVE].lowering.forms
    for node in nodes_of(model):
        for form in forms.of(node):
            call = Call.of(op, node)
            key = f"{form.name} {call.key}"
            if key not in seen and can_stand_alone(node) and serves(form, node):
                seen.add(key)
                write = partial(lower, backend=BACKENDS[NATIVE], choose=choice_of(form, key_of(node)))
                yield Candidate(node, form.name, bool(form.when(call)), write)


def transposes(model: ir.Model, seen: set[str]) -> Iterator[Candidate]:
    """Yield each Transpose of the lowered ``model``, once for all equal calls; both are updated.

    Not those that onnxruntime moves or fuses into others.
    """
    lowered(model, BACKENDS[NATIVE])
    for node in model.graph:
        used = key_of(node) == (DOMAIN, "Permute")
        if not (used or is_standard(node, "Transpose")) or node.inputs[0].dtype != ir.DataType.FLOAT:
            continue
        node.domain, node.op_type = "", "Transpose"
        view, key = view_of(node), f"transpose {Call.of(Builder(), node).key}"
        if key not in seen and view is not None and used == is_faster(view):
            seen.add(key)
            yield Candidate(node, "transpose", used, write_transpose, OTHER_DATA.sum)


def write_transpose(model: ir.Model) -> None:
    write_kernel(model, next(iter(model.graph)))


def timed(candidate: Candidate, threads: int) -> dict[str, Any]:
    """Return the row of a candidate: its call, the time of both sessions in ms, and their ratio."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    node = candidate.node
    call = Call.of(Builder(), node)
    models = {name: model_of_node(node) for name in (STOCK, NATIVE)}
    lower(models[STOCK], BACKENDS[STOCK])
    candidate.write(models[NATIVE])
    runs = {name: runner(model, name, threads) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    while (count := len(times[NATIVE])) < FEWEST or (count < MOST and sum(times[STOCK]) < SECONDS):
        for name, run in runs.items():
            candidate.before()
            start = clock()
            run()
            times[name].append(clock() - start)
    stock, native = (min(times[name]) for name in (STOCK, NATIVE))
    sizes = [None if x is None else list(all_sizes(x.shape) or ()) for x in call.inputs]
    return {
        "form": candidate.form,
        "operator": node.op_type,
        "domain": node.domain,
        "sizes": sizes,
        "attributes": {k: v for k, v in call.attrs.items() if not isinstance(v, ir.Graph)},
        "stock": round(stock * 1e3, 4),
        "native": round(native * 1e3, 4),
        "ratio": round(native / stock, 3),
        "used": candidate.used,
    }


def runner(model: ir.Model, backend: str, threads: int) -> Callable[[], None]:
    options = RuntimeOptions(threads=threads, native_kernels=backend == NATIVE)
    session = create_session(to_proto(model), Placement.choose("cpu"), options)
    rng = np.random.default_rng(0)
    binding = session.io_binding()
    for value in session.get_inputs():
        binding.bind_cpu_input(value.name, rng.normal(size=value.shape).astype(np.float32))
    for value in session.get_outputs():
        binding.bind_output(value.name, "cpu", 0)
    session.run_with_iobinding(binding)
    return lambda: session.run_with_iobinding(binding)


def save(rows: list[dict[str, Any]], threads: int) -> None:
    """Write rows to the file, in place of earlier ones of the same level, threads, form and call."""
    where = {"level": levels_in_use()[-1], "threads": threads, "processor": processor(), "onnxruntime": ort.__version__}
    earlier = json.loads(MEASURED.read_text()) if MEASURED.exists() else []
    merged = {_key(row): row for row in [*earlier, *({**where, **row} for row in rows)]}
    lines = ",\n".join(json.dumps(merged[key]) for key in sorted(merged))
    MEASURED.write_text(f"[\n{lines}\n]\n")


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("level", "threads", "workload", "form", "sizes", "attributes"))


if __name__ == "__main__":
    main()
