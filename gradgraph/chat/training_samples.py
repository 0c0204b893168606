"""Sample answers during training, by the trainer's own session and current weights."""

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

EVENT = "sample"  # of a log record


class TrainerSteps(OneByOne):
    """A token source by a trainer's ``predict``, which runs the whole text for each token, without a cache.

    It shares the frozen weights of the trainer's prediction session instead of loading another model.

    Args:
        trainer: of a step on the result of ``surgery.language_model``, or of ``surgery.pair_model`` with
            ``next_token``, which only returns the most likely token.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._by_pairs = any(spec.name == LABELS for spec in trainer.manifest.inputs)

    def steps(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]:
        """Yield the next token of a prompt until a token of ``stop``; supports one prompt at a time.

        Raises:
            ArgumentError: a pair model is asked for other tokens than the most likely ones.
        """
        (prompt,), chosen = prompts, sampling or Sampling()
        if self._by_pairs and (chosen.temperature or chosen.repetition_penalty != 1):
            raise ArgumentError(
                "a pair model only returns the most likely token; omit temperature and repetition_penalty"
            )
        known, draws = list(prompt), np.random.default_rng([chosen.seed, 0])
        for _ in range(chosen.max_tokens):
            token = self._next(known) if self._by_pairs else picked(self._scores(known), chosen, draws, known)
            yield [token]
            if token in stop:
                return
            known.append(token)

    def _next(self, known: Sequence[int]) -> int:
        """Return the most likely next token, from a pair of this text with itself without labels."""
        return int(self._told(np.array([[known, known]]))[NEXT_TOKEN][0, 0])

    def _scores(self, known: Sequence[int]) -> Array:
        """Return the scores ``[vocabulary]`` of the next token."""
        found = self._told(np.array([known]))
        scores: Array = found.get("logits", next(iter(found.values()))) if isinstance(found, dict) else found
        return np.asarray(scores[0, -1])

    def _told(self, tokens: Array) -> Any:
        """Return the model's output for one text, ``[1, length]`` or ``[1, 2, length]``."""
        own = {SEGMENTS: np.ones_like(tokens), POSITIONS: np.arange(tokens.shape[-1])[None],
               LABELS: np.full_like(tokens, IGNORED)}  # fmt: skip
        inputs = self._trainer.manifest.inputs
        return self._trainer.predict({s.name: own.get(s.name, tokens).astype(numpy_dtype(s.dtype)) for s in inputs})


class TrainingSamples:
    """A callback of ``Trainer.fit`` that answers prompts every few steps with the most likely tokens.

    Args:
        prompts: the prompts of the model's folder.
        texts: the prompts to answer.
        every: steps between samples.
        tokens: maximum number of tokens of an answer.
        write: receives a record of each answer, for a log.
        done: called after each round, to exclude its time from training.

    Attributes:
        last: the latest answers, in the order of the prompts.

    Raises:
        DataError: a prompt has no tokens, or too many.
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
        self._told: int | None = None  # the step of the latest logged answers
        self.last: list[str] = []

    def on_step(self, trainer: Trainer, results: Any) -> None:
        """Answer the prompts if samples are due."""
        del results
        self._epoch = trainer.progress.epoch + 1
        rounds = trainer.progress.steps // self._every
        if rounds * self._every == trainer.progress.steps and rounds != self._seen:
            self._seen = rounds
            self._tell(trainer, self.answers(trainer))
            self._done()

    def recall(self, log_file: Path, step: int) -> None:
        """Restore the latest answers from the log of a resumed run, so that each sample is logged once."""
        told = dict[Any, str]()
        for line in regular_bytes(log_file).splitlines() if log_file.is_file() else ():
            with contextlib.suppress(UnreadableError):
                record = json_of(line)
                if isinstance(record, dict) and (record.get("event"), record.get("step")) == (EVENT, step):
                    told[record.get("prompt")] = str(record.get("answer"))
        if all(text in told for text in self._texts):
            self._told, self.last = step, [told[text] for text in self._texts]

    def at_end(self, trainer: Trainer) -> list[str]:
        """Answer with the final weights; log the answers unless already logged."""
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
        """Return the model's current answers."""
        steps, stop = TrainerSteps(trainer), self._prompts.stop
        found = [steps.generated([ids], stop, self._prompts.fitting([ids], self._sampling))[0] for ids in self._ids]
        self.last = [self._prompts.text_of(row) for row in found]
        return self.last
