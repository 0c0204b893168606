"""Safe output paths, which do not follow links laid by other users.

In a folder that every user may write to, such as /tmp, a stranger can create a link at a name that we are about to
write, and its target would be overwritten with our rights. Systems protect against that when a link is opened
(``protected_symlinks``), but a replaced file is renamed at its real place, where no link is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradgraph.errors import OutputError, shown

MOST_LINKS = 40  # as in Linux


def output_target(path: str | os.PathLike[str]) -> Path:
    """The real path behind ``path``, following trusted links; it need not exist.

    A link is trusted if it belongs to us, root or the folder's owner, or if not every user may write to its folder.

    Raises:
        OutputError: it leads through a stranger's link, or in a circle.
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
    """Whether ``user`` may follow a link of this owner."""
    return not folder.st_mode & stat.S_IWOTH or link.st_uid in (user, 0, folder.st_uid)
