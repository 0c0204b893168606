"""The distribution is onnx-gradgraph; another project's gradgraph beside it is named in one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = "import onnx_gradgraph; onnx_gradgraph.main()"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages in which the other project is installed, as `pip install gradgraph` leaves it."""
    about = tmp_path / "gradgraph-0.0.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: gradgraph\nVersion: 0.0.2\n")
    return tmp_path


def run(code: str, *folders: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = ":".join(map(str, folders))
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=folders[0],
                          env={"PYTHONPATH": path, "PATH": ""}, check=False)  # fmt: skip


def replace_package(site: Path) -> None:
    """Let the other project's files be found first, as where it was installed last."""
    (site / "gradgraph").mkdir()
    (site / "gradgraph" / "__init__.py").write_text("import a_package_that_is_not_here\n")


def test_the_command_names_the_other_project_whose_files_are_found(site: Path) -> None:
    replace_package(site)
    ran = run(ENTRY, site, ROOT, arguments=("--help",))
    assert ran.returncode == 1 and ran.stdout == ""
    assert (
        ran.stderr.startswith("error: the distribution 'gradgraph' 0.0.2 is another project")
        and ran.stderr.count("\n") == 1
    )
    assert "pip install --force-reinstall --no-deps PATH" in ran.stderr


def test_a_package_that_lost_its_first_file_is_named(tmp_path: Path) -> None:
    """What `pip uninstall gradgraph` of the other project leaves."""
    replace_package(tmp_path)
    ran = run(ENTRY, tmp_path, ROOT)
    assert ran.returncode == 1
    assert ran.stderr.startswith(
        "error: the package gradgraph is not whole; install this one again: pip install --force-reinstall"
    )


def test_a_module_that_does_not_import_is_blamed_on_the_other_project_only_if_it_is_there(site: Path) -> None:
    code = "import sys; sys.modules['onnx'] = None\nimport gradgraph\ngradgraph.build"
    beside = run(code, site, ROOT)
    assert beside.stderr.splitlines()[-1].startswith(
        "ImportError: the distribution 'gradgraph' 0.0.2 is another project"
    )
    alone = run(code, ROOT)
    assert "another project" not in alone.stderr and "onnx" in alone.stderr.splitlines()[-1]


@pytest.mark.sweep(0)
def test_env_warns_of_the_other_project(site: Path) -> None:
    ran = run(ENTRY, site, ROOT, arguments=("env",))
    assert ran.returncode == 0 and "warning" in ran.stdout and "another project" in ran.stdout
    assert "another project" not in run(ENTRY, ROOT, arguments=("env",)).stdout
