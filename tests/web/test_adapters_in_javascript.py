"""Adapters that examples/web saves and loads are those of ``surgery.save_adapter`` and ``load_adapter``."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy

import gradgraph as gg
from gradgraph import frontend, surgery
from gradgraph.frontend import nn
from gradgraph.step.step import Step
from gradgraph.surgery import peft_names
from gradgraph.surgery.adapter_kinds.adapter_table import KINDS
from tests.surgery.test_peft_names import MODELS, SETTINGS, SIZES, WRITTEN, X, network, write_folder
from tests.web.test_javascript import LIBRARY, ONNXRUNTIME, ROOT, drive, pytestmark

__all__ = ["drive", "pytestmark"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NOT_IN_JAVASCRIPT = {"lora_experts", "prefix"}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.words(x).mean(1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4 * 16, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.conv(x).relu().reshape(-1, 64))


@functools.cache
def base(name: str) -> Any:
    if name == "llama":
        return surgery.language_model(ROOT / "examples" / "tiny_llama_int4.onnx")
    frontend.manual_seed(0)
    if name == "words":
        return frontend.export(Words(), {"x": frontend.Input(("batch", 5), "int64")})
    return frontend.export(Images(), {"x": ("batch", 2, 4, 4)})


def batches(name: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    if name == "llama":
        tokens = rng.integers(1, 98, (3, 2, 9))
        return [{"input_ids": t[:, :-1], "target": t[:, 1:]} for t in tokens]
    made = [rng.integers(0, 7, (4, 5)) if name == "words" else rng.normal(size=(4, 2, 4, 4)).astype(np.float32)
            for _ in range(3)]  # fmt: skip
    return [{"x": x, "target": rng.integers(0, 3, 4)} for x in made]


def as_json(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    return {n: {"dims": a.shape, "data": a.ravel().tolist()} for n, a in batch.items()}


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "lora": ("llama", ["*attn*", "lm_head"], {"rank": 4, "alpha": 6}),
    "lora of several ranks": ("images", "*", {"rank": 3, "dropout": 0.25}),
    "lora with a name": ("words", "*", {"rank": 2, "name": "french"}),
    "rslora": ("words", "*", {"rank": 3, "alpha": 5}),
    "qalora": ("llama", ["*mlp*"], {"rank": 4, "alpha": 6}),
    "dora": ("images", "*", {"rank": 2}),
    "ia3": ("images", "*", {"feedforward": "last"}),
    "bitfit": ("images", "*", {}),
    "bottleneck": ("words", "last", {"rank": 4}),
}


@functools.cache
def adapted(case: str) -> Any:
    name, target, options = CASES[case]
    return gg.lora(base(name), target, kind=case.split()[0], **options)


@functools.cache
def built(case: str) -> Step:
    loss = gg.losses.cross_entropy(axis=-1)
    return gg.build(adapted(case), loss, gg.optim.sgd(0.5), backend="web", seed=0)


def test_every_kind_is_tried() -> None:
    assert {case.split()[0] for case in CASES} | NOT_IN_JAVASCRIPT == set(KINDS)


@pytest.mark.parametrize("case", CASES)
def test_what_javascript_saves_python_saves_and_reads(case: str, drive: Any, tmp_path: Path) -> None:
    """Of the same numbers, to the byte; the model with it computes what the trainer computes in JavaScript."""
    data = batches(CASES[case][0])
    inputs = {n: a for n, a in data[0].items() if n != "target"}
    *steps, folder, file, checkpoint, predicted = drive(
        built(case),
        *(["step", as_json(batch)] for batch in data),
        ["exportAdapter"],
        ["exportAdapter", {"format": "onnx_adapter"}],
        ["checkpoint"],
        ["predict", as_json(inputs)],
    )
    assert all("message" not in row for row in (*steps, folder, file))
    trainer = gg.Trainer.resume(built(case), checkpoint["bytes"], device="cpu")
    state = trainer.state_dict()
    surgery.save_adapter(adapted(case), tmp_path / "python", state)
    theirs, ours = Path(folder["bytes"]), tmp_path / "python"
    assert (theirs / WEIGHTS).read_bytes() == (ours / WEIGHTS).read_bytes()
    assert json.loads((theirs / CONFIG).read_text()) == json.loads((ours / CONFIG).read_text())

    surgery.save_adapter(adapted(case), tmp_path / "python.onnx_adapter", state)
    both = [ort.AdapterFormat.read_adapter(str(path)) for path in (file["bytes"], tmp_path / "python.onnx_adapter")]
    tensors = [{n: value.numpy() for n, value in one.get_parameters().items()} for one in both]
    assert tensors[0].keys() == tensors[1].keys()
    for name, array in tensors[0].items():
        np.testing.assert_array_equal(array, tensors[1][name], err_msg=name)
    ort.LoraAdapter().Load(file["bytes"])  # which checks the file

    again = surgery.load_adapter(base(CASES[case][0]), theirs)
    step = gg.build(again, gg.losses.cross_entropy(axis=-1), gg.optim.sgd(0.5), seed=0)
    found = gg.Trainer(step, device="cpu").predict(inputs)
    [output] = predicted["result"].values()
    np.testing.assert_allclose(found, np.reshape(output["data"], output["dims"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["peft", "onnx_adapter"])
@pytest.mark.parametrize("case", CASES)
def test_what_python_saves_javascript_loads(case: str, form: str, drive: Any, tmp_path: Path) -> None:
    data = batches(CASES[case][0])
    trainer = gg.Trainer(built(case), device="cpu")
    for batch in data:
        trainer.step(batch)
    state = trainer.state_dict()
    path = tmp_path / ("saved.onnx_adapter" if form == "onnx_adapter" else "saved")
    surgery.save_adapter(adapted(case), path, state)
    loaded, kept = drive(built(case), ["loadAdapter", {"file" if path.is_file() else "folder": str(path)}], ["keep"])
    assert "message" not in loaded, loaded
    for name in built(case).manifest.trainable:
        value = kept["result"][name]
        np.testing.assert_allclose(np.reshape(value["data"], value["dims"]), state[name], rtol=1e-6, err_msg=name)


FAMILIES = {("apart", "phi3"): "dora", ("packed", "llama"): "lora", ("attention packed", "llama"): "dora",
            ("apart", "granitemoehybrid"): "lora", ("packed", "qwen3_5"): "lora",
            ("packed", "lfm2"): "lora"}  # fmt: skip


def same_folders(theirs: Path, ours: Path) -> None:
    found, expected = (safetensors.numpy.load_file(path / WEIGHTS) for path in (theirs, ours))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, err_msg=name)
    assert json.loads((theirs / CONFIG).read_text()) == json.loads((ours / CONFIG).read_text())


def both_ways(made: Any, family: str, drive: Any, folder: Path) -> None:
    """What Python has trained and saved is loaded by JavaScript, which predicts and saves the same."""
    step = gg.build(made, "mse", "sgd", backend="web")
    trainer = gg.Trainer(step, device="cpu")
    target = np.random.default_rng(1).normal(size=(len(X), sum(SIZES.values()))).astype(np.float32)
    for _ in range(2):
        trainer.step({"x": X, "target": target})
    surgery.save_adapter(made, folder, trainer.state_dict(), family=family)
    loaded, predicted, saved = drive(step, ["loadAdapter", {"folder": str(folder)}], ["predict", as_json({"x": X})],
                                     ["exportAdapter", {"family": family}])  # fmt: skip
    assert "message" not in loaded and "message" not in saved, (loaded, saved)
    [output] = predicted["result"].values()
    np.testing.assert_allclose(np.reshape(output["data"], output["dims"]), trainer.predict(X), rtol=1e-4, atol=1e-5)
    same_folders(Path(saved["bytes"]), folder)


@pytest.mark.parametrize(("model", "family"), FAMILIES)
def test_names_of_a_family_are_those_of_python_both_ways(model: str, family: str, drive: Any, tmp_path: Path) -> None:
    """Packed layers and such that lie apart, under the names that PyTorch's model has."""
    made = gg.lora(network(*MODELS[model]), "*", rank=2, alpha=3, kind=FAMILIES[model, family])
    both_ways(made, family, drive, tmp_path / "python")


