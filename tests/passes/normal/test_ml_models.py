"""Operators of ai.onnx.ml, written with standard ones: onnxruntime gives the same for both, gradients are right."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import gradgraph as gg
from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, op_types, real, run

ML = {"ai.onnx.ml": 1}
X = real(4, 3)
NAN = np.array([[1, -1, np.nan], [2, np.nan, 3]], np.float32)


def one(op, feeds, attrs, outputs=("y",), dynamic=False):
    inputs = {n: (a.dtype, [f"{n}{i}" for i in range(a.ndim)]) for n, a in feeds.items()} if dynamic else feeds
    node = helper.make_node(op, list(feeds), list(outputs), domain="ai.onnx.ml", name="here", **attrs)
    return model_of([node], inputs, [o for o in outputs if o], domains=ML)


def check(op, feeds, attrs, outputs=("y",), dynamic=False, domains=("",), smooth=True):
    model = one(op, feeds, attrs, outputs, dynamic)
    found = normal_form(model)
    assert {o.domain for o in found.opset_import} == set(domains)
    for a, b in zip(run(model, feeds), run(found, feeds), strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b)) if a.dtype.kind == "f" else None
        assert_same([a], [b], atol=2e-6, equal_nan=True) if a.dtype.kind == "f" else np.testing.assert_array_equal(a, b)
    floating = [n for n, a in feeds.items() if a.dtype == np.float32]
    if smooth and floating:
        assert wrong_gradients(model, found, feeds, floating) == []
    return found


SIMPLE = {
    "Scaler": ("Scaler", {"x": X}, {"offset": [1.0, 2.0, 3.0], "scale": [2.0, 1.0, -1.0]}),
    "Scaler, one": ("Scaler", {"x": X}, {"offset": [1.0], "scale": [2.0]}),
    "Scaler, integers": ("Scaler", {"x": np.array([[1, 2]])}, {"offset": [1.0], "scale": [0.5]}),
    "Normalizer, largest": ("Normalizer", {"x": X}, {"norm": "MAX"}),
    "Normalizer, L1": ("Normalizer", {"x": X}, {"norm": "L1"}),
    "Normalizer, L2": ("Normalizer", {"x": X}, {"norm": "L2"}),
    "FeatureVectorizer": ("FeatureVectorizer", {"x": X, "w": real(4, 2, seed=1)}, {"inputdimensions": [3, 2]}),
    "FeatureVectorizer, other sizes": ("FeatureVectorizer", {"x": X, "w": X + 1}, {"inputdimensions": [2, 4]}),
    "ArrayFeatureExtractor": ("ArrayFeatureExtractor", {"x": X, "i": np.array([[2, 0]])}, {}),
    "ArrayFeatureExtractor, vector": ("ArrayFeatureExtractor", {"x": real(5), "i": np.array([1, 4])}, {}),
    "ArrayFeatureExtractor, cube": ("ArrayFeatureExtractor", {"x": real(2, 3, 4), "i": np.array([[1, 3]])}, {}),
    "LinearRegressor": ("LinearRegressor", {"x": X}, {"coefficients": [0.5, -1.0, 0.25], "intercepts": [0.1]}),
    "LinearRegressor, two": (
        "LinearRegressor",
        {"x": X},
        {"coefficients": [0.5, -1.0, 0.25, 1.0, 2.0, 3.0], "targets": 2, "intercepts": [0.1, 0.2]},
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", SIMPLE)
def test_simple(case, dynamic):
    check(*SIMPLE[case], dynamic=dynamic)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_a_row_of_zeros_has_no_norm(norm):
    check("Normalizer", {"x": np.array([[0, 0, 0], [-1, -2, -3]], np.float32)}, {"norm": norm}, smooth=False)


@pytest.mark.parametrize(
    ("imputed", "replaced"), [([9.0], float("nan")), ([9.0, 8.0, 7.0], float("nan")), ([9.0, 8.0, 7.0], -1.0)]
)
def test_imputer(imputed, replaced):
    attrs = {"imputed_value_floats": imputed, "replaced_value_float": replaced}
    check("Imputer", {"x": NAN}, attrs, smooth=False)
    gradient = gg.vjp(one("Imputer", {"x": NAN}, attrs), wrt=["x"])
    (dx,) = run(gradient, {"x": NAN, "y.cotangent": np.ones_like(NAN)})[1:]
    imputed_places = np.isnan(NAN) if np.isnan(replaced) else np.equal(NAN, replaced)
    np.testing.assert_array_equal(dx, np.where(imputed_places, 0, 1))


TWO_ROWS = {"coefficients": [0.5, -1.0, 0.25, 0.3, 0.2, 0.1], "intercepts": [0.1, 0.2]}
ONE_ROW = {"coefficients": [0.5, -1.0, 0.25], "intercepts": [0.1]}
THREE_ROWS = {"coefficients": [*TWO_ROWS["coefficients"], 1.0, 0.5, -0.5], "intercepts": [0.1, 0.2, 0.3]}
LABELLED = {
    "one row": ONE_ROW | {"classlabels_ints": [3, 7]},
    "one row, strings": ONE_ROW | {"classlabels_strings": ["no", "yes"]},
    "two rows": TWO_ROWS | {"classlabels_ints": [3, 7]},
    "three rows": THREE_ROWS | {"classlabels_ints": [3, 7, 5]},
}


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("case", LABELLED)
def test_linear_classifier(case, transform):
    attrs = LABELLED[case] | {"post_transform": transform}
    found = check("LinearClassifier", {"x": X}, attrs, ["label", "scores"], domains=["", "ai.onnx.ml"], smooth=False)
    assert "LinearClassifier" in op_types(found)  # for the labels
    model = one("LinearClassifier", {"x": X}, attrs, ["", "scores"])
    assert wrong_gradients(model, normal_form(model), {"x": X}, ["x"]) == []


@pytest.mark.parametrize("case", LABELLED)
def test_linear_classifiers_are_trained_and_label_as_trained(case, tmp_path):
    attrs = LABELLED[case] | {"post_transform": "LOGISTIC"}
    model = one("LinearClassifier", {"x": X}, attrs, ["label", "scores"])
    scores = run(model, {"x": X})[1]
    trainer = gg.Trainer(gg.build(model, "mse", gg.optim.sgd(20.0), output="scores"))
    assert list(trainer.parameters) == ["here.coefficients", "here.intercepts"]
    for _ in range(20):
        trainer.step({"x": X, "target": scores[:, ::-1]})
    trainer.export(tmp_path / "trained.onnx")
    got, after = run(onnx.load(tmp_path / "trained.onnx"), {"x": X})
    names = np.array(attrs.get("classlabels_ints") or attrs.get("classlabels_strings"))
    np.testing.assert_array_equal(got, names[after.argmax(axis=1)])
    assert not np.array_equal(got, run(model, {"x": X})[0])


def test_linear_regressors_are_trained():
    attrs = {"coefficients": [0.5, -1.0, 0.25], "intercepts": [0.1]}
    trainer = gg.Trainer(gg.build(one("LinearRegressor", {"x": X}, attrs), "mse", gg.optim.sgd(0.1)))
    trainer.step({"x": X, "target": np.ones((4, 1), np.float32)})
    off = X @ np.array([[0.5], [-1.0], [0.25]], np.float32) + np.float32(0.1) - 1
    expected = np.array([[0.5], [-1.0], [0.25]]) - 0.1 * 2 / 4 * X.T @ off
    np.testing.assert_allclose(trainer.parameters["here.coefficients"], expected, rtol=1e-5)
    np.testing.assert_allclose(trainer.parameters["here.intercepts"], [0.1 - 0.1 * 2 * off.mean()], rtol=1e-5)


def test_a_zip_map_gives_the_scores_themselves():
    model = one(
        "LinearClassifier", {"x": X}, LABELLED["three rows"] | {"post_transform": "SOFTMAX"}, ["label", "scores"]
    )
    plain = run(gg.vjp(model, outputs="scores"), {"x": X, "scores.cotangent": np.eye(4, 3, dtype=np.float32)})
    zipped = helper.make_node("ZipMap", ["scores"], ["by_label"], domain="ai.onnx.ml", classlabels_int64s=[3, 7, 5])
    model.graph.node.append(zipped)
    kind = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, []))
    model.graph.output[1].CopyFrom(helper.make_value_info("by_label", helper.make_sequence_type_proto(kind)))
    before = model.SerializeToString()
    gradient = gg.vjp(model, outputs="by_label")
    found = run(gradient, {"x": X, "by_label.cotangent": np.eye(4, 3, dtype=np.float32)})
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.SerializeToString() == before


def test_other_maps_are_refused_in_one_sentence():
    model = one("Scaler", {"x": X}, {})
    kind = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, []))
    model.graph.input.append(helper.make_value_info("words", kind))
    with pytest.raises(ModelError, match=r"'words' is a map from labels to numbers.*DictVectorizer"):
        gg.vjp(model)


VECTORS = {"support_vectors": list(map(float, real(5, 3, seed=1).flat)), "kernel_params": [0.4, 0.3, 3.0]}


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vector_regression(kernel):
    attrs = VECTORS | {"coefficients": [0.5, -1.0, 0.25, 0.3, 0.7], "rho": [0.2], "n_supports": 5}
    check("SVMRegressor", {"x": X}, attrs | {"kernel_type": kernel})


def test_support_vector_regression_without_vectors():
    check("SVMRegressor", {"x": X}, {"coefficients": [0.5, -1.0, 0.25], "rho": [0.2], "kernel_params": [0.0, 0.0, 0.0]})


MACHINES = {
    "two": {"vectors_per_class": [2, 3], "coefficients": [0.5, 1.0, -0.25, -0.3, -0.7], "rho": [0.2]},
    "two, positive": {"vectors_per_class": [2, 3], "coefficients": [0.5, 1.0, 0.25, 0.3, 0.7], "rho": [0.2]},
    "three": {
        "vectors_per_class": [2, 2, 1],
        "coefficients": [0.5, 1.0, -0.25, -0.3, -0.7, 0.1, 0.2, 0.3, -0.4, -0.6],
        "rho": [0.2, 0.1, -0.3],
    },
}


@pytest.mark.sweep(0.306)
@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("case", MACHINES)
def test_support_vector_classification(case, kernel, transform):
    labels = {"classlabels_ints": [4, 2, 9][: len(MACHINES[case]["vectors_per_class"])]}
    attrs = VECTORS | MACHINES[case] | labels | {"kernel_type": kernel, "post_transform": transform}
    check("SVMClassifier", {"x": X}, attrs, ["label", "scores"], domains=["", "ai.onnx.ml"], smooth=False)
    model = one("SVMClassifier", {"x": X}, attrs, ["", "scores"])
    assert wrong_gradients(model, normal_form(model), {"x": X}, ["x"]) == []


REFUSED = [
    ("LinearRegressor", {"coefficients": [0.5, -1.0, 0.25], "post_transform": "PROBIT"}, "post_transform 'PROBIT'"),
    (
        "SVMClassifier",
        VECTORS | MACHINES["two"] | {"prob_a": [1.0], "prob_b": [0.5], "classlabels_ints": [1, 2]},
        "couples probabilities",
    ),
]


@pytest.mark.parametrize(("op", "attrs", "message"), REFUSED)
def test_what_has_no_form_is_named(op, attrs, message):
    outputs = ["y"] if op == "LinearRegressor" else ["label", "scores"]
    with pytest.raises(ModelError, match=f"'here'.*{message}"):
        normal_form(one(op, {"x": X}, attrs, outputs))


LEAF = {"nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0]}
TREE = LEAF | {"nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0] * 3, "n_targets": 1}
STUMP = TREE | {"nodes_values": [0.5, 0, 0], "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0]}
CONSTANT = {
    "Binarizer": {"threshold": 0.5},
    "LabelEncoder": {"keys_floats": [1.0, 2.0], "values_floats": [3.0, 4.0]},
    "OneHotEncoder": {"cats_int64s": [1, 2]},
    "TreeEnsembleRegressor": STUMP | {"target_weights": [1.0, 2.0]},
}


@pytest.mark.parametrize("op", CONSTANT)
def test_what_is_piecewise_constant_has_no_gradient(op):
    """Loss: the sum of x and of what the operator makes of it; the gradient is that of the first sum."""
    nodes = [
        helper.make_node(op, ["x"], ["z"], domain="ai.onnx.ml", **CONSTANT[op]),
        helper.make_node("ReduceSum", ["z"], ["b"], keepdims=0),
        helper.make_node("ReduceSum", ["x"], ["a"], keepdims=0),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    found = gg.value_and_grad(model_of(nodes, {"x": X}, domains={"ai.onnx.ml": 3}), wrt="x")
    np.testing.assert_array_equal(run(found, {"x": X})[1], np.ones_like(X))
    with pytest.raises(gg.GradgraphError, match=rf"ends at .*{op}\), .*has no gradient"):
        gg.value_and_grad(model_of(nodes[:2], {"x": X}, ["b"], domains={"ai.onnx.ml": 3}), wrt="x")
