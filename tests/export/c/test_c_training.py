"""Exported C trains as onnxruntime does: ten networks, five optimizers, each under -Wconversion and sanitizers."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.export.c.c_names import identifiers
from gradgraph.frontend import export, manual_seed, nn
from tests.kit.compiled_c import NEEDS_COMPILER, STRICT, Program, compiler
from tests.kit.networks_in_c import NETWORKS, OPTIMIZERS, head, network, separable, step_of
from tests.kit.trained_c import CLASSES, batch_of, train_beside

pytestmark = NEEDS_COMPILER


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETWORKS)
def test_c_trains_as_onnxruntime_does(name: str, optimizer: str, tmp_path: Path) -> None:
    step = step_of(name, optimizer)
    gg.export.c(step, tmp_path / "c")
    assert train_beside(step, Program(tmp_path / "c"), 20, optimizer in ("sgd", "momentum")) < 1e-5


def test_sizes_that_losses_read_are_constants(tmp_path: Path) -> None:
    step = gg.build(network("mlp"), "tversky", gg.optim.sgd(0.01))
    gg.export.c(step, tmp_path / "c")
    assert train_beside(step, Program(tmp_path / "c"), 5, True) < 1e-5


@pytest.mark.parametrize("optimizer", ["sgd", "schedule_free"])  # with averages, which evaluation reads
def test_evaluation_and_prediction_read_the_same_state(optimizer: str, tmp_path: Path) -> None:
    step = step_of("autoencoder", optimizer)
    gg.export.c(step, tmp_path / "c")
    program, trainer = Program(tmp_path / "c"), gg.Trainer(step, device="cpu", seed=0)
    batch = batch_of(step, np.random.default_rng(1))
    rates = list(step.manifest.hyperparameters.values())
    for _ in range(3):
        trainer.step(batch)
        unwanted = [None] * (1 + len(step.manifest.metrics) + len(step.manifest.reports))
        assert program.call("step", *batch.values(), *rates, *unwanted) == 0
    loss, y = np.zeros((), np.float32), np.zeros(batch["x"].shape, np.float32)
    assert program.call("evaluate", *batch.values(), loss) == 0
    assert program.call("predict", batch["x"], y) == 0
    np.testing.assert_allclose(loss, trainer.evaluate(batch)["loss"], rtol=1e-5)
    np.testing.assert_allclose(y, trainer.predict(batch["x"]), rtol=1e-4, atol=1e-5)


def test_arguments_never_shadow_names_of_the_code() -> None:
    names = identifiers(
        ["step_1", "gather", "for", "T", "x.y", "x/y", "", "7", "X_y", "gemm_rows", "uint8_t", "NET_OK", "net_run"],
        ["net_run"],
    )
    assert list(names.values()) == ["v_step_1", "v_gather", "v_for", "v_T", "x_y", "x_y_2", "v_", "v_7", "X_y_3",
                                    "v_gemm_rows", "v_uint8_t", "v_NET_OK", "net_run_2"]  # fmt: skip


def test_names_of_kernels_are_reserved() -> None:
    text = (resources.files("gradgraph.export.c") / "kernels" / "kernels.c").read_text("utf-8")
    functions = re.findall(r"^static .*?(\w+)\(", text, re.MULTILINE)
    assert len(functions) > 20 and [n for n in identifiers(functions).values() if not n.startswith("v_")] == []


def test_a_saved_state_continues_bit_for_bit(tmp_path: Path) -> None:
    step = step_of("mlp", "adamw")
    gg.export.c(step, tmp_path / "c")
    program = Program(tmp_path / "c")
    batches = [batch_of(step, np.random.default_rng(i)) for i in range(4)]

    def losses(some: list[dict[str, np.ndarray]]) -> list[float]:
        results = [np.zeros((), np.float32) for _ in range(3)]
        found = []
        for batch in some:
            assert program.call("step", *batch.values(), *results) == 0
            found.append(float(results[0]))
        return found

    losses(batches[:2])
    saved = program.save()
    after = losses(batches[2:])
    damaged = saved.copy()
    damaged[-1] ^= 1
    before = program.save()
    assert program.load(damaged) == 2
    assert np.array_equal(program.save(), before)
    assert program.load(saved) == 0
    assert losses(batches[2:]) == after


def test_a_run_continues_from_a_checkpoint(tmp_path: Path) -> None:
    step = step_of("mlp", "adamw")
    trainer = gg.Trainer(step, device="cpu", seed=0)
    for i in range(3):
        trainer.step(batch_of(step, np.random.default_rng(i)))
    trainer.save(tmp_path / "run.ckpt")
    gg.export.c(step, tmp_path / "c", checkpoint=tmp_path / "run.ckpt")
    for name, value in Program(tmp_path / "c").values().items():
        np.testing.assert_array_equal(value, trainer.state.read([name])[name], err_msg=name)


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_label_out_of_range_changes_no_state(label: int, tmp_path: Path) -> None:
    step = step_of("mlp")
    gg.export.c(step, tmp_path / "c")
    program = Program(tmp_path / "c")
    batch, before = batch_of(step, np.random.default_rng(0)), program.save()
    batch["target"] = np.full_like(batch["target"], label)
    assert program.call("step", *batch.values(), 0.1, None, None) == 1
    assert np.array_equal(program.save(), before)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("name", NETWORKS)
def test_memory_is_never_overrun(name: str, tmp_path: Path) -> None:
    """The example, with both sanitizers."""
    folder = tmp_path / "c"
    gg.export.c(step_of(name, "adamw"), folder)
    program = folder / "example"
    flags = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    probe = tmp_path / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    try:
        compiler(*flags, probe, "-o", tmp_path / "probe")
    except AssertionError:
        pytest.skip("the compiler has no sanitizers")
    compiler(*STRICT, *flags, folder / "trainer.c", folder / "example.c", "-o", program, "-lm")
    ran = subprocess.run([program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[:2000]


def test_the_source_is_also_c_plus_plus_for_callers(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    gg.export.c(step_of("mlp"), tmp_path / "c")
    caller = tmp_path / "caller.cpp"
    caller.write_text('#include "trainer.h"\nstatic trainer_t one, two;\nint main() { trainer_init(&one); '
                      "trainer_init(&two); return 0; }\n")  # fmt: skip
    ran = subprocess.run(["g++", "-Wall", "-Werror", f"-I{tmp_path / 'c'}", "-c", caller, "-o", tmp_path / "o"],
                         capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_cheap_results_are_computed_again_instead_of_kept(tmp_path: Path) -> None:
    """Of each convolution with BatchNormalization and Relu, one array is kept for the backward pass, not two."""
    manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())]
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *layers, *head(8))
    step = gg.build(export(net, {"x": (1, 1, 16, 16)}, outputs=["y"]), "cross_entropy", OPTIMIZERS["sgd"]())
    made = gg.export.c(step, tmp_path / "c")
    one = 8 * 16 * 16 * 4
    assert made.arena < 10.5 * one
    assert train_beside(step, Program(tmp_path / "c"), 5, states=True) < 1e-5


def test_a_cheap_factor_is_computed_in_the_loop_of_its_product(tmp_path: Path) -> None:
    """The weight gradient of a pointwise convolution computes its input, a Relu, without an array for it."""
    manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *separable(8, 8), *head(8))
    step = gg.build(export(net, {"x": (1, 1, 16, 16)}, outputs=["y"]), "cross_entropy", OPTIMIZERS["sgd"]())
    made = gg.export.c(step, tmp_path / "c")
    one = 8 * 16 * 16 * 4
    assert made.arena < 4.1 * one
    assert train_beside(step, Program(tmp_path / "c"), 5, states=True) < 1e-5


def test_variances_are_computed_again_instead_of_kept(tmp_path: Path) -> None:
    """Of each frozen layer with BatchNormalization, only the centred output is kept, of 8 rows with 64 numbers."""
    manual_seed(0)
    count, row = 8, 64 * 4
    layers = [m for _ in range(count) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    model = export(nn.Sequential(*layers, nn.Linear(64, CLASSES)), {"x": (8, 64)}, outputs=["y"])
    norms = [f"{3 * i + 1}.weight" for i in range(count)]
    step = gg.build(model, "cross_entropy", OPTIMIZERS["sgd"](), train=["*.bias", *norms])
    made = gg.export.c(step, tmp_path / "c")
    assert made.arena < (10 * 8 + 3) * row
    assert train_beside(step, Program(tmp_path / "c"), 3) < 1e-5
