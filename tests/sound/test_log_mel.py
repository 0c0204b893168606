"""Log-mel spectrograms as nodes are those of the formulas, frame by frame, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import gradgraph as gg
from gradgraph.errors import ModelError, UnknownNameError
from gradgraph.sound.log_mel import frames_of
from gradgraph.sound.mel_filters import CONVENTIONS, bases, filters

FLOAT = TensorProto.FLOAT


def identity(shape: list[Any], dtype: int = FLOAT) -> onnx.ModelProto:
    """A model that gives its spectrogram."""
    value = helper.make_tensor_value_info("mel", dtype, shape)
    result = helper.make_tensor_value_info("y", dtype, shape)
    graph = helper.make_graph([helper.make_node("Identity", ["mel"], ["y"])], "g", [value], [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto, samples: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"samples": samples})[0])


def sounds(rate: int = 16000, dtype: Any = np.float32) -> np.ndarray:
    """A chirp, noise, a tone, and near silence: [4, samples]."""
    rng, t = np.random.default_rng(0), np.arange(rate // 2 + 3) / rate
    noise = rng.normal(size=(2, len(t)))
    made = [np.sin(2 * np.pi * (200 + 1500 * t) * t) / 2 + noise[0] / 100, noise[1] / 10, np.sin(2 * np.pi * 440 * t),
            noise[0] * 1e-4]  # fmt: skip
    return np.stack(made).astype(dtype)


# --- the formulas, written down once more --------------------------------------------------------------------


def slaney(hertz: float) -> float:
    return hertz / (200 / 3) if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4)


def slaney_hertz(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def bank(rate: int, size: int, mels: int, convention: str, low: float = 0.0) -> np.ndarray:
    """Triangles, one after the other, as the libraries' documentation draws them."""
    scale = {"torchaudio": lambda f: 2595 * np.log10(1 + f / 700), "kaldi": lambda f: 1127 * np.log(1 + f / 700)}
    to_mel = scale.get(convention, slaney)
    marks = np.linspace(to_mel(low), to_mel(rate / 2), mels + 2)
    rows = []
    for left, middle, right in zip(marks, marks[1:], marks[2:], strict=False):
        row = []
        for bin_ in range(size // 2 + 1):
            x, corners = bin_ * rate / size, (left, middle, right)
            if convention == "kaldi":
                x = to_mel(x)
            elif convention == "torchaudio":
                corners = tuple(700 * (10 ** (m / 2595) - 1) for m in corners)
            else:
                corners = tuple(slaney_hertz(m) for m in corners)
            a, b, c = corners
            height = max(0.0, min((x - a) / (b - a), (c - x) / (c - b)))
            is_normed = convention in ("whisper", "librosa")
            row.append(height * 2 / (c - a) if is_normed else height)
        rows.append(row)
    return np.array(rows)


def reference(samples: np.ndarray, convention: str, rate: int, n_fft: int, hop: int, mels: int) -> np.ndarray:
    """One sound [samples] -> [mels, frames]."""
    x = samples.astype(np.float64)
    if convention != "kaldi":
        x = np.pad(x, n_fft // 2, mode="constant" if convention == "librosa" else "reflect")
    frames = np.stack([x[i : i + n_fft] for i in range(0, len(x) - n_fft + 1, hop)])
    if convention == "kaldi":
        frames = frames - frames.mean(axis=1, keepdims=True)
        frames = frames - 0.97 * np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
        size = 2 ** int(np.ceil(np.log2(n_fft)))
        energy = np.abs(np.fft.rfft(frames * np.hanning(n_fft) ** 0.85, size)) ** 2
        energies = bank(rate, size, mels, convention, low=20)[:, :-1] @ energy.T[:-1]
        return np.log(np.maximum(energies, np.finfo(np.float32).eps))
    energy = np.abs(np.fft.rfft(frames * np.hanning(n_fft + 1)[:-1])) ** 2
    if convention == "whisper":
        energy = energy[:-1]
    logs = np.log10(np.maximum(bank(rate, n_fft, mels, convention) @ energy.T, 1e-10))
    if convention == "whisper":
        return (np.maximum(logs, logs.max() - 8) + 4) / 4
    return np.maximum(10 * logs, 10 * logs.max() - 80) if convention == "librosa" else 10 * logs


SIZES = [(16000, 400, 160, 80), (8000, 256, 80, 40), (22050, 511, 200, 23)]


@pytest.mark.sweep(0.35)
@pytest.mark.parametrize("rate,n_fft,hop,mels", SIZES)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_nodes_are_the_formula(convention: str, rate: int, n_fft: int, hop: int, mels: int) -> None:
    model = gg.sound.log_mel(
        identity(["b", "m", "t"]), convention, sample_rate=rate, n_fft=n_fft, hop=hop, mels=mels, time_first=False
    )
    samples = sounds(rate)
    found = run(model, samples)
    expected = np.stack([reference(one, convention, rate, n_fft, hop, mels) for one in samples])
    assert found.shape == expected.shape
    assert found.shape[2] == frames_of(CONVENTIONS[convention], samples.shape[1], n_fft, hop)
    # in float32, quiet bands beside a loud tone have its rounding errors: those are left out of the narrow comparison
    quiet = expected < expected.max(axis=(1, 2), keepdims=True) - {"whisper": 1.4, "kaldi": 13}.get(convention, 56)
    assert np.abs(found - expected)[~quiet].max() < {"whisper": 1e-4, "kaldi": 1e-2}.get(convention, 5e-3)


@pytest.mark.parametrize("rate,n_fft,hop,mels", SIZES)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_bases_and_filters_are_exact(convention: str, rate: int, n_fft: int, hop: int, mels: int) -> None:
    """In float64, where nothing is lost: the transform of a frame, and each triangle."""
    how, frame = CONVENTIONS[convention], np.random.default_rng(0).normal(size=n_fft) + 3
    real, imaginary = bases(how, n_fft)
    size = 2 * (len(real) - 1) + n_fft % 2 if convention != "kaldi" else 2 * (len(real) - 1)
    if convention == "kaldi":
        frame_ = frame - frame.mean()
        frame_ = (frame_ - 0.97 * np.append(frame_[0], frame_[:-1])) * np.hanning(n_fft) ** 0.85
    else:
        frame_ = frame * np.hanning(n_fft + 1)[:-1]
    assert np.abs(real @ frame + 1j * imaginary @ frame - np.fft.rfft(frame_, size)).max() < 1e-9
    low = 20.0 if convention == "kaldi" else 0.0
    expected = bank(rate, size, mels, convention, low)
    expected[:, -1] *= convention != "kaldi"
    assert np.abs(filters(how, n_fft, rate, mels, low, rate / 2) - expected).max() < 1e-12


@pytest.mark.parametrize("dtype", [TensorProto.DOUBLE, TensorProto.FLOAT16])
def test_models_of_other_types_get_theirs(dtype: int) -> None:
    arguments: dict[str, Any] = {"n_fft": 64, "hop": 32, "mels": 8, "sample_rate": 4000}
    plain, other = (gg.sound.log_mel(identity(["b", "m", "t"], kind), **arguments) for kind in (FLOAT, dtype))
    samples = sounds(4000)[:, :300]
    found = run(other, samples)
    assert found.dtype == helper.tensor_dtype_to_np_dtype(dtype)
    assert np.abs(found - run(plain, samples)).max() < 1e-3


def test_scale_mean_and_deviation() -> None:
    arguments: dict[str, Any] = {"n_fft": 64, "hop": 32, "mels": 8, "sample_rate": 4000}
    plain = gg.sound.log_mel(identity(["b", "t", "m"]), "kaldi", **arguments)
    scaled = gg.sound.log_mel(identity(["b", "t", "m"]), "kaldi", scale=32768.0, mean=3.0, std=2.0, **arguments)
    samples = sounds(4000)[:, :300]
    assert np.abs(run(scaled, samples) - (run(plain, samples * 32768) - 3) / 2).max() < 1e-4


# the shape that a model takes, whether frames come first, the shape of its samples
LAYOUTS: list[tuple[str, list[Any], list[Any], tuple[int, ...]]] = [
    ("whisper", ["b", 8, "t"], ["b", "samples"], (3, 8, 10)),
    ("whisper", ["b", 1, 8, "t"], ["b", "samples"], (3, 1, 8, 10)),
    ("whisper", ["b", "t", 8], ["b", "samples"], (3, 10, 8)),
    ("whisper", ["b", 8, 7], ["b", 7 * 32], (3, 8, 7)),
    ("librosa", [3, 1, 8, 7], [3, 6 * 32], (3, 1, 8, 7)),
    ("torchaudio", ["b", 8, 7], ["b", 6 * 32], (3, 8, 7)),
    ("kaldi", ["b", "t", 8], ["b", "samples"], (3, 9, 8)),
    ("kaldi", ["b", 1, 7, 8], ["b", 6 * 32 + 64], (3, 1, 7, 8)),
    ("kaldi", ["b", 8, "t"], ["b", "samples"], (3, 8, 9)),
    ("kaldi", ["b", "t", "m"], ["b", "samples"], (3, 9, 8)),
]


@pytest.mark.parametrize(("convention", "takes", "samples", "gives"), LAYOUTS)
def test_the_spectrogram_lies_as_the_model_takes_it(
    convention: str, takes: list[Any], samples: list[Any], gives: tuple[int, ...]
) -> None:
    model = gg.sound.log_mel(identity(takes), convention, n_fft=64, hop=32, mels=8, sample_rate=4000)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == samples
    count = samples[1] if isinstance(samples[1], int) else 320
    assert run(model, sounds(4000)[:3, :count]).shape == gives


def test_its_numbers_are_never_trained(tmp_path: Any) -> None:
    weight = onnx.numpy_helper.from_array(np.ones((8, 2), np.float32), "w")
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["mel", "axes"], ["m"], keepdims=0),
            helper.make_node("MatMul", ["m", "w"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("mel", FLOAT, ["b", 8, "t"])],
        [helper.make_tensor_value_info("y", FLOAT, ["b", 2])],
        [weight, onnx.numpy_helper.from_array(np.array([2]), "axes")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(gg.sound.log_mel(model, n_fft=64, hop=32, mels=8, sample_rate=4000), tmp_path / "m.onnx")
    step = gg.build(tmp_path / "m.onnx", "cross_entropy")
    assert list(step.manifest.trainable) == ["w"]
    assert step.manifest.data.sounds == {"samples": {"rate": 4000}}
    trainer = gg.Trainer(step)
    trainer.step({"samples": sounds(4000)[:, :320], "target": np.array([0, 1, 1, 0])})
    trainer.export(tmp_path / "trained.onnx")
    before = {node.name: node for node in onnx.load(tmp_path / "m.onnx").graph.node if node.op_type == "Constant"}
    assert len(before) > 5
    found = run(onnx.load(tmp_path / "trained.onnx"), sounds(4000)[:, :320])
    trained = trainer.state_dict()["w"]
    mel = run(
        gg.sound.log_mel(identity(["b", 8, "t"]), n_fft=64, hop=32, mels=8, sample_rate=4000), sounds(4000)[:, :320]
    )
    assert np.abs(found - mel.mean(axis=2) @ np.asarray(trained)).max() < 1e-5


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_gradients_by_samples_agree_with_differences(convention: str) -> None:
    """Of a weighted sum of the spectrogram, along a random direction; in float32, as Conv has no other."""
    model = gg.sound.log_mel(identity(["b", "m", "t"]), convention, n_fft=16, hop=8, mels=4, sample_rate=4000,
                             time_first=False)  # fmt: skip
    gradient = gg.vjp(model, outputs="y", wrt="samples")
    rng = np.random.default_rng(0)
    samples, direction = rng.normal(size=(2, 2, 60)).astype(np.float32)
    session = ort.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    cotangent = rng.normal(size=run(model, samples).shape).astype(np.float32)
    names = [o.name for o in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"samples": samples, "y.cotangent": cotangent}), strict=True))
    step = np.float32(1e-3)
    values = [(run(model, samples + sign * step * direction).astype(np.float64) * cotangent).sum() for sign in (1, -1)]
    expected = (values[0] - values[1]) / (2 * step)
    assert (found["samples.grad"] * direction).sum() == pytest.approx(expected, rel=2e-3)


WRONG: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    (["b", 8, "t"], {"convention": "wisper"}, UnknownNameError, "did you mean 'whisper'"),
    (["b", 8, "t"], {"mels": 9}, ModelError, "does not have 9 bands"),
    (["b", 8, "t"], {"mels": 8, "time_first": True, "input": "x"}, UnknownNameError, "no input 'x'"),
    (["b", 8], {"mels": 8}, ModelError, "0 inputs of the model are a floating-point spectrogram"),
    (["b", 3, 8, "t"], {"mels": 8, "input": "mel"}, ModelError, "the input 'mel' is not a floating-point spectrogram"),
    (["b", 8, "t"], {"mels": 8, "low": 9000.0}, ModelError, "the frequency range is 9000 to 8000 Hz"),
    (["b", 8, "t"], {"mels": 8, "std": 0}, ModelError, "std is 0"),
]


@pytest.mark.parametrize(("takes", "given", "kind", "message"), WRONG)
def test_what_does_not_fit_is_said(
    takes: list[Any], given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        gg.sound.log_mel(identity(takes), **given)
