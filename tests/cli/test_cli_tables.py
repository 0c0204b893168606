"""Tables on the command line: a model to begin with, and preprocessing that goes with it wherever it is used."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.frontend import nn
from gradgraph.tables import MODELS
from tests.kit.command_line import Cli

pd: Any = pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")

RUN = Path("runs/one")
TARGETS = {"price": "a number", "kind": "classes"}


@pytest.fixture
def tables(folder: Path) -> Any:
    """Files: train.csv, held_out.csv, and new.csv without targets, its columns in another order."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.normal(100, 30, 90), "town": rng.choice(["Ulm", "Bonn"], 90)})
    frame["built"] = pd.date_range("2001-01-01", periods=90, freq="41D").strftime("%Y-%m-%d")
    frame["price"] = frame.area * 3000 + 20000 * (frame.town == "Ulm")
    frame["kind"] = np.where(frame.price > 310000, "dear", "cheap")
    frame.loc[::9, "town"] = None
    frame.loc[4::9, "area"] = None
    frame[:60].to_csv("train.csv", index=False)
    frame[60:].to_csv("held_out.csv", index=False)
    frame[60:][["built", "area", "town"]].to_csv("new.csv", index=False)
    return frame


def ok(cli: Cli, *words: str) -> str:
    ran = cli(*words)
    assert ran.code == 0, ran.err
    return ran.out


