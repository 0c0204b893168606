"""Programs that go wrong in several processes, each in its own way, for test_faults_of_ranks.py.

mpiexec -n 2 python tests/parallel/ranks_faults.py NAME FOLDER
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import gradgraph as gg  # noqa: E402
from gradgraph.parallel.compressions import COMPRESSIONS  # noqa: E402
from tests.backends.test_other_runtimes import small_cnn  # noqa: E402
from tests.kit.command_line import arrays, mlp  # noqa: E402
from tests.parallel.ranks_cases import pictures  # noqa: E402

QUICK = {"epochs": 50, "batch_size": 8, "progress": False}


def trainer(parallel: gg.DataParallel, **options: Any) -> gg.Trainer:
    options = {"optimizer": "adamw", **options}
    return gg.Trainer(gg.build(mlp(), **options), device="cpu", options=gg.RuntimeOptions(threads=1), parallel=parallel)


class Failing:
    """A dataset of which one sample cannot be read, on rank 1."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how, self.arrays, self.seen = rank, how, arrays(40), 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        self.seen += 1
        if self.rank == 1 and self.seen == 30:
            if self.how == "raises":
                raise ValueError("sample 30 cannot be read")
            os.kill(os.getpid(), signal.SIGKILL if self.how == "is killed" else signal.SIGSTOP)
        return {name: array[i] for name, array in self.arrays.items()}


def dataset(how: str, folder: Path) -> None:
    parallel = gg.DataParallel(timeout=3.0 if how == "stops" else 60.0)
    trainer(parallel).fit(Failing(parallel.rank, how), **QUICK)


def raises(folder: Path) -> None:
    dataset("raises", folder)


def is_killed(folder: Path) -> None:
    dataset("is killed", folder)


def stops(folder: Path) -> None:
    dataset("stops", folder)


def other_data(folder: Path) -> None:
    parallel = gg.DataParallel()
    trainer(parallel).fit(arrays(40, seed=parallel.rank), **QUICK)


def other_step(folder: Path) -> None:
    parallel = gg.DataParallel()
    trainer(parallel, loss=("cross_entropy", "focal")[parallel.rank]).fit(arrays(40), **QUICK)


def other_options(folder: Path) -> None:
    parallel = gg.DataParallel()
    trainer(parallel).fit(arrays(40), **{**QUICK, "epochs": 5 + parallel.rank})


def other_kernels(folder: Path) -> None:
    parallel = gg.DataParallel()
    options = gg.RuntimeOptions(threads=1, native_kernels=parallel.rank == 0)
    gg.Trainer(gg.build(mlp()), device="cpu", options=options, parallel=parallel).fit(arrays(40), **QUICK)


def other_weights(folder: Path) -> None:
    """A callback runs on the first rank alone, so what it changes is not changed on others."""
    parallel = gg.DataParallel(check_every=5)
    own = trainer(parallel)

    class Moving:
        def on_epoch(self, owner: gg.Trainer, row: Any) -> None:
            owner.load_state_dict({"first.bias": np.ones(8, np.float32)}, strict=False)

    own.fit(arrays(40), **QUICK, callbacks=[Moving()])


def nothing_counts(folder: Path) -> None:
    data = arrays(40)
    data["target"][:8] = -100
    trainer(gg.DataParallel()).fit(data, **QUICK, shuffle=False)


def diverges(folder: Path) -> None:
    data = arrays(40)
    data["x"][11] = np.nan
    trainer(gg.DataParallel()).fit(data, **QUICK, shuffle=False)


def several_steps(folder: Path) -> None:
    steps = {name: gg.StepOptions() for name in ("one", "two")}
    gg.Trainer(gg.build(mlp(), steps=steps), device="cpu", parallel=gg.DataParallel())


def a_folder(folder: Path) -> None:
    parallel = gg.DataParallel()
    if parallel.is_first:
        gg.build(mlp()).save(folder / "step")
    while not (folder / "step" / "manifest.json").exists():
        time.sleep(0.05)
    gg.Trainer(folder / "step", device="cpu", parallel=parallel)


def other_ways(folder: Path) -> None:
    parallel = gg.DataParallel(shard_state="1" in os.environ["PMI_RANK"])
    trainer(parallel).fit(arrays(40), **QUICK)


def saved_alone(folder: Path) -> None:
    """The first rank alone saves what is shared out, and nobody waits for it."""
    parallel = gg.DataParallel(shard_state=True, timeout=3.0)
    own = trainer(parallel)
    own.fit(arrays(40), **QUICK)
    if parallel.is_first:
        own.save(folder / "run.ckpt")
    else:
        time.sleep(30)


