"""Data: every source gives the same batches, the order is a pure function, and what does not fit is said."""

from __future__ import annotations

import io
import itertools
import mmap
import os
import re
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradgraph.errors import DataError
from gradgraph.mapped import is_cut, is_mapped
from gradgraph.runtime.data import arrays as arrays_module
from gradgraph.runtime.data import sources as data
from gradgraph.runtime.data.ahead import ahead
from gradgraph.runtime.data.arrays import load_arrays
from gradgraph.runtime.data.batch import BatchChecker, Known, batch_specs
from gradgraph.runtime.data.shuffling import permutation
from gradgraph.runtime.data.sources import Order, as_source
from gradgraph.runtime.data.stored import StoredArray
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from gradgraph.step import TargetSpec, TensorSpec

SPECS = batch_specs(handmade.classifier().manifest)
DATA = handmade.points(10)


def checker(**options: Any) -> BatchChecker:
    return BatchChecker(SPECS, **options)


class Map:
    """A map-style dataset."""

    def __init__(self, as_dict: bool) -> None:
        self.as_dict = as_dict

    def __len__(self) -> int:
        return len(DATA["x"])

    def __getitem__(self, i: int) -> Any:
        sample = {n: a[i] for n, a in DATA.items()}
        return sample if self.as_dict else (sample["x"], sample["z"], sample["target"])


def save_folder(path: Path) -> Path:
    for name, array in DATA.items():
        np.save(path / f"{name}.npy", array)
    return path


def save_npz(path: Path) -> Path:
    np.savez_compressed(path / "data.npz", **DATA)
    return path / "data.npz"


def batches_of_four() -> list[dict[str, np.ndarray]]:
    return [{n: a[i : i + 4] for n, a in DATA.items()} for i in (0, 4, 8)]


