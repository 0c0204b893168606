"""The benchmark's own logic: counting, comparing, taking turns, reporting. Nothing is timed here."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import cores, environments, page, peer_processes, printed_table, profiling
from benchmarks.flops import forward_flops
from benchmarks.measure import TRIES, Plan, _turn, disagreement, summary
from benchmarks.peer_processes import Process
from benchmarks.results import Result, load, save
from benchmarks.roster import LESS_EXACT, PEERS, REAL_OURS, REAL_PEERS, YARDSTICK_FLOPS, Entry
from benchmarks.run import parsed as parsed_arguments
from benchmarks.run import runs
from benchmarks.worker import one_line
from benchmarks.workloads import ALL, REAL, WORKLOADS
from tests.kit.small_models import parsed

# --- arithmetic ----------------------------------------------------------------------------------------------

FLOPS = {
    "MatMul": ("(float[5,2,3] x, float[3,4] w) => (float[5,2,4] y) { y = MatMul(x, w) }", 2 * 5 * 2 * 3 * 4),
    "Gemm": ("(float[3,2] x, float[3,4] w) => (float[2,4] y) { y = Gemm<transA = 1>(x, w) }", 2 * 2 * 3 * 4),
    "Conv": (
        "(float[1,4,5,5] x, float[6,2,3,3] w) => (float[1,6,3,3] y) { y = Conv<group = 2>(x, w) }",
        2 * (6 * 9) * (2 * 9),
    ),
    "ConvTranspose": (
        "(float[1,4,5,5] x, float[4,3,2,2] w) => (float[1,3,10,10] y) { y = ConvTranspose<strides = [2, 2]>(x, w) }",
        2 * (4 * 25) * (3 * 4),
    ),
    "LSTM": (
        "(float[7,2,3] x, float[1,20,3] w, float[1,20,5] r) => (float[7,1,2,5] y) "
        "{ y = LSTM<hidden_size = 5>(x, w, r) }",
        2 * 7 * 2 * 20 * (3 + 5),
    ),
    "Relu": ("(float[5] x) => (float[5] y) { y = Relu(x) }", 0),
}


@pytest.mark.parametrize("op", FLOPS)
def test_flops(op: str) -> None:
    graph, expected = FLOPS[op]
    assert forward_flops(parsed(graph)) == expected


def test_flops_of_unknown_sizes_are_refused() -> None:
    with pytest.raises(KeyError):
        forward_flops(parsed("(float[n,3] x, float[3,4] w) => (float[n,4] y) { y = MatMul(x, w) }"))


# --- comparing losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([7.0, 6.9, 6.8], None),
        ([7.0001, 6.9001, 6.8001], None),
        ([7.0, 6.905, 6.81], None),
        ([7.01, 6.9, 6.8], 0),  # another network, or another mode
        ([7.0, 7.0, 7.0], 1),  # nothing is trained
        ([7.0, 6.9, 6.85], 2),
        ([7.0, float("nan"), 6.8], 1),
        ([float("nan")] * 3, 0),
    ],
)
def test_disagreement(losses: list[float], expected: int | None) -> None:
    assert disagreement(losses, [7.0, 6.9, 6.8]) == expected


def test_less_exact_peers_may_differ_more_and_take_part_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    medium = LESS_EXACT["torch-medium"]
    assert disagreement([7.01, 6.9, 6.8], [7.0, 6.9, 6.8], medium.first_loss) is None
    assert disagreement([7.1, 6.9, 6.8], [7.0, 6.9, 6.8], medium.first_loss) == 0
    assert {e.module: e.mode for e in LESS_EXACT.values()} == {"gradgraph_native_step": "high", "torch_step": "medium"}
    monkeypatch.setattr(sys, "argv", ["run"])
    assert parsed_arguments().peers == list(PEERS) and not set(LESS_EXACT) & set(PEERS)
    monkeypatch.setattr(sys, "argv", ["run", "--peers", ",".join(LESS_EXACT)])
    assert parsed_arguments().peers == list(LESS_EXACT)


def test_summary_is_the_median_and_the_quartiles() -> None:
    assert summary([3.0, 1.0, 2.0]) == {"step": 2.0, "quartiles": [1.0, 3.0], "steps": 3}
    assert summary([4.0]) == {"step": 4.0, "quartiles": [4.0, 4.0], "steps": 1}


# --- cores ---------------------------------------------------------------------------------------------------


def scripted(answers: list[bool], monkeypatch: pytest.MonkeyPatch, longest: float = 60.0) -> cores.Cores:
    """Return cores that are near or not as told, the last answer again and again."""
    monkeypatch.setattr(cores, "PAUSE", 0.0)
    monkeypatch.setattr(cores, "LONGEST", longest)
    monkeypatch.setattr(cores.Cores, "are_near", lambda self: answers.pop(0) if len(answers) > 1 else answers[0])
    return cores.Cores(None)


class Turns:
    """A process that counts its turns."""

    def __init__(self, reply: dict[str, object]) -> None:
        self.reply, self.count = reply, 0

    def ask(self, do: str, limit: float, **request: object) -> dict[str, object]:
        self.count += 1
        return self.reply


@pytest.mark.parametrize(
    ("answers", "turns"),
    [
        ([True, True], 1),
        ([False, False, True, True], 1),  # waits before the turn
        ([True, False, True, True], 2),  # apart at its end
        ([True, False] * TRIES + [True], TRIES),
    ],
    ids=str,
)
def test_a_turn_is_repeated_if_the_cores_end_apart(
    answers: list[bool], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Turns({"seconds": [1.0]})
    reply = _turn(process, 1, Plan(), scripted(answers, monkeypatch))  # type: ignore[arg-type]
    assert reply == process.reply and process.count == turns


def test_a_dead_process_has_no_further_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Turns({"cannot": "it ended"})
    assert _turn(process, 1, Plan(), scripted([True, False, True], monkeypatch)) == process.reply  # type: ignore[arg-type]
    assert process.count == 1


def test_cores_that_never_share_a_cache_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    never = scripted([False], monkeypatch, longest=0.0)
    never.wait()
    assert not never.waits
    never.wait()


def test_without_a_compiler_cores_count_as_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    found = cores.Cores.compiled(tmp_path)
    assert found.program is None and found.are_near()


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="pins threads to cores, by a C program")
def test_a_round_trip_between_cores_takes_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cores.Cores.compiled(tmp_path)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process has a single core")
    answers = []
    for limit in (0.0, 1e12):
        monkeypatch.setattr(cores, "NEAR", limit)
        answers.append(found.are_near())
    assert answers == [False, True]


# --- processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Starts a script in a worker's place."""
    started = []

    def start(script: str) -> Process:
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        (tmp_path / "benchmarks" / "__init__.py").touch()
        (tmp_path / "benchmarks" / "worker.py").write_text(script)
        monkeypatch.setattr(peer_processes, "ROOT", tmp_path)
        started.append(Process(Entry("anything"), sys.executable))
        return started[-1]

    yield start
    for process in started:
        process.end()


