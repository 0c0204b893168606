"""What cannot be done is refused in one sentence that names the thing and the remedy."""

import sys

import numpy as np
import pytest

from gradgraph.errors import GradgraphError, ModelError, RuntimeUnavailableError, UnknownNameError
from gradgraph.frontend import Input, Parameter, export, from_torch, init, nn
from gradgraph.frontend import functional as F

X = {"v": ("batch", 3, 8)}
IMAGE = {"v": ("batch", 3, "height", "width")}


class Loose(nn.Module):
    """Holds a parameter where no module sees it."""

    def __init__(self):
        super().__init__()
        self.hidden = [Parameter(np.ones(3))]

    def forward(self, v):
        return v.sum(-1) * self.hidden[0]


class Early(nn.Module):
    def __init__(self):
        self.weight = Parameter(np.ones(3))


class Two(nn.Module):
    def forward(self, a, b):
        return a + b


def change_in_place(v):
    v[0] = 1.0
    return v


CASES = {
    # sizes known only at run time
    "branch on a size": (lambda v: v if v.shape[0] > 2 else -v, X, "size 'batch' is known only at run time"),
    "equality of a size": (lambda v: v if v.shape[0] == 1 else -v, X, "cannot be compared with 1"),
    "loop over a size": (lambda v: sum(v[i] for i in range(v.shape[0])), X, "used as a Python integer"),
    "truth of a size": (lambda v: v if v.shape[0] else -v, X, "cannot be tested"),
    "split of a size": (lambda v: v.split(2, 0)[0], X, "use chunk, list the sizes"),
    "adaptive pool": (nn.AdaptiveAvgPool2d(3), IMAGE, "to size 3 requires a fixed input size"),
    "pool indices": (nn.MaxPool2d(2, return_indices=True), IMAGE, "leave it False"),
    "ceil mode": (nn.MaxPool2d(2, ceil_mode=True), IMAGE, "ceil_mode requires fixed sizes"),
    # a traced tensor is no number
    "branch on a tensor": (lambda v: v if v.sum() > 0 else -v, X, "choose between tensors with where"),
    "number of a tensor": (lambda v: v * float(v.sum()), X, "become a Python number"),
    "array of a tensor": (lambda v: np.exp(v), X, None),
    "in place": (change_in_place, X, "be changed in place"),
    # shapes
    "reshape": (lambda v: v.reshape(-1, 5), {"v": (2, 3, 4)}, "cannot be reshaped to"),
    "two holes": (lambda v: v.reshape(-1, -1), X, "at most one -1"),
    "expand": (lambda v: v.expand(-1, 4, 8), X, "3 is neither 1 nor 4"),
    "permute": (lambda v: v.permute(0, 1, 1), X, "name each of the 3 dimensions"),
    "axis": (lambda v: v.sum(3), X, "has no dimension 3; use a number from -3 to 2"),
    "index": (lambda v: v[:, 3], X, "index 3 is out of bounds for a dimension of size 3"),
    "too many indices": (lambda v: v[0, 0, 0, 0], X, "4 indices are too many"),
    "linear": (nn.Linear(4, 2), X, "from 4 features got an input of shape (batch, 3, 8)"),
    "matmul": (lambda v: v @ np.ones((7, 2)), X, "8 and 7 must be equal"),
    "conv rank": (nn.Conv2d(3, 4, 3), X, "expected [batch, channels] and 2 more"),
    "conv channels": (nn.Conv1d(4, 4, 3), X, "over 4 channels got an input of shape (batch, 3, 8)"),
    "batch norm rank": (nn.BatchNorm2d(3), X, "expected 4 dimensions"),
    "batch norm channels": (nn.BatchNorm1d(4), X, "axis 1 must have 4 channels"),
    "instance norm statistics": (
        lambda v: F.instance_norm(v, np.zeros(3), np.ones(3)),
        X,
        "instance_norm does not support running statistics",
    ),
    "layer norm": (nn.LayerNorm(7), X, "its last dimensions must be (7,)"),
    "lengths": (lambda v: nn.LSTM(8, 2)(v, lengths=v[:, 0, 0])[0], X, "pass integers, one per sequence"),
    "pool rank": (nn.MaxPool2d(2), X, "MaxPool2d got an input of shape"),
    "split sizes": (lambda v: v.split([1, 1], 1)[0], X, "must add up to 3"),
    "einsum": (lambda v: F.einsum("ij->i", v), X, "has 2 letters, but its tensor has shape"),
    "einsum output": (lambda v: F.einsum("bij->bb", v), X, "name each output dimension once"),
    "loss": (lambda v: F.cross_entropy(v, v.argmax(-1)[..., None]), X, "the scores without axis 1"),
    # options
    "interpolate mode": (
        lambda v: F.interpolate(v, scale_factor=2, mode="bilinear"),
        X,
        "mode 'bilinear' does not fit",
    ),
    "pad mode": (lambda v: F.pad(v, (1, 1), mode="mirror"), X, "no mode 'mirror'"),
    "reduction": (lambda v: F.mse_loss(v, v, reduction="median"), X, "no reduction 'median'"),
    "clamp": (lambda v: F.clamp(v), X, "pass at least one bound"),
    "dtype": (lambda v: v.to("float33"), X, "not an element type"),
    "mean of integers": (lambda v: v.mean(), {"v": Input(("n",), "int64")}, "convert it with .float()"),
    # parameters, inputs, outputs
    "loose parameter": (Loose(), X, "that belongs to no module"),
    "no forward": (nn.Module(), X, "Module has no forward"),
    "strange output": (lambda v: "text", X, "forward returned str"),
    "no output": (lambda v: None, X, "forward returned nothing"),
    "missing argument": (Two(), {"a": (2,)}, "requires the argument 'b'"),
    "strange argument": (Two(), {"a": (2,), "c": (2,)}, "has no argument 'c'"),
    "too many inputs": (lambda v: v, {"p": (2,), "q": (2,)}, "inputs has 2"),
    "bad dimension": (lambda v: v, {"v": ("batch", 0)}, "has the dimension 0"),
    "bad name": (lambda v: v, {"v": ("batch size",)}, "has the dimension 'batch size'"),
    "bad shape": (lambda v: v, {"v": "batch"}, "use a tuple such as"),
    "clash of input": (nn.Linear(3, 3), {"weight": ("n", 3)}, "names both an input and a parameter"),
}


