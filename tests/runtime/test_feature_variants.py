"""fit(feature_variants=...): the first epochs have the bits of a fit without kept features; later ones repeat them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import sound
from gradgraph.cli.app import run
from gradgraph.errors import ArgumentError, DataError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.features import kept_rows
from tests.kit.jittered import Jittered
from tests.kit.small_models import parsed
from tests.kit.wav_writing import write_wav
from tests.runtime.test_keep_features import RNG, fitted, head_only, points


def check_same(step: gg.Step, data: Any, other: Any, variants: int, **options: Any) -> None:
    """Check that a fit on variants of ``data`` has the bits of a fit on ``other`` without kept features."""
    one, state, _ = fitted(step, data, True, feature_variants=variants, **options)
    two, expected, _ = fitted(step, other, False, **options)
    assert one == two
    assert state.keys() == expected.keys() and all(np.array_equal(state[n], expected[n]) for n in state)


@pytest.mark.parametrize("options", [
    {}, {"shuffle": False}, {"drop_last": True}, {"limit": 2}, {"batch_size": 50}, {"validation": points(19, 1)},
])  # fmt: skip
@pytest.mark.parametrize("mixes", [False, True])
def test_the_first_epochs_are_those_without_kept_features(mixes: bool, options: dict[str, Any]) -> None:
    data = Jittered(points(27), mixes)
    check_same(head_only(), data, data, 3, epochs=3, **options)
    check_same(head_only(), data, data, 5, epochs=3, **options)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}])
def test_later_epochs_repeat_the_variants(options: dict[str, Any]) -> None:
    data = points(24)
    check_same(head_only(), Jittered(data), Jittered(data, every=2), 2, epochs=5, **options)
    once, _, _ = fitted(head_only(), Jittered(data), True, feature_variants=1, epochs=2)
    twice, _, _ = fitted(head_only(), Jittered(data), True, feature_variants=2, epochs=2)
    assert once["loss"][0] == twice["loss"][0] and once["loss"][1] != twice["loss"][1]


def test_samples_that_the_first_epoch_drops_have_features_too() -> None:
    """With drop_last, other samples are dropped in the second epoch, which trains on the same variant."""
    data = points(27)
    one, _, _ = fitted(head_only(), Jittered(data), True, feature_variants=1, epochs=3, drop_last=True)
    two, _, _ = fitted(head_only(), Jittered(data, every=1), False, epochs=3, drop_last=True)
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)


@pytest.mark.parametrize("in_files", [False, True])
def test_resume(in_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_files:
        monkeypatch.setattr(kept_rows, "free_memory", lambda: 100)
    step, data, path = head_only(), Jittered(points(24)), tmp_path / "run.ckpt"
    _, expected, _ = fitted(step, Jittered(points(24), every=2), False, epochs=4)
    for steps in (2, 4, 9):
        fitted(step, data, True, feature_variants=2, epochs=4, checkpoint=path, max_steps=steps)
        trainer = gg.Trainer.resume(step, path, device="cpu", options=RuntimeOptions(threads=1))
        trainer.fit(data, 4, 8, learning_rate=0.05, progress=False, keep_features=True, feature_variants=2, resume=True,
                    checkpoint=path)  # fmt: skip
        assert all(np.array_equal(value, expected[n]) for n, value in trainer.state_dict().items())
        assert not (tmp_path / "run.features").exists()


def test_a_second_fit_goes_on_with_the_next_variant() -> None:
    data, states = points(24), []
    for kept, given in (
        ({"keep_features": True, "feature_variants": 3}, Jittered(data)),
        ({}, Jittered(data, every=3)),
    ):
        trainer = gg.Trainer(head_only(), device="cpu", seed=3, options=RuntimeOptions(threads=1))
        for epochs in (1, 3):
            trainer.fit(given, epochs, 8, learning_rate=0.05, progress=False, **kept)
        states.append(trainer.state_dict())
    assert all(np.array_equal(states[0][n], states[1][n]) for n in states[0])


def pictures(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for i in range(12):
        (folder / str(i % 2)).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (9, 9, 3), np.uint8)
        image.fromarray(pixels).save(folder / str(i % 2) / f"{i}.png")
    return folder


PICTURES = """(float[n, 3, 9, 9] x) => (float[n, 2] y) {
    h = Conv(x, k)  r = Relu(h)  g = GlobalAveragePool(r)  f = Flatten(g)  y = MatMul(f, w)
}"""


def picture_model() -> Any:
    return parsed(PICTURES, k=RNG.standard_normal((4, 3, 3, 3)), w=RNG.standard_normal((4, 2)))


@pytest.mark.parametrize("augment, loss", [
    (["random_resized_crop", "flip"], "cross_entropy"), ("mixup", "soft_cross_entropy"),
    ("cutmix", "soft_cross_entropy"),
])  # fmt: skip
def test_pictures(augment: Any, loss: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradgraph")
    data = gg.image_folder(pictures(tmp_path), augment=augment)
    step = gg.build(picture_model(), loss=loss, optimizer="sgd", train="w")
    check_same(step, data, data, 2, epochs=2, batch_size=5, validation=gg.image_folder(tmp_path))
    assert "computing features of 12 samples × 2 augmented variants of the training data" in caplog.text


def test_sounds_that_are_cropped_at_random(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(8):
        (tmp_path / str(i % 2)).mkdir(exist_ok=True)
        write_wav(tmp_path / str(i % 2) / f"{i}.wav", rng.uniform(-1, 1, 40))
    model = parsed("(float[n, 32] x) => (float[n, 2] y) { h = MatMul(x, a)  r = Relu(h)  y = MatMul(r, w) }",
                   a=RNG.standard_normal((32, 4)), w=RNG.standard_normal((4, 2)))  # fmt: skip
    step = gg.build(model, loss="cross_entropy", optimizer="sgd", train="w")
    data = sound.folder(tmp_path)
    with pytest.raises(DataError, match="augmented anew in each epoch"):
        fitted(step, data, True)
    check_same(step, data, data, 3, epochs=3, batch_size=3)


class Noisy:
    """A user's dataset with transforms that it draws itself."""

    def __init__(self) -> None:
        self.data, self.rng = points(24), np.random.default_rng(0)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.data["x"][i] + self.rng.standard_normal(6).astype(np.float32), self.data["target"][i]


