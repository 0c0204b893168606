"""Nothing that runs is reported to anybody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.kit.command_line import mlp

TRAIN = """
import gradgraph as gg, numpy as np
step = gg.build("model.onnx")
gg.Trainer(step).step({i.name: np.zeros([d if isinstance(d, int) else 2 for d in i.shape], i.dtype)
                       for i in step.manifest.batch})
"""


@pytest.mark.sweep(0)
def test_onnxruntime_keeps_no_identifier_of_the_machine(tmp_path: Path) -> None:
    """Without the switch it writes one to the user's cache, and events that wait to be sent."""
    onnx.save(mlp(), tmp_path / "model.onnx")
    left_out = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in left_out} | {"HOME": str(tmp_path)}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", TRAIN], check=True, cwd=tmp_path, env=environment, timeout=120)
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name or path.name == "Microsoft"]


def test_who_switches_it_on_has_it_on() -> None:
    code = "import gradgraph, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = os.environ | {"ORT_DISABLE_TELEMETRY": "0"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "0"
