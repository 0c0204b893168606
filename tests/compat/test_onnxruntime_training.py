"""The drop-in for onnxruntime.training against what version 1.19.2 of it gave (see side_by_side.py)."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradgraph.compat.onnxruntime_training import api, artifacts, onnxblock
from gradgraph.compat.onnxruntime_training.saved import checkpoint_file, flatbuffer
from gradgraph.compat.onnxruntime_training.saved.checkpoint_file import read_checkpoint, write_checkpoint
from gradgraph.errors import CheckpointError, CompatibilityError, DifferentiationError, GradgraphError, UnknownNameError
from tests.compat import offline_flows, side_by_side
from tests.compat.offline_flows import MLP, batches, mlp

FLOWS = sorted(offline_flows.FLOWS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of onnxruntime-training, and what it saw."""
    folder = tmp_path_factory.mktemp("recorded")
    with zipfile.ZipFile(side_by_side.RECORDED) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Artifacts of ours, and what all flows see."""
    folder = tmp_path_factory.mktemp("ours")
    return folder, offline_flows.run(side_by_side.OURS, folder)


def of_flow(seen: dict[str, np.ndarray], flow: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in seen.items() if name.startswith(f"{flow}/")}


@pytest.mark.sweep(0.14)
@pytest.mark.parametrize("flow", FLOWS)
def test_flow_is_that_of_onnxruntime_training(
    flow: str, recorded: Path, ours: tuple[Path, dict[str, np.ndarray]]
) -> None:
    before = of_flow(side_by_side.seen_in(recorded), flow)
    assert before
    assert side_by_side.differences(before, of_flow(ours[1], flow)) == {}


def test_a_difference_is_noticed(recorded: Path) -> None:
    seen = side_by_side.seen_in(recorded)
    for name in ("offline_example/losses", "offline_example/weight:fc1.weight"):
        assert list(side_by_side.differences(seen, {**seen, name: seen[name] + 2e-4})) == [name]


# --- files of the old package -------------------------------------------------------------------------

OLD = {  # flow: what it trains on, its rate, and after how many batches weights move
    "offline_example": (lambda: batches(1, 24, (6, 12), classes=5), 1e-3, 1),
    "accumulated": (lambda: batches(6, 14, (6, 12), target=(3,)), 0.05, 3),
    "clipped_and_decayed": (lambda: batches(7, 16, (6, 12), target=(4,), binary=True), 0.02, 1),
    "own_loss": (lambda: batches(10, 16, (4, 5), classes=7, tokens=11), 0.01, 1),
    "images": (lambda: batches(11, 12, (8, 2, 8, 8), classes=3), 1e-3, 1),
    "sequences": (lambda: batches(17, 12, (5, 5, 6), classes=4, even=True), 0.01, 1),
    "last_layer": (lambda: batches(12, 8, (4, 5), classes=7, tokens=11), 1e-3, 1),
}


@pytest.mark.sweep(0.43)
@pytest.mark.parametrize("flow", OLD)
def test_artifacts_of_onnxruntime_training_train(flow: str, recorded: Path) -> None:
    data, rate, every = OLD[flow]
    prefix = "net_" if flow == "clipped_and_decayed" else ""
    files = {
        name: recorded / flow / f"{prefix}{name}"
        for name in ("checkpoint", "training_model.onnx", "optimizer_model.onnx")
    }
    state = api.CheckpointState.load_checkpoint(files["checkpoint"])
    module = api.Module(files["training_model.onnx"], state)
    optimizer = api.Optimizer(files["optimizer_model.onnx"], module)
    optimizer.set_learning_rate(rate)
    losses = offline_flows.trained(state, module, optimizer, data(), every)
    before = of_flow(side_by_side.seen_in(recorded), flow)
    seen = {f"{flow}/{k}": v for k, v in {"losses": losses, **offline_flows.weights_of(state)}.items()}
    assert side_by_side.differences({name: before[name] for name in seen}, seen) == {}


def test_an_old_eval_model_evaluates(recorded: Path) -> None:
    folder = recorded / "last_layer"
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx").eval()
    loss = module(*next(batches(13, 1, (4, 5), classes=7, tokens=11)))
    module.train()
    assert loss == pytest.approx(module(*next(batches(13, 1, (4, 5), classes=7, tokens=11))), abs=1e-6)


def test_every_checkpoint_is_read_and_written(recorded: Path, tmp_path: Path) -> None:
    files = [p for p in recorded.rglob("*") if p.name in ("checkpoint", "moments", "net_checkpoint")]
    assert len(files) > 8
    for file in files:
        before = read_checkpoint(file)
        assert before.trained
        assert not before.nominal
        for outside in (1 << 40, 0):
            write_checkpoint(before, tmp_path / "again", outside)
            after = read_checkpoint(tmp_path / "again")
            for part in ("trained", "frozen"):
                a, b = getattr(before, part), getattr(after, part)
                assert list(a) == list(b)
                assert all(np.array_equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)
            assert after.properties == before.properties
            assert {n: (g.step, g.initial_lr) for n, g in after.groups.items()} == {
                n: (g.step, g.initial_lr) for n, g in before.groups.items()
            }
    assert (tmp_path / "again.data").exists()


def test_moments_are_those_of_the_run(recorded: Path, ours: tuple[Path, dict[str, np.ndarray]]) -> None:
    before, after = (read_checkpoint(folder / "offline_example" / "moments") for folder in (recorded, ours[0]))
    assert before.groups["group0"].step == after.groups["group0"].step == 24
    for name, row in before.groups["group0"].moments.items():
        assert list(row) == ["momentum0", "momentum1"]
        for slot, array in row.items():
            np.testing.assert_allclose(after.groups["group0"].moments[name][slot], array, atol=1e-6)


def test_a_damaged_checkpoint_is_refused(recorded: Path, tmp_path: Path) -> None:
    content = (recorded / "offline_example" / "moments").read_bytes()
    rng = np.random.default_rng(0)
    damaged = [content[:n] for n in range(0, len(content), 97)]
    for _ in range(600):
        changed = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            changed[place] = rng.integers(0, 256)
        damaged.append(bytes(changed))
    refused = 0
    for number, bad in enumerate(damaged):
        file = tmp_path / "bad"
        file.write_bytes(bad)
        try:
            read_checkpoint(file)
        except CheckpointError as error:
            refused += 1
            assert len(str(error)) < 2000, number
    assert refused > 100


@pytest.mark.parametrize("dims", [[2**62, 2**62, 0], [-1], [2**40]])
def test_impossible_shapes_are_refused(dims: list[int], tmp_path: Path) -> None:
    tensor = {"name": "w", "dims": dims, "data_type": 1, "raw_data": b""}
    values = {"version": 2, "module_state": {"requires_grad_params": [tensor], "frozen_params": []}}
    content = flatbuffer.write(values, checkpoint_file._SCHEMA, "Checkpoint", checkpoint_file.IDENTIFIER)
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a checkpoint of onnxruntime-training"):
        read_checkpoint(tmp_path / "bad")


def test_a_folder_or_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="is not a file; pass the path of a checkpoint"):
            read_checkpoint(path)
    with pytest.raises(CheckpointError, match="No such file or directory; check its path"):
        read_checkpoint(tmp_path / "none")


def test_missing_data_beside_a_checkpoint_is_named(tmp_path: Path, recorded: Path) -> None:
    write_checkpoint(read_checkpoint(recorded / "offline_example" / "checkpoint"), tmp_path / "large", 0)
    (tmp_path / "large.data").unlink()
    with pytest.raises(CheckpointError, match=r"'.*large\.data', which cannot be read; put it in the same folder"):
        read_checkpoint(tmp_path / "large")


# --- ours ---------------------------------------------------------------------------------------------


def test_gradients_and_update_are_files_that_stock_sessions_run(ours: tuple[Path, dict[str, np.ndarray]]) -> None:
    """What another language does: buffers fed back, then the update; without a line of ours."""
    folder = ours[0] / "accumulated"
    training, update = (
        ort.InferenceSession(folder / f"{n}_model.onnx", providers=["CPUExecutionProvider"])
        for n in ("training", "optimizer")
    )
    checkpoint = read_checkpoint(folder / "checkpoint").trained
    buffers = {f"{n}_grad.accumulation": np.zeros_like(w) for n, w in checkpoint.items()}
    losses = []
    for i, (x, y) in enumerate(batches(6, 14, (6, 12), target=(3,)), 1):
        feeds = {"input": x, "target": y, "lazy_reset_grad": np.array([i % 3 == 1]), **checkpoint}
        feeds |= {f"{n}.buffer": value for n, value in buffers.items()}
        outputs = [o.name for o in training.get_outputs()]
        found = dict(zip(outputs, training.run(outputs, feeds), strict=True))
        losses.append(found[outputs[0]])
        buffers = {n: found[f"{n}.out"] for n in buffers}
        if i % 3 == 0:
            feeds = {"learning_rate": np.array([0.05], np.float32), "step": np.array([i // 3], np.int64), **checkpoint}
            feeds |= {f"{n}.buffer": value for n, value in buffers.items()}
            names = [i.name for i in update.get_inputs()]
            outputs = [o.name for o in update.get_outputs()]
            moved = dict(zip(outputs, update.run(outputs, {n: feeds[n] for n in names if n in feeds}), strict=True))
            checkpoint = {n: moved[f"{n}.next"] for n in checkpoint}
    np.testing.assert_allclose(losses, ours[1]["accumulated/losses"], atol=1e-6)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    artifacts.generate_artifacts(
        mlp(), requires_grad=MLP, loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW,
        artifact_directory=tmp_path, additional_output_names=["output"], nominal_checkpoint=True,
    )  # fmt: skip
    return tmp_path


def opened(files: Path, checkpoint: str = "checkpoint") -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    return offline_flows.opened(offline_flows.Training(side_by_side.OURS), files, checkpoint)


BATCH = next(batches(1, 1, (6, 12), classes=5))


def test_a_schedule_rises_and_falls(files: Path) -> None:
    _, module, optimizer = opened(files)
    schedule = api.LinearLRScheduler(optimizer, warmup_step_count=2, total_step_count=6, initial_lr=0.4)
    rates = [optimizer.get_learning_rate()]
    for _ in range(7):
        module(*BATCH)
        optimizer.step()
        module.lazy_reset_grad()
        schedule.step()
        rates.append(optimizer.get_learning_rate())
    np.testing.assert_allclose(rates, [0, 0.2, 0.4, 0.3, 0.2, 0.1, 0, 0], atol=1e-7)


def test_ortvalues_come_back_where_they_are_given(files: Path) -> None:
    _, module, _ = opened(files)
    loss, logits = module(*map(ort.OrtValue.ortvalue_from_numpy, BATCH))
    assert isinstance(loss, ort.OrtValue)
    assert logits.numpy().shape == (6, 5)
    assert isinstance(module(BATCH[0], ort.OrtValue.ortvalue_from_numpy(BATCH[1]))[0], np.ndarray)


def test_parameters_are_set_and_read(files: Path) -> None:
    state, module, _ = opened(files)
    names = [name for name, _ in state.parameters]
    assert names == sorted(MLP)
    assert len(state.parameters) == 4
    state.parameters["fc2.bias"] = np.arange(5, dtype=np.float32)
    state.parameters["fc1.bias"].data = np.ones(8, np.float32)
    assert state.parameters["fc2.bias"].data.tolist() == [0, 1, 2, 3, 4]
    first = module(*BATCH)[0]
    flat = module.get_contiguous_parameters()
    module.copy_buffer_to_parameters(flat, trainable_only=False)
    assert module(*BATCH)[0] == first
    assert repr(state.parameters["fc1.bias"]) == "Parameter(name=fc1.bias, requires_grad=True)"


def test_properties_are_numbers_and_words(files: Path, tmp_path: Path) -> None:
    state, _, _ = opened(files)
    given = {"a": 1, "b": 2.5, "c": "x", "d": True, "e": np.float32(0.25), "f": np.int64(3), "g": 2**40, "i": 1e300}
    for name, value in given.items():
        state.properties[name] = value
    api.CheckpointState.save_checkpoint(state, tmp_path / "saved")
    again = api.CheckpointState.load_checkpoint(tmp_path / "saved").properties
    assert dict(again) == {**given, "d": 1, "i": np.inf}
    assert "a" in again
    with pytest.raises(TypeError, match="an int, a float or a str, not list"):
        again["a"] = [1]


def test_a_nominal_state_is_filled_first(files: Path) -> None:
    state, module, optimizer = opened(files, "nominal_checkpoint")
    _, whole, _ = opened(files)
    for call in (lambda: module(*BATCH), optimizer.step, module.get_contiguous_parameters):
        with pytest.raises(CompatibilityError, match="has no values; fill it first"):
            call()
    with pytest.raises(CompatibilityError, match="all parameters are required"):
        module.copy_buffer_to_parameters(whole.get_contiguous_parameters(True))
    module.copy_buffer_to_parameters(whole.get_contiguous_parameters(), trainable_only=False)
    assert module(*BATCH)[0] == whole(*BATCH)[0]
    optimizer.step()
    assert state.parameters["fc1.bias"].data.shape == (8,)


def test_batches_of_other_sizes_train(files: Path) -> None:
    _, module, _ = opened(files)
    for rows in (6, 3, 6, 1):
        module.lazy_reset_grad()
        x, y = BATCH[0][:rows], BATCH[1][:rows]
        assert module(x, y)[1].shape == (rows, 5)


def test_options_of_onnxruntime_are_taken(files: Path, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    state = api.CheckpointState.load_checkpoint(files / "checkpoint")
    module = api.Module(files / "training_model.onnx", state, session_options=options)
    module(*BATCH)
    assert list(tmp_path.glob("profile*"))


def test_the_number_of_a_formula_stays(ours: tuple[Path, dict[str, np.ndarray]]) -> None:
    """All initializers are named as frozen, but a shape is part of the training model."""
    state, _, _ = offline_flows.opened(offline_flows.Training(side_by_side.OURS), ours[0] / "last_layer")
    state.parameters["flat"].data = state.parameters["flat"].data
    with pytest.raises(CompatibilityError, match="the value of 'flat' is a constant"):
        state.parameters["flat"].data = np.array([7, 7], np.int64)


def test_batch_norm_in_evaluation_form_says_how_it_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = offline_flows.cnn(training_mode=0)
    artifacts.generate_artifacts(
        base, ["fc.weight"], ["bn.mean", "bn.var"], artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path
    )
    assert (
        "'BatchNormalization_1') trains with its running statistics; export the model in training mode" in caplog.text
    )
    state, module, _ = opened(tmp_path)
    loss = module(*(batch := next(batches(11, 1, (8, 2, 8, 8), classes=3))))
    assert loss == pytest.approx(module.eval()(*batch), abs=1e-6)
    assert (state.parameters["bn.mean"].data == np.float32(0.1)).all()


def test_a_file_for_reduced_runtimes_is_refused(tmp_path: Path, files: Path) -> None:
    artifacts.generate_artifacts(
        mlp(), MLP, loss=artifacts.LossType.MSELoss, ort_format=True, artifact_directory=tmp_path
    )
    assert (tmp_path / "eval_model.ort").read_bytes()[4:8] == b"ORTM"
    assert "Gemm" in (tmp_path / "required_operators.config").read_text()
    state = api.CheckpointState.load_checkpoint(files / "checkpoint")
    with pytest.raises(CompatibilityError, match=r"use the \.onnx file that generate_artifacts wrote next to it"):
        api.Module(tmp_path / "training_model.ort", state)


def test_the_first_output_is_the_loss_where_none_is_given(tmp_path: Path) -> None:
    base = mlp(1, 3)
    base.graph.node.append(onnx.helper.make_node("ReduceMean", ["output"], ["loss"], "mean", keepdims=0))
    base.graph.output.insert(0, onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    (tmp_path / "base.onnx").write_bytes(base.SerializeToString())
    artifacts.generate_artifacts(
        str(tmp_path / "base.onnx"), MLP, optimizer=artifacts.OptimType.SGD, artifact_directory=tmp_path
    )
    state, module, optimizer = opened(tmp_path)
    assert module.output_names() == ["loss", "output"]
    loss, output = module(BATCH[0])
    assert loss == pytest.approx(output.mean(), abs=1e-6)
    before = state.parameters["fc2.bias"].data
    optimizer.step()
    np.testing.assert_allclose(before - state.parameters["fc2.bias"].data, 1e-3 / 3, rtol=1e-3)


def test_classes_have_weights(tmp_path: Path) -> None:
    weight = np.array([1, 2, 3, 4, 5], np.float32)
    loss = onnxblock.loss.CrossEntropyLoss(weight=weight, reduction="sum")
    artifacts.generate_artifacts(mlp(), MLP, loss=loss, artifact_directory=tmp_path, additional_output_names=["output"])
    _, module, _ = opened(tmp_path)
    found, logits = module(*BATCH)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert found == pytest.approx(-(weight[BATCH[1]] * log_p[np.arange(6), BATCH[1]]).sum(), rel=1e-5)


def test_blocks_are_what_their_names_say(tmp_path: Path) -> None:
    """A loss that has one of each block."""
    b = onnxblock.blocks
    table = {"keys_int64s": [0, 1, 2, 3, 4], "values_floats": [0.5, 1.0, 1.5, 2.0, 2.5]}

    class Everything(onnxblock.Block):
        def build(self, output: str) -> str:
            shift = b.InputLike("output")("shift")
            chance = b.Sigmoid()(b.Add()(output, shift))
            entropy = b.Neg()(b.Mul()(chance, b.Log()(b.Clip(1e-3, None)(chance))))
            square = b.Pow(2.0)(b.Sub()(entropy, b.Constant(0.1)()))
            norm = b.ReduceAllL2()(square, entropy)
            whole = b.Div()(b.ReduceSum(keepdims=False)(b.Abs()(square)), norm)
            looked_up = b.LabelEncoder(**table)(b.Cast(onnx.TensorProto.INT64)(b.Clip(0, 4)(output)))
            return b.Add()(whole, b.ReduceMean(keepdims=False)(b.Linear(5, 2)(looked_up)))

    np.random.seed(3)
    artifacts.generate_artifacts(
        mlp(), MLP, loss=Everything(), artifact_directory=tmp_path, additional_output_names=["output"]
    )
    np.random.seed(3)
    weight, bias = np.random.randn(5, 2).astype(np.float32), np.random.randn(2).astype(np.float32)
    _, module, _ = opened(tmp_path)
    shift = np.linspace(-1, 1, 30, dtype=np.float32).reshape(6, 5)
    loss, output = module(BATCH[0], shift)
    chance = 1 / (1 + np.exp(-(output + shift)))
    entropy = -chance * np.log(np.maximum(chance, 1e-3))
    square = (entropy - 0.1) ** 2
    whole = square.sum() / np.sqrt((square**2).sum() + (entropy**2).sum())
    looked_up = np.array(table["values_floats"], np.float32)[np.clip(output, 0, 4).astype(np.int64)]
    assert loss.item() == pytest.approx(whole + (looked_up @ weight + bias).mean(), rel=1e-4)
    assert module.input_names() == ["input", "shift"]


def test_a_library_of_operators_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="there is no library"):
        artifacts.generate_artifacts(mlp(), MLP, artifact_directory=tmp_path, custom_op_library=tmp_path / "no.so")
    assert not list(tmp_path.iterdir())


class Asked:
    """What a user has, and what each of these calls asks for in vain."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, [folder / f"{n}_model.onnx" for n in ("training", "eval")]
        self.state, self.module, self.optimizer = opened(folder)

    def generate(self, **arguments: object) -> None:
        given = {"requires_grad": MLP, "artifact_directory": self.folder, **arguments}
        base = mlp()
        base.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "lonely"))
        artifacts.generate_artifacts(base, **given)  # type: ignore[arg-type]

    def assign(self, array: np.ndarray) -> None:
        self.state.parameters["fc1.bias"].data = array

    def only_training(self) -> api.Module:
        return api.Module(self.paths[0], self.state).eval()

    def other_checkpoint(self) -> None:
        self.state._state.parameters["fc1.bias"].requires_grad = False
        api.Module(self.paths[0], self.state)

    def export(self, *names: str) -> None:
        self.module.export_model_for_inferencing(self.folder / "x.onnx", list(names))

    def strange_optimizer(self) -> None:
        block = onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(1.0))
        with onnxblock.empty_base():
            block(([onnx.numpy_helper.from_array(np.ones(2, np.float32), "w")], []))
            model = block._model
            assert model is not None
            model.graph.node.append(onnx.helper.make_node("Neg", ["learning_rate"], ["x"], "extra"))
            block.to_model_proto()


