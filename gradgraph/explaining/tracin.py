"""Influence of training samples on predictions, by TracIn over the checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx

from gradgraph.arguments import ABOVE_ZERO, FLAG, NAMES, NUMBERS, PATH, Kind, checked, matching
from gradgraph.autodiff.select import Names
from gradgraph.data.arrays.batch import Array, on_host
from gradgraph.errors import BuildError, CheckpointError, UnknownNameError, counted, shown, suggestion
from gradgraph.runtime.execution.session import Device, Placement, create_session, results
from gradgraph.runtime.saved.checkpoint import load_checkpoint
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.manifest import LEARNING_RATE
from gradgraph.step.step import Step
from gradgraph.transforms import per_sample_gradients

_PATHS = Kind("a list of paths", lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes)
              and len(value) > 0 and all(PATH.fits(path) for path in value))  # fmt: skip


@checked(checkpoints=_PATHS, wrt=NAMES.or_none(), learning_rates=NUMBERS.or_none(), batch_size=ABOVE_ZERO,
         independent=FLAG)  # fmt: skip
def tracin(
    step: Step | str | os.PathLike[str],
    checkpoints: Sequence[str | os.PathLike[str]],
    train: Any,
    test: Any,
    *,
    wrt: Names = None,
    learning_rates: Sequence[float] | None = None,
    batch_size: int = 32,
    independent: bool = False,
    device: Device = "auto",
) -> Array:
    """Return the influence of each training sample on the loss of each test sample, by TracIn.

    The influence is the sum over checkpoints of learning rate × ⟨∇ loss(test), ∇ loss(train)⟩ (TracInCP of Pruthi et
    al. 2020, arXiv:2002.08484). Positive numbers are proponents, which reduce the loss of the test sample. Large
    numbers of a training sample on itself often are wrong labels. Restrict ``wrt`` to the last layer for large models:
    the gradients of all test samples are in memory, and those of a batch of training samples.

    Args:
        step: the step of the run, or its folder.
        checkpoints: paths of checkpoints, such as ``sorted(Path("kept").glob("step-*.ckpt"))`` of a
            ``CheckpointKeeper``.
        train, test: data as for ``Trainer.fit``, with targets; random augmentation is applied.
        wrt: names and globs of trained weights; all by default.
        learning_rates: the learning rate at each checkpoint; by default the one stored in the checkpoint.
        batch_size: samples per run.
        independent: as for ``per_sample_gradients``.
        device: as for ``Trainer``.

    Returns:
        An array [test samples, training samples] of float64.

    Raises:
        BuildError: if the step has several losses.
        UnknownNameError: if a name or glob in ``wrt`` matches no trained weight.
        CheckpointError: if a checkpoint is damaged, of another step, or has no learning rate.
        DataError: if the data do not match the step.
        DifferentiationError: if the loss mixes samples.
    """
    trainer = Trainer(step, device=device)
    step, m = trainer.definition, trainer.manifest
    if m.steps:
        raise BuildError(f"tracin needs a step with one loss, and this one has {', '.join(map(shown, m.parts))}")
    if learning_rates is not None and len(learning_rates) != len(checkpoints):
        raise BuildError(f"there are {counted(len(learning_rates), 'learning rate')} for "
                         f"{counted(len(checkpoints), 'checkpoint')}; pass one for each")  # fmt: skip
    weights = _chosen(wrt, m.trainable)
    batched = [s.name for s in (*m.inputs, *m.targets) if s.shape and isinstance(s.shape[0], str)]
    model = per_sample_gradients(step.resolved("eval"), output=m.loss_output, wrt=weights, inputs=batched or None,
                                 independent=independent)  # fmt: skip
    assert isinstance(model, onnx.ModelProto)
    session = create_session(model, Placement.choose(device))
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output][1:]
    sources = [trainer.prepare(data, batch_size, shuffle=False) for data in (test, train)]

    def gradients(source: Any, state: dict[str, Array]) -> Iterator[Array]:
        for batch in source.batches(0):
            feeds = {**state, **{name: on_host(value) for name, value in dict(batch).items()}}
            found = results(session, outputs, {name: feeds[name] for name in inputs})
            yield np.concatenate([g.reshape(len(g), -1) for g in found.values()], axis=1).astype(np.float64)

    total: Array | None = None
    for i, path in enumerate(checkpoints):
        state, progress = load_checkpoint(path, m.state)
        rate = progress.hyperparameters.get(LEARNING_RATE) if learning_rates is None else learning_rates[i]
        if rate is None:
            raise CheckpointError(f"'{shown(path)}' stores no learning rate; pass learning_rates=")
        tests = np.concatenate(list(gradients(sources[0], state)))
        found = np.concatenate([tests @ rows.T for rows in gradients(sources[1], state)], axis=1)
        total = rate * found if total is None else total + rate * found
    assert total is not None
    return total


def _chosen(wrt: Names, trainable: Sequence[str]) -> list[str]:
    """Return the trained weights that names and globs match."""
    found: dict[str, None] = {}
    for pattern in list(trainable) if wrt is None else [wrt] if isinstance(wrt, str) else list(wrt):
        names = matching(pattern, list(trainable))
        if not names:
            raise UnknownNameError(
                f"no trained weight matches '{shown(pattern)}'{suggestion(pattern, list(trainable))}"
            )
        found.update(dict.fromkeys(names))
    return list(found)
