"""What may be named is named once: in its table. Command line, help, errors and pages follow the table."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradgraph as gg
from gradgraph.arguments import NUMBER
from gradgraph.backends import BACKENDS
from gradgraph.building.option import Shell, called_with, option, options, spellings
from gradgraph.building.step_options import BuildOptions
from gradgraph.errors import ArgumentError, BuildError
from gradgraph.frontend import functional, nn
from gradgraph.losses import LOSSES, Loss
from gradgraph.metrics import METRICS
from gradgraph.optim import Optimizer
from gradgraph.optim.recipes import RECIPES
from gradgraph.optim.schedules import SCHEDULES
from gradgraph.parallel.data_parallel import COMPRESSIONS
from gradgraph.runs.spelled_build import SPELLINGS
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from tests.kit.command_line import Cli, mlp
from tests.pages import names_page
from tests.pages.cli_reference import commands
from tests.pages.made import MARKED

ROOT = Path(__file__).parents[2]


def toy_optimizer(lr: float = 0.5) -> Optimizer:
    """Follows the sign of nothing."""
    return gg.optim.sgd(lr)


def toy_loss(reduction: str = "mean") -> Loss:
    """Squares nothing."""
    return gg.losses.mse(reduction)


TOYS = [(RECIPES, toy_optimizer, "optimizer", gg.optim.by_name), (LOSSES, toy_loss, "loss", gg.losses.by_name)]


@pytest.mark.parametrize(("table", "make", "kind", "by_name"), TOYS, ids=["optimizer", "loss"])
def test_one_entry_in_a_table_is_known_everywhere(table, make, kind, by_name, cli: Cli, monkeypatch, tmp_path) -> None:
    name = make.__name__
    monkeypatch.setitem(table, name, make)
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_bytes(mlp().SerializeToString())
    page = names_page.losses if kind == "loss" else names_page.optimizers
    for text in (cli("build", "--help").out, commands(), page()):
        assert name in text
    assert type(by_name(name)) is type(make())
    with pytest.raises(BuildError, match=f"did you mean '{name}'"):
        gg.build("model.onnx", **{kind: name.title()})
    assert cli("build", "model.onnx", f"--{kind}", name).code == 0
    wrong = cli("build", "model.onnx", f"--{kind}", f"{name}s")
    assert (wrong.code, f"did you mean '{name}'" in wrong.err) == (1, True)


def test_names_may_be_typed_as_calls() -> None:
    step = gg.build(mlp(), "focal(gamma=3.0)", "sgd(momentum=0.9)", metrics="top_k(k=2)")
    assert step.manifest.loss["arguments"]["gamma"] == 3.0
    assert step.manifest.optimizer["arguments"]["momentum"] == 0.9
    with pytest.raises(BuildError, match=r"the loss focal has no argument 'gama'; did you mean 'gamma'"):
        gg.build(mlp(), "focal(gama=3)")
    with pytest.raises(BuildError, match=r"is not a valid optimizer; write a name, or a call such as 'adamw\(1e-3\)'"):
        gg.build(mlp(), "mse", "sgd(0.1")
    assert gg.optim.recipes.RECIPES.typed("sgd(0.1, momentum=0.9)").arguments["lr"] == 0.1
    with pytest.raises(BuildError, match="is not a valid loss; write a name"):
        LOSSES.typed("mse('mean', 1)")


@functools.cache
def tracked(*suffixes: str) -> list[Path]:
    """Files by hand: of the package and the pages, but for those that use names as a user does."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [n for n in listed.stdout.split("\0") if n.endswith(suffixes)]
    users = ("tests/", "benchmarks/", "examples/", "docs/start/coming-from-", "docs/how-to/troubleshoot.md",
             "docs/reference/shipped-models.md", "gradgraph/rivals/", "CHANGELOG.md",
             *(marked.page for marked in names_page.MARKED if marked.page.startswith("docs/reference/")))  # fmt: skip
    return [ROOT / n for n in names if not n.startswith(users) and (ROOT / n).is_file()]


def by_hand(file: Path) -> str:
    """The text of a file, without what is written between marks, and without the names that it defines itself."""
    text = re.sub(r"^__all__ = \[[^]]*\]", "", file.read_text("utf-8"), flags=re.MULTILINE)
    for marked in MARKED:
        if file == ROOT / marked.page:
            text = marked.marks.sub("", text)
    return text


@functools.cache
def read(path: Path) -> str:
    return path.read_text("utf-8")


# name: its home, and where its cases are
TOOK = {
    "rmsprop": ("gradgraph/optim/rms.py", "tests/kit/optim_cases.py"),
    "huber": ("frontend/losses_values.py", "tests/frontend/test_losses.py"),
    "triplet": ("frontend/losses_embeddings.py", "tests/frontend/test_losses_torch.py"),
    "step_decay": ("gradgraph/optim/schedules.py", "tests/optim/test_schedules.py"),
    "clip_by_value": ("gradgraph/optim/modifiers.py", "tests/optim/test_optim.py"),
    "Tanhshrink": ("frontend/layers_activation.py", "tests/frontend/test_frontend_layers_torch.py"),
    "Unflatten": ("frontend/layers.py", "tests/frontend/test_frontend_layers_torch.py"),
    "HingeEmbeddingLoss": ("frontend/layers_losses.py", "tests/frontend/test_loss_layers_torch.py"),
    "addcdiv": ("frontend/pointwise.py", "tests/frontend/test_frontend_functions_torch.py"),
}


