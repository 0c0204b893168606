"""Digests: whatever happens to a checkpoint's bytes, it gives what was saved or is refused, and an older one serves."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import gradgraph as gg
from gradgraph.errors import CheckpointError, ModelError
from gradgraph.files.digest import BLOCK, digest_in_threads, digest_of
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.saved.checkpoint import CheckpointKeeper, checkpoint_pieces, load_checkpoint, previous_path
from gradgraph.runtime.saved.record import Progress, body_of, from_text, to_text
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

QUIET = RuntimeOptions(threads=1)
STEP = handmade.classifier()
DATA = handmade.points(48)


def trainer() -> Trainer:
    return Trainer(STEP, device="cpu", options=QUIET)


def image(t: Trainer) -> bytes:
    return b"".join(checkpoint_pieces(t.state_dict(), t.progress))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint in the middle of the second epoch."""
    path = tmp_path_factory.mktemp("whole") / "run.ckpt"
    t = trainer()
    t.fit(DATA, epochs=3, batch_size=16, max_steps=5, progress=False)
    t.save(path)
    return path.read_bytes()


def data_start(content: bytes) -> int:
    return 8 + int(struct.unpack("<Q", content[:8])[0])


def flipped(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    data[rng.randrange(data_start(content), len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def zero_tail(content: bytes, rng: random.Random) -> bytes:
    whole = len(content.rstrip(b"\0"))  # zeros instead of zeros are no damage
    cut = rng.randrange(data_start(content), whole)
    return content[:cut] + bytes(len(content) - cut)


def swapped_blocks(content: bytes, rng: random.Random) -> bytes:
    """Two stretches of the data exchanged, as a disk does that returns the wrong sector."""
    start, size = data_start(content), 32
    a, b = rng.sample(range((len(content) - start) // size), 2)
    data = bytearray(content)
    a, b = start + a * size, start + b * size
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return bytes(data)


@pytest.mark.parametrize(("damage", "rounds"), [(flipped, 250), (zero_tail, 50), (swapped_blocks, 50)])
def test_damaged_numbers_are_never_loaded(
    damage: Callable[[bytes, random.Random], bytes], rounds: int, whole: bytes, tmp_path: Path
) -> None:
    rng, path = random.Random(1), tmp_path / "run.ckpt"
    for _ in range(rounds):
        content = damage(whole, rng)
        path.write_bytes(content)
        if content == whole:
            continue
        with pytest.raises(CheckpointError, match="is damaged"):
            load_checkpoint(path, STEP.manifest.state)


def test_one_flipped_bit_anywhere_changes_nothing_or_is_refused(whole: bytes, tmp_path: Path) -> None:
    path, rng = tmp_path / "run.ckpt", random.Random(2)
    refused = 0
    for bit in rng.sample(range(8 * data_start(whole)), 300):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            values, progress = load_checkpoint(path, STEP.manifest.state)
        except CheckpointError:
            refused += 1
        else:
            assert b"".join(checkpoint_pieces(values, progress)) == whole
    assert refused > 200


def test_a_digest_is_of_the_stream_and_not_of_its_pieces() -> None:
    data = np.random.default_rng(0).bytes(3 * BLOCK + 17)
    rng = random.Random(0)
    cuts = sorted(rng.randrange(len(data)) for _ in range(20))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert digest_of(pieces) == digest_of([data])
    for place in (0, BLOCK - 1, BLOCK, len(data) - 1):
        other = bytearray(data)
        other[place] ^= 1
        assert digest_of([bytes(other)]) != digest_of([data])
    assert digest_of([data + b"\0"]) != digest_of([data])
    assert digest_of([data[:BLOCK]]) != digest_of([data[:BLOCK], b"\0"])


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 33 * BLOCK - 5, 48 * BLOCK])
def test_threads_compute_the_same_digest(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert digest_in_threads(lambda at, length: data[at : at + length], size) == digest_of([data])


# --- sense ----------------------------------------------------------------------------------------------------

HUGE = 10**400
SENSELESS: dict[str, dict[str, Any]] = {
    "an epoch that is to come": {"fit_epoch": 10**9},
    "a step that is to come": {"fit_step": 10**9},
    "more epochs than steps": {"epoch": 10**9},
    "more batches than steps": {"batch": 10**9},
    "as many epochs, and a batch": {"epoch": 5},
    "negative size": {"sizes": {"batch": -1}},
    "size of zero": {"sizes": {"batch": 0}},
    "huge size": {"sizes": {"batch": HUGE}},
    "size that is no number": {"sizes": {"batch": "16"}},
    "size that is true": {"sizes": {"batch": True}},
    "fractional size": {"sizes": {"batch": 16.0}},
    "sizes in a list": {"sizes": [16]},
    "huge steps": {"steps": HUGE},
    "negative steps": {"steps": -1},
    "fractional steps": {"steps": 5.0},
    "steps that are true": {"steps": True},
    "no steps": {"steps": None},
    "seed beyond 64 bits": {"seed": 1 << 63},
    "seed that is text": {"seed": "0"},
    "huge sums": {"sums": {"loss": HUGE}},
    "sums of text": {"sums": {"loss": "nan"}},
    "sums of nothing": {"weight": 0},
    "weight of nothing": {"sums": {}},
    "batches of nothing": {"batch": 0},
    "negative weight": {"weight": -16},
    "hyperparameter that is not a number": {"hyperparameters": {"learning_rate": float("nan")}},
    "infinite hyperparameter": {"hyperparameters": {"learning_rate": float("inf")}},
    "huge hyperparameter": {"hyperparameters": {"learning_rate": HUGE}},
    "hyperparameters in a list": {"hyperparameters": [["learning_rate", 0.1]]},
    "best of text": {"best": "0.1"},
    "huge best": {"best": HUGE},
    "stale for longer than the run": {"stale": 10},
    "history of more epochs": {"history": {"epoch": [1, 2], "loss": [1.0, 1.0]}},
    "history of text": {"history": {"epoch": ["1"]}},
    "history of truths": {"history": {"epoch": [True]}},
    "huge history": {"history": {"epoch": [HUGE]}},
    "history in a list": {"history": [1]},
    "a column that is no list": {"history": {"epoch": 1}},
    "batches of no sample": {"order": {"batch_size": 0}},
    "batches of minus one": {"order": {"batch_size": -1}},
    "huge batches": {"order": {"batch_size": HUGE}},
    "no batch size": {"order": {"batch_size": None}},
    "negative rows": {"order": {"rows": -1}},
    "shuffle by number": {"order": {"shuffle": 1}},
    "drop_last by text": {"order": {"drop_last": "no"}},
    "unknown order": {"order": {"library": "evil.so"}},
    "order in a list": {"order": [1]},
    "huge version": {"version": HUGE},
    "fractional version": {"version": 2.0},
    "no digest": {"digest": None},
    "digest that is no text": {"digest": 1},
    "unknown field": {"callback": "os.system"},
}


@pytest.mark.parametrize("what", SENSELESS)
def test_records_are_checked_for_sense(what: str, whole: bytes) -> None:
    start = data_start(whole)
    text = json.loads(whole[8:start])["__metadata__"]["gradgraph"]
    assert from_text(text).progress.steps == 5
    with pytest.raises(ValueError) as caught:
        from_text(json.dumps({**json.loads(text), **SENSELESS[what]}))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_losses_that_are_no_numbers_are_kept() -> None:
    """With check_loss=False a run may go on with them."""
    p = Progress(steps=1, batch=1, weight=8, sums={"loss": float("nan")}, best=float("inf"))
    kept = from_text(to_text(body_of(p), "d")).progress
    assert np.isnan(kept.sums["loss"])
    assert kept.best == float("inf")


# --- the newest whole one -------------------------------------------------------------------------------------

FIT: dict[str, Any] = {"batch_size": 16, "progress": False}


def spoil(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes(), random.Random(3)))


def test_the_checkpoint_before_serves_when_the_last_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ckpt"
    run = trainer()
    run.fit(DATA, epochs=4, checkpoint=path, **FIT)
    spoil(path)
    rest = Trainer.resume(STEP, path, device="cpu", options=QUIET)
    assert rest.progress.steps == 9
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "run.ckpt' is damaged" in said[0] and "continuing from" in said[0]
    assert "run.previous.ckpt' (step 9)" in said[0]
    rest.fit(DATA, epochs=4, checkpoint=path, **FIT)
    assert image(rest) == image(run)
    assert previous_path(path).exists()
    assert image(Trainer.resume(STEP, path, device="cpu", options=QUIET)) == image(run)
    for damaged in (path, previous_path(path)):
        spoil(damaged)
    with pytest.raises(CheckpointError, match=r"run\.ckpt' is damaged"):
        trainer().load(path)


def test_the_checkpoint_of_a_replaced_run_does_not_serve(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    trainer().fit(DATA, epochs=3, checkpoint=path, **FIT)
    assert previous_path(path).exists()
    trainer().fit(DATA, epochs=1, checkpoint=path, **FIT)
    assert [p.name for p in tmp_path.iterdir()] == ["run.ckpt"]


def test_a_failed_save_leaves_two_names_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save finds one file under both names, which a rename would leave alone."""
    path, save, t = tmp_path / "run.ckpt", StepSession.save, trainer()

    def fails(self: StepSession, to: Any) -> None:
        save(self, tmp_path / "missing" / "run.ckpt" if self.progress.epoch in (2, 3) else to)

    monkeypatch.setattr(StepSession, "save", fails)
    t.fit(DATA, epochs=5, checkpoint=path, **FIT)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.ckpt", "run.previous.ckpt"]
    assert load_checkpoint(previous_path(path), STEP.manifest.state)[1].epoch == 4


def test_of_kept_checkpoints_the_newest_whole_one_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    t, keeper = trainer(), CheckpointKeeper(tmp_path, keep=4)
    t.fit(DATA, epochs=4, callbacks=[keeper], **FIT)
    assert Trainer.resume(STEP, tmp_path, device="cpu").progress.steps == 12
    for steps in (12, 9):
        spoil(tmp_path / f"step-{steps:08d}.ckpt")
    assert Trainer.resume(STEP, tmp_path, device="cpu").progress.steps == 6
    assert Trainer.resume(STEP, tmp_path / "step-00000009.ckpt", device="cpu").progress.steps == 6
    assert sum("(step 6)" in r.getMessage() for r in caplog.records) == 2


def test_a_checkpoint_without_a_digest_is_loaded_with_a_note(
    whole: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = data_start(whole)
    header = json.loads(whole[8:start])
    record = json.loads(header["__metadata__"]["gradgraph"])
    del record["digest"]
    header["__metadata__"]["gradgraph"] = json.dumps({**record, "version": 1}, sort_keys=True)
    text = json.dumps(header).encode()
    path = tmp_path / "run.ckpt"
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[start:])
    values, progress = load_checkpoint(path, STEP.manifest.state)
    assert b"".join(checkpoint_pieces(values, progress))[data_start(whole) :] == whole[start:]
    assert "without checkpoint digests" in caplog.text


def of_another_epoch(path: Path) -> None:
    """As it is when the best state could not be written for a while."""
    other = trainer()
    other.fit(DATA, epochs=1, checkpoint=path.with_name("other.ckpt"), patience=1, **FIT)
    path.with_name("other.best.ckpt").replace(path)


BEST: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "whole": (lambda path: None, 7, ""),
    "damaged": (lambda path: spoil(path), 7, "run.best.ckpt' is damaged"),
    "damaged, and the checkpoint before has it": (lambda path: spoil(path), 6, ""),
    "missing": (Path.unlink, 7, "cannot read"),
    "of another epoch": (of_another_epoch, 7, "'[^']*run.best.ckpt' is from step 3"),
    "missing, and the checkpoint before has it": (Path.unlink, 4, ""),
    "missing, and the checkpoint has it": (Path.unlink, 3, ""),
}


@pytest.mark.parametrize("case", BEST)
def test_the_best_state_comes_back_after_a_resume_or_is_said_to_be_lost(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.ckpt"
    harm, steps, says = BEST[case]
    best = 4 if case == "of another epoch" else 1  # the last one at a small rate
    rates: dict[str, Any] = {"learning_rate": lambda step: 0.1 if step < 3 * best else 5.0}
    options: dict[str, Any] = {"epochs": 6, "patience": 3, **rates, **FIT}
    whole, first = trainer(), trainer()
    whole.fit(DATA, checkpoint=tmp_path / "whole.ckpt", **options)
    first.fit(DATA, checkpoint=path, max_steps=steps + 3 * (best - 1), **options)
    harm(tmp_path / "run.best.ckpt")
    rest = Trainer.resume(STEP, path, device="cpu", options=QUIET)
    caplog.clear()
    history = rest.fit(DATA, checkpoint=path, **options)
    if not says:
        assert "were not found" not in caplog.text
        assert all(np.array_equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())
        return
    assert re.search(
        rf"the weights of the best epoch so far \(epoch {best}, loss [0-9.]+\) were not found \(.*{says}", caplog.text
    )
    kept = history["loss"][history.restored if history.restored is not None else -1]
    assert kept == min(history["loss"][best + 1 :])  # of the epochs since


# --- step folders ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step folder whose frozen weights lie in frozen.bin."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    net (float[batch, 4] x) => (float[batch, 3] logits) <float[4, 300000] f, float[300000, 3] g, float[3, 3] w> {
        a = MatMul (x, f)  b = MatMul (a, g)  logits = MatMul (b, w)
    }"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in {"f": (4, 300000), "g": (300000, 3), "w": (3, 3)}.items():
        numbers = rng.normal(size=shape).astype(np.float32) / shape[0]
        model.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    folder = tmp_path_factory.mktemp("large") / "step"
    gg.build(model, "cross_entropy", gg.optim.sgd(0.1), train=["w"]).save(folder)
    return folder


@pytest.mark.parametrize("file", ["train.onnx", "init.onnx", "eval.onnx", "frozen.bin"])
def test_a_flipped_bit_in_a_step_folder_is_found_before_it_is_used(file: str, large: Path, tmp_path: Path) -> None:
    folder, rng = tmp_path / "step", random.Random(file)
    shutil.copytree(large, folder)
    assert (folder / file).exists()
    whole = (folder / file).read_bytes()
    for _ in range(20):
        data = bytearray(whole)
        data[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (folder / file).write_bytes(data)
        with pytest.raises(ModelError, match="again"):
            gg.Step.load(folder).resolved("eval")


@pytest.mark.parametrize("use", [lambda s: Trainer(s, device="cpu").predict(DATA["x"]), lambda s: s.resolved("eval")])
def test_large_weights_are_checked_when_they_are_used(
    use: Callable[[gg.Step], object], large: Path, tmp_path: Path
) -> None:
    """And not when somebody only looks at the step."""
    folder = tmp_path / "step"
    shutil.copytree(large, folder)
    spoilt = bytearray((folder / "frozen.bin").read_bytes())
    spoilt[-1] ^= 1
    (folder / "frozen.bin").write_bytes(spoilt)
    step = gg.Step.load(folder)
    assert "trainable" in step.summary()
    for _ in range(2):
        with pytest.raises(ModelError, match=r"frozen\.bin' has a different digest from the one in the manifest\.json"):
            use(step)


LARGE = {"x": DATA["x"], "target": DATA["target"]}  # for the step of the fixture
USES: dict[str, Callable[[Trainer], Any]] = {
    "fit": lambda t: t.fit(LARGE, **FIT)["loss"],
    "evaluate": lambda t: t.evaluate(LARGE),
    "predict": lambda t: t.predict(LARGE["x"]).tolist(),
    "export": lambda t: t.export().SerializeToString(deterministic=True),
}


def replace(file: Path) -> None:
    file.with_suffix(".new").write_bytes(bytes(file.stat().st_size))
    file.with_suffix(".new").replace(file)


@pytest.mark.skipif(os.name == "nt", reason="Windows neither cuts nor replaces a mapped file")
@pytest.mark.parametrize("use", USES)
def test_large_weights_whose_file_is_replaced_are_those_of_before(use: str, large: Path, tmp_path: Path) -> None:
    shutil.copytree(large, tmp_path / "step")
    whole, t = Trainer(large, device="cpu", options=QUIET), Trainer(tmp_path / "step", device="cpu", options=QUIET)
    t.evaluate(LARGE)
    replace(tmp_path / "step" / "frozen.bin")
    assert USES[use](t) == USES[use](whole)


@pytest.mark.skipif(os.name == "nt", reason="Windows neither cuts nor replaces a mapped file")
@pytest.mark.parametrize("use", [*USES, "fit, between two epochs"])
def test_large_weights_whose_file_is_cut_are_an_error(use: str, large: Path, tmp_path: Path) -> None:
    """And not the end of the process, as it is for whoever touches a page behind the end of a mapped file."""
    shutil.copytree(large, tmp_path / "step")
    t = Trainer(tmp_path / "step", device="cpu", options=QUIET)
    t.evaluate(LARGE)

    class Cut:
        def on_epoch(self, trainer: Trainer, row: object) -> None:
            os.truncate(tmp_path / "step" / "frozen.bin", 100)

    if use in USES:
        Cut().on_epoch(t, None)
    with pytest.raises(ModelError, match=r"frozen\.bin', .* was overwritten or truncated since it was opened"):
        USES[use](t) if use in USES else t.fit(LARGE, epochs=2, callbacks=[Cut()], **FIT)
    pickle.dumps(t.definition)


def test_a_step_folder_without_digests_is_read(large: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(large, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest.pop("digests")) == ["eval.onnx", "frozen.bin", "init.onnx", "train.onnx"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    step = gg.Step.load(folder)
    step.resolved("eval")
    step.save(tmp_path / "again")
    gg.Step.load(tmp_path / "again").resolved("eval")
    for digests in ([], {"train.onnx": 1}, {"../secret": "x"}):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "digests": digests}))
        with pytest.raises(ModelError, match="digests are invalid"):
            gg.Step.load(folder)
