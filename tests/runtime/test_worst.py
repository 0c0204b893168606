"""What a model gets wrong: the table of classes, and the samples with the largest losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph.errors import DataError
from gradgraph.frontend import export, manual_seed, nn
from gradgraph.runtime.execution.class_table import ClassTable
from gradgraph.runtime.execution.worst import largest

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
DATA = {"x": X, "target": X[:, :3].argmax(1)}


class Samples:
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: a[i] for name, a in DATA.items()}


def network() -> Any:
    manual_seed(0)
    return export(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), {"x": ("batch", 4)}, ["scores"])


def trainer(**options: Any) -> gg.Trainer:
    return gg.Trainer(gg.build(network(), **{"loss": "cross_entropy", **options}), device="cpu")


def losses_of_each(t: gg.Trainer, data: dict[str, np.ndarray]) -> np.ndarray:
    scores = t.predict(data["x"]).astype(np.float64)
    log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -log_p[np.arange(len(scores)), data["target"]]


@pytest.mark.parametrize("metric", ["confusion_matrix", "f1", "precision(average='weighted')", "balanced_accuracy"])
def test_the_table_is_that_of_the_predictions(metric: str) -> None:
    t = trainer(metrics=metric)
    called = t.predict(X).argmax(1)
    table = t.per_class(DATA, 7, classes=["a", "b", "c"])
    for i, row in enumerate(table.rows()):
        hits = ((called == i) & (DATA["target"] == i)).sum()
        assert row["class"] == "abc"[i] and row["samples"] == (DATA["target"] == i).sum()
        assert row["recall"] == pytest.approx(hits / (DATA["target"] == i).sum())
        assert row["precision"] == pytest.approx(hits / max((called == i).sum(), 1))
    assert table.accuracy == pytest.approx((called == DATA["target"]).mean())
    wrong = {(a, b): n for a, b, n in table.confused(9)}
    for (i, a), (j, b) in [((i, a), (j, b)) for i, a in enumerate("abc") for j, b in enumerate("abc") if i != j]:
        assert wrong.get((a, b), 0) == ((DATA["target"] == i) & (called == j)).sum()


def test_a_table_is_read_at_a_glance() -> None:
    table = ClassTable.of(np.array([[3.0, 1.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]), ["cat", "<b>", "owl"])
    assert str(table).splitlines() == [
        "class  precision  recall      f1  samples",
        "cat       1.0000  0.7500  0.8571        4",
        "<b>       0.8000  1.0000  0.8889        4",
        "owl       0.0000  0.0000  0.0000        0",
        "mean      0.9000  0.8750  0.8730        8",  # of the classes that there are
        "accuracy 0.8750",
        "called <b>, and is cat: 1",
    ]
    assert "<b>" not in table._repr_html_() and "&lt;b&gt;" in table._repr_html_()


REFUSED = {
    "no counts": (
        {},
        {},
        r"the step was built without a metric that counts classes; build it with metrics=\['confusion_matrix'\]",
    ),
    "another metric": (
        {"metrics": ["f1", "top_k(k=2)"]},
        {"metric": "top_2"},
        "'top_2' is not a metric that counts classes; choose 'f1'",
    ),
    "two names": ({"metrics": "f1"}, {"classes": ["a", "b"]}, "2 class names for 3 classes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_that_cannot_be_is_one_sentence(name: str) -> None:
    built, asked, says = REFUSED[name]
    with pytest.raises(DataError, match=says):
        trainer(**built).per_class(DATA, **asked)


@pytest.mark.parametrize("data", ["arrays", "batches", "dataset"])
def test_the_worst_have_the_largest_losses(data: str) -> None:
    t = trainer()
    given: Any = DATA
    if data == "batches":
        given = [{name: a[i : i + 16] for name, a in DATA.items()} for i in range(0, 60, 16)]
    elif data == "dataset":
        given = Samples()
    losses = losses_of_each(t, DATA)
    found = t.worst(given, 5)
    assert [w.index for w in found] == np.argsort(-losses)[:5].tolist()
    scores = t.predict(X)
    for w in found:
        assert w.value == pytest.approx(losses[w.index], rel=1e-5)
        np.testing.assert_array_equal(w.sample["x"], X[w.index])
        assert w.sample["target"] == DATA["target"][w.index]
        np.testing.assert_allclose(w.outputs["scores"], scores[w.index], rtol=1e-5, atol=1e-6)
    assert str(found).startswith(f"sample {found[0].index}: {found[0].value:.6g}; x [")
    assert found._repr_html_().count("<tr>") == 6
    assert len(t.worst(given, 100)) == 60


def test_a_wrong_label_is_found() -> None:
    t = trainer(optimizer=gg.optim.adam(1e-2))
    wrong = {**DATA, "target": DATA["target"].copy()}
    wrong["target"][17] = (wrong["target"][17] + 1) % 3
    t.fit(wrong, epochs=40, progress=False)
    before = t.state_dict()
    assert t.worst(wrong, 1)[0].index == 17
    assert all((before[name] == array).all() for name, array in t.state_dict().items())


def test_samples_without_labels_are_left_out() -> None:
    data = {**DATA, "target": np.where(np.arange(60) % 2, DATA["target"], -100)}
    found = trainer().worst(data, 60)
    assert sorted(w.index for w in found) == list(range(1, 60, 2))


def test_the_loss_of_one_of_several_steps() -> None:
    steps = {name: gg.StepOptions("cross_entropy", gg.optim.sgd(lr)) for name, lr in (("one", 0.1), ("two", 0.2))}
    t = gg.Trainer(gg.build(network(), steps=steps), device="cpu")
    with pytest.raises(
        DataError, match="several steps, each with its own loss; choose the step whose loss ranks the samples: by='one'"
    ):
        t.worst(DATA)
    with pytest.raises(DataError, match="there is no step 'tow'"):
        t.worst(DATA, by="tow")
    assert [w.index for w in t.worst(DATA, 3, by="two")] == np.argsort(-losses_of_each(t, DATA))[:3].tolist()


def test_a_model_for_batches_of_one_size_is_refused() -> None:
    model = export(nn.Linear(4, 3), {"x": (8, 4)})
    t = gg.Trainer(gg.build(model, "cross_entropy"), device="cpu")
    with pytest.raises(DataError, match="'x' has a fixed batch size of 8; export the model with a dynamic batch axis"):
        t.worst({name: a[:56] for name, a in DATA.items()})


def test_no_number_is_the_largest_and_equals_stay_in_order() -> None:
    values = [1.0, np.nan, 3.0, 3.0, 2.0]
    assert [i for i, _, _ in largest([(i, v, {}) for i, v in enumerate(values)], 3)] == [1, 2, 3]
