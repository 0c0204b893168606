"""Trainers use native kernels where they are, say nothing where they are not, and leave no trace of them in files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import gradgraph as gg
from gradgraph.backends.ort_native import in_use
from gradgraph.backends.ort_native import library as native
from gradgraph.errors import RuntimeUnavailableError
from gradgraph.runtime.execution.session import STOCK, Placement, RuntimeOptions
from gradgraph.runtime.saved.record import Progress, body_of
from tests.kit.command_line import arrays, mlp

pytestmark = pytest.mark.one_level

BATCH = arrays(8)


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(in_use.VARIABLE, raising=False)


@pytest.fixture(scope="module")
def step() -> gg.Step:
    return gg.build(mlp(), "cross_entropy", gg.optim.adamw(0.01))


def opened(step: gg.Step, native_kernels: bool | None = None) -> gg.Trainer:
    return gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1, native_kernels=native_kernels))


def has_kernels(trainer: gg.Trainer) -> bool:
    """Whether the graph that it trains holds one."""
    inside = trainer._session
    (part,) = inside.parts.values()
    model = inside.opener.lowered(part.model, {"n": 8})
    assert (native.DOMAIN in {node.domain for node in model.graph.node}) == (inside.options.native_kernels is True)
    return bool(inside.options.native_kernels)


@pytest.mark.usefixtures("library")
def test_they_are_used_where_they_are(step: gg.Step, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, asked, stock = opened(step), opened(step, True), opened(step, False)
    assert [has_kernels(t) for t in (usual, asked, stock)] == [True, True, False]
    assert usual.described == "cpu with native kernels" and stock.described == "cpu"
    losses = [[float(t.step(BATCH)["loss"]) for _ in range(4)] for t in (usual, asked, stock)]
    assert losses[0] == losses[1] and losses[0] == pytest.approx(losses[2], rel=1e-4)
    monkeypatch.setenv(in_use.VARIABLE, "0")
    assert [has_kernels(opened(step, given)) for given in (None, True)] == [False, True]


@pytest.mark.usefixtures("empty_cache")
def test_none_are_needed(step: gg.Step, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_kernels(opened(step))
    assert in_use.status().startswith("not in use: this install has none, and none were built; ")
    monkeypatch.setenv(in_use.VARIABLE, "1")
    with pytest.raises(RuntimeUnavailableError, match="no native kernels for this processor"):
        opened(step)
    assert not has_kernels(opened(step, False))


def test_what_the_variable_may_say(step: gg.Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(in_use.VARIABLE, "yes")
    with pytest.raises(RuntimeUnavailableError, match=f"{in_use.VARIABLE} is 'yes'; set it to 0 .* or 1 "):
        opened(step)


@pytest.mark.parametrize("value", ["", "1"])
def test_another_provider_does_without(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(in_use.VARIABLE, value)
    placement = Placement(("CUDAExecutionProvider", "CPUExecutionProvider"), "cuda")
    options = placement.settled(RuntimeOptions())
    assert options.native_kernels is False and placement.kernels(options) == ""


# --- why not ----------------------------------------------------------------------------------------------------------


def text_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    native.here().path.write_text("no library")
    native.here().path.chmod(0o600)


def another_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    text_in_its_place(monkeypatch)
    native.here().path.chmod(0o666)


def another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    text_in_its_place(monkeypatch)
    monkeypatch.setattr(native, "processor", lambda: "another")


def another_level(monkeypatch: pytest.MonkeyPatch) -> None:
    native.BUILT.mkdir()
    (native.BUILT / native.library_name("avx1024-00")).write_text("")


def other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    native.BUILT.mkdir()
    for level in native.levels_here():
        (native.BUILT / native.library_name(f"{level}-00")).write_text("")


def no_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "shipped_levels", lambda: {"avx2": ()})
    monkeypatch.setattr(in_use, "instructions", lambda: "sse4_2")
    monkeypatch.setattr(in_use, "levels_in_use", lambda: ["x86-64-v2"])


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/opt/none/c++")


REASONS = {
    text_in_its_place: "do not load: ",
    another_user_s: "other users may ",
    another_processor: "the kernels built here are for another processor, version of onnxruntime ",
    another_level: "the packaged kernels are for processors with avx1024; ",
    other_sources: "the packaged kernels were compiled from sources other than",
    no_avx2: "they are for processors with AVX2; ",
    no_compiler: r"none were built; install a C\+\+ compiler .*, then run `gradgraph native build`",
}


@pytest.mark.parametrize("spoil", REASONS, ids=lambda spoil: spoil.__name__)
def test_why_not(
    spoil: Callable[[pytest.MonkeyPatch], None], empty_cache: Path, step: gg.Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spoil is other_sources and not native.levels_here():
        pytest.skip("no library comes with the package for this machine")
    empty_cache.mkdir(0o700, parents=True)
    spoil(monkeypatch)
    assert not has_kernels(opened(step))

    assert re.search(f"^not in use: .*{REASONS[spoil]}", in_use.status())


# --- files ------------------------------------------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.usefixtures("library")
def test_files_are_the_same_with_and_without(step: gg.Step, tmp_path: Path) -> None:
    fast, stock = opened(step), opened(step, False)
    for _ in range(3):
        fast.step(BATCH)
    stock.load_state_dict(fast.state_dict())
    paths = [tmp_path / f"{i}.onnx" for i in range(2)]
    for trainer, path in zip((fast, stock), paths, strict=True):
        trainer.export(path)
        trainer.save(path.with_suffix(".ckpt"))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    for path in (paths[0], paths[0].with_suffix(".ckpt")):
        assert native.DOMAIN.encode() not in path.read_bytes()
    assert fast.predict({"x": BATCH["x"]}).tolist() == stock.predict({"x": BATCH["x"]}).tolist()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_run_that_goes_on_with_others_says_so_once(
    before: bool, after: bool, step: gg.Step, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(step, before)
    for _ in range(2):
        first.step(BATCH)
    first.save(tmp_path / "run.ckpt")
    assert first.progress.kernels == (native.here().path.stem if before else STOCK)
    resumed = gg.Trainer.resume(
        step, tmp_path / "run.ckpt", device="cpu", options=RuntimeOptions(threads=1, native_kernels=after)
    )
    assert {n: v.tolist() for n, v in resumed.state_dict().items()} == {
        n: v.tolist() for n, v in first.state_dict().items()
    }
    resumed.evaluate(BATCH)
    assert warned(caplog) == []  # nothing is trained
    losses = [[float(t.step(BATCH)["loss"]) for _ in range(2)] for t in (first, resumed)]
    said = warned(caplog)
    if before == after:
        assert losses[0] == losses[1] and said == []
        return
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    (line,) = said
    assert line.startswith("the run was trained with ") and line.endswith(", which may round differently")
    assert "onnxruntime's kernels alone" in line and native.here().path.stem in line


@pytest.mark.usefixtures("library")
def test_a_checkpoint_from_before_says_nothing_of_them(
    step: gg.Step, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert '"kernels"' not in body_of(Progress(steps=1))
    first = opened(step)
    first.progress.steps = 1
    first.save(tmp_path / "run.ckpt")
    resumed = gg.Trainer.resume(step, tmp_path / "run.ckpt", device="cpu")
    resumed.step(BATCH)
    assert warned(caplog) == []


def test_the_tests_find_them_where_a_user_s_would_be() -> None:
    """So that trainers of all tests use them, where there is a compiler; perhaps those that the user has built."""
    found = in_use.found()
    assert found.why_not or (found.library == native.here() and native.here().is_built)


@pytest.mark.usefixtures("library")
def test_packaged_kernels_that_were_never_timed_are_not_used_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use, "UNTIMED", (in_use.level_of(native.here()),))
    if native.here().came_with_package:
        assert not in_use.by_default() and "was never measured" in in_use.status()
    monkeypatch.setenv(in_use.VARIABLE, in_use.REQUIRED)
    assert in_use.by_default()
    monkeypatch.delenv(in_use.VARIABLE)
    own = replace(native.here(), came_with_package=False)
    monkeypatch.setattr(in_use.kernels, "here", lambda: own)
    assert "never measured" not in in_use.found().why_not
