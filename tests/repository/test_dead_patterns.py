"""A name or glob that matches nothing is refused, also beside one that matches: wherever tensors are chosen by name."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, parser

import gradgraph as gg
from gradgraph import surgery
from gradgraph.errors import GradgraphError
from gradgraph.export import inference_model, save_inference
from gradgraph.optim.recipes import RECIPES
from tests.kit.command_line import arrays, mlp
from tests.kit.small_models import parsed, real
from tests.repository.test_misspelt_words import PUBLIC

MODEL, DEAD = mlp(), "*no_such_thing*"
SCALAR = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 4] x) => (float loss) { s = Mul(x, x) loss = ReduceSum<keepdims=0>(s) }""")
TIED = parsed("""(float[N, 4] x) => (float[N, 4] y) {
    a = MatMul(x, both) b = MatMul(a, lonely) y = MatMul(b, both) }""", both=real(4, 4), lonely=real(4, 4))  # fmt: skip
for place, tied_node in enumerate(TIED.graph.node):
    tied_node.name = f"/{'abc'[place]}/MatMul"
# two axes of 8 inputs, and one of 6, which groups of four do not divide
SIZES = parsed("(float[N, 8] x) => (float[N, 3] y) { a = MatMul(x, eight) y = MatMul(a, six) }",
               eight=real(8, 6), six=real(6, 3))  # fmt: skip