@pytest.mark.parametrize("written", ["apart", "queries and values alone"])
def test_packed_layers_with_adapters_of_their_pieces_keep_them(written: str, drive: Any, tmp_path: Path) -> None:
    """A step that Python has built on a folder of PEFT has the ranks of all pieces, and zeros beside them."""
    settings = SETTINGS["ranks and alphas of their own"]
    write_folder(tmp_path / "peft", WRITTEN[written], settings)
    made = surgery.load_adapter(network(*MODELS["packed"]), tmp_path / "peft")
    both_ways(made, "llama", drive, tmp_path / "python")


def test_names_of_a_family_that_do_not_fit_are_refused(drive: Any, tmp_path: Path) -> None:
    for name, ranks in {"peft": {}, "others": {"rank_pattern": {"q_proj": 3, "v_proj": 1}}}.items():
        write_folder(tmp_path / name, WRITTEN["apart"], ranks)
    packed = network(*MODELS["packed"])
    wide, joined = (gg.lora(packed, "*", rank=2), surgery.load_adapter(packed, tmp_path / "peft"))
    others = {"folder": str(tmp_path / "others")}
    [too_wide] = drive(gg.build(wide, "mse", "sgd", backend="web"), ["loadAdapter", {"folder": str(tmp_path / "peft")}])
    [uneven, unknown, format_] = drive(
        gg.build(joined, "mse", "sgd", backend="web"),
        ["loadAdapter", others],
        ["exportAdapter", {"family": "bert"}],
        ["exportAdapter", {"family": "llama", "format": "onnx_adapter"}],
    )
    [not_linear] = drive(built("dora"), ["exportAdapter", {"family": "llama"}])
    layer, remedy = "'model.layers.0.attn.qkv_proj'", "build a step from gradgraph.surgery.load_adapter(model, folder)"
    cannot = "the adapter cannot be used: the adapters of"
    assert [row["message"] for row in (too_wide, uneven, unknown, format_, not_linear)] == [
        f"{cannot} {layer} have the total rank 6, but its adapter in this step has the rank 2; {remedy}",
        f"{cannot} the pieces of {layer} have other ranks than in this step; {remedy}",
        f"the adapter cannot be saved: there is no family 'bert'; use {', '.join(peft_names.FAMILIES)}",
        "an .onnx_adapter file has the model's names; remove the family",
        "the adapter cannot be saved: 'conv' has an adapter of kind dora on a Conv, whose name does not depend on the "
        "family; remove the family",
    ]


