"""Explanations, attacks and adversarial training run in onnxruntime-node, with the results of Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import gradgraph as gg
from gradgraph.frontend import Module, export, manual_seed, nn
from gradgraph.frontend import functional as F
from tests.kit.running import run
from tests.web import test_javascript

pytestmark = test_javascript.pytestmark

SCRIPT = """
import ort from {module};
import {{ readFileSync }} from "node:fs";
for (const {{ file, feeds }} of JSON.parse(readFileSync("job.json", "utf8"))) {{
  const session = await ort.InferenceSession.create(file);
  const given = Object.fromEntries(Object.entries(feeds).map(([name, {{ data, dims, type }}]) =>
    [name, new ort.Tensor(type, type === "int64" ? data.map(BigInt) : data, dims)]));
  const found = await session.run(given);
  console.log(JSON.stringify(Object.fromEntries(
    Object.entries(found).map(([name, {{ data, dims }}]) => [name, {{ dims, data: Array.from(data, Number) }}]))));
}}
"""


class Picture(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 3)

    def forward(self, x: Any) -> Any:
        return self.head(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))


def in_node(models: list[tuple[onnx.ModelProto, dict[str, np.ndarray]]], folder: Path) -> list[dict[str, np.ndarray]]:
    """The outputs of each model for its feeds."""
    jobs = []
    for i, (model, feeds) in enumerate(models):
        onnx.save(model, folder / f"{i}.onnx")
        jobs.append({"file": f"{i}.onnx", "feeds": {
            name: {"data": x.ravel().tolist(), "dims": x.shape, "type": str(x.dtype)} for name, x in feeds.items()
        }})  # fmt: skip
    (folder / "job.json").write_text(json.dumps(jobs))
    script = SCRIPT.format(module=json.dumps(test_javascript.ONNXRUNTIME.as_uri()))
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [{n: np.array(y["data"]).reshape(y["dims"]) for n, y in line.items()} for line in lines]


def test_beside_python(tmp_path: Path) -> None:
    manual_seed(0)
    file, x = export(Picture(), {"x": ("batch", 1, 8, 8)}, "y"), np.random.default_rng(0).normal(size=(2, 1, 8, 8))
    feeds = {"x": x.astype(np.float32)}
    options: dict[str, dict[str, Any]] = {
        "integrated-gradients": {"n": 4, "chunk": 2}, "smoothgrad": {"n": 3, "unroll": True}, "grad-cam": {},
        "deeplift": {}, "occlusion": {}, "shapley": {"n": 1, "features": np.arange(64).reshape(1, 8, 8) % 4},
        "pgd": {"n": 3, "random_start": True}, "deepfool": {"n": 3},
    }  # fmt: skip
    models = [(gg.explain(file, name, target=1, **given), feeds) for name, given in options.items()]
    step = gg.build(file, "cross_entropy", gg.optim.sgd(0.1), adversarial=gg.PGD(0.2, n=2, random_start=True))
    batch = {**run(step.init, {}), **feeds, "target": np.array([0, 2]), "learning_rate": np.array(0.1, np.float32)}
    models.append((step.train, {v.name: batch[v.name] for v in step.train.graph.input}))
    for found, (model, given), name in zip(in_node(models, tmp_path), models, [*options, "step"], strict=True):
        for output, value in run(model, given).items():
            np.testing.assert_allclose(found[output], value, atol=2e-5, rtol=1e-4, err_msg=f"{name} {output}")
