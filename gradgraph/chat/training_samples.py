"""Samples during training: answers to fixed prompts by the trainer's own session and weights, as they are now."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.chat.picking import picked
from gradgraph.chat.prompts import OneByOne, Prompts
from gradgraph.chat.sampling import Sampling
from gradgraph.errors import ArgumentError, shown
from gradgraph.files.untrusted.documents import json_of
from gradgraph.files.untrusted.regular import UnreadableError, regular_bytes
from gradgraph.runtime.data.batch import Array
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.manifest import numpy_dtype
from gradgraph.surgery.language_models import IGNORED, POSITIONS, SEGMENTS
from gradgraph.surgery.pair_models import LABELS, NEXT_TOKEN

log = logging.getLogger("gradgraph.chat")

EVENT = "sample"  # of a record in a log


class TrainerSteps(OneByOne):
    """The next token by a trainer's ``predict``: the whole text so far goes through it each time, without a cache.

    Frozen weights are those that the trainer has already, in its session of predictions: there is no other model.

    Args:
        trainer: of a step on what ``surgery.language_model`` gives, or ``surgery.pair_model`` with ``next_token``:
            that gives the likeliest token alone.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._by_pairs = any(spec.name == LABELS for spec in trainer.manifest.inputs)

    def steps(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]:
        """The next token of a prompt, again and again, to a token of ``stop``; prompts go one at a time.

        Raises:
            ArgumentError: a model of pairs is asked for other tokens than the likeliest.
        """
        (prompt,), chosen = prompts, sampling or Sampling()
        if self._by_pairs and (chosen.temperature or chosen.repetition_penalty != 1):
            raise ArgumentError(
                "a model that compares answers gives the likeliest token alone; leave temperature and "
                "repetition_penalty out"
            )
        known, draws = list(prompt), np.random.default_rng([chosen.seed, 0])
        for _ in range(chosen.max_tokens):
            token = self._next(known) if self._by_pairs else picked(self._scores(known), chosen, draws, known)
            yield [token]
            if token in stop:
                return
            known.append(token)

    def _next(self, known: Sequence[int]) -> int:
        """The likeliest token that follows, by a pair of this text with itself, of which no token is a label."""
        return int(self._told(np.array([[known, known]]))[NEXT_TOKEN][0, 0])

    def _scores(self, known: Sequence[int]) -> Array:
        """The scores ``[vocabulary]`` of the token that follows."""
        found = self._told(np.array([known]))
        scores: Array = found.get("logits", next(iter(found.values()))) if isinstance(found, dict) else found
        return np.asarray(scores[0, -1])

    def _told(self, tokens: Array) -> Any:
        """The output of the model for one text, ``[1, length]`` or ``[1, 2, length]``."""
        own = {SEGMENTS: np.ones_like(tokens), POSITIONS: np.arange(tokens.shape[-1])[None],
               LABELS: np.full_like(tokens, IGNORED)}  # fmt: skip
        inputs = self._trainer.manifest.inputs
        return self._trainer.predict({s.name: own.get(s.name, tokens).astype(numpy_dtype(s.dtype)) for s in inputs})


class TrainingSamples:
    """A callback of ``Trainer.fit`` that answers prompts every so many steps, with the likeliest tokens.

    Args:
        prompts: of the model's folder.
        texts: what is asked.
        every: steps between two samples.
        tokens: that an answer has at most.
        write: takes a record of each answer, for a log.
        done: is called after each round, so that its time counts as no training.

    Attributes:
        last: the newest answers, in the order of the prompts.

    Raises:
        DataError: a prompt has no token, or too many.
    """

    def __init__(
        self,
        prompts: Prompts,
        texts: Sequence[str],
        every: int,
        tokens: int,
        write: Callable[[dict[str, Any]], None],
        done: Callable[[], None],
    ) -> None:
        self._prompts, self._texts, self._every, self._write, self._done = prompts, texts, every, write, done
        self._ids = [prompts.tokens_of(text) for text in texts]
        self._sampling, self._seen = Sampling(max_tokens=tokens), 0
        self._epoch = 0
        self._told: int | None = None  # the step of the newest answers that were told
        self.last: list[str] = []

    def on_step(self, trainer: Trainer, results: Any) -> None:
        """Answer, where a round is due."""
        del results
        self._epoch = trainer.progress.epoch + 1
        rounds = trainer.progress.steps // self._every
        if rounds * self._every == trainer.progress.steps and rounds != self._seen:
            self._seen = rounds
            self._tell(trainer, self.answers(trainer))
            self._done()

    def recall(self, log_file: Path, step: int) -> None:
        """Take the newest answers of a step from the log of a run that goes on, so that they are not told twice."""
        told = dict[Any, str]()
        for line in regular_bytes(log_file).splitlines() if log_file.is_file() else ():
            with contextlib.suppress(UnreadableError):
                record = json_of(line)
                if isinstance(record, dict) and (record.get("event"), record.get("step")) == (EVENT, step):
                    told[record.get("prompt")] = str(record.get("answer"))
        if all(text in told for text in self._texts):
            self._told, self.last = step, [told[text] for text in self._texts]

    def at_end(self, trainer: Trainer) -> list[str]:
        """Answer with the weights that a run has given; those that were not told are told."""
        told = self.last if self._told == trainer.progress.steps else None
        self._epoch = trainer.progress.epoch + bool(trainer.progress.batch)
        found = self.answers(trainer)
        if found != told:
            self._tell(trainer, found)
        return found

    def _tell(self, trainer: Trainer, answers: Sequence[str]) -> None:
        self._told = trainer.progress.steps
        for text, answer in zip(self._texts, answers, strict=True):
            self._write({"event": EVENT, "epoch": self._epoch, "step": self._told, "prompt": text, "answer": answer})
            log.info("step %d, %s\n  %s", self._told, shown(text), answer.replace("\n", "\n  "))

    def answers(self, trainer: Trainer) -> list[str]:
        """The answers of the model as it is now."""
        steps, stop = TrainerSteps(trainer), self._prompts.stop
        found = [steps.generated([ids], stop, self._prompts.fitting([ids], self._sampling))[0] for ids in self._ids]
        self.last = [self._prompts.text_of(row) for row in found]
        return self.last
