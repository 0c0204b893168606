"""The README and every page of the documentation run as they stand."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

import gradgraph.autodiff.after
import gradgraph.optim.updates
import gradgraph.rules.families  # noqa: F401 (what registers rules and operators is read before a page is)
from gradgraph.backends import BACKENDS
from gradgraph.chat import memory_plan
from gradgraph.cli import digits
from gradgraph.cli.app import run
from gradgraph.frontend import nn
from gradgraph.losses import LOSSES
from gradgraph.metrics import METRICS
from gradgraph.optim.recipes import RECIPES
from gradgraph.optim.schedules import SCHEDULES
from gradgraph.rules.named_operators import OPERATORS
from gradgraph.rules.registry import NO_GRADIENT, RULES
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from tests.pages import api_page
from tests.pages.made import MARKED, write_site
from tests.pages.marked import Marked

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ANY_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# pages whose commands run, too: they bring the files that the commands name
WITH_COMMANDS = [ROOT / "docs" / page for page in ("start/first-step.md", "how-to/troubleshoot.md", "how-to/chat.md")]
README = ROOT / "README.md"  # its block reads what `make demo` wrote, and has a test of its own
COMING_FROM = sorted((ROOT / "docs").rglob("coming-from-*.md"))
BLOCK_OR_ROW = re.compile(rf"{BLOCK.pattern}|^\|([^\n]*)\|$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.fixture
def rules_put_back() -> Iterator[None]:
    """Pages register parts of their own, which other tests of the same process must not see."""
    tables: list[dict] = [
        RULES,
        NO_GRADIENT,
        OPERATORS,
        LOSSES,
        METRICS,
        RECIPES,
        SCHEDULES,
        BACKENDS,
        KINDS,
        nn.LAYERS,
    ]
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


@pytest.mark.sweep(0.185)
@pytest.mark.usefixtures("rules_put_back")
@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p) and p not in [README, *COMING_FROM, *WITH_COMMANDS]], ids=lambda p: p.name
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace, in a folder with the examples; a block that needs torch says so in its first line."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    namespace: dict[str, object] = {"__name__": page.stem}
    for code in blocks(page):
        for package in ("torch", "pandas"):
            if f"import {package}" in code:
                pytest.importorskip(package, reason="the block uses it")
        exec(compile(code, str(page), "exec"), namespace)


@pytest.mark.sweep(0.15)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda p: p.name)
def test_python_and_commands_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, in one folder, and commands print what stands below them, but for the numbers.

    A command with the remark "stops" or "refused" fails; all others succeed. What is said of CUDA is the machine's.
    Blocks in "bash", which need packages or files that are not here, do not run.
    """
    if page.name == "chat.md":
        pytest.importorskip("tokenizers", reason="an extra: onnx-gradgraph[llm]")
    monkeypatch.setattr(memory_plan, "resident_memory", lambda: memory_plan.BEFORE)  # as in a new process
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    namespace: dict[str, object] = {"__name__": page.stem}
    printed: list[str] = []
    for language, code in ANY_BLOCK.findall(page.read_text()):
        if language == "python":
            exec(compile(code, str(page), "exec"), namespace)
        elif language == "sh":
            capsys.readouterr()
            for line in code.splitlines():
                run_command(line)
            printed = [] if "cuda" in code else "\n".join(capsys.readouterr()).splitlines()
        elif language == "bash":
            printed = []
        elif printed:
            there = [without_numbers(line) for line in printed]
            for line in filter(lambda line: line.strip("…"), code.splitlines()):
                pattern = re.escape(without_numbers(line)).replace("…", ".*")
                assert any(re.fullmatch(pattern, other) for other in there), line


