"""gradgraph surgery: each change from the shell, and what it refuses."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
from onnx import numpy_helper

from gradgraph import surgery
from gradgraph.cli.surgery_options import CHANGES
from gradgraph.surgery.adapter_kinds import adapter_table
from tests.kit.command_line import Cli
from tests.kit.npz import npz
from tests.surgery.test_pretrained_weights import Exporter, run, tensors
from tests.surgery.test_pretrained_weights import folder as written_as_pretrained


def weights(path: str) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def test_a_new_head_is_trained_from_the_shell(cli: Cli) -> None:
    ran = cli("surgery", "model.onnx", "--new-head", "3", "-o", "mine.onnx")
    assert ran.code == 0
    assert "train it with --train 'head.*'" in ran.out
    assert {"head.weight", "head.bias"} < set(weights("mine.onnx"))
    training = ("--train", "head.*", "--epochs", "1", "--export", "trained.onnx")
    assert cli("train", "mine.onnx", "--data", "train.npz", *training).code == 0
    before, after = weights("mine.onnx"), weights("trained.onnx")
    assert {n for n in before if (before[n] != after[n]).any()} == {"head.weight", "head.bias"}


def test_several_changes_at_once(cli: Cli) -> None:
    first = {n: np.ones(w.shape, np.float32) for n, w in weights("model.onnx").items() if n.startswith("first")}
    safetensors.numpy.save_file(first, "first.safetensors")
    words = ("--load", "first.safetensors", "--partly", "--reset", "last.*", "--seed", "3", "--output", "r")
    ran = cli("surgery", "model.onnx", *words[:-2], "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert told["file"] == "edited.onnx" and told["weights"] == 4 and told["outputs"] == ["logits"]
    found, before = weights("edited.onnx"), weights("model.onnx")
    assert all((found[n] == first.get(n, found[n])).all() for n in found)
    assert (found["last.weight"] != before["last.weight"]).all()
    assert cli("surgery", "model.onnx", *words[:3], *words[-2:], "-o", "cut.onnx").code == 0
    assert set(weights("cut.onnx")) == set(first)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "no change was requested"),
        (("--partly",), 2, "--partly requires --load"),
        (("--head-name", "top"), 2, "--head-name requires --new-head"),
        (("--rank", "4"), 2, "--rank requires --lora"),
        (("--name-weights", "--seed", "4"), 2, "--seed requires --new-head or --reset or --lora"),
        (("--open", "x=batch"), 2, "should be such as x:0=batch"),
        (("--tie", "first.weight"), 2, "two names joined by ="),
        (("--resize-embedding", "first.weight=many"), 2, "rows are a whole number"),
        (("--new-head", "0"), 2, "0 is not in the range"),
        (("--new-head", "3", "--head-output", "loss"), 1, "no value 'loss'"),
        (("--untie", "first.*"), 1, "so there is nothing to untie"),
        (("--untie-merged",), 1, "so there is nothing to untie"),
        (("--output", "nothing"), 1, "no value 'nothing'"),
        (("--load", "none.npz"), 1, "cannot read the weights in 'none.npz'"),
        (("--resize-embedding", "first.weight=9"), 1, "no Gather reads rows"),
    ],
)
def test_what_is_refused(cli: Cli, words: tuple[str, ...], code: int, says: str) -> None:
    ran = cli("surgery", "model.onnx", *words)
    assert (ran.code, says in ran.err) == (code, True), ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_adapters_are_put_in_trained_and_merged(cli: Cli) -> None:
    assert cli("surgery", "model.onnx", "--lora", "*", "--rank", "2", "-o", "lora.onnx").code == 0
    assert cli("train", "lora.onnx", "--data", "train.npz", "--epochs", "1", "--export", "trained.onnx").code == 0
    ran = cli("surgery", "lora.onnx", "--merge", "--trained", "trained.onnx", "-o", "merged.onnx")
    assert ran.code == 0 and "merged the adapters" in ran.out
    before, after = weights("model.onnx"), weights("merged.onnx")
    assert set(before) == set(after)
    assert {n for n in before if (before[n] != after[n]).any()} == {"first.weight", "last.weight"}
    x = npz("train.npz")["x"]
    (merged, trained) = (
        ort.InferenceSession(f, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for f in ("merged.onnx", "trained.onnx")
    )
    np.testing.assert_allclose(merged, trained, rtol=1e-4, atol=1e-5)
    assert (
        "--trained requires --save-adapter or --merge" in cli("surgery", "lora.onnx", "--trained", "trained.onnx").err
    )
    assert "--requantise requires --merge" in cli("surgery", "lora.onnx", "--requantise").err


@pytest.mark.sweep(0)
def test_a_quantised_model_goes_on(cli: Cli) -> None:
    with np.load("train.npz") as data:
        np.savez("sample.npz", x=data["x"])
    assert cli("surgery", "model.onnx", "--qat", "sample.npz", "--activations", "int8", "-o", "rounded.onnx").code == 0
    training = ("--data", "train.npz", "--epochs", "1")
    assert cli("train", "rounded.onnx", *training, "--export", "int8.onnx").code == 0
    words = ("--new-head", "3", "--qat-quantised", "--ranges", "learned")
    assert cli("surgery", "int8.onnx", *words, "-o", "again.onnx").code == 0
    assert {"first.weight", "first.weight_range", "head.weight"} < set(weights("again.onnx"))
    assert cli("train", "again.onnx", *training, "--export", "mine.onnx").code == 0
    assert weights("mine.onnx")["first.weight_quantized"].dtype == np.int8
    ran = cli("surgery", "int8.onnx", "--ranges", "learned")
    assert ran.code == 2 and "--qat-quantised" in ran.err


def test_the_kinds_are_those_of_the_table(cli: Cli) -> None:
    listed = f"One of {', '.join(adapter_table.KINDS)}."
    assert listed in " ".join(cli("surgery", "--help").out.split())


# arguments of functions that the shell has no option for
PYTHON_ONLY = {
    "distill": {"match_weight", "output", "teacher_output"},
    "language_model": {"keep", "outputs", "packed"},  # rows of several texts: finetune --pack
    "load_weights": {"names"},
    "use_adapters": {"train"},
}


@pytest.mark.parametrize("function", sorted({change.function for change in CHANGES}))
def test_options_are_the_arguments_of_functions(function: str) -> None:
    _, *arguments = inspect.signature(getattr(surgery, function)).parameters.values()
    known = {p.name: p for p in arguments if p.name != "out" and p.name not in PYTHON_ONLY.get(function, ())}
    offered: set[str] = set()
    for change in (change for change in CHANGES if change.function == function):
        offered |= {a.strip() for name in change.options if change.each for a in name.strip("()").split(",")}
        offered |= {name for name in change.options if not name.startswith("(")} | {change.reports} - {""}
        for name, option in change.options.items():
            if "default" in option.settings and name != "seed":
                assert option.settings["default"] == known[name].default, name
    assert offered == set(known)


def test_adapters_have_kinds_and_names_and_files(cli: Cli) -> None:
    assert cli("surgery", "model.onnx", "--lora", "first", "--kind", "dora", "--name", "fr", "-o", "fr.onnx").code == 0
    assert cli("surgery", "fr.onnx", "--lora", "last", "--name", "de", "-o", "two.onnx").code == 0
    ran = cli(
        "surgery", "two.onnx", "--name", "de", "--save-adapter", "de.onnx_adapter", "--switchable", "-o", "s.onnx"
    )
    assert ran.code == 0, ran.err
    adapter = ort.LoraAdapter()
    adapter.Load("de.onnx_adapter")
    assert "last.lora_A" in [v.name for v in onnx.load("s.onnx").graph.input]
    ran = cli("surgery", "two.onnx", "--save-adapter", "fr", "--name", "fr")
    assert ran.code == 0 and Path("fr").is_dir() and "wrote" not in ran.err and not Path("edited.onnx").exists()
    assert cli("surgery", "two.onnx", "--save-adapter", "fr", "--name", "fr", "-o", "x.onnx").code == 0
    assert Path("x.onnx").exists()
    assert cli("surgery", "model.onnx", "--adapter", "fr", "--name", "again", "-o", "x.onnx").code == 0
    assert cli("surgery", "two.onnx", "--merge", "--name", "de", "--requantise", "-o", "x.onnx").code == 0
    assert cli("surgery", "two.onnx", "--use", "fr=1", "--use", "de=0.5", "-o", "x.onnx").code == 0
    assert "--use 'de' should be such as fr=0.5" in cli("surgery", "two.onnx", "--use", "de").err
    assert "'es'" in cli("surgery", "two.onnx", "--use", "es=1").err


def test_a_teacher_is_put_beside_a_student(cli: Cli) -> None:
    words = ("--teacher", "model.onnx", "--temperature", "4", "--teacher-share", "0.9", "--match", "r=r")
    assert cli("surgery", "model.onnx", *words, "-o", "pupil.onnx").code == 0
    assert "teacher.first.weight" in weights("pupil.onnx")
    ran = cli("train", "pupil.onnx", "--data", "train.npz", "--epochs", "1", "--export", "alone.onnx", "--json")
    assert ran.code == 0 and "distillation_loss" in ran.out
    assert set(weights("alone.onnx")) == set(weights("model.onnx"))
    ran = cli("surgery", "model.onnx", "--match", "r=r")
    assert ran.code == 2 and "--teacher" in ran.err


def test_a_language_model_is_trained_and_merged(cli: Cli) -> None:
    shutil.copy(Path(__file__).parents[2] / "examples" / "tiny_llama_int4.onnx", "llm.onnx")
    np.savez("text.npz", **surgery.next_tokens([[1, 30, 40, 2]]))
    assert cli("surgery", "llm.onnx", "--lora", "*attn*", "--rank", "2", "-o", "lora.onnx").code == 0
    assert cli("surgery", "lora.onnx", "--language-model", "-o", "lm.onnx").code == 0
    training = ("--data", "text.npz", "--loss-option", "axis=-1", "--epochs", "1", "--batch-size", "1")
    assert cli("train", "lm.onnx", *training, "--export", "trained.onnx").code == 0
    ran = cli("surgery", "lora.onnx", "--merge", "--requantise", "--trained", "trained.onnx", "-o", "merged.onnx")
    assert ran.code == 0 and ran.err.count(": requantised, relative error ") == 4
    before, after = weights("llm.onnx"), weights("merged.onnx")
    assert {n: a.dtype for n, a in before.items()} == {n: a.dtype for n, a in after.items()}
    changed = {n for n, a in before.items() if (a != after[n]).any()}
    assert changed and all(".attn." in n for n in changed)


def test_weights_of_another_training_go_into_a_folder(cli: Cli) -> None:
    """The folder of a language model in, its files and the new model out; nothing if the weights do not fit."""
    Path("llm").mkdir()
    onnx.save(Exporter(tensors(0), "int4", False).model(), "llm/model.onnx")
    Path("llm/genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": "model.onnx"}}}))
    Path("llm/tokenizer.json").write_text("{}")
    written_as_pretrained(Path("hf"), tensors(1))
    ran = cli("surgery", "llm", "--load", "hf", "-o", "new")
    assert ran.code == 0
    assert "took 27 of 27 tensors for 19 of 19 weights" in ran.err + ran.out
    assert "model.layers.0.attn.qkv_proj: requantised, relative error " in ran.err + ran.out
    assert sorted(path.name for path in Path("new").iterdir()) == ["genai_config.json", "model.onnx", "tokenizer.json"]
    expected = onnx.ModelProto.FromString(Path("llm/model.onnx").read_bytes())
    np.testing.assert_array_equal(run(onnx.load("new/model.onnx")), run(surgery.load_weights(expected, "hf")))
    again = cli("surgery", "llm", "--load", "hf", "-o", "new")
    assert (again.code, "is not an empty folder" in again.err) == (1, True)
    written_as_pretrained(Path("part"), {"model.norm.weight": tensors(1)["model.norm.weight"]})
    failed = cli("surgery", "llm", "--load", "part", "-o", "other")
    assert (failed.code, "18 weights of the model have no tensor" in failed.err) == (1, True)
    assert "--partly" in failed.err and not Path("other").exists()
