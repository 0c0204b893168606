"""Walks with folders and tables of WAV files: cut out, augmented, resumed, and exported with raw samples going in."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph.frontend import Input, nn
from gradgraph.frontend import functional as F
from tests.data_walks.random_walk import ODD_CLASSES, Array, Walk, bare, classifier_scores, entropies, softmax

RATE = 2000
LENGTH = 500  # samples of what the model takes


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, stride=2), nn.Linear(4, classes)

    def forward(self, mel: Any) -> Any:
        return self.head(F.relu(self.conv(mel)).amax(dim=(2, 3)))


def _write(walk: Walk, path: Path, pitch: float) -> None:
    count = int(walk.rng.integers(LENGTH // 2, LENGTH * 2))
    wanted = np.sin(2 * np.pi * pitch * np.arange(count) / RATE) * 0.5 + walk.rng.normal(size=count) / 20
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((wanted.clip(-1, 1) * 32767).astype("<i2").tobytes())


def _folder(walk: Walk, root: Path, classes: list[str], count: int) -> list[Path]:
    files = []
    for i, name in enumerate(classes):
        for j in range(count + int(walk.rng.integers(0, 2))):
            files.append(root / name / f"{j}.wav")
            _write(walk, files[-1], 100 + 200 * i)
    return sorted(files, key=lambda path: (path.parent.name, path.name))


def _samples(files: list[Path]) -> Array:
    """As the page says: numbers from -1 to 1, centred, cut or with silence around them."""
    rows = []
    for path in files:
        with wave.open(str(path)) as file:
            found = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        room = LENGTH - len(found)
        rows.append(
            np.pad(found, (room // 2, room - room // 2)) if room >= 0 else found[-room // 2 : -room // 2 + LENGTH]
        )
    return np.stack(rows).astype(np.float32)


def _quieter(samples: Array, rng: np.random.Generator) -> Array:
    return samples * np.float32(rng.uniform(0.5, 1))


def walk_sounds(walk: Walk) -> None:
    folder = walk.folder
    classes = sorted({name.replace("/", "_") for name in walk.some(ODD_CLASSES, int(walk.rng.integers(2, 4)))})
    walk.chosen.append(f"classes={classes}")
    _folder(walk, folder / "train", classes, 4)
    seen = classes[1:] if len(classes) > 2 and walk.flag("a class is missing in validation") else classes
    files = _folder(walk, folder / "held", seen, 3)
    labels = np.array([classes.index(path.parent.name) for path in files])
    gg.frontend.manual_seed(walk.seed)
    network = gg.frontend.export(
        Classifier(len(classes)), {"mel": Input(("rows", 1, 20, "frames"))}, outputs=["scores"]
    )
    convention = walk.choose("convention", ["whisper", "librosa", "torchaudio"])
    model = gg.sound.log_mel(network, convention, sample_rate=RATE, n_fft=64, hop=32, mels=20)
    options: dict[str, Any] = {"ema": 0.9} if walk.flag("ema", 0.3) else {}
    options |= {"accumulate": True} if walk.flag("accumulate", 0.3) else {}
    options |= {"freeze": "conv.*"} if walk.flag("freeze", 0.3) else {}
    step = gg.build(
        model, "cross_entropy", gg.optim.adamw(1e-2), metrics=["accuracy", "log_loss"], seed=walk.seed, **options
    )
    fit: dict[str, Any] = {
        "epochs": int(walk.choose("epochs", [1, 2])),
        "batch_size": int(walk.choose("batch", [3, 7])),
        "progress": False,
    }
    fit |= {"accumulate": 2} if options.get("accumulate") else {}
    seconds = LENGTH / RATE
    if walk.flag("validation"):
        fit |= {"validation": gg.sound.folder(folder / "held", seconds=seconds), "patience": 1}
    augment = _quieter if walk.flag("augment") else None

    def data(threads: int) -> Any:
        return gg.sound.folder(folder / "train", seconds=seconds, augment=augment, threads=threads)

    trainer = gg.Trainer(step, device="cpu", seed=walk.seed)
    begun = trainer.state_dict()
    trainer.fit(data(2), checkpoint=folder / "whole.ckpt", **fit)
    for name in begun:
        if options.get("freeze") and name.startswith("conv."):
            walk.same(f"the frozen '{name}' is as before", trainer.state_dict()[name], begun[name])
    steps = trainer.progress.steps
    if steps > 1:
        at = int(walk.rng.integers(1, steps))
        part = gg.Trainer(step, device="cpu", seed=walk.seed)
        part.fit(data(1), checkpoint=folder / "part.ckpt", max_steps=at, **fit)
        resumed = gg.Trainer.resume(step, folder / "part.ckpt", device="cpu")
        resumed.fit(data(3), checkpoint=folder / "part.ckpt", **fit)
        walk.same(f"a run resumed at {at} of {steps} has the bits of one", resumed.state_dict(), trainer.state_dict())
    held = gg.sound.folder(folder / "held")  # whose length the trainer knows
    found = np.asarray(trainer.predict(held))
    raw = _samples(files)
    name = trainer.manifest.inputs[0].name
    walk.close("a folder gives what its samples give", found, trainer.predict({name: raw}), 1e-4)
    scores, expected = trainer.evaluate(held), classifier_scores(found, labels)
    walk.close("evaluate says the loss", scores["loss"], entropies(found, labels).mean(), 1e-3)
    for metric in ("accuracy", "log_loss"):
        walk.close(f"evaluate says the {metric} of scikit-learn", scores[metric], expected[metric], 1e-3)
    path = folder / "bare.onnx"
    trainer.export(path)
    made = bare(path, {name: raw})["scores"]
    walk.close("the exported file takes raw samples", made, found, 2e-4)
    _check_shell(walk, path, classes, made)
    _check_table(walk, trainer, files, found, labels)
    if walk.flag("quantize", 0.3):
        small = gg.quantize(path, gg.sound.folder(folder / "train"))
        walk.law("int8 is told of", small.samples > 0 and "scores" in small.outputs, small.outputs)
    _write(walk, folder / "strange" / "nobody" / "1.wav", 100)
    walk.refused(
        "a class that is new is refused", lambda: trainer.evaluate(gg.sound.folder(folder / "strange")), "nobody"
    )


def _check_shell(walk: Walk, path: Path, classes: list[str], made: Array) -> None:
    import pandas as pd

    walk.shell("predict", path, "--data", walk.folder / "held", "-o", walk.folder / "p.csv", "--quiet")
    rows = pd.read_csv(walk.folder / "p.csv", dtype={"class": str}, keep_default_na=False)
    walk.law(
        "the CSV calls classes by name",
        rows["class"].tolist() == np.array(classes)[made.argmax(axis=1)].tolist(),
        rows["class"].tolist()[:3],
    )
    shares = rows[[f"probability[{name}]" for name in classes]].to_numpy()
    walk.close("the CSV has the probability of each class", shares, softmax(made), 1e-3)


def _check_table(walk: Walk, trainer: gg.Trainer, files: list[Path], found: Array, labels: Array) -> None:
    """Tables that name the same sounds, in another order, or some of them, have the labels of the folders."""
    import pandas as pd

    order = walk.rng.permutation(len(files))
    for name, rows in (("t.csv", order), ("part.csv", order[:2])):
        names = [str(files[i].relative_to(walk.folder)) for i in rows]
        pd.DataFrame({"path": names, "label": [files[i].parent.name for i in rows]}).to_csv(
            walk.folder / name, index=False
        )
        table = gg.sound.table(walk.folder / name, "path", "label")
        walk.close(f"{name} gives what the folder gives", trainer.predict(table), found[rows], 2e-4)
        walk.close(
            f"{name} has the labels of the folders",
            trainer.evaluate(table)["loss"],
            entropies(found[rows], labels[rows]).mean(),
            1e-3,
        )
