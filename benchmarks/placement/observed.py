"""One step on the CUDA provider, as its profile tells; run in the environment and on the libraries of ``standins``.

    python -m benchmarks.placement.observed JOB          JOB: fields of ``benchmarks.job.Job``, as JSON

Prints a JSON object: fields of ``Observed``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

import gradgraph as gg
from benchmarks import profiling
from benchmarks.job import Job
from benchmarks.peers.gradgraph_step import Profiled, built
from gradgraph.errors import GradgraphError
from gradgraph.passes.lower import ORT_CUDA, for_machine
from gradgraph.passes.lower.cuda_kernels import on_host
from gradgraph.runtime.session import RuntimeOptions

STEPS = 3


@dataclass(frozen=True)
class Observed:
    """What onnxruntime did with a step.

    Attributes:
        nodes: [name, operator, provider] of all that ran, the Memcpy nodes that onnxruntime adds among them.
        by_design: names of those that compute with shapes, which onnxruntime keeps on the CPU.
        memories: kinds of memory that state tensors and batch lie in.
        to_device, to_host: bytes copied by a step whose batch is on the device.
        graphs: CUDA graphs launched by four steps, of which the first two record; or why it cannot be recorded.
    """

    nodes: list[tuple[str, str, str]]
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
    nodes = profiled(job, definition)
    strays_possible = any(provider != "CUDAExecutionProvider" for _, _, provider in nodes)
    by_design = on_host(ir.from_proto(for_machine(definition.train, ORT_CUDA))) if strays_possible else []
    trainer = gg.Trainer(definition, device="cuda")
    batch = on_device(job)
    for _ in range(2):  # each of the two sets of state tensors is bound in one
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
        sorted(n.name or "" for n in by_design),
        memories,
        after.to_device - before.to_device,
        after.to_host - before.to_host,
        captured(definition, batch),
    )


def on_device(job: Job) -> dict[str, Any]:
    return {n: ort.OrtValue.ortvalue_from_numpy(a, "cuda", 0) for n, a in job.batch().items()}


def profiled(job: Job, definition: gg.Step) -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        options = Profiled(threads=job.threads, prefix=f"{folder}/profile")
        trainer = gg.Trainer(definition, device="cuda", options=options)
        for _ in range(STEPS):
            trainer.step(dict(job.batch()))
        del trainer
        gc.collect()
        # one file is init.onnx's, which ran once
        largest = max(Path(folder).iterdir(), key=lambda path: path.stat().st_size)
        kernels = profiling.kernels(profiling.read(largest), 1)
    return sorted({(k.node, k.operator, k.provider) for k in kernels})


def captured(definition: gg.Step, batch: dict[str, Any]) -> int | str:
    """CUDA graphs launched by four steps, or why there are none."""
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
