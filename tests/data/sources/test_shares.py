"""The shares of ranks in batches, and what is refused without MPI; nothing here starts a process."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.data.sources.shares import Spare, shares
from gradgraph.data.sources.sources import Columns, Order, as_source
from gradgraph.errors import DataError, RuntimeUnavailableError
from gradgraph.parallel.mpi import library, started_ranks, world
from gradgraph.parallel.update_parts import too_large
from gradgraph.parallel.wide_gradients import widened
from tests.kit.command_line import arrays, mlp
from tests.kit.running import session

STEP = gg.build(mlp())


def checker() -> BatchChecker:
    return BatchChecker(STEP.manifest.batch)


@pytest.mark.parametrize(("ranks", "expected"), [(1, None), (2, None), (3, "first.weight"), (8, "first.weight")])
def test_a_weight_above_the_share_of_a_rank_is_named(ranks: int, expected: str | None) -> None:
    """The first matrix has 32 of the 67 numbers."""
    found = too_large(STEP.manifest, ranks)
    assert found == (expected and (expected, pytest.approx(32 / 67)))


class Samples:
    def __init__(self, rows: int) -> None:
        self.arrays = arrays(rows)

    def __len__(self) -> int:
        return len(self.arrays["x"])

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {name: array[i] for name, array in self.arrays.items()}


def ready(rows: int) -> list[dict[str, np.ndarray]]:
    return [{n: a[i : i + 5] for n, a in arrays(rows).items()} for i in range(0, rows, 5)]


@pytest.mark.parametrize("kind", [arrays, Samples, ready])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [5, 11, 12, 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_all_ranks_together_take_each_batch_of_one_process_once(
    kind: Any, ranks: int, rows: int, shuffle: bool
) -> None:
    def epoch(order: Order, start: int) -> list[Any]:
        source = as_source(kind(rows), checker(), order)
        found = shares(source, checker(), 1, start, order.rank, order.ranks)
        return [(type(b) is Spare, {name: np.array(b[name]) for name in ("x", "target")}) for b in found]

    for start in (0, 1) if rows > 5 else (0,):
        whole = epoch(Order(5, shuffle), start)
        parts = [epoch(Order(5, shuffle, rank=rank, ranks=ranks), start) for rank in range(ranks)]
        assert all(len(part) == len(whole) for part in parts)
        for i, (_, batch) in enumerate(whole):
            for rank, part in enumerate(parts):
                is_spare, own = part[i]
                assert is_spare == (len(batch["x"]) <= rank)
                if is_spare:
                    assert len(own["x"]) == 1
                else:
                    np.testing.assert_array_equal(own["x"], batch["x"][rank::ranks])
                    np.testing.assert_array_equal(own["target"], batch["target"][rank::ranks])


def test_a_batch_that_is_fixed_is_that_of_each_rank() -> None:
    model = mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    fixed = BatchChecker(gg.build(model).manifest.batch)
    Columns(arrays(16), fixed, Order(8, rank=1, ranks=2))
    with pytest.raises(DataError, match="on each of 2 ranks") as said:
        Columns(arrays(16), fixed, Order(4, rank=1, ranks=2))
    assert "batch_size=8" in str(said.value)


def test_fingerprints_distinguish_data() -> None:
    same = [as_source(arrays(100), checker(), Order(10)).fingerprint for _ in range(2)]
    other = arrays(100)
    other["x"][0] += 1
    others = [
        as_source(data, checker(), Order(10)).fingerprint for data in (other, arrays(101), ready(100), Samples(100))
    ]
    assert same[0] == same[1] and len({same[0], *others}) == 5


def test_gradients_of_16_bits_travel_as_float32() -> None:
    model = mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name)
        )
    step = gg.build(model, optimizer="sgd", separate=True)
    assert step.manifest.separate is not None
    names = set(step.manifest.separate.gradients.values())
    wide = widened(step).separate
    types = {v.name: v.type.tensor_type.elem_type for v in (*wide["gradient"].graph.output, *wide["apply"].graph.input)}
    assert {types[name] for name in names} == {onnx.TensorProto.FLOAT}
    for half in wide.values():
        session(half)
    plain = gg.build(mlp(), separate=True)
    assert widened(plain) is plain


def test_without_mpi4py_or_mpi_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for make in (library, gg.DataParallel):
        with pytest.raises(RuntimeUnavailableError, match=r"mpi4py, .*not installed.*pip install mpi4py mpich"):
            make()

    class Broken:
        rc = type("rc", (), {})()

        @property
        def MPI(self) -> Any:
            raise RuntimeError("cannot load MPI library\nlibmpi.so: no such file")

    monkeypatch.setitem(sys.modules, "mpi4py", Broken())
    with pytest.raises(RuntimeUnavailableError, match=r"finds no MPI \(cannot load MPI library\).*pip install mpich"):
        library()


def test_a_launcher_that_mpi_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Single:
        rc = type("rc", (), {})()
        MPI = type("MPI", (), {"COMM_WORLD": type("Comm", (), {"size": 1})()})

    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "GRADGRAPH_RANKS"):
        monkeypatch.delenv(name, raising=False)
    assert started_ranks() == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "64")
    monkeypatch.setitem(sys.modules, "mpi4py", Single())
    assert started_ranks() == 64
    with pytest.raises(RuntimeUnavailableError, match="started 64 processes, but MPI does not connect them"):
        world()


def test_parallel_is_checked() -> None:
    with pytest.raises(gg.GradgraphError, match=r"gg\.DataParallel\(\)"):
        gg.Trainer(STEP, parallel=4)  # type: ignore[arg-type]
    for wrong in ({"timeout": 0}, {"check_every": -1}):
        with pytest.raises(gg.GradgraphError):
            gg.DataParallel(comm=object(), **wrong)  # type: ignore[arg-type]
