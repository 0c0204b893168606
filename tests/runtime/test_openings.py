"""A step opened again from what was kept computes the same bits, and what is not what was kept counts as nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from benchmarks.large_models import LENGTH, language_model
from gradgraph.backends import BACKENDS
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.errors import GradgraphError
from gradgraph.files.digest import digest_of
from gradgraph.frontend import export, nn
from gradgraph.runtime.execution import opener, openings
from gradgraph.runtime.execution.session import Placement, RuntimeOptions

CPU = Placement.choose("cpu")
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which keeps small models, too."""
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "cache")
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "")
    monkeypatch.setattr(openings, "LEAST", 0)
    return tmp_path


def pictures() -> onnx.ModelProto:
    conv = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2)]
    network = nn.Sequential(*conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return export(network, {"x": ("batch", 3, 12, 12)})


def vectors() -> onnx.ModelProto:
    network = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 5))
    return export(network, {"x": ("batch", 8)})


def built(make: Callable[[], onnx.ModelProto], **options: Any) -> Callable[[], gg.Step]:
    return lambda: gg.build(make(), "cross_entropy", options.pop("optimizer", gg.optim.adamw(1e-2)), **options)


def adapted() -> gg.Step:
    return gg.build(gg.lora(vectors(), target="*", rank=2), "cross_entropy", gg.optim.adamw(1e-2))


STEPS: dict[str, tuple[Callable[[], gg.Step], dict[str, Any]]] = {
    "convolutions": (built(pictures), {}),
    "in place": (built(pictures), {"in_place": True}),
    "dropout": (built(vectors), {}),
    "frozen": (built(vectors, freeze="0.*"), {}),
    "float16": (built(vectors, precision="float16"), {}),
    "bfloat16": (built(pictures, precision="bfloat16"), {}),
    "recomputed": (built(vectors, recompute="sqrt"), {}),
    "accumulated": (built(vectors, accumulate=True), {}),
    "averages": (built(vectors, ema=0.9), {}),
    "adapters": (adapted, {}),
    "basic": (built(pictures), {"optimization": "basic"}),
    "unpacked": (built(vectors, freeze="0.*"), {"pack_weights": False}),
}


def data(step: gg.Step) -> dict[str, np.ndarray]:
    (spec,) = step.manifest.inputs
    rng = np.random.default_rng(1)
    x = rng.normal(size=(12, *spec.shape[1:])).astype(np.float32)
    return {"x": x, "target": rng.integers(0, 5, 12)}


def trained(step: gg.Step, options: dict[str, Any], between: Path | None = None) -> dict[str, Any]:
    """All that a run gives; stopped and resumed from a checkpoint ``between``, if that is given."""
    samples = data(step)
    trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1, **options))
    losses = [trainer.step({n: a[:4] for n, a in samples.items()})["loss"] for _ in range(2)]
    if between is not None:
        trainer.save(between)
        trainer = gg.Trainer.resume(step, between, device="cpu", options=RuntimeOptions(threads=1, **options))
    trainer.fit(samples, epochs=1, batch_size=5, progress=False)  # the last batch is shorter
    found = {"losses": np.array(losses), **trainer.evaluate(samples), **trainer.state_dict()}
    prediction = trainer.predict(samples["x"])
    return {**found, **(prediction if isinstance(prediction, dict) else {"prediction": prediction})}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes() for n in a)


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("name", STEPS)
def test_bits_are_the_same_with_and_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = STEPS[name]
    step = make()
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "off")
    without = trained(step, options)
    assert openings.kept() == (0, 0)
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "")
    assert same(without, trained(step, options))
    count = openings.kept()[0]
    assert count > 0
    monkeypatch.setattr(opener, "for_machine", lambda *given: pytest.fail("it was lowered again"))
    assert same(without, trained(step, options))
    assert same(without, trained(step, options, between=tmp_path / "run.ckpt"))
    assert openings.kept()[0] == count


