"""Norms of all ranks: where a gradient graph is cut, and what is refused; nothing here starts a process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph.errors import BuildError
from gradgraph.frontend import functional as F
from gradgraph.parallel.joint_norms import RANKS, Message, joint_norms, norms_of
from gradgraph.parallel.segments import cut
from gradgraph.parallel.update_parts import reads_of
from tests.backends.test_other_runtimes import small_cnn
from tests.parallel.ranks_cases import normed


def test_norms_beside_each_other_are_told_of_in_one_message() -> None:
    joint = joint_norms(gg.build(normed(), separate=True))
    segments = cut(joint.gradient, joint.messages, "batch_weight")
    told = [[(m.channels, m.is_gradient) for m, _, _ in segment.told] for segment in segments]
    assert told == [
        [(4, False)], [(5, False)] * 2, [(5, False)], [(5, False)],
        [(5, True)], [(5, True)], [(5, True)] * 2, [(4, True)], [],
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"recompute": "sqrt"}], ids=str)
def test_each_node_stands_in_one_part_behind_what_it_reads(options: dict[str, Any]) -> None:
    joint = joint_norms(gg.build(normed(), separate=True, **options))
    segments = cut(joint.gradient, joint.messages, "batch_weight")
    nodes = Counter(n.output[0] for segment in segments for n in segment.nodes)
    assert set(nodes) == {n.output[0] for n in joint.gradient.graph.node if n.domain != RANKS}
    views = {n.output[0] for n in joint.gradient.graph.node if n.op_type in ("Reshape", "Unsqueeze")}
    assert {name for name, times in nodes.items() if times > 1} <= views
    known = {v.name for v in (*joint.gradient.graph.input, *joint.gradient.graph.initializer)}
    for segment in segments:
        for node in segment.nodes:
            assert known.issuperset(reads_of(node)), node.name
            known.update(node.output)
        known.update(told for _, own, told in segment.told if own in known)
    given = [x for segment in segments for x in segment.gives]
    forgotten = [x for segment in segments for x in segment.forgets]
    assert sorted(given) == sorted(forgotten) and len(set(given)) == len(given)


def test_sums_of_ranks_are_those_of_all_samples() -> None:
    """Also where the mean is a thousand deviations from zero."""
    x = np.random.default_rng(0).normal(size=(12, 3)) + 1000.0
    message = Message("norm", 3, np.dtype(np.float32), False)
    shares = [x[:7], x[7:8], x[8:]]
    own = [np.concatenate([[len(s)], s.mean(0), ((s - s.mean(0)) ** 2).sum(0)]).astype(np.float32) for s in shares]
    told = message.taken(np.sum([message.given(each, 2.0) for each in own], axis=0), 5.0)
    np.testing.assert_allclose(told, [12, *x.mean(0), *x.var(0)], rtol=1e-4)
    gradient = Message("grad", 1, np.dtype(np.float32), True)
    sums = gradient.given(np.float32([1, 2]), 3.0) + gradient.given(np.float32([5, 7]), 2.0)
    np.testing.assert_array_equal(gradient.taken(sums, 2.0), [6.5, 10.0])


def test_frozen_norms_and_the_evaluation_graph_stay_as_they_are() -> None:
    step = gg.build(normed(), separate=True, freeze=["left.1.*"])
    joint = joint_norms(step)
    kept = [n for n in joint.gradient.graph.node if n.op_type == "BatchNormalization"]
    assert {n.name for n in kept if "left.1.weight" in n.input} and len(joint.messages) == 8
    assert "left.1.running_mean" not in norms_of(step.manifest) and "right.1.running_mean" in norms_of(step.manifest)


def penalty(out: Any, batch: Any) -> Any:
    """A loss that looks at a gradient, which goes through the norm."""
    slope = gg.frontend.grad(out["logits"].square().mean(), batch["x"])
    return slope.square().mean() + F.cross_entropy(out["logits"], batch["target"])


def given_statistics() -> onnx.ModelProto:
    """The network, of which a node computes the statistics that its norm is given."""
    model = small_cnn()
    model.graph.node.insert(0, onnx.helper.make_node("Abs", ["bn.running_var"], ["positive"]))
    next(n for n in model.graph.node if n.op_type == "BatchNormalization").input[4] = "positive"
    return model


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (small_cnn, {"freeze": "bn.*"}, "there is nothing to synchronise"),
        (small_cnn, {"loss": penalty, "targets": {"target": gg.frontend.Input(("batch",), "int64")}},
         "cannot be synchronised"),
        (given_statistics, {}, "reads statistics that the graph computes"),
    ],
)  # fmt: skip
def test_what_cannot_be_synchronised_is_refused_by_name(model: Any, options: dict[str, Any], said: str) -> None:
    step = gg.build(model(), separate=True, **options)
    with pytest.raises(BuildError, match=said):
        joint_norms(step)