def test_random_transforms_of_a_dataset() -> None:
    """At a learning rate of 0, the loss of an epoch depends on its variant alone."""
    losses = fitted(head_only(), Noisy(), True, feature_variants=2, epochs=4, learning_rate=0.0)[0]["loss"]
    assert losses[2:] == pytest.approx(losses[:2]) and losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_what_has_no_effect_is_refused(tmp_path: Path) -> None:
    step, data = head_only(), points(16)
    with pytest.raises(ArgumentError, match="no effect without keep_features"):
        fitted(step, Jittered(data), False, feature_variants=2)
    for keep in (True, "auto"):
        with pytest.raises(ArgumentError, match="the training data are not augmented"):
            fitted(step, data, keep, feature_variants=2)
    with pytest.raises(DataError, match="feature_variants must be a whole number above zero"):
        fitted(step, Jittered(data), True, feature_variants=0)
    with pytest.raises(DataError, match=r"augmented anew in each epoch.*feature_variants"):
        fitted(step, Jittered(data), True)
    with pytest.raises(DataError, match="an iterable of batches"):
        fitted(step, [data], True, feature_variants=2)
    with pytest.raises(DataError, match="validation data differs each time it is read"):
        fitted(step, Jittered(data), True, feature_variants=2, validation=Noisy())


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx

    onnx.save(picture_model(), tmp_path / "m.onnx")
    command = ["train", str(tmp_path / "m.onnx"), "--data", str(pictures(tmp_path / "images")), "--train", "w",
               "--augment", "flip", "--epochs", "2", "--seed", "3"]  # fmt: skip
    rows = []
    for i, further in enumerate([[], ["--keep-features", "--feature-variants", "2"]]):
        assert run([*command, *further, "--history", str(tmp_path / f"{i}.csv")]) == 0
        rows.append((tmp_path / f"{i}.csv").read_text())
    assert rows[0] == rows[1]
    capsys.readouterr()
    assert run([*command, "--keep-features"]) == 1
    assert "--feature-variants" in capsys.readouterr().err
    assert run([*command, "--feature-variants", "2"]) != 0
    assert "--keep-features" in capsys.readouterr().err
