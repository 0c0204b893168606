"""examples/web/gradgraph.js does in onnxruntime-node what a Trainer does in Python."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.export import inference_model
from gradgraph.files.models import to_proto
from gradgraph.frontend import nn
from gradgraph.runtime.execution.exported import plain
from gradgraph.step.finishes import AVERAGES, FINISHES, KAPPA_WEIGHTS
from gradgraph.step.step import Step

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "examples" / "web" / "gradgraph.js"
ONNXRUNTIME = ROOT / "examples" / "node" / "node_modules" / "onnxruntime-node" / "dist" / "index.js"
CLASSES = 3

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(
        shutil.which("node") is None or not ONNXRUNTIME.is_file(), reason="onnxruntime-node is not installed: make node"
    ),
]

Batch = dict[str, np.ndarray]


class Net(nn.Module):
    """What a running statistic, a mask and a frozen weight of a megabyte need."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 70_000)
        self.narrow = nn.Linear(70_000, 8)
        self.rest = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def forward(self, x: Any) -> Any:
        return {"logits": self.rest(self.narrow(self.wide(x))), "hidden": self.narrow(self.wide(x))}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


def model(module: Callable[[], nn.Module] = Small, outputs: tuple[str, ...] = ("logits",)) -> onnx.ModelProto:
    frontend.manual_seed(0)
    names = None if module is Net else list(outputs)
    return frontend.export(module(), {"x": ("batch", 4)}, outputs=names)


@functools.cache
def small() -> Step:
    metrics = ["accuracy", "confusion_matrix", "f1"]
    # not Adam, which goes as far for a rounding error as for a gradient in its first steps
    return gg.build(model(), "cross_entropy", gg.optim.sgd(0.1, momentum=0.9), metrics=metrics, ema=0.9, seed=3)


@functools.cache
def with_frozen_file() -> Step:
    return gg.build(
        model(Net), "cross_entropy", gg.optim.sgd(0.1), freeze=["wide.*", "narrow.*"], output="logits", seed=3
    )


@functools.cache
def two_steps() -> Step:
    body = gg.StepOptions("cross_entropy", gg.optim.adam(0.01), train="body.*", metrics=["accuracy"])
    return gg.build(model(), steps={"body": body, "head": gg.StepOptions(optimizer=gg.optim.sgd(0.05), train="head.*")})


def batches() -> list[Batch]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(n, 4)).astype(np.float32), "target": rng.integers(0, CLASSES, n)} for n in (6, 6, 2)]


def as_json(batch: Batch) -> dict[str, Any]:
    """A tensor by its sizes, and labels in a plain list."""
    return {n: {"dims": a.shape, "data": a.ravel().tolist()} if n == "x" else a.tolist() for n, a in batch.items()}


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Calls methods of a trainer that has loaded the step; gives what each printed."""

    def called(step: Step, *calls: list[Any], options: dict[str, Any] | None = None, files: bool = False) -> Any:
        folder = tmp_path / f"step{len(list(tmp_path.iterdir()))}"
        step.save(folder)
        where: Any = {"in": str(folder), "files": sorted(p.name for p in folder.iterdir())} if files else str(folder)
        job = folder.with_suffix(".json")
        job.write_text(json.dumps({"folder": where, "options": options or {}, "calls": [["load"], *calls]}))
        command = ["node", str(Path(__file__).with_name("drive.mjs")), str(LIBRARY), str(ONNXRUNTIME), str(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        first, *rest = [json.loads(line) for line in done.stdout.splitlines()]
        assert first.get("result", first) is None, first
        return rest

    return called


def steps_on(given: list[Batch]) -> list[list[Any]]:
    return [["step", as_json(batch)] for batch in given]


def exported_model(row: dict[str, Any]) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(Path(row["bytes"]).read_bytes())


def as_written_by_python(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without what onnx-ir does not write: types of weights and of missing values, empty texts, default locations."""
    rewritten = to_proto(plain(ir.serde.deserialize_model(model)))
    for tensor in rewritten.graph.initializer:
        tensor.ClearField("data_location")
    return rewritten


