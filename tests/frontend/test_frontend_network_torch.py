"""One piece of model code, read by PyTorch and by the frontend: same names, outputs and losses while training."""

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import frontend
from tests.kit.frontend_parity import declared_shapes_hold, drawn, run_model

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch


def residual_network(nn, F):
    class Block(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(after)
            self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(after)
            self.down = None
            if stride != 1:
                self.down = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

        def forward(self, x):
            y = F.relu(self.norm1(self.conv1(x)))
            y = self.norm2(self.conv2(y))
            return F.relu(y + (x if self.down is None else self.down(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
            self.norm = nn.GroupNorm(4, 16)
            self.head = nn.Linear(16, 5)

        def forward(self, x):
            x = self.norm(self.blocks(self.stem(x)))
            return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    return Net()


def test_residual_network_with_dynamic_space():
    torch.manual_seed(0)
    theirs = residual_network(torch.nn, torch.nn.functional)
    ours = residual_network(frontend.nn, frontend.functional)
    ours.load_state_dict(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    model = frontend.export(ours, {"x": ("batch", 3, "height", "width")})

    x, target = drawn((6, 3, 12, 10)), drawn((6,), kind=5)
    theirs.eval()
    expected = theirs(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(run_model(model, {"x": x})["output"], expected, rtol=1e-5, atol=1e-5)
    declared_shapes_hold(model, {"x": x})

    theirs.train()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    trainer = gg.Trainer(gg.build(model, loss="cross_entropy", optimizer=gg.optim.sgd(0.05, momentum=0.9)))
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(theirs(torch.from_numpy(x)), torch.from_numpy(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(trainer.step({"x": x, "target": target})["loss"], loss.item(), rtol=1e-4)
