"""Safe output paths, which do not follow links created by other users.

In a folder that every user may write to, such as /tmp, another user can create a link at a path that we are about to
write; its target would be overwritten with our permissions. Operating systems prevent this when a link is opened
(``protected_symlinks``). We, however, resolve links first and rename a new file to the target, so no link is opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gradgraph.errors import OutputError, shown

MOST_LINKS = 40  # as in Linux


def output_target(path: str | os.PathLike[str]) -> Path:
    """Return the real path of an output after following trusted links; the output need not exist.

    A link is trusted if its owner is this user, root or the owner of its folder, or if not every user may write to the
    folder.

    Raises:
        OutputError: if ``path`` contains an untrusted link, or links form a circle.
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
            raise OutputError(f"the symbolic links in '{shown(path)}' form a circle; choose another path")
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
    """Whether ``user`` may follow ``link``, which is in ``folder``: see ``output_target``."""
    return not folder.st_mode & stat.S_IWOTH or link.st_uid in (user, 0, folder.st_uid)
