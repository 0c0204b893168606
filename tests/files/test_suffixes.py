"""What an extension says is what is written: every writer refuses those of other formats."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import gradgraph as gg
from gradgraph import export, surgery
from gradgraph.errors import OutputError
from gradgraph.files.suffixes import FORMATS
from tests.chat import small_folder
from tests.kit.command_line import arrays, mlp
from tests.repository.test_misspelt_words import PUBLIC

MODEL = mlp()
SCALAR = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 4] x) => (float loss) { s = Mul(x, x) loss = ReduceSum<keepdims=0>(s) }""")
STEP = gg.build(MODEL)
HEAD = gg.build(MODEL, train=gg.build(MODEL).manifest.trainable[-1:])
ADAPTED = gg.lora(MODEL, "*", rank=2)


def fit(path: Path) -> None:
    gg.Trainer(STEP, device="cpu").fit(arrays(32), checkpoint=path, progress=False)


def run(**outputs: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(MODEL, Path(folder) / "m.onnx")
        np.savez(Path(folder) / "data.npz", **arrays(32))
        gg.train(gg.Run(Path(folder) / "m.onnx", data=Path(folder) / "data.npz", epochs=1, **outputs), progress=False)


def history(path: Path) -> None:
    gg.Trainer(STEP, device="cpu").fit(arrays(32), progress=False).to_csv(path)


def mistakes(path: Path) -> None:
    export.save_mistakes(gg.Trainer(STEP, device="cpu"), arrays(32), path)


def tuned(path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
    with tempfile.TemporaryDirectory() as folder:
        base = small_folder.write(Path(folder) / "llm")
        gg.finetune(base, [{"text": "ab"}], path, epochs=1, held_out=0.0, merge="none", progress=False)


# by callable and argument: a call with a path, and the extensions that are its own; none of a folder
WRITERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    **{f"gg.{f.__name__}(out)": (lambda path, f=f: f(SCALAR, wrt="x", out=path), (".onnx",))
       for f in (gg.hessian, gg.hvp, gg.jacobian, gg.jvp, gg.value_and_grad, gg.vjp)},
    "gg.along(out)": (lambda path: gg.along(MODEL, 2, wrt="x", baseline=0.0, out=path), (".onnx",)),
    "gg.explain(out)": (lambda path: gg.explain(MODEL, "gradient", target=0, out=path), (".onnx",)),
    "gg.gradient_norm(out)": (lambda path: gg.gradient_norm(MODEL, out=path), (".onnx",)),
    "gg.laplace(out)": (lambda path: gg.laplace(MODEL, arrays(8), out=path), (".onnx",)),
    "gg.iterate(out)": (
        lambda path: gg.iterate(SCALAR, 2, wrt="x", update=gg.optim.sgd(0.1), per_sample=False, out=path), (".onnx",)),
    "gg.solve(out)": (lambda path: gg.solve(MODEL, 2, wrt="x", out=path), (".onnx",)),
    "gg.per_sample_gradients(out)": (lambda path: gg.per_sample_gradients(SCALAR, wrt="x", out=path), (".onnx",)),
    "gg.reduce(out)": (lambda path: gg.reduce(SCALAR, shows=lambda model: True, out=path), (".onnx",)),
    "export.save_inference(path)": (lambda path: export.save_inference(STEP, path), (".onnx",)),
    "export.save_inference(path), sizes": (lambda path: export.save_inference(STEP, path, sizes={"N": 2}), (".onnx",)),
    "export.save_weights(path)": (lambda path: export.save_weights(STEP, path), (".safetensors",)),
    "export.save_page(path)": (lambda path: export.save_page(STEP, path), (".html",)),
    "export.save_mistakes(path)": (mistakes, (".html",)),
    "export.save_required_operators(path)": (lambda path: export.save_required_operators(MODEL, path), (".config",)),
    "export.save_ort(folder)": (lambda path: export.save_ort(STEP, path), ()),
    "export.save_split(folder)": (lambda path: export.save_split(HEAD, path), ()),
    "export.c(folder)": (lambda path: export.c(STEP, path, sizes={"N": 2}), ()),
    "FlatWeights.save(path)": (lambda path: export.flat_weights(STEP).save(path), (".bin",)),
    "gg.finetune(out)": (tuned, ()),
    "surgery.save_adapter(folder)": (lambda path: surgery.save_adapter(ADAPTED, path), ()),
    "Trainer.export(path)": (lambda path: gg.Trainer(STEP, device="cpu").export(path), (".onnx",)),
    "Trainer.export_file(path)": (lambda path: gg.Trainer(STEP, device="cpu").export_file(path), (".onnx",)),
    "Trainer.save(path)": (lambda path: gg.Trainer(STEP, device="cpu").save(path), (".ckpt", ".safetensors")),
    "Trainer.fit(checkpoint)": (fit, (".ckpt", ".safetensors")),
    "Step.save(folder)": (STEP.save, ()),
    "gg.Run(checkpoint)": (lambda path: run(checkpoint=path), (".ckpt", ".safetensors")),
    "gg.Run(out)": (lambda path: run(out=path), ()),
    "History.to_csv(path)": (history, (".csv",)),
}  # fmt: skip
READ = {"gg.image_folder(path)", "gg.read_run(path)", "gg.shards(path)", "surgery.load_adapter(folder)",
        "extend.library(path)", "Trainer.load(path)", "Trainer.resume(path)", "Step.load(folder)", "gg.Step(folder)",
        "gg.finetune(folder)", "vision.coco(path)", "vision.yolo(path)", "vision.masks(path)", "vision.read(path)",
        "vision.is_annotated(path)"}  # fmt: skip
KEEPERS = {"gg.CheckpointKeeper(folder)"}  # a folder of files that it names itself


def test_every_writer_is_here() -> None:
    found = {
        f"{name}({p.name})"
        for name, called in PUBLIC.items()
        if not name.startswith(("frontend.", "surgery."))  # surgery/test_untouched.py has those
        for p in inspect.signature(called).parameters.values()
        if p.name in ("path", "out", "folder", "checkpoint") and "Path" in str(p.annotation)
    }
    reads_checkpoints = {name for name in found if name.startswith("export.") and name.endswith("(checkpoint)")}
    of_surgery = {"gg.distill(out)", "gg.lora(out)", "gg.new_head(out)", "gg.qat(out)"}
    assert found - WRITERS.keys() == READ - {"surgery.load_adapter(folder)"} | KEEPERS | reads_checkpoints | of_surgery


@pytest.mark.parametrize("name", WRITERS)
def test_the_extension_of_another_format_is_refused(name: str, tmp_path: Path) -> None:
    write, own = WRITERS[name]
    for suffix in FORMATS.keys() - set(own):
        with pytest.raises(OutputError, match="has the extension of"):
            write(tmp_path / f"it{suffix}")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WRITERS)
def test_its_own_and_unknown_extensions_are_written(name: str, tmp_path: Path) -> None:
    write, own = WRITERS[name]
    for suffix in own or ("", ".mine"):
        write(tmp_path / f"it{suffix.upper()}")
        assert (tmp_path / f"it{suffix.upper()}").exists()


def test_what_writes_that_format_is_named(tmp_path: Path) -> None:
    trainer = gg.Trainer(STEP, device="cpu")
    says = (r"'w.safetensors' has the extension of weights alone, but a model is written there; "
            r"call it 'w.onnx'; .safetensors is written by "
            r"gradgraph.export.save_weights\(step, path, checkpoint\)")  # fmt: skip
    with pytest.raises(OutputError, match=says):
        trainer.export(tmp_path / "w.safetensors")
    with pytest.raises(OutputError, match=r"call it 'w.ckpt'; .onnx is written by trainer.export\(path\)"):
        trainer.save(tmp_path / "w.onnx")
    with pytest.raises(OutputError, match=r"a model of Core ML, but a model is written there; call it 'w.onnx'$"):
        trainer.export(tmp_path / "w.mlmodel")
