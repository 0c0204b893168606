"""Walks with tables of texts: padded by length, classes by name, resumed, and exported with a tokenizer beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pandas as pd

import gradgraph as gg
from tests.data_walks.random_walk import ODD_CLASSES, Array, Walk, bare, classifier_scores, entropies, softmax
from tests.kit import tiny_bert

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl")


def _written(frame: pd.DataFrame, path: Any) -> Any:
    if path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    return path


def _encoded(texts: list[str], tokenizer: Any) -> dict[str, Array]:
    """What the package tokenizers itself makes of the texts, padded to the longest."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(tokenizer))
    made.enable_padding(pad_id=0)
    found = made.encode_batch(texts)
    return {
        "input_ids": np.array([one.ids for one in found]),
        "attention_mask": np.array([one.attention_mask for one in found]),
        "token_type_ids": np.array([one.type_ids for one in found]),
    }


def walk_texts(walk: Walk) -> None:
    folder = walk.folder
    tokenizer = tiny_bert.tokenizer(folder / "tokenizer.json")
    rows = int(walk.choose("rows", [17, 24, 25]))
    texts, _ = tiny_bert.sentences(rows + 12, walk.seed)
    kind = walk.choose("labels", ["text", "numbers", "truth"])
    named: list[Any] = {"text": walk.some(ODD_CLASSES, 3), "numbers": [1, 3, 5], "truth": ["True", "False", "maybe"]}[
        kind
    ]
    walk.chosen.append(f"classes={named}")
    labels = [named[i] for i in walk.rng.integers(0, len(named), rows + 12)]
    labels[: len(named)] = named
    frame = pd.DataFrame({"number": range(rows + 12), "a review": texts, "about": labels})
    suffix = walk.choose("source", SUFFIXES)
    train, held = frame[:rows], frame[rows:]
    if walk.flag("a class is missing in validation"):
        held = held[held.about != named[0]]
    onnx.save(tiny_bert.classifier(3), folder / "bert.onnx")
    _written(train, folder / f"train{suffix}")
    _written(held, folder / f"held{suffix}")
    words: list[Any] = [
        "--data",
        folder / f"train{suffix}",
        "--tokenizer",
        tokenizer,
        "--text",
        "text=a review",
        "--target",
        "about",
        "--loss",
        "cross_entropy",
        "--metric",
        "accuracy",
        "--lr",
        "5e-3",
        "--epochs",
        walk.choose("epochs", [1, 2]),
        "--batch-size",
        walk.choose("batch", [5, 8]),
        "--seed",
        walk.seed,
        "--quiet",
    ]
    for said, more in (
        ("ema", ["--ema", "0.9"]),
        ("accumulate", ["--accumulate", 2]),
        ("freeze", ["--freeze", "head.*"]),
        ("validation", ["--validation", folder / f"held{suffix}"]),
    ):
        if walk.flag(said, 0.35):
            words += more
    if "--validation" in words:
        words += ["--patience", 1]
    walk.shell("train", folder / "bert.onnx", *words, "--run", folder / "run")
    last, trainer = gg.Trainer.resume(folder / "run", device="cpu"), gg.Trainer(folder / "run", device="cpu")
    steps = last.progress.steps
    if steps > 1:
        at = int(walk.rng.integers(1, steps))
        walk.shell("train", folder / "bert.onnx", *words, "--run", folder / "again", "--max-steps", at)
        walk.shell("train", folder / "bert.onnx", *words, "--run", folder / "again", "--resume")
        resumed = gg.Trainer.resume(folder / "again", device="cpu")
        walk.same(f"a run resumed at {at} of {steps} has the bits of one", resumed.state_dict(), last.state_dict())
    classes = [str(one) for one in sorted(named)]
    walk.law(
        "classes have the names of the labels", list(trainer.names.classes["target"]) == classes, trainer.names.classes
    )
    made = bare(folder / "run" / "trained.onnx", _encoded(held["a review"].tolist(), tokenizer))
    scores = next(iter(made.values()))
    numbers = np.array([classes.index(str(one)) for one in held.about])
    said = walk.json("evaluate", folder / "run", "--data", folder / f"held{suffix}")["scores"]
    walk.close("evaluate says the loss", said["loss"], entropies(scores, numbers).mean(), 1e-3)
    walk.close("evaluate says the accuracy", said["accuracy"], classifier_scores(scores, numbers)["accuracy"], 1e-5)
    order = walk.rng.permutation(len(held))
    part = held.iloc[order[:2]][walk.some(list(held.columns), 3)]
    _written(part, folder / f"part{suffix}")
    said = walk.json("evaluate", folder / "run", "--data", folder / f"part{suffix}")["scores"]
    walk.close(
        "some rows have the loss that they have among all",
        said["loss"],
        entropies(scores[order[:2]], numbers[order[:2]]).mean(),
        1e-3,
    )
    new = held.drop(columns="about")[["a review", "number"]]
    _written(new, folder / f"new{suffix}")
    walk.shell(
        "predict", folder / "run" / "trained.onnx", "--data", folder / f"new{suffix}", "-o", folder / "p.csv", "--quiet"
    )
    found = pd.read_csv(folder / "p.csv", dtype={"class": str}, keep_default_na=False)
    walk.law(
        "the CSV calls classes by name",
        found["class"].tolist() == np.array(classes)[scores.argmax(axis=1)].tolist(),
        found["class"].tolist()[:3],
    )
    shares = found[[f"probability[{name}]" for name in classes]].to_numpy()
    walk.close("the CSV has the probability of each class", shares, softmax(scores), 2e-3)
    if walk.flag("quantize", 0.3):
        walk.shell(
            "export",
            folder / "run",
            "--quantize",
            "int8",
            "--calibration",
            folder / f"train{suffix}",
            "-o",
            folder / "int8.onnx",
            "--quiet",
        )
        walk.shell(
            "predict", folder / "int8.onnx", "--data", folder / f"new{suffix}", "-o", folder / "q.csv", "--quiet"
        )
    if walk.flag("calibrate", 0.3):
        walk.shell(
            "export", folder / "run", "--calibrate", folder / f"held{suffix}", "-o", folder / "c.onnx", "--quiet"
        )
        divided = next(iter(bare(folder / "c.onnx", _encoded(held["a review"].tolist(), tokenizer)).values()))
        walk.law("calibrated classes are as before", np.array_equal(divided.argmax(axis=1), scores.argmax(axis=1)))
    _written(held.assign(about="nobody"), folder / f"strange{suffix}")
    walk.refused(
        "a class that is new is refused",
        lambda: walk.shell("evaluate", folder / "run", "--data", folder / f"strange{suffix}"),
        "nobody",
    )
    _written(held.rename(columns={"a review": "a reveiw"}), folder / f"odd{suffix}")
    walk.refused(
        "a misspelt column is refused",
        lambda: walk.shell("evaluate", folder / "run", "--data", folder / f"odd{suffix}"),
        "a review",
    )