def test_families_are_those_of_python() -> None:
    """Their names, what they pack, and what builders call otherwise."""
    script = f"import * as names from {json.dumps((ROOT / 'examples/web/peft-names.js').as_uri())};"
    script += "console.log(JSON.stringify([names.FAMILIES, names.PIECES, names.OURS]))"
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    families = {name: {"packed": list(f.packed), "output": f.output, "others": dict(f.others), "root": f.root}
                for name, f in peft_names.FAMILIES.items()}  # fmt: skip
    assert json.loads(done.stdout) == [families, {n: list(p) for n, p in peft_names.PIECES.items()}, peft_names.OURS]


def test_it_writes_what_the_likeliest_tokens_are(drive: Any) -> None:
    """Token by token on the growing text, as predict scores it; drawn ones are the same of the same seed."""
    trainer = gg.Trainer(built("lora"), device="cpu")
    known = [1, 30, 31]
    while len(known) < 12:
        known.append(int(trainer.predict({"input_ids": np.array([known])})[0, -1].argmax()))
    drawn = {"maxTokens": 6, "temperature": 1, "topK": 5, "seed": 3}
    plain, stopped, *others = drive(
        built("lora"),
        ["generate", known[:3], {"maxTokens": 9}],
        ["generate", known[:3], {"stop": [known[5]]}],
        *(["generate", known[:3], {**drawn, **changed}] for changed in ({}, {}, {"seed": 4}, {"topK": 1})),
    )
    assert plain["result"] == known
    assert stopped["result"] == known[: known.index(known[5], 3)]
    first, again, other, likeliest = (row["result"] for row in others)
    assert first == again != other and likeliest == known[:9]


