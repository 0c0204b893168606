"""Every door that takes a file ends in a value or in one sentence that names it, soon and in little memory."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import safetensors.numpy

import gradgraph as gg
from gradgraph.cli.app import run
from gradgraph.cli.describe import Selection, describe
from gradgraph.compat.onnxruntime_training.saved.checkpoint_file import read_checkpoint
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.data.record.specs import TargetSpec, TensorSpec
from gradgraph.data.sources.in_order import in_order
from gradgraph.errors import LONGEST_MESSAGE, GradgraphError
from gradgraph.export.flat import FlatWeights, flat_weights
from gradgraph.files.models import load_model
from gradgraph.runtime.saved.checkpoint import load_checkpoint
from gradgraph.runtime.saved.partial import read_values
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.step import Step
from tests.kit.command_line import arrays, mlp
from tests.kit.hostile import CONTENTS, PLACES, VALUES, fields_of, replaced
from tests.kit.small_models import parsed, real

SECONDS, MEMORY = 10, 700_000_000  # pandas needs 5 for a table of 100,000 columns


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail where this takes longer than SECONDS (of the processor: the machine may be busy), or waits, or MEMORY."""

    def late(*_: object) -> None:
        raise AssertionError("it does not end")

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    assert time.process_time() - start < SECONDS
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MEMORY


