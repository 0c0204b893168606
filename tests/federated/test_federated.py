"""examples/federated: clients train a step folder without gradgraph, and Flower averages what plain numpy would."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.frontend import nn
from tests.kit.npz import npz

ROOT = Path(__file__).parents[2]
HERE = ROOT / "examples" / "federated"
FLOWER = ROOT / ".venv-runtimes" / "federated" / "bin" / "python"
NODE = ROOT / "examples" / "node" / "node_modules" / "onnxruntime-node"
needs_flower = pytest.mark.skipif(not FLOWER.is_file(), reason="Flower is not installed: make federated")
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not NODE.is_dir(), reason="onnxruntime-node is not installed: make node"
)
ROWS = (10, 37)  # of two uneven clients


@pytest.fixture(scope="module", autouse=True)
def example() -> Any:
    """Its files import each other by their plain names, as Flower loads them."""
    sys.path.insert(0, str(HERE))
    yield
    sys.path.remove(str(HERE))


def built(optimizer: Any = None, norm: type = nn.BatchNorm1d, dropout: float = 0.1, **options: Any) -> gg.Step:
    gg.frontend.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), norm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
    model = gg.frontend.export(net, {"x": ("batch", 4)})
    return gg.build(model, "cross_entropy", optimizer or gg.optim.sgd(0.1, momentum=0.9), backend="web", **options)


def folder_of(folder: Path, step: gg.Step) -> Path:
    step.save(folder / "step")
    rng = np.random.default_rng(0)
    for name, rows in {"client-0": ROWS[0], "client-1": ROWS[1], "held-out": 20}.items():
        (folder / name).mkdir()
        x = rng.normal(size=(rows, 4)).astype(np.float32)
        np.save(folder / name / "x.npy", x)
        np.save(folder / name / "target.npy", x[:, :3].argmax(1))
    return folder


def by_hand(folder: Path, rounds: int) -> dict[str, np.ndarray]:
    """McMahan et al. 2017, algorithm 1, with all clients in each round."""
    from step_folder import StepFolder, batches_of

    step = StepFolder(folder / "step")
    weights = step.weights()
    for number in range(1, rounds + 1):
        found = [
            step.train(weights, step.data(folder / f"client-{c}"), batches_of(rows, 32, 1, (0, c, number)))[0]
            for c, rows in enumerate(ROWS)
        ]
        sums = {n: sum(np.float64(rows) * f[n] for rows, f in zip(ROWS, found, strict=True)) for n in weights}
        weights = {n: (total / sum(ROWS)).astype(weights[n].dtype) for n, total in sums.items()}
    return weights


def simulated(folder: Path, *options: str) -> dict[str, np.ndarray]:
    command = [str(FLOWER), str(HERE / "simulate.py"), str(folder), "--clients", "2", *options]
    home = folder / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR", "ORT", "RAY"))}
    environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(home.rglob("*")), "neither Flower nor onnxruntime keeps an identifier of the user"
    return npz(folder / "weights.npz")


def furthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert list(one) == list(other)
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_a_client_trains_as_a_trainer_does(tmp_path: Path) -> None:
    from step_folder import StepFolder, batches_of

    step = built()
    folder = folder_of(tmp_path, step)
    client = StepFolder(folder / "step")
    data, trainer = client.data(folder / "client-1"), gg.Trainer(step, device="cpu")
    batches = batches_of(ROWS[1], 8, 2, (3, 1, 4))
    for rows in batches:
        trainer.step({name: values[rows] for name, values in data.items()})
    after, _ = client.train(client.weights(), data, batches)
    state = trainer.state_dict()
    assert furthest(after, {name: np.asarray(state[name]) for name in after}) < 1e-5
    found, wanted = client.evaluate(after, data), trainer.evaluate(data)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert {"1.running_mean", "1.running_var"} <= set(after), "running statistics travel"


def test_the_proximal_term_is_the_gradient_of_its_square(tmp_path: Path) -> None:
    """Under SGD: w - rate * (gradient + mu * (w - w_received)), with the gradient of a run without the term."""
    from step_folder import StepFolder

    client = StepFolder(folder_of(tmp_path, built(gg.optim.sgd(0.5), nn.LayerNorm, dropout=0.0)) / "step")
    data, rows, start = client.data(tmp_path / "client-0"), np.arange(8), client.weights()
    first, _ = client.train(start, data, [rows], proximal=0.3)  # w is w_received: the term is zero
    assert furthest(first, client.train(start, data, [rows])[0]) == 0
    plain, _ = client.train(first, data, [rows])
    second, _ = client.train(start, data, [rows, rows], proximal=0.3)
    assert furthest(second, {n: plain[n] - 0.5 * 0.3 * (first[n] - start[n]) for n in start}) < 1e-6
    assert furthest(second, plain) > 1e-3


@pytest.mark.node
@needs_node
@pytest.mark.parametrize("proximal", [0.0, 0.3])
def test_a_client_in_node_trains_as_one_in_python(tmp_path: Path, proximal: float) -> None:
    from node_client import NodeClient
    from step_folder import StepFolder, batches_of

    folder = folder_of(tmp_path, built())
    client, node = StepFolder(folder / "step"), NodeClient(folder / "step", folder / "client-1")
    weights, batches = client.weights(), batches_of(ROWS[1], 8, 1, (0, 1, 1))
    for _ in range(2):  # a second round begins with what came, and nothing of the first
        wanted, loss = client.train(weights, client.data(folder / "client-1"), batches, proximal)
        found, told = node.train(weights, batches, proximal)
        assert furthest(wanted, found) < 1e-4
        assert told == pytest.approx(loss, rel=1e-4)
        weights = wanted
    node.close()


COPIES = {
    "ema": {"ema": 0.9},
    "lookahead": {"optimizer": gg.optim.lookahead(gg.optim.sgd(0.1))},
    "schedule-free": {"optimizer": gg.optim.schedule_free_sgd()},
}


@pytest.mark.parametrize("options", COPIES.values(), ids=COPIES)
def test_an_optimizer_with_weights_of_its_own_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    from step_folder import StepFolder, UnusableError

    with pytest.raises(UnusableError, match="is a copy of weights in the optimizer, which does not travel"):
        StepFolder(folder_of(tmp_path, built(**options)) / "step")


BAD_DATA = {
    "no file": (lambda path: path.unlink(), "is missing; each client has a file"),
    "text": (lambda path: path.write_text("x"), "is no array of numpy"),
    "other type": (lambda path: np.save(path, np.zeros((10, 4))), r"has float64\[10, 4\]; the step takes float32"),
    "other size": (lambda path: np.save(path, np.zeros((10, 5), np.float32)), r"has float32\[10, 5\]"),
    "other rows": (lambda path: np.save(path, np.zeros((9, 4), np.float32)), "differ in their rows"),
}


@pytest.mark.sweep(0.7)
@pytest.mark.parametrize(("spoil", "words"), BAD_DATA.values(), ids=BAD_DATA)
def test_data_that_do_not_fit_are_named(tmp_path: Path, spoil: Any, words: str) -> None:
    from step_folder import StepFolder, UnusableError

    folder = folder_of(tmp_path, built())
    spoil(folder / "client-0" / "x.npy")
    with pytest.raises(UnusableError, match=words) as raised:
        StepFolder(folder / "step").data(folder / "client-0")
    assert "\n" not in str(raised.value)


def test_weights_of_another_step_are_refused(tmp_path: Path) -> None:
    from step_folder import StepFolder, UnusableError

    step = StepFolder(folder_of(tmp_path, built()) / "step")
    with pytest.raises(UnusableError, match="give all clients the same step folder"):
        step.state_of({"other": np.zeros(3)})
    with pytest.raises(UnusableError, match=r"came as \(3,\)"):
        step.state_of({name: np.zeros(3) for name in step.weights()})
    with pytest.raises(UnusableError, match=r"name the folder that step\.save wrote"):
        StepFolder(tmp_path)


def test_the_split_is_uneven_and_whole() -> None:
    from tasks import by_dirichlet

    target = np.repeat(np.arange(10), 40)
    for alpha, uneven in ((0.1, True), (1000.0, False)):
        parts = by_dirichlet(target, 4, alpha, seed=0)
        assert sorted(np.concatenate(parts)) == list(range(400))
        shares = np.array([np.bincount(target[rows], minlength=10) for rows in parts])
        assert (shares.max() > 30) == uneven


@needs_flower
@pytest.mark.slow
def test_flower_averages_as_numpy_does(tmp_path: Path) -> None:
    """Weights and running statistics, by samples."""
    folder = folder_of(tmp_path, built())
    assert furthest(by_hand(folder, 3), simulated(folder, "--rounds", "3")) < 1e-5
    told = json.loads((folder / "rounds.json").read_text())
    assert [row["round"] for row in told["rounds"]] == [0, 1, 2, 3]
    assert told["bytes"] == 4 * (4 * 16 + 16 + 4 * 16 + 16 * 3 + 3)


@needs_flower
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 0, ["1 of 2 clients answered in a round; the mean is theirs", "the loss is not a number; lower the"]),
        (["--secure"], 1, ["error: no sum came of 1 of 1 rounds; --verbose says why"]),
    ],
    ids=["plain", "secure"],
)
def test_a_client_that_fails_is_heard_of(tmp_path: Path, options: list[str], code: int, words: list[str]) -> None:
    folder = folder_of(tmp_path, built())
    x = np.load(folder / "client-1" / "x.npy")
    np.save(folder / "client-1" / "x.npy", np.full_like(x, np.nan))
    command = [str(FLOWER), str(HERE / "simulate.py"), str(folder), "--clients", "2", "--rounds", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == code, done.stderr
    assert [line for line in words if line not in done.stderr] == []


@needs_flower
@pytest.mark.slow
def test_the_secure_sum_is_that_of_numpy(tmp_path: Path) -> None:
    """But for what whole numbers leave out: a step of 16 / 2**22, for each of two clients."""
    folder = folder_of(tmp_path, built(norm=nn.LayerNorm))
    assert 0 < furthest(by_hand(folder, 1), simulated(folder, "--rounds", "1", "--secure")) < 1e-4


ACCOUNT = """
import sys
sys.path.insert(0, sys.argv[1])
from flwr.serverapp import GaussianPrivacyEvent
from server_app import Plan, accountant_of
for noise, rounds in ((1.0, 1), (1.0, 10), (4.0, 100)):
    account = accountant_of(Plan(clients=10, delta=1e-5))
    account.compose(GaussianPrivacyEvent(noise, 10, 10), rounds)
    print(account.get_privacy_spent().epsilon)