@pytest.mark.sweep(0.41)
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"in_place": False}], ids=str)
def test_each_of_several_steps_is_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one state: each is opened from its own, and the bits are those of opening them for the first time."""
    parts = {
        "first": gg.StepOptions("cross_entropy", gg.optim.adamw(1e-2), train="0.*"),
        "last": gg.StepOptions("cross_entropy", gg.optim.sgd(0.1, momentum=0.9), train="4.*", ema=0.9),
        "all": gg.StepOptions("cross_entropy", gg.optim.sgd(0.01), accumulate=True),
    }
    step = gg.build(vectors(), steps=parts)
    samples = data(step)

    def trained_by_turns(order: list[str]) -> dict[str, Any]:
        trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1, **options))
        for name in order:
            trainer.step(name, {n: a[:4] for n, a in samples.items()})
        trainer.fit(samples, epochs=2, batch_size=4, steps=order, progress=False)
        return trainer.state_dict()

    order = ["last", "first", "all"]
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "off")
    without = trained_by_turns(order)
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "")
    assert same(without, trained_by_turns(order))
    assert openings.kept()[0] >= len(parts)
    monkeypatch.setattr(opener, "for_machine", lambda *given: pytest.fail("it was lowered again"))
    assert same(without, trained_by_turns(order))


@pytest.mark.sweep(0)
def test_weights_beside_the_model_stay_in_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = export(
        nn.Sequential(nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 512), nn.Linear(512, 5)), {"x": ("n", 8)}
    )
    gg.build(wide, "cross_entropy", gg.optim.sgd(0.1), freeze="2.*").save(tmp_path / "step")
    step = gg.Step.load(tmp_path / "step")
    assert any(t.data_location == onnx.TensorProto.EXTERNAL for t in step.train.graph.initializer)
    first = trained(step, {})
    assert openings.kept()[1] < 1 << 20
    monkeypatch.setattr(opener, "for_machine", lambda *given: pytest.fail("it was lowered again"))
    assert same(first, trained(gg.Step.load(tmp_path / "step"), {}))


def in_four_bits(folder: Path) -> gg.Step:
    language_model(folder / "llm.onnx", 0.003, layers=1)
    gg.lora(folder / "llm.onnx", target="layers.*.q*", rank=2, out=folder / "adapted.onnx")
    gg.build(folder / "adapted.onnx", "cross_entropy", gg.optim.adamw(1e-2)).save(folder / "step")
    return gg.Step.load(folder / "step")


@pytest.mark.sweep(0.35)
@pytest.mark.parametrize("options", [{}, {"in_place": True}], ids=str)
def test_many_weights_in_files_are_not_written_out(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What onnxruntime makes of a session that copies none is kept, and executed from the first time on."""
    monkeypatch.setattr(openings, "LARGEST_WRITTEN", 0)
    step = in_four_bits(tmp_path)
    sizes = {"batch": 1, "tokens": LENGTH}
    specs = step.manifest.batch
    batch = {s.name: np.zeros([d if isinstance(d, int) else sizes[d] for d in s.shape], s.dtype) for s in specs}
    written = list[int]()
    load = onnx.load

    def loaded(path: Path, **how: Any) -> onnx.ModelProto:
        written.append(path.stat().st_size)
        return load(path, **how)

    monkeypatch.setattr(onnx, "load", loaded)

    def stepped() -> dict[str, Any]:
        trainer = gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1, **options))
        losses = [trainer.step(batch)["loss"] for _ in range(2)]
        return {"losses": np.array(losses), **trainer.state_dict()}

    monkeypatch.setenv("GRADGRAPH_OPENINGS", "off")
    without = stepped()
    written.clear()
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "")
    assert same(without, stepped())
    assert 0 < max(written) < 1 << 19 < (tmp_path / "llm.onnx.data").stat().st_size
    (kept,) = [openings.read(file.stem, step.train) for file in the_files()]
    assert kept is not None and kept.executed
    monkeypatch.setattr(opener, "for_machine", lambda *given: pytest.fail("it was lowered again"))
    monkeypatch.setattr(onnx, "load", lambda *given, **how: pytest.fail("it was optimised again"))
    assert same(without, stepped())


