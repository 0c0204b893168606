"""What may be named is named once: in its table. Command line, help, errors and pages follow the table."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import api_page
import names_page
import pytest
from cli_reference import reference
from command_line import Cli, mlp

import gradgraph as gg
from gradgraph.backends import BACKENDS
from gradgraph.errors import BuildError
from gradgraph.frontend import functional, nn
from gradgraph.losses import LOSSES, Loss
from gradgraph.optim import Optimizer
from gradgraph.optim.recipes import RECIPES
from gradgraph.optim.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
# made from the tables, or kept: what was written about an earlier state
REFERENCE = ("losses", "metrics", "optimizers", "cli", "backends", "messages")
MADE = {
    "CHANGELOG.md",
    *(f"docs/reference/{page}" for page in (*(f"{name}.md" for name in REFERENCE), *api_page.PAGES)),
}


def toy_optimizer(lr: float = 0.5) -> Optimizer:
    """Follows the sign of nothing."""
    return gg.optim.sgd(lr)


def toy_loss(reduction: str = "mean") -> Loss:
    """Squares nothing."""
    return gg.losses.mse(reduction)


TOYS = [(RECIPES, toy_optimizer, "optimizer", gg.optim.by_name), (LOSSES, toy_loss, "loss", gg.losses.by_name)]


@pytest.mark.parametrize("path", names_page.PAGES, ids=lambda path: path.stem)
def test_the_pages_are_what_the_tables_say(path: Path) -> None:
    again = "write the tables of names anew: python tests/names_page.py"
    assert path.read_text("utf-8") == names_page.PAGES[path](), again


@pytest.mark.parametrize(("table", "make", "kind", "by_name"), TOYS, ids=["optimizer", "loss"])
def test_one_entry_in_a_table_is_known_everywhere(table, make, kind, by_name, cli: Cli, monkeypatch, tmp_path) -> None:
    name = make.__name__
    monkeypatch.setitem(table, name, make)
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_bytes(mlp().SerializeToString())
    page = names_page.losses_page if kind == "loss" else names_page.optimizers_page
    for text in (cli("build", "--help").out, reference(), page()):
        assert name in text
    assert type(by_name(name)) is type(make())
    with pytest.raises(BuildError, match=f"did you mean '{name}'"):
        gg.build("model.onnx", **{kind: name.title()})
    assert cli("build", "model.onnx", f"--{kind}", name).code == 0
    wrong = cli("build", "model.onnx", f"--{kind}", f"{name}s")
    assert (wrong.code, f"did you mean '{name}'" in wrong.err) == (1, True)


def tracked(*suffixes: str) -> list[Path]:
    """Files by hand: of the package and the pages; nothing that is made, nor what uses names as a user does."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [n for n in listed.stdout.split("\0") if n.endswith(suffixes) and n not in MADE]
    users = ("tests/", "benchmarks/", "examples/", "docs/start/coming-from-")
    return [ROOT / n for n in names if not n.startswith(users) and (ROOT / n).is_file()]


# name: its home, and where its cases are
TOOK = {
    "rmsprop": ("gradgraph/optim/rms.py", "tests/optim_cases.py"),
    "huber": ("frontend/losses_values.py", "tests/test_losses.py"),
    "bce_with_logits": ("frontend/losses_values.py", "tests/test_losses.py"),
    "step_decay": ("gradgraph/optim/schedules.py", "tests/test_schedules.py"),
    "clip_by_value": ("gradgraph/optim/modifiers.py", "tests/test_optim.py"),
    "Tanhshrink": ("frontend/layers_activation.py", "tests/frontend/test_frontend_layers_torch.py"),
    "Unflatten": ("frontend/layers.py", "tests/frontend/test_frontend_layers_torch.py"),
    "HingeEmbeddingLoss": ("frontend/layers_losses.py", "tests/frontend/test_loss_layers_torch.py"),
    "addcdiv": ("frontend/pointwise.py", "tests/frontend/test_frontend_functions_torch.py"),
}


@pytest.mark.parametrize("name", TOOK)
def test_each_took_two_files(name: str) -> None:
    """One that says what it is and one with its cases; all other mentions by hand would be a third."""
    home, cases = TOOK[name]
    word = re.compile(rf"\b{name}\b")
    if not (files := tracked(".py", ".md", ".toml")):
        pytest.skip("the files of the repository are not known: this is no checkout")
    assert [str(f.relative_to(ROOT)) for f in files if word.search(f.read_text("utf-8"))] == [home]
    assert word.search((ROOT / cases).read_text("utf-8"))


TABLES = {"losses": LOSSES, "optimizers": RECIPES, "schedules": SCHEDULES, "backends": BACKENDS}
HOMES = {"gradgraph/optim/recipes.py", "gradgraph/optim/schedules.py"}


@pytest.mark.parametrize("kind", TABLES)
def test_nobody_lists_names_by_hand(kind: str) -> None:
    """Four names of one table within a line or two are a list."""
    names = "|".join(map(re.escape, TABLES[kind]))
    several = re.compile(rf"(?:(?<![\w.(-])(?:{names})(?![\w(-])[\"'`,;\s]+(?:or |and )?){{4}}")
    found = [
        f"{f.relative_to(ROOT)}: {m[0]!r}"
        for f in tracked(".py", ".md")
        for m in several.finditer(f.read_text("utf-8"))
    ]
    assert [f for f in found if f.split(":")[0] not in HOMES] == []


@pytest.mark.parametrize("face", [nn, functional], ids=["nn", "functional"])
def test_faces_offer_what_families_define(face) -> None:
    """Every family file names its own, once; a layer that is public and not named would be forgotten."""
    families = [m for m in vars(face).values() if inspect.ismodule(m) and set(m.__all__) <= set(face.__all__)]
    named = [name for m in families for name in m.__all__]
    assert len(named) == len(set(named))
    assert set(face.__all__) - set(named) <= {"init"}
    bases = {"Recurrent"}
    for m in families if face is nn else ():
        layers = {
            n
            for n, v in vars(m).items()
            if inspect.isclass(v) and issubclass(v, nn.Module) and v.__module__ == m.__name__
        }
        assert {n for n in layers if not n.startswith("_")} - bases <= set(m.__all__)
