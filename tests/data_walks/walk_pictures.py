"""Walks with folders and tables of pictures: augmented, weighed, resumed, and exported to take bytes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import gradgraph as gg
from gradgraph.frontend import nn
from tests.data_walks.random_walk import ODD_CLASSES, Array, Walk, bare, classifier_scores, entropies, softmax

SIDE = 8
AUGMENTATIONS = (
    "flip",
    "vertical_flip(p=0.3)",
    "random_crop(padding=1)",
    "rotation(20)",
    "color_jitter(brightness=0.3)",
    "random_resized_crop(scale=[0.5,1])",
    "random_erasing",
    "rand_augment",
    "zoom",
    "affine(degrees=9)",
)
MIXING = ("mixup(alpha=0.4)", "cutmix")
FORMS = (".png", ".bmp", ".ppm")


def _name(walk: Walk, classes: list[str]) -> list[str]:
    return [name.replace("/", "_") for name in classes]


def _picture(walk: Walk, hue: float, size: tuple[int, int]) -> Any:
    from PIL import Image

    noise = walk.rng.integers(0, 90, (*size, 3))
    return Image.fromarray(np.clip(noise + np.array([hue * 160, 60, 160 - hue * 160]), 0, 255).astype(np.uint8))


def _folder(walk: Walk, root: Path, classes: list[str], count: int, sizes: bool) -> list[Path]:
    """Pictures in a folder for each class; the files in the order in which they are read."""
    files = []
    for i, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for j in range(count + int(walk.rng.integers(0, 2))):
            size = (SIDE, SIDE) if not sizes else tuple(int(side) for side in walk.rng.integers(6, 14, 2))
            path = root / name / f"{j}{walk.choose('form', FORMS) if j == 0 else '.png'}"
            _picture(walk, i / len(classes), size).save(path)
            files.append(path)
    return sorted(files, key=lambda path: (path.parent.name, path.name))


def _arrays(files: list[Path], mean: list[float] | None, std: list[float] | None) -> Array:
    """The pictures as the page says they become arrays: [rows, channels, height, width]."""
    from PIL import Image

    made = []
    for path in files:
        with Image.open(path) as picture:
            resized = (
                picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
                if picture.size != (SIDE, SIDE)
                else picture.convert("RGB")
            )
        pixels = np.asarray(resized, np.float32) / 255
        if mean is not None and std is not None:
            pixels = (pixels - np.array(mean, np.float32)) / np.array(std, np.float32)
        made.append(pixels.transpose(2, 0, 1))
    return np.stack(made).astype(np.float32)


def walk_pictures(walk: Walk) -> None:
    folder, seed = walk.folder, walk.seed
    classes = sorted(set(_name(walk, walk.some(ODD_CLASSES, int(walk.rng.integers(2, 5))))))
    walk.chosen.append(f"classes={classes}")
    sizes = walk.flag("sizes")
    _folder(walk, folder / "train", classes, 5, sizes)
    seen = classes[1:] if len(classes) > 2 and walk.flag("a class is missing in validation") else classes
    files = _folder(walk, folder / "held", seen, 3, sizes)
    augment = walk.some(AUGMENTATIONS, int(walk.rng.integers(0, 3)))
    mixes = walk.flag("mixing", 0.25)
    augment.sort(key=lambda one: not one.startswith("random_resized_crop"))  # which must be the first
    augment += [walk.choose("mixing", MIXING)] if mixes else []
    walk.chosen.append(f"augment={augment}")
    normal = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.25]} if walk.flag("normalised") else {}
    batch, epochs = int(walk.choose("batch", [3, 4, 16])), int(walk.choose("epochs", [1, 2]))
    gg.frontend.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, len(classes))
    )
    onnx.save(gg.frontend.export(network, {"pixels": ("batch", 3, SIDE, SIDE)}, outputs=["scores"]), folder / "m.onnx")
    loss = "soft_cross_entropy" if mixes else "cross_entropy"
    trainer = (_shell if walk.flag("shell", 0.4) else _python)(walk, loss, augment, normal, batch, epochs)
    arrays = _arrays(files, normal.get("mean"), normal.get("std"))
    labels = np.array([classes.index(path.parent.name) for path in files])
    low = any(one.startswith("precision") for one in walk.chosen)
    tolerance = 3e-2 if low else 2e-4
    read = gg.image_folder(folder / "held")
    found = np.asarray(trainer.predict(read))
    walk.law(
        "classes are the sorted names of folders",
        next(iter(trainer.names.classes.values())) == tuple(classes),
        trainer.names.classes,
    )
    walk.close("a folder gives what its arrays give", found, trainer.predict({"pixels": arrays}), tolerance)
    scores, expected = trainer.evaluate(read), classifier_scores(found, labels)
    expected["loss"] = float(entropies(found, labels).mean())
    for name in ("loss", "accuracy", "log_loss"):
        if name in scores:
            walk.close(f"evaluate says the {name} of scikit-learn", scores[name], expected[name], max(tolerance, 1e-3))
    _check_table(walk, trainer, files, found, labels, tolerance)
    path = folder / "bare.onnx"
    trainer.export(path)
    made = bare(path, {"pixels": arrays})["scores"]
    walk.close("the exported file gives what predict gives", made, found, 5e-2 if low else 2e-4)
    walk.shell("predict", path, "--data", folder / "held", "-o", folder / "p.csv", "--quiet")
    _check_csv(folder / "p.csv", walk, classes, files, made)
    if walk.flag("image input"):
        _check_bytes(walk, path, files, made)
    if walk.flag("quantize", 0.3):
        small = gg.quantize(path, folder / "train" if walk.flag("with data") else None)
        onnx.save(small.result, folder / "int8.onnx")
        off = np.abs(bare(folder / "int8.onnx", {"pixels": arrays})["scores"] - made).max()
        said = small.outputs["scores"].relative * np.abs(made).max()
        walk.law(
            "int8 is as near as it says, on other pictures",
            off <= 8 * said + 0.3 * np.abs(made).max(),
            (off, said, small.outputs),
        )
    if walk.flag("calibrate", 0.3) and not mixes:
        from gradgraph.export.temperature import calibrate

        told = calibrate(trainer, read)
        walk.close("the NLL before is that of the predictions", told.nll[0], expected["loss"], max(tolerance, 1e-3))
        walk.close(
            "the NLL after is that of the divided logits",
            told.nll[1],
            entropies(found / told.temperature, labels).mean(),
            2e-2,
        )
        onnx.save(told.model, folder / "calibrated.onnx")
        walk.close(
            "the calibrated file divides",
            bare(folder / "calibrated.onnx", {"pixels": arrays})["scores"],
            made / told.temperature,
            1e-3,
        )
    (folder / "strange" / "nobody").mkdir(parents=True)
    _picture(walk, 0.5, (SIDE, SIDE)).save(folder / "strange" / "nobody" / "1.png")
    walk.refused(
        "a class that is new is refused", lambda: trainer.evaluate(gg.image_folder(folder / "strange")), "nobody"
    )
    walk.refused(
        "a misspelt augmentation is refused", lambda: gg.image_folder(folder / "train", augment="filp"), "flip"
    )


def _options(walk: Walk) -> dict[str, Any]:
    options: dict[str, Any] = {"ema": 0.9} if walk.flag("ema", 0.3) else {}
    options |= {"accumulate": True} if walk.flag("accumulate", 0.3) else {}
    options |= {"precision": walk.choose("precision", ["bfloat16", "float16"])} if walk.flag("low", 0.2) else {}
    options |= {"freeze": "0.*"} if walk.flag("freeze", 0.3) else {}
    return options


def _python(walk: Walk, loss: str, augment: list[str], normal: dict[str, Any], batch: int, epochs: int) -> gg.Trainer:
    folder, options = walk.folder, _options(walk)
    rate = gg.optim.cosine(1e-2, 9) if walk.flag("schedule", 0.3) else 1e-2
    step = gg.build(folder / "m.onnx", loss, gg.optim.adamw(rate), metrics=["accuracy"], seed=walk.seed, **options)
    fit: dict[str, Any] = {"epochs": epochs, "batch_size": batch, "progress": False}
    fit |= {"accumulate": 2} if options.get("accumulate") else {}
    if walk.flag("validation"):
        fit["validation"] = gg.image_folder(folder / "held")
        fit |= {"patience": 1} if walk.flag("patience") else {}
    threads = int(walk.choose("threads", [1, 3]))

    def data(count: int) -> Any:
        return gg.image_folder(folder / "train", augment=augment or None, threads=count, **normal)

    whole = gg.Trainer(step, device="cpu", seed=walk.seed)
    begun = whole.state_dict()
    whole.fit(data(threads), checkpoint=folder / "whole.ckpt", **fit)
    for name in begun:
        if options.get("freeze") and name.startswith("0."):
            walk.same(f"the frozen '{name}' is as before", whole.state_dict()[name], begun[name])
    steps = whole.progress.steps
    if steps > 1:
        at = int(walk.rng.integers(1, steps))
        part = gg.Trainer(step, device="cpu", seed=walk.seed)
        part.fit(data(2), checkpoint=folder / "part.ckpt", max_steps=at, **fit)
        resumed = gg.Trainer.resume(step, folder / "part.ckpt", device="cpu")
        resumed.fit(data(1), checkpoint=folder / "part.ckpt", **fit)
        walk.same(f"a run resumed at {at} of {steps} has the bits of one", resumed.state_dict(), whole.state_dict())
    return whole


def _shell(walk: Walk, loss: str, augment: list[str], normal: dict[str, Any], batch: int, epochs: int) -> gg.Trainer:
    folder, words = walk.folder, list[Any]()
    for one in augment:
        words += ["--augment", one]
    for name, values in normal.items():
        words += ["--image", f"{name}={values}"]
    for said, more in (
        ("ema", ["--ema", "0.9"]),
        ("accumulate", ["--accumulate", 2]),
        ("low", ["--precision", "bfloat16"]),
        ("freeze", ["--freeze", "0.*"]),
        ("validation", ["--validation", folder / "held"]),
    ):
        if walk.flag(said if said != "low" else "precision", 0.3):
            words += more
    words = [
        "train",
        folder / "m.onnx",
        "--data",
        folder / "train",
        "--loss",
        loss,
        "--epochs",
        epochs,
        "--batch-size",
        batch,
        "--metric",
        "accuracy",
        "--lr",
        "1e-2",
        "--seed",
        walk.seed,
        "--quiet",
        *words,
    ]
    walk.shell(*words, "--run", folder / "run")
    last, kept = gg.Trainer.resume(folder / "run", device="cpu"), gg.Trainer(folder / "run", device="cpu")
    steps = last.progress.steps
    if steps > 1:
        at = int(walk.rng.integers(1, steps))
        walk.shell(*words, "--run", folder / "again", "--max-steps", at)
        walk.shell("train", folder / "again", "--resume", "--no-force", "--max-steps", 10_000, "--quiet")
        resumed = gg.Trainer.resume(folder / "again", device="cpu")
        walk.same(f"a run resumed at {at} of {steps} has the bits of one", resumed.state_dict(), last.state_dict())
    said = walk.json("evaluate", folder / "run", "--data", folder / "held")["scores"]
    found = kept.evaluate(gg.image_folder(folder / "held"))
    walk.close("evaluate in the shell says what it says in Python", said["loss"], found["loss"], 1e-6)
    return kept


def _check_table(
    walk: Walk, trainer: gg.Trainer, files: list[Path], found: Array, labels: Array, tolerance: float
) -> None:
    """A table that names the same pictures, in another order, gives the same."""
    import pandas as pd

    order = walk.rng.permutation(len(files))
    names = [str(files[i].relative_to(walk.folder)) for i in order]
    frame = pd.DataFrame({"label": [files[i].parent.name for i in order], "path": names})
    frame.to_csv(walk.folder / "t.csv", index=False)
    part = sorted(walk.some(range(len(files)), 2))
    frame.iloc[part].to_csv(walk.folder / "part.csv", index=False)
    read = gg.image_table(walk.folder / "t.csv", "path", "label")
    walk.close("a table of the pictures gives what the folder gives", trainer.predict(read), found[order], tolerance)
    for name, rows in (("t.csv", order), ("part.csv", order[part])):
        loss = trainer.evaluate(gg.image_table(walk.folder / name, "path", "label"))["loss"]
        expected = entropies(found[rows], labels[rows]).mean()
        walk.close(f"{name} has the labels of the folders", loss, expected, max(tolerance, 1e-3))


def _check_csv(path: Path, walk: Walk, classes: list[str], files: list[Path], scores: Array) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = np.array(classes)[scores.argmax(axis=1)].tolist()
    walk.law(
        "the CSV calls classes by name", [row["class"] for row in rows] == names, [row["class"] for row in rows][:4]
    )
    walk.law(
        "the CSV names the files",
        [Path(row["file"]).name for row in rows] == [one.name for one in files],
        rows[0]["file"],
    )
    shares = [[float(row[f"probability[{name}]"]) for name in classes] for row in rows]
    walk.close("the CSV has the probability of each class", shares, softmax(scores), 1e-3)


def _check_bytes(walk: Walk, path: Path, files: list[Path], scores: Array) -> None:
    """The model that takes bytes gives nearly what the arrays give: pixels may differ by a level or two."""
    from PIL import Image

    from gradgraph.export import with_image_input

    onnx.save(with_image_input(path), walk.folder / "bytes.onnx")
    for at, one in enumerate(files):
        with Image.open(one) as picture:
            pixels = np.asarray(picture.convert("RGB"))[None]
        made = bare(walk.folder / "bytes.onnx", {"pixels": pixels})["scores"]
        walk.close("a model of bytes gives nearly the same", made[0], scores[at], 5e-2)
