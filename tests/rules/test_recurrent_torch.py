"""Recurrent layers against PyTorch's: the operators in float64, and networks of the frontend while training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradgraph as gg
import gradgraph.rules.families
from gradgraph import frontend
from gradgraph.rules.registry import RULES, case, real, uniform
from gradgraph.verify import cases
from gradgraph.verify.reference import Oracle
from tests.kit.frontend_parity import drawn, run_model

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

# the gates of ONNX in PyTorch's order
ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}
LENGTHS = [[4, 4, 4], [4, 2, 1]]
UNITS, FEATURES = 2, 3
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("RNN", {}),
    ("RNN", {"activations": ["Relu", "Relu"]}),
    ("GRU", {"linear_before_reset": 1}),
    ("LSTM", {}),
]


def reordered(op_type: str, rows: Any) -> Any:
    gates = rows.chunk(len(ORDER[op_type]))
    return torch.cat([gates[i] for i in ORDER[op_type]])


def in_torch(op_type: str, relu: bool, inputs: list[Any], lengths: list[int]) -> tuple[Any, ...]:
    """Y, Y_h and Y_c of a bidirectional layer."""
    X, W, R, B, *states = inputs
    flat = []
    for d in range(2):
        biases = B[d].chunk(2)
        flat += [reordered(op_type, rows) for rows in (W[d], R[d], *biases)]
    function = getattr(torch, {"RNN": "rnn_relu" if relu else "rnn_tanh", "GRU": "gru", "LSTM": "lstm"}[op_type])
    packed = torch.nn.utils.rnn.pack_padded_sequence(X, torch.tensor(lengths))
    hx = states if op_type == "LSTM" else states[0]
    data, *last = function(packed.data, packed.batch_sizes, hx, flat, True, 1, 0.0, False, True)
    output, _ = torch.nn.utils.rnn.pad_packed_sequence(packed._replace(data=data))
    return output.unflatten(-1, (2, UNITS)).transpose(1, 2), *last


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("op_type", "attrs"), FORMS)
def test_gradients_are_those_of_pytorch(op_type: str, attrs: dict[str, Any], lengths: list[int]) -> None:
    rows, states = len(ORDER[op_type]) * UNITS, 2 if op_type == "LSTM" else 1
    weights = [uniform(-0.9, 0.9, 2, *shape) for shape in ((rows, FEATURES), (rows, UNITS), (2 * rows,))]
    inputs = [real(4, 3, FEATURES), *weights, np.array(lengths, np.int32), *[real(2, 3, UNITS)] * states]
    trial = case(*inputs, outputs=1 + states, direction="bidirectional", hidden_size=UNITS, **attrs)
    t = cases.trial(RULES["", op_type], trial)
    xs = [torch.tensor(t.feeds[name], requires_grad=True) for name in t.wrt]
    ys = in_torch(op_type, "activations" in attrs, xs, lengths)
    dys = [torch.from_numpy(np.random.default_rng(i).uniform(-1, 1, y.shape)) for i, y in enumerate(ys)]
    expected = torch.autograd.grad(ys, xs, dys)
    cotangents = {f"{name}.cotangent": dy.numpy() for name, dy in zip(t.read, dys, strict=True)}
    got = Oracle(cases._vjp(t.model, t.read, t.wrt))({**t.feeds, **cotangents})
    for name, y in zip(t.read, ys, strict=True):
        np.testing.assert_allclose(got[name], y.detach(), rtol=1e-9, atol=1e-12)
    for name, e in zip(t.wrt, expected, strict=True):
        np.testing.assert_allclose(got[f"{name}.grad"], e, rtol=1e-9, atol=1e-12, err_msg=name)


# --- networks ------------------------------------------------------------------------------------------------


def network(nn: Any, kind: str, **options: Any) -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = getattr(nn, kind)(3, 4, num_layers=2, bidirectional=True, batch_first=True, **options)
            self.head = nn.Linear(8, 5)

        def forward(self, x: Any) -> Any:
            output, _ = self.rnn(x)
            return self.head(output.mean(1) + output[:, -1])

    return Net()


NETWORKS = [("RNN", {}), ("RNN", {"nonlinearity": "relu"}), ("GRU", {}), ("LSTM", {}), ("LSTM", {"bias": False})]


@pytest.mark.parametrize(("kind", "options"), NETWORKS)
def test_two_bidirectional_layers_train_as_in_pytorch(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs, ours = network(torch.nn, kind, **options), network(frontend.nn, kind, **options)
    ours.load_state_dict(theirs.state_dict())
    model = frontend.export(ours, {"x": ("batch", "length", 3)})
    x, target = drawn((6, 7, 3)), drawn((6,), kind=5)

    outputs = theirs(torch.from_numpy(x))
    cotangent = drawn((6, 5), seed=1)
    outputs.backward(torch.from_numpy(cotangent))
    gradients = run_model(gg.vjp(model), {"x": x, "output.cotangent": cotangent})
    for name, p in theirs.named_parameters():
        np.testing.assert_allclose(gradients[f"{name}.grad"], p.grad, rtol=1e-4, atol=1e-5, err_msg=name)

    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.02)
    trainer = gg.Trainer(gg.build(model, loss="cross_entropy", optimizer=gg.optim.adam(0.02)))
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(trainer.step({"x": x, "target": target})["loss"], loss.item(), rtol=1e-4)
    longer = {"x": drawn((2, 9, 3)), "target": drawn((2,), kind=5)}  # any batch, any length
    expected = torch.nn.functional.cross_entropy(
        theirs(torch.from_numpy(longer["x"])), torch.from_numpy(longer["target"])
    )
    np.testing.assert_allclose(trainer.step(longer)["loss"], expected.item(), rtol=1e-4)


@pytest.mark.slow
def test_a_network_that_pytorch_exported() -> None:
    pytest.importorskip("onnxscript", reason="PyTorch's exporter needs onnxscript")
    torch.manual_seed(0)
    net, x, cotangent = network(torch.nn, "LSTM"), drawn((3, 4, 3)), drawn((3, 5), seed=1)
    model = frontend.from_torch(net, torch.from_numpy(x))
    assert sum(node.op_type == "LSTM" for node in model.graph.node) == 2
    feeds = {model.graph.input[0].name: x, f"{model.graph.output[0].name}.cotangent": cotangent}
    gradients = run_model(gg.vjp(model), feeds)
    net(torch.from_numpy(x)).backward(torch.from_numpy(cotangent))
    for name, p in net.named_parameters():
        np.testing.assert_allclose(gradients[f"{name}.grad"], p.grad, rtol=1e-4, atol=1e-5, err_msg=name)
