"""Exports of a trainer: the model that it has trained, as plain ONNX."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from gradgraph.arguments import FLAG, NAMES, as_names, checked
from gradgraph.errors import shown
from gradgraph.files.models import written_message
from gradgraph.files.suffixes import check_suffix
from gradgraph.runtime.diagnosis import Diagnosis
from gradgraph.runtime.execution.exported import Exported

log = logging.getLogger("gradgraph")


class Exports(Diagnosis):
    """The part of a Trainer that hands on what it has trained. Nothing here changes what a run comes to."""

    _unread: str | os.PathLike[str] | None  # the checkpoint of the run that the step belongs to, while nobody took it

    @checked(outputs=NAMES.or_none(), averaged=FLAG, mixed=FLAG, preprocess=FLAG)
    def export(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        outputs: str | Sequence[str] | None = None,
        averaged: bool = True,
        mixed: bool = False,
        preprocess: bool = True,
    ) -> onnx.ModelProto:
        """The trained model as plain ONNX: no loss, no labels, no optimizer, layers in evaluation form.

        Args:
            path: a file to write it to, piece by piece; weights of more than 1.5 GB, and frozen ones of 8 MiB and more
                that lay beside a model, go to ``<name>.data`` beside it, and what is returned refers to them there.
                What is returned holds the others: :meth:`export_file` takes less memory.
            outputs: those of the model's outputs that it is to have, in this order; what only others need goes. By
                default all of them, but for a loss that the model computes from labels.
            averaged: as for :meth:`evaluate`.
            mixed: of a step in mixed precision, keep what computes in the low one, and store in it the weights that
                are read in it only. By default the model is float32 throughout, as the one that was built.
            preprocess: where the data were preprocessed (``gradgraph.preprocess``), let the model take the columns of a
                table, each [rows], and give the names of classes besides.

        Raises:
            BuildError: ``mixed``, and the step is not in mixed precision.
            ModelError: the step keeps no output of the model; or its weights exceed 2 GB, and no ``path`` is given.
            UnknownNameError: the model has no such output.
            OutputError: ``path`` cannot be written, or has the extension of another format.
        """
        if path is not None:
            check_suffix(path, ".onnx")
        exported = self._exported(outputs, averaged, mixed, preprocess)
        if path is None or not self._executor.team.is_first:
            return exported.proto()
        exported.write(path)
        return written_message(Path(path))

    def export_file(
        self,
        path: str | os.PathLike[str],
        *,
        outputs: str | Sequence[str] | None = None,
        averaged: bool = True,
        mixed: bool = False,
    ) -> None:
        """Write what :meth:`export` writes to ``path``, and return nothing, so that no weight is copied."""
        check_suffix(path, ".onnx")
        exported = self._exported(outputs, averaged, mixed, preprocess=True)
        if self._executor.team.is_first:
            exported.write(path)

    def exported(
        self,
        outputs: str | Sequence[str] | None = None,
        *,
        averaged: bool = True,
        mixed: bool = False,
        preprocess: bool = False,
    ) -> ir.Model:
        """Export as :meth:`export` does, to an onnx-ir model, which copies no weight: the next step changes them."""
        return self._exported(outputs, averaged, mixed, preprocess).model()

    def _exported(self, outputs: str | Sequence[str] | None, averaged: bool, mixed: bool, preprocess: bool) -> Exported:
        self._warn_if_untrained()
        return Exported(self._executor, None if outputs is None else as_names(outputs), averaged, mixed, preprocess)

    def _warn_if_untrained(self) -> None:
        """Say once that the weights are those before training, where a run has trained others."""
        if self._unread is not None and self._executor.progress.steps == 0:
            log.warning(
                "these are the weights before training; gradgraph.Trainer.resume(step, '%s') takes those of the run",
                shown(self._unread),
            )
            self._unread = None