"""


@needs_flower
def test_the_account_of_privacy_lies_between_the_exact_value_and_a_known_bound() -> None:
    """Balle and Wang 2018, theorem 8, is exact for a Gaussian; Mironov 2017, proposition 3, lies above it."""
    done = subprocess.run([str(FLOWER), "-c", ACCOUNT, str(HERE)], capture_output=True, text=True, check=True)
    for epsilon, (noise, rounds) in zip(map(float, done.stdout.split()), ((1, 1), (1, 10), (4, 100)), strict=True):
        assert exact(noise, rounds, 1e-5) < epsilon
        assert epsilon < rounds / (2 * noise**2) + math.sqrt(2 * rounds * math.log(1e5)) / noise


def exact(noise: float, rounds: int, delta: float) -> float:
    """The epsilon of ``rounds`` Gaussian mechanisms, which are one with ``noise / sqrt(rounds)``."""

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    mu = math.sqrt(rounds) / noise
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        leak = normal(mu / 2 - middle / mu) - math.exp(middle) * normal(-mu / 2 - middle / mu)
        low, high = (middle, high) if leak > delta else (low, middle)
    return high


BAD_PLANS = {
    "strategy": (["--strategy", "sum"], "there is no strategy 'sum'; choose one of fedavg"),
    "rounds": (["--rounds", "0"], "rounds is 0; give 1 or more"),
    "noise and strategy": (["--noise", "1", "--strategy", "fedadam"], "give --strategy fedavg with --noise"),
    "secure noise": (["--secure", "--noise", "1"], "give --secure alone"),
    "clip": (["--clip", "0"], "clip above 0"),
    "no folder": ([], "has no manifest.json; name the folder that step.save wrote"),
}


@needs_flower
@pytest.mark.parametrize(("options", "words"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_cannot_be_is_one_sentence(tmp_path: Path, options: list[str], words: str) -> None:
    command = [str(FLOWER), str(HERE / "simulate.py"), str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