ATTENTION = helper.make_model(
    helper.make_graph(
        [helper.make_node("Attention", list("qkv"), ["y"], "attn/a", q_num_heads=2, kv_num_heads=2)], "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "t", 8]) for name in "qkv"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "t", 8])]),
    opset_imports=[helper.make_opsetid("", 23)], ir_version=10)  # fmt: skip
DECODER = parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
    g (int64[b, t] input_ids, int64[b, t] attention_mask, int64[b, t] position_ids) => (float[b, t] y, float[b, t] z) {
    s = Add(input_ids, position_ids) m = Mul(s, attention_mask) y = Cast<to=1>(m) z = Neg(y) }""")


def with_adapters() -> Any:
    return gg.lora(gg.lora(MODEL, "first", rank=2), "last", rank=2, name="second")


def quantised() -> Any:
    step = gg.build(gg.qat(MODEL, activations=None))
    return gg.Trainer(step, device="cpu").export()


def step_of(**options: Any) -> Any:
    usual = {} if "steps" in options else {"train": "*.weight"}  # muon moves matrices alone
    return gg.build(MODEL, **{**usual, **options})


def grouped(globs: list[str]) -> Any:
    return {glob: {"lr_factor": 2.0} for glob in globs}


def exported(how: str, **given: Any) -> Any:
    trainer = gg.Trainer(gg.build(MODEL), device="cpu")
    return getattr(trainer, how)(**given)


def exported_file(**given: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return gg.Trainer(gg.build(MODEL), device="cpu").export_file(Path(folder) / "model.onnx", **given)


def influence(wrt: Any) -> Any:
    trainer = gg.Trainer(gg.build(MODEL), device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / "a.ckpt")
        return gg.tracin(trainer.definition, [Path(folder) / "a.ckpt"], arrays(4), arrays(4), wrt=wrt,
                         learning_rates=[0.1])  # fmt: skip


# by callable and argument: a call with names and globs, and one that matches
TABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gg.build(train)": (lambda p: step_of(train=p), "first.*"),
    "gg.build(freeze)": (lambda p: step_of(freeze=p), "first.*"),
    "gg.build(freeze_below)": (lambda p: step_of(freeze_below=p), "h"),
    "gg.build(output)": (lambda p: step_of(loss="mse", output=p), "logits"),
    "gg.StepOptions(train)": (lambda p: step_of(steps={"a": gg.StepOptions(train=p)}), "first.*"),
    "gg.StepOptions(freeze)": (lambda p: step_of(steps={"a": gg.StepOptions(freeze=p)}), "first.*"),
    "gg.StepOptions(freeze_below)": (lambda p: step_of(steps={"a": gg.StepOptions(freeze_below=p)}), "h"),
    "gg.StepOptions(output)": (lambda p: step_of(steps={"a": gg.StepOptions(output=p, loss="mse")}), "logits"),
    "gg.Recompute(keep)": (lambda p: step_of(recompute=p), "h"),
    "gg.Precision(float32)": (lambda p: step_of(precision=gg.Precision("bfloat16", float32=p)), "Relu"),
    "gg.Precision(lower)": (lambda p: step_of(precision=gg.Precision("bfloat16", lower=p)), "Relu"),
    "gg.check_gradients(wrt)": (lambda p: gg.check_gradients(SCALAR, wrt=p), "x"),
    **{f"gg.{f.__name__}(wrt)": (lambda p, f=f: f(SCALAR, wrt=p), "x")
       for f in (gg.hessian, gg.hvp, gg.jacobian, gg.value_and_grad)},
    **{f"gg.{f.__name__}(wrt)": (lambda p, f=f: f(MODEL, wrt=p), "first.*") for f in (gg.jvp, gg.vjp)},
    **{f"gg.{f.__name__}(outputs)": (lambda p, f=f: f(MODEL, outputs=p), "logits") for f in (gg.jvp, gg.vjp)},
    "gg.per_sample_gradients(wrt)": (lambda p: gg.per_sample_gradients(PER_SAMPLE, wrt=p), "w"),
    "gg.per_sample_gradients(inputs)": (lambda p: gg.per_sample_gradients(PER_SAMPLE, wrt="w", inputs=p), "x"),
    "gg.along(wrt)": (lambda p: gg.along(MODEL, 2, wrt=p, baseline=0.0), "x"),
    "gg.along(outputs)": (lambda p: gg.along(MODEL, 2, outputs=p, baseline=0.0), "logits"),
    "gg.gradient_norm(wrt)": (lambda p: gg.gradient_norm(MODEL, wrt=p), "first.*"),
    "gg.iterate(wrt)": (lambda p: gg.iterate(SCALAR, 2, wrt=p, update="adam"), "x"),
    "gg.solve(wrt)": (lambda p: gg.solve(MODEL, 2, wrt=p), "x"),
    "gg.tracin(wrt)": (lambda p: influence(p), "first.*"),
    "gg.PGD(inputs)": (lambda p: step_of(adversarial=gg.PGD(inputs=p)), "x"),
    "gg.explain(inputs)": (lambda p: gg.explain(MODEL, "gradient", inputs=p), "x"),
    "gg.lora(target)": (lambda p: gg.lora(MODEL, p, rank=2), "*first*"),
    "gg.lora(target), biases": (lambda p: gg.lora(MODEL, p, kind="bitfit"), "*first*"),
    "gg.lora(target), prefixes": (lambda p: gg.lora(ATTENTION, p, kind="prefix", rank=2), "attn*"),
    "gg.lora(target), beside others": (lambda p: gg.lora(with_adapters(), p, rank=2, name="third"), "*first*"),
    "gg.lora(feedforward)": (lambda p: gg.lora(MODEL, "*", kind="ia3", feedforward=p), "*first*"),
    "gg.lora(feedforward), of others": (lambda p: gg.lora(MODEL, "*", kind="ia3", feedforward=p), "last"),
    "gg.qat(target)": (lambda p: gg.qat(MODEL, target=p, activations=None), "*first*"),
    "gg.qat(target), quantised": (lambda p: gg.qat(quantised(), target=p, activations=None), "*first*"),
    **{f"optim.{name}(groups)": (lambda p, make=make: step_of(optimizer=make(groups=grouped(p))), "first.*")
       for name, make in RECIPES.items() if name != "lbfgs"},
    **{f"optim.{name}(no_decay)": (lambda p, make=make: step_of(optimizer=make(no_decay=p)), "first.*")
       for name, make in RECIPES.items() if "weight_decay" in inspect.signature(make).parameters},
    "optim.magnitude_pruning(target)": (
        lambda p: step_of(optimizer=gg.optim.magnitude_pruning(gg.optim.sgd(0.1), 0.5, target=p)), "first.*"),
    "surgery.cut(inputs)": (lambda p: surgery.cut(MODEL, inputs=p), "h"),
    "surgery.cut(outputs)": (lambda p: surgery.cut(MODEL, outputs=p), "h"),
    "surgery.language_model(keep)": (lambda p: surgery.language_model(DECODER, keep=p), "attention*"),
    "surgery.language_model(outputs)": (lambda p: surgery.language_model(DECODER, outputs=p), "y"),
    "surgery.merge_adapters(names)": (lambda p: surgery.merge_adapters(with_adapters(), names=p), "second"),
    "surgery.use_adapters(train)": (lambda p: surgery.use_adapters(with_adapters(), train=p), "second"),
    "surgery.reset_weights(weights)": (lambda p: surgery.reset_weights(MODEL, p), "first.*"),
    "surgery.untie_weights(weights)": (lambda p: surgery.untie_weights(TIED, p), "bo*"),
    "export.inference_model(outputs)": (lambda p: inference_model(gg.build(MODEL), outputs=p), "logits"),
    "Trainer.export(outputs)": (lambda p: exported("export", outputs=p), "logits"),
    "Trainer.export_file(outputs)": (lambda p: exported_file(outputs=p), "logits"),
    "Trainer.exported(outputs)": (lambda p: exported("exported", outputs=p), "logits"),
}  # fmt: skip
PER_SAMPLE = parsed("""(float[N, 4] x) => (float loss) {
    y = MatMul(x, w) s = Mul(y, y) loss = ReduceMean<keepdims=0>(s) }""", w=real(4, 2))  # fmt: skip
# lists of names that choose no tensors of a model, and the same functions by other names
OTHERS = {
    "optim.Optimizer(groups)", "optim.lbfgs(groups)", "surgery.lora(target)", "surgery.lora(feedforward)",
    "surgery.qat(target)", "export.save_inference(outputs)", "extend.loss(reads)", "extend.operator(inputs)",
    "extend.operator(outputs)", "Trainer.fit(steps)", "Trainer.per_class(classes)",
    "gg.Run(target)", "gg.train(words)",
    "gg.reduce(test)", "gg.DataNames(columns)", "gg.DataNames(classes)", "gg.DataNames(softmax)",
    "gg.DataNames(sigmoid)", "gg.DataNames(numbered)",
    "vision.Annotated(classes)", "vision.MaskFolder(classes)", "vision.masks(classes)", "vision.detect(outputs)",
    "vision.evaluate(outputs)",
}  # fmt: skip


def takes_names(parameter: inspect.Parameter) -> bool:
    return "Sequence[str]" in str(parameter.annotation) or parameter.annotation == "Names" or parameter.name == "groups"


def test_every_argument_that_takes_names_or_globs_is_here() -> None:
    found = {
        f"{name}({p.name})"
        for name, called in PUBLIC.items()
        if not name.startswith("frontend.")
        for p in inspect.signature(called).parameters.values()
        if takes_names(p)
    }
    assert found - TABLE.keys() == OTHERS


@pytest.mark.sweep(0.11)
@pytest.mark.parametrize("name", TABLE)
def test_a_pattern_that_matches_nothing_is_refused_by_name(name: str) -> None:
    call, good = TABLE[name]
    call([good])
    for patterns in ([good, DEAD], [DEAD, good], [DEAD]):
        with pytest.raises(GradgraphError) as raised:
            call(patterns)
        assert f"'{DEAD}'" in str(raised.value)


def test_a_file_is_not_written_for_a_dead_pattern(tmp_path: Any) -> None:
    with pytest.raises(GradgraphError, match="no_such_thing"):
        save_inference(gg.build(MODEL), tmp_path / "m.onnx", outputs=["logits", DEAD])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: gg.lora(MODEL, ["first", "lsat"], rank=2),
         "'lsat' matches no layer that can have an adapter; did you mean 'last'?"),
        (lambda: gg.lora(MODEL, "*", kind="lora", feedforward="last"), "feedforward applies to adapters of kind ia3"),
        (lambda: gg.lora(MODEL, "first", kind="ia3", feedforward=["first", "last"]),
         "'last' matches no layer that gets an adapter; there is first"),
        (lambda: gg.qat(MODEL, target=["first", "lsat"], activations=None),
         "'lsat' matches no layer with a stored weight; did you mean 'last'?"),
        (lambda: surgery.untie_weights(TIED, ["both", "lonely"]),
         "'lonely' matches no weight that several modules read"),
        (lambda: gg.build(SIZES, "mse", gg.optim.magnitude_pruning(gg.optim.sgd(0.1), "2:4", target=["eig*", "si*"])),
         "no weight that 'si*' matches has an input axis divisible by 4"),
    ],
)  # fmt: skip
def test_what_matches_only_what_cannot_be_changed_is_dead(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(GradgraphError) as raised:
        call()
    assert says in str(raised.value)


def test_the_models_here_run() -> None:
    """So that what is refused is refused for the sake of the pattern."""
    batch = {name: array[:8] for name, array in arrays(8).items()}
    assert np.isfinite(
        gg.Trainer(gg.build(gg.lora(MODEL, ["first", "last"], rank=2)), device="cpu").step(batch)["loss"]
    )
