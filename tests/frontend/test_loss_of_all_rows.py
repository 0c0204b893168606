"""``evaluate`` and ``val_loss`` say the loss of one batch of all rows, however these are cut: against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.frontend import Input, export, nn
from gradgraph.frontend import functional as G

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.torch
F = torch.nn.functional

C = 4
SCORES = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 4] x) => (float[batch, 4] y) '
    "<float[4] w = {1, 1, 1, 1}> { y = Mul(x, w) }"
)
TOKENS = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 3, 4] x) => (float[batch, 3, 4] y) '
    "<float[4] w = {1, 1, 1, 1}> { y = Mul(x, w) }"
)
TWO = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 4] x) => (float[batch, 4] y, float[batch, 4] z) '
    "<float[4] w = {1, 1, 1, 1}, float[4] v = {2, 2, 2, 2}> { y = Mul(x, w) z = Mul(x, v) }"
)
OWN = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> '
    "g (float[batch, 4] x, int64[batch] t) => (float loss) <float[4] w = {1, 1, 1, 1}, float[4] c = {0.5, 1, 2, 3}> "
    "{ y = Mul(x, w) loss = SoftmaxCrossEntropyLoss <ignore_index: int = 1> (y, t, c) }"
)


class Drawn(NamedTuple):
    """A loss, what is evaluated, and what PyTorch says of all of it."""

    model: onnx.ModelProto
    options: Mapping[str, Any]
    data: Mapping[str, np.ndarray]
    expected: Any


def wide(*arrays: Any) -> list[Any]:
    return [torch.tensor(a).double() if np.asarray(a).dtype.kind == "f" else torch.tensor(a) for a in arrays]


def labels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Class numbers, many of them ignored: often all of a batch."""
    found = rng.integers(0, C, shape)
    found[: rng.integers(0, len(found))] = -100
    found[-1] = 1
    return found


def weights(rng: np.random.Generator) -> list[float] | None:
    return [round(float(w), 2) for w in rng.uniform(0.1, 5.0, C)] if rng.random() < 0.7 else None


