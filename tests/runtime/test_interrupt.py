"""Ctrl-C and SIGTERM, in a process of its own: what is saved, what is said, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.loop.interrupt import interrupts
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, signal, sys, threading, time
sys.path.insert(0, {root!r})
from tests.kit import handmade
from gradgraph.runtime.trainer import Trainer
from gradgraph.runtime.execution.session import RuntimeOptions

class Kill:
    def on_step(self, trainer, results):
        if trainer.progress.steps == 7:
            os.kill(os.getpid(), {signal})

trainer = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))
trainer.fit(handmade.points(75), epochs=4, batch_size=16, callbacks=[Kill()], checkpoint={checkpoint!r})
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.sweep(0.48)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_first_signal_finishes_the_step_and_saves(number: signal.Signals, code: int, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    done = run(SCRIPT.format(root=str(ROOT), signal=int(number), checkpoint=path))
    assert done.returncode == code, done.stderr
    assert f"stopped after step 7 and saved to {path}; continue with gg.Trainer.resume(" in done.stderr
    step, options = handmade.classifier(), RuntimeOptions(threads=1)
    rest = Trainer.resume(step, path, device="cpu", options=options)
    assert rest.progress.steps == 7
    data = handmade.points(75)
    rest.fit(data, epochs=4, batch_size=16, progress=False)
    whole = Trainer(step, device="cpu", options=options)
    whole.fit(data, epochs=4, batch_size=16, progress=False)
    assert all(np.array_equal(v, whole.state_dict()[k]) for k, v in rest.state_dict().items())


@pytest.mark.sweep(0)
def test_without_a_checkpoint_nothing_is_saved_and_that_is_said(tmp_path: Path) -> None:
    done = run(SCRIPT.format(root=str(ROOT), signal=2, checkpoint=None))
    assert done.returncode == -signal.SIGINT
    assert "stopped after step 7; nothing was saved" in done.stderr


def endless() -> onnx.ModelProto:
    """The regression's train.onnx with a Loop of 2^62 iterations in front of the loss."""
    step = handmade.regression()
    graph = step.train.graph
    node = next(n for n in graph.node if n.output[0] == "loss")
    before, node.input[0] = node.input[0], "looped"
    body = onnx.parser.parse_graph(
        "body (int64 i, bool go, float a) => (bool go_on, float b) { go_on = Identity(go)  b = Add(a, a) }"
    )
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(2**62), "many"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    graph.node.insert(
        list(graph.node).index(node), onnx.helper.make_node("Loop", ["many", "yes", before], ["looped"], body=body)
    )
    return step


@pytest.mark.sweep(0)
def test_second_signal_stops_inside_a_step() -> None:
    """A step that would never end: the first Ctrl-C waits for it, the second stops it at once."""
    t = Trainer(endless(), device="cpu", options=RuntimeOptions(threads=1))
    data = {"x": np.ones((4, 3), np.float32), "t": np.ones((4, 1), np.float32)}
    before, handler = t.state_dict()["w"], signal.getsignal(signal.SIGINT)
    timers = [threading.Timer(s, os.kill, (os.getpid(), signal.SIGINT)) for s in (0.5, 1.0)]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        t.fit(data, progress=False)
    assert np.array_equal(t.state_dict()["w"], before)
    assert t.progress.steps == 0
    assert signal.getsignal(signal.SIGINT) is handler  # whatever it was: a shell's background job ignores it


def test_handlers_come_back_and_threads_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupts() as received:
        assert signal.getsignal(signal.SIGTERM) == received.handle
    assert signal.getsignal(signal.SIGTERM) is before
    seen: list[object] = []

    def elsewhere() -> None:
        with interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def test_one_thread_watches_for_all_fits_and_forgets_between_them() -> None:
    def watchers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "gradgraph-interrupts"]

    for _ in range(3):
        with interrupts() as received:
            os.kill(os.getpid(), signal.SIGTERM)
            assert received.signal == signal.SIGTERM
            assert not received.run_options.terminate
        with interrupts() as outer:
            with interrupts() as inner:
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            assert outer.requested and not inner.requested
    assert len(watchers()) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_signals_of_a_forked_process_are_its_own() -> None:
    code = """
import os, signal, time
from gradgraph.runtime.loop.interrupt import interrupts
with interrupts() as received:
    child = os.fork()
    if not child:
        for _ in range(3):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                pass
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.2)
    assert received.signal is None and not received.run_options.terminate
    if not os.fork():
        with interrupts() as own:
            signal.raise_signal(signal.SIGTERM)
            assert own.requested
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    done = run(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    assert done.returncode == 0, done.stderr


@pytest.mark.sweep(0.17)
@pytest.mark.parametrize("kinds", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
@pytest.mark.parametrize("repeats", [1, 3])
def test_what_a_launcher_hands_on_again_is_no_second_wish(kinds: tuple[signal.Signals, ...], repeats: int) -> None:
    """The same signal by several ways stops nothing at once; behind that moment the next one does."""
    first, again = kinds
    with interrupts(moment=1.0) as received:
        began = time.monotonic()
        os.kill(os.getpid(), first)
        for _ in range(repeats):
            os.kill(os.getpid(), again)
            time.sleep(0.05)
        assert received.signal == first and not received.run_options.terminate
        time.sleep(max(0.0, began + 1.2 - time.monotonic()))
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), again)
            time.sleep(1)
        assert received.run_options.terminate


def test_without_a_moment_the_second_signal_counts_at_once() -> None:
    with interrupts() as received, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert received.run_options.terminate
