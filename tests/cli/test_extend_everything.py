"""A part of each kind, registered from outside by ``gradgraph.extend``, is known wherever the package's own are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference.op_run import OpRun

import gradgraph as gg
from gradgraph import extend
from gradgraph.backends import BACKENDS
from gradgraph.errors import ArgumentError, BuildError
from gradgraph.files.untrusted.documents import tomllib
from gradgraph.frontend import nn
from gradgraph.losses import LOSSES
from gradgraph.metrics import METRICS
from gradgraph.optim.recipes import RECIPES
from gradgraph.optim.schedules import SCHEDULES
from gradgraph.parallel.data_parallel import COMPRESSIONS
from gradgraph.rules.registry import RULES
from gradgraph.runtime.saved.monitor import Monitor
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from gradgraph.verify.operator_status import operators
from tests.kit.command_line import Cli, arrays, mlp
from tests.pages import names_page
from tests.pages.api_page import families
from tests.pages.backends_page import backends
from tests.pages.cli_reference import commands

ROOT = Path(__file__).parents[2]
TABLES: tuple[dict[Any, Any], ...] = (
    LOSSES,
    METRICS,
    RECIPES,
    SCHEDULES,
    BACKENDS,
    KINDS,
    nn.LAYERS,
    RULES,
    COMPRESSIONS,
)


class Cubed(OpRun):
    """x³."""

    op_domain = "test.everything"

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x**3,)


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    """One part of each kind, gone after each test."""
    before = [dict(table) for table in TABLES]

    @extend.loss("charbonnier")
    def charbonnier(x: Any, target: Any, eps: float = 1e-3, reduction: str = "mean") -> Any:
        """``√((x − t)² + ε²)``."""
        return extend.reduced(((x - target).square() + eps * eps).sqrt(), reduction)

    @extend.metric(reads="numbers", better="max", column="within_{bound}")
    def within(x: Any, target: Any, mask: Any = None, bound: float = 1.0) -> extend.Sums:
        """The share of predictions that are no further than ``bound`` from the target."""
        return gg.metrics.share((x - target).abs() <= bound, (x - target).abs() >= 0.0)

    @extend.optimizer
    def sign_descent(lr: Any = 1e-2) -> gg.optim.Optimizer:
        """Steps of one size, against the sign of the gradient."""
        each = gg.optim.stateless("sign", lambda op, gradient, parameter: op.Sign(gradient))
        return gg.optim.chain(each, gg.optim.scale_by_learning_rate(lr))

    @extend.schedule
    def sawtooth(lr: float, every: int = 50) -> gg.optim.Schedule:
        """From ``lr`` down to 0, over and over."""
        return gg.optim.Schedule("sawtooth", lambda op, s: lr * (1.0 - op.Mod(s, float(every), fmod=1) / float(every)),
                                 {"lr": lr, "every": every})  # fmt: skip

    @extend.layer
    class Doubled(nn.Module):
        """``2·x``."""

        def forward(self, x: Any) -> Any:
            return x + x

    @extend.compression
    def whole_numbers(step: float = 0.25) -> extend.Compression:
        """Multiples of ``step`` alone."""
        return extend.Compression()

    extend.backend(extend.Backend("abacus", "runs wherever there are beads, and somebody who counts"))
    extend.adapter_kind("shift", extend.AdapterKind("the biases, once more", **{
        name: getattr(KINDS["bitfit"], name) for name in ("put", "parts", "rest", "axes", "layers")}))  # fmt: skip
    extend.operator("Cubed", "test.everything", inputs=["T"], outputs=["T"], shape=lambda x: [x], reference=Cubed)

    @extend.vjp("Cubed", extend.case(extend.real(2, 3)), domain="test.everything")
    def cubed(op: Any, dy: Any, y: Any, x: Any) -> Any:
        return (dy * (3.0 * x * x),)

    yield
    for table, entries in zip(TABLES, before, strict=True):
        table.clear()
        table.update(entries)
    del nn.Doubled  # type: ignore[attr-defined]


NAMES = ["charbonnier", "within", "sign_descent", "abacus"]


def test_gg_build_knows_them() -> None:
    step = gg.build(
        mlp(), "charbonnier", gg.optim.sgd(SCHEDULES["sawtooth"](0.1)), metrics="within(bound=0.5)", backend="abacus"
    )
    assert (step.manifest.loss["name"], step.manifest.backend) == ("charbonnier", "abacus")
    assert gg.build(mlp(), "charbonnier(eps=0.1)", "sign_descent").manifest.loss["arguments"]["eps"] == 0.1
    assert gg.losses.charbonnier(eps=0.1).arguments["eps"] == 0.1 and gg.metrics.within().better == "max"
    trainer = gg.Trainer(gg.build(mlp(), "charbonnier", "sign_descent", metrics="within"), device="cpu")
    x = arrays(64)["x"]
    data = {"x": x, "target": np.zeros((64, 3), np.float32)}
    history = trainer.fit(data, epochs=4, batch_size=16, progress=False)
    assert history["loss"][-1] < history["loss"][0] and history["within_1.0"][-1] >= history["within_1.0"][0]
    assert Monitor("val_within").sign == -1.0
    assert "shift" in KINDS and gg.lora(mlp(), "*", kind="shift") is not None
    net = gg.frontend.export(nn.Sequential(nn.Linear(4, 3), nn.Doubled()), {"x": ("rows", 4)})
    assert {"Gemm", "Add"} >= {node.op_type for node in net.graph.node}
    extend.check("Cubed", "test.everything")


def test_the_command_line_and_recipes_know_them(cli: Cli, folder: Path) -> None:
    text = cli("build", "--help").out
    assert all(name in text for name in NAMES) and "shift" in cli("surgery", "--help").out
    assert "whole_numbers" in cli("train", "--help").out
    words = ["build", "model.onnx", "--loss", "charbonnier", "--loss-option", "eps=0.1", "--metric", "within(bound=2)",
             "--optimizer", "sign_descent", "--schedule", "sawtooth(every=10)", "--backend", "abacus"]  # fmt: skip
    printed = cli(*words, "--print-config").out
    recipe = tomllib.loads(printed)
    assert (recipe["loss"]["name"], recipe["optimizer"]["name"]) == ("charbonnier", "sign_descent")
    (folder / "recipe.toml").write_text(printed)
    ran = cli("build", "recipe.toml")
    assert ran.code == 0, ran.err
    assert gg.Step.load("step").manifest.backend == "abacus"
    assert cli("surgery", "model.onnx", "--lora", "*", "--kind", "shift").code == 0
    wrong = cli("build", "model.onnx", "--loss", "charbonier")
    assert (wrong.code, "did you mean 'charbonnier'" in wrong.err) == (1, True)


def test_the_pages_know_them() -> None:
    tables = "".join(marked.table() for marked in names_page.MARKED) + backends()
    for name in [*NAMES, "sawtooth", "whole_numbers(step=0.25)"]:
        assert f"`{name}" in tables
    assert all(name in commands() for name in [*NAMES, "shift", "whole_numbers"])
    assert any(row["operator"] == "test.everything.Cubed" and row["status"] == "rule" for row in operators())
    assert sys.modules[nn.Doubled.__module__] in families(nn, of_losses=False)


def a_loss(x: Any, target: Any, reduction: str = "mean") -> Any:
    return x


def no_options(x: Any, target: Any) -> Any:
    return x


def toy() -> None:
    """Makes nothing."""


@pytest.mark.parametrize(
    ("register", "error", "says"),
    [
        (lambda: extend.loss("mse")(a_loss), BuildError, "there is a loss 'mse' already"),
        (lambda: extend.loss("my loss")(a_loss), BuildError, "'my loss' is not a valid name for a loss"),
        (lambda: extend.loss("mine")(no_options), BuildError, "mine has no argument reduction"),
        (lambda: extend.loss("mine")(3), ArgumentError, "the loss is 3; it should be a function"),
        (lambda: extend.metric()(no_options), BuildError, "no_options must be prediction, target and mask"),
        (lambda: extend.metric(better="high"), BuildError, "better is 'high'; it should be one of 'min', 'max', None"),
        (lambda: extend.metric(reads="words"), BuildError, "reads is 'words'; it should be one of 'classes'"),
        (lambda: extend.optimizer(no_options), BuildError, "no_options must be lr and other options"),
        (lambda: extend.optimizer(a_loss), BuildError, "a_loss must be lr"),
        (lambda: extend.optimizer(lambda lr=1.0: None), ArgumentError, "should be a function with a name"),
        (lambda: extend.schedule(gg.optim.cosine), BuildError, "there is a schedule 'cosine' already"),
        (lambda: extend.schedule(3), ArgumentError, "make is 3; it should be a function with a name"),
        (lambda: extend.layer(nn.Linear), BuildError, "there is a layer 'Linear' already"),
        (lambda: extend.layer(Cubed), ArgumentError, "should be a layer class"),
        (lambda: extend.backend("web"), ArgumentError, "should be a gradgraph.extend.Backend"),
        (lambda: extend.backend(extend.Backend("web", "mine")), BuildError, "there is a backend 'web' already"),
        (lambda: extend.compression(COMPRESSIONS["top_k"]), BuildError, "there is a compression 'top_k' already"),
        (lambda: extend.compression(3), ArgumentError, "the compression is 3; it should be a function"),
        (lambda: extend.compression(no_options), BuildError, "no_options must be"),
        (
            lambda: extend.compression(toy),
            ArgumentError,
            "the result of toy is None; it should be a gradgraph.extend.Comp",
        ),
        (lambda: extend.adapter_kind("lora", KINDS["lora"]), BuildError, "there is a kind of adapter 'lora' already"),
        (lambda: extend.adapter_kind("mine", "lora"), ArgumentError, "should be a gradgraph.extend.AdapterKind"),
    ],
)
def test_what_cannot_be_registered(register: Any, error: type[Exception], says: str) -> None:
    before = [dict(table) for table in TABLES]
    with pytest.raises(error, match=says):
        register()
    assert [dict(table) for table in TABLES] == before


MODULE = """
import gradgraph as gg
from gradgraph import extend
@extend.loss("outside")
def outside(x, target, reduction: str = "mean"):
    "The difference."
    return extend.reduced((x - target).abs(), reduction)
"""


@pytest.mark.sweep(0)
def test_an_installed_extension_is_on_the_command_line(tmp_path: Path) -> None:
    """Its distribution says so in an entry point; one that fails is left out, with a word."""
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gradgraph]\noutside = outside\nbroken = missing_module\n")
    (tmp_path / "outside.py").write_text(MODULE)
    onnx.save(mlp(), tmp_path / "model.onnx")
    words = [sys.executable, "-m", "gradgraph", "build", "model.onnx", "--loss", "outside", "--json"]
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert (ran.returncode, '"name": "outside"' in ran.stdout) == (0, True), ran.stderr
    assert "could not load the extension broken (missing_module): No module named" in ran.stderr
