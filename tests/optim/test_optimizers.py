"""Every optimizer by its table of cases: against NumPy where torch has none, resumed to the bit, and named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import BuildError
from gradgraph.optim.recipes import RECIPES
from tests.kit.optim_cases import OPTIMIZERS, WEIGHTS, batches, gradients_by_hand, losses, network


def test_every_recipe_has_a_case_that_says_what_it_should_do() -> None:
    assert {case.recipe for case in OPTIMIZERS.values()} == set(RECIPES)
    assert all((case.torch_class is None) != (case.reference is None) for case in OPTIMIZERS.values())


@pytest.mark.parametrize("name", [name for name, case in OPTIMIZERS.items() if case.reference])
def test_trajectories_are_those_of_the_paper(name: str) -> None:
    case = OPTIMIZERS[name]
    weights = {n: w.astype(np.float64) for n, w in WEIGHTS.items()}
    memory: dict[str, dict] = {n: {} for n in weights}
    expected = []
    for t, batch in enumerate(batches(), start=1):
        loss, grads = gradients_by_hand(weights, batch["x"], batch["target"])
        expected.append(loss)
        assert case.reference is not None
        moved = {n for n, w in weights.items() if w.ndim == 2 or not case.only_matrices}
        weights |= {n: case.reference(t, grads[n], weights[n], memory[n]) for n in moved}
    np.testing.assert_allclose(losses(case.optimizer(), case.only_matrices), expected, rtol=case.rtol)
    assert expected[-1] < 0.9 * expected[0]


@pytest.mark.sweep(0.176)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    case = OPTIMIZERS[name]
    step = gg.build(network(), "mse", case.optimizer(), freeze=["b1", "b2"] if case.only_matrices else [])
    step.save(tmp_path / "step")
    straight = gg.Trainer(step, device="cpu")
    for i, batch in enumerate(batches()[:8]):
        if i == 4:
            straight.save(tmp_path / "run.ckpt")
        straight.step(batch)
    resumed = gg.Trainer.resume(tmp_path / "step", tmp_path / "run.ckpt", device="cpu")
    for batch in batches()[4:8]:
        resumed.step(batch)
    expected = straight.state_dict()
    assert all(np.array_equal(value, expected[n]) for n, value in resumed.state_dict().items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_manifest_says_how_to_make_the_optimizer_again(recipe: str) -> None:
    made = RECIPES[recipe]()
    again = RECIPES[recipe](**{k: tuple(v) if isinstance(v, list) else v for k, v in made.arguments.items()})
    assert made.name == recipe and again.arguments == made.arguments


@pytest.mark.parametrize(
    ("recipe", "arguments", "says"),
    [
        ("adadelta", {"rho": 1.0}, r"rho must be in \[0, 1\)"),
        ("adagrad", {"lr_decay": -1.0}, "lr_decay must not be negative"),
        ("rprop", {"etas": (1.5, 1.2)}, "etas must be a number in"),
        ("lion", {"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ("lars", {"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ("adafactor", {"d": 0.5}, "d at least 1"),
        ("muon", {"adjust_lr_fn": "rms"}, "adjust_lr_fn must be one of original, match_rms_adamw"),
        ("muon", {"ns_steps": 0}, "ns_steps must be between"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(recipe: str, arguments: dict, says: str) -> None:
    with pytest.raises(BuildError, match=says):
        RECIPES[recipe](**arguments)


def test_muon_says_which_weight_is_no_matrix() -> None:
    with pytest.raises(BuildError, match=r"muon trains matrices only, but the weight 'b1' has shape \["):
        gg.build(network(), "mse", "muon")


def test_adafactor_remembers_a_row_and_a_column_of_a_matrix() -> None:
    shapes = {s.name: s.shape for s in gg.build(network(), "mse", "adafactor").manifest.state if s.kind == "optimizer"}
    assert shapes == {
        "w1.row_var": (4, 1), "w1.col_var": (1, 8), "w2.row_var": (8, 1), "w2.col_var": (1, 3),
        "b1.variance": (8,), "b2.variance": (3,),
    }  # fmt: skip


def test_trust_ratios_leave_weights_of_zeros_a_way_out() -> None:
    model = network()
    for tensor in model.graph.initializer:
        if tensor.name.startswith("b"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tensor.dims, np.float32), tensor.name))
    for recipe in ("lamb", "lars"):
        trainer = gg.Trainer(gg.build(model, "mse", recipe), device="cpu")
        trainer.step(batches()[0])
        assert np.abs(trainer.parameters["b1"]).min() > 0 and np.isfinite(trainer.parameters["b1"]).all()
