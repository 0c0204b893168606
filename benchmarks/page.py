"""``docs/how-it-works/performance.md``, written from the results in ``performance.json`` beside it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import printed_table
from benchmarks.floor_section import floor_section
from benchmarks.printed_table import grid
from benchmarks.results import Result
from benchmarks.roster import NATIVE, OURS, PEERS, REAL_OURS, REAL_PEERS
from benchmarks.workloads import REAL

ORT_AIM = 0.70  # to onnxruntime-training, wherever it runs

INTRODUCTION = """# Performance

Whole training steps (forward, backward, update) on the CPU, against other ways to train. Written by `make bench`, with
its figures in [performance.json](performance.json); do not edit.

A section for each machine, the newest run first; the chart is of the first section.

![Time of a training step relative to PyTorch](performance.svg)
"""

AIMS = """PyTorch's is the better of eager and compiled. **Bold** reaches the aim, which stands in brackets. Where
the floor is above it, no graph of onnxruntime's products reaches it on this machine; native kernels multiply by other
means.
"""

OVER_TORCH = """Time of a step over that of the faster of PyTorch eager and compiled, and peak memory over the
smaller of theirs. `gradgraph` writes large tensors of the state over themselves (`RuntimeOptions(in_place="auto")`;
in rows from before 2026-11-24 it kept two of each). `gradgraph-lean` does so with all of them (`in_place=True`), and
computes the weights of attentions again (`recompute="attention"`).
"""

METHOD = """## How it is measured

- Every peer is a process of its own that starts from the same weights and batch, with the same number of threads and
  cores. The peers take turns, so that all are timed in the same minutes, and are stopped while it is another's turn.
  A figure is the median of the steps of all turns; only ratios within one row mean anything.
- The losses of the first three steps are compared with PyTorch's before anything is timed.
- Batch normalisation is in training mode; dropout is absent. The loss is cross-entropy
  (of the diffusion network: the mean squared error).
- Real sizes are networks of torchvision, transformers and diffusers with random weights, trained whole with AdamW, at
  batches whose steps fit 16 GB (`make bench ARGS="--sizes real"`).
- AdamW has PyTorch's defaults beside the learning rate. onnxsim, which has no AdamW, and onnx-ad, which has no
  optimizers, cannot.
- PyTorch has fused optimizer kernels and an allocator that keeps its memory (`MALLOC_*` variables): it is faster so.
  `torch.compile` compiles the network and the loss.
- gradgraph trains PyTorch's export (`torch.onnx`, inference form, as it comes). onnxruntime-training, onnxsim and
  onnx-ad get PyTorch's older export at opset 17 in training form, which suits them better: with LayerNormalization's
  optional outputs named for onnxruntime-training, Flatten written as Reshape for onnxsim, and the loss (onnxsim,
  onnx-ad) and update (onnx-ad) appended by the benchmark. JAX has the networks written once more.
- Memory is the peak of resident memory while training (after loading, building and compiling), less what the process
  held when its libraries were imported.
- The floor is what a step cannot avoid, in the same turns: each of its products and convolutions alone in onnxruntime's
  best form, warm, and one pass over the memory that it must touch. Rows up to 2026-11-23 have another floor: three
  times the arithmetic of a forward pass at the speed of onnxruntime's MatMul of 2048 x 2048 matrices.
- *Build* makes the graph; *session* is the first step less a usual one: onnxruntime's session, or compilation, which
  PyTorch shortens with what it remembers of earlier runs.

