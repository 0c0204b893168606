"""What people keep numbers in: each container gives the numbers that it means, or is refused in one sentence.

Nothing may lose its meaning silently on the way into a step: masks, signs, byte orders, units of time, second axes.
"""

from __future__ import annotations

import array
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradgraph.data.arrays.batch import BatchChecker
from gradgraph.errors import GradgraphError
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass is not the recommended way")

STEP = handmade.regression()  # x: float32[batch, 3], t: float32[batch, 1]
TRUE = np.arange(-12, 12, dtype=np.float32).reshape(8, 3)
TARGET = np.ones((8, 1), np.float32)


class Wrapped:
    """An array-like as tables are: only ``__array__`` tells its numbers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.value, dtype)


class Units(np.ndarray):
    """A subclass that only adds something of its own."""


class Missing:
    """What tables use for a number that is not there."""

    def __float__(self) -> float:
        raise TypeError("nothing here")


def masked(hidden: bool) -> Any:
    mask = np.zeros(TRUE.shape, bool)
    mask[2, 1] = hidden
    return np.ma.array(TRUE, mask=mask)


def structured() -> Any:
    return TRUE.copy().view([("a", "<f4"), ("b", "<f4"), ("c", "<f4")])


def memmap(path: Path) -> Any:
    np.save(path / "x.npy", TRUE)
    return np.load(path / "x.npy", mmap_mode="r")


RIGHT: dict[str, Callable[[Path], Any]] = {
    "array": lambda p: TRUE,
    "list": lambda p: TRUE.tolist(),
    "list of arrays": lambda p: list(TRUE),
    "memory-mapped": memmap,
    "big-endian": lambda p: TRUE.astype(">f4"),
    "big-endian integers": lambda p: TRUE.astype(">i2"),
    "float64": lambda p: TRUE.astype(np.float64),
    "float16": lambda p: TRUE.astype(np.float16),
    "integers": lambda p: TRUE.astype(np.int64),
    "Fortran order": lambda p: np.asfortranarray(TRUE),
    "every other row": lambda p: np.repeat(TRUE, 2, 0)[::2],
    "backwards": lambda p: TRUE[::-1].copy()[::-1],
    "broadcast": lambda p: np.broadcast_to(TRUE[None], (1, 8, 3))[0],
    "read-only": lambda p: np.frombuffer(TRUE.tobytes(), np.float32).reshape(8, 3),
    "matrix": lambda p: np.matrix(TRUE),
    "subclass": lambda p: TRUE.view(Units),
    "masked, and nothing hidden": lambda p: masked(False),
    "masked, and no mask": lambda p: np.ma.array(TRUE),
    "a table": lambda p: Wrapped(TRUE),
    "objects in a table that are numbers": lambda p: Wrapped(TRUE.tolist()),
    "rows of array.array": lambda p: [array.array("f", row) for row in TRUE],
}
REFUSED: dict[str, Callable[[Path], Any]] = {
    "masked": lambda p: masked(True),
    "list of masked rows": lambda p: list(masked(True)),
    "tuple of lists of masked": lambda p: tuple([row] for row in masked(True)),
    "masked constant": lambda p: [[1.0, 2.0, np.ma.masked]] * 8,
    "masked matrix": lambda p: np.ma.array(np.matrix(TRUE), mask=masked(True).mask),
    "structured": lambda p: structured(),
    "record array": lambda p: structured().view(np.recarray),
    "complex": lambda p: TRUE.astype(np.complex64),
    "dates": lambda p: TRUE.astype("datetime64[s]"),
    "times": lambda p: TRUE.astype("timedelta64[s]"),
    "objects": lambda p: TRUE.astype(object),
    "text": lambda p: TRUE.astype(str),
    "bytes": lambda p: TRUE.astype("S8"),
    "missing values": lambda p: Wrapped([[1.0, 2.0, Missing()]] * 8),
    "none": lambda p: None,
    "ragged": lambda p: [[1.0, 2.0, 3.0]] * 7 + [[1.0]],
    "a set": lambda p: {1.0, 2.0},
    "too large for float32": lambda p: TRUE.astype(np.float64) * 1e300,
}


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(STEP, device="cpu", options=RuntimeOptions(threads=1))


def loss_of(t: Trainer, way: str, x: Any) -> float:
    """The loss over the whole of ``x``, along one of the ways into a step; the state stays what it is."""
    before = t.state_dict()
    try:
        if way == "step":
            return float(t.step({"x": x, "t": TARGET})["loss"])
        if way == "fit":
            return t.fit({"x": x, "t": TARGET}, batch_size=8, shuffle=False, progress=False)["loss"][-1]
        if way == "samples":
            return t.evaluate(Samples([{"x": x[i], "t": TARGET[i]} for i in range(8)]), batch_size=8)["loss"]
        return t.evaluate([{"x": x, "t": TARGET}])["loss"]
    finally:
        t.load_state_dict(before)


class Samples:
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Any:
        return self._rows[i]


WAYS = ("step", "fit", "batches", "samples")


@pytest.mark.parametrize("what", RIGHT)
def test_numbers_arrive_as_they_are_meant(what: str, trainer: Trainer, tmp_path: Path) -> None:
    expected = loss_of(trainer, "step", TRUE)
    for way in WAYS:
        x = RIGHT[what](tmp_path)
        if way == "samples" and (what == "matrix" or not hasattr(x, "__getitem__")):
            continue  # a row of a matrix is a matrix: refused below
        assert loss_of(trainer, way, x) == pytest.approx(expected, rel=1e-6), way


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_lose_its_meaning_is_refused(what: str, trainer: Trainer, tmp_path: Path) -> None:
    before = trainer.state_dict()
    for way in WAYS:
        x = REFUSED[what](tmp_path)
        if way == "samples" and not hasattr(x, "__getitem__"):
            continue  # it has no samples
        with pytest.raises(GradgraphError) as caught:
            loss_of(trainer, way, x)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000
    assert all(np.array_equal(value, before[name]) for name, value in trainer.state_dict().items())


def test_a_row_of_a_matrix_has_an_axis_too_many(trainer: Trainer) -> None:
    with pytest.raises(GradgraphError, match="shape"):
        loss_of(trainer, "samples", np.matrix(TRUE))


def test_state_is_not_read_through_a_mask(trainer: Trainer) -> None:
    state = trainer.state_dict()
    with pytest.raises(GradgraphError, match="'w' is a masked array with masked values"):
        trainer.load_state_dict({"w": np.ma.array(state["w"], mask=[[1], [0], [0]])})
    assert np.array_equal(trainer.state_dict()["w"], state["w"])


@pytest.mark.torch
def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    numbers = torch.from_numpy(TRUE)
    right = {
        "plain": numbers,
        "parameter": torch.nn.Parameter(numbers.clone()),
        "part of a graph": numbers.clone().requires_grad_() * 1,
        "transposed": numbers.T.contiguous().T,
        "a sign that is to be written yet": torch.complex(numbers, -numbers).conj().imag,
        "int8": numbers.to(torch.int8),
    }
    refused: dict[str, Callable[[], Any]] = {
        "masked": lambda: torch.masked.masked_tensor(numbers, numbers > 0),
        "sparse": lambda: numbers.to_sparse(),
        "compressed rows": lambda: numbers.to_sparse_csr(),
        "quantised": lambda: torch.quantize_per_tensor(numbers, 0.1, 0, torch.quint8),
        "without data": lambda: torch.empty(8, 3, device="meta"),
        "complex": lambda: torch.complex(numbers, numbers),
        "bfloat16, which NumPy does not have": lambda: numbers.bfloat16(),
        "nested": lambda: torch.nested.nested_tensor([numbers[:1], numbers]),
    }
    checker = BatchChecker(STEP.manifest.inputs)
    for what, value in right.items():
        assert np.array_equal(checker({"x": value})["x"], TRUE), what
    for what, make in refused.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own, that some of these are in beta
            value = make()
        with pytest.raises(GradgraphError):
            pytest.fail(f"{what}: {checker({'x': value})}")
