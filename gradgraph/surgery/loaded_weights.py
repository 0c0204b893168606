"""Weights of a file, loaded into a model: by name or, for files of other libraries, by module."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import FLAG, PATH, Kind, checked
from gradgraph.errors import ArgumentError, BuildError, DataError, UnknownNameError, counted, shown, suggestion
from gradgraph.files.model_metadata import given_names
from gradgraph.files.models import Source, is_saved_external
from gradgraph.files.spilled import Folder, SpilledWeights
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import known_sizes
from gradgraph.graph.weight_layouts import layouts
from gradgraph.runtime.saved.partial import OfModel, Stored
from gradgraph.surgery.folded_norms import contains_norm
from gradgraph.surgery.operation import Path, Result, closed, layers_log, opened, set_numbers, tensor_of
from gradgraph.surgery.pretrained_checks import check_plain
from gradgraph.surgery.pretrained_evidence import is_stored
from gradgraph.surgery.pretrained_files import (
    Pretrained,
    check_family,
    check_same_settings,
    is_pretrained,
    read_pretrained,
)
from gradgraph.surgery.pretrained_matches import is_integer
from gradgraph.surgery.pretrained_settings import check_settings
from gradgraph.surgery.pretrained_weights import Plan, is_buffer
from gradgraph.surgery.pretrained_writing import take_pretrained, untie_all
from gradgraph.surgery.two_decoders import give_both, is_merged, one_decoder
from gradgraph.surgery.weight_places import places_of
from gradgraph.surgery.weights import Arrays, first_names, read_weights, weights_of

_SPILLED = "gradgraph.spilled"  # Model.meta key: the folder of weights that are not in memory
_EPSILON = Kind("a number above 0", lambda value: isinstance(value, int | float) and 0 < value < 1)


@checked(strict=FLAG, turned=FLAG.or_none(), epsilon=_EPSILON.or_none(), out=PATH.or_none())
def load_weights(
    model: Source,
    weights: Arrays | Path,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    turned: bool | None = None,
    epsilon: float | None = None,
    exported_from: Arrays | Path | None = None,
    errors: dict[str, float] | None = None,
    out: Path | None = None,
) -> Result:
    """Load weights from a file, a folder or a dict of arrays.

    Tensors are matched by name. For the weights of another library, such as a folder of Hugging Face's transformers or
    a state dict of torchvision or timm, in which not all names are the model's, they are matched by module, and
    converted to the form in which the model stores each weight: transposed, packed with others (queries, keys and
    values; gate and up projections; experts of a mixture), merged with a BatchNormalization, tied, in float16, or
    quantised with the same type, blocks and kind of zero points. The number of tensors and weights is logged.

    A matrix may be transposed in the file: ``nn.Linear`` stores (outputs, inputs), and a MatMul reads (inputs,
    outputs). If its shape shows this, it is transposed. For a square matrix, the layout is known if the file is a
    model, a checkpoint or written by ``gg.export.save_weights``, or inferred from other matrices with a similar name;
    otherwise set ``turned``.

    PyTorch's older exporter evaluates constants and drops their names: a MatMul may read W, 0.99·W or a softmax of W,
    and the model does not say which. Such tensors, also under names of ``name_weights``, and layers that contain
    a BatchNormalization, are only replaced if the weights from which the model was exported are passed, too
    (``exported_from``): every replaced tensor must then be what these became in the model, up to rounding.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed.
        weights: a ``.safetensors``, ``.npz``, ``.onnx`` or checkpoint, or arrays by name; or a folder with safetensors
            in Hugging Face's format, in shards or not. ``config.json`` in this folder tells families apart that store
            normalisation weights differently.
        turned: whether square matrices that MatMuls read are transposed in the file.
        names: the name in the file by name of a weight of the model, if they differ. A weight in it is loaded as it is,
            under any name.
        strict: raise DataError if a weight of the model is missing in the file, or vice versa; constants of formulas
            and buffers are not weights. Otherwise, everything that fits is loaded, and the number of loaded weights is
            logged; it is an error if nothing fits.
        epsilon: the epsilon of BatchNormalizations in the file that layers of the model contain.
        exported_from: the weights from which the model was exported, under the same names as ``weights``.
        errors: a dict that receives the rounding error ``‖stored − W‖/‖W‖`` of each quantised weight, by module.
        out: write the result to this path.

    Returns:
        A model of the same type as ``model``.

    Raises:
        DataError: the file cannot be read, or a shard is missing; names are missing or unused, or none matches; a
            tensor fits several weights; a shape differs; ``epsilon`` is required; it is unknown whether a square matrix
            is transposed; or the exporter may have computed a weight of the model, or did so.
        ArgumentError: ``names`` or ``turned`` is given for a folder, or ``epsilon`` or ``exported_from`` for weights
            that are matched by name.
        BuildError: a weight is quantised in a way that is not supported for writing.
        UnknownNameError: the model does not have a weight in ``names``.
        OutputError: ``out`` cannot be written.
    """
    work = opened(model, out)
    source, stored = _given(weights)
    if stored is None:
        _refuse("by module", names=names, turned=turned)
    if source is not None:
        check_plain(source.tensors, source.where, work.graph.initializers)
        if isinstance(model, str | os.PathLike):
            check_family(FilePath(model).parent, source)
        untie_all(work, source)
        is_known = bool(names) or turned is not None
        if stored is None or (not is_known and _has_other_names(work, source, epsilon)):
            _take(work, source, _of_export(exported_from), strict, epsilon, errors, out)
            return closed(work, model, out)
        check_settings(work, source)
    assert stored is not None
    _load_by_name(work, stored, dict(names or {}), strict, turned)
    _refuse("by name", epsilon=epsilon, exported_from=exported_from)  # names that match nothing are the better reason
    return closed(work, model, out)


def _given(weights: Arrays | Path) -> tuple[Pretrained | None, Stored | None]:
    """Return weights to be matched by module, unless they are a model's own, and by name, unless they are a folder."""
    if not isinstance(weights, Mapping) and is_pretrained(weights):
        return read_pretrained(weights), None
    stored = Stored(weights) if isinstance(weights, Mapping) else read_weights(weights)
    is_own = isinstance(stored.values, OfModel) or stored.model is not None
    return None if is_own else _pretrained(weights, stored), stored