def test_process_answers(worker) -> None:
    process = worker("import json\nwhile True: print(json.dumps({'got': json.loads(input())}), flush=True)")
    assert process.ask("time", 30, steps=3) == {"got": {"do": "time", "steps": 3}}
    assert process.ask("memory", 30) == {"got": {"do": "memory"}}  # it was stopped in between


def test_process_that_dies_says_why(worker) -> None:
    process = worker("raise SystemExit('no such device')")
    assert process.ask("load", 30) == {"cannot": "the process ended (exit code 1): no such device"}
    assert "ended" in process.ask("load", 30)["cannot"]


def test_process_that_hangs_is_ended(worker) -> None:
    process = worker("import time\ntime.sleep(60)")
    assert process.ask("load", 0.5) == {"cannot": "took more than 0.5 s to load"}
    assert process.process.poll() is not None


def test_a_real_worker_tells_why_it_cannot() -> None:
    process = Process(Entry("matmul_step"), sys.executable)
    try:
        assert process.ask("load", 60, workload="mlp", folder="", nonsense=1)["cannot"].startswith("TypeError")
        assert process.ask("time", 60, steps=1)["cannot"].startswith("AttributeError")
    finally:
        process.end()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process that its parent has ended")
def test_stopped_workers_end_with_their_driver() -> None:
    driver = """
import os, sys
from benchmarks.peer_processes import Process
from benchmarks.roster import YARDSTICK
process = Process(YARDSTICK, sys.executable)
process.ask("memory", 60)
print(process.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", driver], cwd=peer_processes.ROOT, capture_output=True, text=True, check=False
    )
    state = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_reasons_are_one_short_line() -> None:
    text = "/src/module.cc:312 f(int) [ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : no\nkernel"
    assert one_line(RuntimeError(text)) == "RuntimeError: NOT_IMPLEMENTED : no kernel"
    assert len(one_line(RuntimeError("word " * 200))) < 200


# --- environments --------------------------------------------------------------------------------------------


def test_environments(monkeypatch, tmp_path) -> None:
    """Made once; made anew when what a peer needs has changed; pip's complaint is the reason."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        (tmp_path / ".venv-bench" / "jax").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments, "FOLDER", tmp_path / ".venv-bench")
    monkeypatch.setattr(environments, "_run", run)
    assert environments.interpreter("torch") == sys.executable
    environments.interpreter("jax")
    environments.interpreter("jax")
    assert len(commands) == 2
    (tmp_path / ".venv-bench" / "jax" / "installed").write_text("older")
    environments.interpreter("jax")
    assert len(commands) == 4


