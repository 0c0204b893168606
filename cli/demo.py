"""``gradgraph demo``: train a network, defined in Python, by the commands of gradgraph."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.errors import GradgraphError, OutputError, shown

EPOCHS = 25
ACCURACY = 0.98  # the required accuracy on held-out digits after the default number of epochs


@click.command("demo", cls=Command)
@click.option("--out", type=PATH, default="demo", show_default=True, help="Output folder.")
@click.option("--epochs", type=click.IntRange(min=1), default=EPOCHS, show_default=True, help="Number of epochs.")
def command(out: Path, epochs: int) -> None:
    """Train a small CNN on scikit-learn's handwritten digits, from scratch to exported model.

    Examples:
      gradgraph demo
      gradgraph demo --out /tmp/digits --epochs 5

    The network is written in Python and exported to digits.onnx; after that, the demo runs the commands that it
    prints. The trained model must reach an accuracy of 98 % on held-out digits, and the same in plain onnxruntime.
    """
    from gradgraph.cli import digits
    from gradgraph.cli.app import cli
    from gradgraph.files.models import save_model

    digits.check_packages()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot create the folder '{shown(out)}' ({error.strerror}); choose another --out"
        ) from error
    data, held_out = digits.split()
    digits.save_arrays(out / "train.npz", data)
    digits.save_arrays(out / "validation.npz", held_out)
    save_model(digits.network(seed=0), out / "digits.onnx")
    count = f"{len(data['x'])} + {len(held_out['x'])} images"
    output.say(f"\nwrote {out / 'digits.onnx'} and {count}; you can also run the following commands by hand:")
    began = time.monotonic()
    for words in commands(out, epochs):  # printed and run as if typed
        output.say(f"\n$ {shlex.join(['gradgraph', *words])}")
        output.talk.arguments = words
        cli.main(args=list(words), prog_name="gradgraph", standalone_mode=False)
    output.say(f"\nbuilt, trained and exported in {time.monotonic() - began:.0f} s")
    _verify(out, held_out, required=ACCURACY if epochs >= EPOCHS else 0.0)


def commands(out: Path, epochs: int) -> list[list[str]]:
    """Return the command lines that train ``out/digits.onnx``, without the leading ``gradgraph``."""
    step, run = str(out / "step"), ["--checkpoint", str(out / "run.ckpt")]
    recipe = ["--loss", "cross_entropy", "--optimizer", "adamw", "--lr", "0.001"]
    data = ["--data", str(out / "train.npz"), "--validation", str(out / "validation.npz")]
    return [
        ["build", str(out / "digits.onnx"), *recipe, "-o", step, "--force"],
        ["train", step, *data, "--epochs", str(epochs), "--batch-size", "64", *run, "--force"],
        ["export", step, *run, "-o", str(out / "trained.onnx")],
    ]


def _verify(out: Path, held_out: dict[str, Any], required: float) -> None:
    """Check that trained.onnx in onnxruntime is as accurate as the trainer, and as ``required``; draw the pictures."""
    from gradgraph.cli.digits import draw_predictions
    from gradgraph.runtime.trainer import Trainer

    trainer = Trainer.resume(out / "step", out / "run.ckpt")
    expected = trainer.evaluate(held_out)["accuracy"]
    untrained, trained = (_predictions(out / name, held_out["x"]) for name in ("digits.onnx", "trained.onnx"))
    hits = trained == held_out["target"]
    trainer.history.plot(out / "loss.png")
    draw_predictions(out / "predictions.png", held_out["x"], untrained, trained, held_out["target"])
    output.emit(f"held-out accuracy in training       {expected:.2%}")
    output.emit(f"held-out accuracy in onnxruntime    {hits.mean():.2%} ({hits.sum()} of {len(hits)})")
    if abs(hits.mean() - expected) > 0.5 / len(hits):
        raise GradgraphError(
            "the exported model's accuracy differs from the trained model's, so the export is wrong; please report it "
            "with the output of `gradgraph env`"
        )
    if hits.mean() < required:
        raise GradgraphError(
            f"the accuracy on held-out digits is {hits.mean():.1%}, below the required {required:.0%}; raise --epochs"
        )
    output.say(f"see {out / 'loss.png'} and {out / 'predictions.png'}")


def _predictions(model: Path, images: Any) -> Any:
    """Return the class that plain onnxruntime predicts for each image."""
    import onnxruntime

    from gradgraph.runtime.execution.session import results

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return results(session, ["logits"], {"x": images})["logits"].argmax(axis=1)