def sentence(door: Callable[[], object]) -> str:
    """What the door says as it refuses; empty if it does not."""
    with bounded():
        try:
            door()
        except GradgraphError as error:
            said = str(error)
            assert said.isprintable()
            assert len(said) <= LONGEST_MESSAGE
            return said
    return ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its step, data, a checkpoint, an adapter and flat weights."""
    folder = tmp_path_factory.mktemp("whole")
    onnx.save(mlp(), folder / "model.onnx")
    np.savez(folder / "train.npz", **arrays(32))
    step = gg.build(mlp())
    step.save(folder / "step")
    Trainer(step, device="cpu").save(folder / "run.ckpt")
    gg.surgery.save_adapter(gg.lora(mlp(), "first.weight"), folder / "adapter")
    flat_weights(step).save(folder / "flat.bin")
    return folder


def opened_step(folder: Path, name: str, file: Path) -> Step:
    """The step with ``file`` as one of its files."""
    (folder / "step" / name).unlink()
    file.rename(folder / "step" / name)
    return Step.load(folder / "step")


def given(folder: Path) -> dict[str, Any]:
    step = Step.load(folder / "step")
    return {spec.name: spec for spec in step.manifest.batch}


def beside(folder: Path, file: Path, name: str) -> Path:
    """``file`` as ``name`` in a folder of its own, with what else lies in the adapter."""
    (folder / "adapter" / name).unlink()
    file.rename(folder / "adapter" / name)
    return folder / "adapter"


def one_image(file: Path) -> Any:
    """A dataset of one image, which a table of its own names."""
    table = file.with_suffix(".csv")
    table.write_text(f"path\n{file.name}\n")
    return gg.image_table(table)


# the name of a door: the extension of the file, what is opened, given the folder of what is whole, and the file
Door = tuple[str, Callable[[Path, Path], object]]
DOORS: dict[str, Door] = {
    "load_model": (".onnx", lambda f, x: load_model(x)),
    "build": (".onnx", lambda f, x: gg.build(x)),
    "vjp": (".onnx", lambda f, x: gg.vjp(x)),
    "check_gradients": (".onnx", lambda f, x: gg.check_gradients(x)),
    "distill": (".onnx", lambda f, x: gg.distill(f / "model.onnx", x)),
    "load_weights of a model": (".onnx", lambda f, x: gg.surgery.load_weights(f / "model.onnx", x)),
    "load_weights of arrays": (".npz", lambda f, x: gg.surgery.load_weights(f / "model.onnx", x)),
    "load_weights": (".safetensors", lambda f, x: gg.surgery.load_weights(f / "model.onnx", x)),
    "merge_adapters": (".safetensors", lambda f, x: gg.surgery.merge_adapters(gg.lora(mlp(), "*"), x)),
    "load_adapter, settings": (
        ".json",
        lambda f, x: gg.surgery.load_adapter(f / "model.onnx", beside(f, x, "adapter_config.json")),
    ),
    "load_adapter, weights": (
        ".safetensors",
        lambda f, x: gg.surgery.load_adapter(f / "model.onnx", beside(f, x, "adapter_model.safetensors")),
    ),
    "read_values": (".safetensors", lambda f, x: read_values(x)),
    "read_values of arrays": (".npz", lambda f, x: read_values(x)),
    "load_checkpoint": (".ckpt", lambda f, x: load_checkpoint(x, Step.load(f / "step").manifest.state)),
    "resume": (".ckpt", lambda f, x: Trainer.resume(f / "step", x)),
    "load_arrays": (".npz", lambda f, x: load_arrays(x)),
    "fit": (".npz", lambda f, x: Trainer(f / "step", device="cpu").fit(x, epochs=1)),
    "fit on a table": (".csv", lambda f, x: Trainer(f / "step", device="cpu").fit(x, epochs=1)),
    "fit on lines": (".jsonl", lambda f, x: Trainer(f / "step", device="cpu").fit(x, epochs=1)),
    "in_order": (".npz", lambda f, x: list(in_order(x, given(f)).batches(4))),
    "shards": (".tar", lambda f, x: Trainer(f / "step", device="cpu").fit(gg.shards(x), epochs=1)),
    "image_table": (".csv", lambda f, x: gg.image_table(x)),
    "an image": (".png", lambda f, x: one_image(x)[0]),
    "coco": (".json", lambda f, x: gg.vision.coco(x)),
    "yolo": (".yaml", lambda f, x: gg.vision.yolo(x)),
    "qat": (".npz", lambda f, x: gg.qat(f / "model.onnx", x)),
    "FlatWeights, table": (".json", lambda f, x: FlatWeights.load(x.with_suffix(".bin"))),
    "onnxruntime-training": (".ckpt", lambda f, x: read_checkpoint(x)),
    **{
        f"Step.load, {name}": (Path(name).suffix, lambda f, x, name=name: opened_step(f, name, x))
        for name in ("manifest.json", "train.onnx", "eval.onnx", "init.onnx")
    },
}
if importlib.util.find_spec("tokenizers"):
    DOORS["a tokenizer"] = (".json", lambda f, x: gg.text.Tokenizer(x))
    DOORS["texts"] = (".json", lambda f, x: gg.text.table({"t": ["a"], "label": [0]}, x, length=4))


def copied(whole: Path, to: Path) -> Path:
    """A folder with the files of ``whole``."""
    for path in [p for p in whole.rglob("*") if p.is_file()]:
        target = to / path.relative_to(whole)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return to


def made(path: Path, content: str) -> Path:
    if content in PLACES:
        PLACES[content](path)
    else:
        path.write_bytes(CONTENTS[content])
    return path


def opened_by(door: str, whole: Path, folder: Path, content: str) -> str:
    suffix, use = DOORS[door]
    copied(whole, folder)
    (folder / "hostile.bin").write_bytes(bytes(4))  # beside the table of flat weights
    file = folder / f"hostile{suffix}"
    return sentence(lambda: use(folder, made(file, content)))


def name_in(door: str) -> str:
    """What the sentence of a door names: a file of a folder by its own name."""
    return {"Step.load": door.partition(", ")[2], "load_adapter": "adapter"}.get(door.partition(",")[0], "hostile")


@pytest.mark.sweep(0.01)
@pytest.mark.parametrize("content", [*PLACES, *CONTENTS])
@pytest.mark.parametrize("door", DOORS)
def test_a_hostile_file_is_refused_in_a_sentence_that_names_it(
    door: str, content: str, whole: Path, tmp_path: Path
) -> None:
    if content == "nothing" and "," in door and "Flat" not in door:
        pytest.skip("no file to put into the place of another")
    said = opened_by(door, whole, tmp_path, content)
    assert said, "it is accepted"
    assert name_in(door) in said or said.startswith("the table has the columns"), said


@pytest.mark.sweep(0.41)
@pytest.mark.parametrize("content", ["a pipe", "nested lists", "a pickle in a zip", "a header of signs"])
def test_every_door_refuses_the_worst(content: str, whole: Path, tmp_path: Path) -> None:
    """A few contents at all doors, whatever the sample of the sweep is."""
    for i, door in enumerate(DOORS):
        assert opened_by(door, whole, tmp_path / str(i), content), door


# --- documents that are well formed, with hostile values -------------------------------------------------------


def with_metadata(model: onnx.ModelProto, key: str, text: str) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.metadata_props[:]
    onnx.helper.set_model_props(copy, {**{p.key: p.value for p in model.metadata_props}, key: text})
    return copy


def uses_of_model(model: onnx.ModelProto, folder: Path) -> Iterator[Callable[[], object]]:
    """All that reads what a model says of itself."""
    onnx.save(model, folder / "marked.onnx")
    yield lambda: load_model(folder / "marked.onnx")
    yield lambda: gg.build(model)
    yield lambda: gg.surgery.merge_adapters(model)
    yield lambda: gg.surgery.merge_adapters(model, requantise=True)
    yield lambda: gg.surgery.save_adapter(model, folder / "saved")
    yield lambda: gg.surgery.save_adapter(model, folder / "saved.onnx_adapter")
    yield lambda: gg.surgery.use_adapters(model, {"default": 0.5})
    yield lambda: gg.surgery.switchable(model)
    yield lambda: gg.lora(model, "*", name="second")
    yield lambda: gg.qat(model)
    yield lambda: gg.distill(model, mlp())
    yield lambda: gg.surgery.in_float32(model)
    yield lambda: gg.check_gradients(model)
    yield lambda: describe(model, Selection())


def settings_of(model: onnx.ModelProto, folder: Path) -> dict[str, Any]:
    gg.surgery.save_adapter(model, folder / "adapter")
    read: dict[str, Any] = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    return read


def loads_adapter(folder: Path, text: str) -> Iterator[Callable[[], object]]:
    (folder / "adapter" / "adapter_config.json").write_text(text)
    yield lambda: gg.surgery.load_adapter(mlp(), folder / "adapter")


def loads_step(folder: Path, text: str) -> Iterator[Callable[[], object]]:
    (folder / "step" / "manifest.json").write_text(text)
    yield lambda: Step.load(folder / "step")


def loads_table(folder: Path, text: str) -> Iterator[Callable[[], object]]:
    (folder / "flat.json").write_text(text)
    yield lambda: FlatWeights.load(folder / "flat.bin")


def loads_checkpoint(folder: Path, text: str) -> Iterator[Callable[[], object]]:
    tensors = safetensors.numpy.load_file(folder / "run.ckpt")
    safetensors.numpy.save_file(tensors, folder / "run.ckpt", {"gradgraph": text})
    specs = Step.load(folder / "step").manifest.state
    yield lambda: load_checkpoint(folder / "run.ckpt", specs)


def record_in(folder: Path) -> dict[str, Any]:
    with safetensors.safe_open(folder / "run.ckpt", framework="np") as file:
        read: dict[str, Any] = json.loads(file.metadata()["gradgraph"])
        return read


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    names = gg.DataNames({"x": list("abcd")}, {"target": list("efg")})
    return with_metadata(model, *next(iter(names.as_metadata().items())))


def entry_of(model: onnx.ModelProto, key: str) -> Any:
    return json.loads(next(p.value for p in model.metadata_props if p.key == key))


def annotations_of(folder: Path) -> Any:
    pytest.importorskip("PIL", reason="pictures are read by Pillow")
    from tests.kit import drawn_shapes

    table = json.loads(drawn_shapes.coco(folder / "coco", 2, (16, 16), most=2).read_text())
    table["annotations"][0]["segmentation"] = {"size": [16, 16], "counts": [100, 20, 136]}
    return table


def loads_annotations(folder: Path, text: str) -> Iterator[Callable[[], object]]:
    (folder / "coco" / "annotations.json").write_text(text)
    image, masks = TensorSpec("x", "float32", ("n", 3, 8, 8)), TargetSpec("m", "bool", ("n", "objects", 8, 8))

    def read() -> object:
        data = gg.vision.coco(folder / "coco", augment=["flip", "zoom"])
        return next(data.load(iter([range(len(data))]), {"x": image, "m": masks}, (1, 2)))

    yield read


def tokenizer_in(folder: Path) -> Any:
    pytest.importorskip("tokenizers", reason="texts require tokenizers")
    from tests.kit import tiny_bert

    return json.loads(tiny_bert.tokenizer(folder / "tokenizer.json", left=True).read_text())


def loads_tokenizer(folder: Path, text: str) -> Iterator[Callable[[], object]]:
    (folder / "tokenizer.json").write_text(text)
    texts = ["the lake is wonderfully calm", "", "the"]
    yield lambda: gg.text.Tokenizer(folder / "tokenizer.json").encode(texts, 8)


PIXELS = {
    "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 18}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.25] * 3,
}  # fmt: skip
PREPROCESSOR = "preprocessor_config.json"


def of_pictures(folder: Path) -> Path:
    signature = "(float[N, 3, 16, 16] x) => (float[N, 1, 16, 16] y)"
    onnx.save(parsed(f"{signature} {{ y = Conv(x, w) }}", w=real(1, 3, 1, 1)), folder / "pictures.onnx")
    return folder / "pictures.onnx"


def loads_preprocessor(folder: Path, text: str) -> Iterator[Callable[[], object]]:
    (folder / PREPROCESSOR).write_text(text)
    yield lambda: gg.build(of_pictures(folder), loss="mse").manifest.data.images.get("x")


# a document, given the folder of what is whole, and what opens another one in its place
Document = tuple[Callable[[Path], Any], Callable[[Path, str], Iterator[Callable[[], object]]]]
MARKED: dict[str, Callable[[], onnx.ModelProto]] = {
    "gradgraph.adapters": lambda: gg.lora(mlp(), "*"),
    "gradgraph.teacher": lambda: gg.distill(mlp(), mlp()),
    "gradgraph.data": lambda: named(mlp()),
    "gradgraph.quantised": lambda: gg.qat(mlp(), arrays(32), ranges="learned"),
}
DOCUMENTS: dict[str, Document] = {
    **{
        key: (
            lambda f, key=key, make=make: entry_of(make(), key),
            lambda f, text, key=key, make=make: uses_of_model(with_metadata(make(), key, text), f),
        )
        for key, make in MARKED.items()
    },
    **{
        f"settings of {kind}": (lambda f, kind=kind: settings_of(gg.lora(mlp(), "*", kind=kind), f), loads_adapter)
        for kind in ("lora", "ia3", "bottleneck")
    },
    "manifest": (lambda f: json.loads((f / "step" / "manifest.json").read_text()), loads_step),
    "flat table": (lambda f: json.loads((f / "flat.json").read_text()), loads_table),
    "record": (record_in, loads_checkpoint),
    "coco": (annotations_of, loads_annotations),
    "tokenizer": (tokenizer_in, loads_tokenizer),
    "preprocessor": (lambda f: PIXELS, loads_preprocessor),
}
PLACE = "the place of the value"


@pytest.mark.sweep(0.005)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_value_is_read_or_refused_in_a_sentence(
    name: str, value: str, whole: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    document, use = DOCUMENTS[name]
    folder = copied(whole, tmp_path)
    right = document(folder)
    paths = fields_of(right)
    if request.config.getoption("sweeps") < 1:
        paths = random.Random(0).sample(paths, min(len(paths), 6))
    for path in paths:
        text = json.dumps(replaced(right, path, PLACE)).replace(f'"{PLACE}"', VALUES[value])
        for door in use(folder, text):
            sentence(door)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_is_right_is_read(name: str, whole: Path, tmp_path: Path) -> None:
    document, use = DOCUMENTS[name]
    folder = copied(whole, tmp_path)
    assert next(iter(use(folder, json.dumps(document(folder)))))() is not None


@pytest.mark.sweep(0.15)
@pytest.mark.parametrize("content", [*PLACES, *CONTENTS])
def test_a_hostile_file_beside_a_model_is_told_and_not_used(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody named it, so the model opens without it."""
    model = of_pictures(tmp_path)
    made(tmp_path / PREPROCESSOR, content)
    with bounded(), caplog.at_level(logging.WARNING, "gradgraph"):
        assert not gg.build(model, loss="mse").manifest.data.images
    said = [m for m in caplog.messages if PREPROCESSOR in m]
    assert len(said) == (content != "nothing")
    assert all(m.isprintable() and len(m) <= LONGEST_MESSAGE for m in said)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "a?" * 30 + "a" * 30, ".*" * 20 + "b", "(", "a{99999999999}"])
