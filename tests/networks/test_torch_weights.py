"""What PyTorch's exporters write is trained as PyTorch trains it: every parameter, no constant."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg

torch = pytest.importorskip("torch", reason="exports from PyTorch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Net(torch.nn.Module):
    """ReLU6, a norm's ε, attention's 1/√d, a mask; and single numbers that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
        self.norm, self.slope = torch.nn.LayerNorm(16), torch.nn.PReLU()
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.6))
        self.block = torch.nn.ParameterDict({"gate": torch.ones(1)})
        self.register_buffer("factor", torch.tensor(0.7))

    def forward(self, x: Any) -> Any:
        x = self.norm(self.slope(torch.nn.functional.relu6(self.first(x))))
        x = x.unsqueeze(1)
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)
        x = x * self.block["gate"] + 0.5 * x.pow(2)
        return self.last(x) * self.logit_scale.exp() * self.factor


@pytest.mark.parametrize("options", [{}, {"optimize": False}], ids=["folded", "as written"])
def test_the_exporter_of_today(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.onnx.export(net, (torch.randn(2, 5, 8),), dynamo=True, verbose=False, **options).model_proto
    caplog.clear()
    trained = set(gg.build(model, "mse").manifest.trainable)
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    numbers = np.concatenate([p.detach().numpy().ravel() for p in net.parameters()])
    assert all(np.isin(stored[name], numbers).all() for name in trained), "no constant"
    found = np.concatenate([stored[name].ravel() for name in trained])
    missing = {name for name, p in net.named_parameters() if not np.isin(p.detach().numpy(), found).all()}
    assert missing == ({"logit_scale"} if not options else set())  # of which only the exponential is in the file
    notes = [r.getMessage() for r in caplog.records if r.name == "gradgraph" and "Dropout" not in r.getMessage()]
    assert ["is not trained, and the file does not say" in n for n in notes] == [True] * len(missing)