def bound_together(folder: Path) -> None:
    """What looks at whole weights of several layers is refused by name."""
    pruned = gg.optim.magnitude_pruning(gg.optim.adam(0.01), scope="global")
    parallel = gg.DataParallel(shard_state=True)
    gg.Trainer(gg.build(mlp(), optimizer=pruned), device="cpu", parallel=parallel)


def norms_of_sums(folder: Path) -> None:
    parallel = gg.DataParallel(shard_state=True)
    gg.Trainer(gg.build(mlp(), accumulate=True, grad_norm=True), device="cpu", parallel=parallel)


def compares_samples(folder: Path) -> None:
    loss = {("logits", "logits"): "info_nce"}
    gg.Trainer(gg.build(mlp(), loss), device="cpu", parallel=gg.DataParallel())


def ignored_by_one_of_several(folder: Path) -> None:
    """Known before the first step, though it is a label of the last batch."""
    data = {"x": arrays(40)["x"], "logits_target": np.zeros(40, np.int64), "h_target": np.zeros(40, np.int64)}
    data["h_target"][-1] = -100
    steps: list[int] = []

    class Counting:
        def on_step(self, owner: gg.Trainer, row: Any) -> None:
            steps.append(1)

    step = gg.build(mlp(), {"logits": "cross_entropy", "h": "cross_entropy"})
    try:
        own = gg.Trainer(step, device="cpu", parallel=gg.DataParallel())
        own.fit(data, **QUICK, shuffle=False, callbacks=[Counting()])
    finally:
        assert not steps


def no_norms(folder: Path) -> None:
    trainer(gg.DataParallel(sync_batch_norm=True))


def norms_of_local_steps(folder: Path) -> None:
    trainer(gg.DataParallel(sync_batch_norm=True, compress="local_sgd"))


def other_norms(folder: Path) -> None:
    parallel = gg.DataParallel(sync_batch_norm="1" in os.environ["PMI_RANK"])
    gg.Trainer(gg.build(small_cnn()), device="cpu", parallel=parallel).fit(pictures(40), **QUICK)


# --- what goes well ---------------------------------------------------------------------------------------------


def callbacks(folder: Path) -> None:
    """The first rank alone calls them, all stop when one says so, and each step of its own is a share of one."""
    parallel = gg.DataParallel()
    own, called = trainer(parallel), []

    class Stopping:
        def on_step(self, owner: gg.Trainer, results: Any) -> bool:
            called.append(owner.progress.steps)
            return len(called) == 7

    own.fit(arrays(40), **QUICK, callbacks=[Stopping()])
    assert own.progress.steps == 7 and called == ([*range(1, 8)] if parallel.is_first else [])
    own.step({name: a[parallel.rank :: parallel.ranks] for name, a in arrays(10).items()})
    own.save(folder / "run.ckpt")
    own.export(folder / "trained.onnx")
    own.evaluate(arrays(9))  # by itself


def lent(folder: Path) -> None:
    """State that is shared out is saved whole, from callbacks and between fits, and read by one process."""
    parallel = gg.DataParallel(shard_state=True)
    own = trainer(parallel)

    class Saving:
        def on_step(self, owner: gg.Trainer, results: Any) -> None:
            owner.save(folder / f"{owner.progress.steps}.ckpt")

        def on_end(self, owner: gg.Trainer, history: Any) -> None:
            owner.save(folder / "end.ckpt")

    own.fit(arrays(40), **{**QUICK, "epochs": 2}, callbacks=[Saving()])
    assert own.state.absent and not own.state.absent & set(own.manifest.trainable)
    own.save(folder / "after.ckpt")
    own.fit(arrays(40), **{**QUICK, "epochs": 1})
    own.load(folder / "end.ckpt")
    state = own.state_dict()
    alone = gg.Trainer(own.definition, device="cpu")
    for name in ("10", "end", "after"):
        alone.load(folder / f"{name}.ckpt")
        assert all(np.array_equal(state[n], value) for n, value in alone.state_dict().items()), name
    own.fit(arrays(40), **{**QUICK, "epochs": 4}, resume=True)
    alone.fit(arrays(40), **{**QUICK, "epochs": 4}, resume=True)
    for name, value in own.state_dict().items():
        np.testing.assert_allclose(value, alone.state_dict()[name], rtol=1e-4, atol=1e-6, err_msg=name)


def remembered(folder: Path) -> None:
    """The errors of a compression come back with a checkpoint, to the bit; with another number of ranks, their sum."""
    parallel = gg.DataParallel(compress="top_k(ratio=0.1)")
    whole, first, second = (trainer(parallel) for _ in range(3))
    whole.fit(arrays(40), **{**QUICK, "epochs": 4})
    first.fit(arrays(40), **{**QUICK, "epochs": 4}, max_steps=10)
    first.save(folder / "run.ckpt")
    second.load(folder / "run.ckpt")
    second.fit(arrays(40), **{**QUICK, "epochs": 4}, resume=True)
    assert all(np.array_equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items())
    alone = gg.Trainer(whole.definition, device="cpu")
    alone.load(folder / "run.ckpt")
    memory = [rank["0"] for rank in parallel.team().gathered(dict(first._session.team._compress.memory))]
    compression = COMPRESSIONS.typed("top_k")
    compression.take([{"0": errors} for errors in memory], 2, 3)
    np.testing.assert_allclose(3 * compression.memory["0"], sum(memory), rtol=1e-5, atol=1e-7)
    assert float(np.abs(memory[0]).max()) > 0 and not np.array_equal(memory[0], memory[1])