@pytest.mark.sweep(0.29)
@pytest.mark.parametrize("name", TOOK)
def test_each_took_two_files(name: str) -> None:
    """One that says what it is and one with its cases; all other mentions by hand would be a third."""
    home, cases = TOOK[name]
    word = re.compile(rf"\b{name}\b")
    if not (files := tracked(".py", ".md", ".toml")):
        pytest.skip("the files of the repository are not known: this is no checkout")
    assert [str(f.relative_to(ROOT)) for f in files if word.search(by_hand(f))] == [home]
    assert word.search((ROOT / cases).read_text("utf-8"))


TABLES: dict[str, dict[str, Any]] = {
    "loss": LOSSES,
    "metric": METRICS,
    "optimizer": RECIPES,
    "schedule": SCHEDULES,
    "backend": BACKENDS,
    "kind of adapter": KINDS,
    "compression": COMPRESSIONS,
}
# lists that say something else of names: what is public, finishes of metrics, what PEFT's files hold
HOMES = {"gradgraph/optim/schedules.py", "gradgraph/step/finishes.py", "docs/how-to/adapters.md"}
# names that other files say, too, and why
ELSEWHERE = {
    "defaults, and examples in messages": "cross_entropy bce_with_logits adamw accuracy confusion_matrix mse "
    "cosine lora exact_match auto portable",
    "types of numbers": "float16 bfloat16",
    "words that mean other things as well": "clip top_k constant linear function warmup exponential nll bce ece giou "
    "diou ciou retinanet detr ssd fcos perplexity",
    "finishes of the same name": "precision recall f1 iou balanced_accuracy r2 mcc cohen_kappa explained_variance "
    "roc_auc average_precision",
    "kinds that have a form of their own in PEFT's files": "bitfit dora ia3 lora_experts prefix rslora",
    "backends that docstrings recommend": "openvino ort-cpu ort-cpu-native ort-cuda web",
    "a rule that fit follows": "reduce_on_plateau",
    "figures of a tuned language model": "reward_accuracy",
}


@functools.cache
def places() -> dict[str, str]:
    """The files of the package, each with its text; the folder of a backend is one."""
    rooms: dict[str, str] = {}
    for file in tracked(".py"):
        name = file.relative_to(ROOT).as_posix()
        rest = name.removeprefix("gradgraph/backends/")
        room = f"gradgraph/backends/{rest.split('/')[0]}" if rest != name else name
        rooms[room] = rooms.get(room, "") + read(file)
    return rooms


def number_of_files(what: str) -> int:
    """The files of the package that a part of this kind takes, as CONTRIBUTING.md says it."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (found,) = re.findall(rf"^\| {what} \| (\d+):", text, re.MULTILINE)
    return int(found)


@pytest.mark.sweep(0.27)
@pytest.mark.parametrize("what", TABLES)
def test_a_part_stands_in_as_many_files_as_contributing_says(what: str) -> None:
    if not (texts := places()):
        pytest.skip("the files of the repository are not known: this is no checkout")
    allowed = {name for names in ELSEWHERE.values() for name in names.split()}
    names = "|".join(map(re.escape, TABLES[what].keys() - allowed))
    said = re.compile(rf'"({names})"|\bdef ({names})\b|(?:losses|metrics|optim)\.({names})\b')
    found: dict[str, set[str]] = {name: set() for name in TABLES[what].keys() - allowed}
    for place, text in texts.items():
        for match in said.finditer(text):
            found[match[1] or match[2] or match[3]].add(place)
    for name, there in found.items():
        assert len(there) == number_of_files(what), (
            f"'{name}' stands in {sorted(there)}; a word that means other things as well goes into ELSEWHERE"
        )


def test_a_build_option_is_one_field() -> None:
    """Nobody declares it again: not the commands, and not the signature of ``gg.build``."""
    assert number_of_files("build option") == 1
    text = "".join((ROOT / "cli" / f"{name}.py").read_text("utf-8") for name in ("build", "train", "options"))
    option_of = r'(?:option|placed)\([^()]*"--{}"'
    declared = {name for name in SPELLINGS if re.search(option_of.format(name.replace("_", "-")), text)}
    assert declared == set()

    @options
    class More(BuildOptions):
        caution: float = option(
            "how careful to be.", NUMBER, Shell("training", "How careful to be.", "number"), default=0.5
        )

    @called_with(More)
    def build(given: More) -> float:
        """A step."""
        return given.caution

    assert build("model.onnx", caution=0.1) == 0.1 and "caution: how careful to be." in (build.__doc__ or "")
    assert inspect.signature(build).parameters["caution"].default == 0.5
    assert spellings(More)["caution"].section == "training"
    with pytest.raises(ArgumentError, match="caution is 'high'; it should be a number"):
        build("model.onnx", caution="high")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no argument 'cautoin'; did you mean 'caution'"):
        build("model.onnx", cautoin=0.1)  # type: ignore[call-arg]


@pytest.mark.sweep(0.33)
@pytest.mark.parametrize("what", TABLES)
def test_nobody_lists_names_by_hand(what: str) -> None:
    """Four names of one table within a line or two are a list."""
    names = "|".join(map(re.escape, TABLES[what]))
    several = re.compile(rf"(?:(?<![\w.(-])(?:{names})(?![\w(-])[\"'`,;\s]+(?:or |and )?){{4}}")
    found = [f"{f.relative_to(ROOT)}: {m[0]!r}" for f in tracked(".py", ".md") for m in several.finditer(by_hand(f))]
    assert [f for f in found if f.split(":")[0] not in HOMES] == []


@pytest.mark.parametrize("face", [nn, functional], ids=["nn", "functional"])
def test_faces_offer_what_families_define(face) -> None:
    """Every family file names its own, once; a layer that is public and not named would be forgotten."""
    families = {sys.modules[getattr(face, name).__module__] for name in face.__all__ if name != "init"}
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