VECTOR = ort.OrtValue.ortvalue_from_numpy(np.zeros(72, np.float32))
CALLS: dict[str, Callable[[Asked], object]] = {
    "inputs": lambda it: it.module(BATCH[0]),
    "list": lambda it: it.module(BATCH[0].tolist(), BATCH[1]),
    "type": lambda it: it.module(BATCH[0], BATCH[1].astype(np.float32)),
    "no eval model": lambda it: it.only_training()(*BATCH),
    "nothing to export": lambda it: it.only_training().export_model_for_inferencing("x.onnx", ["output"]),
    "no output": lambda it: it.export(),
    "other output": lambda it: it.export("outptu"),
    "shape": lambda it: it.assign(BATCH[0]),
    "buffer": lambda it: it.module.copy_buffer_to_parameters(VECTOR),
    "axes": lambda it: it.module(BATCH[0][0], BATCH[1]),
    "other checkpoint": lambda it: it.other_checkpoint(),
    "no optimizer": lambda it: api.Optimizer(it.paths[1], it.module),
    "device": lambda it: api.Module(it.paths[0], it.state, device="npu"),
    "both": lambda it: it.generate(frozen_params=["fc1.bias"]),
    "nothing to train": lambda it: it.generate(requires_grad=[]),
    "unknown parameter": lambda it: it.generate(requires_grad=["fc1.weigth"], loss=artifacts.LossType.MSELoss),
    "loss": lambda it: it.generate(loss="mse"),
    "reduction": lambda it: onnxblock.loss.MSELoss(reduction="none"),
    "outside": lambda it: onnxblock.blocks.Add()("a", "b"),
    "optimizer": lambda it: it.strange_optimizer(),
    "no reader": lambda it: it.generate(requires_grad=["lonely"], loss=artifacts.LossType.MSELoss),
}
REFUSALS = {
    "inputs": r"the model expects 2 inputs \('input', 'labels'\), but got 1",
    "list": r"the input 'input' is list; pass an array or an OrtValue",
    "type": r"running the model failed",
    "no eval model": r"has no eval model; pass eval_model_uri",
    "nothing to export": r"has no eval model; pass eval_model_uri",
    "no output": r"no output is named; pass a list of names",
    "other output": r"the eval model has no value 'outptu'; did you mean 'output'\?",
    "shape": r"'fc1.bias' is float32 of shape \[8\], but got float32 of shape \[6, 12\]",
    "buffer": r"the buffer has 72 numbers of float32; expected 149 of float32",
    "axes": r"'input' has rank 1, but the model expects \('batch', 12\); reshape it",
    "other checkpoint": r"do not belong together: only one of them trains 'fc1.bias'",
    "no optimizer": r"not an optimizer model for 'fc1.bias'; use the optimizer_model.onnx",
    "device": r"there is no device 'npu'; use cpu, cuda or cuda:0",
    "both": r"trained or frozen, but both lists name 'fc1.bias'",
    "nothing to train": r"no parameters to train; pass names in requires_grad",
    "unknown parameter": r"no parameter 'fc1.weigth'; did you mean 'fc1.weight'\?",
    "loss": r"the loss must be a LossType or an onnxblock.Block .* not str",
    "reduction": r"training requires one; use 'mean'",
    "outside": r"within `with onnxblock.base\(model\):`",
    "no reader": r"does not depend on 'lonely': nothing reads it; remove it from requires_grad",
    "optimizer": r"a node Neg \('extra'\) cannot be converted to standard nodes",
}


@pytest.mark.parametrize("change", REFUSALS)
def test_refusals(change: str, files: Path) -> None:
    it = Asked(files)
    with pytest.raises(GradgraphError, match=REFUSALS[change]) as caught:
        CALLS[change](it)
    if not isinstance(caught.value, UnknownNameError | DifferentiationError) and change != "type":
        assert isinstance(caught.value, RuntimeError)  # as onnxruntime-training raised


# --- beside each other --------------------------------------------------------------------------------


@pytest.mark.skipif(not side_by_side.PYTHON.exists(), reason="make onnxruntime-training installs it")
def test_side_by_side(tmp_path: Path) -> None:
    assert side_by_side.compare(tmp_path) == {}