def either(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def of_classes(rng: np.random.Generator, rows: int) -> Drawn:
    x, t, w = rng.normal(size=(rows, C)).astype(np.float32), labels(rng, rows), weights(rng)
    chosen = {"reduction": either(rng, "mean", "sum"), "label_smoothing": either(rng, 0.0, 0.2)}
    loss = gg.losses.cross_entropy(weight=w, **chosen)
    a, b = wide(x, t)
    return Drawn(SCORES, {"loss": loss}, {"x": x, "target": t},
                 F.cross_entropy(a, b, w and torch.tensor(w).double(), **chosen))  # fmt: skip


def of_tokens(rng: np.random.Generator, rows: int) -> Drawn:
    x, t, w = rng.normal(size=(rows, 3, C)).astype(np.float32), labels(rng, rows, 3), weights(rng)
    a, b = wide(x, t)
    z = either(rng, 0.0, 0.1)
    losses = F.cross_entropy(a.movedim(2, 1), b, w and torch.tensor(w).double(), reduction="none")
    share = torch.where(b == -100, 0.0, torch.tensor(w or [1.0] * C).double()[b.clamp(min=0)])
    expected = (losses + z * a.logsumexp(2) ** 2 * share).sum() / share.sum()
    return Drawn(TOKENS, {"loss": gg.losses.cross_entropy(weight=w, axis=2, z_loss=z)}, {"x": x, "target": t}, expected)


def focal(rng: np.random.Generator, rows: int) -> Drawn:
    x, t, w = rng.normal(size=(rows, C)).astype(np.float32), labels(rng, rows), weights(rng)
    a, b = wide(x, t)
    plain = F.cross_entropy(a, b, reduction="none")
    share = torch.where(b == -100, 0.0, torch.tensor(w or [1.0] * C).double()[b.clamp(min=0)])
    each = plain * (1 - torch.exp(-plain)) ** 2 * share
    how = either(rng, "mean", "sum")
    expected = each.sum() / (share.sum() if how == "mean" else 1)
    return Drawn(SCORES, {"loss": gg.losses.focal(weight=w, reduction=how)}, {"x": x, "target": t}, expected)


def of_numbers(rng: np.random.Generator, rows: int) -> Drawn:
    x, t = (rng.normal(size=(rows, C)).astype(np.float32) for _ in range(2))
    how = either(rng, "mean", "sum")
    name, function = either(rng, ("mse", F.mse_loss), ("l1", F.l1_loss), ("huber", F.huber_loss))
    return Drawn(SCORES, {"loss": getattr(gg.losses, name)(reduction=how)}, {"x": x, "target": t},
                 function(*wide(x, t), reduction=how))  # fmt: skip


def of_yes_and_no(rng: np.random.Generator, rows: int) -> Drawn:
    x, t, w = rng.normal(size=(rows, C)).astype(np.float32), rng.random((rows, C)).round().astype("f4"), weights(rng)
    how = either(rng, "mean", "sum")
    expected = F.binary_cross_entropy_with_logits(*wide(x, t), reduction=how, pos_weight=w and torch.tensor(w).double())
    return Drawn(
        SCORES, {"loss": gg.losses.bce_with_logits(pos_weight=w, reduction=how)}, {"x": x, "target": t}, expected
    )


def of_shares(rng: np.random.Generator, rows: int) -> Drawn:
    x, t = rng.normal(size=(rows, C)).astype(np.float32), rng.dirichlet(np.ones(C), rows).astype(np.float32)
    how = either(rng, "mean", "sum", "batchmean")
    expected = F.kl_div(*wide(x, t), reduction="sum") / {"mean": x.size, "sum": 1, "batchmean": rows}[how]
    return Drawn(SCORES, {"loss": gg.losses.kl_div(reduction=how)}, {"x": x, "target": t}, expected)


def of_regions(rng: np.random.Generator, rows: int) -> Drawn:
    """The mean over samples and classes, of which the ignored labels are no part."""
    x, t = rng.normal(size=(rows, 3, C)).astype(np.float32), labels(rng, rows, 3)
    a, b = wide(x, t)
    counted = (b != -100)[..., None]
    p, c = a.softmax(2) * counted, F.one_hot(b.clamp(min=0), C).double() * counted
    both, called, there = ((p * c).sum(1), p.sum(1), c.sum(1))
    each = 1 - (both + 1) / (both + 0.3 * (called - both) + 0.7 * (there - both) + 1)
    how = either(rng, "mean", "sum")
    loss = gg.losses.tversky(alpha=0.3, beta=0.7, axis=2, reduction=how)
    return Drawn(TOKENS, {"loss": loss}, {"x": x, "target": t}, each.mean() if how == "mean" else each.sum())


def weighed(rng: np.random.Generator, rows: int) -> Drawn:
    x, t, w = rng.normal(size=(rows, 3, C)).astype(np.float32), labels(rng, rows, 3), weights(rng)
    samples, mask, how = rng.random(rows).astype(np.float32), rng.random((rows, 3)) < 0.6, either(rng, "mean", "sum")
    mask[-1] = True
    a, b, s, m = wide(x, t, samples, mask)
    share = torch.where(b == -100, 0.0, torch.tensor(w or [1.0] * C).double()[b.clamp(min=0)]) * s[:, None] * m
    expected = (F.cross_entropy(a.movedim(2, 1), b, reduction="none") * share).sum()
    options = {"loss": gg.losses.cross_entropy(weight=w, axis=2, reduction=how), "sample_weight": True, "mask": True}
    return Drawn(TOKENS, options, {"x": x, "target": t, "sample_weight": samples, "mask": mask},
                 expected / share.sum() if how == "mean" else expected)  # fmt: skip


def several(rng: np.random.Generator, rows: int) -> Drawn:
    x, t, w = rng.normal(size=(rows, C)).astype(np.float32), labels(rng, rows), weights(rng)
    u, how = rng.normal(size=(rows, C)).astype(np.float32), either(rng, "mean", "sum")
    a, b, c = wide(x, t, u)
    expected = F.cross_entropy(a, b, w and torch.tensor(w).double()) + 0.3 * F.mse_loss(2 * a, c, reduction=how)
    loss = {"y": gg.losses.cross_entropy(weight=w), "z": (gg.losses.mse(how), 0.3)}
    return Drawn(TWO, {"loss": loss}, {"x": x, "y_target": t, "z_target": u}, expected)


FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {  # of either library
    "masked mean": lambda y, t, m: ((y - t) ** 2 * m).sum() / m.sum(),
    "masked mean, away from 0": lambda y, t, m: ((y - t).abs() * m).sum() / (m.sum() + 1e-8),
    "quotient of means": lambda y, t, m: ((y - t) ** 2 * m).mean() / m.mean(),
    "sum": lambda y, t, m: ((y - t) ** 2 * m).sum(),
    "a mean over rows of sums": lambda y, t, m: 0.5 * ((y - t) ** 2).sum(-1).mean() - m.mean(),
    "two masks": lambda y, t, m: (y * m).sum() / m.sum() - 2.0 * (t * (1 - m)).sum() / (1 - m).sum(),
}


def written(rng: np.random.Generator, rows: int) -> Drawn:
    x, t = (rng.normal(size=(rows, C)).astype(np.float32) for _ in range(2))
    m = (rng.random((rows, C)) < rng.random((rows, 1))).astype(np.float32)
    m[-1] = [0, 1, 0, 1]
    function = FUNCTIONS[either(rng, *FUNCTIONS)]
    options = {
        "loss": lambda out, batch: function(out["y"], batch["t"], batch["m"]),
        "targets": {"t": Input(("batch", C)), "m": Input(("batch", C))},
    }
    return Drawn(SCORES, options, {"x": x, "t": t, "m": m}, function(*wide(x, t, m)))


def reported(rng: np.random.Generator, rows: int) -> Drawn:
    """Parts of a function's loss are columns of their own."""
    x, t, w = rng.normal(size=(rows, C)).astype(np.float32), labels(rng, rows), weights(rng)
    options = {
        "loss": lambda out, batch: {
            "classes": G.cross_entropy(out["y"], batch["t"], w),
            "size": 0.1 * out["w"].square().mean(),
        },
        "targets": {"t": Input(("batch",), "int64")},
    }
    a, b = wide(x, t)
    classes = F.cross_entropy(a, b, w and torch.tensor(w).double())
    return Drawn(SCORES, options, {"x": x, "t": t}, {"classes": classes, "size": 0.1, "loss": classes + 0.1})


def its_own(rng: np.random.Generator, rows: int) -> Drawn:
    x, t = rng.normal(size=(rows, C)).astype(np.float32), rng.integers(0, C, rows)
    a, b = wide(x, t)
    expected = F.cross_entropy(a, b, torch.tensor([0.5, 1, 2, 3]).double(), ignore_index=1)
    return Drawn(OWN, {"loss": None}, {"x": x, "t": t}, expected)


def of_pairs(rng: np.random.Generator, rows: int) -> Drawn:
    x, t, how = rng.normal(size=(rows, C)).astype(np.float32), rng.choice([-1.0, 1.0], rows), either(rng, "mean", "sum")
    a, b = wide(x, t)
    options = {"loss": gg.losses.cosine_embedding(reduction=how, margin=0.1), "output": ["y", "q"]}
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[batch, 4] x) => (float[batch, 4] y, float[batch, 4] q) '
        "<float[4] w = {1, 1, 1, 1}, float[4] v = {2, 1, 3, -1}> { y = Mul(x, w) q = Mul(x, v) }"
    )
    expected = F.cosine_embedding_loss(a, a * torch.tensor([2.0, 1, 3, -1]), b, 0.1, reduction=how)
    return Drawn(model, options, {"x": x, "target": t.astype(np.float32)}, expected)