def test_what_cannot_be_installed_is_said() -> None:
    with pytest.raises(environments.InstallError, match="no such thing"):
        environments._run([sys.executable, "-c", "raise SystemExit('no such thing')"])


# --- profile -------------------------------------------------------------------------------------------------


def event(name: str, start: int, length: int, op: str = "Add") -> dict[str, object]:
    about = {"op_name": op, "provider": "CPUExecutionProvider"}
    return {"cat": "Node", "name": f"{name}_kernel_time", "tid": 1, "ts": start, "dur": length, "args": about}


def run_event(start: int) -> dict[str, object]:
    return {"cat": "Session", "name": "model_run", "tid": 1, "ts": start, "dur": 1000}


def test_profile_counts_own_time_of_the_last_runs() -> None:
    one_run = [run_event(0), event("first", 10, 500)]
    another = [run_event(2000), event("loop", 2010, 100, "Scan"), event("body", 2020, 30), event("body", 2050, 40)]
    found = profiling.summary([*one_run, *another, event("after", 2110, 5)], 1)
    assert found.total == pytest.approx(105e-6)
    assert found.kernels == 4
    assert dict(found.parts["operator"]) == pytest.approx({"Add": 75e-6, "Scan": 30e-6})
    assert found.providers == {"CPUExecutionProvider": ["loop", "body", "after"]}
    assert "Scan" in str(found)


def test_profile_gives_the_median_of_runs() -> None:
    events = [
        e for i, length in enumerate((5, 900, 7)) for e in (run_event(2000 * i), event("add", 2000 * i + 1, length))
    ]
    assert profiling.summary(events, 3).total == pytest.approx(7e-6)


def test_profile_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="1 runs"):
        profiling.summary([run_event(0)], 2)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("_inlfunc_ConvGradWeight_token_3_Gather", "ConvGradWeight"),
        ("grad/node_conv2d/ConvGradInput/Transpose", "ConvGradInput"),
        ("grad/loss/Div", "grad"),
        ("update/Add_9", "update"),
        ("loss/Log", "loss"),
        ("node_conv2d_1", "forward"),
        ("layers.0/attention", "forward"),
    ],
)
def test_scopes(node: str, expected: str) -> None:
    assert profiling.scope(node) == expected


