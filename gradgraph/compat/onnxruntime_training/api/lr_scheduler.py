"""A learning rate with linear warm-up and linear decay."""

from __future__ import annotations

from gradgraph.compat.onnxruntime_training.api.stepping_optimizer import Optimizer


class LinearLRScheduler:
    """A learning rate schedule: linear warm-up from 0 to ``initial_lr``, then linear decay to 0.

    The constructor sets the first rate, and each ``step()`` sets the rate for the updates so far.

    (onnxruntime-training 1.19.2 swaps ``warmup_step_count`` and ``total_step_count``; to reproduce its rates, swap
    them.)

    Args:
        optimizer: the optimizer whose rate is set, and whose updates are counted.
        warmup_step_count: the number of updates until ``initial_lr`` is reached.
        total_step_count: the number of updates until the rate is 0 again.
        initial_lr: the highest rate.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        self._optimizer = optimizer
        self._warmup, self._total = int(warmup_step_count), int(total_step_count)
        optimizer._group.initial_lr = float(initial_lr)
        self.step()

    def step(self) -> None:
        """Set the rate for the current number of updates: call it after each ``optimizer.step()``."""
        group = self._optimizer._group
        rising = group.step / max(1, self._warmup)
        falling = max(0.0, (self._total - group.step) / max(1, self._total - self._warmup))
        self._optimizer.set_learning_rate(group.initial_lr * (rising if group.step < self._warmup else falling))
