"""Placement of the nodes of training steps by the real onnxruntime-gpu; needs no GPU, and measures no speed.

    python -m benchmarks.placement                     ResNet-50, GPT-2, then the workloads of the benchmark
    python -m benchmarks.placement resnet50 --optimizer sgd --dynamic
    python -m benchmarks.placement --table             the table ``cuda_kernels`` against the real kernels

The first run installs onnxruntime-gpu (260 MB) in an environment of its own, and compiles stand-ins for the libraries
of CUDA (Linux on x86-64; requires g++ and binutils). A ``Trainer`` with device="cuda" then trains each network there.
Its numbers are garbage, as kernels do nothing; but sessions, partitioning, the choice of kernels, copies between CPU
and device, bindings and the recording of CUDA graphs are onnxruntime's own. The exit code is 1 if nodes run on the CPU
(or are copied to it) other than by onnxruntime's design, or, with --table, if the gradient of a rule's case is placed
otherwise than the table predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environments import environment
from benchmarks.peer_processes import ROOT
from benchmarks.placement.observed import Node, Observed
from benchmarks.placement.rules import Verdict
from benchmarks.placement.standins import compiled
from benchmarks.run import prepared
from benchmarks.workloads import ALL, LARGE, LEARNING_RATES, WORKLOADS

NEEDS = (
    "onnxruntime-gpu==1.31.1",
    "nvidia-cuda-runtime==13.0.96",  # for its headers
    "nvidia-cuda-crt==13.0.88",
    "onnx==1.23.2",
    "onnx-ir==1.1.0",
    "onnx-shape-inference==0.4.0",
    "click",
    "rich",
    "safetensors",
)
CUDA = "CUDAExecutionProvider"
NAMES = [*LARGE, *WORKLOADS]


def main() -> None:
    arguments = parsed()
    python, libraries = prepare()
    if arguments.table:
        problems = compared(python, libraries)
        print("\n".join(problems) or "the table says what onnxruntime does")
        sys.exit(1 if problems else 0)
    strays = 0
    for name in arguments.workloads or NAMES:
        seen = run(python, libraries, "observed", json.dumps(prepared(name, arguments)))
        text, found = report(Observed(**json.loads(seen)))
        print(f"{ALL[name].title}, {arguments.optimizer}: {text}", flush=True)
        strays += found
    sys.exit(1 if strays else 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"by default {', '.join(NAMES)}")
    parser.add_argument("--table", action="store_true", help="compare the table of kernels, and run no network")
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="adamw")
    parser.add_argument(
        "--dynamic", action="store_true", help="leave the batch size open, and train on half a batch, too"
    )
    parser.set_defaults(device="cuda", tf32=False, threads=2)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.workloads) - set(ALL)):
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(NAMES)}")
    return arguments


def prepare() -> tuple[str, Path]:
    """Return the interpreter with onnxruntime-gpu, and the folder with the stand-ins."""
    python = environment("placement", NEEDS)
    (packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    libraries = ROOT / "build" / "placement"
    compiled(packages, libraries)
    return python, libraries


def run(python: str, libraries: Path, module: str, *arguments: str) -> str:
    """Return the last line that a module of this package prints in the environment of onnxruntime-gpu.

    Raises:
        subprocess.CalledProcessError: the module fails.
    """
    variables = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": str(ROOT)}
    command = [python, "-m", f"benchmarks.placement.{module}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=variables)
    return done.stdout.splitlines()[-1]


def report(seen: Observed) -> tuple[str, int]:
    """Return the text to print, and the number of nodes on the CPU (or copies) that are not by design."""
    away = [node for node in (*seen.nodes, *seen.others) if is_away(node)]
    strays = [node for node in away if not is_designed(node, seen.by_design)]
    placed = Counter(provider.removesuffix("ExecutionProvider") for _, _, provider in seen.nodes)
    graphs = seen.graphs if isinstance(seen.graphs, str) else f"{seen.graphs} CUDA graphs launched in 4 steps"
    lines = [
        ", ".join(f"{count} nodes on {provider}" for provider, count in placed.items())
        + f"; {len(seen.others)} in other sessions; {len(away) - len(strays)} on the CPU, or copies, by design",
        f"state and batch in {' and '.join(seen.memories)} memory; a step copies {seen.to_device} bytes to the device "
        f"and {seen.to_host} back",
        graphs,
        *(f"stray: {operator} (node '{name}')" for name, operator, _ in strays),
    ]
    return "\n  ".join(lines), len(strays)


def is_away(node: Node) -> bool:
    _, operator, provider = node
    return provider != CUDA or operator.startswith("Memcpy")


def is_designed(node: Node, by_design: Sequence[str]) -> bool:
    """Whether a node on the CPU computes with shapes, or copies such results to the device."""
    name, operator, _ = node
    return name in by_design or (operator == "MemcpyFromHost" and bool(by_design))


def compared(python: str, libraries: Path) -> list[str]:
    """Return a line for each difference of the table from onnxruntime; print the operators on the CPU."""
    problems: list[str] = json.loads(run(python, libraries, "kernels"))
    verdict = Verdict(**json.loads(run(python, libraries, "rules")))
    print(f"{verdict.gradients} gradients lowered for CUDA")
    for operator, names in verdict.foretold.items():
        rules = sorted({name.split("/")[0] for name in names})
        print(f"  {operator} on the CPU, in gradients of {', '.join(rules)}")
    return [*problems, *verdict.unforeseen, *verdict.refused]


if __name__ == "__main__":
    main()
