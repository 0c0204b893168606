"""The training loop behind ``Trainer.fit``: epochs, validation, callbacks, interruption."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradgraph.arguments import described
from gradgraph.data.arrays.remedies import check_counts
from gradgraph.data.sources.shares import Spare, shares
from gradgraph.data.sources.sources import Order, Source
from gradgraph.errors import ArgumentError, DataError, DivergedError, OutputError, shown, suggestion
from gradgraph.files.suffixes import check_suffix
from gradgraph.runtime.execution.binding import BoundSession, Together
from gradgraph.runtime.execution.evaluating import Evaluator
from gradgraph.runtime.execution.means import WeightedMeans, add_weighted
from gradgraph.runtime.execution.session import TerminatedError
from gradgraph.runtime.execution.step_session import StepSession
from gradgraph.runtime.loop.best import Best
from gradgraph.runtime.loop.course import Course
from gradgraph.runtime.loop.interrupt import SAME_WISH, Interrupts, exit_for, interrupts, resume_sentence
from gradgraph.runtime.loop.logs import Logs
from gradgraph.runtime.loop.moving import MovingRates, Rate, last_rates
from gradgraph.runtime.loop.reporter import Reporter, reporter, told_if_slow
from gradgraph.runtime.loop.saves import Saves
from gradgraph.runtime.saved.checkpoint import CheckpointKeeper
from gradgraph.runtime.saved.history import History
from gradgraph.runtime.saved.lock import only_writer
from gradgraph.runtime.saved.monitor import Monitor
from gradgraph.step.finishes import add_sums, as_row, finished
from gradgraph.step.manifest import LEARNING_RATE, LOSS_SCALE

log = logging.getLogger("gradgraph")

HOOKS = ("on_step", "on_epoch", "on_end")  # the methods of a callback


@dataclass(frozen=True)
class FitOptions:
    """The arguments of ``Trainer.fit``, documented there."""

    epochs: int = 1
    rates: Mapping[str, Rate] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    progress: bool | None = None
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    max_steps: int | None = None
    max_time: float | None = None
    patience: int | None = None
    monitor: Monitor = field(default_factory=Monitor)
    limit: int | None = None
    accumulate: int | None = None
    log: Any = None
    log_every: int = 50
    eval_every: int | None = None

    def told(self, resume: bool) -> str:
        """Return a text of ``resume`` and the options that must be equal on all ranks."""
        own = {n: v for n, v in vars(self).items() if n not in ("rates", "callbacks", "checkpoint", "log", "progress")}
        rates = {name: rate for name, rate in self.rates.items() if isinstance(rate, int | float)}
        return f"{own}, {rates}, {sorted(self.rates)}, {len(self.callbacks)} callbacks, resume={resume}"

    def silent(self) -> FitOptions:
        """Return a copy of these options for a rank that prints and writes nothing."""
        return replace(self, progress=False, checkpoint=None, log=None)

    def after(self, seconds: float) -> FitOptions:
        """Return a copy of these options once ``seconds`` of ``max_time`` have passed."""
        return self if self.max_time is None else replace(self, max_time=max(self.max_time - seconds, 1e-9))

    def __post_init__(self) -> None:
        for callback in self.callbacks:
            _check_callback(callback)
        if self.checkpoint is not None:
            check_suffix(self.checkpoint, ".ckpt", ".safetensors")
        if self.max_time is not None and not self.max_time > 0:
            raise DataError(f"max_time is {described(self.max_time)}; it should be a positive number of seconds")
        counts = "epochs max_steps patience limit checkpoint_every accumulate log_every eval_every"
        check_counts(**{name: getattr(self, name) for name in counts.split()})
        if self.patience is None and self.monitor != Monitor():
            raise DataError(
                "monitor, mode and min_delta have no effect without patience (early stopping)",
                remedy="pass patience=<epochs>",
                shell="add --patience",
            )


def _check_callback(callback: object) -> None:
    """Raise ArgumentError if ``callback`` has no method that ``fit`` calls."""
    hooks = [name for name in HOOKS if callable(getattr(callback, name, None))]
    if hooks and not isinstance(callback, type):
        return
    if hooks:
        called = shown(callback.__name__)  # type: ignore[attr-defined]
        raise ArgumentError(f"the callback is the class {called}; give an instance of it, such as {called}()")
    methods = "on_step(trainer, results), on_epoch(trainer, row) and on_end(trainer, history)"
    near = next((n for n in dir(callback) if not hasattr(object, n) and "did you mean" in suggestion(n, HOOKS)), None)
    found = f", but has '{shown(near)}'{suggestion(near, HOOKS)}" if near else ""
    raise ArgumentError(f"the callback, {described(callback)}, has no method that fit calls{found}; "
                        f"give an object with any of {methods}")  # fmt: skip


class Fit:
    """A running call of ``Trainer.fit``, resumable from ``session.progress``.

    Args:
        source, order: the training data, and how samples are ordered and batched.
        validation: data to evaluate after each epoch or every ``eval_every`` steps; None for no validation.
        options: the other arguments of ``Trainer.fit``.
        owner: the trainer, which is passed to callbacks.
    """

    def __init__(
        self,
        session: StepSession,
        source: Source,
        order: Order,
        validation: Source | None,
        options: FitOptions,
        owner: object,
    ) -> None:
        self.team = session.team
        options = options if self.team.is_first else options.silent()
        self.session, self.source, self.order, self.options = session, source, order, options
        self.validation, self.owner = validation, owner
        self.progress = session.progress  # the same object during the whole fit
        self._lock = session.turns.lock  # held while progress changes, since other threads read and save it
        self._moving = MovingRates(options.rates)
        self._rates_now: dict[str, float] | None = None
        self._saves = Saves(session, options.checkpoint)
        self._best = Best(session, self._saves, options.patience, options.monitor)
        self._logs = Logs(options.log, options.log_every, self.progress, session.manifest, session.scaling)
        if validation is None and options.eval_every is not None:
            raise DataError("eval_every needs validation data", remedy="pass validation", shell="add --validation")
        self._check_monitor()
        self._stopped = self._stepped = self._warned = False
        self._signal: int | None = None  # received by any rank
        self._deadline = None if options.max_time is None else time.monotonic() + options.max_time

    def _check_monitor(self) -> None:
        """Raise DataError if the history will not have the monitored column, or its direction is unknown."""
        names = list(self._columns())
        rows = [measure.name for measure in self.session.manifest.columns_of_sums if measure.rows]
        names += [f"val_{name}" for name in (*names, *rows)] if self.validation is not None else []
        names += [name for part in self.session.manifest.parts.values() for name in part.reports]
        for callback in self.options.callbacks:
            if isinstance(callback, CheckpointKeeper):
                callback.check(names)
        if self.options.patience is None:
            return
        column = self.options.monitor.of(names)
        if not any(column == name or column.startswith(f"{name}.") for name in names):  # <metric>.<class>
            known = column.removeprefix("val_") in (*names, *rows) and self.validation is None
            needs = "; pass validation data" if known else suggestion(column, names)
            raise DataError(f"the history will have no column '{shown(column)}' to monitor{needs}")
        _ = self.options.monitor.sign

    def _columns(self) -> Iterator[str]:
        """Yield the names of the history columns of losses and metrics."""
        m = self.session.manifest
        yield from dict.fromkeys(["loss", *m.metrics, *(measure.name for measure in m.trained_measures)])

    def __call__(self, resume: bool) -> History:
        with contextlib.ExitStack() as stack:
            if self.options.checkpoint is not None:
                stack.enter_context(only_writer(self.options.checkpoint))
            with self._lock:
                self._begin(resume)
            p, most = self.progress, self.options.max_steps
            left = None if most is None else most - (p.steps - p.fit_step)
            course = Course(self._last_epoch, left, self._deadline)
            report = reporter(self.options.progress, course, self._rates_of_last_step)
            self._run(report)
            self.team.check_same(self.session.state)
            self._saves.finish()
            restored = self._best.restore(report)
            for callback in self.options.callbacks if self.team.is_first else ():
                if hasattr(callback, "on_end"):
                    callback.on_end(self.owner, p.history)
            self.team.end(self.session.state)
            result = History({name: list(column) for name, column in p.history.items()})
            if p.batch and p.weight:  # an unfinished epoch; not stored in progress, since a resumed run writes its row
                result.append(self._row())
            result.restored = restored
            return result

    def _run(self, report: Reporter) -> None:
        try:
            self._logs.begin()
            with interrupts(SAME_WISH if self.team.ranks > 1 else 0.0) as received:
                try:
                    self._epochs(report, received)
                except TerminatedError:
                    raise KeyboardInterrupt from None
                if self._interrupted(received) and self._signal is not None:  # the current step is finished
                    self._saves.save(final=True)
                    report.close()
                    sentence = resume_sentence(self.options.checkpoint, self.progress.steps)
                    report.say(sentence)
                    self.team.end(self.session.state)
                    raise exit_for(self._signal, sentence)
        finally:
            report.close()
            self._logs.close()
            with self._lock:
                self.session.release()

    def _row(self, validated: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return the history row for the steps since the last row, including ``validated``, the validation results."""
        p = self.progress
        found = {"epoch": p.epoch + 1, "step": p.steps, **self._means(), **(validated or {})}
        return found | self._rates_of_last_step() | self.session.scaling()

    def _rates_of_last_step(self) -> dict[str, float]:
        """Return the last step's learning rates, and its other hyperparameters passed to this fit, by name."""
        found = last_rates(self.session.manifest, self.progress)
        return {n: v for n, v in found.items() if n in self.options.rates or n.rpartition(".")[2] == LEARNING_RATE}

    # --- start and end ----------------------------------------------------------------------------------------

    def _begin(self, resume: bool) -> None:
        self._saves.continues = resume
        p, order = self.progress, self._order()
        if resume:
            _check_same_order(p.order, order, p.batch or p.place)
            _tell_of_other_order(p.order, order)
            p.best, p.stale, self._best.state = self.team.from_first(self._best.recovered)
            self._stopped = self._best.is_over
        else:
            p.epoch = p.epochs_of_fit(1, resume).start  # skip the rest of an unfinished epoch
            self._forget_epoch()
            p.fit_epoch, p.fit_step = p.epoch, p.steps
            p.best, p.stale, p.history, p.eval_every = None, 0, History(), 0
        p.order = order
        p.eval_every = self.options.eval_every or p.eval_every
        if self.source.shapes is not None:
            self.session.expect(self.source.shapes)
        self._tell_of_nothing_left()
        self._tell_of_schedule()

    def _tell_of_nothing_left(self) -> None:
        """Warn if a resumed run is already finished, so this fit does no step."""
        p, most = self.progress, self.options.max_steps
        if self._last_epoch <= p.epoch:
            log.warning("nothing left to do: %d of %d epochs are done", p.epoch - p.fit_epoch, self.options.epochs)
        elif most is not None and p.steps - p.fit_step >= most:
            log.warning("nothing left to do: %d of at most %d steps are done; increase or remove max_steps "
                        "(--max-steps) to continue", p.steps - p.fit_step, most)  # fmt: skip
        elif self._stopped:
            log.warning("nothing left to do: the run stopped early, since %s did not improve; increase patience "
                        "(--patience) to continue", self.options.monitor.of(p.history))  # fmt: skip

    def _tell_of_schedule(self) -> None:
        """Warn before the first step if a schedule in the graph is known to end within this fit."""
        part, total = self.session.parts.get(""), self._batch_count()
        if part is None or part.ends is None or total is None:
            return
        p, every, most = self.progress, self.options.accumulate or 1, self.options.max_steps
        done = int(self.session.state.read([part.counter])[part.counter])
        updates = done + (self._last_epoch - p.epoch) * -(-total // every) - p.batch // every
        updates = updates if most is None else min(updates, done - (p.steps - p.fit_step - most) // every)
        if done < part.ends < updates:
            log.warning(
                "the learning rate schedule ends after %d updates, but this fit makes %d: then the weights no longer "
                "change; build the step with a longer schedule, or train for fewer epochs",
                part.ends,
                updates,
            )
            part.ends = None  # warn once

    def _order(self) -> dict[str, Any]:
        """Return the settings that determine the samples of each batch, by name."""
        return {
            "rows": self.source.rows,
            "batch_size": self.order.batch_size,
            "shuffle": self.order.shuffle,
            "drop_last": self.order.drop_last,
        }

    def _forget_epoch(self) -> None:
        self.progress.batch = 0
        self._forget_row()

    def _forget_row(self) -> None:
        """Reset the sums of losses and metrics for the next history row."""
        p = self.progress
        p.rowed, p.sums, p.weight, p.totals = p.batch, {}, 0, {}

    @property
    def _last_epoch(self) -> int:
        return self.progress.fit_epoch + self.options.epochs

    # --- the loop -----------------------------------------------------------------------------------------------

    def _epochs(self, report: Reporter, received: Interrupts) -> None:
        p = self.progress
        while p.epoch < self._last_epoch and not self._stopped:
            if not self._train_epoch(report, received):
                return
            is_last = p.epoch + 1 == self._last_epoch
            if self.options.eval_every is None or (is_last and p.weight):
                if not self._write_row(report, received, ends_epoch=True):
                    return
            else:
                with self._lock:
                    self._next_epoch()

    def _train_epoch(self, report: Reporter, received: Interrupts) -> bool:
        """Train on the remaining batches of the epoch; return False if stopped before its end."""
        p, evaluates = self.progress, self.options.eval_every is not None
        total = self._batch_count()
        limited = self.options.max_steps is not None or self._deadline is not None
        checker = self.session.data.checker
        if self._is_row_due() and not self._write_row(report, received):  # the resumed run stopped in an evaluation
            return False
        # without other code between steps, the thread's floating-point environment is set once per epoch, not per step
        runs_others = self.options.callbacks or self._moving.are_functions or self._logs or evaluates
        if not (total is not None and p.batch >= total):
            with contextlib.nullcontext() if runs_others else self.session.computing(self.source):
                for batch in shares(self.source, checker, p.epoch, p.batch, self.team.rank, self.team.ranks):
                    if self._ends(received, limited):
                        return False
                    self._train_batch(batch, report, received, total)
                    if evaluates and self._is_row_due() and not self._write_row(report, received):
                        return False
                    if self._stopped or p.batch == total:
                        break
        self.session.definition.check_unchanged()  # the last step of the epoch may have read a changed file
        return not (self._stopped or self._interrupted(received))

    def _ends(self, received: Interrupts, limited: bool) -> bool:
        """Whether to stop before the next batch; all ranks get the same answer.

        With ``limited``, ``max_steps`` and ``max_time`` are checked.
        """
        over = limited and self._over()
        if self._stopped:  # because of max_steps or a callback, which is the same on all ranks
            return True
        over, self._signal = self.team.heard(over, received.signal)
        return over or self._signal is not None

    def _interrupted(self, received: Interrupts) -> bool:
        """Return whether any rank has received a signal; all ranks must call this together."""
        if self._signal is None:
            self._signal = next((s for s in self.team.gathered(received.signal) if s is not None), None)
        return self._signal is not None

    def _is_row_due(self) -> bool:
        """Whether ``eval_every`` steps were done since the last history row."""
        p, every = self.progress, self.options.eval_every
        if every is None or not p.weight:
            return False
        last = int(p.history["step"][-1]) if p.history else p.fit_step
        return (p.steps - p.fit_step) // every > (last - p.fit_step) // every

    def _train_batch(self, batch: Any, report: Reporter, received: Interrupts, total: int | None) -> None:
        p, every = self.progress, self.options.checkpoint_every
        before = p.steps // every if every else 0
        with self._lock:
            if self._stepped:
                rows, bound = self._step(batch, received)
            else:  # the first step creates the session, which may take long for a large network
                self._stepped = True
                with told_if_slow("preparing the step for this machine …", report.say):
                    rows, bound = self._step(batch, received)
        report.step(p.epoch, p.batch, total, rows, bound.shown)
        if self._logs:
            self._logs.step(rows, bound.shown)
        if self.options.callbacks:
            self._call("on_step", bound.results())
        if every and p.steps // every > before:
            self._saves.save()
        self.session.turns.give_way()

    def _step(self, batch: Any, received: Interrupts) -> tuple[int, BoundSession | Together]:
        """Train on a batch and add its results to the progress.

        Return the number of samples over all ranks, and the session with the results.
        """
        p = self.progress
        try:
            feeds = self.session.data.batch_of(self.session.part, batch, raw=False)
        except DataError as error:
            raise error.at(f"batch {p.batch} of epoch {p.epoch + 1}") from None
        self.team.spare = type(batch) is Spare
        rows, counted = self.session.data.counts(feeds)
        try:
            bound = self.session.train(feeds, self._fed(counted), self.session.part, received.run_options)
        except DivergedError as error:
            raise self._diverged(error) from None
        rows, counted = self.team.of_all(rows, counted)
        p.batch += 1
        p.weight += add_weighted(p.sums, bound.numbers, counted)
        if bound.sums:
            add_sums(p.totals, bound.sums)
        return rows, bound

    def _fed(self, counted: int) -> dict[str, float]:
        """Return the next step's hyperparameters and accumulation inputs, for ``counted`` loss terms."""
        every = self.options.accumulate
        if every is None:
            return self._rates()
        done = self.progress.batch + 1
        moves = done % every == 0 or done == self._batch_count()
        return {**self._rates(), **self.session.part.told_to_add_up(moves, counted)}

    def _diverged(self, error: DivergedError) -> DivergedError:
        """Add the batch number to the error, and save a separate checkpoint from which the step can be repeated."""
        p, path = self.progress, self._saves.beside("diverged")
        place = f"batch {p.batch} of epoch {p.epoch + 1}"
        if path is not None and not self.session.state.lost:
            with contextlib.suppress(OutputError):
                self.session.save(path)
                place += f" (resume from '{shown(path)}' to repeat this batch)"
        self.team.end(self.session.state)
        return error.at(place)

    def _batch_count(self) -> int | None:
        counts = [c for c in (self.source.batches_per_epoch, self.options.limit) if c is not None]
        return min(counts, default=None)

    def _over(self) -> bool:
        """Whether ``max_steps`` or ``max_time`` is reached."""
        p = self.progress
        if self.options.max_steps is not None and p.steps - p.fit_step >= self.options.max_steps:
            self._stopped = True
        return self._stopped or (self._deadline is not None and time.monotonic() >= self._deadline)

    def _rates(self) -> dict[str, float]:
        if self._rates_now is None or self._moving.are_functions:
            history = self.progress.history
            self._rates_now = {n: self._moving.at(n, self._steps_done(n), history) for n in self.options.rates}
        return self._rates_now

    def _steps_done(self, rate: str) -> int:
        """Return the number of steps done, the argument of a user's function for the hyperparameter ``rate``."""
        return self.progress.steps

    def _means(self) -> dict[str, float]:
        """Return the mean losses and the metrics over all batches since the last history row, by column."""
        measures = (m for m in self.session.manifest.columns_of_sums if m.name in self.progress.totals)
        return self._numbers() | self._as_row(finished(tuple(measures), self.progress.totals))

    def _numbers(self) -> dict[str, float]:
        return WeightedMeans(self.progress.sums, self.progress.weight).result()

    def _warn_of_scale(self, row: Mapping[str, float]) -> None:
        """Warn once if gradients are not finite at any loss scale."""
        for name, number in row.items():
            if name.rpartition(".")[2] == LOSS_SCALE and number < 1.0 and not self._warned:
                self._warned = True
                log.warning(
                    "the %s fell to %.3g: gradients are NaN or infinite at any scale; train in bfloat16, or find the "
                    "node with trainer.find_nonfinite in float32",
                    name,
                    number,
                )

    def _validate(self, source: Source, received: Interrupts) -> dict[str, float]:
        with self.session.computing(source), self.session.turns.taken():
            # several ranks evaluate their shares to the end
            stop = (lambda: received.requested) if self.team.ranks == 1 else None
            found = Evaluator(self.session).evaluate(source, self.options.limit, stop=stop, team=self.team)
        return {f"val_{name}": value for name, value in self._as_row(found).items()}

    def _as_row(self, columns: Mapping[str, Any]) -> dict[str, float]:
        return as_row(columns, self.session.data.names.classes.values())

    def _write_row(self, report: Reporter, received: Interrupts, ends_epoch: bool = False) -> bool:
        """Evaluate on the validation data, and append a row to the history; return whether this was completed.

        An evaluation interrupted by a signal is repeated by a resumed run.
        """
        validated = {}
        with self._lock:
            self.team.meet(self.session.state)
        self._warn_of_scale(self.session.scaling())
        if self.validation is not None:
            validated = self._validate(self.validation, received)
            if self._interrupted(received):
                return False
        row = self._row(validated)
        p = self.progress
        with self._lock:
            p.history.append(row)
            if ends_epoch:
                self._next_epoch()
            else:
                self._forget_row()
            self._rates_now = None  # a Plateau may now return a different rate
        report.row(row, p.batch, ends_epoch)
        self._logs.row(row, "epoch" if self.options.eval_every is None else "eval")
        if self._best.is_out_of_patience(row):
            self._stopped = True
        self._call("on_epoch", row)
        if self.options.checkpoint_every is None:
            self._saves.save()
        return True

    def _next_epoch(self) -> None:
        self.progress.epoch += 1
        self._forget_epoch()

    def _call(self, hook: str, argument: Any) -> None:
        for callback in self.options.callbacks if self.team.is_first else ():
            if hasattr(callback, hook) and getattr(callback, hook)(self.owner, argument) is True:
                self._stopped = True
        if self.options.callbacks:
            self._stopped = self.team.agreed(self._stopped)


def _check_same_order(before: Mapping[str, Any], now: Mapping[str, Any], batch: int) -> None:
    """Raise DataError if a run that stopped within an epoch, after ``batch`` batches, is resumed with a different
    order.

    ``before`` and ``now`` are the order settings of the stopped run and of this fit.
    """
    for name, value in now.items():
        if batch and name in before and (old := before[name]) != value:
            python, shell = f"{shown(name)}={old!r}", f"resume with --{name.replace('_', '-')} {old}"
            if name == "steps":
                python, shell = "the same steps and every", "train the same steps as before"
            elif name == "shuffle":
                shell = f"resume {'without' if old else 'with'} --no-shuffle"
            elif name == "drop_last":
                shell = f"resume {'with' if old else 'without'} --drop-last"
            raise DataError(
                f"{shown(name)} is {value}, but the run was stopped within an epoch (after batch {batch}) with {old}",
                remedy=f"fit with {python} to finish that epoch, or with resume=False to begin a new one",
                shell=shell,
            )


def _tell_of_other_order(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn if a run resumed at the end of an epoch continues with a different data order."""
    if other := [f"{shown(name)} {value} (was {before[name]})" for name, value in now.items()
                 if name in before and before[name] != value]:  # fmt: skip
        log.warning("the resumed run continues with %s, so its results differ from an uninterrupted run",
                    ", ".join(other))  # fmt: skip