def _refuse(how: str, **options: Any) -> None:
    """Raise ArgumentError if an option is given that does not apply to weights matched in this way."""
    for name, value in options.items():
        if value is not None:
            raise ArgumentError(
                f"{name} does not apply to these weights, which are matched {how}",
                remedy=f"omit {name}",
                shell=f"omit --{'not-' * (value is False)}{name.replace('_', '-')}",
            )


def _has_other_names(work: ir.Model, source: Pretrained, epsilon: float | None) -> bool:
    """Whether weights are to be matched by module: both sides have names of their own, and modules match more."""
    doubtful = _doubtful(work)
    names = [*weights_of(work), *(place.value.name or "" for place in places_of(work) if is_integer(place))]
    found = [name in source.tensors and name not in doubtful for name in names]
    if all(found) or sum(found) == len(source.tensors):
        return False
    plan = Plan(one_decoder(work, has_cache=False) if is_merged(work) else work, source, epsilon)
    return len({match.place.value for match in plan.matches}) > sum(found)


def _doubtful(work: ir.Model) -> set[str]:
    """Return the names of tensors that may be functions of the parameters of these names.

    Gradgraph gave them the names, or a BatchNormalization was merged into them.
    """
    merged = {v.name or "" for node in work.graph if contains_norm(node) for v in node.inputs if v is not None}
    return (set(given_names(work.metadata_props)) | merged) & set(work.graph.initializers)


def _pretrained(weights: Arrays | Path, stored: Stored) -> Pretrained:
    if isinstance(weights, Mapping):
        return Pretrained({name: np.asarray(array) for name, array in weights.items()}, "the arrays")
    is_file = FilePath(weights).suffix == ".safetensors"
    return read_pretrained(weights) if is_file else Pretrained(stored.values, f"{weights}")


def _of_export(weights: Arrays | Path | None) -> Pretrained | None:
    """Return the weights from which a model was exported."""
    if weights is None:
        return None
    source, stored = _given(weights)
    if source is None:
        assert stored is not None
        source = _pretrained(weights, stored)
    check_plain(source.tensors, source.where, ())
    return source


