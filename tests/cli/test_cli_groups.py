"""--group, --no-decay, --layer-decay."""

from __future__ import annotations

import json

import onnx
import pytest

from tests.kit.command_line import Cli


def test_groups_are_handed_on(cli: Cli) -> None:
    words = ["--group", "last.*:lr=1e-2,betas=[0.8,0.9]", "--group", "first.bias:lr=cosine(0.1, 10)",
             "--no-decay", "norm_and_bias", "--layer-decay", "0.5"]  # fmt: skip
    ran = cli("build", "model.onnx", "--json", *words)
    assert ran.code == 0, ran.err
    arguments = json.loads(ran.out)["manifest"]["optimizer"]["arguments"]
    assert arguments["groups"] == {
        "last.*": {"lr": 0.01, "betas": [0.8, 0.9]},
        "first.bias": {"lr": {"schedule": "cosine", "lr": 0.1, "total_steps": 10, "end": 0.0}},
    }
    assert arguments["no_decay"] == ["norm_and_bias"] and arguments["layer_decay"] == 0.5


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--group", "last.*"], 2, "should be GLOB:KEY=VALUE, such as head.*:lr=1e-3"),
        (["--group", "lr=0.1"], 2, "should be GLOB:KEY=VALUE"),
        (
            ["--group", "nothing.*:lr=0.1"],
            1,
            "'nothing.*', a group of the optimizer, matches no trained weight",
        ),
        (["--group", "last.*:weight_decay=no"], 1, "weight_decay is 'no'; it should be a number"),
        (["--group", "last.*:lr=fast"], 1, "there is no schedule 'fast'"),
        (["--group", "last.*:rate=0.1"], 1, "sets 'rate', which adamw does not have"),
        (["--no-decay", "nothing"], 1, "'nothing', in no_decay, matches no trained weight"),
        (["--layer-decay", "2"], 1, "layer_decay must be between 0 and 1"),
    ],
)
def test_a_slip_is_named(cli: Cli, words: list[str], code: int, says: str) -> None:
    ran = cli("build", "model.onnx", *words)
    assert ran.code == code and says in ran.err, ran.err


def test_clipping_and_averages_are_handed_on(cli: Cli) -> None:
    ran = cli("build", "model.onnx", "--json", "--ema", "0.9", "--clip-norm", "1.0", "--clip-units", "0.01")
    assert ran.code == 0, ran.err
    manifest = json.loads(ran.out)["manifest"]
    parts = manifest["optimizer"]["arguments"]["optimizer"]["arguments"]["parts"]
    assert [part["name"] for part in parts] == ["clip_by_unit_norm", "clip_by_global_norm", "adamw"]
    assert manifest["averages"]["last.bias"] == "last.bias.ema"
    exported = [cli("export", "step", "-o", "m.onnx", *words).code for words in ([], ["--not-averaged"])]
    assert exported == [0, 0]


def test_lookahead_goes_around_sam(cli: Cli) -> None:
    words = ["--json", "--lookahead", "3", "--sam", "0.1", "--clip-norm", "1.0", "--ema", "0.9"]
    ran = cli("build", "model.onnx", *words)
    assert ran.code == 0, ran.err
    manifest = json.loads(ran.out)["manifest"]
    around, given = [], manifest["optimizer"]
    while "optimizer" in given["arguments"]:
        around.append((given["name"], given["arguments"].get("k", given["arguments"].get("rho"))))
        given = given["arguments"]["optimizer"]
    assert around == [("ema", None), ("lookahead", 3), ("sam", 0.1)] and given["name"] == "chain"
    assert "last.bias.slow" in [s["name"] for s in manifest["state"]]
    assert "rho must" in cli("build", "model.onnx", "--sam", "-1").err


def test_accumulation_is_handed_on(cli: Cli) -> None:
    words = ["--data", "train.npz", "--batch-size", "8", "--schedule", "cosine", "--epochs", "2", "--json"]
    ran = cli("train", "model.onnx", *words, "--accumulate", "4", "-o", "step")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["steps"] == 24
    assert cli("train", "step", "--data", "train.npz", "--accumulate", "2").code == 0
    assert cli("build", "model.onnx", "--accumulate", "-o", "other").code == 0
    cli("build", "model.onnx", "-o", "plain")
    assert "build it with --accumulate" in cli("train", "plain", "--data", "train.npz", "--accumulate", "2").err


def test_weights_are_pruned(cli: Cli) -> None:
    words = ["--sparsity", "0.5", "--sparsity-option", "end=2", "--sparsity-option", "every=1"]
    ran = cli("train", "model.onnx", "--data", "train.npz", "--epochs", "2", *words, "--export", "sparse.onnx")
    assert ran.code == 0, ran.err
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load("sparse.onnx").graph.initializer}
    assert [(weights[f"{n}.weight"] == 0).mean() for n in ("first", "last")] == [0.5, 0.5]
    assert cli("build", "model.onnx", "--sparsity", "2:4", "--json").code == 0
    for wrong, says in (
        (["--sparsity", "all"], "a share above 0 and below 1"),
        (["--sparsity-option", "end=2"], "--sparsity-option requires --sparsity"),
        (["--sparsity", "0.5", "--sparsity-option", "until=2"], "pass begin, end"),
    ):
        assert says in cli("build", "model.onnx", *wrong).err