def _rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def _train(target: str, model: str = "mlp") -> list[str]:
    other = next(name for name in TARGETS if name != target)
    return ["train", "--model", model, "--data", "train.csv", "--target", target, "--column", f"{other}=drop",
            "--validation", "held_out.csv", "--epochs", "2", "--lr", "1e-2"]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_a_table_and_a_name_are_enough(model: str, target: str, cli: Cli, tables: Any) -> None:
    """A run folder evaluates and predicts; its model does as well, there and in bare onnxruntime."""
    ok(cli, *_train(target, model), "--run", str(RUN))
    history = _rows(str(RUN / "history.csv"))
    found = json.loads(ok(cli, "evaluate", str(RUN), "--data", "held_out.csv", "--json"))["scores"]
    assert found["loss"] == pytest.approx(float(history[-1]["val_loss"]), rel=1e-5)
    for place in (RUN, RUN / "trained.onnx"):
        ok(cli, "predict", str(place), "--data", "new.csv", "-o", f"{place.name}.csv")
    assert _rows("one.csv") == _rows("trained.onnx.csv")
    session = ort.InferenceSession(RUN / "trained.onnx")
    new = pd.read_csv("new.csv")
    feeds = {
        "area": new.area.to_numpy(),
        "town": new.town.fillna("").to_numpy(object),
        "built": new.built.to_numpy(object),
    }
    assert {value.name for value in session.get_inputs()} == set(feeds)
    out = dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))
    if target == "kind":
        assert [row["class"] for row in _rows("one.csv")] == out["class"].tolist()
        column = [float(row["probability[dear]"]) for row in _rows("one.csv")]
        np.testing.assert_allclose(column, out["probabilities"][:, 1], rtol=1e-5)
    else:
        np.testing.assert_allclose([float(row["price"]) for row in _rows("one.csv")], out["price"][:, 0], rtol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_goes_on_and_its_recipe_repeats_it(target: str, cli: Cli, tables: Any) -> None:
    ok(cli, *_train(target), "--run", "runs/whole", "--epochs", "4")
    ok(cli, *_train(target), "--run", str(RUN))
    recipe = (RUN / "recipe.toml").read_text()
    assert 'start = "mlp"' in recipe and f'target = ["{target}"]' in recipe
    ok(cli, "train", str(RUN), "--resume", "--epochs", "4")
    ok(cli, "train", "runs/whole/recipe.toml", "--run", "runs/again")
    whole, gone_on, again = (_rows(f"runs/{name}/history.csv") for name in ("whole", "one", "again"))
    assert [row["loss"] for row in gone_on] == [row["loss"] for row in whole][-len(gone_on) :] and again == whole


def test_a_run_that_goes_on_keeps_what_it_has_learnt(cli: Cli, tables: Any) -> None:
    ok(cli, *_train("price"), "--run", str(RUN))
    before = onnx.load(RUN / "trained.onnx").metadata_props
    tables.assign(area=tables.area * 10)[:60].to_csv("train.csv", index=False)
    ok(cli, "train", str(RUN), "--resume", "--epochs", "3")
    assert onnx.load(RUN / "trained.onnx").metadata_props == before


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_of_ones_own_is_preprocessed_for(target: str, cli: Cli, tables: Any) -> None:
    """Its input takes what is made of the columns; the held-out rows are not learnt from."""
    net = nn.Sequential(nn.Linear(11, 8), nn.ReLU(), nn.Linear(8, 2 if target == "kind" else 1))
    onnx.save(gg.frontend.export(net, {"points": ("batch", 11)}), "own.onnx")
    loss = "cross_entropy" if target == "kind" else "l1"
    words = [*_train(target)[3:], "--preprocess", "auto", "--loss", loss, "--run", str(RUN)]
    ok(cli, "train", "own.onnx", *words)
    ok(cli, "predict", str(RUN / "trained.onnx"), "--data", "new.csv", "-o", "p.csv")
    assert len(_rows("p.csv")) == 30
    plan = gg.DataNames.read_from({p.key: p.value for p in onnx.load(RUN / "trained.onnx").metadata_props}).preprocess
    assert plan is not None and plan.numbers == "points"
    assert plan.columns["area"].as_data()["mean"] == pytest.approx(tables.area[:60].mean())


BAD = {
    "no model": (["train", "--data", "train.csv"], "give MODEL, such as model.onnx, or --model NAME"),
    "two models": (["train", "model.onnx", "--model", "mlp", "--data", "train.csv"], "give MODEL"),
    "no target": (["train", "--model", "mlp", "--data", "train.csv"], "predicts a column of the table; name it with"),
    "no such model": (["train", "--model", "mpl", "--data", "train.csv"], "not one of 'mlp'"),
    "no such target": (["train", "--model", "mlp", "--data", "train.csv", "--target", "prize"],
                       "no column 'prize'; did you mean 'price'"),
    "no table": (["train", "--model", "mlp", "--data", "train.npz", "--target", "y"], "'train.npz' is not a table"),
    "no such kind": ([*_train("price"), "--column", "town=categories"], "no kind of column 'categories'"),
    "no kind": ([*_train("price"), "--column", "town"], "should be NAME=KIND, such as zip=category"),
    "kinds for nothing": (["train", "model.onnx", "--data", "train.npz", "--column", "a=date"], "add --preprocess"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_missing_is_said(case: str, cli: Cli, tables: Any) -> None:
    words, says = BAD[case]
    ran = cli(*words)
    assert ran.code in (1, 2) and says in ran.err and len(ran.err.strip().splitlines()) <= 2


def test_a_missing_column_is_one_sentence(cli: Cli, tables: Any) -> None:
    ok(cli, *_train("price"), "--run", str(RUN))
    tables.rename(columns={"town": "city"}).to_csv("bad.csv", index=False)
    ran = cli("predict", str(RUN), "--data", "bad.csv", "-o", "p.csv")
    assert (
        ran.code == 1 and "the table lacks the column 'town', which the model reads, and has the new 'city'" in ran.err
    )


def test_a_run_without_a_folder_goes_on_with_the_data_that_it_began_with_alone(cli: Cli, tables: Any) -> None:
    words = [*_train("price"), "--checkpoint", "run.ckpt"]
    ok(cli, *words)
    ok(cli, *words, "--resume", "--epochs", "3")
    tables[10:60].to_csv("train.csv", index=False)
    ran = cli(*words, "--resume", "--epochs", "4")
    assert ran.code == 1 and "the checkpoint's model was made for other data" in ran.err


def test_what_is_exported_is_held_against_the_step(cli: Cli, tables: Any) -> None:
    ok(cli, *_train("kind"), "--run", str(RUN))
    for words in ([], ["--size", "batch=1"]):
        ran = cli("export", str(RUN), "-o", "t.onnx", *words)
        assert ran.code == 0 and "on a random batch: 'logits' is equal up to rounding" in ran.err


def test_a_trained_model_is_tuned_to_another_column_of_raw_tables(cli: Cli, tables: Any) -> None:
    """The step is built of the file that takes columns; what it exports takes them, too, as they were learnt."""
    ok(cli, *_train("price"), "--export", "t.onnx")
    tables[:60].assign(rent=tables.price / 1000).drop(columns=["price", "kind"]).to_csv("other.csv", index=False)
    words = ["train", "t.onnx", "--data", "other.csv", "--loss", "mse", "--epochs", "1", "--export", "tuned.onnx"]
    assert "lacks the column 'price'" in cli(*words).err
    ok(cli, *words, "--target", "rent")
    first, tuned = (onnx.load(name) for name in ("t.onnx", "tuned.onnx"))
    assert [i.name for i in tuned.graph.input] == [i.name for i in first.graph.input]
    session = ort.InferenceSession("tuned.onnx")
    feeds = {"area": np.array([90.0]), "town": np.array(["Ulm"], object), "built": np.array(["2003-01-01"], object)}
    assert np.isfinite(session.run(None, feeds)[0]).all()


def test_a_model_of_others_takes_columns_of_text_by_name(tmp_path: Path, cli: Cli) -> None:
    """As skl2onnx writes them: an input [rows, 1] for each column, text among them."""
    value = onnx.helper.make_tensor_value_info
    rows = [
        onnx.helper.make_node("LabelEncoder", ["word"], ["n"], domain="ai.onnx.ml", keys_strings=["a", "b"],
                              values_floats=[10.0, 20.0], default_float=-1.0),
        onnx.helper.make_node("Add", ["n", "size"], ["y"]),
    ]  # fmt: skip
    graph = onnx.helper.make_graph(
        rows, "g", [value("size", 1, [None, 1]), value("word", 8, [None, 1])], [value("y", 1, [None, 1])]
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    (tmp_path / "t.csv").write_text("word,size\nb,1\nc,2\na,3\n")
    cli("predict", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "t.csv"), "-o", str(tmp_path / "y.csv"))
    assert (tmp_path / "y.csv").read_text().split() == ["y", "21.0", "1.0", "13.0"]


def test_a_run_that_goes_on_for_longer_has_the_schedule_of_all_its_epochs(cli: Cli, tables: Any) -> None:
    """And not that of the epochs that it began with, whose rate is 0 by then."""
    words = [*_train("price"), "--batch-size", "20", "--schedule", "cosine", "--lr", "1e-2", "--run", str(RUN)]
    ok(cli, *words, "--epochs", "2")
    ok(cli, *words, "--epochs", "4", "--resume")
    rates = pd.read_csv(RUN / "history.csv").learning_rate
    assert rates.iloc[2] > 2e-3 > 1e-3 > rates.iloc[3] > 0


@pytest.mark.parametrize("name", ["a,b", "a=b", "a,b=c", "{a}", "a b", "a=", "=a", 'say "x"'])
def test_columns_of_any_name_are_typed(name: str, cli: Cli, tables: Any) -> None:
    tables.rename(columns={"price": name}).to_csv("train.csv", index=False)
    typed = f'"{name}"' if "," in name else name
    column = ["--column", f"{name}=number", "--column", 'town={"kind": "category", "min_count": 1}']
    words = ["train", "--model", "mlp", "--data", "train.csv", "--target", typed, *column, "--epochs", "1"]
    ok(cli, *words, "--run", str(RUN))
    ok(cli, "train", str(RUN), "--resume", "--epochs", "2")  # from the recipe
    ok(cli, "evaluate", str(RUN), "--data", "train.csv")


@pytest.mark.parametrize("model", ["mlp", "model of mine"])
@pytest.mark.parametrize("target", TARGETS)
def test_weights_of_samples_are_no_column_of_the_model(target: str, model: str, cli: Cli, tables: Any) -> None:
    """Rows that weigh nothing change nothing."""
    rng = np.random.default_rng(0)
    weighed = tables[["area", target]].fillna(90.0).assign(sample_weight=rng.integers(0, 2, 90).astype(float))
    width = 2 if target == "kind" else 1
    onnx.save(gg.frontend.export(nn.Linear(1, width), {"x": ("batch", 1)}), "mine.onnx")
    words = ["mine.onnx", "--preprocess", "auto", "--loss", "cross_entropy" if target == "kind" else "mse"]
    words = ["train", *(["--model", "mlp"] if model == "mlp" else words), "--data", "train.csv", "--target", target]
    losses = []
    for change in (0, 1):
        other = target if target == "kind" else "price"
        spoilt = weighed[other].where(weighed.sample_weight > 0, "dear" if target == "kind" else 9e5)
        weighed.assign(**{other: spoilt if change else weighed[other]}).to_csv("train.csv", index=False)
        ok(cli, *words, "--epochs", "1", "--sample-weight", "--run", f"runs/{change}")
        losses.append(json.loads(ok(cli, "evaluate", "runs/0", "--data", "train.csv", "--json"))["scores"]["loss"])
    assert [i.name for i in onnx.load("runs/0/trained.onnx").graph.input] == ["area"]
    assert losses[0] == pytest.approx(losses[1])


def test_codes_in_a_csv_keep_their_digits(cli: Cli, folder: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"zip": rng.choice(["01067", "1067", "80331"], 40), "y": rng.choice(["01", "02", "10"], 40)})
    frame["id"] = rng.choice([str(2**53), str(2**53 + 1), None], 40)
    frame["seen"] = rng.choice(["007", "8"], 40)
    frame.to_csv("t.csv", index=False)
    frame.to_parquet("t.parquet")
    train = ("train", "--model", "mlp", "--data", "t.csv", "--target", "y", "--epochs", "1", "--run", str(RUN))
    ran = cli(*train, "--column", "zip=category", "--column", "id=category")
    assert ran.code == 0, ran.err
    for line in ("zip: category, 4 numbers", "id: category, 4 numbers", "one of 3 classes: '01', '02', '10'"):
        assert line in ran.err
    assert ran.err.count("if they are codes, add --column") == 1
    assert "the column 'seen' is read as numbers" in ran.err
    assert ok(cli, "evaluate", str(RUN), "--data", "t.csv") == ok(cli, "evaluate", str(RUN), "--data", "t.parquet")
