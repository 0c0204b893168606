"""Losses as layers: every loss with a function has one, and it computes what PyTorch's computes."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from gradgraph.errors import ModelError
from gradgraph.frontend import functional, losses_classes, losses_embeddings, losses_margins, losses_regions, nn
from gradgraph.frontend import layers_losses as layers
from gradgraph.frontend import losses_sequences as sequences
from gradgraph.frontend import losses_values as values

RNG = np.random.default_rng(0)
FAMILIES = (losses_classes, losses_embeddings, losses_margins, losses_regions, sequences, values)


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def unit(*shape: int) -> np.ndarray:
    return RNG.uniform(0.05, 0.95, shape).astype(np.float32)


def signs(*shape: int) -> np.ndarray:
    return (RNG.integers(0, 2, shape) * 2 - 1).astype(np.float32)


LABELS = RNG.integers(0, 5, 4)
LOG_P = np.log(unit(4, 5))
SEQUENCE = [LOG_P[:, None].repeat(3, 1), RNG.integers(1, 5, (3, 2)), np.array([4, 4, 3]), np.array([2, 1, 2])]
# the layer, its options, what it is called with
SAME_AS_TORCH: list[tuple[str, dict[str, Any], list[np.ndarray]]] = [
    ("BCELoss", {}, [unit(4, 5), unit(4, 5)]),
    ("BCEWithLogitsLoss", {"pos_weight": np.full(5, 2, np.float32)}, [real(4, 5), unit(4, 5)]),
    ("CTCLoss", {"reduction": "sum"}, SEQUENCE),
    ("CosineEmbeddingLoss", {"margin": 0.2}, [real(4, 5), real(4, 5), signs(4)]),
    ("CrossEntropyLoss", {"label_smoothing": 0.1}, [real(4, 5), LABELS]),
    ("GaussianNLLLoss", {"full": True}, [real(4, 5), real(4, 5), unit(4, 5)]),
    ("HingeEmbeddingLoss", {"margin": 0.5}, [real(4, 5), signs(4, 5)]),
    ("HuberLoss", {"delta": 0.5}, [real(4, 5), real(4, 5)]),
    ("KLDivLoss", {"reduction": "batchmean"}, [LOG_P, unit(4, 5)]),
    ("L1Loss", {"reduction": "none"}, [real(4, 5), real(4, 5)]),
    ("MSELoss", {"reduction": "sum"}, [real(4, 5), real(4, 5)]),
    ("MultiLabelMarginLoss", {}, [real(4, 5), np.array([[0, 3, -1, 1, 2]] * 4)]),
    ("MultiLabelSoftMarginLoss", {"weight": unit(5)}, [real(4, 5), unit(4, 5)]),
    ("MultiMarginLoss", {"p": 2, "margin": 0.7}, [real(4, 5), LABELS]),
    ("NLLLoss", {"ignore_index": 1}, [LOG_P, LABELS]),
    ("PoissonNLLLoss", {"log_input": False, "full": True}, [unit(4, 5), unit(4, 5) * 4]),
    ("SmoothL1Loss", {"beta": 0.3}, [real(4, 5), real(4, 5)]),
    ("SoftMarginLoss", {}, [real(4, 5), signs(4, 5)]),
    ("TripletMarginLoss", {"margin": 0.5, "swap": True}, [real(4, 5), real(4, 5), real(4, 5)]),
]
OURS: list[tuple[str, str, dict[str, Any], list[np.ndarray]]] = [
    ("CLIPLoss", "clip_loss", {"logit_scale": 3.0}, [real(4, 5), real(4, 5)]),
    ("DiceLoss", "dice_loss", {"smooth": 0.5}, [real(4, 5), unit(4, 5)]),
    ("FocalLoss", "focal_loss", {"gamma": 1.5}, [real(4, 5), LABELS]),
    ("HingeLoss", "hinge_loss", {"squared": True}, [real(4, 5), signs(4, 5)]),
    ("InfoNCELoss", "info_nce_loss", {"temperature": 0.5}, [real(4, 5), real(4, 5)]),
    ("LogCoshLoss", "log_cosh_loss", {"reduction": "sum"}, [real(4, 5), real(4, 5)]),
    ("SigmoidFocalLoss", "sigmoid_focal_loss", {"alpha": 0.5}, [real(4, 5), unit(4, 5)]),
    ("SoftCrossEntropyLoss", "soft_cross_entropy", {"label_smoothing": 0.1}, [real(4, 5), unit(4, 5)]),
]


def computed(loss: Any, tensors: list[np.ndarray]) -> np.ndarray:
    from tests.kit.frontend_parity import model_of, run_model

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = loss

        def forward(self, *given: Any) -> Any:
            return {"loss": self.loss(*given)}

    arrays = {f"x{i}": array for i, array in enumerate(tensors)}
    return run_model(model_of(Net() if isinstance(loss, nn.Module) else Function(loss), arrays, dynamic=()), arrays)[
        "loss"
    ]


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return {"loss": self.function(*given)}


def test_every_layer_is_a_loss_of_its_own_and_compared() -> None:
    functions = {name for family in FAMILIES for name in family.__all__}
    computes = [getattr(nn, name)._computes.__name__ for name in layers.__all__]
    assert len(set(computes)) == len(computes) and set(computes) <= functions
    assert {name for name, *_ in (*SAME_AS_TORCH, *OURS)} == set(layers.__all__)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "options", "tensors"), SAME_AS_TORCH, ids=[name for name, *_ in SAME_AS_TORCH])
def test_it_is_that_of_torch(name: str, options: dict[str, Any], tensors: list[np.ndarray]) -> None:
    torch = pytest.importorskip("torch", reason="an extra: onnx-gradgraph[torch]")
    as_tensor = lambda v: torch.from_numpy(v) if isinstance(v, np.ndarray) else v  # noqa: E731
    theirs = getattr(torch.nn, name)(**{key: as_tensor(v) for key, v in options.items()})
    expected = theirs(*map(as_tensor, tensors)).numpy()
    np.testing.assert_allclose(computed(getattr(nn, name)(**options), tensors), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name, *_ in SAME_AS_TORCH])
def test_its_arguments_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="an extra: onnx-gradgraph[torch]")
    theirs = inspect.signature(getattr(torch.nn, name)).parameters
    expected = {n: p.default for n, p in theirs.items() if n not in ("size_average", "reduce")}
    found = {n: p.default for n, p in inspect.signature(getattr(nn, name)).parameters.items()}
    assert found == expected and list(found) == list(expected)


@pytest.mark.parametrize(("name", "function", "options", "tensors"), OURS, ids=[name for name, *_ in OURS])
def test_others_are_their_functions(name: str, function: str, options: dict[str, Any], tensors: Any) -> None:
    expected = computed(lambda *given: getattr(functional, function)(*given, **options), tensors)
    np.testing.assert_array_equal(computed(getattr(nn, name)(**options), tensors), expected)
    assert getattr(nn, name).__doc__ == getattr(functional, function).__doc__


def test_options_that_there_are_not_are_refused() -> None:
    with pytest.raises(TypeError, match="MSELoss has no argument 'delta'"):
        nn.MSELoss(delta=1.0)
    with pytest.raises(ModelError, match="a loss has no reduction 'avg'"):
        computed(nn.MSELoss("avg"), [real(2, 2), real(2, 2)])
    assert repr(nn.HuberLoss(delta=2.0)).endswith("HuberLoss(reduction='mean', delta=2.0)")
