"""What every command does when all is well."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy

from gradgraph.runtime.execution import openings, tuner
from gradgraph.runtime.loop import reporter
from tests.kit.command_line import Cli, arrays
from tests.kit.convolutions import convolutions
from tests.kit.npz import npz

STEP_FILES = {"init.onnx", "train.onnx", "eval.onnx", "manifest.json"}


def ok(cli: Cli, *words: str) -> str:
    ran = cli(*words)
    assert ran.code == 0, ran.err
    return ran.out


def test_build_writes_the_step_folder_and_says_what_comes_next(cli: Cli, folder: Path) -> None:
    ran = cli("build", "model.onnx")
    assert ran.code == 0
    assert {p.name for p in (folder / "step").iterdir()} == STEP_FILES
    assert "67 in 4 tensors" in ran.out
    assert "next: gradgraph train step" in ran.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--optimizer", "sgd", "--lr", "0.5", "--optimizer-option", "momentum=0.9"],
         {"name": "sgd", "lr": 0.5, "momentum": 0.9}),
        (["--optimizer", "sgd", "--optimizer-option", "momentum=0.9", "--optimizer-option", "nesterov=True"],
         {"nesterov": True}),
        (["--optimizer-option", "betas=[0.8,0.9]", "--optimizer-option", "weight_decay=0"],
         {"name": "adamw", "betas": [0.8, 0.9], "weight_decay": 0}),
    ],
)  # fmt: skip
def test_build_hands_on_the_optimizer(cli: Cli, options: list[str], expected: dict[str, object]) -> None:
    manifest = json.loads(ok(cli, "build", "model.onnx", "--json", *options))["manifest"]
    optimizer = {"name": manifest["optimizer"]["name"], **manifest["optimizer"]["arguments"]}
    assert {k: optimizer[k] for k in expected} == expected


def test_several_losses_from_the_shell(cli: Cli, folder: Path) -> None:
    model = onnx.load("model.onnx")
    model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["shares"]))
    shape = [d.dim_param or d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim]
    model.graph.output.append(onnx.helper.make_tensor_value_info("shares", 1, shape))
    onnx.save(model, "two.onnx")
    data = npz("train.npz")
    data["logits_target"] = data.pop("target")
    data["shares_target"] = np.full((len(data["x"]), shape[1]), 0.3, np.float32)
    np.savez("two.npz", **data, sample_weight=np.ones(len(data["x"]), np.float32))
    words = ["--loss", "logits=cross_entropy", "--loss", "shares=huber:0.5", "--loss-option", "shares.delta=0.2",
             "--sample-weight", "--epochs", "2"]  # fmt: skip
    ran = json.loads(ok(cli, "train", "two.onnx", "--data", "two.npz", *words, "--history", "h.csv", "--json"))
    history = ran["history"]
    parts = np.array(history["logits_loss"]) + 0.5 * np.array(history["shares_loss"])
    np.testing.assert_allclose(parts, history["loss"], rtol=1e-6)
    assert "shares_loss" in Path("h.csv").read_text("utf-8").splitlines()[0]
    found = json.loads(ok(cli, "train", "two.onnx", "--data", "two.npz", *words, "--json", "--metric", "logits=f1",
                          "--metric", "logits=top_k(k=2)", "--metric", "shares=mae"))["history"]  # fmt: skip
    assert {"logits_f1", "logits_top_2", "shares_mae"} < set(found)
    both = ["--loss", "shares=huber", "--loss", "shares=smooth_l1:0.5", "--loss-option", "shares.delta=0.2"]
    manifest = json.loads(ok(cli, "build", "two.onnx", *both, "--json"))["manifest"]
    assert [m["name"] for m in manifest["measures"]] == ["shares_huber", "shares_smooth_l1", "loss"]
    assert manifest["loss"]["arguments"]["shares: huber"]["arguments"]["delta"] == 0.2
    np.savez("two.npz", **data, logits_mask=np.arange(len(data["x"])) % 2 == 0)
    masked = [*words[:-3], "--epochs", "2", "--mask-of", "logits:1", "--json"]
    other = json.loads(ok(cli, "train", "two.onnx", "--data", "two.npz", *masked))["history"]
    assert other["logits_loss"][0] != history["logits_loss"][0]
    for wrong, says in ((["--mask-of", "logits:0"], "a mask needs at least one axis"),
                        (["--mask-of", "logits", "--mask"], "give only one of them"),
                        (["--mask-of", "shares"], "no loss has 'shares' as its first output"),
                        (["--loss", "logits=mse", "--metric", "logits=mae", "--metric", "r2"], "names no output"),
                        (["--metric", "f2"], "there is no metric 'f2'"),
                        (["--loss", "logits=mse", "--loss", "mse"], "names no output"),
                        (["--loss", "logits=mse:much"], "is not a number"),
                        (["--loss", "logits=mse", "--loss-option", "delta=1"], "not an argument of any")):  # fmt: skip
        refused = cli("build", "two.onnx", *wrong)
        assert (refused.code, says in refused.err) == (1, True), refused.err


def test_export_keeps_the_outputs_that_are_named(cli: Cli) -> None:
    ok(cli, "build", "model.onnx")
    facts = json.loads(ok(cli, "export", "step", "-o", "one.onnx", "--output", "logits", "--json"))
    assert (facts["inputs"], facts["outputs"]) == (["x"], ["logits"])
    wrong = cli("export", "step", "-o", "one.onnx", "--output", "logit")
    assert (wrong.code, "did you mean 'logits'" in wrong.err) == (1, True)
    assert cli("export", "step", "-o", "one.safetensors", "--output", "logits").code == 2


def test_build_hands_on_loss_selection_and_target_name(cli: Cli) -> None:
    words = ["--loss", "mse", "--train", "last.*", "--train", "first.*", "--freeze", "*.bias", "--target-name", "y"]
    manifest = json.loads(ok(cli, "build", "model.onnx", "--json", *words))["manifest"]
    assert manifest["loss"]["name"] == "mse"
    assert manifest["trainable"] == ["first.weight", "last.weight"]
    assert manifest["frozen"] == ["first.bias", "last.bias"]
    assert [t["name"] for t in manifest["targets"]] == ["y"]


def test_build_freezes_below_a_value(cli: Cli) -> None:
    model = onnx.load("model.onnx")
    hidden = next(n.output[0] for n in model.graph.node if "first.bias" in n.input)
    manifest = json.loads(ok(cli, "build", "model.onnx", "--json", "--freeze-below", hidden))["manifest"]
    assert manifest["trainable"] == ["last.weight", "last.bias"]
    Path("recipe.toml").write_text(f'[model]\npath = "model.onnx"\nfreeze_below = ["{hidden}"]\n')
    assert (
        json.loads(ok(cli, "build", "recipe.toml", "--json", "--force"))["manifest"]["trainable"]
        == manifest["trainable"]
    )


def test_loss_options_reach_the_loss(cli: Cli) -> None:
    text = ok(cli, "build", "model.onnx", "--json", "--loss-option", "label_smoothing=0.1")
    assert json.loads(text)["manifest"]["loss"]["arguments"]["label_smoothing"] == 0.1


def test_master_weights_from_the_command_line(cli: Cli) -> None:
    text = ok(cli, "build", "model.onnx", "--json", "--master-weights", "--optimizer", "rmsprop")
    optimizer = json.loads(text)["manifest"]["optimizer"]
    assert (optimizer["name"], optimizer["arguments"]["optimizer"]["name"]) == ("master_weights", "rmsprop")


def test_force_replaces_a_step_folder(cli: Cli) -> None:
    ok(cli, "build", "model.onnx")
    again = cli("build", "model.onnx", "--loss", "mse")
    assert again.code == 1
    assert "not empty" in again.err
    ok(cli, "build", "model.onnx", "--loss", "mse", "--force")
    assert json.loads(ok(cli, "inspect", "step", "--json"))["loss"]["name"] == "mse"


def test_inspect_counts_the_nodes_of_a_step(cli: Cli, folder: Path) -> None:
    ok(cli, "build", "model.onnx")
    nodes = json.loads(ok(cli, "inspect", "step", "--json"))["nodes"]
    for name in ("train", "init", "eval"):
        assert nodes[name] == len(onnx.load(folder / "step" / f"{name}.onnx").graph.node)
    assert nodes["train_written"] > nodes["train"]
    assert f"train {nodes['train_written']:,} before clean-up" in ok(cli, "inspect", "step")


def test_from_model_to_trained_model(cli: Cli, folder: Path) -> None:
    """The whole road on files alone: build, train, export; plain onnxruntime sees the same accuracy."""
    ok(cli, "build", "model.onnx", "--lr", "0.05")
    ok(cli, "train", "step", "--data", "train.npz", "--epochs", "30", "--checkpoint", "run.ckpt")
    ok(cli, "export", "step", "--checkpoint", "run.ckpt", "-o", "trained.onnx")
    words = ["--data", "train.npz", "--validation", "held_out.npz", "--checkpoint", "run.ckpt", "--resume"]
    report = json.loads(ok(cli, "train", "step", *words, "--epochs", "31", "--export", "more.onnx", "--json"))

    def accuracy(file: str) -> float:
        held_out = arrays(32, seed=2)
        session = ort.InferenceSession(folder / file, providers=["CPUExecutionProvider"])
        logits = session.run(["logits"], {"x": held_out["x"]})[0]
        return float((logits.argmax(axis=1) == held_out["target"]).mean())

    assert accuracy("model.onnx") < 0.7
    assert accuracy("trained.onnx") > 0.85
    assert accuracy("more.onnx") == pytest.approx(report["history"]["val_accuracy"][-1])
    assert {n.op_type for n in onnx.load(folder / "trained.onnx").graph.node} == {"Gemm", "Relu"}


def test_train_builds_a_model_first_and_writes_all_it_is_asked_for(cli: Cli, folder: Path) -> None:
    files = ["--checkpoint", "run.ckpt", "--export", "trained.onnx", "--history", "history.csv", "-o", "built"]
    text = ok(cli, "train", "model.onnx", "--data", "train.npz", "--epochs", "3", *files, "--json")
    report = json.loads(text)
    assert report["steps"] == 9
    assert report["files"] == {"checkpoint": "run.ckpt", "export": "trained.onnx", "history": "history.csv"}
    assert all((folder / f).exists() for f in report["files"].values())
    assert {p.name for p in (folder / "built").iterdir()} == STEP_FILES
    rows = list(csv.DictReader((folder / "history.csv").read_text().splitlines()))
    assert [float(r["loss"]) for r in rows] == report["history"]["loss"]
    assert report["history"]["loss"][0] > report["history"]["loss"][-1]


@pytest.mark.sweep(0.12)
@pytest.mark.parametrize(
    "more", [[], ["--schedule", "cosine"], ["--schedule", "one_cycle", "--accumulate", "2"]], ids=" ".join
)
def test_a_run_in_two_parts_is_the_run_in_one(cli: Cli, folder: Path, more: list[str]) -> None:
    """A schedule is as long as all epochs, however early a run stops."""
    words = ["train", "model.onnx", "--data", "train.npz", "--epochs", "4", "--seed", "3", "--batch-size", "16", *more]
    ok(cli, *words, "--export", "whole.onnx")
    ok(cli, *words, "--checkpoint", "run.ckpt", "--max-steps", "5")
    ok(cli, *words, "--checkpoint", "run.ckpt", "--resume", "--export", "parts.onnx")
    whole, parts = (onnx.load(folder / f).SerializeToString() for f in ("whole.onnx", "parts.onnx"))
    assert whole == parts


def test_a_fixed_batch_and_a_rest_that_is_dropped(cli: Cli, folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 40
    onnx.save(model, folder / "fixed.onnx")
    words = ["train", "fixed.onnx", "--data", "train.npz", "--epochs", "1"]
    assert "add --drop-last" in cli(*words).err
    assert json.loads(ok(cli, *words, "--drop-last", "--json"))["steps"] == 2


def test_train_reads_a_folder_of_npy(cli: Cli, folder: Path) -> None:
    (folder / "data").mkdir()
    for name, array in arrays(96).items():
        np.save(folder / "data" / f"{name}.npy", array)
    words = ["--epochs", "2", "--json"]
    assert ok(cli, "train", "model.onnx", "--data", "data", *words) == ok(
        cli, "train", "model.onnx", "--data", "train.npz", *words
    )


@pytest.mark.sweep(0)
def test_options_of_a_run(cli: Cli) -> None:
    def steps(*words: str) -> int:
        report = json.loads(ok(cli, "train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--json", *words))
        return int(report["steps"])

    assert steps("--batch-size", "40") == 6
    assert steps("--batch-size", "40", "--drop-last") == 4
    assert steps("--limit", "1") == 2
    assert steps("--max-steps", "3") == 3
    assert steps("--no-shuffle") == 6


def test_learning_rate_of_a_step_folder(cli: Cli) -> None:
    ok(cli, "build", "model.onnx", "--lr", "0.5")
    words = ["train", "step", "--data", "train.npz", "--epochs", "1", "--json"]
    moved = json.loads(ok(cli, *words))["history"]["loss"]
    still = json.loads(ok(cli, *words, "--lr", "0"))["history"]["loss"]
    assert moved != still


def test_dry_run_writes_nothing(cli: Cli, folder: Path) -> None:
    before = {p.name for p in folder.iterdir()}
    files = ["--checkpoint", "run.ckpt", "--export", "trained.onnx", "--history", "history.csv", "-o", "built"]
    ran = cli("train", "model.onnx", "--data", "train.npz", "--validation", "held_out.npz", "--dry-run", *files)
    assert ran.code == 0
    assert "nothing was written" in ran.err
    assert {p.name for p in folder.iterdir()} == before


def test_quiet_says_nothing_on_stderr(cli: Cli) -> None:
    for words in (["build", "model.onnx"], ["train", "step", "--data", "train.npz"], ["check", "model.onnx"]):
        ran = cli(*words, "--quiet")
        assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize("backend", ["portable", "ort-cpu", "auto"])
def test_grad_writes_a_model_that_returns_gradients(cli: Cli, folder: Path, backend: str) -> None:
    ok(cli, "build", "model.onnx")
    onnx.save(onnx.load(folder / "step" / "eval.onnx"), folder / "eval.onnx")
    chosen = ["--output", "loss", "--wrt", "first.*", "--wrt", "x", "--backend", backend]
    report = json.loads(ok(cli, "grad", "eval.onnx", *chosen, "--json"))
    assert report["outputs"] == ["loss", "first.weight.grad", "first.bias.grad", "x.grad"]
    session = ort.InferenceSession(folder / "grad.onnx", providers=["CPUExecutionProvider"])
    state = ort.InferenceSession(folder / "step" / "init.onnx", providers=["CPUExecutionProvider"]).run(None, {})
    names = [o.name for o in onnx.load(folder / "step" / "init.onnx").graph.output]
    feeds = {**arrays(5), **dict(zip(names, state, strict=True))}
    results = session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})
    assert [r.shape for r in results] == [(), (8, 4), (8,), (5, 4)]


def test_export_of_weights(cli: Cli, folder: Path) -> None:
    ok(cli, "build", "model.onnx", "--freeze", "first.*")
    report = json.loads(ok(cli, "export", "step", "-o", "weights.safetensors", "--json"))
    assert report == {"file": "weights.safetensors", "tensors": 4, "bytes": 67 * 4}
    weights = safetensors.numpy.load_file(folder / "weights.safetensors")
    for tensor in onnx.load(folder / "model.onnx").graph.initializer:
        np.testing.assert_array_equal(weights[tensor.name], onnx.numpy_helper.to_array(tensor))


def test_export_without_a_checkpoint_says_so(cli: Cli) -> None:
    ok(cli, "build", "model.onnx")
    assert "with the initial weights" in cli("export", "step").err


def test_inspect_a_model(cli: Cli) -> None:
    text = ok(cli, "inspect", "model.onnx", "--freeze", "*.bias")
    assert "x float32[N, 4]" in text
    assert "trained: 2 tensors" in text
    facts = json.loads(ok(cli, "inspect", "model.onnx", "--train", "last.*", "--json"))
    assert [w["role"] for w in facts["weights"]] == ["frozen", "frozen", "trained", "trained"]
    assert {"operator": "Gemm", "count": 2, "status": "rule"} in facts["operators"]
    assert facts["missing"] == []


def test_inspect_says_why_a_tensor_is_trained_or_not(cli: Cli, folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    model.graph.node[1].CopyFrom(onnx.helper.make_node("Clip", ["h", "", "six"], ["r"], name="relu6"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(6, np.float32), "six"))
    onnx.save(model, folder / "relu6.onnx")
    text = ok(cli, "inspect", "relu6.onnx")
    assert re.search(
        r"^last\.weight .* trained +a weight of the node that computes 'logits' \(Gemm\)$", text, re.MULTILINE
    )
    assert re.search(r"^six +float32 +\[\] +the upper bound of node 'relu6' \(Clip\)$", text, re.MULTILINE)
    facts = json.loads(ok(cli, "inspect", "relu6.onnx", "--freeze", "first.*", "--json"))
    reasons = {w["name"]: w["reason"] for w in facts["weights"]}
    assert reasons["first.bias"] == "excluded by --train or --freeze"
    assert {n["name"]: n["reason"] for n in facts["numbers"]} == {"six": "the upper bound of node 'relu6' (Clip)"}


def test_inspect_shows_what_a_step_of_these_options_would_train(cli: Cli, folder: Path) -> None:
    """For each choice the same weights as a build, with a reason for each of the others."""
    ok(cli, "surgery", "model.onnx", "--lora", "*", "-o", "lora.onnx")
    ok(cli, "surgery", "model.onnx", "--teacher", "model.onnx", "-o", "pupil.onnx")
    for file, words, reason in (
        ("model.onnx", ["--freeze-below", "r"], "upstream of a value of --freeze-below"),
        ("model.onnx", ["--freeze-below", "h", "--freeze", "last.bias"], "upstream of a value of --freeze-below"),
        ("lora.onnx", [], "the model's adapters are trained instead"),
        ("lora.onnx", ["--train", "*.bias"], "excluded by --train or --freeze"),
        ("pupil.onnx", [], "part of a teacher, which stays frozen"),
    ):
        shown = json.loads(ok(cli, "inspect", file, *words, "--json"))["weights"]
        ok(cli, "build", file, *words, "-o", "chosen", "--force")
        trained = json.loads((folder / "chosen" / "manifest.json").read_text())["trainable"]
        assert [w["name"] for w in shown if w["role"] == "trained"] == trained
        assert reason in {w["reason"] for w in shown if w["role"] == "frozen"}
    assert "has no value 'nothing'" in cli("inspect", "model.onnx", "--freeze-below", "nothing").err


def test_inspect_lists_what_has_no_gradient(cli: Cli, folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    model.graph.node[1].CopyFrom(onnx.helper.make_node("Snake", ["h"], ["r"], name="act", domain="acme.ops"))
    model.opset_import.append(onnx.helper.make_opsetid("acme.ops", 1))
    onnx.save(model, folder / "snake.onnx")
    facts = json.loads(ok(cli, "inspect", "snake.onnx", "--json"))
    assert {"operator": "acme.ops.Snake", "node": "act"} in facts["missing"]


def test_inspect_shows_hostile_names_harmlessly(cli: Cli, folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    name = "w[/red]\x1b[31m\nend"
    model.graph.initializer[1].name = name
    model.graph.node[0].input[2] = name
    onnx.save(model, folder / "hostile.onnx")
    text = ok(cli, "inspect", "hostile.onnx")
    assert r"w[/red]\x1b[31m\nend" in text
    assert "\x1b" not in text


def test_a_built_step_shows_hostile_names_harmlessly(cli: Cli, folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    name = "x\x1b[31m\u202e\nend"
    model.graph.node[0].input[0] = model.graph.input[0].name = name
    onnx.save(model, folder / "hostile.onnx")
    for words in (["build", "hostile.onnx", "-o", "step"], ["inspect", "step"]):
        text = ok(cli, *words)
        assert r"x\x1b[31m\u202e\nend float32" in text
        assert not {"\x1b", "\u202e"} & set(text)
    assert not {"\x1b", "\u202e"} & set((folder / "step" / "manifest.json").read_text(encoding="utf-8"))


def test_ops_lists_every_operator(cli: Cli) -> None:
    rows = {r["operator"]: r for r in json.loads(ok(cli, "ops", "--json"))["operators"]}
    assert {s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated} <= rows.keys()
    assert rows["Conv"]["status"] == "rule"
    assert rows["Conv"]["cases"] > 0
    assert rows["Floor"]["status"] == "no gradient"
    assert rows["Shape"]["differentiable"] is False
    body = json.loads(ok(cli, "ops", "--status", "body", "--json"))["operators"]
    assert {r["status"] for r in body} == {"body"}
    assert ok(cli, "ops").startswith("operator")


def test_env_names_versions_and_providers(cli: Cli) -> None:
    facts = json.loads(ok(cli, "env", "--json"))
    assert facts["onnxruntime"] == ort.__version__
    assert "CPUExecutionProvider" in facts["providers"]
    assert "onnxruntime" in ok(cli, "env")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_env_says_where_openings_are_kept_and_forgets_them(cli: Cli, cache: Path) -> None:
    folder = openings.folder()
    folder.mkdir(parents=True)
    (folder / "0.opening").write_bytes(b"x" * 2_000_000)
    (folder / "other.txt").write_text("not ours")
    assert f"{folder} (1 cached, 2 MB" in json.loads(ok(cli, "env", "--json"))["openings"]
    assert "(0 cached, 0 MB" in ok(cli, "env", "--forget-openings")
    assert [file.name for file in folder.iterdir()] == ["other.txt"]


@pytest.mark.sweep(0)
def test_tune_times_the_forms_once(cli: Cli, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "BUDGET", 0.02)
    onnx.save(convolutions("images"), folder / "conv.onnx")
    ok(cli, "build", "conv.onnx", "--loss", "mse")
    first = cli("tune", "step", "--batch-size", "16", "--threads", "1")
    assert first.code == 0 and "ConvGradWeight(FLOAT[16, 4, 6, 6]" in first.out
    assert len(list(cache.rglob("tuned.json"))) == 1
    again = json.loads(ok(cli, "tune", "step", "--dim", "images=16", "--threads", "1", "--json"))
    assert again["timed"] == 0 and again["sizes"] == {"images": 16} and again["choices"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 1, "the dimension 'images' is dynamic; set its size with --dim images=SIZE"),
        (["--dim", "image=3"], 1, "no dynamic dimension 'image'; it has images"),
        (["--dim", "images=many"], 2, "should be NAME=SIZE"),
    ],
)
def test_tune_needs_sizes(cli: Cli, folder: Path, words: list[str], code: int, says: str) -> None:
    onnx.save(convolutions("images"), folder / "conv.onnx")
    ok(cli, "build", "conv.onnx", "--loss", "mse")
    ran = cli("tune", "step", *words)
    assert ran.code == code and says in ran.err


def test_patience_reports_the_epoch_whose_weights_are_kept(cli: Cli, folder: Path) -> None:
    """A learning rate that grows the loss sooner or later."""
    words = ["train", "model.onnx", "--data", "train.npz", "--validation", "held_out.npz", "--epochs", "30",
             "--patience", "2", "--lr", "1.5", "--export", "best.onnx"]  # fmt: skip
    report = json.loads(ok(cli, *words, "--json"))
    losses = report["history"]["val_loss"]
    assert len(losses) < 30
    assert report["restored_epoch"] == losses.index(min(losses)) + 1 == len(losses) - 2
    ran = cli(*words)
    printed = dict(line.split() for line in ran.out.splitlines())
    assert int(printed["epoch"]) == report["restored_epoch"]
    assert float(printed["val_loss"]) == pytest.approx(min(losses), rel=1e-5)
    assert (
        f"stopped early, since val_loss did not improve for 2 epochs: restored the weights of epoch {printed['epoch']}"
        in ran.err
    )


def test_monitor_and_the_next_command(cli: Cli, folder: Path) -> None:
    words = ["train", "model.onnx", "--data", "train.npz", "--validation", "held_out.npz", "--epochs", "30",
             "--patience", "2", "--lr", "1.5", "-o", "step", "--monitor", "val_accuracy", "--min-delta", "0.5",
             "--checkpoint", "run.ckpt"]  # fmt: skip
    ran = cli(*words)
    assert "val_accuracy did not improve for 2 epochs" in ran.err
    assert "will not be saved" not in ran.err
    follows = ran.err.splitlines()[-1].removeprefix("next: gradgraph ")
    assert follows == "export step --checkpoint run.best.ckpt -o trained.onnx"
    ok(cli, *follows.split())
    assert Path("trained.onnx").exists()
    assert "the trained weights will not be saved" in cli("train", "step", "--data", "train.npz", "--epochs", "1").err


def test_a_run_that_diverges_names_the_node(cli: Cli, folder: Path) -> None:
    ran = cli("train", "model.onnx", "--data", "train.npz", "--lr", "1e30", "--optimizer", "sgd", "--export", "t.onnx")
    assert ran.code == 1
    assert "the first non-finite value: node '" in ran.err
    assert "lower the learning rate (--lr)" in ran.err


@pytest.mark.sweep(0)
def test_trials_write_nothing(cli: Cli, folder: Path) -> None:
    words = ["train", "model.onnx", "--data", "train.npz", "--checkpoint", "run.ckpt", "-o", "step"]
    ran = cli(*words, "--find-lr")
    assert 1e-7 <= float(ran.out) <= 10
    assert "the loss falls fastest at" in ran.err and f"lowest near {ran.out.strip()}" in ran.err
    facts = json.loads(ok(cli, *words, "--find-lr", "--overfit", "--json"))
    assert len(facts["rates"]) == len(facts["losses"])
    assert len(facts["overfit"]) == 200
    assert not Path("run.ckpt").exists()
    assert not Path("step").exists()
    for schedule in ("cosine(1e-3, 100)", "constant(1e-3)", "warmup(3, linear(0.1, 50))"):
        assert float(ok(cli, *words, "--find-lr", "--schedule", schedule)) == float(ran.out)
    words += ["--find-lr", "--accumulate", "2", "--batch-size", "16"]
    added = ok(cli, *words)
    assert ok(cli, *words, "--schedule", "cosine(1e-3)") == added
    assert float(added) == pytest.approx(float(ran.out), rel=0.2)  # two batches of 16 are one of 32


def test_max_time(cli: Cli) -> None:
    words = ["train", "model.onnx", "--data", "train.npz", "--epochs", "1000000", "--json"]
    assert json.loads(ok(cli, *words, "--max-time", "0.2"))["epochs"] < 1_000_000
    assert cli(*words, "--max-time", "0").code == 2


def test_logs(cli: Cli, folder: Path) -> None:
    words = ["train", "model.onnx", "--data", "train.npz", "--epochs", "2", "--log", "m.jsonl"]
    ok(cli, *words, "--log", "m.csv", "--log-every", "1")
    lines = [json.loads(line) for line in Path("m.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("epoch") == 2
    assert len(Path("m.csv").read_text().splitlines()) == len(lines) + 1
    assert "give each its own path" in cli(*words, "--log", "m.jsonl").err


def test_weights_from_a_file(cli: Cli, folder: Path) -> None:
    words = ["train", "model.onnx", "--data", "train.npz", "--epochs", "1"]
    ok(cli, *words, "--checkpoint", "run.ckpt")
    assert "loaded 4 tensors; not used: " in cli(*words, "--weights", "run.ckpt", "--export", "other.onnx").err
    ran = cli(*words, "--weights", "train.npz")
    assert (ran.code, ran.out) == (1, "")
    assert "none of the 2 values matches a weight of this step" in ran.err


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("building the step", ("build", "model.onnx")),
        ("writing the gradient", ("grad", "eval.onnx", "--output", "loss")),
    ],
)
def test_what_takes_long_is_told(said: str, words: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ok(cli, "build", "model.onnx", "-o", "step")
    Path("step/eval.onnx").rename("eval.onnx")
    monkeypatch.setattr(reporter, "SLOW", 0.001)
    assert cli(*words, "-o", "out").err.count(said) == 1
    monkeypatch.setattr(reporter, "SLOW", 600.0)
    assert said not in cli(*words, "-o", "again").err