`python -m benchmarks.cuda` is the same for a CUDA device. It has only been run on the CPU, to see that it works, so no
such figures are here. `python -m benchmarks.run --help` shows how to time some workloads or peers, all with AdamW, with
an open batch size, or to see where a step spends its time (`--profile`).
"""


def page(results: list[Result], floors: Sequence[Result] = ()) -> str:
    """The whole page; results other than those on the CPU with fixed sizes stay in the JSON file."""
    return "\n".join([INTRODUCTION, *map(_section, sections(results)), *floor_section(floors), METHOD])


def sections(results: list[Result]) -> list[list[Result]]:
    """The results that the page shows, by machine and number of threads; the newest run first, real sizes last."""
    groups: dict[tuple[bool, str, int], list[Result]] = {}
    for result in filter(_usual, results):
        groups.setdefault((result.workload in REAL, *result.place), []).append(result)
    newest_first = sorted(groups, key=lambda key: max(r.setup["date"] for r in groups[key]), reverse=True)
    return [groups[key] for key in sorted(newest_first, key=lambda key: key[0])]


def _usual(result: Result) -> bool:
    setup = result.setup
    return not setup["dynamic"] and setup["device"] == "cpu"


def _section(results: list[Result]) -> str:
    machine, threads = results[0].place
    real = results[0].workload in REAL
    peers = list(REAL_PEERS if real else PEERS)
    title = f"## {'Real sizes, ' * real}{machine}, {threads} threads\n\n{_versions(results)}\n"
    ratios = _against_torch(results) if real else _aims(results)
    parts = [title, _times(results, peers), ratios, _memory(results, peers), _once(results, peers), _kernels(results)]
    return "\n".join([*parts, _refusals(results)])


def _versions(results: list[Result]) -> str:
    found = {row["versions"] for r in results for row in r.rows.values() if "versions" in row}
    return f"{'; '.join(sorted(found))}. SGD where a row names no other optimizer."


def _against_torch(results: list[Result]) -> str:
    rows = [
        [r.title]
        + [printed_table.number(_over(r.step(peer), r.torch)) for peer in REAL_OURS]
        + [printed_table.number(_over(r.memory(peer), r.torch_memory)) for peer in REAL_OURS]
        for r in results
    ]
    head = ["", *(f"time, {peer}" for peer in REAL_OURS), *(f"memory, {peer}" for peer in REAL_OURS)]
    return f"### Relative to PyTorch\n\n{OVER_TORCH}\n" + grid(head, rows)


def _times(results: list[Result], peers: list[str]) -> str:
    rows = [[r.title, *(printed_table.milliseconds(r, p) for p in peers), r.setup["date"]] for r in results]
    return "### Milliseconds a step\n\n" + grid(["", *peers, "date"], rows)


def _aims(results: list[Result]) -> str:
    """Ratios, and the aims that they reach or miss."""
    rows = []
    for r in results:
        ours, native = (_against(_over(r.step(peer), r.torch), r.aim) for peer in (OURS, NATIVE))
        ort = _against(r.ratio(r.step("ort-training")), None if r.aim is None else ORT_AIM)
        memory = _against(_over(r.memory(OURS), r.torch_memory), 1.0)
        floors = (_over(r.floor, r.torch), r.ratio(r.floor))
        rows.append([r.title, ours, native, ort, memory, *map(printed_table.number, floors)])
    head = ["", "time / PyTorch's", "with native kernels", "time / onnxruntime-training's", "memory / PyTorch's"]
    head += ["floor / PyTorch's", "time / floor"]
    return f"### Against the aims\n\n{AIMS}\n" + grid(head, rows)


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _against(ratio: float | None, aim: float | None) -> str:
    if ratio is None or aim is None:
        return printed_table.number(ratio)
    return f"{f'**{ratio:.2f}**' if ratio <= aim else f'{ratio:.2f}'} ({aim:.2f})"


def _memory(results: list[Result], peers: list[str]) -> str:
    rows = [[r.title, *(printed_table.number(r.memory(p), 0) for p in peers)] for r in results]
    return "### Peak memory, MB\n\n" + grid(["", *peers], rows)


def _once(results: list[Result], peers: list[str]) -> str:
    rows = [
        [r.title, printed_table.number(r.rows[OURS].get("build")), *(printed_table.number(r.session(p)) for p in peers)]
        for r in results
    ]
    return "### Once, seconds\n\n" + grid(["", "gradgraph build", *(f"{p} session" for p in peers)], rows)


def _kernels(results: list[Result]) -> str:
    """The reasons why a step misses its aim: its floor, or the operators that take most of its time, and for what."""
    return "### What stands between a step and its aim\n\n" + "\n".join(map(_between, results)) + "\n"


def _between(r: Result) -> str:
    parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in r.rows[OURS].get("kernels", []))
    line = f"- {r.title}: {parts}"
    ratio, floor = r.ratio(r.torch), _over(r.floor, r.torch)
    if r.aim is None or ratio is None or floor is None or ratio <= r.aim or floor <= r.aim:
        return line
    return f"{line}. The floor alone is {floor:.2f} of PyTorch's time, and the aim {r.aim:.2f}"


def _refusals(results: list[Result]) -> str:
    lines = [f"- {r.title}, {peer}: {reason}" for r in results for peer, reason in printed_table.reasons(r).items()]
    return "### Who cannot, in their own words\n\n" + "\n".join(lines or ["Everybody can."]) + "\n"
