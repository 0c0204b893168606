"""Samples of different sizes: padded and masked batches, and what cannot be one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

import gradgraph as gg
from gradgraph.errors import DataError

RNG = np.random.default_rng(0)
SENTENCES = [
    {"ids": RNG.integers(1, 9, n).tolist(), "tags": RNG.integers(0, 3, n), "text": "…", "number": i}
    for i, n in enumerate((3, 7, 1, 4, 0, 2))
]
NAMES = ["ids", "tags", "attention_mask"]


def padded(**more: Any) -> gg.Padded:
    return gg.Padded(SENTENCES, {"ids": 0, "tags": -100}, mask={"ids": "attention_mask"}, **more)


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_batch_is_as_long_as_its_longest_sample(multiple: int) -> None:
    data = padded(multiple=multiple)
    found = data.batch([data[i] for i in (0, 3, 4)], NAMES)
    for row, sample in enumerate((SENTENCES[0], SENTENCES[3], SENTENCES[4])):
        n = len(sample["ids"])
        assert found["ids"][row].tolist() == [*sample["ids"], *[0] * (4 - n)]
        assert found["tags"][row].tolist() == [*sample["tags"], *[-100] * (4 - n)]
        assert found["attention_mask"][row].tolist() == [True] * n + [False] * (4 - n)
    assert data.batch([data[1]], ["ids"])["ids"].shape == (1, 7 if multiple == 1 else 8)


def test_lengths_are_those_of_the_samples() -> None:
    data = padded(lengths={"ids": "lengths", "tags": "other"}, multiple=4, longest=3)
    found = data.batch([data[i] for i in (0, 1, 4)], ["lengths", "other", "ids"])
    assert list(found) == ["lengths", "other", "ids"] and found["lengths"].dtype == np.int64
    assert found["lengths"].tolist() == found["other"].tolist() == [3, 3, 0]


def test_long_samples_may_be_cut() -> None:
    data = padded(longest=2)
    assert data.batch([data[1]], NAMES)["tags"].tolist() == [SENTENCES[1]["tags"][:2].tolist()]
    assert data.batch([data[1]], NAMES)["attention_mask"].shape == (1, 2)


def test_all_axes_are_filled() -> None:
    images = [{"x": np.ones((2, 3), np.float32)}, {"x": np.ones((1, 5), np.float32)}]
    whole = gg.Padded(images, {"x": 0.5}).batch(images, ["x"])["x"]
    assert whole.dtype == np.float32 and whole.shape == (2, 2, 5)
    assert whole.sum() == 11 + 0.5 * 9


TAGGER = parser.parse_model(
    """<ir_version: 10, opset_import: ["": 21]>
    g (int64[batch, length] ids, bool[batch, length] attention_mask) => (float[batch, length, 3] tags)
    <float[9, 3] table> {
        rows = Gather (table, ids)
        axis = Constant <value_ints = [2]> ()
        wide = Unsqueeze (attention_mask, axis)
        zero = Constant <value_float = 0.0> ()
        kept = Where (wide, rows, zero)
        tags = Identity (kept)
    }"""
)


def trainer() -> gg.Trainer:
    model = parser.parse_model(str_of_tagger())
    step = gg.build(model, loss=gg.losses.cross_entropy(axis=-1), optimizer=gg.optim.sgd(0.1))
    return gg.Trainer(step, device="cpu", seed=0)


def str_of_tagger() -> str:
    numbers = ", ".join(f"{x:.6f}" for x in np.random.default_rng(1).normal(size=27))
    import onnx.printer

    return onnx.printer.to_text(TAGGER).replace("<float[9,3] table>", f"<float[9,3] table = {{{numbers}}}>")


def test_padding_changes_no_gradient() -> None:
    """One sample a batch, which needs none, gives what batches with padding give."""
    data = [{"ids": s["ids"], "target": s["tags"]} for s in SENTENCES if s["ids"]]
    together, apart = (
        trainer().evaluate(gg.Padded(data, {"ids": 0, "target": -100}, mask={"ids": "attention_mask"}), batch_size=size)
        for size in (5, 1)
    )
    assert together == pytest.approx(apart, rel=1e-6)
    one, other = trainer(), trainer()
    for t, multiple in ((one, 1), (other, 8)):
        sentences = gg.Padded(data, {"ids": 0, "target": -100}, mask={"ids": "attention_mask"}, multiple=multiple)
        t.fit(sentences, epochs=2, batch_size=2, progress=False)
    for name, value in one.state_dict().items():
        np.testing.assert_allclose(value, other.state_dict()[name], rtol=1e-6, err_msg=name)


BAD = {
    "no dict": ([(1, 2)], {"ids": 0}, "a sample is .*, but the step expects 'ids'"),
    "a part that is missing": ([{"x": [1]}], {"ids": 0}, "a sample has 'x', but the step expects 'ids'"),
    "two ranks": ([{"ids": [1]}, {"ids": [[1]]}], {"ids": 0}, r"different shapes \(\(1,\) and \(1, 1\)\)"),
    "no fill": ([{"ids": [1]}, {"ids": [1, 2]}], {}, r"set a padding value: fill=\{'ids': 0\}"),
    "a fraction": ([{"ids": [1]}, {"ids": [1, 2]}], {"ids": 0.5}, r"'ids' is int64, which cannot represent 0\.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_padded_is_one_sentence(name: str) -> None:
    samples, fill, says = BAD[name]
    with pytest.raises(DataError, match=says):
        gg.Padded(samples, fill).batch(samples, ["ids"])


def test_further_columns_of_a_dataset_are_left_out() -> None:
    class Rows:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> dict[str, Any]:
            ids = np.arange(1, 4)
            return {"ids": ids, "attention_mask": ids > 0, "target": ids - 1, "text": "…", "idx": i}

    plain = {"ids": np.tile(np.arange(1, 4), (4, 1)), "attention_mask": np.ones((4, 3), bool)}
    plain["target"] = plain["ids"] - 1
    assert trainer().evaluate(Rows(), batch_size=2) == trainer().evaluate(plain, batch_size=2)