@pytest.mark.parametrize(("make", "files"), [(small, False), (with_frozen_file, True)], ids=["path", "bytes"])
def test_it_trains_and_exports_as_python_does(make: Callable[[], Step], files: bool, drive: Any) -> None:
    step, data = make(), batches()
    trainer = gg.Trainer(step, device="cpu")
    expected = [{k: np.asarray(v).tolist() for k, v in trainer.step(batch).items()} for batch in data]
    *trained, evaluated, predicted, exported = drive(
        step,
        *steps_on(data),
        ["evaluate", [as_json(b) for b in data]],
        ["predict", {"x": as_json(data[0])["x"]}],
        ["exportModel"],
        files=files,
    )
    for row, found in zip(expected, trained, strict=True):
        for column, value in row.items():
            np.testing.assert_allclose(found["result"][column], value, rtol=1e-5, atol=1e-6, err_msg=column)
    for column, value in trainer.evaluate(data).items():
        np.testing.assert_allclose(evaluated["result"][column], value, rtol=1e-5, atol=1e-6, err_msg=column)
    mine = trainer.export()
    theirs = exported_model(exported)
    onnx.checker.check_model(theirs)
    feeds = {"x": data[0]["x"]}
    both = [
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
        for m in (mine, theirs)
    ]
    for name, ours, other in zip([o.name for o in mine.graph.output], *both, strict=True):
        np.testing.assert_allclose(other, ours, rtol=1e-4, atol=1e-5)
        shaped = np.reshape(predicted["result"][name]["data"], predicted["result"][name]["dims"])
        np.testing.assert_allclose(shaped, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [small, with_frozen_file, two_steps])
def test_an_untrained_export_is_that_of_python(make: Callable[[], Step], drive: Any, tmp_path: Path) -> None:
    """Field by field: the same nodes, weights, functions, inputs and outputs."""
    [exported] = drive(make(), ["exportModel"])
    assert as_written_by_python(exported_model(exported)) == inference_model(tmp_path / "step0")


def test_some_outputs_are_exported(drive: Any, tmp_path: Path) -> None:
    calls = [["exportModel", {"outputs": [name]}] for name in ("hidden", "hiden")]
    exported, unknown = drive(with_frozen_file(), *calls)
    assert as_written_by_python(exported_model(exported)) == inference_model(tmp_path / "step0", outputs=["hidden"])
    assert unknown["message"].endswith("the model has no output 'hiden'; it has logits, hidden")


