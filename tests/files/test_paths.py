"""Output paths: links are followed as far as their owners are trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gradgraph.errors import OutputError
from gradgraph.files.atomic import check_writable, write_atomically, write_folder_atomically
from gradgraph.files.paths import may_follow, output_target

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other rights, and no owners of links")

ME, STRANGER, FRIEND, ROOT = 1000, 1001, 1002, 0
STICKY, OPEN, SHARED, OWN = 0o1777, 0o777, 0o775, 0o755


def status(owner: int, mode: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, owner, owner, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("link", "folder", "mode", "follows"),
    [
        (ME, ROOT, STICKY, True),
        (ROOT, ROOT, STICKY, True),
        (STRANGER, ROOT, STICKY, False),
        (STRANGER, ROOT, OPEN, False),
        (STRANGER, ME, STICKY, False),
        (STRANGER, ME, OPEN, False),
        (FRIEND, FRIEND, STICKY, True),
        (STRANGER, FRIEND, STICKY, False),
        (STRANGER, ROOT, OWN, True),
        (FRIEND, ME, SHARED, True),
        (ME, STRANGER, OPEN, True),
    ],
)
def test_whose_links_are_followed(link: int, folder: int, mode: int, follows: bool) -> None:
    """As the kernel has it, and in folders that are open to all without being sticky, too."""
    assert may_follow(status(link, stat.S_IFLNK | 0o777), status(folder, stat.S_IFDIR | mode), ME) is follows


def test_the_real_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "away").symlink_to("a/b")
    (tmp_path / "a" / "b" / "up").symlink_to("../../other")
    (tmp_path / "whole").symlink_to(tmp_path / "away")
    (tmp_path / "dangling").symlink_to("away/new")
    for path in (
        "plain",
        "away/x",
        "away/up/x",
        "whole/../c",
        "whole/up",
        "dangling",
        "a/./b/../x",
        "missing/../x",
        ".",
    ):
        assert output_target(tmp_path / path) == Path(os.path.realpath(tmp_path / path)), path
    here = os.path.relpath(tmp_path / "away" / "x")
    assert output_target(here) == Path(os.path.realpath(here))


def test_circles_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OutputError, match="form a circle"):
        write_atomically(tmp_path / "a", b"")


WRITERS = {
    "file": lambda path: write_atomically(path, b"new"),
    "check": check_writable,
    "folder": lambda path: write_folder_atomically(path, {"manifest.json": b"{}"}, force=True),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("where", ["at the end", "on the way"])
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a link to somebody else"
)
def test_a_link_of_a_stranger_in_a_sticky_folder_is_refused(writer: str, where: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "out").write_text("precious")
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    link = public / "out"
    link.symlink_to(victim / "out" if where == "at the end" else victim)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(OutputError, match="another user's link in a folder that everybody may write to; remove"):
        WRITERS[writer](link if where == "at the end" else link / "out")
    assert (victim / "out").read_text() == "precious"
    os.chown(link, 0, 0, follow_symlinks=False)
    check_writable(link if where == "at the end" else link / "out")