def test_another_alpha_goes_into_the_second_factor(drive: Any, tmp_path: Path) -> None:
    """A step's scale is fixed when it is built, so that an adapter of another one is brought to it."""
    other = gg.lora(base("words"), "*", rank=3, alpha=7)
    rng = np.random.default_rng(0)
    shapes = {"words.lora_A": (7, 3), "words.lora_B": (3, 8), "last.lora_A": (8, 3), "last.lora_B": (3, 3)}
    given = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    surgery.save_adapter(other, tmp_path / "saved", given)
    data = {n: a for n, a in batches("words")[0].items() if n != "target"}
    _, predicted = drive(
        gg.build(gg.lora(base("words"), "*", rank=3, alpha=2), "cross_entropy", "sgd", backend="web"),
        ["loadAdapter", {"folder": str(tmp_path / "saved")}],
        ["predict", as_json(data)],
    )
    step = gg.build(surgery.load_adapter(base("words"), tmp_path / "saved"), "cross_entropy", "sgd")
    [output] = predicted["result"].values()
    expected = gg.Trainer(step, device="cpu").predict(data)
    np.testing.assert_allclose(np.reshape(output["data"], output["dims"]), expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_said_in_one_sentence(drive: Any, tmp_path: Path) -> None:
    wrong = {
        "kind": gg.lora(base("words"), "last", kind="ia3"),
        "layers": gg.lora(base("words"), "last", kind="rslora", rank=3),
        "rank": gg.lora(base("words"), "*", kind="rslora", rank=2),
    }
    for name, model in wrong.items():
        surgery.save_adapter(model, tmp_path / name)
    (tmp_path / "text.onnx_adapter").write_text("no adapter")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / CONFIG).write_text("{}")
    calls = [{"folder": str(tmp_path / name)} for name in (*wrong, "half")]
    rows = drive(
        built("rslora"),
        ["keep"],
        *(["loadAdapter", call] for call in [*calls, {"file": str(tmp_path / "text.onnx_adapter")}]),
        ["exportAdapter", {"format": "gguf"}],
        ["exportAdapter", {"name": "german"}],
        ["keep"],
    )
    cannot = "the adapter cannot be used: "
    assert [row["message"] for row in rows[1:-1]] == [
        f"{cannot}it has the type IA3, but the step trains adapters of kind rslora; load an adapter of kind rslora, or "
        "build a step for the other kind",
        f"{cannot}it lacks 'base_model.model.words.lora_embedding_A', 'base_model.model.words.lora_embedding_B', so "
        "it does not match the adapters of this step; if only names differ, load it in Python with "
        "gradgraph.surgery.load_adapter(names={...}), and save it again",
        f"{cannot}'base_model.model.words.lora_embedding_A' is float32[7,2], but float32[7,3] in this step",
        f"{cannot}{WEIGHTS} is missing; pass the bytes of both files by their names",
        f'{cannot}it is not an .onnx_adapter; for PEFT\'s format, pass {{ "{CONFIG}", "{WEIGHTS}" }}',
        "unknown adapter format 'gguf'; use 'peft', 'onnx_adapter'",
        "the step has no adapters called 'german'; it has 'default'",
    ]
    assert rows[0] == rows[-1]  # the state stays


def test_a_step_without_adapters_says_so(drive: Any) -> None:
    [said] = drive(gg.build(base("words"), "cross_entropy", "sgd"), ["exportAdapter"])
    assert said["message"] == (
        "the step trains no adapters; add adapters to the model with gg.lora before building the step"
    )


def test_a_base_for_the_web_takes_adapters_as_required_inputs(tmp_path: Path) -> None:
    """onnxruntime-node ignores what is fed to an input with a default value."""
    model = frontend.export(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), {"x": ("batch", 4)})
    adapted = gg.lora(model, "*", rank=2)
    gg.surgery.switchable(adapted, required=True, out=tmp_path / "base.onnx")
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in adapted.graph.initializer if "lora" in t.name}
    given = {name: np.full_like(array, 0.1) for name, array in weights.items()}
    gg.surgery.save_adapter(adapted, tmp_path / "fr.onnx_adapter", given)
    code = f"""
      import ort from {json.dumps(ONNXRUNTIME.as_uri())};
      import {{ adapterTensors }} from {json.dumps(LIBRARY.as_uri())};
      import {{ readFileSync }} from "node:fs";
      const session = await ort.InferenceSession.create({json.dumps(str(tmp_path / "base.onnx"))});
      const feeds = {{ x: new ort.Tensor("float32", new Float32Array(4).fill(1), [1, 4]) }};
      const tensors = adapterTensors(readFileSync({json.dumps(str(tmp_path / "fr.onnx_adapter"))}));
      for (const [name, t] of Object.entries(tensors))
        feeds[name] = new ort.Tensor(t.dtype, t.data, t.dims);
      const results = await session.run(feeds);
      console.log(JSON.stringify(Array.from(results[session.outputNames[0]].data)));
    """
    (tmp_path / "run.mjs").write_text(code)
    done = subprocess.run(["node", str(tmp_path / "run.mjs")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    session = ort.InferenceSession(gg.surgery.load_weights(adapted, given, strict=False).SerializeToString())
    (wanted,) = session.run(None, {"x": np.ones((1, 4), np.float32)})
    np.testing.assert_allclose(json.loads(done.stdout), wanted[0], rtol=1e-5)
