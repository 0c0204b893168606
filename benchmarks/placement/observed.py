"""One step on the CUDA provider, according to its profile; run in the environment of ``standins``.

    python -m benchmarks.placement.observed JOB          JOB: fields of ``benchmarks.job.Job``, as JSON

Prints the fields of ``Observed`` as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir
import onnxruntime as ort

import gradgraph as gg
from benchmarks import profiling
from benchmarks.job import Job
from benchmarks.peers.gradgraph_step import Profiled, built
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cuda import ORT_CUDA
from gradgraph.backends.ort_cuda.cuda_kernels import on_host
from gradgraph.errors import GradgraphError
from gradgraph.runtime.execution.session import RuntimeOptions

STEPS = 3
Node = tuple[str, str, str]


@dataclass(frozen=True)
class Observed:
    """A step as onnxruntime ran it.

    Attributes:
        nodes: [name, operator, provider] of each executed node, including the Memcpy nodes that onnxruntime adds.
        others: the nodes of its other sessions: the first state, evaluation, prediction, batches of another size.
        by_design: the names of nodes that compute with shapes, which onnxruntime keeps on the CPU.
        memories: the kinds of memory of state tensors and batch.
        to_device, to_host: the bytes copied by a step whose batch is on the device.
        graphs: the number of CUDA graphs launched by four steps (the first two record), or why there are none.
    """

    nodes: list[Node]
    others: list[Node]
    by_design: list[str]
    memories: list[str]
    to_device: int
    to_host: int
    graphs: int | str


class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("kernels", "graphs", "to_device", "to_host")]

    @classmethod
    def now(cls) -> Counts:
        counts = cls()
        ctypes.CDLL("libcudart.so.13").standin_counts(ctypes.byref(counts))
        return counts


def observed(job: Job) -> Observed:
    definition = built(job)
    nodes, others = profiled(job, definition)
    by_design: set[str] = set()
    if any(provider != "CUDAExecutionProvider" for _, _, provider in (*nodes, *others)):
        models = [for_machine(model, ORT_CUDA) for model in (definition.train, definition.eval, definition.init)]
        by_design = {node.name or "" for model in models for node in on_host(ir.from_proto(model))}
    trainer = gg.Trainer(definition, device="cuda")
    batch = on_device(job)
    for _ in range(2):  # each binds one of the two sets of state tensors
        trainer.step(batch)
    before = Counts.now()
    trainer.step(batch)
    after = Counts.now()
    values = [*trainer.state.values(0).values(), *trainer.state.values(1).values(), *batch.values()]
    memories = sorted({value.device_name() for value in values})
    del trainer, values
    gc.collect()
    return Observed(
        nodes,
        others,
        sorted(by_design),
        memories,
        after.to_device - before.to_device,
        after.to_host - before.to_host,
        captured(definition, batch),
    )


def on_device(job: Job) -> dict[str, Any]:
    return {n: ort.OrtValue.ortvalue_from_numpy(a, "cuda", 0) for n, a in job.batch().items()}


def profiled(job: Job, definition: gg.Step) -> tuple[list[Node], list[Node]]:
    """Return the nodes of the step's session for the whole batch (the largest), and the nodes of the others."""
    batch = job.batch()
    is_open = any(not isinstance(size, int) for tensor in definition.manifest.inputs for size in tensor.shape)
    with tempfile.TemporaryDirectory() as folder:
        trainer = gg.Trainer(
            definition, device="cuda", options=Profiled(threads=job.threads, prefix=f"{folder}/profile")
        )
        for _ in range(STEPS):
            trainer.step(batch)
        trainer.evaluate([batch])
        trainer.predict(batch["x"], batch_size=len(batch["x"]))
        if is_open:
            trainer.step({name: array[: len(array) // 2] for name, array in batch.items()})
        del trainer
        gc.collect()
        sessions = [placed(path) for path in Path(folder).iterdir()]
    of_batch = max((s for s in sessions if s.runs == STEPS), key=lambda s: len(s.nodes))
    return of_batch.nodes, [node for s in sessions if s is not of_batch for node in s.nodes]


class Session(NamedTuple):
    """A session according to its profile: the number of runs, and its nodes."""

    runs: int
    nodes: list[Node]


def placed(profile: Path) -> Session:
    events = profiling.read(profile)
    runs = sum(event["name"] == "model_run" for event in events)
    return Session(runs, sorted({(k.node, k.operator, k.provider) for k in profiling.kernels(events, runs)}))


def captured(definition: gg.Step, batch: dict[str, Any]) -> int | str:
    """Return the number of CUDA graphs launched by four steps, or why there are none."""
    options = RuntimeOptions(cuda_graph=True)
    before = Counts.now().graphs
    try:
        trainer = gg.Trainer(definition, device="cuda", options=options)
        for _ in range(4):
            trainer.step(batch)
    except GradgraphError as refusal:
        trainer = gg.Trainer(definition, device="cuda", options=replace(options, cuda_graph="auto"))
        trainer.step(batch)
        return str(refusal)
    return int(Counts.now().graphs - before)


def main() -> None:
    print(json.dumps(asdict(observed(Job(**json.loads(sys.argv[1]))))))


if __name__ == "__main__":
    main()
