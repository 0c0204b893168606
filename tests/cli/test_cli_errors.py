"""Bad input: one sentence on stderr, the right exit code, nothing half-written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph
from gradgraph.cli import app
from gradgraph.errors import GradgraphError, OutputError
from gradgraph.rules import registry
from tests.kit.command_line import Cli, arrays


def damage(folder: Path, case: str) -> None:
    """Write what a case of the table needs: files of these names in the working directory."""
    model = onnx.load(folder / "model.onnx")
    data = arrays(32)
    if case == "truncated.onnx":
        (folder / case).write_bytes(model.SerializeToString()[:-60])
    elif case == "text.onnx":
        (folder / case).write_text("This is a letter, not a model.\n")
    elif case == "empty.onnx":
        (folder / case).write_bytes(b"")
    elif case == "no_rule.onnx":
        model.graph.node[1].CopyFrom(onnx.helper.make_node("Snake", ["h"], ["r"], name="act", domain="acme.ops"))
        model.opset_import.append(onnx.helper.make_opsetid("acme.ops", 1))
        onnx.save(model, folder / case)
    elif case == "attribute.onnx":
        model.graph.node[0].attribute[0].name = "transposeB"
        onnx.save(model, folder / case)
    elif case == "typeless.onnx":
        model.graph.node[0].attribute[0].ClearField("type")
        onnx.save(model, folder / case)
    elif case == "utf8.onnx":
        (folder / case).write_bytes(model.SerializeToString().replace(b"mlp", b"\xffmp"))
    elif case == "wide.npz":
        np.savez(folder / case, x=np.zeros((32, 5), np.float32), target=data["target"])
    elif case == "labels.npz":
        np.savez(folder / case, x=data["x"], target=data["target"] * 3)
    elif case == "names.npz":
        np.savez(folder / case, image=data["x"], target=data["target"])
    elif case == "uneven.npz":
        np.savez(folder / case, x=data["x"], target=data["target"][:5])
    elif case == "pickled.npz":
        np.savez(folder / case, x=data["x"], target=np.array([{}] * 32, dtype=object))
    elif case == "text.npz":
        (folder / case).write_text("x,target\n")
    elif case == "file":
        (folder / case).write_text("in the way")
    elif case == "damaged.ckpt":
        (folder / case).write_bytes(b"\x10" * 100)
    elif case == "nan.npz":
        np.savez(folder / case, x=data["x"] * np.float32(np.nan), target=data["target"])
    elif case == "words.npz":
        np.savez(folder / case, x=data["x"].astype(str), target=data["target"])
    elif case == "split.onnx":
        model.graph.node.append(onnx.helper.make_node("SplitToSequence", ["logits"], ["parts"]))
        model.graph.output[0].CopyFrom(onnx.helper.make_tensor_sequence_value_info("parts", 1, None))
        onnx.save(model, folder / case)
    elif case == "step":
        gradgraph.build(model).save(folder / case)


TRAIN = ["train", "model.onnx", "--data", "train.npz"]
# what to prepare, the command, the exit code, what the sentence says
BAD = [
    ("truncated.onnx", ["build", "truncated.onnx"], 1, "truncated"),
    ("text.onnx", ["build", "text.onnx"], 1, "not an ONNX model"),
    ("empty.onnx", ["inspect", "empty.onnx"], 1, "is empty"),
    ("", ["build", "missing.onnx"], 1, "there is no file 'missing.onnx'"),
    ("", ["check", "."], 1, "is a folder"),
    ("", ["build", "model.onnx", "--loss", "cross_entropie"], 1, "did you mean 'cross_entropy'?"),
    ("", ["build", "model.onnx", "--optimizer", "addam"], 1, "did you mean 'adam'?"),
    ("", ["build", "model.onnx", "--optimizer-option", "beta=1"], 1, "no argument 'beta'"),
    ("", ["build", "model.onnx", "--optimizer-option", "eps=tiny"], 1, "eps is 'tiny'; it should be a number"),
    (
        "",
        ["build", "model.onnx", "--optimizer", "sgd", "--optimizer-option", "nesterov=no"],
        1,
        "nesterov is 'no'; it should be True or False",
    ),
    ("", ["build", "model.onnx", "--optimizer-option", "betas=[0.9,x]"], 1, "it should be two numbers, such as"),
    ("", ["build", "model.onnx", "--loss", "none", "--loss-option", "axis=1"], 1, "--loss-option does not apply"),
    ("", ["build", "model.onnx", "--loss", "none"], 1, "computes itself must be a scalar output"),
    ("", ["build", "model.onnx", "--lr", "-1"], 1, "must not be negative"),
    ("", ["build", "model.onnx", "--train", "convolution.*"], 1, "matches no weight"),
    ("", ["build", "model.onnx", "--freeze", "backbone.*"], 1, "matches no weight"),
    ("", ["build", "model.onnx", "--freeze", "*"], 1, "no parameters to train"),
    ("", ["build", "model.onnx", "--output", "logit"], 1, "did you mean 'logits'?"),
    ("no_rule.onnx", ["build", "no_rule.onnx"], 1, "no gradient rule for acme.ops.Snake (node 'act')"),
    ("attribute.onnx", ["build", "attribute.onnx"], 1, "did you mean 'transB'?"),
    ("typeless.onnx", ["build", "typeless.onnx"], 1, "has no type"),
    ("utf8.onnx", ["inspect", "utf8.onnx"], 1, "is not UTF-8"),
    ("no_rule.onnx", ["check", "no_rule.onnx"], 1, "no gradient rule for acme.ops.Snake"),
    ("file", ["build", "model.onnx", "-o", "file"], 1, "is a file"),
    ("file", ["build", "model.onnx", "-o", "file/step"], 1, "cannot write 'file/step'"),
    ("", ["grad", "model.onnx"], 1, "has shape"),
    ("", ["grad", "model.onnx", "--wrt", "y"], 1, "logits"),
    ("", ["grad", "model.onnx", "-o", "model.onnx"], 1, "is an input of this command"),
    ("", ["grad", "model.onnx", "-o", "missing/grad.onnx"], 1, "there is no folder 'missing'"),
    ("", ["check", "model.onnx", "--wrt", "nothing"], 1, "matches 'nothing'"),
    ("", ["check", "model.onnx", "--output", "h"], 1, "no floating-point output 'h'"),
    ("names.npz", ["check", "model.onnx", "--data", "names.npz"], 1, "no array 'x'"),
    ("wide.npz", ["check", "model.onnx", "--data", "wide.npz"], 1, "has shape [4, 5]"),
    ("wide.npz", ["train", "model.onnx", "--data", "wide.npz"], 1, "shape"),
    ("wide.npz", ["train", "model.onnx", "--data", "wide.npz", "-o", "step"], 1, "shape"),
    ("labels.npz", ["train", "model.onnx", "--data", "labels.npz"], 1, "3"),
    ("names.npz", ["train", "model.onnx", "--data", "names.npz"], 1, "no input 'image'"),
    ("uneven.npz", ["train", "model.onnx", "--data", "uneven.npz"], 1, "32 rows but 'target' has 5"),
    ("pickled.npz", ["train", "model.onnx", "--data", "pickled.npz"], 1, "pickled objects"),
    ("text.npz", ["train", "model.onnx", "--data", "text.npz"], 1, "cannot be read"),
    ("", ["train", "model.onnx", "--data", "missing.npz"], 1, "does not exist"),
    ("", ["train", ".", "--data", "train.npz"], 1, "manifest.json"),
    ("", [*TRAIN, "--device", "cuda"], 1, "CUDAExecutionProvider"),
    ("", [*TRAIN, "--checkpoint", "missing/run.ckpt"], 1, "there is no folder 'missing'"),
    ("", [*TRAIN, "--export", "."], 1, "is a folder"),
    ("", [*TRAIN, "--export", "model.onnx"], 1, "is an input of this command"),
    ("", [*TRAIN, "--checkpoint", "run.ckpt", "--resume"], 1, "no checkpoint 'run.ckpt'"),
    ("damaged.ckpt", [*TRAIN, "--checkpoint", "damaged.ckpt"], 1, "add --resume"),
    ("damaged.ckpt", [*TRAIN, "--checkpoint", "damaged.ckpt", "--resume"], 1, "is damaged"),
    ("", ["export", "step"], 1, "'step' is not a step folder"),
    ("", [*TRAIN, "--resume"], 2, "--resume needs --checkpoint"),
    ("", [*TRAIN, "--checkpoint", "a", "--resume", "--force"], 2, "give one of them"),
    ("", [*TRAIN, "--epochs", "0"], 2, "--epochs"),
    ("", ["train", "model.onnx"], 2, "--data"),
    ("", ["train", ".", "--data", "train.npz", "--loss", "mse"], 2, "--loss is a build option"),
    ("step", ["train", "step", "--data", "train.npz", "--export", "step/train.onnx"], 1, "is an input of this command"),
    (
        "step",
        ["train", "step", "--data", "train.npz", "--history", "step/manifest.json"],
        1,
        "is an input of this command",
    ),
    ("step", ["export", "step", "-o", "step/init.onnx"], 1, "is an input of this command"),
    ("", [*TRAIN, "--checkpoint", "a", "--export", "./a"], 1, "--checkpoint and --export are both 'a'"),
    ("step", ["train", "step", "--data", "train.npz", "--lr", "nan"], 1, "'learning_rate' is nan"),
    ("", ["build", "model.onnx", "--lr", "1e400"], 1, "must be finite"),
    ("", ["build", "model.onnx", "--loss-option", "axis=1.5"], 1, "axis is 1.5; it should be a whole number"),
    ("", ["build", "model.onnx", "--loss", "huber", "--loss-option", "delta=0"], 1, "above zero, but is 0"),
    ("", ["build", "model.onnx", "--target-name", ""], 1, "requires a name"),
    ("split.onnx", ["build", "split.onnx"], 1, "no floating-point output"),
    ("split.onnx", ["check", "split.onnx"], 1, "no floating-point output"),
    ("split.onnx", ["grad", "split.onnx"], 1, "'parts' is a sequence"),
    ("nan.npz", ["check", "model.onnx", "--data", "nan.npz"], 1, "check them for NaN"),
    (
        "words.npz",
        ["check", "model.onnx", "--data", "words.npz"],
        1,
        "'x' has dtype <U32, but the model expects float32",
    ),
    ("", [*TRAIN, "--seed", "9223372036854775808"], 2, "--seed"),
    ("", ["check", "model.onnx", "--seed", "-1"], 2, "--seed"),
    ("", ["build"], 2, "MODEL"),
    ("", ["build", "model.onnx", "--optimizer-option", "momentum"], 2, "should be KEY=VALUE"),
    ("", ["build", "model.onnx", "--backend", "fpga"], 2, "fpga"),
    ("", ["buidl", "model.onnx"], 2, "did you mean 'build'?"),
    ("", ["build", "model.onnx", "--learning-rate", "1"], 2, "--learning-rate"),
]


def test_a_table_without_pandas_names_the_extra(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, library, None)
    (folder / "x.csv").write_text("a,b\n1,2\n")
    ran = cli("train", "--model", "mlp", "--data", "x.csv", "--target", "b")
    assert ran.code == 1
    assert 'pip install ".[tables]"' in ran.err
    assert "genfromtxt" not in ran.err


@pytest.mark.sweep(0.31)
@pytest.mark.parametrize(("prepare", "words", "code", "says"), BAD, ids=[" ".join(b[1]) for b in BAD])
def test_bad_input(cli: Cli, folder: Path, prepare: str, words: list[str], code: int, says: str) -> None:
    damage(folder, prepare)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    ran = cli(*words, "--json")
    assert ran.code == code, ran.err
    (sentence,) = ran.err.splitlines()[-1:]
    assert sentence.startswith("error: ")
    told = json.loads(ran.out)
    assert list(told) == ["error", "kind", "remedy", "findings"]
    assert f"error: {told['error']}" == sentence
    assert told["remedy"] is None or sentence.endswith(told["remedy"])
    assert (told["kind"] == "UsageError") == (code == 2)
    assert says in sentence
    assert "bug" not in sentence
    assert "Traceback" not in ran.err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "words", [["build", "model.onnx"], ["export", "step0"], ["grad", "sum.onnx"], [*TRAIN, "--export", "new.onnx"]]
)
def test_full_disk(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    assert cli("build", "model.onnx", "-o", "step0").code == 0
    model = onnx.load(folder / "model.onnx")
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["logits"], ["sum"], keepdims=0))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, []))
    onnx.save(model, folder / "sum.onnx")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    monkeypatch.setattr(os, "fsync", full)
    ran = cli(*words)
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith("error: cannot write")
    assert "No space left" in ran.err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe is what root may not replace either")
@pytest.mark.parametrize("option", ["--checkpoint", "--export", "--history"])
def test_what_cannot_be_written_is_said_before_training(cli: Cli, folder: Path, option: str) -> None:
    os.mkfifo(folder / "pipe")
    ran = cli(*TRAIN, option, "pipe", "--force")
    assert ran.code == 1
    _, sentence = ran.err.splitlines()  # after the first line, and no word of training
    assert sentence.startswith("error: ") and "pipe' is not a regular file" in sentence


def test_a_rule_that_gives_nothing_freezes_nothing_silently(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> list[None]:
        return [None]

    relu = dataclasses.replace(registry.RULES["", "Relu"], emit=nothing)
    monkeypatch.setitem(registry.RULES, ("", "Relu"), relu)
    ran = cli("build", "model.onnx")
    assert ran.code == 1
    assert "no gradient reaches 'first.weight'" in ran.err
    assert cli("build", "model.onnx", "--freeze", "first.*").code == 0


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "says", "kind"),
    [
        (GradgraphError("one\n sentence"), 1, "error: one sentence", "GradgraphError"),
        (
            OutputError("full", remedy="pass force=True", shell="add --force"),
            1,
            "error: full; add --force",
            "OutputError",
        ),
        (ZeroDivisionError("oops"), 1, "this is a bug in gradgraph: ZeroDivisionError in ops.py", "InternalError"),
        (MemoryError(), 1, "memory", "MemoryError"),
        (PermissionError(errno.EACCES, "Permission denied", "x.npz"), 1, "Permission denied ('x.npz')", "OSError"),
        (KeyboardInterrupt(), 130, "interrupted", "Interrupted"),
    ],
)
def test_the_boundary(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, says: str, kind: str
) -> None:
    monkeypatch.setattr("gradgraph.verify.operator_status.operators", raising(error))
    ran = cli("ops")
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert "Traceback" not in ran.err
    ran = cli("ops", "--json")
    assert (ran.code, json.loads(ran.out)["kind"]) == (code, kind)
    assert json.loads(ran.out)["error"] in ran.err


def test_sigterm_is_told_in_json_and_ends_as_it_did(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradgraph.verify.operator_status.operators", raising(SystemExit(143)))
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as stop:
        app.run(["ops", "--json"])
    assert stop.value.code == 143
    assert json.loads(out.getvalue())["kind"] == "Interrupted"


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_tells_a_failure_in_json(cli: Cli, name: str) -> None:
    """An option that there is not fails in every command (`demo` has no --json, and says so in JSON)."""
    ran = cli(name, "--json", "--no-such-option")
    assert (ran.code, json.loads(ran.out)["kind"]) == (2, "UsageError")
    assert "o such option" in json.loads(ran.out)["error"]


def test_debug_shows_the_traceback(cli: Cli) -> None:
    ran = cli("build", "missing.onnx", "--debug")
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: there is no file")
    assert "Traceback" not in cli("build", "missing.onnx").err


@pytest.mark.sweep(0)
def test_a_closed_pipe_is_quiet() -> None:
    """The reader has gone before the first line: no traceback, neither from the command nor at exit."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "gradgraph.cli", "ops"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode == app.FAILED


