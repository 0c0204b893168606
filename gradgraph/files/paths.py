"""Where an output path leads: through links that somebody else may have laid, it leads nowhere.

In a folder that every user may write to, as /tmp is, a stranger can lay a link at a name that we are about to write:
what it points to would be overwritten with our rights. Systems protect against that when a link is opened
(``protected_symlinks``), but a file that is replaced is renamed in its real place, where no link is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradgraph.errors import OutputError, shown

MOST_LINKS = 40  # as many as Linux follows


def output_target(path: str | os.PathLike[str]) -> Path:
    """The real path behind ``path``, each link on the way followed if it is trusted; the end need not be there.

    A link is trusted if it is ours, root's or the folder's owner's, or if not every user may write to its folder.

    Raises:
        OutputError: it leads through a link of a stranger, or in a circle.
    """
    if os.name == "nt":
        return Path(os.path.realpath(path))
    absolute = Path(os.fspath(path)).absolute()
    place, ahead = Path(absolute.anchor), list(reversed(absolute.parts[1:]))
    followed = 0
    while ahead:
        name = ahead.pop()
        place, before = (place.parent if name == ".." else place / name), place
        if name == ".." or not place.is_symlink():
            continue
        followed += 1
        if followed > MOST_LINKS:
            raise OutputError(f"'{shown(path)}' leads through links in a circle; choose another path")
        if not may_follow(place.lstat(), before.stat(), os.geteuid()):
            raise OutputError(
                f"'{shown(path)}' leads through '{shown(place)}', another user's link in a folder that everybody may "
                "write to; remove the link, or choose another path"
            )
        to = place.readlink()
        place, ahead = (Path(to.anchor) if to.is_absolute() else before), ahead + _parts(to)
    return place


def _parts(path: Path) -> list[str]:
    return list(reversed(path.parts[1:] if path.is_absolute() else path.parts))


def may_follow(link: os.stat_result, folder: os.stat_result, user: int) -> bool:
    """May the owner of ``link`` lead this ``user``?"""
    return not folder.st_mode & stat.S_IWOTH or link.st_uid in (user, 0, folder.st_uid)
