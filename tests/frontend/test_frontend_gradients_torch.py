"""Functions that the frontend composes of several nodes have PyTorch's gradients, not only its values."""

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.frontend import functional, nn
from tests.kit.frontend_parity import drawn, model_of, run_model

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

X = {"x": (2, 3, 4)}
QKV = {"q": (2, 2, 5, 4), "k": (2, 2, 6, 4), "v": (2, 2, 6, 3)}
SCORES = {"x": (4, 5, 2)}
TARGETS = torch.from_numpy(drawn((4, 2), kind=5))
SHARES = torch.softmax(torch.from_numpy(drawn((4, 5, 2))), 1)
WEIGHT = torch.from_numpy(drawn((5,), kind="positive"))
ALLOWED = torch.from_numpy(~drawn((2, 1, 5, 6), kind="mask"))
CONSTANTS = {"targets": TARGETS, "shares": SHARES, "weight": WEIGHT, "allowed": ALLOWED}

CASES = [
    *[
        (f"F.{name}(x)", X)
        for name in ("expm1", "exp2", "erfc", "silu", "logsigmoid", "tanhshrink", "frac", "nan_to_num")
    ],
    *[(f"F.{name}(x.exp())", X) for name in ("log1p", "log2", "log10", "rsqrt")],
    ("F.log1p(x * 1e-5)", X),
    ("F.expm1(x * 1e-5)", X),
    ("F.logit(F.sigmoid(x))", X),
    ("F.logaddexp(x, y * 50)", {**X, "y": (3, 4)}),
    ("F.softplus(x, 2.0, 3.0)", X),
    ("F.glu(x)", X),
    ("F.clamp(x, -0.3, 0.4) + F.clamp(x, y - 1, y + 1)", {**X, "y": (2, 3, 4)}),
    ("x % 0.7 + F.remainder(x, y.exp())", {**X, "y": (2, 3, 4)}),
    ("x.max(1)[0] + x.min(1).values + x.max(1, keepdim=True)[0].squeeze(1)", X),
    ("F.max(F.round(x), dim=1)[0] + F.relu(x).amax(1)", X),
    ("F.relu(x).max(2)[0]", X),
    ("x.var() + x.std(1) + x.var((0, 2), correction=0).sum()", X),
    ("F.normalize(x) + F.cosine_similarity(x, y, 2).unsqueeze(2)", {**X, "y": (2, 3, 4)}),
    ("x.norm(p=3, dim=1) + x.norm(dim=1)", X),
    ("x.gather(2, x.argsort(2)) + x.sort(1)[0] + x.topk(1, 0)[0]", X),
    ("F.roll(x, 1, 2) * x.flip(1) + x[:, [2, 0, 2]]", X),
    ("x[x > 0]", X),
    ("F.rms_norm(x, (4,)) + F.layer_norm(x, (3, 4))", X),
    ("F.interpolate(x, size=7, mode='linear') ** 2", X),
    ("F.adaptive_avg_pool1d(x, 3) ** 2 + F.adaptive_max_pool1d(x, 3)", X),
    ("F.embedding(x.argmax(2), y)", {**X, "y": (4, 5)}),
    ("F.scaled_dot_product_attention(q, k, v, is_causal=True)", QKV),
    ("F.scaled_dot_product_attention(q, k, v, allowed)", QKV),
    ("F.cross_entropy(x, targets, weight=weight, ignore_index=1)", SCORES),
    ("F.cross_entropy(x, targets, weight=weight, ignore_index=1, label_smoothing=0.2)", SCORES),
    ("F.cross_entropy(x, shares, weight=weight, label_smoothing=0.2)", SCORES),
    ("F.huber_loss(x, x * 0.3, delta=0.4) + F.smooth_l1_loss(x, x ** 2)", X),
    ("F.binary_cross_entropy_with_logits(x * 60, F.sigmoid(x))", X),
    ("F.binary_cross_entropy(F.sigmoid(x), F.sigmoid(-x))", X),
    ("F.kl_div(x, F.sigmoid(x), reduction='sum')", X),
    ("F.gaussian_nll_loss(x, x * 2, x ** 2 + 0.1)", X),
    ("F.cosine_embedding_loss(x[0], x[1], F.sign(x[0, :, 0]))", X),
]


class Theirs:
    """torch.nn.functional, then torch."""

    def __getattr__(self, name):
        return getattr(torch.nn.functional, name, None) or getattr(torch, name)


@pytest.mark.parametrize(("text", "shapes"), CASES, ids=[text for text, _ in CASES])
def test_gradient(text, shapes):
    arrays = {name: drawn(shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    tensors = {name: torch.from_numpy(a).requires_grad_() for name, a in arrays.items()}
    y = eval(text, {"F": Theirs()} | CONSTANTS | tensors)
    cotangent = drawn(tuple(y.shape), seed=9)
    (y * torch.from_numpy(cotangent)).sum().backward()

    constants = {name: c.numpy() for name, c in CONSTANTS.items()}

    def loss(*traced):
        scope = {"F": functional} | constants | dict(zip(arrays, traced, strict=True))
        return (eval(text, scope) * cotangent).sum()

    names = [name for name in arrays if tensors[name].grad is not None]
    model = gg.value_and_grad(model_of(loss, arrays, dynamic=()), wrt=names)
    found = run_model(model, {i.name: arrays[i.name] for i in model.graph.input})
    for name in names:
        np.testing.assert_allclose(
            found[f"{name}.grad"], tensors[name].grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_the_padding_row_of_an_embedding_gets_no_gradient():
    theirs = torch.nn.Embedding(7, 4, padding_idx=2)
    theirs.weight.data.normal_()  # the row too: it may come from a file
    ours = nn.Embedding(7, 4, padding_idx=2)
    ours.load_state_dict(theirs.state_dict())
    tokens, cotangent = drawn((3, 5), kind=7), drawn((3, 5, 4))
    assert (tokens == 2).any()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = ours

        def forward(self, tokens):
            return (self.embed(tokens) * cotangent).sum()

    model = gg.value_and_grad(model_of(Net(), {"tokens": tokens}, dynamic=()))
    found = run_model(model, {"tokens": tokens})
    loss = (theirs(torch.from_numpy(tokens)) * torch.from_numpy(cotangent)).sum()
    loss.backward()
    np.testing.assert_allclose(found["output"], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(found["embed.weight.grad"], theirs.weight.grad.numpy(), rtol=1e-5, atol=1e-6)
