"""Every kind of input has units, in its own names and values, and is drawn safely."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.attributions.attribution_markup import NEGATIVE, POSITIVE, drawn, heat_map, png_of
from gradgraph.attributions.attribution_page import page
from gradgraph.attributions.explained import Explained, Sample
from gradgraph.attributions.units import units_of
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import DataError

HOSTILE = "<script>alert(1)</script>\x1b[31m‮"
RNG = np.random.default_rng(0)


def found_for(x: np.ndarray, attributions: np.ndarray, names: DataNames, **facts: Any) -> Explained:
    units = units_of("x", x, names)
    tokens = facts.pop("tokens", {})
    samples = [Sample(i, **{"file": "", "text": "", "called": "a", "target": "a", "score": 1.0, "probability": 0.5,
                            **facts}) for i in range(len(x))]  # fmt: skip
    return Explained("gradient", "logits", samples, {"x": x}, {"x": attributions}, {"x": units},
                     {"x": units.sums("x", attributions)}, tokens, names)  # fmt: skip


PICTURE = DataNames(images={"x": {"layout": "NHWC", "mean": [0.5], "std": [0.5]}})
KINDS = {
    "picture": ("picture", (2, 3, 8, 6), np.float32, DataNames()),
    "grey picture by the record": ("picture", (2, 8, 6, 1), np.float32, PICTURE),
    "sound": ("sound", (2, 1, 900), np.float32, DataNames(sounds={"x": {"rate": 8000, "length": 900}})),
    "short sound": ("sound", (2, 30), np.float32, DataNames(sounds={"x": {"rate": 8000, "length": 30}})),
    "tokens": ("tokens", (2, 5), np.int64, DataNames()),
    "columns": ("columns", (2, 3), np.float32, DataNames(columns={"x": ["age", "income", HOSTILE]})),
    "columns without names": ("columns", (2, 3), np.float32, DataNames()),
    "one number": ("columns", (2,), np.float32, DataNames()),
    "anything else": ("values", (2, 4, 5), np.float32, DataNames()),
}


@pytest.mark.parametrize("case", KINDS)
def test_every_kind_of_input_is_drawn(case: str) -> None:
    kind, shape, dtype, names = KINDS[case]
    x, a = (RNG.normal(size=shape) * 3).astype(dtype), RNG.normal(size=shape)
    tokens = {"x": [[HOSTILE, "b", "c", "d", ""]] * 2} if kind == "tokens" else {}
    found = found_for(x, a, names, tokens=tokens)
    units = found.units["x"]
    assert units.shown == kind
    np.testing.assert_allclose(found.sums["x"].sum(1), a.reshape(2, -1).sum(1))
    markup = drawn(found, "x", 0)
    assert "<script" not in markup and "\x1b" not in markup and "‮" not in markup
    expected = {"picture": r'(<img src="data:image/png;base64,[^"]+" alt="[^"]+">){2}.*class="ramp"',
                "sound": r"<polygon .*<rect class=.*>(0.113|0.00375) s<",
                "tokens": r'(<span class="(plus|minus)".*){4}',
                "columns": r'class="track"', "values": r"x\[\d, \d\] = <b>"}  # fmt: skip
    assert re.search(expected[kind], markup, re.DOTALL), markup
    gone = np.zeros(found.sums["x"].shape, bool)
    gone[0, 0] = True
    without = units.deleted(x, gone)
    assert without.dtype == x.dtype and without.shape == x.shape
    np.testing.assert_array_equal(without[1], x[1])
    np.testing.assert_array_equal(without[0], np.where(units.index == 0, 0, x[0]))


def test_parts_of_a_column_are_added_and_values_are_those_of_the_table() -> None:
    """A number with gaps has two features, a category one for each value."""
    frame = {"age": [30.0, None, 50.0, 40.0], "town": ["Ulm", "Bonn", "Ulm", "Bonn"]}
    pd = pytest.importorskip("pandas")
    plan = gg.preprocess.fit(pd.DataFrame(frame))
    x = plan.arrays(pd.DataFrame(frame))["x"]
    assert plan.features["x"] == ["age", "age is missing", "town=Bonn", "town=Ulm", "town=(another)"]
    a = np.arange(20.0).reshape(4, 5)
    found = found_for(x, a, DataNames(preprocess=plan), values={"age": "30", "town": "Ulm"})
    np.testing.assert_array_equal(found.sums["x"], np.stack([a[:, 0] + a[:, 1], a[:, 2:].sum(1)], axis=1))
    assert found.bars("x", 0, 9) == [("town", "Ulm", 9.0), ("age", "30", 1.0)]


def test_an_index_is_deleted_by_the_slot_of_other_values() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"town": ["Ulm", "Bonn", "Ulm", "Bonn"], "river": ["Danube", "Rhine", "Danube", "Main"]})
    plan = gg.preprocess.fit(frame, index=True)
    x = plan.arrays(frame)["categories"]
    units = units_of("categories", x, DataNames(preprocess=plan))
    assert units.shown == "columns" and list(units.names) == ["town", "river"]
    np.testing.assert_array_equal(units.deleted(x, np.ones((4, 2), bool)), [[2, 3]] * 4)


def test_a_map_of_another_size_is_stretched_over_the_picture() -> None:
    units = units_of("x", np.zeros((1, 3, 4, 6), np.float32), DataNames())
    sums = units.sums("x", np.array([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]]))
    np.testing.assert_array_equal(sums.reshape(4, 6), np.kron([[1, 2, 3], [4, 5, 6]], np.ones((2, 2))))


def test_embeddings_of_tokens_are_added_and_other_shapes_are_refused() -> None:
    units = units_of("x", np.zeros((1, 3), np.int64), DataNames())
    np.testing.assert_array_equal(units.sums("x", np.ones((1, 3, 4))), [[4, 4, 4]])
    with pytest.raises(
        DataError, match=r"the attributions to 'x' have the shape \[7\] per sample, but the input has \[3"
    ):
        units.sums("x", np.ones((1, 7)))


def test_a_heat_map_has_the_colours_of_its_scale() -> None:
    pixels = np.zeros((1, 3, 3), np.uint8)
    found = heat_map(pixels, np.array([[1.0, -9.0, 0.0]]), 1.0)
    np.testing.assert_array_equal(found[0, :2], [POSITIVE, NEGATIVE])
    assert found[0, 2].ptp() == 0 if hasattr(found[0, 2], "ptp") else np.ptp(found[0, 2]) == 0


def test_a_png_is_what_pillow_reads() -> None:
    image = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")
    pixels = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(png_of(pixels)))), pixels)


@pytest.mark.parametrize("values", [[0.0, 0.0], [np.nan, 1.0], [np.inf, -1.0], [1e-40, 0.0]])
@pytest.mark.parametrize("case", ["picture", "sound", "columns", "tokens"])
def test_odd_attributions_are_drawn(case: str, values: list[float]) -> None:
    _, shape, dtype, names = KINDS[case]
    a = np.resize(np.array(values), shape)
    found = found_for(np.ones(shape, dtype), a, names, tokens={"x": [["a"] * 5] * 2} if case == "tokens" else {})
    assert "nan" not in re.sub('title="[^"]*"|class="number">[^<]*<', "", drawn(found, "x", 0)).lower()


def test_the_page_escapes_what_comes_from_data() -> None:
    names = DataNames(columns={"x": [HOSTILE, "b"]})
    x = np.ones((1, 2), np.float32)
    facts = dict.fromkeys(("file", "text", "called", "target"), HOSTILE)
    written = page(HOSTILE, found_for(x, x, names, values={HOSTILE: HOSTILE}, **facts), {"model": HOSTILE})
    assert "<script" not in written and "\x1b" not in written and "‮" not in written
    assert "&lt;script&gt;" in written and not re.search(r'(src|href)="(?!data:)', written)
    assert "max-width" in written and "prefers-color-scheme: dark" in written