def spelt(rng: np.random.Generator, rows: int) -> Drawn:
    x, t = rng.normal(size=(rows, 3, C)).astype(np.float32), rng.integers(1, C, (rows, 2))
    times, lengths, how = np.full(rows, 3), rng.integers(1, 3, rows), either(rng, "mean", "sum")
    t[:, 1] = t[:, 0] % 3 + 1  # which three times can spell
    expected = F.ctc_loss(wide(x)[0].movedim(1, 0).log_softmax(2), *wide(t, times, lengths), reduction=how)
    data = {"x": x, "target": t, "input_lengths": times, "target_lengths": lengths}
    return Drawn(TOKENS, {"loss": gg.losses.ctc(batch_first=True, reduction=how)}, data, expected)


KINDS = (of_classes, of_tokens, focal, of_numbers, of_yes_and_no, of_shares, of_regions, weighed, several, written,
         reported, its_own, of_pairs, spelt)  # fmt: skip


@pytest.mark.sweep(0.1)
@pytest.mark.parametrize("number", range(300))
def test_the_loss_of_all_rows(number: int) -> None:
    rng = np.random.default_rng(number)
    rows = int(rng.integers(5, 30))
    drawn = KINDS[number % len(KINDS)](rng, rows)
    accumulate = 1 if drawn.model is TWO else int(rng.integers(1, 4))  # sums and means are not accumulated together
    step = gg.build(drawn.model, optimizer=gg.optim.sgd(0.0), metrics=[], accumulate=accumulate > 1, **drawn.options)
    trainer = gg.Trainer(step, device="cpu")
    expected = drawn.expected if isinstance(drawn.expected, dict) else {"loss": drawn.expected}
    wanted = pytest.approx({name: float(value) for name, value in expected.items()}, rel=2e-5, abs=1e-6)
    for size in (rows, int(rng.integers(1, rows)), 3):
        found = trainer.evaluate(drawn.data, batch_size=size)
        assert {name: found[name] for name in expected} == wanted, size
    if number % 2:
        batches = [{n: a[i : i + 4] for n, a in drawn.data.items()} for i in range(0, rows, 4)]
        more = {"accumulate": accumulate} if accumulate > 1 else {}
        row = trainer.fit(drawn.data, epochs=1, batch_size=rows, validation=batches, progress=False, **more).row()
        assert {name: row[f"val_{name}"] for name in expected} == wanted


def test_a_loss_of_another_form_is_a_mean_over_batches() -> None:
    """No sums make up a root of a mean, nor what compares the samples of a batch with each other."""
    model = export(nn.Linear(4, 4), {"x": ("batch", 4)}, ["y"])
    step = gg.build(model, lambda out, batch: out["y"].square().mean().sqrt())
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    trainer = gg.Trainer(step, device="cpu")
    halves = [trainer.evaluate({"x": part})["loss"] for part in (x[:4], x[4:])]
    assert trainer.evaluate({"x": x}, batch_size=4)["loss"] == pytest.approx(sum(halves) / 2, rel=1e-6)
