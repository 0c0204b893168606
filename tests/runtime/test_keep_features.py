"""fit(keep_features=...): the bits of a fit without it, for values that are the same in every epoch, and refusals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.data.dataset import Loadable
from gradgraph.errors import BuildError, DataError, DivergedError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.features import kept_rows
from gradgraph.runtime.features.cheapest_cut import cheapest_cut
from gradgraph.runtime.features.split import split
from gradgraph.runtime.features.static_values import static_values
from tests.kit import tiny_bert
from tests.kit.small_models import model_of, parsed

RNG = np.random.default_rng(7)
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) * 0.4 for name, shape in
           {"a": (6, 8), "b": (8, 8), "c": (8, 3), "d": (3,)}.items()}  # fmt: skip
TRUNK = """(float[n, 6] x) => (float[n, 3] y) {
    h = MatMul(x, a)  s = Tanh(h)  g = MatMul(s, b)  r = Relu(g)  l = MatMul(r, c)  y = Add(l, d)
}"""


def points(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 6)).astype(np.float32), "target": rng.integers(0, 3, rows)}


def head_only(**options: Any) -> gg.Step:
    given = {"loss": "cross_entropy", "optimizer": "adam", "train": ["c", "d"]} | options
    return gg.build(parsed(TRUNK, **WEIGHTS), **given)


def fitted(step: gg.Step, data: Any, keep: Any, **options: Any) -> tuple[dict[str, list[float]], dict[str, Any], Any]:
    trainer = gg.Trainer(step, device="cpu", seed=3, options=RuntimeOptions(threads=1))
    given = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05, "progress": False} | options
    history = trainer.fit(data, keep_features=keep, **given)
    return {k: list(v) for k, v in history.items()}, trainer.state_dict(), trainer


def check_same_bits(step: gg.Step, data: Any, keep: Any = True, **options: Any) -> None:
    one, state, trainer = fitted(step, data, keep, **options)
    other, expected, without = fitted(step, data, False, **options)
    assert one == other
    assert state.keys() == expected.keys() and all(np.array_equal(state[n], expected[n]) for n in state)
    assert trainer.progress.sizes == without.progress.sizes


# --- the same bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [32, 27, 5])
def test_arrays(rows: int) -> None:
    check_same_bits(head_only(), points(rows), validation=points(19, 1))
    check_same_bits(head_only(), points(rows), shuffle=False)


def test_options_of_fit() -> None:
    step = head_only(accumulate=True, ema=0.9, metrics=["accuracy", "f1"])
    check_same_bits(step, points(30), validation=points(11, 1), patience=2, accumulate=2, eval_every=3)
    check_same_bits(step, points(30), drop_last=True, limit=2, max_steps=5)


def test_a_table_and_a_dataset() -> None:
    data = points(21)

    class Pairs:
        def __len__(self) -> int:
            return 21

        def __getitem__(self, i: int) -> tuple[Any, Any]:
            return data["x"][i], data["target"][i]

    check_same_bits(head_only(), Pairs(), validation=Pairs())
    pd = pytest.importorskip("pandas")
    check_same_bits(head_only(), {"x": pd.DataFrame(data["x"]), "target": data["target"]})


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for i in range(12):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (9, 9, 3), np.uint8)
        image.fromarray(pixels).save(tmp_path / str(i % 2) / f"{i}.png")
    weights = {"k": RNG.standard_normal((4, 3, 3, 3)), "w": RNG.standard_normal((4, 2))}
    model = parsed("""(float[n, 3, 9, 9] x) => (float[n, 2] y) {
        h = Conv(x, k)  r = Relu(h)  g = GlobalAveragePool(r)  f = Flatten(g)  y = MatMul(f, w)
    }""", **weights)  # fmt: skip
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train="w")
    check_same_bits(step, gg.image_folder(tmp_path), batch_size=5, validation=gg.image_folder(tmp_path))
    with pytest.raises(DataError, match="augmented anew in each epoch"):
        fitted(step, gg.image_folder(tmp_path, augment="flip"), True)
    check_same_bits(step, gg.image_folder(tmp_path, augment="flip"), "auto")


def test_texts(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    texts, labels = tiny_bert.sentences(40)
    read, frame = tiny_bert.tokenizer(tmp_path / "tokenizer.json"), {"text": texts, "label": labels}
    step = gg.build(tiny_bert.classifier(), loss="cross_entropy", optimizer="sgd", train="head.*")
    check_same_bits(step, gg.text.table(frame, read, one_length=True))
    varying = gg.text.table(frame, read)  # each batch is padded to its longest text
    losses = [fitted(step, varying, keep, validation=varying)[0] for keep in (True, False)]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)
    assert losses[0]["val_loss"] == pytest.approx(losses[1]["val_loss"], rel=1e-5)
    averaged = parsed("""(int64[n, t] input_ids) => (float[n, 2] y) <int64[1] axis = {1}> {
        e = Gather(table, input_ids)  h = MatMul(e, k)  m = ReduceMean <keepdims = 0> (h, axis)  y = MatMul(m, w)
    }""", table=RNG.standard_normal((64, 4)), k=RNG.standard_normal((4, 4)), w=RNG.standard_normal((4, 2)))  # fmt: skip
    step = gg.build(averaged, loss="cross_entropy", optimizer="sgd", train="w")
    with pytest.raises(DataError, match="padding changes"):
        fitted(step, varying, True)
    by_length = sorted(range(40), key=lambda i: len(texts[i]))  # so that few samples are padded in this order
    alike = {"text": [texts[i] for i in by_length], "label": [labels[i] for i in by_length]}
    with pytest.raises(DataError, match="padding changes"):
        fitted(step, gg.text.table(alike, read), True, batch_size=2)


def test_a_dataset_that_keeps_similar_samples_together() -> None:
    data = points(24)

    class Grouped(Loadable):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {name: array[i] for name, array in data.items()}

        def names_for(self, specs: Any, known: Any) -> Any:
            return known

        def load(self, batches: Any, specs: Any, seed: Any, known: Any = None) -> Any:
            for rows in batches:
                yield {name: data[name][np.asarray(rows)] for name in specs}

        def order(self, seed: int, epoch: int, batch_size: int) -> np.ndarray:
            return np.roll(np.arange(24)[::-1], epoch)

    check_same_bits(head_only(), Grouped())


def test_resume_within_an_epoch(tmp_path: Path) -> None:
    step, data, path = head_only(), points(30), tmp_path / "run.ckpt"
    _, expected, _ = fitted(step, data, False)
    for first, then in ((True, False), (False, True), (True, True)):
        fitted(step, data, first, checkpoint=path, max_steps=6)
        trainer = gg.Trainer.resume(step, path, device="cpu", options=RuntimeOptions(threads=1))
        trainer.fit(data, 3, 8, learning_rate=0.05, progress=False, keep_features=then, resume=True)
        assert all(np.array_equal(value, expected[n]) for n, value in trainer.state_dict().items())


def test_files_next_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_rows, "free_memory", lambda: 100)
    caplog.set_level(logging.INFO, "gradgraph")
    step, data, path = head_only(), points(30), tmp_path / "run.ckpt"
    _, expected, _ = fitted(step, data, False, validation=data)
    fitted(step, data, True, validation=data)  # in a temporary folder

    def stop(trainer: Any, row: Any) -> None:
        raise KeyboardInterrupt

    callback = type("Stop", (), {"on_epoch": staticmethod(stop)})()
    for changed in (False, True):
        trainer = gg.Trainer(step, device="cpu", seed=3, options=RuntimeOptions(threads=1))
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(data, 3, 8, learning_rate=0.05, progress=False, keep_features=True, validation=data,
                        callbacks=[callback], checkpoint=path, checkpoint_every=1)  # fmt: skip
        assert sorted(p.name for p in (tmp_path / "run.features").iterdir()) == ["training", "validation"]
        caplog.clear()
        resumed = gg.Trainer.resume(step, path, device="cpu", options=RuntimeOptions(threads=1))
        own = {**data, "x": data["x"] + np.float32(changed)}
        resumed.fit(own, 3, 8, learning_rate=0.05, progress=False, keep_features=True, validation=data, resume=True,
                    checkpoint=path)  # fmt: skip
        assert ("found features of 30 samples of the training data" in caplog.text) == (not changed)
        assert not (tmp_path / "run.features").exists()
        same = all(np.array_equal(value, expected[n]) for n, value in resumed.state_dict().items())
        assert same == (not changed)


def test_what_a_teacher_answers_is_kept() -> None:
    teacher = parsed(TRUNK, **{n: w + 0.1 for n, w in WEIGHTS.items()})
    step = gg.build(gg.surgery.distill(parsed(TRUNK, **WEIGHTS), teacher), loss="cross_entropy", optimizer="sgd")
    parts = split(step, {"x": (8, 6)})
    assert {row.shape for row in parts.kept.values()} == {(3,)} and parts.passed == ("x",)
    check_same_bits(step, points(20), validation=points(9, 1))


# --- where to cut -----------------------------------------------------------------------------------------


def cut_of(step: gg.Step, shapes: Mapping[str, tuple[int, ...]]) -> set[str | None]:
    return {x.name for x in cheapest_cut(static_values(step.train, step.manifest, shapes))}


def test_few_bytes_cross_the_cut() -> None:
    weights = {"k": RNG.standard_normal((4, 3, 1, 1)), "w": RNG.standard_normal((4, 4, 1, 1))}
    model = parsed("""(float[n, 3, 8, 8] x) => (float[n, 4, 16, 16] y)
        <float[4] scales = {1.0, 1.0, 2.0, 2.0}> {
        h = Conv(x, k)  small = Relu(h)  large = Resize(small, , scales)  y = Conv(large, w)
    }""", **weights)  # fmt: skip
    step = gg.build(model, loss="mse", optimizer="sgd", train="w")
    assert cut_of(step, {"x": (2, 3, 8, 8)}) == {"small"}  # a Resize is cheap
    assert cut_of(head_only(), {"x": (8, 6)}) == {"r"}
    assert cut_of(head_only(train=["b", "c"]), {"x": (8, 6)}) == {"s"}


def test_an_embedding_is_looked_up_in_each_epoch() -> None:
    model = parsed("""(int64[n, 5] x) => (float[n, 5, 2] y) { e = Gather(table, x)  y = MatMul(e, w) }""",
                   table=RNG.standard_normal((9, 64)), w=RNG.standard_normal((64, 2)))  # fmt: skip
    step = gg.build(model, loss="mse", optimizer="sgd", train="w")
    with pytest.raises(BuildError, match=r"no frozen layer can be computed once for each sample: node .* \(MatMul\) "
                       "reads the trained weight 'w'"):  # fmt: skip
        split(step, {"x": (8, 5)})


# --- refusals ---------------------------------------------------------------------------------------------


def refusal(model: onnx.ModelProto, train: Any = "c", **options: Any) -> str:
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train=train, **options)
    with pytest.raises(BuildError) as caught:
        fitted(step, points(16), True)
    check_same_bits(step, points(16), "auto")
    return str(caught.value)


def test_what_changes_is_named() -> None:
    assert "reads the trained weight 'a'" in refusal(parsed(TRUNK, **WEIGHTS), train=["a", "c"])
    dropped = """(float[n, 6] x) => (float[n, 3] y) <float half = {0.5}, bool yes = {1}> {
        q = Dropout(x, half, yes)  h = MatMul(q, a)  r = Relu(h)  y = MatMul(r, c)
    }"""
    assert "draws random numbers" in refusal(parsed(dropped, a=WEIGHTS["a"], c=WEIGHTS["c"]))
    mixed = """(float[n, 6] x) => (float[n, 3] y) <int64[1] axis = {0}> {
        m = ReduceMean(x, axis)  q = Sub(x, m)  h = MatMul(q, a)  r = Relu(h)  y = MatMul(r, c)
    }"""
    said = refusal(parsed(mixed, a=WEIGHTS["a"], c=WEIGHTS["c"]))
    assert "reads the trained weight" not in said and "ReduceMean" in said and "over samples" in said


def test_batch_statistics_are_named() -> None:
    weights = {"k": RNG.standard_normal((4, 6)), "c": RNG.standard_normal((4, 3)), "scale": np.ones(4),
               "shift": np.zeros(4), "mean": np.zeros(4), "var": np.ones(4)}  # fmt: skip
    model = parsed("""(float[n, 6] x) => (float[n, 3] y) {
        h = Gemm <transB = 1> (x, k)  b = BatchNormalization(h, scale, shift, mean, var)  y = MatMul(b, c)
    }""", **weights)  # fmt: skip
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train=["scale", "c"])
    parts = split(step, {"x": (8, 6)})
    assert list(parts.kept) == ["h"] and "BatchNormalization" in parts.changing
    check_same_bits(step, points(20))
    check_same_bits(gg.build(model, loss="cross_entropy", optimizer="sgd", train="c"), points(20))


def test_data_that_change_are_refused() -> None:
    step, data = head_only(), points(16)
    with pytest.raises(DataError, match="an iterable of batches"):
        fitted(step, [data, data], True)
    rng = np.random.default_rng()

    class Noisy:
        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> tuple[Any, Any]:
            return data["x"][i] + rng.standard_normal(6).astype(np.float32), data["target"][i]

    with pytest.raises(DataError, match="differs each time it is read"):
        fitted(step, Noisy(), True)
    with pytest.raises(gg.errors.ArgumentError, match="keep_features"):
        fitted(step, data, 3)


def test_divergence_and_time() -> None:
    data = points(16)
    squares = gg.build(parsed(TRUNK, **WEIGHTS), loss="mse", optimizer="sgd", train="c")
    (target,) = squares.manifest.targets
    with pytest.raises(DivergedError, match="train without keep_features") as caught:
        fitted(squares, {"x": data["x"], target.name: np.ones((16, 3), np.float32)}, True, learning_rate=1e20)
    assert caught.value.batch.keys() == {"r", target.name}
    _, _, trainer = fitted(head_only(), data, True, max_time=1e-9)
    assert trainer.progress.steps == 0


# --- random networks --------------------------------------------------------------------------------------


def network(seed: int, is_frozen: bool = False) -> tuple[onnx.ModelProto, list[str]]:
    """Return a random network of [n, 6] to [n, 3], some of whose layers mix samples, and the weights to train.

    With ``is_frozen``, its first layer is a frozen product.
    """
    rng = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, np.ndarray] = {
        "zero": np.array([0]), "one": np.array([1]), "axis": np.array([0]), "last": np.array(1),
        "parts": np.array([2, 3]), "sixes": np.array([6]), "step": np.array(1), "begin": np.array(0),
        "ones": np.ones(6, np.float32), "half": np.array(0.5, np.float32), "yes": np.array(True),
    }  # fmt: skip
    count = 0

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        nonlocal count
        count += 1
        nodes.append(helper.make_node(kind, inputs, [f"v{count}"], f"node{count}", **attributes))
        return f"v{count}"

    def product(x: str, width: int = 6) -> str:
        name = f"w{count}"
        weights[name] = (rng.standard_normal((6, width)) * 0.5).astype(np.float32)
        return op("MatMul", x, name)

    def rows(x: str) -> str:
        return op("Gather", op("Shape", x), "zero")

    def by_count(x: str) -> str:
        return op("Div", x, op("Cast", rows(x), to=onnx.TensorProto.FLOAT))

    def by_position(x: str) -> str:
        numbers = op("Range", "begin", op("Squeeze", rows(x), "axis"), "step")
        return op("Add", x, op("Unsqueeze", op("Cast", numbers, to=onnx.TensorProto.FLOAT), "one"))

    def reshaped(x: str) -> str:
        parts = op("Reshape", x, op("Concat", rows(x), "parts", axis=0))
        turned = op("Transpose", op("Tanh", parts), perm=[0, 2, 1])
        return op("Reshape", turned, op("Concat", rows(x), "sixes", axis=0))

    layers = [
        product, product, product, lambda x: op("Relu", x), reshaped, by_count, by_position,
        lambda x: op("Add", x, op("Expand", "ones", op("Shape", x))),
        lambda x: op("Sub", x, op("ReduceMean", x, "axis")),
        lambda x: op("Softmax", x, axis=int(rng.integers(2))),
        lambda x: op("CumSum", x, "last" if rng.integers(2) else "begin"),
        lambda x: op("LayerNormalization", x, "ones"),
        lambda x: op("Dropout", x, "half", "yes"),
    ]  # fmt: skip
    x = op("Tanh", product("x")) if is_frozen else "x"
    for choice in rng.integers(0, len(layers), int(rng.integers(3, 8))):
        x = layers[choice](x)
    product(x, 3)
    nodes[-1].output[0] = "y"
    every = [n for n in weights if n.startswith("w")]
    trained = [every[-1], *(n for n in every[is_frozen:-1] if rng.random() < 0.2)]
    model = model_of(nodes, {"x": (np.float32, ["n", 6])}, weights=weights)
    return model, trained


@pytest.mark.sweep(0.3)
@pytest.mark.parametrize("seed", range(40))
def test_random_networks(seed: int) -> None:
    model, trained = network(seed)
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train=trained)
    check_same_bits(step, points(20), "auto", epochs=2, validation=points(9, 1))
