"""A wheel holds what a checkout holds."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_listed() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [p.parent.relative_to(ROOT) for p in sorted((ROOT / "gradgraph").rglob("__init__.py"))]
    linked = [Path("gradgraph") / name for name in ("frontend", "export", "cli")]  # symlinks, which rglob leaves out
    assert sorted(listed) == sorted({".".join(p.parts) for p in [*folders, *linked]})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_file_that_is_no_module_is_listed() -> None:
    """The sources of native kernels are read where the package is installed."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    found = {f for name, patterns in listed.items() for p in patterns for f in (ROOT / name.replace(".", "/")).glob(p)}
    others = {f for f in (ROOT / "gradgraph").rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert others and others == found