@pytest.mark.parametrize("name", CASES)
def test_export_refuses(name):
    net, inputs, words = CASES[name]
    with pytest.raises((ModelError, TypeError) if words is None else ModelError) as caught:
        export(net, inputs)
    assert words is None or words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_outputs_are_checked():
    with pytest.raises(ModelError, match="pass the same number of different output names"):
        export(lambda v: (v + 1, v + 2), X, outputs=["a", "a"])
    with pytest.raises(ModelError, match="'weight' names both an output and an input or parameter"):
        export(nn.Linear(8, 2), X, outputs=["weight"])


CONSTRUCTORS = {
    "groups": (lambda: nn.Conv2d(3, 4, 3, groups=2), "must be divisible by groups=2"),
    "kernel": (lambda: nn.Conv2d(3, 4, (3, 3, 3)), "one number or 2"),
    "padding mode": (lambda: nn.Conv2d(3, 4, 3, padding_mode="mirror"), "no padding_mode 'mirror'"),
    "heads": (lambda: nn.MultiheadAttention(8, 3), "divisible by the number of heads, 3"),
    "activation": (lambda: nn.TransformerEncoderLayer(8, 2, activation="swish"), "no activation 'swish'"),
    "batch norm momentum": (lambda: nn.BatchNorm1d(3, momentum=None), "no cumulative average"),
    "instance norm statistics": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), "use False"),
    "projection": (lambda: nn.LSTM(2, 3, proj_size=1), "apply a Linear to the output"),
    "nonlinearity": (lambda: nn.RNN(2, 3, nonlinearity="selu"), "use 'tanh' or 'relu'"),
    "padding index": (lambda: nn.Embedding(3, 2, padding_idx=3), "must be one of the 3 rows"),
    "before super": (Early, "must call super().__init__()"),
    "gain": (lambda: init.calculate_gain("swish"), "no gain is known for 'swish'"),
    "fans": (lambda: init.xavier_uniform_(np.ones(3)), "at least 2 dimensions"),
    "submodule": (lambda: nn.Sequential(nn.ReLU()).get_submodule("1"), "has no module '1'"),
    "outside of export": (lambda: nn.ReLU()(np.ones(3)), "work only inside gradgraph.frontend.export"),
    "parameter outside of export": (lambda: Parameter(np.ones(3)) + 1, "work only inside gradgraph.frontend.export"),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_misuse(name):
    call, words = CONSTRUCTORS[name]
    with pytest.raises(GradgraphError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="Linear has no attribute 'wieght'"):
        _ = nn.Linear(2, 2).wieght


def test_hierarchy():
    with pytest.raises(LookupError):
        nn.Linear(2, 2).load_state_dict({})
    assert issubclass(UnknownNameError, GradgraphError)


def test_missing_torch_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        RuntimeUnavailableError, match="from_torch requires onnxscript, which is not installed; pip install"
    ):
        from_torch(None, None)


def test_options_of_a_layer_are_attributes():
    pool = nn.MaxPool2d(2, padding=1)
    pool.ceil_mode = True
    assert (pool.kernel_size, pool.padding, nn.LeakyReLU(0.2).negative_slope) == (2, 1, 0.2)
    assert "kernel_size=2" in repr(pool) and "ceil_mode=True" in repr(pool)
