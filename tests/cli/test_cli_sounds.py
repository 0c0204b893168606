"""Sounds from the shell: a folder of WAV files in, and the names of classes out."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import onnx
import pytest

import gradgraph as gg
from gradgraph.frontend import Input, export, manual_seed, nn
from tests.kit import wav_writing
from tests.kit.command_line import Cli


class Loudest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, mel: gg.frontend.Tensor) -> gg.frontend.Tensor:
        return self.head(mel.mean(dim=2))


@pytest.fixture
def sounds(folder: Path) -> Path:
    manual_seed(0)
    net = export(Loudest(), {"mel": Input(("rows", 16, "frames"))}, outputs=["logits"])
    onnx.save(gg.sound.log_mel(net, sample_rate=8000, n_fft=128, hop=64, mels=16), folder / "net.onnx")
    wav_writing.sounds(folder / "train", 6)
    wav_writing.sounds(folder / "test", 3, seed=1)
    rows = [f"test/{kind}/{i}.wav,{kind}" for i in range(3) for kind in ("tone", "chirp", "noise")]
    (folder / "test.csv").write_text("\n".join(["file,kind", *rows]))
    return folder


TRAIN = ("train", "net.onnx", "--loss", "cross_entropy", "--metric", "accuracy", "--epochs", "2", "--data", "train")


def test_a_folder_of_sounds_trains_and_predicts(sounds: Path, cli: Cli) -> None:
    ran = cli(*TRAIN, "--validation", "test", "--sound", "seconds=0.5", "--run", "run", "--lr", "0.05")
    assert ran.code == 0, ran.err
    pytest.importorskip("pandas", reason="an extra: onnx-gradgraph[tables]")
    outs = [cli("predict", "run/trained.onnx", "--data", data, "-o", "-").out for data in ("test", "test.csv")]
    folder, table = ({row["file"]: row for row in csv.DictReader(io.StringIO(out))} for out in outs)
    assert len(folder) == 9 and folder == table
    assert set(next(iter(folder.values()))) >= {
        "class",
        "probability[chirp]",
        "probability[noise]",
        "probability[tone]",
    }
    found = [cli("evaluate", "run/step", "--data", data).out for data in ("test", "test.csv")]
    assert "accuracy" in found[0] and found[0] == found[1]


WRONG = [
    ((*TRAIN,), "pass it: --sound seconds=1"),
    ((*TRAIN, "--sound", "second=1"), "--sound has no argument 'second'; did you mean 'seconds'"),
    ((*TRAIN[:-1], "train.npz", "--sound", "seconds=1"), "contains no WAV files"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_does_not_fit_is_said(words: tuple[str, ...], message: str, sounds: Path, cli: Cli) -> None:
    ran = cli(*words)
    assert ran.code == 1 and message in ran.err
