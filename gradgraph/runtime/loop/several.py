"""``fit`` for several named steps: each batch trains the steps that are due, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gradgraph.data.arrays.batch import Feed
from gradgraph.errors import BuildError, DataError, DivergedError, shown
from gradgraph.runtime.execution.binding import BoundSession, Together
from gradgraph.runtime.execution.means import WeightedMeans, add_weighted
from gradgraph.runtime.loop.fit import Fit
from gradgraph.runtime.loop.interrupt import Interrupts
from gradgraph.runtime.loop.pattern import Pattern
from gradgraph.step.finishes import add_sums
from gradgraph.step.manifest import column


class SeveralFit(Fit):
    """A ``Fit`` of a step folder with several steps.

    A resumed run finishes the batch in which it stopped: ``progress.place`` counts the steps done on that batch.
    """

    def __init__(self, *given: Any, pattern: Pattern) -> None:
        self.pattern = pattern
        super().__init__(*given)

    def _order(self) -> dict[str, Any]:
        return {**super()._order(), "steps": str(self.pattern)}

    def _begin(self, resume: bool) -> None:
        if not resume and self.progress.place:
            self.progress.turns += 1  # skip the remaining steps of a batch that was started
            self.progress.epoch += not self.progress.batch
            self.progress.place = 0
        super()._begin(resume)

    def _forget_row(self) -> None:
        super()._forget_row()
        self.progress.weights = {}

    def _step(self, batch: Any, received: Interrupts) -> tuple[int, Together]:
        p, names = self.progress, self.pattern.names
        checker = self.session.data.checker_of(names)
        try:
            feeds = checker(self.session.data.read_by(names, dict(batch) if isinstance(batch, Mapping) else batch))
        except DataError as error:
            raise error.at(f"batch {p.batch} of epoch {p.epoch + 1}") from None
        due = self.pattern.on(p.turns)
        sessions: dict[str, BoundSession] = {}
        for name in due[p.place :]:
            sessions[name] = self._train(name, feeds, received)
            p.place += 1
        p.place = 0
        p.turns += 1
        p.batch += 1
        return checker.counts(feeds)[0], Together(sessions)

    def _train(self, name: str, feeds: Mapping[str, Feed], received: Interrupts) -> BoundSession:
        p, session = self.progress, self.session
        part = session.parts[name]
        checker = session.data.checker_of((name,))
        own = checker({spec.name: feeds[spec.name] for spec in part.specs})
        counted = checker.counts(own)[1]
        try:
            bound = session.train(own, self._fed_to(name, counted), part, received.run_options)
        except DivergedError as error:
            raise self._diverged(error) from None
        add_weighted(p.sums, {column(name, result): value for result, value in bound.numbers.items()}, counted)
        p.weights[name] = p.weights.get(name, 0) + counted
        p.weight += counted
        if bound.sums:
            add_sums(p.totals, {column(name, measure): value for measure, value in bound.sums.items()})
        return bound

    def _fed_to(self, name: str, counted: int) -> dict[str, float]:
        """Return the hyperparameters and inputs for accumulation of the step ``name``, on ``counted`` loss terms."""
        fed = {key.removeprefix(f"{name}."): v for key, v in self._rates().items() if key.startswith(f"{name}.")}
        every = self.options.accumulate
        return fed if every is None else {
            **fed, **self.session.parts[name].told_to_add_up(self._is_due(name, every), counted)
        }  # fmt: skip

    def _is_due(self, name: str, every: int) -> bool:
        """Whether the step ``name``, which accumulates gradients, updates its weights in this run.

        This is every ``every``-th of its runs, and its last run of an epoch.
        """
        p, total = self.progress, self._batch_count()
        first = p.turns - p.batch
        here = self.pattern.on(p.turns)
        done = self.pattern.runs(name, first, p.turns) + here[: p.place + 1].count(name)
        if done % every == 0:
            return True
        later = 0 if total is None else self.pattern.runs(name, p.turns + 1, first + total)
        return total is not None and later == 0 and name not in here[p.place + 1 :]

    def _steps_done(self, rate: str) -> int:
        return self.progress.counts.get(rate.partition(".")[0], 0)

    def _rates_of_last_step(self) -> dict[str, float]:
        found = super()._rates_of_last_step()
        return {name: rate for name, rate in found.items() if name.partition(".")[0] in self.pattern.names}

    def _numbers(self) -> dict[str, float]:
        p = self.progress
        found: dict[str, float] = {}
        for name, weight in p.weights.items():
            sums = {key: total for key, total in p.sums.items() if key.startswith(f"{name}.")}
            found |= WeightedMeans(sums, weight).result()
        return found

    def _columns(self) -> Iterator[str]:
        manifest = self.session.manifest
        for name in self.pattern.names:
            results = [column(name, c) for c in manifest.steps[name].results(name)]
            yield from dict.fromkeys([*results, *(m.name for m in manifest.steps[name].trained_measures)])


def rates_of(
    given: Mapping[str, Any], pattern: Pattern, parts: Mapping[str, Any], fit: Callable[..., Any]
) -> dict[str, Any]:
    """Return the hyperparameters of ``fit`` by column, such as ``{"generator.learning_rate": 1e-4}``.

    Args:
        given: the hyperparameters as passed to ``fit``: ``{"learning_rate": {"generator": 1e-4}}``.
        fit: the method ``fit``, whose argument names are suggested for misspelt names.

    Raises:
        BuildError: if a hyperparameter has one value for all steps.
        UnknownNameError: if a step does not have the hyperparameter.
        DataError: if a step is not part of the fit.
    """
    found: dict[str, Any] = {}
    known = {name for part in parts.values() for name in part.rates.defaults}
    for name, rates in given.items():
        if name not in known:
            next(iter(parts.values())).rates.check_names([name], fit)
        if not isinstance(rates, Mapping):
            raise BuildError(
                f"a single {name} was given, but each step has its own",
                remedy=f"give a dict by step: {name}={{{pattern.steps[0]!r}: ...}}",
                shell="remove --lr; each step uses the learning rate that it was built with",
            )
        for step, rate in rates.items():
            if step not in pattern.steps:
                raise DataError(f"{name} has a value for the step '{shown(step)}', which this fit does not train")
            parts[step].rates.check_names([name])
            found[column(step, name)] = rate
    return found