def run_command(line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    assert program == "gradgraph"
    fails = re.search("# (stops|refused)", line) is not None
    code = run(words)
    assert code == (1 if fails else 0) or ("cuda" in words and code == 0), line


def without_numbers(line: str) -> str:
    """With one space between columns, and a 0 for each number."""
    return re.sub(r"\s+", " ", re.sub(r"-?\b\d[\d.,e+-]*", "0", line)).strip()


def snippets(page: Path) -> Iterator[str]:
    """The Python blocks, and what stands in the last column of tables: calls and dotted names, in their order."""
    for block, row in BLOCK_OR_ROW.findall(page.read_text()):
        last = re.split(r"(?<!\\)\|", row)[-1]
        codes = [block] if block else [code.replace(r"\|", "|") for code in re.findall("`([^`]+)`", last)]
        yield from (code for code in codes if re.search(r"[.(=]", code) and not code.startswith("gradgraph "))


@pytest.mark.sweep(0.36)
@pytest.mark.parametrize("page", COMING_FROM, ids=lambda p: p.name)
def test_what_is_written_here_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    count = 0
    for count, code in enumerate(snippets(page), 1):  # noqa: B007 (it is asserted)
        try:
            exec(compile(code, str(page), "exec"), namespace)
        except Exception as problem:
            raise AssertionError(f"this fails: {code}") from problem
    assert count > 20


def test_the_readme_trains_what_the_demo_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data, held_out = digits.split()
    (tmp_path / "demo").mkdir()
    digits.save_arrays(tmp_path / "demo/train.npz", data)
    digits.save_arrays(tmp_path / "demo/validation.npz", held_out)
    onnx.save(digits.network(seed=0), tmp_path / "demo/digits.onnx")
    found: dict[str, Any] = {}
    exec(compile(blocks(README)[0], "README.md", "exec"), found)
    assert eval(capsys.readouterr().out.splitlines()[-1])["accuracy"] > 0.95
    assert "x.grad" in [value.name for value in found["saliency"].graph.output]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    """In the repository, too: to pages that are in git, and not to those that are made for the site alone."""
    missing = [link for link in LINK.findall(without_code(page)) if not (page.parent / link).exists()]
    assert not missing


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Its headings as addresses, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_anchors_are_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)", without_code(page))
    assert [
        f"{path}#{anchor}" for path, anchor in links if anchor not in anchors(page.parent / path if path else page)
    ] == []


def test_every_page_is_in_the_navigation_once_and_in_the_list_of_its_part() -> None:
    nav = re.findall(r'"([\w./-]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8"))
    made = [f"{api_page.FOLDER}/{name}" for name in api_page.PAGES]
    assert sorted(nav) == sorted([*made, *(page.relative_to(ROOT).as_posix() for page in PAGES)])
    for index in (ROOT / "docs").glob("*/index.md"):
        listed = LINK.findall(index.read_text("utf-8"))
        missing = {page.name for page in index.parent.glob("*.md")} - {"index.md", *listed}
        assert not missing, f"{index.parent.name}/index.md lacks them"


@pytest.mark.parametrize("marked", MARKED, ids=lambda m: m.title)
def test_a_page_has_every_name_of_its_table(marked: Marked) -> None:
    """Between its marks; the site has the table there, whose rows have as many cells as its head."""
    (text,) = marked.marks.findall((ROOT / marked.page).read_text("utf-8"))
    lacking = [name for name in re.findall(r"`[^`]+`|\b[A-Z]\w+", marked.names()) if name not in text]
    assert lacking == [], f"{marked.page} does not name these; make pages"
    for head, rows in re.findall(r"^(\|.*\|)\n\|[-|]+\|\n((?:\|.*\|\n?)+)", marked.table(), re.MULTILINE):
        cells = {len(re.split(r"(?<!\\)\|", row)) for row in [head, *rows.splitlines()]}
        assert len(cells) == 1


def test_the_site_has_the_tables_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    for page in PAGES:
        place = tmp_path / page.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(page.read_text("utf-8"), "utf-8")
    write_site(tmp_path)
    written = [tmp_path / api_page.FOLDER / name for name in api_page.PAGES]
    for page in [*written, *{tmp_path / marked.page for marked in MARKED}]:
        for path, anchor in re.findall(r"\]\((?!https?:|\.\./\.\./\w)([^)#\s]*)(?:#([^)]+))?\)", without_code(page)):
            target = page.parent / path if path else page
            assert target.suffix != ".md" or target.is_file(), f"{page.name}: {path}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def test_security_names_tests_that_there_are() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "SECURITY.md").read_text("utf-8"))
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).is_file()] == []
