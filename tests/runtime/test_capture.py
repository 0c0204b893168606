"""Steps on a device and as CUDA graphs, on a pretended device whose memory is the host's.

What the CUDA provider does cannot be tested here; that the right things are bound, copied and numbered can.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

import gradgraph as gg
from gradgraph.backends.ort_cuda import ORT_CUDA
from gradgraph.errors import RuntimeUnavailableError
from gradgraph.frontend import export, manual_seed, nn
from gradgraph.runtime.execution import step_session
from gradgraph.runtime.execution import tuner as tune
from gradgraph.runtime.execution.capture import CapturedSession, capturing
from gradgraph.runtime.execution.session import CPU, CUDA, Placement, RuntimeOptions
from gradgraph.runtime.execution.state import Tensor
from gradgraph.runtime.trainer import Trainer
from gradgraph.step.manifest import StateSpec


class Pretended(Placement):
    """CUDA memory, forms for CUDA, and the CPU provider to run them."""

    @property
    def target(self) -> str:
        return ORT_CUDA


DEVICE = Pretended((CPU,), "cuda")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Memory of every device comes from the host; the devices that were asked for it."""
    asked: list[str] = []
    original = ort.OrtValue.ortvalue_from_shape_and_type

    def from_host(shape: Any, element: Any, device: str = "cpu", number: int = 0) -> ort.OrtValue:
        asked.append(device)
        return original(shape, element, "cpu", 0)

    monkeypatch.setattr(ort.OrtValue, "ortvalue_from_shape_and_type", staticmethod(from_host))
    monkeypatch.setattr(step_session, "capturing", lambda placement: placement)
    return asked


def classifier() -> gg.Step:
    manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    return gg.build(export(net, {"x": ("batch", 5)}), "cross_entropy", gg.optim.adamw(1e-2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 4), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0]).reshape(-1, 3)


def recurrent() -> gg.Step:
    manual_seed(0)
    return gg.build(export(Recurrent(), {"x": (4, 2, 5)}), "cross_entropy", gg.optim.sgd(0.1))


def batch(n: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 5)).astype(np.float32), "target": rng.integers(0, 3, n)}


def trainer(step: gg.Step, placement: Placement | None = None, **options: Any) -> Trainer:
    made = Trainer(step, device="cpu", options=RuntimeOptions(threads=1, native_kernels=False, **options))
    session = made._session
    session.placement = session.opener.placement = placement or session.placement
    return made


def session_of(t: Trainer, n: int) -> Any:
    part = t._session.part
    return part.of(t._session.data.batch_of(part, batch(n, 0), raw=False))


