"""Files of arrays that are damaged, cut, or lie about what they hold."""

from __future__ import annotations

import io
import mmap
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from gradgraph.data.arrays import numpy_files as arrays_module
from gradgraph.data.arrays.numpy_files import load_arrays
from gradgraph.errors import DataError
from gradgraph.files.mapped import is_cut, is_mapped, pieces
from gradgraph.files.untrusted.array_files import safetensors_mapped
from gradgraph.runtime.execution.session import RuntimeOptions
from gradgraph.runtime.trainer import Trainer
from tests.kit import handmade

DATA = handmade.points(10)


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
    with pytest.raises(DataError, match="truncated while it was read; write it again"):
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
    with pytest.raises(DataError, match="'x' is mapped from was truncated"):
        if call == "step":
            t.step({name: array[-8:] for name, array in mapped.items()})  # a part of a mapped array is one, too
        else:
            t.evaluate(mapped) if call == "evaluate" else t.predict({name: mapped[name] for name in ("x", "z")})


def test_memory_of_no_file_is_not_mapped() -> None:
    shared = np.frombuffer(mmap.mmap(-1, 4096), np.float32)
    assert not is_cut(shared) and not is_cut(np.zeros(3)[1:])
    assert not is_mapped(np.zeros(3)[1:]) and not is_mapped(np.frombuffer(b"abcd", np.float32))


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
        with pytest.raises(DataError, match=r"x.npy' (cannot be read|is shorter than)"):
            load_arrays(tmp_path)


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


def truncated(path: Path) -> Path:
    np.save(path / "x.npy", DATA["x"])
    os.truncate(path / "x.npy", 200)
    return path


BAD_FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "text": (lambda p: _written(p, b"x,y\n1,2\n"), "cannot be read"),
    "empty": (lambda p: _written(p, b""), "cannot be read"),
    "pickle in npz": (lambda p: zipped(p, x__npy=npy(np.array([{}], object))), "pickled objects"),
    "pickle in folder": (pickled, "cannot be read"),
    "shape too large": (
        lambda p: zipped(p, x__npy=lying("(1099511627776,)")),
        "declares an array of 4,398,046,511,104 bytes",
    ),
    "negative shape": (lambda p: zipped(p, x__npy=lying("(-4,)")), "is damaged"),
    "shape too small": (lambda p: zipped(p, x__npy=lying("(2,)")), "declares an array of 8 bytes, but 16 are stored"),
    "not npy": (lambda p: zipped(p, x__npy=b"hello"), "cannot be read"),
    "other member": (lambda p: zipped(p, readme__txt=b"hello"), "not a .npy array"),
    "no member": (lambda p: zipped(p), "contains 0 arrays"),
    "twice": (duplicate, "two arrays called 'x'"),
    "bomb": (lambda p: zipped(p, x__npy=npy(np.zeros(2_000_000))), "unpacks to 16,000,000 bytes, more than the"),
    "flipped bit": (crc, "cannot be read"),
    "empty folder": (lambda p: p, "contains no .npy files"),
    "truncated npy": (truncated, "is shorter than its array of 160 bytes"),
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


def test_an_empty_tensor_is_read_of_a_mapped_file(tmp_path: Path) -> None:
    arrays = {"none": np.zeros((0, 3), np.float32), "some": np.ones((2, 3), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    found, _ = safetensors_mapped(tmp_path / "a.safetensors")
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {n: (a.shape, a.dtype) for n, a in arrays.items()}


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run saves its checkpoint between the two times that the path is opened."""
    path, new, opened = tmp_path / "a.safetensors", tmp_path / "new.safetensors", safetensors.safe_open
    safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, path)
    safetensors.numpy.save_file({"b": np.arange(3)}, new)

    def racing(name: Path, **options: Any) -> Any:
        if new.exists():
            new.replace(path)
        return opened(name, **options)

    monkeypatch.setattr(safetensors, "safe_open", racing)
    found, _ = safetensors_mapped(path)
    assert [*found] == ["b"] and found["b"].tolist() == [0, 1, 2]


def test_what_a_caller_has_changed_of_a_mapped_file_stays(tmp_path: Path) -> None:
    """Changed pages of a private mapping are nowhere else, though a view of them may be read-only."""
    np.zeros(5000, np.float32).tofile(tmp_path / "w.bin")
    given = np.memmap(tmp_path / "w.bin", np.float32, "c")
    given[:] = 1
    view = given.view()
    view.flags.writeable = False
    assert b"".join(pieces(view)) == np.ones(5000, np.float32).tobytes()
    assert given.min() == 1