# --- results -------------------------------------------------------------------------------------------------

SETUP = {
    "date": "2026-01-02",
    "machine": "a processor, 2 cores, Linux",
    "device": "cpu",
    "threads": 2,
    "optimizer": "sgd",
    "dynamic": False,
    "rounds": 3,
}


def timed(step: float, megabytes: float) -> dict[str, object]:
    return {
        "step": step,
        "first_step": step + 1.0,
        "build": 0.5,
        "above_libraries": megabytes * 1e6,
        "versions": "it 1.0",
    }


@pytest.fixture
def result() -> Result:
    rows = {
        "gradgraph": timed(0.010, 30) | {"kernels": [["Gemm in update", 0.4]]},
        "gradgraph-native": timed(0.008, 29),
        "torch": timed(0.025, 90),
        "torch-compile": timed(0.020, 100),
        "onnxsim": {"cannot": "no rule for LSTM"},
        "matmul": timed(YARDSTICK_FLOPS / 400e9, 1),
    }
    return Result("mlp", dict(SETUP), {"flops": 1e9, "parameters": 1}, rows)


def test_figures(result: Result) -> None:
    assert result.ratio(result.torch) == pytest.approx(0.5)
    assert result.gflops == pytest.approx(400)
    assert result.floor == pytest.approx(3 * 1e9 / 400e9)
    assert result.torch_memory == pytest.approx(90)
    assert result.session("gradgraph") == pytest.approx(1.0)
    assert result.ratio(result.step("onnxsim")) is None
    assert result.step("jax") is None


def test_table(result: Result) -> None:
    peers = ["gradgraph", "torch", "onnxsim", "jax"]
    text = printed_table.lines(result, peers)
    assert text.splitlines()[0].startswith(WORKLOADS["mlp"].title)
    assert text.split("128")[1].split()[:6] == ["10.00", "25.00", "cannot", "0.50", "-", "1.33"]
    assert "onnxsim cannot: no rule for LSTM" in text
    assert len(set(map(len, [*printed_table.header(peers).splitlines(), text.splitlines()[0]]))) == 1


def test_page_has_ratios_and_operators(result: Result) -> None:
    text = page.page([result])
    assert "| **0.50** | **0.40** | - | **0.33** | 0.38 | 1.33 |" in text
    assert "- MLP 784-512-512-10, batch 128: Gemm in update 40 %\n" in text
    assert "- MLP 784-512-512-10, batch 128, onnxsim: no rule for LSTM" in text
    assert all(len(line) <= 120 for line in page.METHOD.splitlines())


def test_page_leaves_out_other_setups(result: Result) -> None:
    result.setup["dynamic"] = True
    assert "MLP" not in page.page([result])


def test_rows_of_another_optimizer_say_so(result: Result, tmp_path) -> None:
    """Rows of AdamW come after those of SGD."""
    adamw = Result("mlp", {**SETUP, "optimizer": "adamw"}, result.facts, result.rows)
    merged = save(tmp_path / "performance.json", [adamw, result])
    assert [r.name for r in merged] == ["mlp", "mlp, AdamW"]
    text = page.page(merged)
    assert "| MLP 784-512-512-10, batch 128, AdamW | **0.50** | **0.40** | - | **0.33** |" in text


def test_what_is_timed_with_adamw() -> None:
    asked = argparse.Namespace(workloads=["mlp", "cnn"], optimizer=None)
    assert [(n, a.optimizer) for n, a in runs(asked)] == [("mlp", "sgd"), ("cnn", "sgd"), ("mlp", "adamw")]
    asked.optimizer = "adamw"
    assert [(n, a.optimizer) for n, a in runs(asked)] == [("mlp", "adamw"), ("cnn", "adamw")]


