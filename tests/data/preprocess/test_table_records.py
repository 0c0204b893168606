"""What a table's columns were in training decides how later tables are read: right, or refused with row and column."""

from __future__ import annotations

import datetime
import decimal
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.data.preprocess import fit
from gradgraph.data.preprocess.date_forms import FORMS, forms_of
from gradgraph.data.preprocess.frames import GAP_WORDS, numbers_of
from gradgraph.data.tables import read_table
from gradgraph.errors import ArgumentError, DataError

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")


def test_the_cells_that_are_missing_are_those_of_pandas() -> None:
    from pandas._libs.parsers import STR_NA_VALUES

    assert set(GAP_WORDS) == set(STR_NA_VALUES)


@pytest.mark.parametrize(
    ("texts", "said", "form"),
    [
        (["31.05.2024", "1.2.2020"], {}, "D.M.YYYY"),
        (["05/31/24", "01/02/20"], {}, "M/D/YY"),
        (["05/06/24", "01/02/20"], {"dayfirst": True}, "D/M/YY"),
        (["05/06/24", "01/02/20"], {"dayfirst": False}, "M/D/YY"),
        (["20240531", "19991231"], {}, "YYYYMMDD"),
        ([20240531, 19991231], {}, "YYYYMMDD"),
        ([20240531.0, None], {}, "YYYYMMDD"),
        (["2024-05-31", "2024-05-31 12:30"], {"dayfirst": True}, "YYYY-MM-DD"),
        (["2024-5-31", "2024-05-01"], {}, "YYYY-M-D"),
        ([datetime.date(2024, 5, 31), None], {}, "YYYY-MM-DD"),
        (["31 May 2024", "1 january 2020", "02 SEPT 2021"], {}, "D MON YYYY"),
        (["31-May-24", "01-Dec-19"], {"dayfirst": False}, "D-MON-YY"),
        (["May 31, 2024", "Sep. 1 2020", "December 24, 2021 03:30:10 PM"], {}, "MON D, YYYY"),
        (["31 May 2024, 12:00 am", "1 Jun 2024 13:30"], {}, "D MON YYYY"),
        (["05/31/2024 3:45 PM", "12/01/2020 11:05:09.5am"], {}, "M/D/YYYY"),
    ],
)
def test_written_forms_of_dates_are_recognised(texts: list[Any], said: dict[str, Any], form: str) -> None:
    plan = fit({"d": texts}, kinds={"d": {"kind": "date", **said}})
    assert plan.columns["d"].form == form
    assert type(plan).from_data(plan.as_data()) == plan


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zone", [False, True])
def test_a_date_that_is_written_in_a_form_is_read_again(form: str, zone: bool) -> None:
    date = datetime.datetime(2024, 12, 31, 23, 59, tzinfo=datetime.timezone.utc if zone else None)
    text = FORMS[form].written(date, zone)
    assert text is not None and FORMS[form].read(text, zone) == date.replace(tzinfo=None)
    assert (FORMS[form], zone) in forms_of([text])


@pytest.mark.parametrize(
    "text",
    ["31.12.2023 23:30", "2023-12-31T23:30:00.5", "31 May 2024", "May 31, 2024", "31-May-24", "5/31/2024 1:30 PM"],
)
def test_columns_that_look_like_dates_are_dates(text: str) -> None:
    assert fit({"d": [text, None]}).columns["d"].name == "date"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["05/06/2024", "01/02/2020"], "may be the day or the month"),
        (["31/12/2024", "12/31/2024"], r"in row 2 \(index 1\), which is not a date of the form"),
        (["2024-05-31", "soon", "later"], r"'soon' in row 2 \(index 1\) \(and 1 more like it\)"),
        (["2024-05-31 12:00", "2024-05-31 12:00Z"], "row"),
        (["2024-02-30"], r"row 1 \(index 0\)"),
    ],
)
def test_dates_that_cannot_be_read_in_training_are_refused(values: list[str], why: str) -> None:
    with pytest.raises(DataError, match=why):
        fit({"d": values}, kinds={"d": "date"})


