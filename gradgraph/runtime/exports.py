"""Export of a trainer's model as plain ONNX."""

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
    """The export methods of a Trainer, none of which changes the result of a run."""

    _unread: str | os.PathLike[str] | None  # the checkpoint of the step's run, if it has not been loaded

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
        """Export the trained model as plain ONNX: without loss, labels and optimizer, with layers in evaluation mode.

        Args:
            path: output file, written piece by piece. If the weights exceed 1.5 GB, they go to ``<name>.data`` next to
                it, as do frozen weights of 8 MiB or more from external data; the returned model refers to that file.
                Other weights are inside the returned model, so :meth:`export_file` uses less memory.
            outputs: model outputs to keep, in this order; nodes that only other outputs need are removed. By
                default all, except for a loss that the model computes from labels.
            averaged: as for :meth:`evaluate`.
            mixed: for a step in mixed precision, keep its low-precision computation, and store weights that are only
                used in low precision in that type. By default the model is float32 throughout, like the original.
            preprocess: if the data were preprocessed (``gradgraph.preprocess``), replace the model's inputs by table
                columns, each [rows], and add the class names as outputs.

        Raises:
            BuildError: if ``mixed`` is True and the step is not in mixed precision.
            ModelError: if the step kept no output of the model, or its weights exceed 2 GB and ``path`` is None.
            UnknownNameError: if the model does not have one of ``outputs``.
            OutputError: if ``path`` cannot be written, or has the extension of another format.
        """
        if path is not None:
            check_suffix(path, ".onnx")
        exported = self._exported(outputs, averaged, mixed, preprocess)
        if path is None or not self._session.team.is_first:
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
        """Write the result of :meth:`export` to ``path`` without returning it, so no weight is copied."""
        check_suffix(path, ".onnx")
        exported = self._exported(outputs, averaged, mixed, preprocess=True)
        if self._session.team.is_first:
            exported.write(path)

    def exported(
        self,
        outputs: str | Sequence[str] | None = None,
        *,
        averaged: bool = True,
        mixed: bool = False,
        preprocess: bool = False,
    ) -> ir.Model:
        """Export like :meth:`export`, to an onnx-ir model that shares the weights: the next step changes them."""
        return self._exported(outputs, averaged, mixed, preprocess).model()

    def _exported(self, outputs: str | Sequence[str] | None, averaged: bool, mixed: bool, preprocess: bool) -> Exported:
        self._warn_if_untrained()
        return Exported(self._session, None if outputs is None else as_names(outputs), averaged, mixed, preprocess)

    def _warn_if_untrained(self) -> None:
        """Warn once if the weights are untrained, although a run of this step has a checkpoint that was not loaded."""
        if self._unread is not None and self._session.progress.steps == 0:
            log.warning(
                "these are the weights before training; gradgraph.Trainer.resume(step, '%s') loads the trained weights",
                shown(self._unread),
            )
            self._unread = None