def _take(
    work: ir.Model,
    source: Pretrained,
    exported: Pretrained | None,
    strict: bool,
    epsilon: float | None,
    errors: dict[str, float] | None,
    out: Path | None,
) -> None:
    """Write weights that are matched by module; if the model is large, new weights are moved to a temporary file."""
    done: Callable[[ir.Model], None] = lambda _: None  # noqa: E731
    if is_saved_external(work):
        folder = Folder(None if out is None else FilePath(out).absolute().parent)
        done, work.meta[_SPILLED] = SpilledWeights(folder.path), folder  # the model uses its file
    one = one_decoder(work, has_cache=False) if is_merged(work) else work
    check_settings(one, source)
    if exported is not None:
        check_same_settings(exported, source)
    before = {name: value.const_value for name, value in one.graph.initializers.items()}
    take_pretrained(one, source, strict=strict, epsilon=epsilon, exported=exported, errors=errors, done=done)
    if one is not work and not (give_both(work, one) and _has_new(work, one, before, source, epsilon)):
        raise BuildError(
            "the two decoders of the model do not share all weights; load them into decoder_model.onnx and "
            "decoder_with_past_model.onnx"
        )


def _has_new(
    whole: ir.Model, one: ir.Model, before: Mapping[str, Any], source: Pretrained, epsilon: float | None
) -> bool:
    """Whether the decoder with a cache of a merged model got the new weights of ``one``, that without a cache.

    Its weights must be in ``one``, too; those that are not as ``before`` must be the ones of its own modules.
    """
    cached = one_decoder(whole, has_cache=True)
    if not {*weights_of(cached)} <= {*one.graph.initializers}:
        return False
    kept = {name for name, value in one.graph.initializers.items() if value.const_value is before.get(name)}
    plan = Plan(cached, source, epsilon)
    return all(match.place.value.name in kept or is_stored(plan.numbers, match) for match in plan.matches)


def _load_by_name(work: ir.Model, stored: Stored, called: Mapping[str, str], strict: bool, turned: bool | None) -> None:
    own = {n: v for n, v in work.graph.initializers.items() if v.const_value is not None}
    for name in called:
        if name not in own:
            raise UnknownNameError(f"the model has no weight '{shown(name)}'{suggestion(name, own)}")
    found = {n: called.get(n, n) for n in own if called.get(n, n) in stored.values}
    _check_all(work, found, stored, strict)
    _check_computed(work, found, called, stored)
    pairs = [(own[name], np.asarray(stored.values[source]), source) for name, source in found.items()]
    lying = _lying(pairs)
    for value, data, source in pairs:
        if data.ndim == 2 and data.shape[0] == data.shape[1] > 1 and _is_turned(value, source, stored, lying, turned):
            data = data.T
        _give(work, value, data, source)


def _check_all(work: ir.Model, found: Mapping[str, str], stored: Stored, strict: bool) -> None:
    """Raise DataError if weights are missing in the file or unused; log the number of loaded weights."""
    wanted = weights_of(work)
    missing = [name for name in wanted if name not in found]
    taken = set(found.values())
    theirs = [*stored.values] if stored.model is None else weights_of(stored.model)
    kept = {
        name for name in theirs if isinstance(stored.values, OfModel) and _is_kept(name, stored.values[name], taken)
    }
    kept |= {name for name in theirs if is_buffer(name) and np.asarray(stored.values[name]).dtype.kind in "biu"}
    spare = [name for name in theirs if name not in taken | kept]
    sides = ((missing, "weight", "model", "file"), (spare, "tensor", "file", "model"))
    parts = [
        f"{counted(len(rest), what)} of the {here} {'is' if len(rest) == 1 else 'are'} not in the {there} "
        f"({first_names(rest)})"
        for rest, what, here, there in sides
        if rest
    ]
    if (strict and parts) or not found:
        raise DataError(
            f"names do not match: {'; '.join(parts)}" if parts else "there are no weights to load",
            remedy="map names with names={...}" + (", or pass strict=False to load what fits" if found else ""),
            shell="load the file in Python (gg.surgery.load_weights), which takes a map of names"
            + (", or add --partly to load what fits" * bool(found)),
        )
    count = sum(name in found for name in wanted)
    layers_log.info("%s", "; ".join([f"loaded {count} of {counted(len(wanted), 'weight')}", *parts]))


def _check_computed(work: ir.Model, found: Mapping[str, str], called: Mapping[str, str], stored: Stored) -> None:
    """Raise DataError if a tensor may be a function of the parameter of its name in another program's file."""
    if isinstance(stored.values, OfModel) or stored.model is not None:
        return
    doubtful = sorted(_doubtful(work) & set(found) - set(called))
    if doubtful:
        raise DataError(
            f"the exporter may have computed weights of the model ({first_names(doubtful)}): gradgraph derived their "
            "names, or a BatchNormalization is merged into them",
            remedy="pass exported_from with the weights from which the model was exported, and omit turned and names; "
            "or, if the file contains values of the model itself, map these names with names={...}",
            shell="add --exported-from FILE with the weights from which the model was exported, and omit --turned",
        )