def test_dayfirst_against_the_data_is_refused() -> None:
    with pytest.raises(DataError, match="contradicts dayfirst"):
        fit({"d": ["12/31/2024"]}, kinds={"d": {"kind": "date", "dayfirst": True}})


def test_an_argument_that_a_kind_lacks_is_named_without_the_inside() -> None:
    with pytest.raises(ArgumentError, match="columns of the kind date have no argument 'day'") as error:
        fit({"d": ["2024-05-31"]}, kinds={"d": {"kind": "date", "day": True}})
    assert "learn" not in str(error.value)


def test_a_few_values_that_are_no_dates_are_said(caplog: pytest.LogCaptureFixture) -> None:
    fit({"d": [*["2024-05-31", "2024-06-01"] * 10, "soon"]})
    assert "1 of 21 values (the first is 'soon', in row 21 (index 20))" in caplog.text


ZONED = ["2024-05-31 23:30:00+02:00", "2024-05-31 21:30:00Z", "2024-06-01T06:30:00+0900", "2024-05-31 17:30-04"]


def test_one_instant_in_several_zones_is_one_row() -> None:
    plan = fit({"d": ZONED})
    rows = plan.arrays({"d": ZONED})["x"]
    assert len(np.unique(rows, axis=0)) == 1
    aware = pd.Series(pd.to_datetime(ZONED, utc=True, format="ISO8601")).dt.tz_convert("Asia/Tokyo")
    for table in ({"d": aware}, pd.DataFrame({"d": aware})):
        np.testing.assert_array_equal(plan.arrays(table)["x"], rows)
    arrow = pytest.importorskip("pyarrow", reason="an extra: onnx-gradgraph[tables]")
    np.testing.assert_array_equal(plan.arrays(arrow.Table.from_pandas(pd.DataFrame({"d": aware})))["x"], rows)
    for naive in (["2024-05-31 21:30:00"], pd.Series(pd.to_datetime(["2024-05-31 21:30:00"]))):
        with pytest.raises(DataError, match="with a time zone"):
            plan.arrays({"d": naive})
    with pytest.raises(DataError, match=r"row 1 \(index 0\)"):
        fit({"d": ["2024-05-31 21:30"]}).arrays({"d": aware})