@pytest.mark.parametrize("table", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_take_ages_are_refused(table: str, pattern: str, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({**settings, table: {pattern: 4}}))
    model = mlp()
    assert "adapter_config.json" in sentence(lambda: gg.surgery.load_adapter(model, folder / "adapter"))


# --- the shell ------------------------------------------------------------------------------------------------

TRAIN = ["train", "model.onnx", "--data", "train.npz", "--epochs", "1"]
COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "hostile.onnx"],
    "build": ["build", "hostile.onnx"],
    "check": ["check", "hostile.onnx"],
    "grad": ["grad", "hostile.onnx"],
    "recipe": ["train", "hostile.toml"],
    "data": ["train", "model.onnx", "--data", "hostile.npz"],
    "validation": [*TRAIN, "--validation", "hostile.npz"],
    "weights": [*TRAIN, "--weights", "hostile.safetensors"],
    "resume": [*TRAIN, "--checkpoint", "hostile.ckpt", "--resume"],
    "predict": ["predict", "model.onnx", "--data", "hostile.npz"],
    "evaluate": ["evaluate", "step", "--data", "train.npz", "--checkpoint", "hostile.ckpt"],
    "export": ["export", "step", "--weights", "hostile.safetensors"],
    "export of flat weights": ["export", "step", "--weights", "hostile.bin"],
    "load": ["surgery", "model.onnx", "--load", "hostile.safetensors"],
    "load arrays": ["surgery", "model.onnx", "--load", "hostile.npz"],
    "teacher": ["surgery", "model.onnx", "--teacher", "hostile.onnx"],
    "qat": ["surgery", "model.onnx", "--qat", "hostile.npz"],
}


