"""The step folder: what is written comes back, and a damaged or forged one is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.errors import GradgraphError, ModelError, OutputError
from gradgraph.frontend import nn
from gradgraph.step.origins import Origins, write_origins
from gradgraph.step.step import WRITTEN_KEY, Manifest, StateSpec, Step

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
TRAIN = """train (float[N, 2] x, float[N] t, float learning_rate, float[2] w) => (float loss, float[2] next) {
    f = MatMul (x, w)
    d = Sub (f, t)
    s = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (s)
    xt = Transpose (x)
    g = MatMul (xt, d)
    move = Mul (learning_rate, g)
    next = Sub (w, move)
}"""
EVAL = """eval (float[N, 2] x, float[N] t, float[2] w) => (float loss, float[N] f) {
    f = MatMul (x, w)
    d = Sub (f, t)
    s = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (s)
}"""
INIT = """init () => (float[2] w) <float[2] w0 = {1, 2}> { w = Identity (w0) }"""


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEADER + text)


def manifest(**changes: object) -> Manifest:
    base = Manifest(
        inputs=(TensorSpec("x", "float32", ("N", 2)),),
        targets=(TargetSpec("t", "float32", ("N",)),),
        outputs=("f",),
        loss={"name": "mse", "arguments": {}},
        optimizer={"name": "sgd", "arguments": {"lr": np.float32(0.5), "betas": (0.9, float("inf"))}},
        hyperparameters={"learning_rate": 0.5},
        state=(StateSpec("w", "float32", (2,), "next", "parameter"),),
        trainable=("w",),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def tiny(large: int = 0) -> Step:
    """A linear regression; with ``large``, train.onnx and eval.onnx hold a frozen tensor of so many floats."""
    train, init, eval_ = map(parse, (TRAIN, INIT, EVAL))
    if large:
        for model in (train, eval_):
            weight = np.arange(large, dtype=np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "frozen"))
            model.graph.node.add(op_type="Identity", input=["frozen"], output=["unused"])
    return Step(train, init, eval_, manifest(frozen=("frozen",) if large else ()))


def test_manifest_survives_json() -> None:
    m = manifest(metrics=("accuracy",))
    assert Manifest.from_json(m.to_json()) == m
    json.loads(m.to_json(), parse_constant=lambda s: pytest.fail(f"{s} is not JSON"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(version=3, gradgraph="9.9"), "version 3, written by gradgraph 9.9"),
        (lambda d: d.update(version=2), "has version 2, written by"),
        (lambda d: d.pop("version"), "has no version"),
        (lambda d: d.update(libraries=["evil.so"]), "unknown field 'libraries'"),
        (lambda d: d.pop("state"), "damaged"),
        (lambda d: d.update(state={}), "'state' should be a list"),
        (lambda d: d["inputs"][0].update(dtype="float33"), "float33"),
        (lambda d: d["inputs"][0].update(shape=[1.5]), "ill-typed"),
        (lambda d: d["inputs"][0].update(shape=3), "damaged"),
        (lambda d: d["state"][0].update(kind="secret"), "unknown kind 'secret'"),
        (lambda d: d["state"][0].update(shape=["N"]), "no fixed shape"),
        (lambda d: d["targets"][0].update(name="x"), "has the name 'x' twice"),
        (lambda d: d.update(trainable=["v"]), "'v' trainable"),
        (lambda d: d["state"][0].update(name="\x1b[31m", kind="\u202e"), r"the unknown kind '\u202e' for '\x1b[31m'"),
        (
            lambda d: d["state"][0].update(name="\x1b[31m", shape=["N"]),
            r"no fixed shape for the state tensor '\x1b[31m'",
        ),
        (lambda d: d.update(metrics=["\u202e", "\u202e"]), r"the name '\u202e' twice"),
        (lambda d: d.update(loss="mse"), "'loss' should be a dict"),
    ],
)
def test_manifest_refuses(change, says: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(manifest().to_json())
    change(data)
    with pytest.raises(ModelError, match=re.escape(says)):
        Manifest.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null"])
def test_manifest_refuses_text(text: str) -> None:
    with pytest.raises(ModelError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"inputs": (TensorSpec("y", "float32", ("N", 2)),)}, "train.onnx has no input 'y'"),
        ({"inputs": (TensorSpec("x", "float64", ("N", 2)),)}, "the input 'x' of train.onnx is float32"),
        ({"inputs": (TensorSpec("x", "float32", ("N", 3)),)}, "a different shape"),
        ({"hyperparameters": {}}, "train.onnx has the input 'learning_rate', which the manifest does not list"),
        ({"metrics": ("accuracy",)}, "train.onnx has no output 'accuracy'"),
        ({"outputs": ("logits",)}, "eval.onnx has no output 'logits'"),
        ({"state": (StateSpec("w", "float32", (2,), "after", "parameter"),)}, "train.onnx has no output 'after'"),
    ],
)
def test_manifest_is_held_against_the_graphs(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=re.escape(says)):
        dataclasses.replace(tiny(), manifest=manifest(**changes))


def test_folder_round_trip(tmp_path: Path) -> None:
    step = tiny()
    step.save(tmp_path / "s")
    names = sorted(p.name for p in (tmp_path / "s").iterdir())
    assert names == ["eval.onnx", "init.onnx", "manifest.json", "train.onnx"]
    loaded = Step.load(tmp_path / "s")
    assert loaded.manifest == step.manifest
    told = onnx.ModelProto()
    told.CopyFrom(step.train)
    write_origins(told, Origins.of_step(step.manifest, step.eval, step.train))
    assert loaded.train.graph == told.graph
    with pytest.raises(OutputError, match="not empty"):
        step.save(tmp_path / "s")
    loaded.save(tmp_path / "s", force=True)
    assert Step.load(tmp_path / "s").eval.graph == step.eval.graph


def test_large_frozen_weights_are_stored_once(tmp_path: Path) -> None:
    step = tiny(large=300_000)
    step.save(tmp_path / "s")
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "s").iterdir()}
    assert sizes.pop("frozen.bin") == 1_200_000
    assert sum(sizes.values()) < 20_000
    onnx.checker.check_model(str(tmp_path / "s" / "train.onnx"), full_check=True)
    loaded = Step.load(tmp_path / "s")
    weight = next(t for t in loaded.resolved("eval").graph.initializer if t.name == "frozen")
    assert np.array_equal(onnx.numpy_helper.to_array(weight), np.arange(300_000, dtype=np.float32))
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / "frozen.bin").read_bytes() == (tmp_path / "s" / "frozen.bin").read_bytes()
    assert "300,000 in 1 tensor" in loaded.summary()
    tiny().save(tmp_path / "s", force=True)
    assert not (tmp_path / "s" / "frozen.bin").exists()


def edit_model(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())


def external(model: onnx.ModelProto, **entries: object) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == "frozen")
    for entry in tensor.external_data:
        entry.value = str(entries.get(entry.key, entry.value))


DAMAGE = {
    "missing": (lambda p: (p / "init.onnx").unlink(), "cannot read"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "cannot read"),
    "text": (lambda p: (p / "eval.onnx").write_text("hello, I am no model"), "damaged"),
    "truncated": (lambda p: os.truncate(p / "train.onnx", 300), "damaged"),
    "empty": (lambda p: os.truncate(p / "train.onnx", 0), "does not match"),
    "fifo": (lambda p: ((p / "init.onnx").unlink(), os.mkfifo(p / "init.onnx")), "not a regular file"),
    "other build": (
        lambda p: edit_model(p / "eval.onnx", lambda m: m.metadata_props.pop()),
        "does not match manifest.json",
    ),
    "external gone": (lambda p: (p / "frozen.bin").unlink(), "are missing"),
    "external hard link": (lambda p: (p / "copy.bin").hardlink_to(p / "frozen.bin"), "a hard link to a file elsewhere"),
    "external short": (lambda p: os.truncate(p / "frozen.bin", 1000), "but the file has 1,000 bytes"),
    "external link": (
        lambda p: ((p / "frozen.bin").unlink(), (p / "frozen.bin").symlink_to("/dev/zero")),
        "a symlink out of",
    ),
    "external elsewhere": (
        lambda p: edit_model(p / "eval.onnx", lambda m: external(m, location="../secret")),
        "are in '../secret'",
    ),
    "negative offset": (lambda p: edit_model(p / "eval.onnx", lambda m: external(m, offset=-8)), "from byte -8"),
    "huge length": (lambda p: edit_model(p / "eval.onnx", lambda m: external(m, length=2**50)), "need 1,200,000"),
    "int4": (
        lambda p: edit_model(p / "eval.onnx", lambda m: setattr(m.graph.initializer[0], "data_type", 22)),
        "need 150,000",
    ),
    "attribute outside": (
        lambda p: edit_model(
            p / "eval.onnx",
            lambda m: m.graph.node.add(op_type="Constant").attribute.append(
                onnx.helper.make_attribute("value", m.graph.initializer[0])
            ),
        ),
        "external tensors that are not initializers",
    ),
    "odd length": (lambda p: edit_model(p / "eval.onnx", lambda m: external(m, length="many")), "that is not a number"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder_is_refused(damage: str, tmp_path: Path) -> None:
    tiny(large=300_000).save(tmp_path / "s")
    how, says = DAMAGE[damage]
    how(tmp_path / "s")
    with pytest.raises(GradgraphError, match=re.escape(says)):
        Step.load(tmp_path / "s")


def dangling(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nowhere"


@pytest.mark.parametrize("name", ["train", "eval"])
def test_a_malformed_graph_is_refused_when_it_is_opened(name: str, tmp_path: Path) -> None:
    """``Step.load`` builds no graph of the models, which opening builds anyway."""
    tiny(large=300_000).save(tmp_path / "s")
    edit_model(tmp_path / "s" / f"{name}.onnx", dangling)
    without_digests(tmp_path / "s")
    step = Step.load(tmp_path / "s")
    model = getattr(step, name)
    for opened in (step.opened, lambda model: for_machine(model, ORT_CPU)):
        with pytest.raises(ModelError, match="reads 'nowhere'"):
            opened(model)


def test_a_malformed_initial_graph_is_refused(tmp_path: Path) -> None:
    tiny().save(tmp_path / "s")
    edit_model(tmp_path / "s" / "init.onnx", dangling)
    without_digests(tmp_path / "s")
    with pytest.raises(ModelError, match="reads 'nowhere'"):
        Step.load(tmp_path / "s")


def without_digests(folder: Path) -> None:
    """Remove the digests from a manifest, as for a file edited by hand."""
    document = json.loads((folder / "manifest.json").read_text())
    del document["digests"]
    (folder / "manifest.json").write_text(json.dumps(document))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a step folder"):
        Step.load(tmp_path / "nothing")


def test_summary_names_everything() -> None:
    text = tiny().summary()
    for part in ("2 in 1 tensor", "x float32[N, 2]", "t float32[N]", "mse()", "sgd(lr=0.5", "learning_rate=0.5"):
        assert part in text


def test_summary_counts_nodes_and_operators() -> None:
    step = tiny()
    count = len(step.train.graph.node)
    assert f"train {count}, " in step.summary()
    assert "before clean-up" not in step.summary()  # nobody said how many there were
    for written, said in ((str(count + 1_000), True), (str(count), False), ("9" * 5_000, False), ("many", False)):
        onnx.helper.set_model_props(step.train, {WRITTEN_KEY: written})
        assert (f"(train {count + 1_000:,} before clean-up)" in step.summary()) == said
        assert (step.nodes.get("train_written") == count + 1_000) == said
    kinds = Counter(n.op_type for n in step.train.graph.node)
    kind, times = kinds.most_common()[0]
    assert f"{kind} {times}" in step.summary()


def test_a_step_prints_as_one_line() -> None:
    model = gg.frontend.export(nn.Linear(4, 3), {"x": ("batch", 4)})
    step = gg.build(model, loss="cross_entropy", optimizer=gg.optim.adam(1e-3))
    assert re.fullmatch(
        r"Step\(trains 2 tensors, 0 frozen; loss cross_entropy, optimizer adam; \d+ nodes\)", repr(step)
    )


@pytest.mark.parametrize("how", ["output", "losses"])
def test_an_inner_value_that_a_loss_reads_is_no_output_of_what_is_exported(how: str) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4] x) => (float[n, 3] p)
              { logits = MatMul(x, w) p = Softmax(logits) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    losses = {"logits": "cross_entropy", "p": ("mse", 0.1)}
    step = gg.build(model, "cross_entropy", output="logits") if how == "output" else gg.build(model, losses)
    assert step.manifest.outputs == ("p",)
    assert [v.name for v in gg.Trainer(step, device="cpu").export().graph.output] == ["p"]
