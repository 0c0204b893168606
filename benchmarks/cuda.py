"""Checks that all kernels of a step run on a CUDA device, and times the step.

    python -m benchmarks.cuda                          ResNet-50 and GPT-2, then the whole table
    python -m benchmarks.cuda --device cpu mlp         the same code on the CPU, as a test

Requires onnxruntime-gpu instead of onnxruntime, and a CUDA build of PyTorch. Kernels that fell back to another
provider, according to the profile of each step, are printed, and make the exit code 1. Then the steps are timed against
PyTorch eager and compiled, all with the state and the batch on the device, gradgraph kernel by kernel and as CUDA
graphs. Libraries whose losses differ are not timed. All compute in float32 unless ``--tf32`` is set.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import onnxruntime
import torch

from benchmarks import printed_table
from benchmarks.measure import Plan
from benchmarks.peer_processes import ROOT
from benchmarks.results import save
from benchmarks.roster import DEVICE_PEERS, OURS
from benchmarks.run import measured, prepared, profile
from benchmarks.workloads import ALL, LARGE, LEARNING_RATES, WORKLOADS

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
NAMES = [*LARGE, *WORKLOADS]


def main() -> None:
    arguments = parsed()
    if arguments.device == "cuda" and (reason := no_device()):
        sys.exit(reason)
    print(printed_table.header(arguments.peers))
    strays = []
    for name in arguments.workloads or NAMES:
        stray = fallen_back(name, arguments)
        result = measured(name, arguments, DEVICE_PEERS, dict.fromkeys(DEVICE_PEERS, sys.executable))
        result.setup["tf32"] = arguments.tf32
        result.rows[OURS]["fallen_back"] = stray
        save(arguments.save, [result])
        print("\n".join([printed_table.lines(result, arguments.peers), *(f"  {line}" for line in stray)]), flush=True)
        strays += stray
    print(f"figures in {arguments.save}; {'some kernels fell back' if strays else 'no kernel fell back'}")
    sys.exit(1 if strays else 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"by default {', '.join(NAMES)}")
    parser.add_argument("--device", choices=PROVIDERS, default="cuda")
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="turns of each peer")
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="adamw")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tf32", action="store_true", help="let products round their factors to 10 bits, in all peers")
    parser.add_argument("--save", type=Path, default=ROOT / "build" / "benchmarks" / "cuda.json", help="JSON file")
    parser.set_defaults(dynamic=False, clock="wall", peers=list(DEVICE_PEERS))
    arguments = parser.parse_args()
    arguments.plan = Plan(arguments.rounds)
    if unknown := sorted(set(arguments.workloads) - set(ALL)):
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(NAMES)}")
    return arguments


def no_device() -> str:
    """Return why CUDA cannot be measured here, in one sentence, or ""."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device; run this on a machine with a GPU and a PyTorch that is built for CUDA"
    if PROVIDERS["cuda"] not in onnxruntime.get_available_providers():
        return "this onnxruntime has no CUDA provider; install onnxruntime-gpu in place of onnxruntime"
    return ""


def fallen_back(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return a line for each provider other than the device's that runs kernels of the step."""
    found = profile(prepared(name, arguments))
    if isinstance(found, str):
        return [f"{name}: {found}"]
    wanted = PROVIDERS[arguments.device]
    strays = {provider: nodes for provider, nodes in found.providers.items() if provider != wanted}
    return [f"{name}: {len(nodes)} kernels on {provider}: {', '.join(nodes)}" for provider, nodes in strays.items()]


if __name__ == "__main__":
    main()
