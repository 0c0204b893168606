"""A forked process ends although it inherits sessions of onnxruntime, whose threads it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.frontend import export, nn

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")

PARENT = """
import gc, os, sys, time
import numpy as np
import gradgraph as gg
from gradgraph.runtime.execution.session import RuntimeOptions

folder, way = sys.argv[1:]
batch = {"x": np.ones((4, 8), np.float32), "target": np.zeros(4, np.int64)}
held = gg.Trainer(folder, device="cpu", options=RuntimeOptions(threads=2))
runs = {"step": held.step, "evaluate": lambda x: held.evaluate([x]), "predict": held.predict}
runs[way](batch)
del runs
gc.disable()
cycle = [held]
cycle.append(cycle)
del cycle, held
time.sleep(0.5)  # until the threads of the pool wait instead of spinning
if os.fork() == 0:
    gc.collect()
    sys.exit()  # with all that an interpreter clears at its end
status = os.wait()[1]
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("way", ["step", "evaluate", "predict"])
def test_a_fork_may_collect_sessions_that_it_inherited(tmp_path: Path, way: str) -> None:
    model = export(nn.Linear(8, 3), {"x": ("batch", 8)})
    gg.build(model, "cross_entropy", gg.optim.sgd(0.1)).save(tmp_path / "step")
    command = [sys.executable, "-c", PARENT, str(tmp_path / "step"), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "0", done.stderr


def test_workers_that_are_forked_read_data_while_a_trainer_lives() -> None:
    """With PyTorch's loader, as in training on its data sets."""
    data = pytest.importorskip("torch.utils.data")
    model = export(nn.Linear(8, 3), {"x": ("batch", 8)})
    trainer = gg.Trainer(gg.build(model, "cross_entropy", gg.optim.sgd(0.1)))
    rows = [{"x": np.ones(8, np.float32), "target": np.int64(0)} for _ in range(32)]
    loader = data.DataLoader(rows, batch_size=8, num_workers=2, multiprocessing_context="fork")
    trainer.fit(loader, epochs=2)
    assert trainer.progress.steps == 8