def test_a_new_result_replaces_the_old_one(result: Result, tmp_path) -> None:
    path = tmp_path / "performance.json"
    assert load(path) == []
    other = Result("cnn", dict(SETUP), result.facts, result.rows)
    save(path, [other, result])
    newer = Result("mlp", {**SETUP, "date": "2026-02-03"}, result.facts, result.rows)
    merged = save(path, [newer])
    assert [(r.workload, r.setup["date"]) for r in merged] == [("mlp", "2026-02-03"), ("cnn", "2026-01-02")]
    assert load(path) == merged


@pytest.mark.parametrize("other", [{"machine": "another processor"}, {"threads": 1}])
def test_a_result_from_elsewhere_stands_beside(result: Result, tmp_path, other) -> None:
    """Its section comes first on the page if it is newer, whatever the order in the file."""
    path = tmp_path / "performance.json"
    newer = Result("mlp", {**SETUP, "date": "2026-02-03", **other}, result.facts, result.rows)
    merged = save(path, [newer, result])
    assert sorted(r.setup["date"] for r in merged) == ["2026-01-02", "2026-02-03"]
    assert page.sections(merged) == page.sections(merged[::-1]) == [[newer], [result]]
    titles = [line for line in page.page(merged).splitlines() if line.startswith("## ")]
    assert len(titles) == 3 and titles[1] == f"## {SETUP['machine']}, 2 threads"


def test_real_sizes_have_a_section_of_their_own_with_fewer_peers(result: Result, tmp_path) -> None:
    real = Result("bert-base", {**SETUP, "optimizer": "adamw", "date": "2099-01-01"}, result.facts, result.rows)
    merged = save(tmp_path / "performance.json", [real, result])
    assert page.sections(merged) == [[result], [real]]  # the chart is of the first
    text = page.page(merged)
    assert f"## Real sizes, {SETUP['machine']}, 2 threads\n" in text
    assert REAL_OURS == ["gradgraph", "gradgraph-lean", "gradgraph-native"]
    assert "| BERT-base, 8x128, AdamW | 0.50 | - | 0.40 | 0.33 | - | 0.32 |" in text


def test_real_sizes_are_trained_with_adamw_against_torch_alone(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["run", "--sizes", "real"])
    asked = parsed_arguments()
    assert asked.peers == list(REAL_PEERS)
    assert [(n, a.optimizer) for n, a in runs(asked)] == [(name, "adamw") for name in REAL]


# --- workloads -----------------------------------------------------------------------------------------------


@pytest.mark.sweep(0.53)
@pytest.mark.parametrize("name", ALL)
def test_batches_are_the_same_each_time(name: str) -> None:
    workload = ALL[name]
    first, again = workload.batch(), workload.batch()
    assert set(first) == {*workload.inputs, "target"}
    assert all((first[key] == again[key]).all() for key in first)
    assert all(first[i.name].max() < i.high for i in (workload.target, *workload.further) if i.high)


@pytest.mark.torch
@pytest.mark.parametrize("name", WORKLOADS)
def test_networks_take_their_batch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="the networks are PyTorch modules")
    from benchmarks import networks

    workload = WORKLOADS[name]
    x, target = (torch.from_numpy(a[:2]) for a in workload.batch().values())
    target = target if workload.target.shape[0] == workload.x.shape[0] else torch.zeros(x.numel(), dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy(networks.make(name)(x), target)
    assert torch.isfinite(loss)


def test_every_peer_has_a_colour() -> None:
    pytest.importorskip("matplotlib", reason="only the chart needs it")
    from benchmarks.chart import COLOURS

    assert list(COLOURS) == list(PEERS)


def test_chart(result: Result, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="only the chart needs it")
    from benchmarks.chart import draw

    for name in ("a.svg", "b.svg"):
        draw([result], tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text and "<metadata>" not in text  # which would name the program and its addresses
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
