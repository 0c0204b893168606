"""External data are read from the model's folder and below, from regular files, within their range."""

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import gradgraph as gg
from gradgraph.errors import ModelError
from gradgraph.files.models import load_model, save_model
from tests.kit.raw_models import external_model


def _saved(tmp_path, proto, data=b"\0" * 12, name="w.bin"):
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    if data is not None:
        (folder / name).write_bytes(data)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


ESCAPES = ["../w.bin", "a/../../w.bin", "/etc/passwd", "/dev/zero", "C:\\w.bin", "\\\\host\\share\\w", "..\\w.bin", ""]


@pytest.mark.parametrize("location", ESCAPES)
def test_external_data_outside_the_folder_are_refused(tmp_path, location):
    (tmp_path / "w.bin").write_bytes(bytes(12))
    with pytest.raises(ModelError, match=r"out of the folder|names no file"):
        load_model(_saved(tmp_path, external_model(location)))


RANGES = [
    ({"offset": -4, "length": 12}, "from byte -4"),
    ({"offset": 4, "length": 12}, "end at byte 16, but the file has 12 bytes"),
    ({"length": 2**50}, "its type and shape need 12"),
    ({"length": 8}, "span 8 bytes"),
    ({"offset": "one"}, "that is not a number"),
    ({"offset": 2**62}, "end at byte"),
]


@pytest.mark.parametrize(("entries", "message"), RANGES, ids=[m for _, m in RANGES])
def test_ranges_of_external_data_are_checked(tmp_path, entries, message):
    with pytest.raises(ModelError, match=message):
        load_model(_saved(tmp_path, external_model("w.bin", **entries)))


def _symlink_out(folder):
    (folder / "w.bin").unlink()
    (folder.parent / "secret").write_bytes(bytes(12))
    (folder / "w.bin").symlink_to("../secret")


def _hard_link(folder):
    os.link(folder / "w.bin", folder.parent / "other")


def _fifo(folder):
    (folder / "w.bin").unlink()
    os.mkfifo(folder / "w.bin")


def _folder(folder):
    (folder / "w.bin").unlink()
    (folder / "w.bin").mkdir()


def _missing(folder):
    (folder / "w.bin").unlink()


KINDS = [
    (_symlink_out, "symlink out of the folder"),
    (_hard_link, "hard link"),
    (_fifo, "not a regular file"),
    (_folder, "it is a folder"),
    (_missing, "are missing"),
]


@pytest.mark.parametrize(("change", "message"), KINDS, ids=[m for _, m in KINDS])
def test_only_regular_files_of_the_folder_hold_external_data(tmp_path, change, message):
    path = _saved(tmp_path, external_model("w.bin"))
    change(path.parent)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert "'w'" in str(caught.value)


def test_external_data_are_read_from_the_folder_and_below(tmp_path):
    data = np.arange(3, dtype=np.float32)
    path = _saved(tmp_path, external_model("w.bin", offset=4, length=12), b"skip" + data.tobytes())
    assert load_model(path).graph.initializers["w"].const_value.numpy().tolist() == [0, 1, 2]
    proto = onnx.load(path, load_external_data=False)
    assert load_model(proto, base_dir=path.parent).graph.initializers["w"].const_value.numpy().tolist() == [0, 1, 2]


def test_the_layout_of_download_caches_is_read(tmp_path):
    """snapshots/<revision>/model.onnx -> ../../blobs/<hash>, and its data likewise."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_bytes(external_model("model.onnx_data").SerializeToString())
    (blobs / "5678").write_bytes(np.ones(3, np.float32).tobytes())
    (snapshot / "model.onnx").symlink_to("../../blobs/1234")
    (snapshot / "model.onnx_data").symlink_to("../../blobs/5678")
    assert load_model(snapshot / "model.onnx").graph.initializers["w"].const_value.numpy().sum() == 3
    (snapshot / "model.onnx_data").unlink()
    (tmp_path / "secret").write_bytes(bytes(12))
    (snapshot / "model.onnx_data").symlink_to("../../secret")
    with pytest.raises(ModelError, match="symlink out of"):
        load_model(snapshot / "model.onnx")


def test_external_data_are_brought_in_when_a_model_moves(tmp_path):
    path = _saved(tmp_path, external_model("w.bin"), np.ones(3, np.float32).tobytes())
    save_model(load_model(path), tmp_path / "copy.onnx")
    assert load_model(tmp_path / "copy.onnx").graph.initializers["w"].const_value.numpy().sum() == 3


@pytest.mark.parametrize("transform", [gg.vjp, gg.jvp], ids=["vjp", "jvp"])
def test_gradients_of_a_model_with_external_data_are_complete_files(tmp_path, transform):
    path = _saved(tmp_path, external_model("w.bin"), np.full(3, 2.0, np.float32).tobytes())
    found = transform(path, wrt="w")
    assert [t.data_location for t in found.graph.initializer] == [TensorProto.DEFAULT] * len(found.graph.initializer)
    assert {t.name: onnx.numpy_helper.to_array(t).tolist() for t in found.graph.initializer}["w"] == [2, 2, 2]


def test_a_model_with_external_data_becomes_a_step_that_stands_alone(tmp_path):
    path = _saved(tmp_path, external_model("w.bin"), np.full(3, 2.0, np.float32).tobytes())
    trainer = gg.Trainer(gg.build(path, "mse", gg.optim.sgd(0.1)).save(tmp_path / "step"), device="cpu")
    (path.parent / "w.bin").unlink()
    trainer.step({"x": np.zeros((2, 3), np.float32), "target": np.zeros((2, 3), np.float32)})
    assert trainer.parameters["w"] == pytest.approx(2.0 - 0.1 * 2 * 2.0 / 3)
