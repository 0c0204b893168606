"""Advice in messages is advice: what it names exists, what it types is parsed by the real parser, and it leads on."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import onnx
import pytest

import gradgraph as gg
from gradgraph.cli.app import COMMANDS, cli, run
from gradgraph.errors import BuildError, DifferentiationError
from tests.kit.command_line import mlp
from tests.kit.package_trees import ROOT, trees
from tests.kit.small_models import parsed, real


@cache
def texts() -> dict[str, str]:
    """Every text of the package that a user may read, by place; ``<…>`` stands for what is filled in."""
    return dict(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    for file, tree in trees().items():
        parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        parts |= {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
        for node in ast.walk(tree):
            place = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                yield place, "".join(str(v.value) if isinstance(v, ast.Constant) else "<…>" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield place, node.value


COMMAND = re.compile(r"`gradgraph ([a-z][^`]*)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
INSTALLED = re.compile("pip install ([^,(;]*)")
DOTTED = re.compile(r"\bgradgraph(?:\.\w+)+")


def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": command.commands[inner] for inner in command.commands}
    return found


CLI = commands()


def options_of(command: click.Command) -> set[str]:
    """Every option that its parser takes: ``--no-force`` stands in no help."""
    return set(command.make_parser(click.Context(command))._long_opt)


OTHERS = {"--format", "--version"}  # of git, and of `gradgraph` itself
OPTIONS = {name: options_of(command) for name, command in CLI.items()}


@pytest.mark.sweep(0)
def test_commands_in_messages_are_parsed() -> None:
    wrong = []
    for place, text in texts().items():
        for found in COMMAND.findall(text):
            words = found.split()
            inner = " ".join(words[:2])
            command = inner if inner in CLI else words[0]
            if command not in CLI or not set(OPTION.findall(found)) <= OPTIONS[command]:
                wrong.append((place, found))
    assert wrong == []


def test_options_in_messages_exist() -> None:
    known = set().union(OTHERS, *OPTIONS.values())
    assert [(place, text) for place, text in texts().items() if not set(OPTION.findall(text)) <= known] == []


def test_names_in_messages_exist() -> None:
    names = {name for text in texts().values() if " " in text for name in DOTTED.findall(text)}
    assert len(names) > 20
    for name in sorted(names):
        at: Any = gg
        for part in name.split(".")[1:]:
            if not hasattr(at, part) and hasattr(at, "__path__"):
                importlib.import_module(f"{at.__name__}.{part}")
            at = getattr(at, part)


def test_packages_in_messages_are_those_of_the_extras() -> None:
    """No index has this project: it is installed from a clone or a wheel."""
    requirements = set(re.findall(r'"([\w-]+)[^"]*"', (ROOT / "pyproject.toml").read_text("utf-8")))
    words = [w.strip("'") for text in texts().values() for w in " ".join(INSTALLED.findall(text)).split()]
    packages = {re.match(r"[\w-]+", word)[0] for word in words if re.match("[a-z]", word)}  # type: ignore[index]
    assert packages >= {"pillow", "jinja2", "scikit-learn"}
    assert packages - requirements == {"nccl4py", "onnxruntime-genai"}
    assert "onnx-gradgraph" not in packages


# --- advice that is followed ---------------------------------------------------------------------------------------

DIMENSIONS = ["N", "batch size", "batch + 1", "2*batch", "a*b", "", "unk__0", "1x", "x.batch", "N=3", "it's", "-1 n"]


def with_batch(dimension: str) -> onnx.ModelProto:
    model = mlp()
    for value in (*model.graph.input, *model.graph.output):
        dim = value.type.tensor_type.shape.dim[0]
        dim.ClearField("dim_param")
        if dimension:
            dim.dim_param = dimension
    return model


@pytest.mark.sweep(0.08)
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_advice_on_sizes_builds_what_was_refused(
    dimension: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_batch(dimension)
    with pytest.raises(BuildError) as raised:
        gg.build(model, recompute=500_000)
    assert raised.value.remedy and raised.value.shell_remedy
    remedy = raised.value.remedy[raised.value.remedy.index("gradgraph.") :]
    if "surgery" in remedy:
        model = eval(remedy, {"gradgraph": gg, "model": model})
        shell = raised.value.shell_remedy.split("`")[1].replace("MODEL", str(tmp_path / "m.onnx"))
        onnx.save(with_batch(dimension), tmp_path / "m.onnx")
        assert run([*shlex.split(shell)[1:], "-o", str(tmp_path / "named.onnx")]) == 0
        (dim, _) = onnx.load(tmp_path / "named.onnx").graph.input[0].type.tensor_type.shape.dim
        assert dim.dim_param == model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
        return
    assert gg.build(model, recompute=eval(remedy, {"gradgraph": gg})).train
    onnx.save(model, tmp_path / "m.onnx")
    command = ["build", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "step")]
    assert run([*command, "--recompute", "500kB"]) == 1
    assert " ".join(raised.value.shell_remedy.split()) in " ".join(capsys.readouterr().err.split())
    advice = raised.value.shell_remedy[raised.value.shell_remedy.index("--recompute") :]
    assert run([*command, *shlex.split(advice)]) == 0


UNREACHED = """(float[N, 4] x) => (float[N, 3] y, float[N, 3] z) {
    a = MatMul(x, used) b = MatMul(x, rounded) r = Round(b) y = Add(a, r) z = MatMul(x, other) }"""


@pytest.mark.parametrize("train", [["other", "used"], ["rounded", "used"], ["rounded", "used", "other"]])
def test_advice_on_weights_that_no_loss_depends_on_builds(
    train: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = parsed(UNREACHED, used=real(4, 3), rounded=real(4, 3), other=real(4, 3))
    with pytest.raises(DifferentiationError, match="the output does not depend on") as raised:
        gg.build(model, "mse", train=train)
    found = re.search(r"freeze=(.*)", str(raised.value))
    assert found
    assert gg.build(model, "mse", train=train, freeze=eval(found[1])).manifest.trainable == ("used",)
    onnx.save(model, tmp_path / "m.onnx")
    chosen = [word for name in train for word in ("--train", name)]
    command = ["build", str(tmp_path / "m.onnx"), "--loss", "mse", "-o", str(tmp_path / "step"), *chosen]
    assert run(command) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert run([*command, *shlex.split(said[said.index("--freeze") :])]) == 0


# --- arguments in remedies -------------------------------------------------------------------------------------------

ARGUMENT = re.compile(r"(?<![\w.'\"-])([a-z_][a-z_0-9]*)=(?!=)")
Function = tuple[str, str]  # the module, and the name in it


class Calls:
    """Who calls whom, as far as names say it: those of a module, what it imports, and methods of ``self``."""

    def __init__(self) -> None:
        self.callers: dict[Function, set[Function]] = {}
        self.remedies: list[tuple[Function, str]] = []
        for file, tree in trees().items():
            parts = Path(file).with_suffix("").parts
            if parts[0] != "cli":
                self._read(".".join(parts if parts[0] == "gradgraph" else ("gradgraph", *parts)), tree)

    def _read(self, module: str, tree: ast.Module) -> None:
        known: dict[str, Function] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gradgraph"):
                known |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        known |= {n.name: (module, n.name) for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        for outer in tree.body:
            methods = outer.body if isinstance(outer, ast.ClassDef) else [outer]
            for node in (n for n in methods if isinstance(n, ast.FunctionDef)):
                of_class = outer.name if isinstance(outer, ast.ClassDef) else ""
                name = f"{of_class}.{node.name}" if of_class else node.name
                self._read_function((module, name), of_class, node, known)

    def _read_function(self, own: Function, of_class: str, node: ast.FunctionDef, known: dict[str, Function]) -> None:
        for inner in ast.walk(node):
            match inner:
                case ast.Name(id) if id in known:
                    self.callers.setdefault(known[id], set()).add(own)
                case ast.Attribute(ast.Name("self" | "cls"), name) if of_class:
                    self.callers.setdefault((own[0], f"{of_class}.{name}"), set()).add(own)
                case ast.keyword("remedy", ast.Constant(str(text))):
                    self.remedies.append((own, text))
                case ast.keyword("remedy", ast.JoinedStr(values)):
                    text = "".join(str(v.value) if isinstance(v, ast.Constant) else "<…>" for v in values)
                    self.remedies.append((own, text))

    def public_from(self, function: Function) -> set[Callable[..., Any]]:
        """The public functions from which one is reached."""
        seen, left, found = {function}, [function], set()
        while left:
            one = left.pop()
            if one in PUBLIC:
                found.add(PUBLIC[one])
                continue
            made = (one[0], one[1].rpartition(".")[0]) if one[1].endswith(("__init__", "__post_init__")) else one
            if made in PUBLIC:
                found.add(PUBLIC[made])
                continue
            new = (self.callers.get(one, set()) | self.callers.get(made, set())) - seen
            seen |= new
            left += new
        return found


def public_functions() -> dict[Function, Callable[..., Any]]:
    found: dict[Function, Callable[..., Any]] = {}
    for name in gg.__all__:
        value = getattr(gg, name)
        members = [getattr(value, n) for n in getattr(value, "__all__", ())] if inspect.ismodule(value) else [value]
        for member in members:
            if inspect.isfunction(member) or inspect.isclass(member):
                found[member.__module__, member.__qualname__] = member
            for _, method in inspect.getmembers(member, inspect.isfunction) if member in (gg.Trainer, gg.Step) else ():
                if not method.__name__.startswith("_"):
                    found[method.__module__, method.__qualname__] = method
    return found


def takes(function: Callable[..., Any], *names: str) -> bool:
    """Whether a call takes arguments of these names, of its own or of any name."""
    found = inspect.signature(function).parameters
    return {*names} <= {*found} or any(p.kind is p.VAR_KEYWORD for p in found.values())


PUBLIC = public_functions()
# what names alone say is reached, and is not
UNREACHED_FROM = {
    ("gradgraph.data.sources.sources", "Columns.__init__"): "an evaluation fills its last batch up",
    ("gradgraph.autodiff.samples", "check_independent"): "a jacobian is told something else",
    ("gradgraph.runtime.execution.session", "create_session"): "quantisation opens no session of CUDA",
    ("gradgraph.building.distillation", "check_imitation"): "the loss of gg.iterate has no masks",
    ("gradgraph.autodiff.per_sample", "_row"): "gradient_norm reads weights that the loss depends on",
}
OURS = ("", "gg", "gradgraph")  # what stands before the names of this package's own calls


@pytest.mark.sweep(0)
def test_arguments_in_remedies_are_those_of_the_call() -> None:
    """Of calls that are written out, of those; else of each public one from which the remedy can be raised."""
    calls = Calls()
    naming = [(place, text) for place, text in calls.remedies if ARGUMENT.search(text)]
    assert len(naming) > 50
    assert [wrong for place, text in naming for wrong in unknown_arguments(calls, place, text)] == []


def unknown_arguments(calls: Calls, place: Function, text: str) -> Iterator[str]:
    for before, called, arguments in re.findall(r"([\w.]*?)\.?(\w+)\(([^()]*)\)", text):
        ways = [function for (_, name), function in PUBLIC.items() if name.rpartition(".")[2] == called]
        names = ARGUMENT.findall(arguments)
        if ways and before.partition(".")[0] in OURS and not any(takes(way, *names) for way in ways):
            yield f"{place}: {called} has no arguments {names}"
    bare = text
    while "(" in bare and (shorter := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = shorter
    for name in () if place in UNREACHED_FROM else ARGUMENT.findall(bare):
        for function in calls.public_from(place):
            if not takes(function, name):
                yield f"{place}: {function.__qualname__} has no argument {name}"
