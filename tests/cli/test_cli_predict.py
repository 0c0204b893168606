"""gradgraph predict: outputs of a model or a step for arrays from disk, batch by batch."""

from __future__ import annotations

import csv
import io
import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.data.sources.in_order import InOrder
from gradgraph.errors import DataError
from tests.kit.command_line import MLP, Cli, arrays, mlp
from tests.kit.npz import npz


def expected(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return np.asarray(gg.Trainer(gg.build(model)).predict(x))


def ok(cli: Cli, *words: str) -> str:
    ran = cli("predict", *words)
    assert ran.code == 0, ran.err
    return ran.err


@pytest.mark.parametrize("size", [1, 5, 32, 100])
def test_a_model(cli: Cli, size: int) -> None:
    told = ok(cli, "model.onnx", "--data", "held_out.npz", "--batch-size", str(size))
    assert "ignored: 'target'" in told and "wrote predictions.npz: 'logits' of 32 samples" in told
    found = npz("predictions.npz")
    assert list(found) == ["logits"] and found["logits"].dtype == np.float32
    np.testing.assert_allclose(found["logits"], expected(mlp(), arrays(32, seed=2)["x"]), rtol=1e-5, atol=1e-6)


def test_a_step_with_a_checkpoint_and_csv(cli: Cli, folder: Path) -> None:
    assert cli("train", "model.onnx", "--data", "train.npz", "-o", "step", "--checkpoint", "run.ckpt").code == 0
    ok(cli, "step", "--checkpoint", "run.ckpt", "--data", "held_out.npz", "--output", "logits", "-o", "p.csv")
    rows = list(csv.reader(Path("p.csv").read_text().splitlines()))
    assert rows[0] == ["logits[0]", "logits[1]", "logits[2]"]
    trained = gg.Trainer.resume("step", "run.ckpt").predict(arrays(32, seed=2)["x"])
    np.testing.assert_allclose(np.array(rows[1:], np.float32), trained, rtol=1e-5, atol=1e-6)
    ran = cli("predict", "step", "--untrained", "--data", "held_out.npz", "--json")
    assert json.loads(ran.out) == {"file": "predictions.npz", "rows": 32, "outputs": {"logits": [32, 3]}}
    assert cli("predict", "step", "--untrained", "--data", "held_out.npz", "-o", "-").out.count("\n") == 33


def test_data_from_stdin_and_from_a_folder(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ok(cli, "model.onnx", "--data", "held_out.npz")
    (folder / "arrays").mkdir()
    np.save("arrays/x.npy", arrays(32, seed=2)["x"])
    ok(cli, "model.onnx", "--data", "arrays", "-o", "other.npz", "--batch-size", "7")
    content = io.BytesIO((folder / "held_out.npz").read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    ok(cli, "model.onnx", "--data", "-", "-o", "third.npz")
    for name in ("other.npz", "third.npz"):
        np.testing.assert_allclose(npz(name)["logits"], npz("predictions.npz")["logits"], rtol=1e-5, atol=1e-6)


def test_a_model_of_fixed_batches(cli: Cli, folder: Path) -> None:
    model = mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 5
    onnx.save(model, "fixed.onnx")
    ok(cli, "fixed.onnx", "--data", "held_out.npz")
    np.testing.assert_allclose(
        npz("predictions.npz")["logits"], expected(mlp(), arrays(32, seed=2)["x"]), rtol=1e-5, atol=1e-6
    )


def odd(folder: Path) -> None:
    """A model whose outputs are of every kind: a scalar, a ragged one, integers, two axes for each sample."""
    text = (
        MLP.split("=>")[0]
        + """=> (float[N, 4] a, float s, int64[N] i, float[N, 2, 2] m, float[M, M2] r) {
        a = Neg (x)
        s = ReduceSum <keepdims = 0> (x)
        i = ArgMax <axis = 1, keepdims = 0> (x)
        shape = Constant <value_ints = [-1, 2, 2]> ()
        m = Reshape (x, shape)
        zero = Constant <value_float = 0.0> ()
        positive = Greater (x, zero)
        r = NonZeroFloat (positive)
    }"""
    )
    text = text.replace("r = NonZeroFloat (positive)", "places = NonZero (positive)\n r = Cast <to = 1> (places)")
    onnx.save(onnx.parser.parse_model(text), folder / "odd.onnx")


def test_outputs_of_every_kind(cli: Cli, folder: Path) -> None:
    odd(folder)
    x = arrays(32, seed=2)["x"]
    words = ["odd.onnx", "--data", "held_out.npz"]
    ok(cli, *words, "--batch-size", "32")
    found = npz("predictions.npz")
    assert {n: found[n].shape for n in "asim"} == {"a": (32, 4), "s": (), "i": (32,), "m": (32, 2, 2)}
    np.testing.assert_array_equal(found["i"], x.argmax(1))
    ok(cli, *words, "--batch-size", "5", "--output", "m", "--output", "i", "-o", "p.csv")
    assert Path("p.csv").read_text().split("\n")[0] == "m[0][0],m[0][1],m[1][0],m[1][1],i"
    for more, says in (
        (["--batch-size", "8", "--output", "r"], "'r' changes shape between batches"),
        (["--output", "logit"], "the model has no output 'logit'"),
        (["--batch-size", "32", "-o", "p.csv"], "different numbers of rows"),
    ):
        ran = cli("predict", *words, *more)
        assert ran.code == 1 and says in ran.err, ran.err
    assert sorted(p.name for p in folder.glob(".*")) == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--data", "missing.npz"], 1, "does not exist"),
        (["--data", "other.npz"], 1, "does not contain 'x', which the model requires; it has 'y'"),
        (["--data", "wide.npz"], 1, "has shape [3, 5]"),
        (["--data", "cut.npz"], 1, "cannot be read"),
        (["--data", "empty.npz"], 1, "the data are empty"),
        (["--data", "held_out.npz", "-o", "p.txt"], 1, "should end in .npz or .csv"),
        (["--data", "held_out.npz", "-o", "held_out.npz"], 1, "is an input of this command"),
        (["--data", "held_out.npz", "--checkpoint", "run.ckpt"], 2, "requires a step folder"),
        (["--data", "held_out.npz", "-o", "-", "--json"], 2, "give one of them"),
    ],
)
def test_a_slip_is_named(cli: Cli, folder: Path, words: list[str], code: int, says: str) -> None:
    np.savez("other.npz", y=np.zeros(3))
    np.savez("wide.npz", x=np.zeros((3, 5), np.float32))
    np.savez("empty.npz", x=np.zeros((0, 4), np.float32))
    content = bytearray((folder / "held_out.npz").read_bytes())
    content[200:240] = bytes(40)  # within x: its checksum is wrong
    (folder / "cut.npz").write_bytes(content)
    ran = cli("predict", "model.onnx", *words)
    assert ran.code == code and says in ran.err, ran.err
    assert not (folder / "predictions.npz").exists()


@pytest.mark.sweep(0.52)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_no_more_than_a_batch_is_in_memory(tmp_path: Path, save: object) -> None:
    x = np.arange(100_000 * 32, dtype=np.float32).reshape(-1, 32)
    save(tmp_path / "large.npz", x=x, other=np.asfortranarray(x[:8]))  # type: ignore[operator]
    tracemalloc.start()
    with InOrder(tmp_path / "large.npz", ["x"]) as data:
        total = sum(float(batch["x"][0, 0]) for batch in data.batches(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == float(x[::64, 0].astype(np.float64).sum()) and data.others == ["other"]
    assert peak < 1_000_000
    with InOrder(tmp_path / "large.npz", ["other"]) as data:
        np.testing.assert_array_equal(np.concatenate([b["other"] for b in data.batches(3)]), x[:8])
    np.savez(tmp_path / "uneven.npz", x=x[:3], y=x[:2])
    with pytest.raises(DataError, match="'x' has 3 rows but 'y' has 2"):
        InOrder(tmp_path / "uneven.npz", ["x", "y"])