@pytest.mark.parametrize("form", ["D.M.YYYY", "YYYYMMDD", "M/D/YY"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_columns_of_the_type_of_dates_are_read_whatever_training_wrote(form: str, unit: str) -> None:
    days = pd.Series(pd.to_datetime(["2024-05-31", "2021-01-13", None])).astype(f"datetime64[{unit}]")
    texts = [*(FORMS[form].written(day.date(), False) for day in days[:2]), None]
    plan = fit({"d": texts}, kinds={"d": "date"})
    np.testing.assert_array_equal(plan.arrays({"d": days})["x"], plan.arrays({"d": texts})["x"])


@pytest.mark.parametrize(
    "value", ["soon", np.inf, "1_0", "inf", datetime.date(2024, 5, 31), decimal.Decimal("Infinity")]
)
def test_numbers_are_read_strictly(value: Any) -> None:
    plan = fit({"n": [1.0, 2.0, None]})
    with pytest.raises(DataError, match=r"the column 'n' contains .* in row 2 \(index 1\)"):
        plan.arrays({"n": np.array([1.0, value], object)})
    assert np.isnan(numbers_of("n", np.array(["NA", None, "", "null"], object))).all()


def test_ids_that_float64_would_merge_stay_apart_or_are_refused() -> None:
    ids = np.array([2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3] * 4, np.int64)
    plan = fit({"id": ids}, kinds={"id": "category"})
    for table in ({"id": ids[:4]}, {"id": ids[:4].tolist()}, {"id": [str(one) for one in ids[:4]]},
                  {"id": [*ids[:4].tolist(), None]}, {"id": pd.array([*ids[:4], None], "Int64")}):  # fmt: skip
        assert len(np.unique(plan.arrays(table)["x"][:4], axis=0)) == 4
    with pytest.raises(DataError, match=r"row 1 \(index 0\) as a float"):
        plan.arrays({"id": ids.astype(float)})
    with pytest.raises(
        DataError, match=rf"contains {2**53 + 1} in row 2 \(index 1\), which float64 cannot tell apart from {2**53}"
    ):
        fit({"id": ids}, kinds={"id": "number"})


@pytest.mark.parametrize("text", ["a,b\n1,2,3\n3,4,5\n", "a,b\n1,2,\n3,4,\n", "a,b\n1,2\n3,4,5\n", "a,b\n1,2\n3\n"])
def test_rows_of_other_widths_than_the_header_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=r"row|line"):
        read_table(tmp_path / "t.csv")


def test_columns_of_a_dict_have_one_length() -> None:
    with pytest.raises(DataError, match="'b' has 1 value, but 'a' has 2"):
        fit({"a": [1.0, 2.0], "b": [1.0, 2.0]}).arrays({"a": [1.0, 2.0], "b": [1.0]})


@pytest.mark.parametrize(
    "values",
    [[True, False] * 8, [1, 2] * 8, [decimal.Decimal(1), decimal.Decimal(2)] * 8, [np.int64(1), np.int64(2)] * 8],
)
def test_targets_of_objects_are_what_they_are_typed(values: list[Any]) -> None:
    typed = np.array([bool(v) if isinstance(v, bool) else int(v) for v in values])
    learnt = [fit({"x": np.arange(16.0), "y": y}, "y").targets["y"] for y in (np.array(values, object), typed)]
    assert learnt[0] == learnt[1] and len(learnt[0].classes) == 2


@pytest.mark.parametrize("dates", [["2024-05-31", "2024-06-01"] * 10, pd.to_datetime(["2024-05-31", "2024-06-01"])])
def test_targets_of_dates_are_refused(dates: Any) -> None:
    with pytest.raises(DataError, match="target column 'y' contains dates"):
        fit({"x": np.arange(float(len(dates))), "y": dates}, "y")


def test_columns_that_teach_nothing_are_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    rows = {"same": [3] * 40, "gaps": [None] * 40, "id": rng.permutation(40) + 1000,
            "key": [f"k{i}" for i in range(40)], "n": rng.normal(size=40), "y": rng.normal(size=40)}  # fmt: skip
    fit(rows, "y")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "every value is the same in 'same'" in line and "every value is missing in 'gaps'" in line
    assert "as ids do, in 'id', 'key'" in line and "'n'" not in line
    caplog.clear()
    fit({"n": rng.normal(size=40), "y": [f"k{i}" for i in range(40)]}, "y")
    assert "in the target 'y'" in caplog.text


def _trained() -> tuple[gg.Trainer, Any]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "t": rng.choice(["u", "v"], 60)})
    frame["y"] = np.where(frame.a > 0, "p", "q")
    plan = fit(frame, "y")
    return gg.Trainer(gg.build(gg.tables.mlp(plan, hidden=[4]), gg.tables.loss(plan)), device="cpu"), frame


def test_a_frame_and_a_series_and_a_dict_of_columns_are_a_table() -> None:
    losses = []
    for given in (lambda f: (f,), lambda f: (f[["a", "t"]], f["y"]), lambda f: (f[["a", "t"]].to_dict("list"), f["y"])):
        trainer, frame = _trained()
        trainer.fit(*given(frame), progress=False)
        losses.append(trainer.evaluate(*given(frame))["loss"])
    assert losses[0] == losses[1] == losses[2]
    columns = {"a": np.array([1.0, 2.0]), "t": np.array(["u", "v"], object)}
    np.testing.assert_array_equal(trainer.predict(columns), trainer.predict(pd.DataFrame(columns)))