@pytest.mark.parametrize("make", [small, two_steps])
def test_checkpoints_go_from_javascript_to_python_and_back(
    make: Callable[[], Step], drive: Any, tmp_path: Path
) -> None:
    step, data = make(), batches()
    names = list(step.trains)
    trainer = gg.Trainer(step, device="cpu")
    calls = [["step", name, as_json(data[0])] for name in names]
    for name in names:
        trainer.step(*([name] if name else []), data[0])
    *_, saved = drive(step, *calls, ["checkpoint"])
    theirs = gg.Trainer.resume(step, saved["bytes"], device="cpu")
    assert theirs.progress.steps == len(names)
    assert theirs.progress.counts == trainer.progress.counts
    for name, value in trainer.state_dict().items():
        np.testing.assert_allclose(theirs.state_dict()[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    theirs.save(tmp_path / "python.ckpt")
    restored, state, again, *_ = drive(
        step, ["restore", {"file": str(tmp_path / "python.ckpt")}], ["keep"], ["checkpoint"]
    )
    assert restored["steps"] == len(names)
    for name, value in theirs.state_dict().items():
        assert np.array_equal(np.reshape(state["result"][name]["data"], state["result"][name]["dims"]), value)
    assert gg.Trainer.resume(step, again["bytes"], device="cpu").progress.counts == trainer.progress.counts


def test_it_goes_back_to_a_state(drive: Any) -> None:
    first, second = batches()[:2]
    rows = drive(
        small(), ["step", as_json(first)], ["keep"], ["step", as_json(second)], ["goBack"], ["step", as_json(second)],
        ["reset"], ["step", as_json(first)],
    )  # fmt: skip
    losses = [row["result"]["loss"] for row in rows if (row.get("result") or {}).get("loss")]
    assert losses[1] == losses[2]
    assert losses[0] == losses[3]


def test_weights_come_from_an_exported_model(drive: Any, tmp_path: Path) -> None:
    step, data = small(), batches()
    trainer = gg.Trainer(step, device="cpu")
    for batch in data:
        trainer.step(batch)
    trainer.export(tmp_path / "trained.onnx")
    taken, evaluated = drive(
        step, ["loadWeights", {"file": str(tmp_path / "trained.onnx")}], ["evaluate", as_json(data[0])]
    )
    assert set(taken["result"]) == {s.name for s in step.manifest.state if s.kind in ("parameter", "statistic")}
    np.testing.assert_allclose(evaluated["result"]["loss"], trainer.evaluate(data[0])["loss"], rtol=1e-5)


def test_named_steps_train_in_turn(drive: Any) -> None:
    step, data = two_steps(), batches()
    trainer = gg.Trainer(step, device="cpu")
    *rows, evaluated, unnamed = drive(
        step, *(["step", name, as_json(b)] for b in data for name in ("body", "head")), ["evaluate", as_json(data[0])],
        ["step", as_json(data[0])],
    )  # fmt: skip
    expected = [trainer.step(name, b) for b in data for name in ("body", "head")]
    for row, ours in zip(rows, expected, strict=True):
        assert row["result"].keys() == ours.keys()
        np.testing.assert_allclose(row["result"]["loss"], ours["loss"], rtol=1e-4)
    ours = trainer.evaluate(data[0])
    assert evaluated["result"].keys() == ours.keys()
    assert unnamed["message"] == "the step folder has several steps, 'body', 'head'; choose one: step(name, batch)"


def test_labels_that_are_ignored_do_not_count_in_means(drive: Any) -> None:
    step = gg.build(model(), gg.losses.cross_entropy(ignore_index=-100), "sgd", seed=0)
    data = batches()
    data[0]["target"][:4] = -100
    [evaluated] = drive(step, ["evaluate", [as_json(b) for b in data]])
    np.testing.assert_allclose(
        evaluated["result"]["loss"], gg.Trainer(step, device="cpu").evaluate(data)["loss"], rtol=1e-5
    )


def test_measures_are_finished_as_in_python() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.integers(0, 9, (4, 4)).astype(float)
    matrix[2], matrix[:, 2] = 0, 0  # a class that never occurs
    scores = np.concatenate([rng.integers(0, 5, (30, 4)), rng.integers(-1, 3, (30, 1))], 1).astype(float)
    answers = np.stack([rng.integers(0, 5, (30, 2)), rng.integers(-1, 2, (30, 2))], 1).astype(float)
    tables = rng.integers(0, 9, (3, 2, 2)).astype(float)
    moments = np.zeros((3, 7, 2))
    moments[0] = [[9, 9], [900, -45], [3, 1], [90000, 225], [600, -10], [8, 9], [2, 1]]
    cases: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        *((name, rng.random(2) + 1, {}) for name in ("ratio", "root", "exponential")),
        ("weighted_ratios", rng.random((3, 2)), {"weights": [1.0, 0.5, 2.0]}),
        ("r2", np.array([[9.0, 9.0], [3.0, 4.0], [8.0, 9.0], [2.0, 1.0]]), {}),
        ("confusion", matrix, {}),
        ("balanced_accuracy", matrix, {}),
        *((name, matrix, {"average": a}) for name in ("precision", "recall", "f1", "iou") for a in AVERAGES),
        ("mcc", matrix, {}),
        ("mcc", np.diag([5.0, 0.0]), {}),
        *(("cohen_kappa", matrix, {"weights": w}) for w in KAPPA_WEIGHTS),
        ("explained_variance", np.array([[9.0, 9.0], [3.0, 4.0], [8.0, 9.0], [2.0, 1.0], [3.0, 2.0]]), {}),
        ("r2_shifted", moments, {}),
        ("explained_variance_shifted", np.concatenate([moments[:, :6]] * 2, 1) * [[[2.0]] * 6 + [[1.0]] * 6], {}),
        *((f"label_{name}", tables, {"average": a}) for name in ("precision", "recall", "f1", "iou") for a in AVERAGES),
        ("calibration", np.array([[4.0, 0.0, 6.0], [1.5, 0.0, 5.0], [2.0, 0.0, 6.0]]), {}),
        *((name, rows, {"average": a, "probable": p}) for name in ("roc_auc", "average_precision") for a in AVERAGES
          for rows in (scores, answers) for p in (False, True)),
    ]  # fmt: skip
    assert {name for name, _, _ in cases} == FINISHES.keys()
    shapes = {"roc_auc": 1, "average_precision": 1}  # axes of rows before the shape
    data = [[{"finish": n, "shape": a.shape[shapes.get(n, 0) :], "arguments": given}, a.ravel().tolist()]
            for n, a, given in cases]  # fmt: skip
    script = (
        f"import {{ finished }} from {json.dumps(LIBRARY.with_name('measures.js').as_uri())};"
        f"for (const [measure, sums] of {json.dumps(data)}) console.log(JSON.stringify(finished(measure, sums)))"
    )
    command = ["node", "--input-type=module", "-e", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    for line, (name, sums, given) in zip(done.stdout.splitlines(), cases, strict=True):
        found = np.array(json.loads(line), float)  # NaN is null there
        np.testing.assert_allclose(found, FINISHES[name](sums, **given), rtol=1e-12, err_msg=name)


def test_the_types_name_what_is_there() -> None:
    """Every method and property in gradgraph.d.ts is one of the class, and every public method is typed."""
    types, code = LIBRARY.with_suffix(".d.ts").read_text(), LIBRARY.read_text()
    typed = {*re.findall(r"^  (?:readonly )?(\w+)(?=[(:])", types.partition("export class Trainer")[2], re.MULTILINE)}
    methods = {*re.findall(r"^  (?:async )?(\w+)\(.*\{$", code.partition("class Trainer")[2], re.MULTILINE)}
    typed -= {"constructor"}
    assert methods - {"constructor", "if", "for", "while"} == typed - {"manifest", "parts", "steps", "counts"}
    exports = lambda text: {*re.findall(r"^export (?:async )?(?:function|class) (\w+)", text, re.MULTILINE)}  # noqa: E731
    assert exports(types) - {"GradgraphError", "DivergedError"} == exports(code)


def test_types_accept_what_works_and_nothing_else() -> None:
    compiler = LIBRARY.parent / "page" / "node_modules" / ".bin" / "tsc"
    if not compiler.exists():
        pytest.skip("TypeScript is not installed: make browser")
    command = [str(compiler), "-p", str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "")


GOOD = as_json(batches()[0])
ERRORS = {
    "missing": ([{"x": GOOD["x"]}], "the batch lacks 'target'; add it"),
    "strange": ([{**GOOD, "y": 1}], "the step has no input 'y'; it has 'x', 'target'"),
    "no batch": ([[1, 2]], "a batch should be an object with the names 'x', 'target'"),
    "columns": ([{**GOOD, "x": [[1, 2, 3]] * 6}], "'x' has shape [6,3], but the step expects [batch,4]"),
    "rows": ([{**GOOD, "target": [0, 1]}], "'batch' is 2 in 'target' but 6 in 'x'"),
    "labels": ([{**GOOD, "target": [0, 1, 2, 3, 0, 1]}], "'target' has the label 3; expected 0 to 2"),
    "fraction": ([{**GOOD, "target": [0.5] * 6}], "'target' contains 0.5, which is not int64"),
    "text": ([{**GOOD, "x": [["1", 2, 3, 4]] * 6}], "'x' contains the text '1', which is not float32"),
    "nothing": ([{**GOOD, "x": [[None, 2, 3, 4]] * 6}], "'x' contains null, which is not float32"),
    "other type": ([{**GOOD, "x": {"type": "int32", "dims": [6, 4], "data": [0] * 24}}],
                   "'x' is int32, but the step expects float32"),
    "ragged": ([{**GOOD, "x": [[1, 2, 3, 4], [1]]}], "'x' has 5 numbers, which do not fill the shape [2,4]"),
    "uneven": ([{**GOOD, "x": [1, 2, 3]}], "'x' has 3 numbers, which do not fill the shape [batch,4]"),
    "rate": ([GOOD, {"learning_rat": 1}], "the step has no hyperparameter 'learning_rat'; it has 'learning_rate'"),
    "no number": ([GOOD, {"learning_rate": "high"}],
                  "the hyperparameter 'learning_rate' is the text 'high'; pass a number of 0 or more"),
    "a number in words": ([GOOD, {"learning_rate": "0.1"}],
                          "the hyperparameter 'learning_rate' is the text '0.1'; pass a number of 0 or more"),
    "negative": ([GOOD, {"learning_rate": -1}],
                 "the hyperparameter 'learning_rate' is -1; pass a number of 0 or more"),
    "a list": ([GOOD, {"learning_rate": [0.1]}],
               "the hyperparameter 'learning_rate' is 0.1; pass a number of 0 or more"),
    "named": (["body", GOOD],
              "the step folder has no step 'body'; it has a single step without a name: call step(batch)"),
}  # fmt: skip


def test_what_does_not_fit_is_said_in_one_sentence(drive: Any) -> None:
    rows = drive(small(), *(["step", *arguments] for arguments, _ in ERRORS.values()), ["step", GOOD])
    assert [row.get("message") for row in rows] == [*(message for _, message in ERRORS.values()), None]
    assert [row["steps"] for row in rows] == [0] * len(ERRORS) + [1]


def test_tensors_come_with_their_type_or_without(drive: Any) -> None:
    x = {"dims": [6, 4], "data": [n for row in GOOD["x"] for n in row]} if isinstance(GOOD["x"], list) else GOOD["x"]
    ways = [x, {"type": "float32", **x}, {"dtype": "float32", **x}]
    rows = drive(small(), ["keep"], *(c for way in ways for c in (["goBack"], ["step", {**GOOD, "x": way}])))
    assert len({row["result"]["loss"] for row in rows[2::2]}) == 1


def test_it_names_nothing_that_a_bundler_for_browsers_has_not() -> None:
    """Bundlers resolve each import that is written out, wherever it stands."""
    written = re.compile(
        r"""^(?:import|export|\}).*?["']([^"']+)["'];$|\bimport\(\s*["'`]([^"'`]+)["'`]""", re.MULTILINE
    )
    shipped = json.loads((LIBRARY.parent / "package.json").read_text(encoding="utf-8"))["files"]
    texts = [(LIBRARY.parent / f).read_text(encoding="utf-8") for f in shipped if f.endswith(".js")]
    named = {static or dynamic for text in texts for static, dynamic in written.findall(text)}
    assert named and named <= {f"./{f}" for f in shipped}


def test_a_loss_that_is_no_number_leaves_the_state(drive: Any) -> None:
    bad = {**GOOD, "x": {"dims": [6, 4], "data": [1e38] * 24}}
    before, failed, after = drive(small(), ["keep"], ["step", bad], ["keep"])
    assert failed["error"] == "DivergedError"
    assert failed["message"].startswith(
        "the loss became NaN in step 1 (the state before it is kept); lower the learning"
    )
    assert before == after


def test_damaged_files_are_refused(drive: Any, tmp_path: Path) -> None:
    step = small()
    [saved] = drive(step, ["checkpoint"])
    content = bytearray(Path(saved["bytes"]).read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(content)
    (tmp_path / "text.onnx").write_bytes(b"not a model")
    other = gg.build(model(), "cross_entropy", "sgd")
    damaged, text, foreign, disposed, after = drive(
        other, ["restore", {"file": str(tmp_path / "damaged.ckpt")}],
        ["loadWeights", {"file": str(tmp_path / "text.onnx")}], ["restore", {"file": saved["bytes"]}],
        ["dispose"], ["step", GOOD],
    )  # fmt: skip
    assert damaged["message"] == "the checkpoint cannot be used: the checkpoint is damaged; use an older one"
    assert text["message"].startswith("the model cannot be read: ")
    assert foreign["message"].startswith("the state has ")
    assert disposed["result"] is None
    assert after["message"] == "the trainer was disposed of; load the step again"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train.onnx", "x", "train.onnx was changed after it was saved; load it again, or build the step again"),
        ("manifest.json", "<html>", "manifest.json is not JSON; check that the address is that of a step folder"),
        ("manifest.json", '{"version": 99, "gradgraph": "9.0"}',
         "the step was written by gradgraph 9.0, manifest version 99; this library reads versions up to 1"),
        ("init.onnx", None, "cannot read '{f}/init.onnx' (ENOENT); pass the folder that gradgraph build wrote"),
    ],
)  # fmt: skip
def test_damaged_folders_are_refused(file: str, content: str | None, message: str, tmp_path: Path) -> None:
    folder, job = tmp_path / "step", tmp_path / "job.json"
    small().save(folder)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    job.write_text(json.dumps({"folder": str(folder), "options": {}, "calls": [["load"], ["step", GOOD]]}))
    command = ["node", str(Path(__file__).with_name("drive.mjs")), str(LIBRARY), str(ONNXRUNTIME), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    messages = [json.loads(line).get("message") for line in done.stdout.splitlines()]
    assert message.replace("{f}", str(folder)) in messages
