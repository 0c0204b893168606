"""A wheel holds what a checkout holds, and a file's name alone tells which file is meant."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
FOLDERS = ("gradgraph", "frontend", "export", "cli", "benchmarks", "examples", "tests")  # all that hold Python files
SHARED = {"__init__.py", "__main__.py", "conftest.py"}  # Python and pytest give these names


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_listed() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [p.parent.relative_to(ROOT) for p in sorted((ROOT / "gradgraph").rglob("__init__.py"))]
    linked = [Path("gradgraph") / name for name in ("frontend", "export", "cli")]  # symlinks, which rglob leaves out
    folders += [Path("gradgraph") / p.parent.relative_to(ROOT) for folder in linked
                for p in (ROOT / folder.name).rglob("*/__init__.py")]  # fmt: skip
    assert sorted(listed) == sorted({".".join(p.parts) for p in [*folders, *linked]})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_file_that_is_no_module_is_listed() -> None:
    """The sources of native kernels and the parts of a step's page are read where the package is installed."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    found = {f for name, patterns in listed.items() for p in patterns for f in (ROOT / name.replace(".", "/")).glob(p)}
    rooms = [ROOT / "gradgraph" / name for name in ("", "frontend", "export", "cli")]  # rglob leaves symlinks out
    files = (f for room in rooms for f in room.rglob("*"))
    built = ROOT / "gradgraph" / "backends" / "ort_native" / "built"  # compiled as this checkout was installed
    others = {f for f in files if f.is_file() and f.suffix not in (".py", ".pyc") and f.parent != built}
    assert others and others == found


def test_no_two_python_files_have_one_name() -> None:
    """An import, a traceback and a search say the name; one that is here twice must be looked up each time."""
    files = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py") if "node_modules" not in p.parts]
    count = Counter(p.name for p in files if p.name not in SHARED)
    assert len(count) > 500
    assert [p.relative_to(ROOT).as_posix() for p in files if count[p.name] > 1] == []


def test_every_python_of_the_classifiers_is_tested() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())
    assert tested is not None and re.findall(r"3\.\d+", tested[1]) == named
    assert f'requires-python = ">={named[0]}"' in PYPROJECT


def test_every_recipe_names_one_version_and_one_set_of_dependencies() -> None:
    version = re.search(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)
    recipe = (ROOT / "packaging/conda/recipe.yaml").read_text()
    assert version is not None
    assert f'version: "{version[1]}"' in recipe
    assert f"version: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    run = re.search(r"^  run:\n(.*?)^tests:", recipe, re.MULTILINE | re.DOTALL)
    assert listed is not None and run is not None
    wanted = dict(re.findall(r'"([\w-]+)(>=[\d.]+)', listed[1]))
    there = dict(re.findall(r"- (?:python-)?([\w-]+) (>=[\d.]+)", run[1]))  # conda's flatbuffers is the C++ library
    assert len(wanted) >= 9 and there == {"python": ">=3.10", **wanted}


@functools.cache
def defined(module: ast.Module) -> set[str]:
    """All names that a module may have: what it assigns, defines or imports, wherever it does so."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.sweep(0)
def test_every_name_that_a_test_imports_of_another_is_there() -> None:
    """Also where no test of this environment runs the import: it may stand in a function, or need other packages."""
    modules = {p: ast.parse(p.read_text()) for folder in ("tests", "benchmarks") for p in (ROOT / folder).rglob("*.py")}
    seen, missing = 0, []
    for path, module in modules.items():
        for node in (n for n in ast.walk(module) if isinstance(n, ast.ImportFrom) and n.module and not n.level):
            place = node.module.replace(".", "/")
            for other in (path.parent / place, ROOT / place):
                if (source := modules.get(other.with_suffix(".py"))) or (source := modules.get(other / "__init__.py")):
                    names = defined(source) | {p.stem for p in other.glob("*")}
                    seen += len(node.names)
                    missing += [f"{path.name}: {node.module}.{a.name}" for a in node.names if a.name not in names]
    assert seen > 500
    assert missing == []


@pytest.mark.sweep(0)
def test_a_checkout_without_symbolic_links_works(tmp_path: Path) -> None:
    """A zip download, or Git on Windows, has a text file in place of each link."""
    for name in ("gradgraph", "frontend", "export", "cli"):
        ignored = shutil.ignore_patterns("__pycache__", "built")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("frontend", "export", "cli"):
        link = tmp_path / "gradgraph" / name
        link.unlink()
        link.write_text(f"../{name}")
    code = (
        "import gradgraph as gg; from gradgraph.frontend import nn; from gradgraph.cli.app import cli; "
        "from gradgraph import export; print(gg.__file__, nn.Linear(1, 1), export.save_inference, cli)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path)), done.stderr