@pytest.mark.sweep(0.05)
@pytest.mark.parametrize("content", [*PLACES, *CONTENTS])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_hostile_file(
    command: str,
    content: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copied(whole, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[command]
    made(tmp_path / next(Path(w).name for w in words if w.startswith("hostile")), content)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with bounded():
        code = run(words)
    last = capsys.readouterr().err.splitlines()[-1]
    assert code in (1, 2), last
    assert last.startswith("error: ") or code == 2, last
    assert "hostile" in last and "bug" not in last and last.isprintable(), last
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


FROM_STDIN: dict[str, list[str]] = {
    "train": ["train", "model.onnx", "--epochs", "1"],
    "predict": ["predict", "model.onnx"],
    "evaluate": ["evaluate", "step", "--checkpoint", "run.ckpt"],
}


class Endless(io.RawIOBase):
    """Zeros that never end, as of /dev/zero."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        buffer[:] = bytes(len(buffer))
        return len(buffer)


@pytest.mark.sweep(0.2)
@pytest.mark.parametrize("content", ["without an end", *CONTENTS])
@pytest.mark.parametrize("command", FROM_STDIN)
def test_a_command_refuses_what_comes_from_stdin(
    command: str,
    content: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copied(whole, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    raw = io.BytesIO(CONTENTS[content]) if content in CONTENTS else io.BufferedReader(Endless())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    with bounded():
        code = run([*FROM_STDIN[command], "--data", "-"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert code in (1, 2), last
    assert last.startswith("error: "), last
    assert "stdin" in last and "bug" not in last and last.isprintable(), last
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


ENDS = {  # operators that end the process in onnxruntime where a value of unknown shape has other axes
    "RoiAlign": "RoiAlign (x, rois, rows)",
    "MaxRoiPool": "MaxRoiPool <pooled_shape = [2, 2]> (x, rois)",
}


@pytest.mark.sweep(0.14)
@pytest.mark.parametrize("operator", ENDS)
def test_check_ends_no_process(operator: str, tmp_path: Path) -> None:
    ends = "(float[N, 2, 8, 8] x, float[] rois) => (float[] y) <int64[4] rows = {0, 1, 1, 0}>"
    text = f'<ir_version: 10, opset_import: ["" : 21]> g {ends} {{ y = {ENDS[operator]} }}'
    model = onnx.parser.parse_model(text.replace("float[] rois", "float[R] rois"))
    model.graph.input[1].type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "model.onnx")
    words = [sys.executable, "-m", "gradgraph.cli", "check", "model.onnx"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert "Fatal" not in done.stderr


def test_an_input_that_nobody_could_draw_is_a_sentence() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[2, 1099511627776] x) => (float[2] y) { y = ReduceSum (x) }'
    )
    model = onnx.parser.parse_model(text)
    assert "'x' of shape [2, 1099511627776] has too many elements" in sentence(lambda: gg.check_gradients(model))