SOURCES: dict[str, Callable[[Path], Any]] = {
    "dict": lambda p: DATA,
    "lists": lambda p: {n: a.tolist() if n == "target" else a for n, a in DATA.items()},
    "tuple": lambda p: (DATA["x"], DATA["z"], DATA["target"]),
    "npz": save_npz,
    "path as text": lambda p: str(save_npz(p)),
    "folder": save_folder,
    "samples": lambda p: Map(as_dict=True),
    "tuple samples": lambda p: Map(as_dict=False),
    "list of batches": lambda p: batches_of_four(),
    "generator": lambda p: (b for b in batches_of_four()),
    "function": lambda p: lambda: iter(batches_of_four()),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_batches(source: str, tmp_path: Path) -> None:
    check = checker()
    found = as_source(SOURCES[source](tmp_path), check, Order(4))
    batches = [check(b) for b in found.batches(0)]
    assert [len(b["x"]) for b in batches] == [4, 4, 2]
    for name, array in DATA.items():
        assert np.array_equal(np.concatenate([b[name] for b in batches]), array)
    assert found.rows in (10, None)


@pytest.mark.parametrize("source", ["dict", "folder", "samples"])
def test_shuffled_batches_and_resuming(source: str, tmp_path: Path) -> None:
    check = checker()
    found = as_source(SOURCES[source](tmp_path), check, Order(4, shuffle=True, seed=7))
    epoch = [{n: a.copy() for n, a in check(b).items()} for b in found.batches(2)]
    order = permutation(7, 2, 10)
    assert np.array_equal(np.concatenate([b["x"] for b in epoch]), DATA["x"][order])
    assert np.array_equal(np.concatenate([b["target"] for b in epoch]), DATA["target"][order])
    rest = [check(b)["x"].copy() for b in found.batches(2, start=1)]
    assert all(np.array_equal(a, b["x"]) for a, b in zip(rest, epoch[1:], strict=True))


def test_batches_in_order_are_views() -> None:
    source = as_source(DATA, checker(), Order(4))
    assert all(np.shares_memory(b["x"], DATA["x"]) for b in source.batches(0))


def test_full_batches_in_order_are_checked_once() -> None:
    """Their labels have been seen with the column, and their shape with the first of them."""
    check = checker()
    batches = list(as_source(DATA, check, Order(4)).batches(0))
    assert [type(b) for b in batches] == [Known, Known, dict]
    assert [check.counts(check(b)) for b in batches] == [(4, 4), (4, 4), (2, 2)]
    assert check(batches[1]) is batches[1]
    assert [type(b) for b in as_source(DATA, checker(finite=True), Order(4)).batches(0)] == [dict] * 3
    wide = {**DATA, "x": np.zeros((10, 9), np.float32)}
    with pytest.raises(DataError, match=r"'x' has shape \[4, 9\]"):
        check(next(iter(as_source(wide, check, Order(4)).batches(0))))


def test_large_arrays_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are those of the same arrays in memory; labels are looked at before the first."""
    folder = save_folder(tmp_path)
    assert not any(isinstance(a, StoredArray) for a in load_arrays(folder).values())
    monkeypatch.setattr(arrays_module, "IN_MEMORY", 0)
    assert all(isinstance(a, StoredArray) for a in load_arrays(folder).values())
    for shuffle in (False, True):
        order = Order(4, shuffle)
        sources = [as_source(data, checker(), order).batches(1) for data in (folder, DATA)]
        for stored, held in zip(*sources, strict=True):
            assert all(np.array_equal(stored[name], held[name]) for name in DATA)
    wrong = DATA["target"].copy()
    wrong[7] = 3
    np.save(folder / "target.npy", wrong)
    monkeypatch.setattr(data, "LABEL_ROWS", 3)
    with pytest.raises(DataError, match="'target' holds the label 3 in row 7"):
        as_source(folder, checker(), Order(4))


def in_a_mapping(path: Path, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = len(whole) - array.nbytes
    return np.frombuffer(memoryview(whole)[start:], array.dtype).reshape(array.shape)


MAPPED: dict[str, Callable[[Path, np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "mapped by the caller": lambda path, a: np.load(path, mmap_mode="r"),
    "np.asarray": lambda path, a: np.asarray(np.load(path, mmap_mode="r")),
    "a view of a view": lambda path, a: np.asarray(np.load(path, mmap_mode="r"))[::-1][::-1].view(np.ndarray)[:],
    "a mapping of Python": in_a_mapping,
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("where", ["ours", *MAPPED])
def test_a_file_that_is_cut_while_training_is_an_error(
    shuffle: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the end of the process, as it is for whoever touches a page behind the end of a mapped file."""
    monkeypatch.setattr(arrays_module, "IN_MEMORY", 0)
    columns = {name: np.repeat(array, 500, 0) for name, array in DATA.items()}
    for name, array in columns.items():
        np.save(tmp_path / f"{name}.npy", array)
    take = MAPPED.get(where, lambda path, array: array)
    mapped = {name: take(tmp_path / f"{name}.npy", array) for name, array in columns.items()}

    class Cut:
        def on_step(self, t: Trainer, results: object) -> None:
            if t.progress.steps == 3:
                os.truncate(tmp_path / "x.npy", 4096)

    t = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))
    with pytest.raises(DataError, match="cut while it was read; write it again"):
        t.fit(
            tmp_path if where == "ours" else mapped, batch_size=64, shuffle=shuffle, callbacks=[Cut()], progress=False
        )
    assert t.progress.steps == 3


@pytest.mark.parametrize("call", ["step", "evaluate", "predict"])
@pytest.mark.parametrize("how", MAPPED)
def test_a_mapped_file_that_was_cut_before_is_an_error(call: str, how: str, tmp_path: Path) -> None:
    columns = {name: np.repeat(array, 500, 0) for name, array in DATA.items()}
    np.save(tmp_path / "x.npy", columns["x"])
    mapped = {**columns, "x": MAPPED[how](tmp_path / "x.npy", columns["x"])}
    os.truncate(tmp_path / "x.npy", 4096)
    t = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))
    with pytest.raises(DataError, match="'x' is mapped from was cut"):
        if call == "step":
            t.step({name: array[-8:] for name, array in mapped.items()})  # a part of a mapped array is one, too
        else:
            t.evaluate(mapped) if call == "evaluate" else t.predict({name: mapped[name] for name in ("x", "z")})


def test_memory_of_no_file_is_not_mapped() -> None:
    shared = np.frombuffer(mmap.mmap(-1, 4096), np.float32)
    assert not is_cut(shared) and not is_cut(np.zeros(3)[1:])
    assert not is_mapped(np.zeros(3)[1:]) and not is_mapped(np.frombuffer(b"abcd", np.float32))


