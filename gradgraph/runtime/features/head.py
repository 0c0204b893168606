"""The head of a step: its sessions, with the state, the progress and the lock of the whole step."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnxruntime as ort

from gradgraph.data.arrays.batch import Feed
from gradgraph.errors import DivergedError
from gradgraph.passes.draws import fixed
from gradgraph.runtime.execution.binding import BoundSession
from gradgraph.runtime.execution.computing import ComputingSession
from gradgraph.runtime.execution.opener import Opener
from gradgraph.runtime.execution.part import Part
from gradgraph.runtime.execution.shaped import Sizes
from gradgraph.runtime.execution.step_data import StepData
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.features.split import Split


class HeadSession(StepSession):
    """The sessions of the head of a step, with the state, the progress and the lock of the whole step.

    Args:
        whole: the sessions of the whole step.
        split: the split step.
        sizes: the usual sizes of a batch of the whole step.
    """

    def __init__(self, whole: StepSession, split: Split, sizes: Sizes) -> None:
        super().__init__(split.head, whole.placement, whole.options, whole.progress, whole.check_loss)
        self.state, self.turns, self.team = whole.state, whole.turns, whole.team
        self.data = StepData(split.head, lambda: self.progress, False, whole.team.ranks)
        self.split, self.sizes, self.whole = split, sizes, whole
        self.opener: HeadOpener = HeadOpener(whole, split, sizes)

    def expect_usual(self) -> None:
        """Set the usual sizes of a batch to those of the whole step."""
        dims = {dim for spec in self.manifest.batch for dim in spec.shape if isinstance(dim, str)}
        if dims <= self.sizes.keys():
            self.part.expect({dim: self.sizes[dim] for dim in dims})

    def train(
        self,
        feeds: Mapping[str, Feed],
        hyperparameters: Mapping[str, float],
        part: Part,
        options: ort.RunOptions | None = None,
    ) -> BoundSession:
        session = super().train(feeds, hyperparameters, part, options)
        self.progress.sizes = self.sizes  # of a batch of the whole step, with which the run may be resumed
        return session

    def _diverged(
        self, loss: float, feeds: Mapping[str, Feed], hyperparameters: Mapping[str, float], part: Part
    ) -> DivergedError:
        error = super()._diverged(loss, feeds, hyperparameters, part)
        return DivergedError(
            error.problem,
            error.batch,
            error.hyperparameters,
            remedy="lower the learning rate, or train without keep_features to find the node with "
            "trainer.find_nonfinite(error.batch)",
            shell=error.shell_remedy,
        )

    def frozen_layers(self, sizes: Sizes | None) -> ComputingSession:
        """Return a session that computes the kept values for batches of ``sizes``; empty ``sizes`` allow any batch.

        It rounds as training does or, if ``sizes`` is None, as evaluation does.
        """
        model, whole = self.opener.frozen(sizes), self.whole
        packs = True if sizes is None else whole.packs_for(whole.part, sizes)
        session = whole.opener.session(model, packs=packs)
        return ComputingSession(session, self.state, list(self.split.kept))


class HeadOpener(Opener):
    """An opener that cuts the lowered head out of the lowered graphs of the whole step, so that both round alike.

    Args:
        whole, split, sizes: as for ``HeadSession``.
    """

    def __init__(self, whole: StepSession, split: Split, sizes: Sizes) -> None:
        super().__init__(split.head, whole.placement, whole.options, tune=False)
        self._whole, self._split, self._sizes = whole, split, sizes
        self._cut_out: dict[str, onnx.ModelProto] = {}  # lowered graphs of the head, until a session is opened

    def frozen(self, sizes: Sizes | None) -> onnx.ModelProto:
        """Return the frozen layers, lowered for training on batches of ``sizes``, or for evaluation (None)."""
        split, head, opener = self._split, self._split.head, self._whole.opener
        whole = self._lowered_whole(sizes)
        after = split.after(whole, head.eval if sizes is None else head.trains[""])
        if after is not None:
            self._cut_out[_key(sizes)] = after
        if (before := split.before(whole)) is not None:
            return before
        return opener.lowered_to_compute(split.evaluated) if sizes is None else opener.lowered(split.trained, sizes)

    def lowered(self, model: onnx.ModelProto, sizes: Sizes) -> onnx.ModelProto:
        if model is not self._split.head.trains[""]:  # a half of the step, on several ranks
            return super().lowered(model, sizes)
        every = {**self._sizes, **sizes} if sizes else {}
        return self._cut(model, every) or super().lowered(model, sizes)

    def lowered_to_compute(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return self._cut(model, None) or super().lowered_to_compute(model)

    def _cut(self, model: onnx.ModelProto, sizes: Sizes | None) -> onnx.ModelProto | None:
        """Return the head cut out of the lowered whole; None if lowering merged nodes across the cut."""
        ready = self._cut_out.pop(_key(sizes), None)
        return self._split.after(self._lowered_whole(sizes), model) if ready is None else ready

    def _lowered_whole(self, sizes: Sizes | None) -> onnx.ModelProto:
        opener, step = self._whole.opener, self._whole.definition
        return opener.lowered_to_compute(fixed(step.eval)) if sizes is None else opener.lowered(step.trains[""], sizes)


def _key(sizes: Sizes | None) -> str:
    return "evaluation" if sizes is None else str(sorted(sizes.items()))
