"""Diagnostics of a trainer: the origin of NaNs, learning rates, profiles, and mistakes of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from gradgraph.arguments import FINITE, FLAG, NAMES, TEXT, WHOLE, checked
from gradgraph.data.arrays.remedies import check_counts
from gradgraph.data.sources.sources import Indexed
from gradgraph.errors import BuildError, listed
from gradgraph.runtime.execution.class_table import ClassTable
from gradgraph.runtime.execution.confusions import Confusions, confusions_of
from gradgraph.runtime.execution.evaluating import Evaluator
from gradgraph.runtime.execution.locking import synchronized
from gradgraph.runtime.execution.nonfinite import NonFinite, first_nonfinite
from gradgraph.runtime.execution.part import check_accumulates
from gradgraph.runtime.execution.profiler import Profile, profiled
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.execution.worst import WorstSamples
from gradgraph.runtime.loop.moving import Rate
from gradgraph.runtime.loop.sizing import BatchSize, find_batch_size, limit_of
from gradgraph.runtime.loop.trials import Overfit, RateCurve, Trial, find_rate, overfit
from gradgraph.step.manifest import LEARNING_RATE


class Diagnosis:
    """The diagnostic methods of a Trainer, none of which changes the result of a run."""

    _session: StepSession
    _evaluator: Evaluator

    @synchronized
    def find_nonfinite(self, name: Any = None, batch: Any = None, **hyperparameters: float) -> NonFinite | None:
        """Find the node of the step that first produces NaN or infinity on a batch, in the current state.

        The state does not change. After a DivergedError, call ``trainer.find_nonfinite(error.batch,
        **error.hyperparameters)``.

        Args:
            name, batch, hyperparameters: as for :meth:`step`.

        Returns:
            The node with its inputs and its part of the step; print it. None if the loss and the next state are finite.

        Raises:
            DataError: if the batch does not match the step.
        """
        part, batch = self._session.named_batch(name, batch)
        return first_nonfinite(self._session, self._session.data.batch_of(part, batch), hyperparameters, part)

    @checked(start=FINITE, end=FINITE, step=TEXT.or_none())
    def find_lr(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        start: float = 1e-7,
        end: float = 10.0,
        steps: int = 100,
        step: str | None = None,
        accumulate: int | None = None,
    ) -> RateCurve:
        """Find a learning rate by a sweep and short runs. State and progress are restored afterwards.

        In the sweep, the rate grows step by step from ``start`` to ``end`` until the loss diverges. Then short runs at
        constant rates are compared; their loss is lowest near the suggestion.

        If the learning rate follows a schedule in the graph, the schedule is suspended, and the suggestion is for its
        peak. For an optimizer with groups, the suggestion is for the weights outside all groups. Groups with
        ``lr_factor``, or with a number of their own, keep their ratio to this rate; groups with a schedule of their own
        follow that schedule. If one group has a rate that is an input and others follow a schedule, the suggestion is
        for that input.

        Args:
            data, batch_size: as for :meth:`fit`; batches are shuffled.
            start, end: the range of rates, swept on a logarithmic scale.
            steps: number of steps of the sweep; each of about five short runs has twice as many.
            step: with several named steps, the one to try; the others are not trained.
            accumulate: as for :meth:`fit`; each step of the sweep is then one update from this many batches.

        Returns:
            The curve, with the suggested rate as ``suggestion``; ``plot()`` draws it.

        Raises:
            BuildError: if the optimizer has no learning rate, or no weight uses it; if the step does not accumulate
                gradients; or if ``step`` is missing.
            UnknownNameError: if the step does not exist.
            DataError: if the data do not match the step.
            BusyError: if ``fit`` is running.
        """
        check_counts(steps=steps, accumulate=accumulate)
        with self._trial("find_lr", data, batch_size, step, accumulate, shuffle=True, feeds_rate=True) as trial:
            return find_rate(trial, float(start), float(end), steps)

    @checked(step=TEXT.or_none())
    def overfit(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        steps: int = 200,
        step: str | None = None,
        **hyperparameters: Rate,
    ) -> Overfit:
        """Train on the first batch of the data only; a step that cannot memorize one batch has a bug.

        State and progress are restored afterwards.

        Args:
            data, batch_size: as for :meth:`fit`.
            steps: number of steps.
            step: as for :meth:`find_lr`.
            hyperparameters: as for :meth:`fit`: numbers, or functions of the number of steps done in this call. A
                ``reduce_on_plateau`` stays at its initial value, since there is no history.

        Returns:
            The losses, and whether they fell to a tenth (``learned``); print it.

        Raises:
            BuildError: if there are several steps, and ``step`` is missing.
            UnknownNameError: if a step or hyperparameter does not exist.
            DataError: if the data do not match the step.
            DivergedError: if the loss is NaN or infinite.
            BusyError: if ``fit`` is running.
        """
        check_counts(steps=steps)
        with self._trial("overfit", data, batch_size, step, shuffle=False) as trial:
            trial.part.rates.check_names(hyperparameters, self.overfit)
            return overfit(trial, steps, hyperparameters)

    def find_batch_size(self, data: Any, memory: str | None = None, *, drop_last: bool = False) -> BatchSize:
        """Find the largest power-of-two batch size that fits in memory, by estimates and trial steps (CPU only).

        State and progress are restored afterwards.

        Args:
            data: samples, as for :meth:`fit`.
            memory: limit for this process, such as ``"4GB"``; by default 80 % of the free memory.
            drop_last: as for :meth:`fit`.

        Returns:
            The batch size (``samples``), and the memory of a step with it; print it.

        Raises:
            DataError: if the data are already batched, a step on one sample does not fit, or free memory is unknown.
            BusyError: if ``fit`` is running.
        """
        session = self._session
        limit = limit_of("auto" if memory is None else f"auto:{memory}")
        with session.turns.trained("find_batch_size", in_callbacks=False):
            source = session.data.to_train_on(data, session.data.order(None, shuffle=False, drop_last=False))
            return find_batch_size(session, source, limit, drop_last)

    def profile(self, name: Any = None, batch: Any = None, *, steps: int = 10, **hyperparameters: float) -> Profile:
        """Profile the operators of a training step, by node and layer of the model.

        State and progress are restored afterwards.

        Args:
            name, batch, hyperparameters: as for :meth:`step`.
            steps: number of timed steps, after two warm-up steps.

        Returns:
            Seconds by operator and by layer, for forward pass, backward pass and update; print it.

        Raises:
            DataError: if the batch does not match the step.
            BusyError: if ``fit`` is running.
        """
        check_counts(steps=steps)
        session = self._session
        part, batch = session.named_batch(name, batch)
        with session.turns.trained("profile", in_callbacks=False):
            part.rates.check_names(hyperparameters, self.profile)
            feeds = session.data.batch_of(part, batch)
            with session.undone():
                return profiled(session, feeds, hyperparameters, steps, part)

    @contextlib.contextmanager
    def _trial(
        self,
        what: str,
        data: Any,
        batch_size: int | None,
        step: str | None,
        accumulate: int | None = None,
        *,
        shuffle: bool,
        feeds_rate: bool = False,
    ) -> Iterator[Trial]:
        """Lock the trainer and yield a step and its data for the method ``what``.

        Other arguments are as for :meth:`find_lr`. With ``feeds_rate``, the learning rate must be an input, even if the
        graph has a schedule.
        """
        session = self._session
        given = data.order if isinstance(data, Indexed) else None
        order = given or session.data.order(batch_size, shuffle, drop_last=False)
        if step is None and session.manifest.steps:
            names = list(session.manifest.steps)
            raise BuildError(
                f"{what} needs one step, but this step folder has several ({listed(names)})",
                remedy=f"name one: step={names[0]!r}",
                shell="use Python, where one can be named",
            )
        if session.team.ranks > 1:
            raise BuildError(
                f"{what} does not support several ranks, and this trainer is one of several",
                remedy="use a Trainer without parallel for it, in a separate process",
                shell="omit --ranks",
            )
        part = session.named(step)
        check_accumulates(accumulate, [part])
        with session.turns.trained(what, in_callbacks=False):
            if feeds_rate and LEARNING_RATE not in part.rates.defaults:
                session = session.with_fed_rate(part.name)
                part = session.named(step)
            yield Trial(session, session.data.to_train_on(data, order, (part.name,)), part, accumulate)

    @checked(classes=NAMES.or_none(), metric=TEXT.or_none(), averaged=FLAG)
    @synchronized
    def per_class(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        classes: Sequence[str] | None = None,
        metric: str | None = None,
        averaged: bool = True,
    ) -> ClassTable:
        """Compute precision, recall and F1 of each class on held-out data, and the confusions between classes.

        The step must have a metric that counts classes, such as ``"f1"`` or ``"confusion_matrix"``.

        Args:
            data, batch_size, averaged: as for :meth:`evaluate`.
            classes: class names; by default the class names of the data or of the training data, or else class indices.
            metric: the metric whose counts are used, if there are several.

        Raises:
            DataError: if the data do not match, or the step does not count classes.
        """
        source = self._session.data.held_out(data, batch_size)
        counts = self._evaluator.class_counts(source, metric, averaged)
        names: Sequence[object] | None = classes
        if names is None:  # class indices, where the data have no names
            known = next(iter(self._session.data.names.updated(source.names).classes.values()), ())
            names = [*known[: len(counts)], *range(len(known), len(counts))]
        return ClassTable.of(counts, names)

    @checked(pairs=WHOLE, examples=WHOLE, k=WHOLE, averaged=FLAG)
    @synchronized
    def confusions(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        pairs: int = 10,
        examples: int = 6,
        k: int = 24,
        averaged: bool = True,
    ) -> Confusions:
        """Find the samples of held-out data that a classifier confuses, and the samples with the largest losses.

        This takes one pass over the data, for any step with class indices or class probabilities as target. In a
        notebook, and on the page of :func:`gradgraph.export.save_mistakes`, the samples are shown with their pictures.

        Args:
            data, batch_size, averaged: as for :meth:`evaluate`.
            pairs: number of class pairs, the most frequently confused ones.
            examples: number of samples for each pair.
            k: number of samples with the largest losses overall.

        Raises:
            DataError: if the data do not match, or the step is not a classifier.
        """
        check_counts(pairs=pairs, examples=examples, k=k)
        source = self._session.data.one_after_another(data, batch_size)
        return confusions_of(self._session, source, pairs, examples, k, averaged)

    @checked(k=WHOLE, by=TEXT.or_none(), averaged=FLAG)
    @synchronized
    def worst(self, data: Any, k: int = 10, *, by: str | None = None, averaged: bool = True) -> WorstSamples:
        """Find the samples of held-out data with the largest losses: wrong labels, or samples not learned yet.

        Each sample is evaluated as a batch of its own, which takes longer than :meth:`evaluate`; for a loss that
        compares samples of a batch, the result is meaningless. Samples whose labels are all ignored are skipped.

        Args:
            data: as for :meth:`fit`; batches of an iterable are split.
            k: number of samples.
            by: the step whose loss is used, if there are several.
            averaged: as for :meth:`evaluate`.

        Returns:
            A list of samples, largest loss first, each with its index, loss (``value``), arrays, model outputs, and the
            names of its file and classes, if any. A notebook shows it with pictures.

        Raises:
            DataError: if the data do not match, or the model has a fixed batch size.
        """
        check_counts(k=k)
        return self._evaluator.worst(self._session.data.one_after_another(data), k, by, averaged)