@pytest.mark.parametrize("before", ["nothing", "values of the runtime", "arrays"])
@pytest.mark.parametrize("given", [[], ["z", "target"]])
def test_a_batch_that_lacks_inputs_is_never_usual(before: str, given: list[str]) -> None:
    """Neither before the first batch, nor after one whose other parts were values of the runtime."""
    part = {name: array[:4] for name, array in DATA.items()}
    t = Trainer(handmade.classifier(), device="cpu", options=RuntimeOptions(threads=1))
    if before != "nothing":
        held = ort.OrtValue.ortvalue_from_numpy(part["x"]) if before == "values of the runtime" else part["x"]
        t.step({**part, "x": held})
    with pytest.raises(DataError, match="missing; the step takes"):
        t.step({name: part[name] for name in given})


def test_damaged_headers_of_npy_files_are_said_to_be_damaged(tmp_path: Path) -> None:
    whole = npy(np.zeros((3, 4), np.float32))
    damaged = {
        "no brace at the end": whole.replace(b"}", b" "),
        "no brace at the start": whole.replace(b"{", b" "),
        "no text": whole[:10] + bytes(118) + whole[128:],
        "a bracket too many": whole.replace(b"(3, 4)", b"((3,4)"),
        "a size that is text": whole.replace(b"(3, 4)", b"('3',)"),
        "a negative size": whole.replace(b"(3, 4)", b"(-3,4)"),
        "a huge size": whole.replace(b"(3, 4), }        ", b"(3, 400000000), }"),
        "no header": whole[:12],
        "brackets": whole[:10] + b"(" * 118 + whole[128:],
    }
    for what, content in damaged.items():
        assert content != whole, what
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"x.npy' (cannot be read|ends before)"):
            load_arrays(tmp_path)


def test_drop_last() -> None:
    source = as_source(DATA, checker(), Order(4, drop_last=True))
    assert [len(b["x"]) for b in source.batches(0)] == [4, 4]
    assert source.batches_per_epoch == 2


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(0, 300))
def test_permutation_is_one(seed: int, epoch: int, n: int) -> None:
    order = permutation(seed, epoch, n)
    assert sorted(order) == list(range(n))
    assert np.array_equal(order, permutation(seed, epoch, n))


def test_permutation_depends_on_seed_and_epoch_and_never_changes() -> None:
    assert len({tuple(permutation(s, e, 20)) for s in range(5) for e in range(5)}) == 25
    assert permutation(0, 0, 8).tolist() == PINNED, "resuming old runs needs this order to stay"
    ranks = np.array([permutation(s, 0, 50) for s in range(400)])
    assert abs(ranks[:, 0].mean() - 24.5) < 3  # any sample may come first


PINNED = [2, 4, 6, 5, 1, 7, 0, 3]


# --- batches ----------------------------------------------------------------------------------------------------


def batch(**changes: Any) -> dict[str, Any]:
    return {**DATA, **changes}


def without(name: str) -> dict[str, Any]:
    return {n: a for n, a in DATA.items() if n != name}


LABELS = DATA["target"].copy()
LABELS[3] = 12
NAN = DATA["x"].copy()
NAN[5, 2] = np.nan

