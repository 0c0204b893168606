"""``gradgraph export``: write the inference model, weights or artifacts of a step folder and a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from gradgraph.cli import output
from gradgraph.cli.choices import PATH, Bytes
from gradgraph.cli.command import Command
from gradgraph.cli.options import CHECKPOINT, CUSTOM_OPS, FORCE, NOT_AVERAGED, STORE, UNTRAINED, build_option
from gradgraph.cli.run_weights import checkpoint_to_use
from gradgraph.files.files_written import written
from gradgraph.files.path_kinds import step_of
from gradgraph.runs.run_data import carry_tokenizer
from gradgraph.step.output_paths import check_output

if TYPE_CHECKING:
    import onnx_ir as ir

    from gradgraph.export.temperature import Temperature
    from gradgraph.runtime.trainer import Trainer


@click.command("export", cls=Command)
@click.argument("step", type=PATH)
@CHECKPOINT
@UNTRAINED
@click.option("--weights", type=PATH, help="Use these weights instead: .safetensors, .npz, .onnx, or a flat .bin.")
@click.option(
    "-o",
    "--out",
    type=PATH,
    default="trained.onnx",
    show_default=True,
    help="Output file. A model: .onnx or .ort. Weights only: .safetensors or a flat .bin. Operators for a minimal "
    "onnxruntime build: .config.",
)
@click.option("--ort", is_flag=True, help="Write the whole step as .ort files into the folder --out.")
@click.option("--c", "as_c", is_flag=True, help="Write C99 source files into the folder --out: a step trains without "
                                               "any runtime, and a model computes its outputs.")  # fmt: skip
@click.option("--ram", type=Bytes(), metavar="SIZE", help="With --c, reject a step that needs more RAM, such as 256KB.")
@click.option("--output", "outputs", multiple=True, metavar="NAME", help="Output to keep; repeatable. Default: all.")
@NOT_AVERAGED
@click.option("--mixed", is_flag=True, help="Keep the mixed precision of the step. Default: export in float32.")
@build_option("size")
@click.option("--image-input", is_flag=True, help="Accept image bytes (uint8 [samples, height, width, channels]): "
                                                  "resizing and normalisation become part of the model.")  # fmt: skip
@STORE
@click.option(
    "--quantize",
    type=click.Choice(["int8"]),
    help="Quantise weights only or, with --calibration, all operators with an integer kernel (quantised weights are "
    "then from -64 to 64, so that products do not saturate on any processor).",
)
@click.option(
    "--calibration",
    type=PATH,
    metavar="DATA",
    help="Samples to calibrate the ranges of --quantize, in a format that predict reads; a few hundred suffice.",
)
@click.option(
    "--calibrate",
    type=PATH,
    metavar="HELD_OUT",
    help="Calibrate probabilities on these held-out data by temperature scaling, and print the effect.",
)
@CUSTOM_OPS
@click.option("--types", is_flag=True, help="In a .config, include the element types of each operator.")
@FORCE
@output.json_option
def command(step: Path, out: Path, as_json: bool, force: bool, untrained: bool, **given: Any) -> None:
    """Write the model of a STEP folder (or of a run's folder) as plain ONNX, without loss and optimizer,
    with layers in evaluation mode.

    Examples:
      gradgraph export runs/one -o trained.onnx
      gradgraph export step/ --checkpoint run.ckpt -o trained.onnx
      gradgraph export step/ --checkpoint run.ckpt -o weights.safetensors
      gradgraph export step/ --weights weights.bin --size batch=1 --store float16 -o trained.onnx
      gradgraph export runs/one --quantize int8 --calibration some.npz -o int8.onnx
      gradgraph export runs/one --calibrate held_out.npz -o calibrated.onnx
      gradgraph export step/ -o required_operators.config
      gradgraph export step/ --ort -o step-ort/
      gradgraph export step/ --c --size batch=1 --ram 256KB -o trainer/
    """
    export = _Export(step, out, **given)
    kind = _KINDS[export.kind]
    export.check(kind)
    if "checkpoint" not in kind.takes and untrained:
        raise click.UsageError(f"--untrained has no effect on {kind.what}; omit it")
    if "checkpoint" in kind.takes and export.weights is None:
        export = replace(export, checkpoint=checkpoint_to_use(step, export.checkpoint, untrained, required=False))
    export = replace(export, step=step_of(step))  # after the weights, which a run folder also has
    in_folder = export.ort or export.as_c
    if not in_folder:
        check_output(out, step, *(p for p in (export.checkpoint, export.weights) if p))
    facts = kind.write(export, force) if in_folder else kind.write(export)
    tokenizer = None
    if out.suffix in (".onnx", ".ort") and not in_folder:
        tokenizer = carry_tokenizer(step, out)
    if as_json:
        output.emit_json({name: value for name, value in facts.items() if name != "checked"})
        return
    for remark in filter(None, (facts.get("calibrated"), facts.get("stored"), facts.get("quantized"))):
        output.say(remark)
    initial = "checkpoint" in kind.takes and facts.get("state") != 0  # a model in C has no state
    settled = not initial or untrained or export.checkpoint or export.weights
    remark = "" if settled else ", with the initial weights (no --checkpoint was given)"
    output.say(f"wrote {written(out, tokenizer)}: {kind.words.format(**facts)}{remark}")
    if checked := facts.get("checked"):
        output.say(checked)


@dataclass(frozen=True)
class _Export:
    step: Path
    out: Path
    checkpoint: Path | None
    weights: Path | None
    ort: bool
    as_c: bool
    ram: int | None
    outputs: tuple[str, ...]
    not_averaged: bool
    mixed: bool
    size: dict[str, Any]
    image_input: bool
    store: str
    quantize: str | None
    calibration: Path | None
    calibrate: Path | None
    types: bool

    @property
    def kind(self) -> str:
        """The key in ``_KINDS`` of the kind of file to write."""
        if self.ort or self.as_c:
            return "c" if self.as_c else "folder"
        return self.out.suffix if self.out.suffix in _KINDS else ".onnx"

    def check(self, kind: _Kind) -> None:
        """Raise UsageError for options that do not apply to the output ``kind``, or contradict each other."""
        options = {
            "checkpoint": self.checkpoint, "weights": self.weights, "output": self.outputs,
            "not-averaged": self.not_averaged, "mixed": self.mixed, "size": self.size,
            "image-input": self.image_input, "ram": self.ram,
            "store": self.store != "float32", "quantize": self.quantize, "calibration": self.calibration,
            "calibrate": self.calibrate, "types": self.types,
        }  # fmt: skip
        if self.ort and self.as_c:
            raise click.UsageError("--c and --ort write different files; pass one of them")
        if self.calibration and not self.quantize:
            raise click.UsageError("--calibration requires --quantize int8; use --calibrate to calibrate probabilities")
        if self.quantize and (self.mixed or self.store != "float32"):
            raise click.UsageError("--quantize requires float32 weights; omit --mixed and --store")
        for name, value in options.items():
            if value and name not in kind.takes:
                raise click.UsageError(f"--{name} has no effect on {kind.what}; omit it")

    def other_weights(self) -> Any:
        """Return the path of ``--weights``, or the arrays by name in a ``.bin``; None without the option."""
        if self.weights is None or self.weights.suffix != ".bin":
            return self.weights
        from gradgraph.export import FlatWeights

        return FlatWeights.load(self.weights).arrays()


@dataclass(frozen=True)
class _Kind:
    """A kind of output of ``gradgraph export``, such as a weight file, with the options that apply to it (``takes``).

    ``what`` is its name in messages; ``words`` is a format string for the facts that ``write`` returns.
    """

    what: str
    write: Any
    words: str
    takes: tuple[str, ...]


def _model(export: _Export, trainer: Trainer, is_compared: bool = False) -> tuple[ir.Model, dict[str, Any]]:
    """Return the model to write, and facts about it for messages. Large weights are not copied.

    ``is_compared``: whether the written file is compared with the step later.
    """
    from gradgraph.export.artifacts import served
    from gradgraph.export.storage import store_as_float16

    model = served(trainer, export.outputs or None, averaged=not export.not_averaged, mixed=export.mixed,
                   sizes=export.size)  # fmt: skip
    facts = {"file": str(export.out), **_shape_of(model)}
    if export.calibrate:
        found = _calibrated(export, trainer, model)
        facts |= {"calibrated": str(found), "calibration": found.as_data, "nodes": len(model.graph)}
    if export.store == "float16":
        stored = store_as_float16(model)
        facts |= {"stored": str(stored), "largest_error": stored.largest_error, "relative_error": stored.relative_error}
    if export.quantize:
        from gradgraph.surgery.integer_model import quantized

        small = quantized(model, _samples(export, model), compares=not is_compared)
        model = cast("ir.Model", small.result)
        facts |= {"quantized": str(small), "nodes": len(model.graph), "samples": small.samples}
        if small.outputs is not None:
            facts["quantized_outputs"] = {name: vars(one) for name, one in small.outputs.items()}
    return model, facts


def _samples(export: _Export, model: ir.Model) -> Any:
    """Return the samples of ``--calibration``, read with the preprocessing of the model; None without the option."""
    from gradgraph.data.record.data_names import DataNames
    from gradgraph.runs.run_data import Reading

    if export.calibration is None:
        return None
    return Reading(model=export.step).data(export.calibration, DataNames.read_from(model.metadata_props))


def _calibrated(export: _Export, trainer: Trainer, model: ir.Model) -> Temperature:
    """Fit a temperature on the data of ``--calibrate``, and divide the logits in ``model`` by it, in place."""
    from gradgraph.export.temperature import put_temperature, temperature_of
    from gradgraph.runs.run_data import Reading

    assert export.calibrate is not None
    held_out = Reading(model=export.step).data(export.calibrate, trainer.names)
    output = export.outputs[0] if export.outputs else None
    found, _ = temperature_of(trainer, held_out, output=output, averaged=not export.not_averaged)
    put_temperature(model, found.temperature)  # changes the first output, which is the requested one
    return found


def _opened(export: _Export) -> Trainer:
    """Return a trainer with the weights to export, packed only for ``--calibrate``, which runs many batches."""
    from gradgraph.export.artifacts import opened_trainer
    from gradgraph.runtime.execution.session import RuntimeOptions

    options = None if export.calibrate else RuntimeOptions(pack_weights=False)
    return opened_trainer(export.step, export.checkpoint, export.other_weights(), options)


def _onnx(export: _Export) -> dict[str, Any]:
    from gradgraph.export.comparison import report_of
    from gradgraph.export.image_input import taking_images
    from gradgraph.files.models import save_model
    from gradgraph.graph.checks import validate
    from gradgraph.runtime.execution.exported import plain

    trainer, is_compared = _opened(export), not export.calibrate  # calibrated probabilities differ on purpose
    model, facts = _model(export, trainer, is_compared)
    validate(model)  # before an existing file is replaced
    if export.image_input:
        taking_images(model)  # raises an error now, before an existing file is replaced
    save_model(plain(model), export.out)
    if is_compared:
        report = report_of(export.out, trainer, averaged=not export.not_averaged)
        facts |= report.as_data | {"checked": str(report)}
        if export.quantize:
            facts.setdefault("quantized_outputs", report.as_data["compared"])
    if export.image_input:
        model = taking_images(export.out)
        save_model(model, export.out)
        facts |= _shape_of(model)
    return facts


def _ort(export: _Export) -> dict[str, Any]:
    from gradgraph.export.image_input import taking_images
    from gradgraph.export.ort_format import write_ort_models

    model, facts = _model(export, _opened(export))
    if export.image_input:
        model = taking_images(model)
        facts |= _shape_of(model)
    write_ort_models({export.out: model})
    return facts


def _shape_of(model: ir.Model) -> dict[str, Any]:
    graph = model.graph
    names = {"inputs": [i.name for i in graph.inputs], "outputs": [o.name for o in graph.outputs]}
    return {"nodes": len(graph), **names}


def _safetensors(export: _Export) -> dict[str, Any]:
    from gradgraph.export import save_weights

    arrays = save_weights(export.step, export.out, export.checkpoint, averaged=not export.not_averaged)
    return {"file": str(export.out), "tensors": len(arrays), "bytes": sum(a.nbytes for a in arrays.values())}


def _flat(export: _Export) -> dict[str, Any]:
    from gradgraph.export.flat import save_flat

    table = export.out.with_suffix(".json")
    check_output(table, export.step)
    places = save_flat(export.step, export.out, export.checkpoint)
    elements = sum(place.size for place in places)
    return {"file": str(export.out), "table": str(table), "tensors": len(places), "elements": elements}


def _config(export: _Export) -> dict[str, Any]:
    from gradgraph.export import save_required_operators

    lines = save_required_operators(export.step, export.out, types=export.types).split("\n")
    return {"file": str(export.out), "opsets": len([line for line in lines if line.strip()])}


def _ort_folder(export: _Export, force: bool) -> dict[str, Any]:
    from gradgraph.export import save_ort

    folder = save_ort(export.step, export.out, force=force, types=export.types)
    return {"folder": str(folder), "files": sorted(f.name for f in folder.iterdir())}


def _c_folder(export: _Export, force: bool) -> dict[str, Any]:
    from gradgraph.export import c

    made = c(export.step, export.out, export.ram, sizes=export.size, checkpoint=export.checkpoint,
             weights=export.other_weights(), force=force)  # fmt: skip
    return {"folder": str(export.out), "state": made.state, "arena": made.arena, "constants": made.constants}


_WEIGHTS = ("checkpoint", "not-averaged", "weights")
_MODEL = (*_WEIGHTS, "output", "mixed", "size", "image-input", "store", "quantize", "calibration", "calibrate")
_KINDS = {
    ".onnx": _Kind("a model", _onnx, "{nodes} nodes", _MODEL),
    ".ort": _Kind("an .ort file", _ort, "{nodes} nodes, as onnxruntime optimises them", _MODEL),
    ".safetensors": _Kind("a file of weights", _safetensors, "{tensors} tensors", ("checkpoint", "not-averaged")),
    ".bin": _Kind("a flat vector", _flat, "{tensors} tensors, {elements} numbers; {table} says where", ("checkpoint",)),
    ".config": _Kind("a list of operators", _config, "operators of {opsets} opsets", ("types",)),
    "c": _Kind("C source files", _c_folder, "{state:,} bytes of state and {arena:,} of working memory in RAM, "
               "{constants:,} of constants in flash", ("checkpoint", "weights", "size", "ram")),
    "folder": _Kind("a step of .ort files", _ort_folder, "{files}", ("types",)),
}  # fmt: skip
