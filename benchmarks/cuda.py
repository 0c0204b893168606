"""The step on a CUDA device: is every kernel there, and how long does it take.

    python -m benchmarks.cuda                          ResNet-50 and GPT-2, then the whole table
    python -m benchmarks.cuda --device cpu mlp         the same code on the CPU, to see that it works

Needs onnxruntime-gpu in place of onnxruntime, and a PyTorch built for CUDA. First the profile of each step is read:
a kernel that fell back to another provider is reported, and makes the exit code 1. Then the steps are timed against
PyTorch eager and compiled, with the state and the batch on the device, as calls and as captured CUDA graphs.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import table
from benchmarks.measure import Plan
from benchmarks.roster import DEVICE_PEERS
from benchmarks.run import measured, prepared, profile
from benchmarks.workloads import LARGE, WORKLOADS

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"by default {', '.join([*LARGE, *WORKLOADS])}")
    parser.add_argument("--device", choices=PROVIDERS, default="cuda")
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--threads", type=int, default=2)
    parser.set_defaults(dynamic=False, peers=list(DEVICE_PEERS))
    arguments = parser.parse_args()
    arguments.plan = Plan(arguments.rounds)
    names = arguments.workloads or [*LARGE, *WORKLOADS]
    strays = [line for name in names for line in fallen_back(name, arguments)]
    print("\n".join(strays or ["no kernel fell back"]))
    print(table.header(arguments.peers))
    for name in names:
        result = measured(name, arguments, DEVICE_PEERS, dict.fromkeys(DEVICE_PEERS, sys.executable))
        print(table.lines(result, arguments.peers))
    sys.exit(1 if strays else 0)


def fallen_back(name: str, arguments: argparse.Namespace) -> list[str]:
    """Kernels of a step that another provider runs than the one of the device, a line for each provider."""
    found = profile(prepared(name, arguments))
    if isinstance(found, str):
        return [f"{name}: {found}"]
    wanted = PROVIDERS[arguments.device]
    strays = {provider: nodes for provider, nodes in found.providers.items() if provider != wanted}
    return [f"{name}: {len(nodes)} kernels on {provider}: {', '.join(nodes)}" for provider, nodes in strays.items()]


if __name__ == "__main__":
    main()