BAD: dict[str, tuple[Any, str]] = {
    "missing": (without("z"), "'z' is missing; the step takes 'x', 'z', 'target'"),
    "misspelt": ({**without("target"), "targets": DATA["target"]}, "takes no 'targets'; did you mean 'target'?"),
    "several are missing": ({}, "'x', 'z', 'target' are missing; the step takes 'x', 'z', 'target'"),
    "extra": (batch(weights=1), "takes no 'weights'; there is x, z, target"),
    "too few": ((DATA["x"],), "the batch has 1 parts, but the step takes 3 (x, z, target)"),
    "columns": (batch(x=DATA["x"][:, :3]), "'x' has shape [10, 3], but the step takes [batch, 4]"),
    "rank": (batch(x=DATA["x"][:, :, None]), "'x' has shape [10, 4, 1], but the step takes [batch, 4]"),
    "rows": (batch(z=DATA["z"][:7]), "'batch' is 10 in 'x' but 7 in 'z'"),
    "empty": ({n: a[:0] for n, a in DATA.items()}, "'x' is empty"),
    "float labels": (batch(target=DATA["target"] * 1.0), "'target' is float64, but the step takes int64"),
    "complex": (batch(x=DATA["x"] * 1j), "'x' is complex64, but the step takes float32"),
    "text": (batch(x=np.array(["a"] * 10)), "'x' is <U1, but the step takes float32"),
    "object": (batch(x=object()), "'x' is a object, which NumPy cannot read"),
    "label": (batch(target=LABELS), "'target' holds the label 12 in row 3, but labels go from 0 to 2"),
    "negative label": (batch(target=DATA["target"] * 0 - 1), "holds the label -1 in row 0"),
    "too large": (batch(x=np.full((10, 4), 1e300)), "'x' has values too large for float32"),
    "nan": (batch(x=NAN), "'x' holds nan in row 5 at [2]"),
    "ortvalue": (batch(x=ort.OrtValue.ortvalue_from_numpy(np.zeros((10, 4)))), "'x' is an OrtValue of tensor(double)"),
    "ortvalue rows": (
        batch(x=ort.OrtValue.ortvalue_from_numpy(np.zeros((3, 4), np.float32))),
        "'batch' is 3 in 'x' but 10 in 'z'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_batches_that_do_not_fit(case: str) -> None:
    value, says = BAD[case]
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        checker(finite=True)(value)
    assert "\n" not in str(caught.value)


def test_fitting_batches_are_not_copied() -> None:
    checked = checker()(DATA)
    assert all(checked[n] is a for n, a in DATA.items())


@pytest.mark.parametrize(
    ("labels", "ok"),
    [([0, 2, -100], True), ([-100, -100], False), ([-100, 3], False), ([-1, 0], False), ([2, 2], True)],
)
def test_ignored_labels(labels: list[int], ok: bool) -> None:
    check = BatchChecker([TargetSpec("t", "int64", ("N",), classes=3, ignore_index=-100)])
    if ok:
        check(np.array(labels))
        return
    with pytest.raises(DataError, match=r"holds the label|every label"):
        check(np.array(labels))


@pytest.mark.parametrize(
    ("have", "want", "ok"),
    [
        ("float64", "float32", True),
        ("uint8", "float32", True),
        ("int64", "float32", True),
        ("bool", "float32", True),
        ("int32", "int64", True),
        ("int64", "int32", True),
        ("float32", "int64", False),
        ("int64", "bool", False),
        ("float32", "float16", True),
    ],
)
def test_conversions(have: str, want: str, ok: bool) -> None:
    check = BatchChecker([TensorSpec("x", want, ("N",))])
    value = np.array([0, 1], have)
    if ok:
        assert check({"x": value})["x"].tolist() == [0, 1]
        return
    with pytest.raises(DataError, match=rf"is {have}, but the step takes {want}"):
        check({"x": value})


def test_integers_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="int32 cannot hold"):
        BatchChecker([TensorSpec("x", "int32", ("N",))])({"x": np.array([2**40])})


# --- whole data sets ---------------------------------------------------------------------------------------------

NO_DATA: dict[str, tuple[Any, str]] = {
    "lengths": ({**DATA, "z": DATA["z"][:5]}, "'x' has 10 rows but 'z' has 5"),
    "nothing": ({n: a[:0] for n, a in DATA.items()}, "the data are empty"),
    "scalar": ({**DATA, "z": np.float32(1)}, "'z' has no axis of samples"),
    "names": (without("x"), "'x' is missing"),
    "labels": ({**DATA, "target": LABELS}, "label 12 in row 3"),
    "number": (42, "42 is no training data"),
    "no file": ("there/is/none.npz", "is not there"),
}


@pytest.mark.parametrize("case", NO_DATA)
def test_data_are_checked_before_the_first_step(case: str) -> None:
    data, says = NO_DATA[case]
    with pytest.raises(DataError, match=re.escape(says)):
        as_source(data, checker(), Order(4))


def test_less_than_one_batch() -> None:
    with pytest.raises(DataError, match="10 samples, less than one batch of 16"):
        as_source(DATA, checker(), Order(16, drop_last=True))
    with pytest.raises(DataError, match="batch_size must be a whole number above zero, but is 0"):
        Order(0)
    with pytest.raises(DataError, match="that 64 bits can hold"):
        Order(4, seed=1 << 63)


def test_a_step_for_batches_of_nothing() -> None:
    with pytest.raises(DataError, match=re.escape("batches of 0 samples (x float32[0, 3])")):
        as_source({"x": np.ones((4, 3), np.float32)}, BatchChecker([TensorSpec("x", "float32", (0, 3))]), Order(4))


def test_text_cannot_be_bound() -> None:
    with pytest.raises(DataError, match="'x' takes text, which a Trainer cannot bind"):
        BatchChecker([TensorSpec("x", "str", ("N",))])({"x": np.array(["a", "b"])})


def test_a_generator_lasts_one_epoch() -> None:
    source = as_source((b for b in batches_of_four()), checker(), Order(4))
    assert len(list(source.batches(0))) == 3
    with pytest.raises(DataError, match="used up after one epoch"):
        source.batches(1)


def test_samples_of_different_shapes() -> None:
    class Ragged(Map):
        def __getitem__(self, i: int) -> Any:
            return {**super().__getitem__(i), "x": np.zeros(3 + i % 2, np.float32)}

    with pytest.raises(DataError, match="'x' have different shapes"):
        next(as_source(Ragged(as_dict=True), checker(), Order(4)).batches(0))


# --- files that lie ------------------------------------------------------------------------------------------------


def npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path / "bad.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return path / "bad.npz"


def lying(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(16)


def duplicate(path: Path) -> Path:
    file = zipped(path, x__npy=npy(np.zeros(2)))
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x.npy", npy(np.zeros(2)))
    return file


def crc(path: Path) -> Path:
    file = path / "crc.npz"
    np.savez(file, x=np.zeros(100))
    content = bytearray(file.read_bytes())
    content[400] ^= 1
    file.write_bytes(content)
    return file


def pickled(path: Path) -> Path:
    np.save(path / "x.npy", np.array([{}], object), allow_pickle=True)
    return path


BAD_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "text": (lambda p: _written(p, b"x,y\n1,2\n"), "cannot be read"),
    "empty": (lambda p: _written(p, b""), "cannot be read"),
    "pickle in npz": (lambda p: zipped(p, x__npy=npy(np.array([{}], object))), "pickled objects"),
    "pickle in folder": (pickled, "cannot be read"),
    "shape too large": (lambda p: zipped(p, x__npy=lying("(1099511627776,)")), "needs 4,398,046,511,104 bytes"),
    "negative shape": (lambda p: zipped(p, x__npy=lying("(-4,)")), "is damaged"),
    "shape too small": (lambda p: zipped(p, x__npy=lying("(2,)")), "needs 8 bytes, but 16 are stored"),
    "not npy": (lambda p: zipped(p, x__npy=b"hello"), "cannot be read"),
    "other member": (lambda p: zipped(p, readme__txt=b"hello"), "no .npy array"),
    "no member": (lambda p: zipped(p), "holds 0 arrays"),
    "twice": (duplicate, "two arrays called 'x'"),
    "bomb": (lambda p: zipped(p, x__npy=npy(np.zeros(2_000_000))), "unpacks to 16,000,000 bytes, more than the"),
    "flipped bit": (crc, "cannot be read"),
    "empty folder": (lambda p: p, "holds no .npy file"),
    "truncated npy": (lambda p: (save_folder(p), os.truncate(p / "x.npy", 200), p)[2], "ends before the 160 bytes"),
    "fifo": (lambda p: (os.mkfifo(p / "f"), p / "f")[1], "is not a regular file"),
}


def _written(path: Path, content: bytes) -> Path:
    (path / "bad.npz").write_bytes(content)
    return path / "bad.npz"


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused(case: str, tmp_path: Path) -> None:
    make, says = BAD_FILES[case]
    with pytest.raises(DataError, match=re.escape(says)) as caught:
        load_arrays(make(tmp_path), limit=10_000_000)
    assert "\n" not in str(caught.value)


def test_batches_gathered_ahead_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread fills one buffer while the caller reads the other; errors and an early end come through."""
    check = BatchChecker([TensorSpec("x", "float32", ("n", 3))])
    x = np.arange(300, dtype=np.float32).reshape(100, 3)

    def batches(at_least: int) -> list[np.ndarray]:
        monkeypatch.setattr(data, "AHEAD_BYTES", at_least)
        source = data.Columns({"x": x}, check, Order(8, shuffle=True, seed=3))
        return [batch["x"].copy() for batch in source.batches(1, 2)]

    alone, early = batches(1 << 30), batches(1)
    assert len(alone) == 11
    assert all(np.array_equal(a, b) for a, b in zip(alone, early, strict=True))

    def failing() -> Iterator[dict[str, np.ndarray]]:
        yield {"x": x}
        raise DataError("there is no second batch")

    received = ahead(failing())
    assert next(received)["x"] is x
    with pytest.raises(DataError, match="no second batch"):
        next(received)
    left = ahead(iter([{"x": x}] * 5))
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("gradgraph-data")]


@pytest.mark.parametrize("at_least", [1 << 30, 0], ids=["one by one", "ahead"])
@pytest.mark.parametrize("held", range(4))
def test_a_batch_is_the_callers_until_the_next(held: int, at_least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pass over the same columns, begun at any of four batches, does not write into it: not even where the
    thread that gathers ahead is done with the last one.
    """
    monkeypatch.setattr(data, "AHEAD_BYTES", at_least)
    check = BatchChecker([TensorSpec("x", "float32", ("n",))])
    source = data.Columns({"x": np.arange(16, dtype=np.float32)}, check, Order(4, shuffle=True))
    passed = source.batches(0)
    for batch in itertools.islice(passed, held + 1):
        mine = dict(batch)
    time.sleep(0.02)  # what is gathered ahead is gathered now
    expected = {name: array.copy() for name, array in mine.items()}
    for _ in source.batches(1):
        pass
    assert np.array_equal(mine["x"], expected["x"])
    assert len(list(passed)) == 3 - held


def test_a_buffer_that_comes_again_is_checked_again() -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",)), TargetSpec("t", "int64", ("n",), 3, -100)])
    batch = {"x": np.zeros(4, np.float32), "t": np.array([0, 1, 2, 0])}
    for _ in range(3):
        check(batch)
    batch["t"][1] = 3
    with pytest.raises(DataError, match="label 3 in row 1"):
        check(batch)


@pytest.mark.parametrize("classes", [3, None])
def test_counts_follow_the_ignored_labels_of_each_batch(classes: int | None) -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",)), TargetSpec("t", "int64", ("n", 2), classes, -100)])
    labels = np.array([[0, 1], [2, 0]])
    for ignored in (0, 0, 1, 0, 3, 2):
        labels.flat[:] = [-100] * ignored + [1] * (4 - ignored)
        checked = check({"x": np.zeros(2, np.float32), "t": labels})
        assert check.counts(checked) == (2, 4 - ignored)


def test_counts_without_labels_to_ignore_are_samples() -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",)), TargetSpec("t", "float32", ("n", 2))])
    for rows in (3, 3, 5):
        checked = check({"x": np.zeros(rows, np.float32), "t": np.zeros((rows, 2), np.float32)})
        assert check.counts(checked) == (rows, rows)


@pytest.mark.parametrize("ignore_index", [None, -100, 1])
def test_a_batch_that_looks_like_the_last_is_still_checked(ignore_index: int | None) -> None:
    """What every step asks first is quick, and blind to nothing: each of these follows a batch that fits."""
    check = BatchChecker([TensorSpec("x", "float32", ("n", 2)), TargetSpec("t", "int64", ("n",), 3, ignore_index)])
    good = {"x": np.zeros((4, 2), np.float32), "t": np.array([0, 1, 2, 1])}
    ignored = np.full(4, -100 if ignore_index is None else ignore_index)
    for name, value, says in [
        ("t", np.array([0, 1, 2, 3]), "the label 3 in row 3"),
        ("t", np.array([0, -1, 2, 1]), "the label -1 in row 1"),
        ("t", ignored, "label -100 in row 0" if ignore_index is None else "every label of 't' is the ignored"),
        ("x", np.zeros((4, 3), np.float32), "has shape [4, 3]"),
        ("x", np.zeros((3, 2), np.float32), "'n' is 3 in 'x' but 4 in 't'"),
        ("x", np.zeros((4, 2), complex), "is complex128"),
    ]:
        for _ in range(2):
            assert check(dict(good)).keys() == good.keys()
        with pytest.raises(DataError, match=re.escape(says)):
            check({**good, name: value})
    turned = np.asfortranarray(np.arange(8, dtype=np.float32).reshape(4, 2))
    assert check({**good, "x": turned})["x"].flags.c_contiguous  # type: ignore[union-attr]
    assert check({**good, "x": good["x"].astype(np.float64)})["x"].dtype == np.float32  # type: ignore[union-attr]


def test_finite_values_are_looked_for_in_every_batch() -> None:
    check = BatchChecker([TensorSpec("x", "float32", ("n",))], finite=True)
    for _ in range(3):
        check({"x": np.zeros(4, np.float32)})
        with pytest.raises(DataError, match="nan in row 2"):
            check({"x": np.array([0, 0, np.nan, 0], np.float32)})
