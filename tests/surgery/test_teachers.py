"""A student and its frozen teacher: the same trajectories as in PyTorch, and a student alone in what is exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph import frontend
from gradgraph.errors import BuildError, UnknownNameError
from gradgraph.frontend import nn

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 6)).astype(np.float32), RNG.integers(0, 4, 16)
BATCH = {"x": X, "target": Y}


def student() -> onnx.ModelProto:
    return frontend.export(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), {"x": ("n", 6)})


def teacher(name: str = "x", sizes: tuple[int, int] = (6, 4), normed: bool = True) -> onnx.ModelProto:
    """With statistics that are not those of any batch, and a Dropout."""
    first, last = nn.Linear(sizes[0], 8), nn.Linear(8, sizes[1])
    norm = [nn.BatchNorm1d(8)] if normed else []
    model = frontend.export(nn.Sequential(first, *norm, nn.Tanh(), nn.Dropout(0.5), last), {name: ("n", sizes[0])})
    rng = np.random.default_rng(7)
    for tensor in model.graph.initializer:
        if "running_var" in tensor.name or tensor.name == "1.weight":
            tensor.CopyFrom(onnx.numpy_helper.from_array(rng.uniform(0.5, 2, 8).astype(np.float32), tensor.name))
    return model


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def hidden(model: onnx.ModelProto) -> str:
    return next(n.output[0] for n in model.graph.node if n.op_type == "Tanh")


def run(model: onnx.ModelProto, x: np.ndarray, name: str = "x") -> np.ndarray:
    (y,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {name: x})
    return y


def in_torch(small: onnx.ModelProto, large: onnx.ModelProto, steps: int, weight: float, **given: float) -> list[float]:
    torch = pytest.importorskip("torch", reason="PyTorch gives the trajectory")
    functional = torch.nn.functional
    mine = {n: torch.tensor(w, requires_grad=True) for n, w in weights(small).items()}
    logits = torch.tensor(run(large, X))
    inner = onnx.ModelProto()
    inner.CopyFrom(large)
    inner.graph.output.append(helper.make_tensor_value_info(hidden(large), 1, None))
    session = ort.InferenceSession(inner.SerializeToString(), providers=["CPUExecutionProvider"])
    states = torch.tensor(session.run([hidden(large)], {"x": X})[0])
    optimizer = torch.optim.AdamW(mine.values(), lr=1e-2)
    found = []
    t, alpha = given["temperature"], given["alpha"]
    for _ in range(steps):
        h = torch.tanh(functional.linear(torch.tensor(X), mine["0.weight"], mine["0.bias"]))
        y = functional.linear(h, mine["2.weight"], mine["2.bias"])
        soft = functional.kl_div(
            functional.log_softmax(y / t, -1), functional.softmax(logits / t, -1), reduction="batchmean"
        )
        loss = (1 - alpha) * functional.cross_entropy(y, torch.tensor(Y))
        loss = loss + alpha * (soft * t * t + weight * functional.mse_loss(h, states))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("temperature", "alpha", "weight"), [(1.0, 0.5, 0.0), (4.0, 0.9, 0.0), (2.0, 0.3, 2.5)])
def test_trajectories_are_those_of_pytorch(temperature: float, alpha: float, weight: float) -> None:
    small, large = student(), teacher()
    match = {hidden(small): hidden(large)} if weight else {}
    made = gg.distill(small, large, temperature, alpha=alpha, match=match, match_weight=weight)
    trainer = gg.Trainer(gg.build(made, "cross_entropy", gg.optim.adamw(1e-2)), device="cpu")
    losses = [float(trainer.step(BATCH)["loss"]) for _ in range(6)]
    np.testing.assert_allclose(
        losses, in_torch(small, large, 6, weight, temperature=temperature, alpha=alpha), rtol=1e-5
    )


def test_the_student_alone_is_trained_and_exported() -> None:
    small, large = student(), teacher()
    made = gg.distill(small, large, match={hidden(small): hidden(large)})
    np.testing.assert_allclose(
        ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            ["teacher.output"], {"x": X}
        )[0],
        run(large, X), rtol=1e-5, atol=1e-6,
    )  # fmt: skip
    step = gg.build(made, "cross_entropy", gg.optim.sgd(0.1), train="*")
    assert set(step.manifest.trainable) == {s.name for s in step.manifest.state} == set(weights(small))
    assert step.manifest.outputs == ("output",)
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit(BATCH, epochs=2, progress=False)
    told = trainer.evaluate(BATCH)
    np.testing.assert_allclose(told["loss"], (told["student_loss"] + told["distillation_loss"]) / 2, rtol=1e-5)
    exported = trainer.export()
    assert set(weights(exported)) == set(weights(small))
    assert [v.name for v in exported.graph.output] == ["output"]
    gg.build(exported, "cross_entropy")  # without a teacher again
    with pytest.raises(UnknownNameError, match=r"'teacher\.0.*' matches no weight|matches no weight"):
        gg.build(made, "cross_entropy", train="teacher.0.weight")


def test_without_labels() -> None:
    large = teacher(normed=False)
    trainer = gg.Trainer(
        gg.build(gg.distill(student(), large, 1.0, alpha=1.0), None, gg.optim.adam(0.03)), device="cpu"
    )
    history = trainer.fit({"x": X}, epochs=150, batch_size=16, progress=False)
    assert history["loss"][-1] < 0.02 * history["loss"][0]
    scores = np.sort(wanted := run(large, X))
    sure = scores[:, -1] - scores[:, -2] > 0.1  # by more than what is left of the loss
    assert sure.sum() > len(X) / 2
    np.testing.assert_array_equal(trainer.predict(X).argmax(1)[sure], wanted.argmax(1)[sure])
    with pytest.raises(BuildError, match="there is no other loss"):
        gg.build(gg.distill(student(), large), None)


def test_metrics_beside_a_teacher_alone() -> None:
    made = gg.distill(student(), teacher(), alpha=1.0)
    step = gg.build(made, None, metrics={"mean": lambda out, batch: out["output"].mean()})
    assert [m.name for m in step.manifest.measures] == ["loss", "distillation_loss", "mean"]
    scores = gg.Trainer(step, device="cpu").evaluate({"x": X})
    assert np.isfinite(scores["mean"])
    with pytest.raises(BuildError, match="write it as a function"):
        gg.build(made, None, metrics="accuracy")


@pytest.mark.parametrize("steps", [{"mask": True}, {"sample_weight": True}])
def test_weights_of_samples_weigh_both_terms(steps: dict[str, Any]) -> None:
    made = gg.distill(student(), teacher(), alpha=0.6)
    name = next(iter(steps))
    chosen = np.arange(16) < 5
    weigh = chosen if name == "mask" else chosen.astype(np.float32)
    some = gg.Trainer(gg.build(made, "cross_entropy", "sgd", **steps), device="cpu").step({**BATCH, name: weigh})
    few = gg.Trainer(gg.build(made, "cross_entropy", "sgd"), device="cpu").step({"x": X[:5], "target": Y[:5]})
    np.testing.assert_allclose(some["loss"], few["loss"], rtol=1e-5)


def test_classes_on_another_axis_and_inputs_by_other_names() -> None:
    def per_pixel() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 1))

    x = RNG.normal(size=(4, 2, 5, 5)).astype(np.float32)
    small = frontend.export(per_pixel(), {"x": ("n", 2, 5, 5)})
    large = frontend.export(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1)), {"image": ("n", 2, 5, 5)})
    with pytest.raises(BuildError, match=r"the student \('x'\) and the teacher \('image'\) share no input"):
        gg.distill(small, large)
    made = gg.distill(small, large, 1.0, alpha=1.0, inputs={"image": "x"})
    trainer = gg.Trainer(gg.build(made, "cross_entropy", "sgd"), device="cpu")
    found = trainer.evaluate({"x": x, "target": RNG.integers(0, 3, (4, 5, 5))})["loss"]
    s, t = (np.exp(y) / np.exp(y).sum(1, keepdims=True) for y in (run(small, x), run(large, x, "image")))
    np.testing.assert_allclose(found, (t * np.log(t / s)).sum(1).mean(), rtol=1e-4)


def test_an_input_that_only_the_teacher_has() -> None:
    made = gg.distill(student(), two_inputs())
    trainer = gg.Trainer(gg.build(made, "cross_entropy", "sgd"), device="cpu")
    z = np.ones((16, 4), np.float32)
    trainer.fit({**BATCH, "z": z}, epochs=1, progress=False)
    assert [v.name for v in trainer.export().graph.input] == ["x"]


def two_inputs() -> onnx.ModelProto:
    model = teacher()
    last = model.graph.node[-1].output
    last[0] = "before"
    model.graph.node.append(helper.make_node("Add", ["before", "z"], ["output"]))
    model.graph.input.append(helper.make_tensor_value_info("z", 1, ["n", 4]))
    return model


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: gg.distill(gg.distill(student(), teacher()), teacher()), BuildError, "already has a teacher"),
        (
            lambda: gg.build(gg.distill(student(), teacher()), mask={"logits": True}),
            BuildError,
            "a mask of a single output",
        ),
        (lambda: gg.distill(student(), teacher(sizes=(6, 5))), BuildError, "cannot be compared"),
        (lambda: gg.distill(student(), teacher(sizes=(5, 4))), BuildError, "cannot be compared"),
        (lambda: gg.distill(student(), teacher(), match={"nothing": "x"}), UnknownNameError, "no value 'nothing'"),
        (lambda: gg.distill(student(), teacher(), inputs={"y": "x"}), UnknownNameError, "teacher has no input 'y'"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert says in str(raised.value)


@pytest.mark.sweep(0)
def test_a_teacher_beside_rounding_pruning_adapters_and_several_steps() -> None:
    rounded = gg.distill(gg.qat(student(), {"x": X}, ranges="learned"), teacher())
    pruned = gg.optim.magnitude_pruning(gg.optim.adamw(1e-2), 0.5, end=0)
    trainer = gg.Trainer(gg.build(rounded, "cross_entropy", pruned), device="cpu")
    trainer.fit(BATCH, epochs=2, progress=False)
    integers = [w for n, w in weights(trainer.export()).items() if n.endswith("weight_quantized")]
    assert [(w == 0).mean() for w in integers] == [0.5, 0.5]
    adapted = gg.build(gg.distill(gg.lora(student(), "*", rank=2), teacher()), "cross_entropy")
    assert set(adapted.manifest.trainable) == {f"{layer}.lora_{part}" for layer in (0, 2) for part in "AB"}
    first, last = (gg.StepOptions("cross_entropy", "sgd", train=glob) for glob in ("0.*", "2.*"))
    both = gg.build(gg.distill(student(), teacher()), steps={"first": first, "last": last})
    assert set(both.manifest.trainable) == set(weights(student()))


# --- positions that do not count ---------------------------------------------------------------------------------

PADDED = np.array([[True, True, True, False, False], [True, True, True, True, False]])
TEXT = {"x": RNG.normal(size=(2, 5, 6)).astype(np.float32)}
LABELS = RNG.integers(0, 4, (2, 5))


def of_tokens(hidden_size: int = 8) -> onnx.ModelProto:
    layers = nn.Sequential(nn.Linear(6, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 4))
    return frontend.export(layers, {"x": ("n", "t", 6)})


def by_hand(small: onnx.ModelProto, large: onnx.ModelProto, counts: np.ndarray, weight: float) -> float:
    """T = 2, α = 1: a mean over the positions that count, of the divergence and of the squares."""
    logits, states = {}, {}
    for which, model in (("small", small), ("large", large)):
        inner = onnx.ModelProto()
        inner.CopyFrom(model)
        inner.graph.output.append(helper.make_tensor_value_info(hidden(model), 1, None))
        session = ort.InferenceSession(inner.SerializeToString(), providers=["CPUExecutionProvider"])
        logits[which], states[which] = session.run(None, TEXT)
        logits[which] = logits[which].astype(np.float64) / 2
    log_p = {w: y - np.log(np.exp(y).sum(-1, keepdims=True)) for w, y in logits.items()}
    each = 4 * (np.exp(log_p["large"]) * (log_p["large"] - log_p["small"])).sum(-1)
    squares = ((states["small"] - states["large"]) ** 2).mean(-1)
    return float(((each + weight * squares) * counts).sum() / counts.sum())


@pytest.mark.sweep(0.14)
@pytest.mark.parametrize("how", ["labels", "mask", "mask without labels", "sample_weight", "weights without labels"])
def test_padding_counts_neither_in_logits_nor_in_hidden_states(how: str) -> None:
    small, large = of_tokens(), of_tokens()
    made = gg.distill(small, large, 2, alpha=1, match={hidden(small): hidden(large)}, match_weight=3)
    loss = None if "without" in how else gg.losses.cross_entropy(axis=-1)
    data: dict[str, Any] = dict(TEXT) if loss is None else {**TEXT, "target": LABELS}
    counts, weigh = PADDED.astype(np.float64), {}
    if how == "labels":
        data["target"] = np.where(PADDED, LABELS, -100)
    elif "mask" in how:
        data["mask"], weigh = PADDED, {"mask": True}
    else:
        data["sample_weight"], weigh = np.array([0.5, 2], np.float32), {"sample_weight": True}
        counts = np.repeat(data["sample_weight"][:, None], 5, 1)
    trainer = gg.Trainer(gg.build(made, loss, "sgd", **weigh), device="cpu")
    wanted = by_hand(small, large, counts, 3)
    np.testing.assert_allclose(trainer.evaluate(data)["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(trainer.step(data)["loss"], wanted, rtol=1e-5)
    assert abs(by_hand(small, large, np.ones((2, 5)), 3) - wanted) > 1e-3


def test_what_lies_behind_padding_may_be_infinite() -> None:
    small, large = of_tokens(), of_tokens()
    made = gg.distill(small, large, alpha=1, match={hidden(small): hidden(large)})
    trainer = gg.Trainer(gg.build(made, gg.losses.cross_entropy(axis=-1), gg.optim.sgd(0.1)), device="cpu")
    data = {"x": np.where(PADDED[..., None], TEXT["x"], 1e30), "target": np.where(PADDED, LABELS, -100)}
    assert np.isfinite(trainer.step(data)["loss"])
    assert all(np.isfinite(w).all() for w in trainer.state_dict().values())


def test_a_mask_of_positions_that_hidden_states_do_not_have_is_refused() -> None:
    def pooled() -> onnx.ModelProto:
        class Pooled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.wide, self.last = nn.Linear(6, 7), nn.Linear(6, 4)

            def forward(self, x: Any) -> Any:
                return self.last(x) + self.wide(x.mean(1)).tanh().mean()

        return frontend.export(Pooled(), {"x": (2, 5, 6)})

    made = gg.distill(pooled(), pooled(), match={hidden(pooled()): hidden(pooled())})
    by_class = gg.losses.cross_entropy(axis=-1)
    with pytest.raises(BuildError, match=r"weights 'mask' of shape \[2, 5\] cannot be applied.*\[2, 7\]"):
        gg.build(made, by_class, mask=True)
    gg.build(made, by_class, sample_weight=True)  # samples it has
    gg.build(made, by_class)  # the labels' axes are not its own, so all of it counts