@pytest.mark.sweep(0)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault_and_no_file_takes_their_place(folder: Path, closed: str) -> None:
    words = "--epochs 1 --export t.onnx"
    command = f"exec {sys.executable} -m gradgraph.cli train model.onnx --data train.npz {words} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "bug" in done.stderr) == (0, False)
    onnx.checker.check_model(onnx.load("t.onnx"))


def test_a_link_to_nowhere_is_named_by_where_it_leads(cli: Cli, folder: Path) -> None:
    (folder / "link").symlink_to(folder / "gone" / "run.ckpt")
    said = cli("train", "model.onnx", "--data", "train.npz", "--checkpoint", "link").err
    assert f"there is no folder '{folder.resolve() / 'gone'}' to write 'run.ckpt' to" in said


STEERING = "w\u202e\x9b\x1b[2J\u2066\U000e0041"


@pytest.mark.parametrize(
    "words",
    [["inspect", "odd.onnx"], ["build", "odd.onnx"], ["build", "odd.onnx", "--train", f"{STEERING}?"],
     ["check", "odd.onnx", "--wrt", STEERING], ["grad", "odd.onnx"], ["grad", "odd.onnx", "--output", STEERING],
     ["train", "odd.onnx", "--data", "train.npz", "--epochs", "1", "--export", f"{STEERING[:2]}.onnx",
      "--history", "h"],
     ["export", STEERING], ["inspect", STEERING], ["tune", STEERING], [STEERING],
     ["build", "odd.onnx", "--x", STEERING]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_names_steer_no_terminal(cli: Cli, folder: Path, words: list[str], as_json: bool) -> None:
    """Whatever is printed or written as text: control and bidirectional characters are escaped."""
    model = onnx.load(folder / "model.onnx")
    old = model.graph.initializer[0].name
    model.graph.initializer[0].name = STEERING
    for node in model.graph.node:
        node.input[:] = [STEERING if n == old else n for n in node.input]
    onnx.save(model, folder / "odd.onnx")
    ran = cli(*words, *(["--json"] if as_json else []))
    written = [p.read_text("utf-8") for p in folder.rglob("*") if p.name in ("manifest.json", "h")]
    for text in (ran.out, ran.err, *written):
        assert all(line.isprintable() for line in text.split("\n"))
    if as_json:
        assert json.loads(ran.out)
