"""``gradgraph explain``: every kind of data to a folder with page, arrays and document; wrong calls in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.frontend import Input, export, manual_seed, nn
from tests.kit import tiny_bert, wav_writing
from tests.kit.command_line import Cli, Ran

HELD_OUT = ("--data", "held_out.npz")
QUICK = ("--option", "n=4", "--samples", "4")


def documents(ran: Ran, folder: Path = Path("why")) -> tuple[dict[str, Any], str, Any]:
    """Return the printed document, the page and the arrays, which agree with each other."""
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    kept = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert document == kept | {"folder": str(folder)}
    page = (folder / "index.html").read_text("utf-8")
    assert page.count("<article>") == len(document["samples"]) and not re.search(r'(src|href)="(?!data:)', page)
    return document, page, np.load(folder / "attributions.npz")


def test_arrays_with_all_checks(cli: Cli) -> None:
    document, page, arrays = documents(cli("explain", "model.onnx", *HELD_OUT, *QUICK, "--json"))
    assert [one["sample"] for one in document["samples"]] == [0, 10, 21, 31] == arrays["index"].tolist()
    assert arrays["x.attribution"].shape == (4, 4) and arrays["completeness.error"].shape == (4,)
    x = np.load("held_out.npz")["x"][[0, 10, 21, 31]]
    assert {one["predicted"] for one in document["samples"]} <= {"0", "1", "2"}
    first = document["samples"][0]["attributions"]["x"][0]
    best = int(np.abs(arrays["x.attribution"][0]).argmax())
    assert first["name"] == f"x[{best}]" and float(first["value"]) == pytest.approx(x[0, best], rel=1e-4)
    assert first["attribution"] == pytest.approx(float(arrays["x.attribution"][0, best]))
    checks = document["checks"]
    assert [one["layer"] for one in checks["randomised"]] == ["last.weight", "first.weight"]
    assert checks["incompleteness"] < 0.5 and len(checks["deletion"]["by_attribution"]) == 11
    assert "Sanity checks" in page and "first.weight" in page


def test_the_attributions_are_those_of_the_model_that_python_returns(cli: Cli) -> None:
    """For a class that is asked for, and by another method."""
    import onnxruntime as ort

    call = (
        "explain",
        "model.onnx",
        "--data",
        "held_out.npz",
        "--samples",
        "3",
        "--class",
        "2",
        "--no-checks",
        "--json",
    )
    document, page, arrays = documents(cli(*call, "--method", "input-x-gradient"))
    why = gg.explain("model.onnx", "input-x-gradient", target=2)
    x = np.load("held_out.npz")["x"][[0, 16, 31]]
    logits, expected = ort.InferenceSession(why.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(arrays["x.attribution"], expected, atol=1e-5)
    np.testing.assert_allclose(arrays["score"], logits[:, 2], atol=1e-5)
    assert {one["target"] for one in document["samples"]} == {"2"} and "checks" not in document
    assert "Sanity checks" not in page


def test_without_json_each_sample_has_a_line(cli: Cli) -> None:
    ran = cli("explain", "model.onnx", *HELD_OUT, *QUICK)
    lines = ran.out.splitlines()
    assert ran.code == 0 and len(lines) == 4
    assert re.fullmatch(r"sample 10: [012]: (x\[\d\] = [^ ]+ [+-][^ ]+(, )?){3}", lines[1])
    assert ran.err.endswith(f"wrote why: open {Path('why/index.html')} in a browser\n")


@pytest.mark.sweep(0.3)
def test_a_table_has_its_columns_and_values(cli: Cli) -> None:
    pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    rng = np.random.default_rng(0)
    age, town = rng.integers(20, 70, 96), rng.choice(["Ulm", "Bonn", "<b>Rhein</b>"], 96)
    label = np.where((age > 45) ^ (town == "Ulm"), "yes", "no")
    rows = [f"{a},{t},{v}" for a, t, v in zip(age, town, label, strict=True)]
    Path("t.csv").write_text("\n".join(["age,town,buys", *rows]), "utf-8")
    train = ("train", "--model", "mlp", "--data", "t.csv", "--target", "buys", "--epochs", "3", "--run", "run")
    assert cli(*train).code == 0
    assert cli("export", "run", "-o", "out.onnx").code == 0
    seen = []
    for model in ("run", "out.onnx"):
        out = Path(f"why-{model}")
        ran = cli("explain", model, "--data", "t.csv", "--class", "yes", *QUICK, "-o", str(out), "--json")
        document, page, arrays = documents(ran, out)
        assert arrays["x.columns"].tolist() == ["age", "town"] and arrays["x.column_attribution"].shape == (4, 2)
        np.testing.assert_allclose(arrays["x.column_attribution"].sum(1), arrays["x.attribution"].sum(1), atol=1e-5)
        values = [{one["name"]: one["value"] for one in s["attributions"]["x"]} for s in document["samples"]]
        assert values == [{"age": str(age[i]), "town": town[i]} for i in arrays["index"]]
        assert 0 < document["samples"][0]["probability"] < 1 and "<b>Rhein" not in page
        seen.append(arrays["x.attribution"])
    np.testing.assert_allclose(*seen, atol=1e-5)


@pytest.mark.sweep(0)
def test_embedded_columns_are_explained_too(cli: Cli) -> None:
    """Also the integers of several tables in one, which the model moves by offsets."""
    pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    rows = [f"{i % 7},{'ab'[i % 2]},{'pqr'[i % 3]},{'no' if i % 2 else 'yes'}" for i in range(64)]
    Path("t.csv").write_text("\n".join(["n,town,river,buys", *rows]), "utf-8")
    train = ("train", "--model", "ft_transformer", "--data", "t.csv", "--target", "buys", "--epochs", "4", "--run", "r")
    assert cli(*train).code == 0
    document, page, arrays = documents(cli("explain", "r", "--data", "t.csv", *QUICK, "--json"))
    for one in document["samples"]:
        found = {each["name"]: (each["value"], each["attribution"]) for each in one["attributions"]["categories"]}
        assert {name: value for name, (value, _) in found.items()} == {
            "town": "ab"[one["sample"] % 2],
            "river": "pqr"[one["sample"] % 3],
        }
        assert all(attribution for _, attribution in found.values())
    assert arrays["categories.columns"].tolist() == ["town", "river"]
    assert "inputs_without_attributions" not in document and "inputs without" not in page


@pytest.mark.sweep(0.3)
def test_photos_have_heat_maps(cli: Cli) -> None:
    image = pytest.importorskip("PIL.Image", reason="an extra: onnx-gradgraph[images]")
    manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    onnx.save(export(net, {"x": ("N", 3, 8, 8)}, "logits"), "net.onnx")
    hostile = 'a "quoted" <i> & name'
    for kind, shade in (("dark", 40), (hostile, 220)):
        for i in range(3):
            path = Path("photos") / kind / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(np.full((9, 8, 3), shade + i, np.uint8)).save(path)
    train = ("train", "net.onnx", "--data", "photos", "--loss", "cross_entropy", "--epochs", "2", "--export", "t.onnx")
    assert cli(*train).code == 0
    for method in ("grad-cam", "integrated-gradients"):
        quick = ("--option", "n=4") if method != "grad-cam" else ()
        ran = cli("explain", "t.onnx", "--data", "photos", "--method", method, *quick, "--json", "--force")
        document, page, arrays = documents(ran)
        assert page.count("<img") == 12 and hostile not in page and "probability" in document["samples"][0]
        assert arrays["x.attribution"].shape == (6, 1 if method == "grad-cam" else 3, 8, 8)
        assert arrays["file"][0].endswith("0.png")


@pytest.mark.sweep(0.3)
def test_texts_have_coloured_words(cli: Cli) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("pandas")
    tiny_bert.tokenizer(Path("tokenizer.json"))
    onnx.save(tiny_bert.classifier(), "bert.onnx")
    said, labels = tiny_bert.sentences(64)
    Path("r.csv").write_text("\n".join(["stars,review", *(f'{a},"{b}"' for a, b in zip(labels, said, strict=True))]))
    read = ("--data", "r.csv", "--tokenizer", "tokenizer.json", "--target", "stars", "--lr", "5e-3")
    assert cli("train", "bert.onnx", *read, "--loss", "cross_entropy", "--epochs", "4", "--run", "run").code == 0
    document, page, arrays = documents(cli("explain", "run", "--data", "r.csv", *QUICK, "--json"))
    for row, one in enumerate(document["samples"]):
        tokens = [unit["token"] for unit in one["attributions"]["input_ids"]]
        assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and "[PAD]" not in tokens
        assert [t for t in tokens[1:-1] if t != ","] == one["text"].replace(",", "").split()
        total = arrays["input_ids.attribution"][row].sum()
        assert sum(unit["attribution"] for unit in one["attributions"]["input_ids"]) == pytest.approx(total, abs=1e-4)
    assert page.count('class="tokens"') == 4
    lines = cli("explain", "run", "--data", "r.csv", *QUICK, "--no-checks", "--force").out.splitlines()
    assert re.match(r"sample 0: (good|bad) [\d.]+%: '\S+' [+-]", lines[0])


class Loudest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, mel: gg.frontend.Tensor) -> gg.frontend.Tensor:
        return self.head(mel.mean(dim=2))


@pytest.mark.sweep(0.3)
def test_sounds_have_curves(cli: Cli) -> None:
    manual_seed(0)
    net = export(Loudest(), {"mel": Input(("rows", 16, "frames"))}, outputs=["logits"])
    onnx.save(gg.sound.log_mel(net, sample_rate=8000, n_fft=128, hop=64, mels=16), "net.onnx")
    wav_writing.sounds(Path("train"), 3)
    train = ("train", "net.onnx", "--loss", "cross_entropy", "--epochs", "1", "--data", "train", "--run", "run")
    assert cli(*train, "--sound", "seconds=0.5").code == 0
    document, page, arrays = documents(cli("explain", "run/trained.onnx", "--data", "train", *QUICK, "--json"))
    (name,) = document["samples"][0]["attributions"]
    assert arrays[f"{name}.attribution"].shape == (4, 4000) and page.count('class="sound"') == 4
    assert "<span>0.5 s</span>" in page


WRONG = {
    "a folder that exists": (
        (*HELD_OUT, "-o", "full"),
        "the folder 'full' is not empty; choose another",
    ),
    "no such class": ((*HELD_OUT, "--class", "7"), "there is no class '7'; there is 0, 1, 2"),
    "no such method": (
        (*HELD_OUT, "--method", "saliencey"),
        "there is no method 'saliencey'; did",
    ),
    "no such option": ((*HELD_OUT, "--option", "steps=5"), "has no option 'steps'"),
    "an argument that is no option": ((*HELD_OUT, "--option", "out=x.onnx"), "has no option 'out'"),
    "an attack": (
        (*HELD_OUT, "--method", "fgsm"),
        "not attributions to the inputs, so there",
    ),
    "a method without its layer": ((*HELD_OUT, "--method", "grad-cam"), "needs a layer"),
    "a baseline to feed": (
        (*HELD_OUT, "--option", "baseline=input"),
        "besides the data; explain it in Python",
    ),
    "no such output": ((*HELD_OUT, "--output", "nothing"), "nothing"),
    "no such folder": ((*HELD_OUT, "-o", "no/such"), "create its folder first"),
    "no such data": (("--data", "nothing.npz"), "nothing.npz"),
    "no samples": (("--data", "empty.npz"), "the data are empty; give at least one sample"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_one_sentence(case: str, cli: Cli) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    np.savez("empty.npz", x=np.zeros((0, 4), np.float32))
    words, says = WRONG[case]
    ran = cli("explain", "model.onnx", *words)
    assert ran.code == 1 and ran.err.count("\n") == 1 and says in ran.err, ran.err
    assert not Path("why").exists() and Path("full/mine.txt").read_text() == "mine"


def test_an_earlier_explanation_is_replaced_only_if_asked(cli: Cli) -> None:
    call = ("explain", "model.onnx", *HELD_OUT, *QUICK, "--no-checks")
    assert cli(*call).code == 0
    assert "add --force" in cli(*call).err or "--force" in cli(*call).err
    assert cli(*call, "--force").code == 0


def test_expected_gradients_start_at_the_samples(cli: Cli) -> None:
    call = ("explain", "model.onnx", *HELD_OUT, "--method", "expected-gradients", "--option", "n=200")
    document, _, arrays = documents(cli(*call, "--samples", "6", "--no-checks", "--json"))
    outputs = np.array([one["score"] for one in document["samples"]])
    assert arrays["x.attribution"].shape == (6, 4) and np.isfinite(arrays["x.attribution"]).all()
    assert np.ptp(outputs) > 0


def test_attributions_that_are_not_numbers_are_told(cli: Cli) -> None:
    ran = cli("explain", "model.onnx", *HELD_OUT, *QUICK, "--option", "baseline=NaN", "--json")
    document, page, _ = documents(ran)
    says = "Some attributions are NaN or infinite; check the data, the baseline and the model."
    assert document["warnings"] == [says] and says in page


def test_several_texts_per_sample_are_refused(cli: Cli) -> None:
    onnx.save(tiny_bert.chooser(), "choose.onnx")
    np.savez("ids.npz", **dict.fromkeys(tiny_bert.NAMES, np.ones((2, 3, 5), np.int64)))
    ran = cli("explain", "choose.onnx", "--data", "ids.npz")
    assert ran.code == 1 and "the input 'input_ids' has several texts per sample" in ran.err


def test_elements_are_deleted_by_their_baseline(cli: Cli) -> None:
    baseline = np.array([[1, 2, 3, 4]], np.float32)
    call = ("explain", "model.onnx", *HELD_OUT, *QUICK, "--option", "baseline=[1, 2, 3, 4]", "--json")
    checks = documents(cli(*call))[0]["checks"]
    np.savez("base.npz", x=baseline)
    scores = documents(cli("explain", "model.onnx", "--data", "base.npz", "--no-checks", "--json", "--force"))[0]
    assert checks["deletion"]["by_attribution"][-1] == pytest.approx(checks["insertion"]["by_attribution"][0])
    zero = documents(cli(*call[:-3], "--json", "--force"))[0]["checks"]
    assert checks["deletion"]["by_attribution"][-1] != pytest.approx(zero["deletion"]["by_attribution"][-1])
    assert checks["deletion"]["by_attribution"][-1] <= scores["samples"][0]["score"] + 1e-5


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Embedding(7, 2), nn.Embedding(7, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Any, attention_mask: Any) -> Any:
        rows = self.wide(ids) * gg.frontend.functional.tanh(self.head(self.deep(ids)))
        return (rows * attention_mask.float().unsqueeze(2)).sum(1)


def test_tokens_of_two_tables_and_empty_texts(cli: Cli) -> None:
    manual_seed(0)
    like = Input(("N", 5), "int64")
    onnx.save(export(TwoTables(), {"ids": like, "attention_mask": like}, "y"), "two.onnx")
    mask = np.ones((3, 5), np.int64)
    mask[0] = 0
    np.savez("ids.npz", ids=np.arange(15).reshape(3, 5) % 7, attention_mask=mask)
    document, _, arrays = documents(cli("explain", "two.onnx", "--data", "ids.npz", "--json"))
    assert arrays["ids.attribution"].shape == (3, 5, 5) and document["checks"]["incompleteness"] < 1e-4
    assert document["samples"][0]["attributions"]["ids"] == []


def test_a_fixed_batch_size_is_padded(cli: Cli) -> None:
    model = onnx.load("model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 3
    onnx.save(model, "fixed.onnx")
    _, _, fixed = documents(cli("explain", "fixed.onnx", *HELD_OUT, *QUICK, "--json"))
    _, _, free = documents(cli("explain", "model.onnx", *HELD_OUT, *QUICK, "--json", "--force"))
    np.testing.assert_allclose(fixed["x.attribution"], free["x.attribution"], atol=1e-5)


def test_one_number_per_sample_has_no_class(cli: Cli) -> None:
    manual_seed(0)
    onnx.save(export(nn.Linear(4, 1), {"x": ("N", 4)}, "y"), "one.onnx")
    document, _, arrays = documents(cli("explain", "one.onnx", *HELD_OUT, *QUICK, "--json"))
    assert float(document["samples"][0]["predicted"]) == pytest.approx(arrays["score"][0], rel=1e-4)
    assert "target" not in document["samples"][0]
    ran = cli("explain", "one.onnx", *HELD_OUT, "--class", "0", "-o", "other")
    assert ran.code == 1 and "the output 'y' has one number per sample, so there is no class; omit --class" in ran.err


def test_tokens_have_the_colours_of_the_scale_in_a_terminal() -> None:
    from gradgraph.attributions.attribution_markup import NEGATIVE, POSITIVE
    from gradgraph.cli.explain import _coloured

    parts = _coloured(["a\x1b", "", "b", "c"], np.array([2.0, 9.0, -1.0, 0.0]))
    half = ",".join(str(round(c / 2)) for c in NEGATIVE)
    assert parts[::2] == [("a\\x1b", f"white on rgb({','.join(map(str, POSITIVE))})"), ("b", f"white on rgb({half})"),
                          ("c", "white on rgb(0,0,0)")]  # fmt: skip