def test_what_training_never_saw_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    trainer, frame = _trained()
    caplog.set_level(logging.WARNING, logger="gradgraph")
    trainer.fit(frame, validation=frame[:20], progress=False)
    trainer.predict(frame)
    assert "not seen" not in caplog.text
    later = frame.assign(
        a=frame.a.mask(frame.index < 6) + 100 * (frame.index >= 54), t=frame.t.mask(frame.index < 3, "w")
    )
    for use in (trainer.predict, trainer.evaluate):
        caplog.clear()
        use(later)
        (line,) = [record.getMessage() for record in caplog.records if "not seen" in record.getMessage()]
        assert "'a' 10% far outside" in line and "10% missing (0% in training)" in line and "'t' 5% new ('w')" in line
    plan = trainer.names.preprocess
    assert plan is not None
    found = {one.column: one for one in plan.drift(later).columns}
    assert found["a"].missing == 0.1 and found["t"].unseen == 0.05 and not found["t"].has_more_gaps
    assert str(plan.drift(frame)) == ""


def test_shares_that_chance_explains_are_not_said() -> None:
    plan = fit({"n": [1.0, None, 2.0, 3.0] * 10})
    assert str(plan.drift({"n": [None, 1.0]})) == ""
    assert "100% missing (25% in training)" in str(plan.drift({"n": [None] * 30}))


@pytest.mark.parametrize("word", sorted(GAP_WORDS))
def test_missing_text_is_the_same_everywhere(word: str, tmp_path: Path) -> None:
    """In a frame, in a CSV, and in the exported file: for categories, dates and text."""
    columns = {"c": ["u", "v", None] * 10, "d": ["2024-05-31", "2023-01-02", None] * 10,
               "t": ["a b c d e f", "b c d e f g", None] * 10}  # fmt: skip
    frame = pd.DataFrame({**columns, "y": np.arange(30.0) ** 0.5})
    plan = fit(frame, "y", {"t": "text"})
    trainer = gg.Trainer(gg.build(gg.tables.mlp(plan, hidden=[4]), gg.tables.loss(plan)), device="cpu")
    expected = np.asarray(trainer.predict(frame[2:3]))
    given = pd.DataFrame({name: [word] for name in columns})
    given.to_csv(tmp_path / "g.csv", index=False)
    trainer.export(tmp_path / "m.onnx")
    served = ort.InferenceSession(tmp_path / "m.onnx").run(None, {name: np.array([word], object) for name in columns})
    for found in (trainer.predict(given), trainer.predict(tmp_path / "g.csv"), served[0]):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("unit", ["ns", "us", "s", "D"])
def test_dates_are_no_numbers_whatever_their_unit(unit: str) -> None:
    plan = fit({"a": [1.0, 2.0, 3.5]})
    with pytest.raises(DataError, match="but the model expects numbers"):
        plan.feeds({"a": np.array(["2024-01-01"], f"datetime64[{unit}]")})
    assert np.isnan(plan.feeds({"a": np.array(["NaT"], f"datetime64[{unit}]")})["a"]).all()


@pytest.mark.parametrize("year", [1968, 2069])
def test_years_that_two_digits_would_change_are_refused(year: int) -> None:
    plan = fit({"d": ["31.05.24", "01.06.24"]}, kinds={"d": {"kind": "date", "dayfirst": True}})
    for date in (datetime.date(year, 5, 31), np.datetime64(f"{year}-05-31", "s")):
        with pytest.raises(DataError, match="not a date of the form"):
            plan.feeds({"d": [date]})


@pytest.mark.parametrize(
    ("text", "hour", "minute"),
    [("12:05 AM", 0, 5), ("12:05 pm", 12, 5), ("1:30:59.9PM", 13, 30), ("09:07 Am", 9, 7), ("13:30", 13, 30)],
)
def test_times_with_am_and_pm(text: str, hour: int, minute: int) -> None:
    """In a table, and in the exported file."""
    plan = fit({"d": ["31 Oct 2024 10:00", "1 Aug 2020 3:00 PM"]})
    expected = plan.arrays({"d": [f"1 August 2022 {hour:02}:{minute:02}"]})["x"]
    for date in ("1 Aug 2022", "01 AUG 2022,", "1 aug. 2022"):
        np.testing.assert_array_equal(plan.arrays({"d": [f"{date} {text}"]})["x"], expected)


