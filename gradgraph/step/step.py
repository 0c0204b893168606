"""The class ``Step``: three ONNX models and a manifest, which together are all that a runtime needs to train.

==============  ====================================================  ==============================================
file            inputs                                                outputs
==============  ====================================================  ==============================================
init.onnx       none                                                  every state tensor, by its name
train.onnx      batch, targets, hyperparameters, every state tensor   loss, metrics, every state tensor's ``next``
eval.onnx       batch, targets, the state tensors that it reads       loss, metrics, the model's own outputs
==============  ====================================================  ==============================================

A step built with ``separate=True`` has two more files: ``gradient.onnx`` reads the batch and returns the loss and the
gradient of each weight, ``apply.onnx`` reads the gradients and returns the updated state.

Named steps that share their state (for a GAN: generator and discriminator) have a train graph each,
``train.<name>.onnx``, with only the state tensors that the graph reads and updates.

``manifest.json`` records the role of each name; each model has the same text in its ``metadata_props`` under
``gradgraph``. Large frozen weights, used by train.onnx and eval.onnx, are stored once in ``frozen.bin``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from gradgraph.arguments import FLAG, PATH, Kind, checked
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import BuildError, Finding, ModelError, escaped, listed, shown
from gradgraph.files.atomic import write_folder_atomically
from gradgraph.files.external import Entry, external_entry, is_external, is_packed, put_inside
from gradgraph.files.held_files import HeldFile, HeldTensor
from gradgraph.files.models import check_fits, structured
from gradgraph.files.path_kinds import Kind as Place
from gradgraph.files.path_kinds import step_of, wrong_kind
from gradgraph.files.protos import copied, proto_tensors
from gradgraph.files.suffixes import FOLDER, check_suffix
from gradgraph.step.bases import Base, bases_in, changed, nothing_to_share, path_from
from gradgraph.step.contract import check_against_graphs, check_halves
from gradgraph.step.folder import (
    HALVES,
    INIT_FILE,
    MANIFEST_FILE,
    digests_in,
    file_bytes,
    folder_contents,
    is_small,
    load_checked,
    model_names,
    stamp,
)
from gradgraph.step.manifest import Manifest, StateSpec
from gradgraph.step.summary import summary
from gradgraph.step.weight_files import weight_file

__all__ = ["Manifest", "StateSpec", "Step"]

WRITTEN_KEY = "gradgraph.nodes_written"  # nodes of train.onnx before clean-up


@dataclass(eq=False, repr=False)
class Step:
    """A training step, ready to be saved or run.

    Args:
        train, init, eval: the three models in the table above; for several named steps, ``train`` is a dict by name.
        manifest: the role of each input and output of the models.
        folder: the absolute path of the folder that the models were loaded from; it contains their external data.
        bases: external files with weights of the models, by location.
        findings: warnings of the build, such as weights that are not trained; empty for a loaded step.
        taken: notes of the build, one line each: image preprocessing read from a file, and the weights matched by each
            glob; empty for a loaded step.
        separate: the models ``"gradient"`` and ``"apply"``, which together do the work of ``train``; empty for a step
            built without ``separate=True``.

    Attributes:
        trains: the train graphs by name; a single step has the name "".
        built_apart: a function that builds the same step with ``separate=True``, if its model is available.

    Raises:
        ModelError: if manifest and models contradict each other.
    """

    train: onnx.ModelProto
    init: onnx.ModelProto
    eval: onnx.ModelProto
    manifest: Manifest
    folder: Path | None = field(default=None, kw_only=True)
    bases: Mapping[str, Base] = field(default_factory=dict, kw_only=True, repr=False)
    findings: tuple[Finding, ...] = field(default=(), kw_only=True, repr=False)
    taken: tuple[str, ...] = field(default=(), kw_only=True, repr=False)
    separate: Mapping[str, onnx.ModelProto] = field(default_factory=dict, kw_only=True)
    trains: Mapping[str, onnx.ModelProto] = field(init=False)
    built_apart: Callable[[], Step] | None = field(default=None, init=False, repr=False)
    _init_stamp: tuple[int, ...] = field(default=(), init=False, repr=False)
    _digests: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _held: dict[str, HeldFile] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        given: Any = self.train
        self.trains = {"": given} if isinstance(given, onnx.ModelProto) else dict(given)
        check_against_graphs(self.manifest, self.trains, self.init, self.eval)
        check_halves(self.manifest, self.separate)
        if self.manifest.steps:
            del self.train

    def __repr__(self) -> str:
        """Return a one-line description; ``summary()`` returns a longer one."""
        m = self.manifest
        each = (
            f"{name + ': ' if name else ''}loss {part.loss['name']}, optimizer {part.optimizer['name']}; "
            f"{len(self.trains[name].graph.node)} nodes"
            for name, part in m.parts.items()
        )
        return escaped(f"Step(trains {len(m.trainable)} tensors, {len(m.frozen)} frozen; {'; '.join(each)})")

    def _model(self, name: str) -> onnx.ModelProto:
        if name in self.separate:
            return self.separate[name]
        step = "" if name == "train" else name.removeprefix("train.")
        model: onnx.ModelProto = getattr(self, name) if name in ("init", "eval") else self.trains[step]
        return model

    @checked(folder=PATH, force=FLAG, share_weights=FLAG)
    def save(self, folder: str | os.PathLike[str], *, force: bool = False, share_weights: bool = False) -> Path:
        """Write the step folder atomically.

        Args:
            folder: the destination.
            force: replace an existing step folder.
            share_weights: refer to the model's external data file instead of copying large weights. The step folder
                stores the file's relative path, size and digest, so both can only be moved together.

        Raises:
            OutputError: if the folder cannot be written, or is not empty and ``force`` is not set; with
                ``share_weights``, if the model has no external data file.
            ModelError: if the external data file has changed since the step was loaded.
        """
        check_suffix(folder, FOLDER)
        models = {name: self._model(name) for name in model_names(self.manifest)}
        shared = self._shared(Path(folder)) if share_weights else {}
        contents = folder_contents(models, self.manifest, self.pieces, shared)
        write_folder_atomically(Path(folder), contents, force=force)
        return Path(folder)

    def remember(self, names: DataNames) -> None:
        """Set the data names in the manifest; :meth:`save` writes them."""
        self.manifest = replace(self.manifest, data=names)

    def apart(self) -> Step:
        """Return this step with gradient.onnx and apply.onnx: itself if it has these models, or a rebuilt copy.

        The copy lacks columns that steps in two files do not report (``clean_loss``).

        Raises:
            BuildError: if there are several named steps, or the model that the step was built from is not available or
                has changed.
        """
        if self.separate:
            return self
        if self.manifest.steps:
            raise BuildError(f"named steps ({listed(self.manifest.steps)}) do not support separate gradients; build a "
                             "single step")  # fmt: skip
        again = None if self.built_apart is None else self.built_apart()
        if again is None or again.eval != self.eval or again._contents() != self._contents():
            raise BuildError(
                "this step has no gradient.onnx and apply.onnx" if again is None else
                "the model of this step has changed since it was built, so it cannot be split into gradient and "
                "update",
                remedy="build it again with gradgraph.build(..., separate=True); its checkpoints can still be used",
                shell="build it again with --separate; its checkpoints can still be used",
            )  # fmt: skip
        train, kept = self.trains[""], again.manifest.reports
        if lost := {*self.manifest.reports} - {*kept}:
            train = _without_outputs(train, lost)
        manifest = replace(self.manifest, separate=again.manifest.separate, reports=kept)
        return replace(self, train=train, manifest=manifest, separate=again.separate)

    def _shared(self, folder: Path) -> dict[str, tuple[str, Base]]:
        """Return, by location, the base files that can be shared: relative path, and base with its digest."""
        lasting = {location: base for location, base in self.bases.items() if base.lasts}
        if not lasting:
            raise nothing_to_share()
        found = {}
        for location, base in lasting.items():
            file = self._file(location)  # compares it with the digest, if known
            if not file.is_in_place():
                raise changed(base.path)
            digest = base.digest or file.digest()
            found[location] = path_from(folder, base.path), replace(base, digest=digest)
        return found

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Step:
        """Load and check a step folder, or the step in a run folder.

        Nothing is executed, and no file outside the folder is opened, except base files, whose digests are checked. The
        nodes of train.onnx and eval.onnx are checked when a trainer opens them, or ``opened`` does.

        Raises:
            ModelError: if a file is missing, damaged, or of a newer version, or files contradict each other.
        """
        Kind("a gradgraph.Step, as returned by gradgraph.build, or its folder", PATH.fits).check("the step", folder)
        folder = step_of(folder)
        try:
            is_folder = folder.is_dir()
        except OSError:  # a name that no folder can have
            is_folder = False
        if not is_folder:
            raise ModelError(
                wrong_kind(folder, Place.STEP, Place.RUN)
                or f"'{shown(folder)}' is not a step folder; pass the folder that `gradgraph build` wrote"
            )
        text = file_bytes(folder / MANIFEST_FILE).decode("utf-8", "replace")
        manifest = Manifest.from_json(text, str(folder / MANIFEST_FILE))
        digests = digests_in(text, manifest, folder / MANIFEST_FILE)
        init_stamp = stamp(folder / "init.onnx")
        bases = bases_in(text, folder / MANIFEST_FILE)
        models = {n: load_checked(folder / f"{n}.onnx", manifest, digests, bases) for n in model_names(manifest)}
        init, eval_ = models.pop("init"), models.pop("eval")
        separate = {n: models.pop(n) for n in HALVES if n in models}
        train: Any = dict(zip(manifest.parts, models.values(), strict=True)) if manifest.steps else models["train"]
        step = cls(train, init, eval_, manifest, folder=folder.absolute(), bases=bases, separate=separate)
        step._init_stamp, step._digests = init_stamp, digests
        step._take_in_small()
        return step

    def _take_in_small(self) -> None:
        """Load small external weights, which saved steps do not have, into the models, because lowering reads them."""
        models = (*self.trains.values(), self.eval, *self.separate.values())
        for tensor in (t for model in models for t in model.graph.initializer):
            if is_external(tensor) and is_small(tensor):
                put_inside(tensor, self.external(tensor).tobytes())

    def external(self, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        """Return the bytes of an external weight, memory-mapped.

        Raises:
            ModelError: as for :meth:`file_of`.
        """
        entry = self._entry(tensor)
        return self._file(entry.location).part(entry.offset, entry.length)

    def file_of(self, tensor: onnx.TensorProto) -> HeldFile:
        """Return the open file that contains an external weight.

        A file is opened and compared with its digest when one of its weights is first used. If another file replaces it
        later, the original is still read.

        Raises:
            ModelError: if the file has changed since the step was built or saved, or was overwritten since it was
                opened.
        """
        file = self._file(self._entry(tensor).location)
        file.check_unchanged()
        return file

    def content_of(self, tensor: onnx.TensorProto) -> str:
        """Return text that identifies the content of the file of an external weight: its digest, or else its stamp."""
        location = self._entry(tensor).location
        base = self.bases.get(location)
        digest = self._digests.get(location) if base is None else base.digest
        return digest or self.file_of(tensor).stamp

    def _contents(self) -> list[str]:
        return [self.content_of(tensor) for tensor in self.eval.graph.initializer if is_external(tensor)]

    def pieces(self, tensor: onnx.TensorProto) -> Iterator[memoryview]:
        """Yield the bytes of an external weight in pieces, releasing the memory of each piece.

        Raises:
            ModelError: as for :meth:`file_of`.
        """
        entry = self._entry(tensor)
        return self._file(entry.location).pieces(entry.offset, entry.length)

    def _entry(self, tensor: onnx.TensorProto) -> Entry:
        entry = external_entry(tensor)
        if self.folder is None and entry.location not in self.bases:
            raise ModelError(
                f"the weights of '{shown(tensor.name)}' are in an unknown external file; load the model with its "
                "external data first"
            )
        return entry

    def _file(self, location: str) -> HeldFile:
        if location not in self._held:
            if (base := self.bases.get(location)) is not None:
                self._held[location] = base.opened()
            else:
                assert self.folder is not None
                self._held[location] = weight_file(self.folder / location, self._digests.get(location))
        return self._held[location]

    def check_unchanged(self) -> None:
        """Raise ModelError if an open file was overwritten or truncated, which the sessions that map it would follow.

        This takes a few microseconds per file.
        """
        for file in list(self._held.values()):  # a copy: another trainer of this step may open a file meanwhile
            file.check_unchanged()

    def release_init(self) -> None:
        """Drop the initial weights from memory if they are in a file; ``init`` reads them again on access."""
        if self._init_stamp:
            vars(self).pop("init", None)
            self._held.pop(INIT_FILE, None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles.

        It includes the weights that are inside the model file. Other weight files are opened again when used.
        ``built_apart`` is not included.
        """
        own = {location for location, base in self.bases.items() if base.own}
        bases = {location: base.elsewhere() for location, base in self.bases.items() if location not in own}
        state = {**vars(self), "bases": bases, "_held": {}, "built_apart": None}
        if not own:
            return state
        whole = {name: self._with(self._model(name), own) for name in model_names(self.manifest)}
        trains = dict(zip(self.trains, whole.values(), strict=False))
        models = {"init": whole["init"], "eval": whole["eval"], "trains": trains}
        models |= {} if self.manifest.steps else {"train": trains[""]}
        return {**state, **models, "separate": {name: whole[name] for name in self.separate}}

    def _with(self, model: onnx.ModelProto, locations: Collection[str]) -> onnx.ModelProto:
        """Return a copy of ``model`` with the external weights at ``locations`` stored inside."""
        whole: onnx.ModelProto = copied(model)
        for tensor in filter(is_external, proto_tensors(whole)):
            if self._entry(tensor).location in locations:
                put_inside(tensor, self.external(tensor).tobytes())
        return whole

    def __getattr__(self, name: str) -> Any:
        """Read ``init`` again after ``release_init``.

        Raises:
            ModelError: if init.onnx is missing or has changed; for ``train``, if there are several train graphs.
        """
        folder, trains = vars(self).get("folder"), vars(self).get("trains")
        if name == "train" and trains:
            raise ModelError(f"this step has several train graphs ({listed(trains)}); use one of step.trains")
        if name != "init" or folder is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        path = folder / "init.onnx"
        if stamp(path) != self._init_stamp:
            raise ModelError(
                f"'{shown(path)}' is gone, or is not the file that this step was loaded from; load the step again"
            )
        self.init = load_checked(path, self.manifest, self._digests, self.bases)
        return self.init

    def resolved(self, name: str) -> onnx.ModelProto:
        """Return a copy of a model with all weights inside.

        Args:
            name: ``"train"``, ``"init"`` or ``"eval"``; ``"train.<name>"`` for named steps; ``"gradient"`` or
                ``"apply"`` for a step built with ``separate=True``.
        """
        model = self._model(name)
        copy = copied(model)
        if self.folder is not None or self.bases:
            self.put_inside(copy)
        return copy

    def put_inside(self, model: onnx.ModelProto) -> None:
        """Load the external weights into ``model``, in place; it is a model of this step, or derived from one.

        Raises:
            ModelError: if the weights exceed protobuf's limit.
        """
        outside = [t for t in proto_tensors(model) if is_external(t)]
        check_fits(sum(external_entry(t).length for t in outside))
        for tensor in outside:
            put_inside(tensor, self.external(tensor).tobytes())

    def opened(self, model: onnx.ModelProto, mapped: bool = True) -> ir.Model:
        """Convert ``model`` to onnx_ir, without reading external weights.

        Args:
            model: a model of this step, or derived from one.
            mapped: let external weights be arrays in mapped memory. Otherwise they refer to the open files, except for
                weights in temporary files and in model files.

        Raises:
            ModelError: if ``model`` is malformed.
        """
        work = structured(model)
        for tensor in filter(is_external, model.graph.initializer):
            entry, file = self._entry(tensor), self.file_of(tensor)
            kind, shape = ir.DataType(tensor.data_type), ir.Shape(tensor.dims)
            value, base = work.graph.initializers[tensor.name], self.bases.get(entry.location)
            if not mapped and (base is None or base.lasts):
                value.const_value = HeldTensor(file, entry.offset, kind, shape=shape, name=tensor.name)
                continue
            array = file.part(entry.offset, entry.length)  # remains valid after a temporary file is deleted
            if is_packed(tensor):
                value.const_value = ir.PackedTensor(array, kind, shape=shape, name=tensor.name)
                continue
            array = array.view(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))
            value.const_value = ir.Tensor(array, dtype=kind, name=tensor.name)
        return work

    @property
    def nodes(self) -> dict[str, int]:
        """The number of nodes of each model by name; ``train_written`` counts train.onnx before clean-up, if known."""
        counts = {name: len(self._model(name).graph.node) for name in model_names(self.manifest)}
        for name in [n for n in counts if n not in ("init", "eval", *HALVES)]:
            written = next((p.value for p in self._model(name).metadata_props if p.key == WRITTEN_KEY), "")
            if written.isdecimal() and len(written) <= 9 and int(written) >= counts[name]:
                counts[f"{name}_written"] = int(written)
        return counts

    def summary(self, **sizes: int) -> str:
        """Return a multi-line summary: weights, state size, inputs and outputs, and MACs by module.

        Args:
            sizes: the sizes of symbolic dimensions, such as ``batch=32``; 1 by default.

        Raises:
            UnknownNameError: if the step has no dimension of a given name.
        """
        self.manifest.check_sizes(sizes)
        return summary(self.manifest, self.trains, self.eval, self.nodes, sizes, self.taken)


def _without_outputs(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """Return a copy of ``model`` without the outputs ``names``."""
    part: onnx.ModelProto = copied(model)
    kept = [y for y in part.graph.output if y.name not in names]
    del part.graph.output[:]
    part.graph.output.extend(kept)
    return part