@pytest.mark.parametrize("cuda_graph", [False, True, "auto"])
def test_training_is_the_same_as_on_the_host(cuda_graph: Any, memory: list[str]) -> None:
    host, device = trainer(classifier()), trainer(classifier(), DEVICE, cuda_graph=cuda_graph)
    for i, n in enumerate([6, 6, 6, 4, 6]):  # the fourth runs in a session for any batch
        rate = 1e-2 if i < 2 else 1e-3
        expected, found = (t.step(batch(n, i), learning_rate=rate) for t in (host, device))
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
        assert found["accuracy"] == expected["accuracy"]
    for name, value in host.state_dict().items():
        np.testing.assert_allclose(device.state_dict()[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert set(memory) == {"cuda"}
    assert isinstance(session_of(device, 6), CapturedSession) == bool(cuda_graph)
    assert not isinstance(session_of(device, 4), CapturedSession)


class Recorder:
    """A session that tells how it was run."""

    def __init__(self, session: Any) -> None:
        self.session, self.graphs, self.bindings = session, [], []

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.graphs.append(options.get_run_config_entry("gpu_graph_id"))
        self.bindings.append(binding)
        self.session.run_with_iobinding(binding, options)


def test_each_set_of_state_has_its_graph_and_addresses_stay(memory: list[str]) -> None:
    t = trainer(classifier(), DEVICE, cuda_graph=True)
    session = session_of(t, 6)
    for i in range(2):
        t.step(batch(6, i))
    addresses = {name: value.data_ptr() for name, value in session._fixed.items()}
    assert addresses.keys() == {"x", "target", "learning_rate"}
    session.session = Recorder(session.session)
    for i in range(4):
        t.step(batch(6, i))
    assert session.session.graphs == ["1", "2", "1", "2"]
    assert len(set(map(id, session.session.bindings))) == 2
    assert {name: value.data_ptr() for name, value in session._fixed.items()} == addresses


def test_batches_on_the_device_are_copied_too(memory: list[str]) -> None:
    t, plain = trainer(classifier(), DEVICE, cuda_graph=True), trainer(classifier())
    for i in range(3):
        values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in batch(6, i).items()}
        np.testing.assert_allclose(t.step(values)["loss"], plain.step(batch(6, i))["loss"], rtol=1e-5)


def test_a_small_batch_of_the_host_is_copied_again_after_one_of_the_device(
    memory: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small arrays are compared with what was copied last, which lies there no more."""
    t, plain = trainer(classifier(), DEVICE, cuda_graph=True), trainer(classifier())
    first, second = batch(2, 0), batch(2, 1)
    values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in second.items()}
    t.step(first)
    with monkeypatch.context() as patch:
        patch.setattr(ort.OrtValue, "device_name", lambda value: "cuda")
        t.step(values)
    t.step(first)
    for given in (first, second, first):
        plain.step(given)
    for name, value in plain.state_dict().items():
        np.testing.assert_allclose(t.state_dict()[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_step_that_cannot_be_recorded_says_why(memory: list[str], caplog: pytest.LogCaptureFixture) -> None:
    data = {"x": np.zeros((4, 2, 5), np.float32), "target": np.zeros(8, np.int64)}
    with pytest.raises(RuntimeUnavailableError, match=r"cannot run as a CUDA graph because of Scan \(node '.*'\)"):
        trainer(recurrent(), DEVICE, cuda_graph=True).step(data)
    with caplog.at_level("INFO", "gradgraph"):
        assert np.isfinite(trainer(recurrent(), DEVICE, cuda_graph="auto").step(data)["loss"])
    assert "it runs kernel by kernel" in caplog.text


def test_cuda_graphs_need_cuda() -> None:
    with pytest.raises(RuntimeUnavailableError, match="choose device='cuda', or leave cuda_graph off"):
        trainer(classifier(), cuda_graph=True).step(batch(6, 0))
    assert np.isfinite(trainer(classifier(), cuda_graph="auto").step(batch(6, 0))["loss"])


def test_the_provider_is_told_to_record() -> None:
    plain = capturing(Placement((CUDA, CPU), "cuda"))
    assert plain.providers == ((CUDA, {"enable_cuda_graph": "1"}), CPU)
    second = capturing(replace(plain, providers=((CUDA, {"device_id": "1"}), CPU)))
    assert second.providers == ((CUDA, {"device_id": "1", "enable_cuda_graph": "1"}), CPU)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_state_on_a_device_is_written_and_read(dtype: str, memory: list[str]) -> None:
    values = np.array([[1, 2], [3, -4]], ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for array in (values, values[0, 0].reshape(())):
        tensor = Tensor(StateSpec("w", dtype, array.shape, next="w.next", kind="parameter"), DEVICE)
        tensor.write(array)
        assert tensor.read().dtype == array.dtype
        np.testing.assert_array_equal(tensor.read(), array)


def test_choices_are_kept_for_each_graphics_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 0, "NVIDIA H200\n")

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(tune.processes, "program", lambda name: f"/bin/{name}")
    monkeypatch.setattr(tune.processes, "run", told)
    assert tune.Tuner(ORT_CUDA, DEVICE)._machine.startswith("NVIDIA H200, ort-cuda")
    monkeypatch.setattr(tune.processes, "run", missing)
    assert tune.graphics_card(0) == "unknown CUDA device"
    monkeypatch.setattr(tune.processes, "program", lambda name: None)
    assert tune.graphics_card(0) == "unknown CUDA device"