@pytest.mark.parametrize("text", ["13:05 PM", "0:05 AM", "10 PM"])
def test_what_is_no_time_of_half_a_day_is_refused(text: str) -> None:
    plan = fit({"d": ["31 Oct 2024 10:00", "1 Aug 2020 3:00 PM"]})
    with pytest.raises(
        DataError, match=r"column 'd' .* in row 2 \(index 1\), which is not a date of the form D MON YYYY"
    ):
        plan.feeds({"d": ["1 Aug 2022", f"1 Aug 2022 {text}"]})


@pytest.mark.parametrize("text", ["Fri, 31 May 2024", "31. Mai 2024", "2024-05", "2024-W22", "31st May 2024", "10:30"])
def test_dates_in_no_form_that_is_read_are_said(text: str, caplog: pytest.LogCaptureFixture) -> None:
    fit({"d": [text, "", text], "word": ["May", "week 3", "12"], "y": [0.0, 1.5, 2.0]}, "y")
    said = [
        record.getMessage() for record in caplog.records if "seems to contain dates or times" in record.getMessage()
    ]
    assert len(said) == 1 and "'d'" in said[0]


def test_durations_in_text_are_seconds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As pandas reads and writes them, in a frame and in a CSV; and they are no numbers."""
    texts = ["1:02:03", "2 days 03:00:00", "-1 days +23:00:00", "1 day, 0:00:00.5", None]
    seconds = [3723.0, 183600.0, -3600.0, 86400.5, np.nan]
    caplog.set_level("INFO", logger="gradgraph")
    plan = fit({"d": texts, "y": np.arange(5.0)}, "y")
    assert "durations such as '1:02:03', which are read as seconds" in caplog.text
    assert plan.columns["d"].durations and type(plan).from_data(plan.as_data()) == plan
    frame = pd.DataFrame({"d": texts})
    frame.to_csv(tmp_path / "t.csv", index=False)
    for table in (frame, read_table(tmp_path / "t.csv"), frame.apply(pd.to_timedelta)):
        np.testing.assert_array_equal(plan.feeds(table)["d"], seconds)
    with pytest.raises(DataError, match="contains numbers, but the training data have durations there"):
        plan.feeds({"d": [3.0]})
    with pytest.raises(
        DataError, match=r"contains '1:99:00' in row 2 \(index 1\), but in the training data it has durations"
    ):
        plan.feeds({"d": ["1:00:00", "1:99:00"]})


@pytest.mark.parametrize("values", [["1:02:03", "2:02:03"], pd.to_timedelta(["1:02:03", "2:02:03"])])
def test_targets_of_durations_are_refused(values: Any) -> None:
    with pytest.raises(DataError, match="the target column 'y' contains durations"):
        fit({"x": [0.0, 1.0], "y": values}, "y")


def test_whole_numbers_in_text_are_said(caplog: pytest.LogCaptureFixture) -> None:
    fit({"zip": ["01234", "90210", "10001"], "n": ["12", "7", "9"], "y": [0.0, 1.5, 2.0]}, "y")
    assert "'n' is read as text, since it contains numbers as text, such as '12'" in caplog.text
    assert "'zip'" not in caplog.text
    caplog.clear()
    fit({"x": [0.0, 1.5, 2.0], "y": ["0", "9", "9"]}, "y")  # classes
    assert not caplog.records


def test_durations_are_durations_in_every_table_and_no_numbers() -> None:
    typed = pd.Series(pd.to_timedelta([0, 90, None, 3600], unit="s"))
    tables: dict[str, Any] = {
        "typed": typed,
        "objects": typed.astype(object),
        "a list": [None if value is pd.NaT else value.to_pytimedelta() for value in typed],
        "NumPy": typed.to_numpy("timedelta64[ns]"),
    }
    known = fit({"a": typed})
    for name, column in tables.items():
        assert fit({"a": column}) == known, name
        np.testing.assert_array_equal(known.feeds({"a": column})["a"], [0, 90, np.nan, 3600], name)
        with pytest.raises(DataError, match="contains durations, but the training data have numbers there"):
            fit({"a": [1.0, 2.0]}).feeds({"a": column})
    with pytest.raises(DataError, match="contains numbers, but the training data have durations there"):
        known.feeds({"a": [0.0, 90.0]})
    assert gg.preprocess.Preprocessing.from_data(known.as_data()) == known


def test_bytes_are_their_text_or_are_refused() -> None:
    plan = fit({"c": ["a", "ü"] * 5, "y": [b"u", b"v"] * 5}, "y")
    assert plan.targets["y"].classes == ("u", "v")
    for column in (np.array([b"a", "ü".encode()]), [b"a", "ü".encode()]):
        assert plan.feeds({"c": column})["c"].tolist() == ["a", "ü"]
    with pytest.raises(DataError, match="which are not UTF-8"):
        plan.feeds({"c": [b"\xff"]})


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_ids_beside_gaps_keep_their_digits(suffix: str, tmp_path: Path) -> None:
    """Pandas makes floats of such whole numbers, which merge above 2**53."""
    path, sep = tmp_path / f"t{suffix}", "," if suffix == ".csv" else "\t"
    path.write_text(f"id,x,y\n{2**53},1e20,1\n{2**53 + 1},,2\n,2.5,3\n".replace(",", sep))
    table = read_table(path)
    assert table["id"].tolist() == [2**53, 2**53 + 1, None] and table["x"].dtype == np.float64
    assert fit(table, "y", {"id": "category"}).columns["id"].values == ("", str(2**53), str(2**53 + 1))
    with pytest.raises(
        DataError, match=r"contains 9007199254740993 in row 2 \(index 1\), which float64 cannot tell apart"
    ):
        fit(table, "y")


def test_ids_of_pandas_categories_stay_apart() -> None:
    ids = pd.Series([2**53 + 1, 2**53, None], dtype="Int64").astype("category")
    assert fit({"a": ids}, kinds={"a": "category"}).columns["a"].values == ("", str(2**53), str(2**53 + 1))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["1,5", "2,25", "3", "3"], "because of 2 of 4 values (the first is '1,5', in row 1 (index 0))"),
        (["1.234,50", "17", "18", "19"], "because of 1 of 4 values (the first is '1.234,50'"),
        (["1,234", "1,235"], "'1,234'"),
        ([*map(str, range(20)), "ERR"], "because of 1 of 21 values (the first is 'ERR', in row 21 (index 20))"),
        (["1.5", "-2.5e3"], "numbers as text, such as '1.5'"),
        (["12 %", "7.5%", "0 %"], "because of 3 of 3 values (the first is '12 %'"),
        (["1.234,50 \u20ac", "\u20ac17", "18 EUR", "-19-"], "because of 4 of 4 values"),
        (["(3.50)", "\u22124", "5\u00a0", "6"], "because of 3 of 4 values"),
        (["#NV", "#DIV/0!", "1.5", "2.5"], "because of 2 of 4 values (the first is '#NV'"),
        (["#a", "12 ABC", "3"], ""),
        (["01", "02"], ""),
        (["1 1", "2"], ""),
        (["yes", "no", "3"], ""),
    ],
)
def test_numbers_that_are_read_as_text_are_said(texts: list[str], said: str, caplog: pytest.LogCaptureFixture) -> None:
    fit({"a": texts, "b": [0.0] * len(texts)})
    fit({"b": range(len(texts)), "a": texts}, "a")
    found = [record.getMessage() for record in caplog.records if "is read as text" in record.getMessage()]
    assert len(found) == (2 if said else 0)
    assert all(said in message for message in found)


def test_floats_in_lines_of_json_are_exact(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=200) * 1e5
    (tmp_path / "t.jsonl").write_text("\n".join(f'{{"date": {number!r}}}' for number in numbers.tolist()))
    np.testing.assert_array_equal(read_table(tmp_path / "t.jsonl")["date"].to_numpy(), numbers)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("t.csv", "a;b\n1,5;2\n2,5;3\n", "separated by semicolons, but commas are expected"),
        ("t.csv", "a\tb\n1\t2\n", "separated by tabs, but commas"),
        ("t.csv", "sep=,\na,b\n1,2\n", "only names the separator, for spreadsheets; delete it"),
        ("t.tsv", "a,b\n1,2\n", "separated by commas, but tabs"),
        ("t.csv", "a,a,b\n1,2,3\n", "t.csv' have the name 'a'"),
        ("t.csv", "a,b\n1,2\n3\n", "line 3 of .* has 1 cell, but the header has 2"),
    ],
)
def test_files_whose_cells_would_be_parted_wrongly_are_refused(
    name: str, text: str, why: str, as_text: bool, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=why):
        read_table(tmp_path / name, as_text)


def test_columns_of_json_that_are_called_like_dates_stay_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"date": "01.02.2024", "timestamp": 1700000000, "changed_at": "2024-05-31"}\n')
    table = read_table(tmp_path / "t.jsonl")
    assert table.iloc[0].tolist() == ["01.02.2024", 1700000000, "2024-05-31"]


def test_a_key_twice_in_a_row_of_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": 1, "a": 2}\n{"a": 3}\n')
    with pytest.raises(DataError, match="the key 'a' appears 2 times"):
        read_table(tmp_path / "t.jsonl")


NOON = datetime.datetime(2024, 5, 31, 12, 30)
TYPED: dict[str, tuple[str, list[Any], list[Any]]] = {  # the type in Arrow, values, and what models read of them
    "text": ("string", ["red", None, "ünï"], ["red", "", "ünï"]),
    "integers": ("int32", [3, None, 7], [3, np.nan, 7]),
    "floats": ("double", [0.5, None, 7], [0.5, np.nan, 7]),
    "booleans": ("bool", [True, None, False], [1, np.nan, 0]),
    "dates": ("date32", [NOON.date(), None, datetime.date(2020, 1, 1)], ["2024-05-31", "", "2020-01-01"]),
    "instants": ("zoned", [NOON, None, NOON], ["2024-05-31T12:30:00Z", "", "2024-05-31T12:30:00Z"]),
    "times": ("time64[us]", [NOON.time(), None, datetime.time(0, 0, 1)], [45000, np.nan, 1]),
    "durations": ("duration[ms]", [datetime.timedelta(seconds=90), None, datetime.timedelta(0)], [90, np.nan, 0]),
    "decimals": ("decimal", [decimal.Decimal("1.50"), None, decimal.Decimal(2)], [1.5, np.nan, 2]),
}


@pytest.mark.parametrize("name", TYPED)
def test_typed_columns_with_gaps_are_one_column_in_every_library(name: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="an extra: onnx-gradgraph[tables]")
    called, values, expected = TYPED[name]
    kinds = {"zoned": arrow.timestamp("us", "UTC"), "decimal": arrow.decimal128(9, 2)}
    column = arrow.array(values, kinds.get(called) or arrow.type_for_alias(called))
    of_arrow = pd.ArrowDtype(column.type)
    forms = {
        "Arrow": arrow.table({"c": column}),
        "Arrow, apart from a table": {"c": column},
        "a dictionary": arrow.table({"c": column.dictionary_encode()}),
        "pandas": arrow.table({"c": column}).to_pandas(),
        "pandas on Arrow": pd.DataFrame({"c": pd.array(column, dtype=of_arrow)}),
        "a category on Arrow": pd.DataFrame({"c": pd.Categorical(pd.array(column, dtype=of_arrow))}),
    }
    for form, table in forms.items():
        found = [
            v.removesuffix("T00:00:00") if isinstance(v, str) else v for v in fit(table).feeds(table)["c"].tolist()
        ]
        np.testing.assert_equal(found, expected, err_msg=form)


@pytest.mark.parametrize("cell", [[1, 2], (1,), {"a": 1}, np.arange(3)])
def test_cells_of_several_values_are_refused_with_their_row(cell: Any) -> None:
    cells = np.array(["", None], object)
    cells[1] = cell
    table = {"c": cells, "y": ["a", "b"]}
    with pytest.raises(DataError, match=r"the column 'c' contains .* in row 2 .*, but each value must be one number"):
        fit(table)
    with pytest.raises(DataError, match="but each value must be one number"):
        fit({"a": [1.0, 2.0], **table}, "c")
    assert fit({"a": [1.0, 2.0], **table}, "y", {"c": "drop"}).columns["c"].name == "drop"