def test_constants_of_the_step_are_not_kept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones are taken from the step, whatever lowering calls them; in a step that has others, there are none."""
    wide = export(nn.Sequential(nn.Linear(8, 1024), nn.ReLU(), nn.Linear(1024, 64), nn.Linear(64, 5)), {"x": ("n", 8)})
    step = gg.build(wide, "cross_entropy", gg.optim.sgd(0.1), freeze="2.*")
    first = trained(step, {})
    assert 0 < max(file.stat().st_size for file in the_files()) < 1 << 16 < step.train.ByteSize()
    monkeypatch.setattr(opener, "for_machine", lambda *given: pytest.fail("it was lowered again"))
    assert same(first, trained(step, {}))
    without = copy_of(step.train)
    del without.graph.initializer[:]
    found = [openings.read(file.stem, step.train) for file in the_files()]
    assert None not in found
    assert [openings.read(file.stem, without) for file in the_files() if file.stat().st_size] != found


@pytest.mark.parametrize("name", ["convolutions", "adapters", "recomputed"])
def test_nodes_are_computed_in_the_order_of_the_first_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for few that move a little; so memory is the same. A file is computed in another order than it has."""
    step, sessions, create = STEPS[name][0](), list[Any](), opener.create_session
    samples = {n: a[:4] for n, a in data(step).items()}

    def watched(*given: Any, **options: Any) -> Any:
        sessions.append(create(*given, **options, profile=tmp_path / "profile"))
        return sessions[-1]

    def computed() -> dict[str, int]:
        gg.Trainer(step, device="cpu", options=RuntimeOptions(threads=1)).step(samples)
        events = json.loads(Path(sessions[-1].end_profiling()).read_text())
        names = [event["name"] for event in events if event["name"].endswith("_kernel_time")]
        return {node: i for i, node in enumerate(names)}

    monkeypatch.setattr(opener, "create_session", watched)
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "off")
    without = computed()
    monkeypatch.setenv("GRADGRAPH_OPENINGS", "")
    for found in (computed(), computed()):
        assert found.keys() == without.keys()
        assert sum(abs(i - without[node]) for node, i in found.items()) < len(found)


_TRAINS = """
import sys
import numpy as np
import gradgraph as gg
from gradgraph.runtime.execution import openings
openings.LEAST = 0
trainer = gg.Trainer(sys.argv[1], device="cpu", options=gg.RuntimeOptions(threads=1))
rng = np.random.default_rng(0)
for _ in range(2):
    x = rng.normal(size=(4, 3, 12, 12)).astype("float32")
    loss = trainer.step({"x": x, "target": rng.integers(0, 5, 4)})["loss"]
print(float(loss).hex())
"""


@pytest.mark.sweep(0)
def test_processes_write_and_read_one_cache_at_once(tmp_path: Path) -> None:
    built(pictures)().save(tmp_path / "step")
    command = [sys.executable, "-c", _TRAINS, str(tmp_path / "step")]
    losses = set[str]()
    for _ in range(2):  # while nothing is kept, and while it is
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        for process in running:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0
            losses.add(said)
    assert len(losses) == 1
    assert openings.kept()[0] == 1
    assert [file.suffix for file in openings.folder().iterdir()] == [".opening"]


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(model.SerializeToString())


def the_files() -> list[Path]:
    return sorted(openings.folder().glob("*.opening"))


