"""Attention and Transformer layers against PyTorch's, with its state_dict, batch and length dynamic."""

import numpy as np
import pytest

from gradgraph.frontend import Input, export, nn
from tests.kit.frontend_parity import declared_shapes_hold, drawn, run_model

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch

E, HEADS = 8, 2


def twins(ours, theirs):
    torch.manual_seed(0)
    theirs = theirs.eval()
    for p in theirs.parameters():
        p.data += 0.2 * torch.randn_like(p)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def causal(length):
    return np.triu(np.ones((length, length), bool), 1)


def padding(batch, length):
    mask = np.zeros((batch, length), bool)
    mask[0, length - 2 :] = True
    return mask


MHA = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"kdim": 5, "vdim": 3},
    {"kdim": 5, "vdim": 3, "batch_first": True, "bias": False},
]


def shaped(batch, length, width, batch_first):
    return (batch, length, width) if batch_first else (length, batch, width)


@pytest.mark.parametrize("average", [True, False], ids=["mean-weights", "all-weights"])
@pytest.mark.parametrize("options", MHA, ids=str)
def test_cross_attention(options, average):
    ours, theirs = twins(nn.MultiheadAttention(E, HEADS, **options), torch.nn.MultiheadAttention(E, HEADS, **options))
    first = options.get("batch_first", False)
    widths = (E, options.get("kdim", E), options.get("vdim", E))
    lengths = ("L", "S", "S")
    specs = {n: shaped("batch", t, w, first) for n, t, w in zip("qkv", lengths, widths, strict=True)}
    specs["pad"] = Input(("batch", "S"), "bool")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ours

        def forward(self, q, k, v, pad):
            return self.attention(q, k, v, key_padding_mask=pad, average_attn_weights=average)

    model = export(Net(), specs)
    for batch, length, source in ((2, 3, 4), (3, 5, 6)):
        sizes = (length, source, source)
        feeds = {n: drawn(shaped(batch, t, w, first)) for n, t, w in zip("qkv", sizes, widths, strict=True)}
        feeds["pad"] = padding(batch, source)
        found = run_model(model, feeds)
        tensors = [torch.from_numpy(a) for a in feeds.values()]
        expected = theirs(*tensors[:3], key_padding_mask=tensors[3], average_attn_weights=average)
        for a, b in zip(found.values(), expected, strict=True):
            np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-5)
        declared_shapes_hold(model, feeds)


MASKS = {
    "boolean": (causal, "bool", ("L", "L")),
    "added": (lambda n: np.where(causal(n), -1.5, 0.25).astype(np.float32), "float32", ("L", "L")),
    "per head": (lambda n: np.stack([causal(n)] * 2 * HEADS), "bool", (2 * HEADS, "L", "L")),
}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")  # PyTorch on its own mixture of masks
def test_masked_self_attention(name, padded):
    make, dtype, dims = MASKS[name]
    ours, theirs = twins(
        nn.MultiheadAttention(E, HEADS, batch_first=True), torch.nn.MultiheadAttention(E, HEADS, batch_first=True)
    )

    def forward(x, mask, pad):
        return ours(x, x, x, attn_mask=mask, key_padding_mask=pad if padded else None)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ours
            self.forward = forward

    model = export(Net(), {"x": (2, "L", E), "mask": Input(dims, dtype), "pad": Input((2, "L"), "bool")})
    for length in (3, 5):
        feeds = {"x": drawn((2, length, E)), "mask": make(length), "pad": padding(2, length)}
        x, mask, pad = (torch.from_numpy(a) for a in feeds.values())
        expected = theirs(x, x, x, attn_mask=mask, key_padding_mask=pad if padded else None)
        known = {i.name for i in model.graph.input}
        found = run_model(model, {k: v for k, v in feeds.items() if k in known})
        for a, b in zip(found.values(), expected, strict=True):
            np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_rows_without_any_allowed_key_are_zero():
    ours = nn.MultiheadAttention(E, HEADS, batch_first=True)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ours

        def forward(self, x, pad):
            return self.attention(x, x, x, key_padding_mask=pad)

    model = export(Net(), {"x": ("batch", "L", E), "pad": Input(("batch", "L"), "bool")})
    pad = np.array([[True, True, True], [False, False, True]])
    out, weights = run_model(model, {"x": drawn((2, 3, E)), "pad": pad}).values()
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(weights[0], 0.0)
    np.testing.assert_allclose(weights[1].sum(-1), 1.0, rtol=1e-6)


ENCODERS = [
    {},
    {"batch_first": True, "norm_first": True},
    {"activation": "gelu", "batch_first": True},
    {"bias": False, "layer_norm_eps": 1e-3, "norm_first": True},
]


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("options", ENCODERS, ids=str)
def test_transformer_encoder(options, masked):
    layers = [lib.TransformerEncoderLayer(E, HEADS, 16, dropout=0.2, **options) for lib in (nn, torch.nn)]
    ours, theirs = twins(
        nn.TransformerEncoder(layers[0], 2, nn.LayerNorm(E)),
        torch.nn.TransformerEncoder(layers[1], 2, torch.nn.LayerNorm(E), enable_nested_tensor=False),
    )
    first = options.get("batch_first", False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = ours

        def forward(self, x, pad=None):
            if pad is None:
                return self.encoder(x)
            mask = nn.generate_square_subsequent_mask(x.size(1 if first else 0))
            return self.encoder(x, mask, pad)

    specs = {"x": shaped("batch", "time", E, first)}
    specs |= {"pad": Input(("batch", "time"), "bool")} if masked else {}
    model = export(Net(), specs)
    assert [n.op_type for n in model.graph.node].count("Dropout") == 2 * 4
    for batch, length in ((2, 4), (3, 6)):
        x = drawn(shaped(batch, length, E, first))
        feeds = {"x": x} | ({"pad": padding(batch, length)} if masked else {})
        (found,) = run_model(model, feeds).values()
        masks = (torch.from_numpy(causal(length)), torch.from_numpy(padding(batch, length))) if masked else ()
        with torch.no_grad():
            expected = theirs(torch.from_numpy(x), *masks)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)
        declared_shapes_hold(model, feeds)
