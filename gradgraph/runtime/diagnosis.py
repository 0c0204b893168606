"""Questions to a trainer: where a NaN comes from, which rate, where the time goes, what the model gets wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from gradgraph.arguments import FINITE, FLAG, NAMES, TEXT, WHOLE, checked
from gradgraph.errors import BuildError, listed
from gradgraph.runtime.data.remedies import check_counts
from gradgraph.runtime.data.sources import Columns, Samples
from gradgraph.runtime.execution.class_table import ClassTable
from gradgraph.runtime.execution.confusions import Confusions, confusions_of
from gradgraph.runtime.execution.evaluating import Evaluator
from gradgraph.runtime.execution.executor import Executor
from gradgraph.runtime.execution.nonfinite import NonFinite
from gradgraph.runtime.execution.part import check_accumulates
from gradgraph.runtime.execution.profiler import Profile
from gradgraph.runtime.execution.turns import in_turn
from gradgraph.runtime.execution.worst import WorstSamples
from gradgraph.runtime.loop.moving import Rate
from gradgraph.runtime.loop.sizing import BatchSize, find_batch_size, limit_of
from gradgraph.runtime.loop.trials import Overfit, RateCurve, Trial, find_rate, overfit
from gradgraph.step.manifest import LEARNING_RATE


class Diagnosis:
    """The part of a Trainer that asks. Nothing here changes what a run comes to."""

    _executor: Executor
    _evaluator: Evaluator

    @in_turn
    def find_nonfinite(self, name: Any = None, batch: Any = None, **hyperparameters: float) -> NonFinite | None:
        """The node of the step that first makes NaN or infinity on this batch, with the state as it is.

        Nothing is trained. After a DivergedError: ``trainer.find_nonfinite(error.batch, **error.hyperparameters)``.

        Args:
            name, batch, hyperparameters: as for :meth:`step`.

        Returns:
            The node, what it reads and where it stands in the model; print it. None if the loss and the next state
            are finite.

        Raises:
            DataError: the batch does not fit.
        """
        part, batch = self._executor.named_batch(name, batch)
        return self._executor.find_nonfinite(self._executor.batch_of(part, batch), hyperparameters, part)

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
        """Find a learning rate: a run in which it grows step by step from ``start`` to ``end`` until the loss blows up,
        and then short runs at a rate each, between which the loss is least near the suggestion.

        A schedule in the graph rests meanwhile: the suggestion is for its peak. Of an optimizer with groups it is for
        the weights that no group names; groups with ``lr_factor``, or a number of their own, keep their proportion to
        it, and those with a schedule of their own follow that. Where one group is fed a rate and others follow a
        schedule, it is for the one that is fed. State and progress are as they were afterwards.

        Args:
            data, batch_size: as for :meth:`fit`; batches are shuffled.
            start, end: the range; the rates are equally far apart on a logarithmic scale.
            steps: of the first run; each short one, of which there are about five, has twice as many.
            step: of several named steps, the one that is tried; the others rest.
            accumulate: as for :meth:`fit`; a step is then an update of the weights, by so many batches.

        Returns:
            The curve, with ``suggestion``; ``plot()`` draws it.

        Raises:
            BuildError: the optimizer has no learning rate, or no weight follows it; the step adds up no gradients;
                there are several steps, and none is named.
            UnknownNameError: there is no such step.
            DataError: the data do not fit.
            BusyError: ``fit`` runs.
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
        """Train on the first batch of the data again and again: a step that cannot learn it by heart has a mistake.

        State and progress are as they were afterwards.

        Args:
            data, batch_size: as for :meth:`fit`.
            steps: how many.
            step: as for :meth:`find_lr`.
            hyperparameters: as for :meth:`fit`: numbers, or functions of the number of steps done here; a rule that
                follows the history stays at its beginning.

        Returns:
            The losses, and whether they fell to a tenth (``learned``); print it.

        Raises:
            BuildError: there are several steps, and none is named.
            UnknownNameError: there is no such step or hyperparameter.
            DataError: the data do not fit.
            DivergedError: the loss is NaN or infinite.
            BusyError: ``fit`` runs.
        """
        check_counts(steps=steps)
        with self._trial("overfit", data, batch_size, step, shuffle=False) as trial:
            trial.part.rates.check_names(hyperparameters, self.overfit)
            return overfit(trial, steps, hyperparameters)

    def find_batch_size(self, data: Any, memory: str | None = None, *, drop_last: bool = False) -> BatchSize:
        """The largest power of two of samples whose step fits in memory, by estimate and by trial (on the CPU).

        State and progress are as they were afterwards.

        Args:
            data: samples, as for :meth:`fit`.
            memory: what this process may take, such as ``"4GB"``; by default 0.8 of what is free is used.
            drop_last: as for :meth:`fit`.

        Returns:
            ``samples``, and what a step on so many takes; print it.

        Raises:
            DataError: the data come in batches; not even one sample fits; or the system does not say what is free.
            BusyError: ``fit`` runs.
        """
        executor = self._executor
        limit = limit_of("auto" if memory is None else f"auto:{memory}")
        with executor.turns.trained("find_batch_size", in_callbacks=False):
            source = executor.to_train_on(data, executor.order(None, shuffle=False, drop_last=False))
            return find_batch_size(executor, source, limit, drop_last)

    def profile(self, name: Any = None, batch: Any = None, *, steps: int = 10, **hyperparameters: float) -> Profile:
        """Time the operators of a training step, by the nodes and layers of the model that they belong to.

        State and progress are as they were afterwards.

        Args:
            name, batch, hyperparameters: as for :meth:`step`.
            steps: how many are timed, after two that are not.

        Returns:
            Seconds by operator and by layer, of forward pass, backward pass and update; print it.

        Raises:
            DataError: the batch does not fit.
            BusyError: ``fit`` runs.
        """
        check_counts(steps=steps)
        executor = self._executor
        part, batch = executor.named_batch(name, batch)
        with executor.turns.trained("profile", in_callbacks=False):
            part.rates.check_names(hyperparameters, self.profile)
            feeds = executor.batch_of(part, batch)
            with executor.undone():
                return executor.profile(feeds, hyperparameters, steps, part)

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
        """A step and the data for it, of a trial whose training is undone.

        Args:
            feeds_rate: the trial feeds the learning rate, also of a step whose graph has a schedule.
        """
        executor = self._executor
        prepared = isinstance(data, Columns | Samples)
        order = data.order if prepared else executor.order(batch_size, shuffle, drop_last=False)
        if step is None and executor.manifest.steps:
            names = list(executor.manifest.steps)
            raise BuildError(
                f"{what} tries one step, and this step folder has several ({listed(names)})",
                remedy=f"say which: step={names[0]!r}",
                shell="try it in Python, which can name one",
            )
        if executor.team.ranks > 1:
            raise BuildError(
                f"{what} runs in one process, and this trainer is one of several",
                remedy="make a Trainer without parallel for it, in a process of its own",
                shell="leave --ranks out",
            )
        part = executor.named(step)
        check_accumulates(accumulate, [part])
        with executor.turns.trained(what, in_callbacks=False):
            if feeds_rate and LEARNING_RATE not in part.rates.defaults:
                executor = executor.with_fed_rate(part.name)
                part = executor.named(step)
            yield Trial(executor, executor.to_train_on(data, order, (part.name,)), part, accumulate)

    @checked(classes=NAMES.or_none(), metric=TEXT.or_none(), averaged=FLAG)
    @in_turn
    def per_class(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        classes: Sequence[str] | None = None,
        metric: str | None = None,
        averaged: bool = True,
    ) -> ClassTable:
        """Precision, recall and F1 of each class on held-out data, and which classes are taken for which.

        Needs a step that counts classes: one with a metric such as ``"f1"`` or ``"confusion_matrix"``.

        Args:
            data, batch_size, averaged: as for :meth:`evaluate`.
            classes: their names; by default those that the data or the training had, or numbers.
            metric: the metric whose counts are shown, where there are several.

        Raises:
            DataError: the data do not fit, or the step counts no classes.
        """
        source = self._executor.held_out(data, batch_size)
        counts = self._evaluator.class_counts(source, metric, averaged)
        names: Sequence[object] | None = classes
        if names is None:  # of classes that the data do not have, numbers
            known = next(iter(self._executor.names.updated(source.names).classes.values()), ())
            names = [*known[: len(counts)], *range(len(known), len(counts))]
        return ClassTable.of(counts, names)

    @checked(pairs=WHOLE, examples=WHOLE, k=WHOLE, averaged=FLAG)
    @in_turn
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
        """Which samples of held-out data a classifier takes for which class, and of which it is least sure.

        One pass over the data, for any step with class numbers, or shares of classes, as its target. In a notebook,
        and on the page of :func:`gradgraph.export.save_mistakes`, with the pictures.

        Args:
            data, batch_size, averaged: as for :meth:`evaluate`.
            pairs: how many pairs of classes, those that are confused most often.
            examples: samples of each of them.
            k: samples with the largest losses of all.

        Raises:
            DataError: the data do not fit, or the step is no classifier.
        """
        check_counts(pairs=pairs, examples=examples, k=k)
        source = self._executor.one_after_another(data, batch_size)
        return confusions_of(self._executor, source, pairs, examples, k, averaged)

    @checked(k=WHOLE, by=TEXT.or_none(), averaged=FLAG)
    @in_turn
    def worst(self, data: Any, k: int = 10, *, by: str | None = None, averaged: bool = True) -> WorstSamples:
        """The samples of held-out data with the largest losses: wrong labels, and what is not learnt yet.

        Each sample is a batch of its own, so this takes longer than :meth:`evaluate`, and a loss that compares samples
        of a batch with one another says nothing. Samples of which all labels are ignored are left out.

        Args:
            data: as for :meth:`fit`; batches of an iterable are taken apart.
            k: how many.
            by: the name of a step, of one with several: its loss is looked at.
            averaged: as for :meth:`evaluate`.

        Returns:
            A list with the largest loss first: of each the index, the loss (``value``), the arrays of the sample, the
            outputs of the model, and names of its file and classes, where they have some. In a notebook, with pictures.

        Raises:
            DataError: the data do not fit, or the model takes batches of one size only.
        """
        check_counts(k=k)
        return self._evaluator.worst(self._executor.one_after_another(data), k, by, averaged)
