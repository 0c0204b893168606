"""The house of backends: each is one room, found by the registry, and none knows another but the one it extends."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

import gradgraph as gg
from gradgraph import backends
from gradgraph.backends import BACKENDS, SHARED, named, of_provider, register, step_backends
from gradgraph.backends.backend import Backend, Lowering
from gradgraph.backends.engine import lower, verdicts
from gradgraph.backends.forms import Form
from gradgraph.errors import BuildError
from gradgraph.passes.rewrites import Rewrite
from tests.kit.convolutions import convolutions, feeds
from tests.kit.form_kit import problems_of_form
from tests.kit.running import run

ROOM = Path(backends.__file__).parent
ROOMS = {p.stem for p in ROOM.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - SHARED - {"__init__"}
SMALL = [b for b in BACKENDS.values() if not b.name.startswith("ort-")]  # the others have tests of their own
FORMS = [pytest.param(b, f, id=f"{b.name}-{f.op_type}-{f.name}") for b in SMALL for f in b.lowering.forms]


def room_of(backend: Backend) -> str:
    return next(r for r in ROOMS if backend in vars(sys.modules[f"gradgraph.backends.{r}"]).values()
                and backend.name == {"ort_native": "ort-cpu-native"}.get(r, r.replace("_", "-")))  # fmt: skip


def files(room: str) -> list[Path]:
    return [*(ROOM / room).rglob("*.py")] if (ROOM / room).is_dir() else [ROOM / f"{room}.py"]


def imported_rooms(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradgraph.backends."):
            yield (node.module or "").split(".")[2]


@pytest.mark.sweep(0.03)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_imports_no_other_but_the_one_it_extends(name: str) -> None:
    backend = BACKENDS[name]
    own = room_of(backend)
    allowed = {own, *SHARED} | ({room_of(backend.extends)} if backend.extends else set())
    assert {r for file in files(own) for r in imported_rooms(file)} <= allowed


@pytest.mark.parametrize("file", sorted(SHARED))
def test_what_they_share_names_none_of_them(file: str) -> None:
    path = ROOM / f"{file}.py"
    assert not set(imported_rooms(path)) & ROOMS
    strings = {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)}
    assert not strings & (BACKENDS.keys() - {"auto"})


def test_every_room_is_a_backend() -> None:
    assert sorted(map(room_of, BACKENDS.values())) == sorted(ROOMS)


NEW = """
from gradgraph.backends.backend import Backend
TOY = Backend(name="toy", about="a toy", provider="ToyExecutionProvider")
"""


def test_a_new_backend_is_one_file(tmp_path: Path) -> None:
    """Nothing else is touched: the registry, the command line, errors and ``gg.build`` know it."""
    (tmp_path / "toy.py").write_text(NEW)
    program = (
        "import sys; import gradgraph.backends as b; b.__path__.append(sys.argv[1]); "
        "b.find_all(); from gradgraph.cli.choices import BACKENDS; "
        "print('toy' in BACKENDS.choices, b.of_provider('ToyExecutionProvider').name, 'toy' in b.step_backends())"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "toy", "True"]


def test_a_backend_is_registered_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Backend("toy", "a toy")
    monkeypatch.setitem(BACKENDS, "toy", toy)
    assert register(toy) is register(toy) is named("toy", BACKENDS) and "toy" in step_backends()
    with pytest.raises(BuildError, match="there is a backend 'toy' already"):
        register(Backend("toy", "another toy"))


def test_backends_are_listed_without_their_forms() -> None:
    program = (
        "import sys; import gradgraph.backends as b; b.step_backends(), b.checked_backends(), b.of_provider(''); "
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'onnx', 'onnx_ir') or 'forms' in m])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_names_are_checked_and_offered() -> None:
    with pytest.raises(BuildError, match=f"there is no backend 'toy'; there is {', '.join(sorted(BACKENDS)[:8])}"):
        named("toy")
    assert of_provider("CUDAExecutionProvider").name == "ort-cuda"
    assert of_provider("XnnpackExecutionProvider").name == "portable"


def test_every_rewrite_has_a_reason() -> None:
    lowerings = [b.lowering for b in BACKENDS.values()]
    lists = [(*y.before, *y.after, *y.last, *(r for z in y.layouts for r in z.rewrites)) for y in lowerings]
    assert all(len(rewrite.reason.split()) > 4 for rewrites in lists for rewrite in rewrites)
    assert all(len(b.about.split()) > 4 for b in BACKENDS.values())


def test_lists_are_done_in_order() -> None:
    done: list[str] = []
    told = [Rewrite(lambda model, n=n: done.append(n), "to see when it is done") for n in ("before", "after")]
    lower(
        ir.Model(ir.Graph((), (), nodes=()), ir_version=10),
        Backend("toy", "a toy", lambda: Lowering(before=(told[0],), after=(told[1],))),
    )
    assert done == ["before", "after"]


@pytest.mark.sweep(0.7)
@pytest.mark.parametrize(("backend", "form"), FORMS)
def test_a_form_equals_the_portable_one(backend: Backend, form: Form) -> None:
    assert problems_of_form(backend, form) == []


# --- Core ML ------------------------------------------------------------------------------------------------


def test_a_step_for_core_ml_says_what_it_leaves_to_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    auto = gg.build(convolutions("batch"), "mse", gg.optim.sgd(0.1))
    caplog.clear()
    step = gg.build(convolutions("batch"), "mse", gg.optim.sgd(0.1), backend="coreml")
    said = [m for m in caplog.messages if m.startswith("coreml does not support ")]
    model = ir.from_proto(step.train)
    found = list(verdicts(model, BACKENDS["coreml"]))
    assert said[0].startswith(
        f"coreml does not support {len(found)} of {len(step.train.graph.node)} nodes of train.onnx: "
    )
    assert not {"Gemm", "Neg"} & {node.op_type for node in model.graph}
    given = feeds(auto.train)
    for a, b in zip(run(auto.train, given).values(), run(step.train, given).values(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("y = Relu(x)", ""),
        ("y = Sign(x)", "it has no operator Sign"),
        ("y = Gemm(x, w)", "its input 1 is computed or fed, and Core ML wants a constant"),
        ("y = Pow(x, i)", "its inputs should both be float32"),
        ("y = GlobalAveragePool(x)", "its input should have 4 axes"),
        ("y = MatMul(x, w)", ""),
    ],
)
def test_core_ml_says_why(text: str, says: str) -> None:
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[4, 4] x, float[4, 4] w, int64[1] i) => (float[4, 4] y)'
    model = ir.from_proto(onnx.parser.parse_model(f"{head} {{ {text} }}"))
    assert [v.reason for _, v in verdicts(model, BACKENDS["coreml"])] == ([says] if says else [])