def remembered_rounds(folder: Path) -> None:
    """A run goes on in the middle of a round, with what each rank has for itself, to the bit."""
    parallel = gg.DataParallel(compress="diloco(every=4)")
    whole, second = trainer(parallel), trainer(parallel)

    class Saving:
        def on_step(self, owner: gg.Trainer, results: Any) -> None:
            if owner.progress.steps == 7:
                owner.save(folder / "run.ckpt")

    whole.fit(arrays(40), **{**QUICK, "epochs": 4}, callbacks=[Saving()])
    second.load(folder / "run.ckpt")
    second.fit(arrays(40), **{**QUICK, "epochs": 4}, resume=True)
    assert all(np.array_equal(value, second.state_dict()[name]) for name, value in whole.state_dict().items())
    slots = parallel.team().gathered(whole.state_dict()["first.weight.exp_avg"])
    assert not np.array_equal(*slots)


def sums_alone(folder: Path) -> None:
    parallel = gg.DataParallel(compress="local_sgd")
    gg.Trainer(gg.build(mlp(), accumulate=True), device="cpu", parallel=parallel)


def told_of_norms(folder: Path) -> None:
    """Norms of each rank by itself are named once, by the first rank; norms of all are not, nor frozen ones."""
    for ways, options, times in (({}, {}, 1), ({"sync_batch_norm": True}, {}, 0), ({}, {"freeze": "bn.*"}, 0)):
        parallel, told = gg.DataParallel(**ways), io.StringIO()
        handler = logging.StreamHandler(told)
        logging.getLogger("gradgraph").addHandler(handler)
        own = gg.Trainer(gg.build(small_cnn(), **options), device="cpu", parallel=parallel)
        for epochs in (1, 2):
            own.fit(pictures(16), **{**QUICK, "epochs": epochs}, resume=True)
        logging.getLogger("gradgraph").removeHandler(handler)
        said = told.getvalue()
        assert said.count("samples of its own rank") == times * parallel.is_first, (ways, options, said)
        assert ("bn.running_mean" in said) == bool(times and parallel.is_first), said


def loss_scale(folder: Path) -> None:
    parallel = gg.DataParallel(compress="power_sgd")
    gg.Trainer(gg.build(mlp(), precision="float16"), device="cpu", parallel=parallel)


def draws(folder: Path) -> None:
    """Masks differ between ranks, and a second run has the same; running statistics are means over the ranks."""
    parallel = gg.DataParallel(check_every=1)
    x = np.random.default_rng(0).normal(size=(16, 1, 4, 4)).astype(np.float32)
    same = {"x": np.repeat(x[:8], 2, axis=0), "target": np.repeat(np.arange(8) % 3, 2)}  # each rank gets the same
    states = []
    for _ in range(2):
        own = gg.Trainer(gg.build(small_cnn(), optimizer="sgd"), device="cpu", parallel=parallel)
        own.fit(same, 1, 16, shuffle=False, progress=False)
        states.append(own.state_dict())
    assert all(np.array_equal(states[0][name], value) for name, value in states[1].items())
    alone = gg.Trainer(gg.build(small_cnn(), optimizer="sgd"), device="cpu")
    alone.fit({n: a[::2] for n, a in same.items()}, 1, 8, shuffle=False, progress=False)
    statistics = [s.name for s in own.manifest.state if s.kind == "statistic"]
    weights = [s.name for s in own.manifest.state if s.kind == "parameter"]
    for name in statistics:
        np.testing.assert_allclose(states[0][name], alone.state_dict()[name], rtol=1e-5, err_msg=name)
    assert any(not np.allclose(states[0][name], alone.state_dict()[name], rtol=1e-4) for name in weights)


def overflow(folder: Path) -> None:
    """A gradient of float16 that overflows on one rank skips the step on all."""
    parallel = gg.DataParallel(check_every=1)
    own, data = trainer(parallel, precision="float16"), arrays(16)
    data["x"][1::2] *= 300.0  # those of rank 1
    before = own.parameters
    own.fit(data, 1, 16, shuffle=False, progress=False)
    assert own.state_dict()["skipped_steps"] == 1
    assert all(np.array_equal(before[name], value) for name, value in own.parameters.items())


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
