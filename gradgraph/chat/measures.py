"""Evaluation on held-out rows: perplexity, and for preferences the rewards of answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradgraph import losses
from gradgraph.chat.chat_batches import ChatBatches
from gradgraph.chat.chat_recipe import Recipe
from gradgraph.chat.preferences import PairBatches
from gradgraph.data.arrays.batch import Array
from gradgraph.errors import ArgumentError
from gradgraph.runtime.trainer import Trainer
from gradgraph.surgery.pair_models import LOG_PROBABILITY, TOKENS

log = logging.getLogger("gradgraph.chat")

EVENT = "preferences"  # the event of a log record


def measured(trainer: Trainer, held: ChatBatches | PairBatches, recipe: Recipe, when: str = "") -> dict[str, float]:
    """Return results on held-out rows: the perplexity; for pairs, the loss and the results of :func:`of_preferences`.

    Args:
        trainer, held, recipe: the trainer, the held-out rows and the recipe of the run.
        when: a suffix of the result names, such as ``"_before"`` before training. With a suffix, pairs have no reward
            results.
    """
    found = trainer.evaluate(held, recipe.batch_size)
    if isinstance(held, ChatBatches):
        return {f"perplexity{when}": perplexity(found)}
    told = of_preferences(trainer, held, recipe)
    figures = {name: told[name] for name in told if name == "perplexity" or not when}
    return {f"held_out_loss{when}": float(found["loss"]), **{name + when: value for name, value in figures.items()}}


def perplexity(measured: Mapping[str, Any]) -> float:
    """Return the exponential of the mean of −log p over all trained tokens, from the results of ``evaluate``."""
    found = measured.get("perplexity")
    return float(np.exp(measured.get("student_loss", measured["loss"])) if found is None else found)


def of_preferences(trainer: Trainer, held: PairBatches, recipe: Recipe) -> dict[str, float]:
    """Return the perplexity of good answers and, as in TRL's logs, statistics of the rewards of good and bad answers.

    ``reward_margin`` is the mean difference between the rewards of good and bad answers; ``reward_accuracy``, if rows
    contain two answers, the fraction of rows in which the good answer has the larger reward. A reward is β times the
    difference to the reference's log-probability of an answer; for a loss without a reference, β times the mean
    log-probability of a token.
    """
    by_answer = trainer.predict(held, recipe.batch_size)
    log_p, tokens = (np.asarray(by_answer[name], np.float64) for name in (LOG_PROBABILITY, TOKENS))
    told, good = dict[str, float](), held.good
    if good.any():
        told["perplexity"] = float(np.exp(-log_p[good, 0].sum() / tokens[good, 0].sum()))
    rewards = _beta(recipe) * (log_p / np.maximum(tokens, 1) if held.reference is None else log_p - held.reference)
    if recipe.compares:
        gaps: Array = rewards[:, 0] - rewards[:, 1]
        return told | {"reward_margin": float(gaps.mean()), "reward_accuracy": float((gaps > 0).mean())}
    if good.any() and not good.all():
        told["reward_margin"] = float(rewards[good, 0].mean() - rewards[~good, 0].mean())
    return told


def _beta(recipe: Recipe) -> float:
    loss = losses.by_name(recipe.loss, **({} if recipe.beta is None else {"beta": recipe.beta}))
    return float(loss.arguments["beta"])


class PreferenceMeasures:
    """A callback of ``Trainer.fit`` that evaluates preferences after each evaluation.

    Args:
        held: the held-out pairs.
        recipe: the recipe of the run.
        write: called with a log record after each evaluation.
    """

    def __init__(self, held: PairBatches, recipe: Recipe, write: Callable[[dict[str, Any]], None]) -> None:
        self._held, self._recipe, self._write = held, recipe, write

    def on_epoch(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        """Evaluate preferences, and log the results."""
        found = of_preferences(trainer, self._held, self._recipe)
        self._write({"event": EVENT, "epoch": int(row["epoch"]), "step": int(row["step"]), **found})
        log.info("step %d, held-out answers: %s", row["step"], ", ".join(f"{k} {v:.4g}" for k, v in found.items()))


def check_measures(held_out: Any, recipe: Recipe) -> None:
    """Raise ArgumentError if evaluations are requested but no rows are held out."""
    if held_out is None and (recipe.patience or recipe.eval_every):
        raise ArgumentError(
            f"no rows are held out, but {'patience' if recipe.patience else 'evaluation during training'} requires "
            "some",
            remedy="raise held_out, pass validation=, or omit patience and eval_every",
            shell="raise --held-out, add --validation, or omit --patience and --eval-every",
        )