def _is_kept(name: str, array: np.ndarray, taken: Collection[str]) -> bool:
    """Whether a tensor of a checkpoint is training state rather than a weight: a counter, or an optimizer tensor."""
    return array.ndim == 0 or array.dtype.kind != "f" or any(name.startswith(f"{weight}.") for weight in taken)


# --- matrices that may be transposed -----------------------------------------------------------------------------


def _outputs(value: ir.Value) -> int | None:
    """Return the output axis of a matrix; None for embeddings, and for weights that no product reads."""
    found = layouts(value)
    axes = {layout.outputs for layout in found if len(layout.outputs) == 1}
    return axes.pop()[0] if axes and all(layout.inputs is not None for layout in found) else None


def _kinds(source: str) -> list[str]:
    """Return the last two parts of a name, and the last one, without digits: ``c_proj.weight`` and ``weight``.

    Matrices with such an ending in common are assumed to have one layout.
    """
    words = [re.sub(r"\d+", "", word) for word in re.split(r"[./]", source)]
    return [".".join(words[-2:]), words[-1]] if len(words) > 1 else [""]


# possible layouts of matrices in a file, as a function of the axis of outputs in the file and in the model
_WAYS: dict[str, Callable[[int, int], bool]] = {
    "outputs first": lambda stored, own: stored == 0,
    "as in the model": lambda stored, own: stored == own,
    "inputs first": lambda stored, own: stored == 1,
}


def _lying(pairs: Sequence[tuple[ir.Value, np.ndarray, str]]) -> dict[str, set[str]]:
    """Return the possible layouts of square matrices by name ending (``_kinds``), inferred from other matrices."""
    found: dict[str, set[str]] = {}
    for value, data, source in pairs:
        if data.ndim != 2 or data.shape[0] == data.shape[1] or (own := _outputs(value)) is None:
            continue
        as_in_model = data.shape == tuple(known_sizes(shape_of(value)))
        fitting = {way for way, fits in _WAYS.items() if fits(own if as_in_model else 1 - own, own)}
        for kind in _kinds(source):
            found[kind] = found.get(kind, {*_WAYS}) & fitting
    return found


def _is_turned(
    value: ir.Value, source: str, stored: Stored, lying: Mapping[str, set[str]], turned: bool | None
) -> bool:
    """Return whether a square matrix is transposed in the file; raise DataError if that is unknown."""
    own = _outputs(value)
    if own is None:
        return False
    if turned is not None:
        return turned and own == 1
    if stored.model is not None and (theirs := _outputs(stored.model.graph.initializers[source])) is not None:
        return theirs != own
    ways = [lying.get(kind, {*_WAYS}) for kind in _kinds(source)]
    if (isinstance(stored.values, OfModel) or stored.model is not None) and "as in the model" in ways[-1]:
        return False
    for some in ways:
        likely = some - {"inputs first"} or some  # "inputs first" is assumed only if other matrices exclude the others
        sides = {not _WAYS[way](own, own) for way in likely}
        if len(sides) == 1:
            return sides.pop()
    raise DataError(
        f"'{shown(source)}' is square, and it is unknown whether it is transposed in the file: no other matrix with "
        "a similar name has a shape that shows it",
        remedy="pass turned=True for matrices of (outputs, inputs), as nn.Linear stores them, or turned=False for "
        "those of (inputs, outputs), as the model's MatMul reads them",
        shell="add --turned for matrices of (outputs, inputs), as nn.Linear stores them, or --not-turned for those of "
        "(inputs, outputs), as the model's MatMul reads them",
    )


def _give(work: ir.Model, value: ir.Value, data: np.ndarray, source: str) -> None:
    tensor = tensor_of(value)
    wanted = tuple(tensor.shape.numpy())
    if data.ndim == 2 and data.shape != wanted == data.T.shape:
        data = data.T
    if data.shape != wanted:
        raise DataError(f"'{shown(source)}' has shape {list(data.shape)} in the file, but '{shown(value.name)}' of "
                        f"the model has {list(wanted)}; use a file of a model with the same sizes")  # fmt: skip
    if not np.can_cast(data.dtype, tensor.dtype.numpy(), "same_kind"):
        raise DataError(
            f"'{shown(source)}' has dtype {data.dtype} in the file, but the model's weight has dtype "
            f"{tensor.dtype.numpy()}; convert it in the file"
        )
    set_numbers(work, value, np.array(data, tensor.dtype.numpy(), order="C"))