def external(file: Path, content: bytes, location: str = "/etc/passwd") -> bytes:
    """A model that reads a file, or a constant, which the step does not have, with a digest that is right."""
    start = len(openings._MARK) + openings._DIGEST
    model = onnx.ModelProto.FromString(content[start + 1 :])
    tensor = model.graph.initializer.add(name="secret", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    body = content[start : start + 1] + model.SerializeToString()
    return content[: len(openings._MARK)] + openings._digest(file.stem, body) + body


DAMAGES: dict[str, Callable[[Path, bytes], bytes]] = {
    "cut": lambda file, content: content[:-1],
    "half": lambda file, content: content[: len(content) // 2],
    "empty": lambda file, content: b"",
    "a bit": lambda file, content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
    "the kind": lambda file, content: content[:52] + b"\0" + content[53:],
    "older": lambda file, content: content.replace(b"opening 2", b"opening 1"),
    "another one's": lambda file, content: next(f for f in the_files() if f != file).read_bytes(),
    "noise": lambda file, content: RNG.bytes(len(content)),
    "no model": lambda file, content: openings._MARK + openings._digest(file.stem, b"\1\xff\xff") + b"\1\xff\xff",
    "a file elsewhere": external,
    "a constant of another step": lambda file, content: external(file, content, openings._OF_THE_STEP + "secret"),
}


@pytest.mark.sweep(0.19)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_not_kept_so_counts_as_nothing(damage: str) -> None:
    step = built(vectors)()
    first = trained(step, {})
    contents = {file: file.read_bytes() for file in the_files()}
    damaged = {file: DAMAGES[damage](file, content) for file, content in contents.items()}
    for file, content in damaged.items():
        assert content != contents[file]
        file.write_bytes(content)
        assert openings.read(file.stem, step.train) is None
    assert same(first, trained(step, {}))
    assert all(openings.read(file.stem, step.train) is not None for file in contents)


@pytest.mark.sweep(0)
def test_a_folder_or_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    step = built(vectors)()
    first = trained(step, {})
    (tmp_path / "elsewhere").mkdir()
    for i, file in enumerate(the_files()):
        file.rename(tmp_path / "elsewhere" / file.name)
        if i % 2 and os.name != "nt":
            file.symlink_to(tmp_path / "elsewhere" / file.name)
        else:
            file.mkdir()
        assert openings.read(file.stem, step.train) is None
    assert same(first, trained(step, {}))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_what_others_may_have_written_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    step = built(vectors)()
    trained(step, {})
    for file in the_files():
        file.chmod(0o666)
        assert openings.read(file.stem, step.train) is None
    assert "other users may write" in caplog.text


def test_the_key_has_all_that_decides() -> None:
    model, other = built(vectors)().train, built(pictures)().train
    one = RuntimeOptions(threads=1)
    keys = [
        openings.key_of(model, ORT_CPU, CPU, one),
        openings.key_of(other, ORT_CPU, CPU, one),
        openings.key_of(model, BACKENDS["ort-cpu-native"], CPU, one),
        openings.key_of(model, ORT_CPU, CPU, RuntimeOptions(threads=2)),
        openings.key_of(model, ORT_CPU, CPU, RuntimeOptions(threads=1, deterministic=True)),
        openings.key_of(model, ORT_CPU, CPU, one, [("batch", 4)]),
        openings.key_of(model, ORT_CPU, CPU, one, [("batch", 5)]),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert openings.key_of(model, ORT_CPU, CPU, one) == keys[0]


@pytest.mark.parametrize("what", ["ort.__version__", "processor", "instructions", "_sources"])
def test_another_machine_or_version_has_other_keys(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(vectors)().train
    key = openings.key_of(model, ORT_CPU, CPU, RuntimeOptions())
    value: Any = "0.0" if "." in what else lambda: "another"
    monkeypatch.setattr(f"{openings.__name__}.{what}", value)
    assert openings.key_of(model, ORT_CPU, CPU, RuntimeOptions()) not in (None, key)


def test_code_of_others_is_in_no_key() -> None:
    model = built(vectors)().train
    forms = gg.backends.forms.Forms()
    forms.add("Relu")(lambda op, x: x)
    made = gg.backends.backend.Backend("theirs", "theirs", lambda: gg.backends.backend.Lowering(forms=forms))
    assert openings.key_of(model, made, CPU, RuntimeOptions()) is None
    assert openings.key_of(model, ORT_CPU, CPU, RuntimeOptions(custom_ops="own.so")) is None


def test_the_folder_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(vectors)().train
    size = model.ByteSize() + 100
    monkeypatch.setattr(openings, "MOST", 3 * size)
    names = [digest_of([bytes([i])]).rpartition(":")[2] for i in range(5)]
    for i, name in enumerate(names):
        openings.keep(name, onnx.ModelProto(), copy_of(model), None)
        os.utime(openings._path(name), (i, i))
        if i == 2:
            assert openings.read(names[0], model) is not None  # used just now
    assert [openings.read(name, model) is not None for name in names] == [True, False, False, True, True]
    assert openings.kept()[1] <= 3 * size
    openings.forget()
    assert openings.kept() == (0, 0)


@pytest.mark.sweep(0)
def test_where_nothing_can_be_written_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise GradgraphError("the disk is full")

    step = built(vectors)()
    first = trained(step, {})
    openings.forget()
    monkeypatch.setattr(openings, "write_atomically", fails)
    assert same(first, trained(step, {}))
    assert openings.kept() == (0, 0)


def test_several_may_write_one_opening_at_once() -> None:
    model = built(pictures)().train
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            copies = [copy_of(model) for _ in range(8)]
            list(pool.map(lambda copy: openings.keep("0" * 64, model, copy, None), copies))
            found = openings.read("0" * 64, model)
            assert found is not None
            assert found.model == model
    assert [file.name for file in openings.folder().iterdir()] == ["0" * 64 + ".opening"]
