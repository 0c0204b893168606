"""Writing never leaves half of a file or folder: the old one or the new one is there, whole."""

import errno
import json
import os
import stat

import pytest

from gradgraph.errors import OutputError
from gradgraph.files import atomic
from gradgraph.files.atomic import check_writable, write_atomically, write_folder_atomically


def _names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_replaced_with_its_mode_kept(tmp_path):
    path = tmp_path / "a.bin"
    write_atomically(path, b"old")
    path.chmod(0o640)
    write_atomically(path, iter([b"ne", memoryview(b"w")]))
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert _names(tmp_path) == ["a.bin"]


def test_the_target_of_a_symlink_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real/a")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_bytes() == b"new"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device"), MemoryError])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_failure_leaves_the_old_artefact_and_no_temporary(tmp_path, failure, folder):
    def data():
        yield b"half"
        raise failure

    path = tmp_path / "out"
    if folder:
        write_folder_atomically(path, {"manifest.json": b"{}"})
    else:
        write_atomically(path, b"old")
    expected = OutputError if isinstance(failure, OSError) else failure
    with pytest.raises(expected) as caught:
        if folder:
            write_folder_atomically(path, {"manifest.json": b"[]", "train.onnx": data()}, force=True)
        else:
            write_atomically(path, data())
    assert _names(tmp_path) == ["out"]
    assert (path / "manifest.json" if folder else path).read_bytes() == (b"{}" if folder else b"old")
    if isinstance(failure, OSError):
        assert "No space left" in str(caught.value) and "untouched" in str(caught.value)


def test_check_writable_changes_nothing(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    for name in ("there", "new"):
        check_writable(tmp_path / name)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("there", b"old")]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_check_writable_says_why_not(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(atomic.Path, "touch", refuse)
    with pytest.raises(OutputError, match=f"cannot write .*new.*{os.strerror(code)}"):
        check_writable(tmp_path / "new")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_check_writable_of_a_closed_folder_and_file(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "there").chmod(0o444)
    with pytest.raises(OutputError, match="Permission denied"):
        check_writable(tmp_path / "there")
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="choose a folder that you may write to"):
        check_writable(tmp_path / "new")
    tmp_path.chmod(0o755)


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write_folder_atomically(tmp_path / "step", {"manifest.json": b"{}"})
    rename = atomic.Path.rename

    def failing(self, target):
        if atomic.Path(target).name == "step" and self.name.endswith("tmp"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(atomic.Path, "rename", failing)
    with pytest.raises(OutputError, match="Permission denied"):
        write_folder_atomically(tmp_path / "step", {"manifest.json": b"[]"}, force=True)
    assert _names(tmp_path) == ["step"]
    assert (tmp_path / "step" / "manifest.json").read_bytes() == b"{}"


PATHS = [
    ("missing/a", "create its folder"),
    ("file/a", "part of its path is a file"),
    ("folder", "not a regular file"),
    ("fifo", "not a regular file"),
]


@pytest.mark.parametrize(("path", "message"), PATHS, ids=[p for p, _ in PATHS])
def test_a_path_that_cannot_be_written_is_named(tmp_path, path, message):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OutputError, match=message):
        write_atomically(tmp_path / path, b"new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="you may write to"):
        write_atomically(tmp_path / "a", b"new")


def test_what_killed_writers_left_is_swept_and_live_ones_are_spared(tmp_path):
    dead, live = f"{atomic._host()}-999999999-aa", f"{atomic._host()}-{os.getpid()}-bb"
    for name in (f".a.{dead}.gradgraph-tmp", f".a.{live}.gradgraph-tmp", ".a.elsewhere-1-cc.gradgraph-tmp", ".b.txt"):
        (tmp_path / name).write_bytes(b"")
    write_atomically(tmp_path / "a", b"new")
    assert _names(tmp_path) == [".a.elsewhere-1-cc.gradgraph-tmp", f".a.{live}.gradgraph-tmp", ".b.txt", "a"]


def test_a_folder_whose_replacement_was_killed_comes_back(tmp_path):
    old = tmp_path / f".step.{atomic._host()}-999999999-aa.gradgraph-old"
    old.mkdir()
    (old / "manifest.json").write_bytes(b"{}")
    with pytest.raises(OutputError, match="not empty"):
        write_folder_atomically(tmp_path / "step", {"manifest.json": b"[]"})
    assert (tmp_path / "step" / "manifest.json").read_bytes() == b"{}"


FOLDERS = [
    ({"notes.txt": b"mine"}, True, "contains 'notes.txt'"),
    ({"train.onnx": b"", "run.ckpt": b"", "manifest.json": b"{}"}, True, "contains 'run.ckpt'"),
    ({"train.onnx": b""}, True, "has no gradgraph manifest.json"),
    ({"manifest.json": b"not json"}, True, "has no gradgraph manifest.json"),
    ({"manifest.json": b"{}"}, False, "not empty"),
]


@pytest.mark.parametrize(("there", "force", "message"), FOLDERS, ids=[m for *_, m in FOLDERS])
def test_a_folder_of_others_is_not_replaced(tmp_path, there, force, message):
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OutputError, match=message):
        write_folder_atomically(tmp_path, {"manifest.json": b"[]", "train.onnx": b"new"}, force)
    assert {n: (tmp_path / n).read_bytes() for n in _names(tmp_path)} == there


def test_a_folder_is_written_and_replaced_as_a_whole(tmp_path):
    path = tmp_path / "step"
    path.mkdir()  # an empty one may be there
    write_folder_atomically(path, {"manifest.json": json.dumps({"a": 1}).encode(), "old.onnx": b"1"})
    write_folder_atomically(path, {"manifest.json": b"{}", "new.onnx": iter([b"2", b"3"])}, force=True)
    assert _names(path) == ["manifest.json", "new.onnx"]
    assert (path / "new.onnx").read_bytes() == b"23"
    assert _names(tmp_path) == ["step"]


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".."])
def test_names_in_a_folder_are_plain(tmp_path, name):
    with pytest.raises(OutputError, match="use a plain name"):
        write_folder_atomically(tmp_path / "step", {name: b""})
    assert _names(tmp_path) == []
