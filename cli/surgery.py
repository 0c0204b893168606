"""``gradgraph surgery``: edit a model, such as its head, inputs and outputs, adapters or weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gradgraph.cli import output, surgery_options
from gradgraph.cli.choices import PATH
from gradgraph.cli.command import Command
from gradgraph.cli.options import typed_by_user
from gradgraph.cli.surgery_options import CHANGES, OPTIONS, Change
from gradgraph.errors import OutputError, listed, shown
from gradgraph.files.atomic import explain_errors
from gradgraph.files.files_written import written
from gradgraph.step.output_paths import check_output


@click.command("surgery", cls=Command)
@click.argument("model", type=PATH)
@surgery_options.options
@click.option(
    "-o",
    "--out",
    type=PATH,
    default="edited.onnx",
    show_default=True,
    help="Output file; for the folder of a language model, also a folder. With only --save-adapter, a model is written "
    "only if this is given.",
)
@output.json_option
@click.pass_context
def command(ctx: click.Context, /, model: Path, out: Path, as_json: bool, **asked: Any) -> None:
    """Edit a MODEL (.onnx, or the folder of a language model), as you would edit its source code in a framework.
    Several changes are made in the order of the options below.

    Examples:
      gradgraph surgery resnet.onnx --new-head 7 -o mine.onnx
      gradgraph surgery vit.onnx --open pixels:0=batch --output features -o trunk.onnx
      gradgraph surgery bert.onnx --name-weights --load weights.safetensors --partly
      gradgraph surgery llm-int4/ --load hf-folder/ -o new/
      gradgraph surgery llm.onnx --lora '*q_proj*' --lora '*v_proj*' --rank 16 -o lora.onnx
      gradgraph surgery llm.onnx --lora '*attn*' --language-model -o train.onnx
      gradgraph surgery mobilenet-int8.onnx --new-head 7 --qat-quantised -o mine.onnx
      gradgraph surgery lora.onnx --merge --requantise --trained trained.onnx -o merged.onnx
      gradgraph surgery lora.onnx --save-adapter fr.onnx_adapter --trained trained.onnx
      gradgraph surgery small.onnx --teacher large.onnx --temperature 4 -o pupil.onnx
    """
    from gradgraph.data.record.image_preprocessing import learn_preprocessing
    from gradgraph.files.models import load_model

    changes = [each for change in CHANGES for each in _asked(ctx, change, asked)]
    asking = [change for change in CHANGES if _is_asked(change, asked)]
    writes = typed_by_user(ctx, ["out"]) or not all(change.keeps for change in asking)
    _check_companions(ctx, asked)
    if not changes:
        raise click.UsageError("no change was requested; give an option, such as --new-head 7", ctx)
    base = _folder(model)
    into = None
    if base is not None:
        model, into = base.model, None if out.suffix == ".onnx" else out
        out = out if into is None else out / base.model.relative_to(base.path)
    if writes and base is not None and into is not None:
        _check_folder(into, base)
    elif writes:
        check_output(out, model)
    if asked["load"] is not None:
        _check_family(model.parent if base is None else base.path, asked["load"])
    edited = load_model(model)
    if report := learn_preprocessing(edited, model):
        output.say(report)
    for _, change in changes:
        edited = change(edited)
    if writes:
        _write(edited, out, base, into)
    ends = {"inputs": edited.graph.inputs, "outputs": edited.graph.outputs}
    names = {kind: [v.name or "" for v in values] for kind, values in ends.items()}
    if as_json:
        weights = sum(1 for v in edited.graph.initializers.values() if not v.is_graph_input())
        output.emit_json({"file": str(out) if writes else None, "changes": [said for said, _ in changes], **names,
                          "nodes": len(edited.graph), "weights": weights})  # fmt: skip
        return
    for said, _ in changes:
        output.emit(said)
    if writes:
        output.say(f"wrote {written(out)}: from {listed(names['inputs'])} to {listed(names['outputs'])}")


def _folder(path: Path) -> Any:
    """Return the ModelFolder at ``path``, or None for a file or the folder of a run."""
    from gradgraph.files.path_kinds import Kind, kind_of

    if kind_of(path) is not Kind.FOLDER:
        return None
    from gradgraph.chat.model_folder import ModelFolder

    return ModelFolder.of(path)


def _check_family(folder: Path, weights: Path) -> None:
    """Raise DataError if ``weights`` are those of another family than the model in ``folder``."""
    from gradgraph.surgery.pretrained_files import check_family, is_pretrained, read_pretrained

    if is_pretrained(weights) or (weights.suffix == ".safetensors" and weights.is_file()):
        check_family(folder, read_pretrained(weights))


def _check_folder(out: Path, base: Any) -> None:
    """Raise OutputError if ``out`` is a file, or a folder with files."""
    if (
        out.resolve() == base.path.resolve()
        or (out.exists() and not out.is_dir())
        or (out.is_dir() and any(out.iterdir()))
    ):
        raise OutputError(f"'{shown(out)}' exists and is not an empty folder; choose another one with -o")


def _write(model: Any, out: Path, base: Any, into: Path | None) -> None:
    """Write the model to ``out``; if ``into`` is a folder, with the other files of the model's folder."""
    from gradgraph.files.models import save_model

    if into is None:
        save_model(model, out)
        return
    with explain_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, out)
    base.copy_beside(into)


def _is_asked(change: Change, typed: Mapping[str, Any]) -> bool:
    return any(typed[option.name] for option in change.asking)


def _asked(ctx: click.Context, change: Change, typed: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield the description of each requested change, and a function that returns the changed model."""
    if not _is_asked(change, typed):
        return
    found = {argument: option.argument(ctx, typed[option.name]) for argument, option in change.options.items()}
    given = {k: v for k, v in found.items() if not k.startswith("(") and v is not None and v != [] and v != {}}
    words = {k: ", ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in typed.items()}
    if change.each:
        for arguments in next(iter(found.values())):
            yield str(change.said).format(*arguments), functools.partial(_changed, change, arguments, given)
    else:
        said = change.said.format(**words) if isinstance(change.said, str) else change.said(words)
        yield said, functools.partial(_changed, change, (), given)


def _changed(change: Change, arguments: Sequence[Any], given: Mapping[str, Any], model: Any) -> Any:
    from gradgraph import surgery

    reported: dict[str, float] = {}
    report = {change.reports: reported} if change.reports else {}
    with output.printed_log("gradgraph.surgery"):
        result = getattr(surgery, change.function)(model, *arguments, **given, **report)
    for module, error in reported.items():
        output.say(f"{shown(module)}: requantised, relative error {error:.2%}")
    return model if result is None else result  # save_adapter does not change the model


def _check_companions(ctx: click.Context, typed: Mapping[str, Any]) -> None:
    """Raise UsageError for an option whose change is not requested, such as --rank without --lora."""
    for option in OPTIONS.values():
        changes = [change for change in CHANGES if option in change.options.values()]
        asking = [asks for change in changes for asks in change.asking]
        if typed_by_user(ctx, [option.name]) and not any(typed[asks.name] for asks in asking):
            one = "one of these" if len(asking) > 1 else "that"
            flags = " or ".join(asks.flag for asks in asking)
            raise click.UsageError(f"{option.flag} requires {flags}; add {one}, or omit {option.flag}", ctx)
