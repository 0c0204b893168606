"""A walk: what was chosen at random on the way from data to a model in use, and the laws that it broke."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from gradgraph.cli.app import run
from gradgraph.errors import GradgraphError

Array = np.ndarray[Any, Any]
ODD_NAMES = (
    "a,b",
    'say "x"',
    "a=b",
    "Ünï ☃",
    " led",
    "x.1",
    "class",
    "rows",
    "logits",
    "target",
    "x",
    "0",
    "a/b",
    "[c]",
    "probabilities",
    "label",
    "categories",
    "y",
    "output",
    "preprocess/x",
    "-v",
    "a:b",
    "a*",
    "{q}",
)
ODD_CLASSES = (
    "cat",
    "dog",
    "a,b",
    'say "x"',
    "Ünï ☃",
    "inf",
    "1e3",
    "x y",
    "-",
    "=1+1",
    "a=b",
    "Zürich",
    "no",
    "yes",
    "[c]",
    "a/b",
    "cat ",
    "'q'",
    "日本",
    "a:b",
    "10",
    "9",
)


class ShellError(Exception):
    """A command ended with another exit code than 0; the text is what it wrote to stderr."""


@dataclass
class Walk:
    """One walk.

    Attributes:
        rng: all that is drawn comes from it.
        folder: an empty one.
        chosen: what was drawn, in words.
        broken: the laws that do not hold, each with what was found.
    """

    seed: int
    folder: Path
    chosen: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    # --- drawing ----------------------------------------------------------------------------------------------

    def choose(self, what: str, options: Sequence[Any]) -> Any:
        found = options[int(self.rng.integers(len(options)))]
        self.chosen.append(f"{what}={found}")
        return found

    def flag(self, what: str, share: float = 0.5) -> bool:
        found = bool(self.rng.random() < share)
        if found:
            self.chosen.append(what)
        return found

    def some(self, options: Sequence[Any], count: int) -> list[Any]:
        """``count`` different ones, in random order."""
        return [options[i] for i in self.rng.permutation(len(options))[:count]]

    # --- laws -------------------------------------------------------------------------------------------------

    def law(self, said: str, holds: bool, found: object = "") -> None:
        if not holds:
            self.broken.append(f"{said}: {found}"[:1500])

    def close(self, said: str, found: Any, expected: Any, tolerance: float = 2e-4) -> None:
        """Numbers are equal, but for rounding in float32."""
        a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        if a.shape != b.shape:
            self.law(said, False, f"shapes {a.shape} and {b.shape}")
            return
        size = max(1.0, float(np.abs(b).max(initial=0)))
        self.law(
            said,
            bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * size, equal_nan=True)),
            f"{a.ravel()[:4]} instead of {b.ravel()[:4]}, by {np.abs(a - b).max(initial=0):.3g}",
        )

    def same(self, said: str, found: Any, expected: Any) -> None:
        """Equal to the bit, also arrays in dicts."""
        a, b = (_plain(value) for value in (found, expected))
        self.law(said, a == b, f"{str(found)[:300]} instead of {str(expected)[:300]}")

    def refused(self, said: str, call: Callable[[], Any], *words: str) -> None:
        """``call`` ends with one sentence that has these words."""
        try:
            call()
        except (GradgraphError, ShellError, ValueError) as error:
            self.law(said, all(word in str(error) for word in words), f"refused with: {error}")
            self.law(f"{said}, with no traceback", "Traceback" not in str(error), error)
        else:
            self.law(said, False, "nothing was refused")

    # --- the shell --------------------------------------------------------------------------------------------

    def shell(self, *words: Any) -> str:
        """What a command of gradgraph prints; raises ShellError."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run([str(word) for word in words])
        if code != 0:
            raise ShellError(err.getvalue().strip()[-1200:])
        return out.getvalue()

    def json(self, *words: Any) -> Any:
        return json.loads(self.shell(*words, "--json", "--quiet"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return repr(value)


# --- plain references -----------------------------------------------------------------------------------------------


def bare(path: Path, feeds: dict[str, Array]) -> dict[str, Array]:
    """What onnxruntime itself makes of a file."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(None, feeds)), strict=True))


def softmax(scores: Array) -> Array:
    high = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    shares: Array = high / high.sum(axis=1, keepdims=True)
    return shares


def entropies(scores: Array, labels: Array) -> Array:
    """The negative log-likelihood of each label."""
    wide = scores.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    found: Array = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]
    return found


def classifier_scores(scores: Array, labels: Array) -> dict[str, float]:
    """The metrics of scikit-learn."""
    from sklearn import metrics

    count, called = scores.shape[1], scores.argmax(axis=1)
    return {
        "accuracy": metrics.accuracy_score(labels, called),
        "log_loss": float(entropies(scores, labels).mean()),
        "mcc": metrics.matthews_corrcoef(labels, called),
        "cohen_kappa": metrics.cohen_kappa_score(labels, called, labels=range(count)),
        "brier": float(np.mean(((softmax(scores) - np.eye(count)[labels]) ** 2).sum(axis=1))),
    }


def regression_scores(found: Array, wanted: Array) -> dict[str, float]:
    from sklearn import metrics

    return {
        "mae": metrics.mean_absolute_error(wanted, found),
        "mse": metrics.mean_squared_error(wanted, found),
        "rmse": float(np.sqrt(metrics.mean_squared_error(wanted, found))),
        "r2": metrics.r2_score(wanted, found),
        "explained_variance": metrics.explained_variance_score(wanted, found),
    }
