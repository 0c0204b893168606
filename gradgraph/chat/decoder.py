"""Generation with plain onnxruntime and a key-value cache: one run for the prompts, then one per token.

A model without a cache runs on the whole text for each token.

Prompts of different lengths are padded. GroupQueryAttention only reads the number of tokens of a row from the mask, so
its rows are padded on the right; other models read the mask itself and are padded on the left.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gradgraph.chat.picking import picked
from gradgraph.chat.sampling import Sampling
from gradgraph.data.arrays.batch import Array
from gradgraph.errors import DataError, ModelError, shown
from gradgraph.files.untrusted.messages import message_of
from gradgraph.files.untrusted.regular import UnreadableError, open_regular, reason_of, regular_bytes
from gradgraph.machine.forked_sessions import survives_forks
from gradgraph.runtime.execution.session import explained
from gradgraph.surgery.language_models import MASK, POSITIONS, USE_CACHE
from gradgraph.surgery.ort_adapters import SUFFIX

_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_WHOLE = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


class Decoder:
    """A generating model with its key-value cache.

    Args:
        model: a file written by onnxruntime-genai's builder or optimum. Inputs: tokens, and optionally a mask,
            positions and past keys and values. Outputs: scores and present keys and values. In a merged decoder of
            optimum, ``use_cache_branch`` is False in the first run and True in later runs.
        adapter: a file in onnxruntime's adapter format, for a model with adapters as optional inputs.
        head_size: the head size, if neither the file nor ``genai_config.json`` contains it.
        threads: number of threads; 0: one per core.

    Attributes:
        pads_behind: whether rows are padded on the right, as for GroupQueryAttention.

    Raises:
        ModelError: the file cannot be read, or onnxruntime rejects it; it has unexpected inputs, or a data type
            that NumPy does not support; or the adapter cannot be read.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        adapter: str | os.PathLike[str] | None = None,
        head_size: int | None = None,
        threads: int = 0,
    ) -> None:
        try:
            graph = message_of(regular_bytes(model)).graph
        except UnreadableError as error:
            raise ModelError(f"'{shown(model)}' cannot be read ({error}); check the file") from None
        attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
        self.pads_behind, self._windows, self._head_size = bool(attentions), _windows(attentions), head_size
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        # float16 files of onnxruntime-genai 0.18 declare wrong shapes, so reused buffers would be too small
        halves = onnx.TensorProto.FLOAT16
        options.enable_mem_reuse = all(v.type.tensor_type.elem_type != halves for v in graph.input)
        with explained(f"onnxruntime rejects the model '{shown(model)}'"):
            self._session = survives_forks(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]))
        self._inputs = {v.name: v for v in self._session.get_inputs()}
        self._outputs = {v.name: v for v in self._session.get_outputs()}
        self._past = self._paired(model)
        self._tokens = self._only_tokens(model)
        self._scores: str = "logits" if "logits" in self._outputs else next(iter(self._outputs))
        self._run = ort.RunOptions()
        if adapter is not None:
            self._adapter = _adapter_of(adapter, [v.name for v in self._session.get_overridable_initializers()])
            self._run.add_active_adapter(self._adapter)

    def _paired(self, model: object) -> dict[str, str]:
        """Return, for each input of past keys or values, the name of the output of present keys or values."""
        found = {}
        for name, value in self._inputs.items():
            if "past" not in name or len(value.shape) != 4:
                continue
            ways = (name.replace("past_key_values", "present"), name.replace("past", "present"))
            present = next((way for way in ways if way in self._outputs), None)
            if present is None or value.type not in _FLOATS or not isinstance(value.shape[1], int):
                raise ModelError(
                    f"'{shown(model)}' has the cache input '{shown(name)}' ({value.type}, {value.shape}), which has no "
                    "matching output, a dynamic number of heads, or a type that NumPy does not support; generate with "
                    "onnxruntime-genai"
                )
            found[name] = present
        return found

    def _only_tokens(self, model: object) -> str:
        known = {*self._past, MASK, POSITIONS, USE_CACHE}
        others = [name for name in self._inputs if name not in known]
        if len(others) != 1 or self._inputs[others[0]].type not in _WHOLE or len(self._inputs[others[0]].shape) != 2:
            told = ", ".join(f"'{shown(name)}'" for name in others)
            raise ModelError(
                f"'{shown(model)}' has the inputs {told} besides a mask, positions and past keys and values, but one "
                "input of tokens [batch, length] is expected; generate with onnxruntime-genai"
            )
        name: str = others[0]
        return name

    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
        rows: Sequence[int] | None = None,
    ) -> Iterator[list[int | None]]:
        """Yield the next token of each prompt, up to and including a token of ``stop``; after that, None.

        Args:
            prompts: token ids, at least one each.
            stop: the tokens that end an answer.
            sampling: how tokens are chosen; by default the most likely ones, at most 128.
            rows: an index per prompt, which seeds its random draws; from 0 by default.

        Raises:
            DataError: a prompt is empty; or prompts have different lengths, which the model does not support.
        """
        chosen = sampling or Sampling()
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise DataError("a prompt has no tokens; give each at least one, such as the begin-of-text token")
        if len(set(map(len, prompts))) > 1 and not self.pads:
            raise DataError(
                "the prompts have different lengths, but this model has no mask and positions, or a sliding-window "
                "cache; generate for prompts of equal length"
            )
        placed = _Rows(prompts, self.pads_behind, bool(self._past))
        cache = {name: self._empty(name, len(prompts)) for name in self._past}
        draws, done = (
            [np.random.default_rng([chosen.seed, i]) for i in rows or range(len(prompts))],
            [False] * len(prompts),
        )
        seen = [list(prompt) for prompt in prompts]
        new, at = placed.first()
        for _ in range(chosen.max_tokens):
            scores = self._scored(placed, new, cache)
            found: list[int | None] = [
                None if done[i] else picked(scores[i, at[i]], chosen, draws[i], seen[i]) for i in range(len(prompts))
            ]
            yield found
            for i, token in enumerate(found):
                done[i] = done[i] or token in stop
                seen[i] += [] if token is None else [token]
            if all(done):
                return
            new, at = placed.then([0 if token is None else token for token in found])

    def generated(
        self, prompts: Sequence[Sequence[int]], stop: Collection[int] = (), sampling: Sampling | None = None
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, as generated by :meth:`steps`, including the stop token."""
        found: list[list[int]] = [[] for _ in prompts]
        for group in [range(len(prompts))] if self.pads else _of_one_length(prompts):
            for tokens in self.steps([prompts[i] for i in group], stop, sampling, rows=group):
                for i, token in zip(group, tokens, strict=True):
                    found[i] += [] if token is None else [token]
        return found

    @property
    def pads(self) -> bool:
        """Whether prompts of different lengths can share a run."""
        reads = {MASK} if self.pads_behind else {MASK, POSITIONS}
        in_order = bool(self._past) or not self.pads_behind  # new tokens follow the padding of a row
        return reads <= set(self._inputs) and not self._windows and in_order

    def _empty(self, name: str, rows: int) -> Any:
        value = self._inputs[name]
        sizes = (value.shape[3], self._outputs[self._past[name]].shape[3], self._head_size)
        size = next((size for size in sizes if isinstance(size, int)), None)
        if size is None:
            raise ModelError(
                f"neither the cache input '{shown(name)}' nor a genai_config.json contains the head size",
                remedy="put that file next to the model, or pass head_size=",
                shell="put that file next to the model",
            )
        length = self._windows.get(name, 0)
        return ort.OrtValue.ortvalue_from_numpy(np.zeros((rows, value.shape[1], length, size), _FLOATS[value.type]))

    def _scored(self, rows: _Rows, new: Array, cache: dict[str, Any]) -> Array:
        """Return the scores ``[rows, new tokens, vocabulary]`` and add the new tokens to the cache."""
        arrays = {self._tokens: new, MASK: rows.mask, POSITIONS: rows.positions}
        feeds = {
            name: ort.OrtValue.ortvalue_from_numpy(array.astype(_WHOLE[self._inputs[name].type]))
            for name, array in arrays.items()
            if name in self._inputs
        }
        if USE_CACHE in self._inputs:
            feeds[USE_CACHE] = ort.OrtValue.ortvalue_from_numpy(np.array([rows.has_past]))
        wanted = [self._scores, *self._past.values()]
        with explained("running the model failed"):
            found = self._session.run_with_ort_values(wanted, {**feeds, **cache}, self._run)
        cache.update(zip(self._past, found[1:], strict=True))
        scores: Array = found[0].numpy()
        return scores


def _adapter_of(file: str | os.PathLike[str], known: Collection[str]) -> ort.LoraAdapter:
    """Load the adapters in a file of onnxruntime's format, for a model with ``known`` tensors; raises ModelError."""
    found = ort.LoraAdapter()
    try:
        open_regular(file).close()
        found.Load(os.fspath(file))
        names = ort.AdapterFormat.read_adapter(os.fspath(file)).get_parameters()  # pyright: ignore[reportArgumentType]
    except Exception as error:  # onnxruntime raises several classes
        raise ModelError(
            f"the adapter '{shown(file)}' cannot be read ({reason_of(error)})",
            remedy=f"pass a file {SUFFIX} written by gg.surgery.save_adapter or finetune",
            shell=f"pass a file {SUFFIX} written by `gradgraph finetune`",
        ) from None
    other = next((name for name in sorted(names) if name not in known), None)
    if other is not None:
        raise ModelError(
            f"the adapter '{shown(file)}' has the tensor '{shown(other)}', but the model has no adapter input of that "
            "name",
            remedy="use the base model written by gg.surgery.switchable, or a PEFT folder",
            shell="use the base model written by `gradgraph surgery --switchable`, or a PEFT folder",
        )
    return found


def _of_one_length(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group prompts by length; return the indices of each group."""
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(i)
    return list(groups.values())


def _windows(attentions: Sequence[onnx.NodeProto]) -> dict[str, int]:
    """Return the window size of each cache input of sliding-window attention, by input name."""
    found = dict[str, int]()
    for node in attentions:
        attributes = {a.name: a.i for a in node.attribute}
        if attributes.get("sliding_window_cache"):
            found |= dict.fromkeys(node.input[3:5], attributes["local_window_size"])
    return found


class _Rows:
    """The placement of prompts in rows of one length.

    Attributes:
        mask: 1 for tokens, 0 for padding, for all tokens so far ``[rows, all]``.
        positions: positions of the new tokens ``[rows, new]``.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], behind: bool, cached: bool) -> None:
        self._cached, self.has_past = cached, False
        self._counts = np.array([len(prompt) for prompt in prompts])
        longest = int(self._counts.max())
        self._tokens, self.mask = np.zeros((len(prompts), longest), np.int64), np.zeros((len(prompts), longest), int)
        for i, prompt in enumerate(prompts):
            place = slice(0, len(prompt)) if behind else slice(longest - len(prompt), longest)
            self._tokens[i, place], self.mask[i, place] = prompt, 1
        self._ends = self._counts - 1 if behind else np.full(len(prompts), longest - 1)
        self.positions = np.maximum(self.mask.cumsum(1) - 1, 0)

    def first(self) -> tuple[Array, Array]:
        """Return the padded prompts ``[rows, longest]``, and the index of the last token in each row."""
        return self._tokens, self._ends

    def then(self, tokens: Sequence[int]) -> tuple[Array, Array]:
        """Append a token to each row; return the tokens to run (all without a cache), and the last index per row."""
        self.mask = np.pad(self.mask, ((0, 0), (0, 1)), constant_values=1)
        last = np.array(tokens)[:, None]
        if self._cached:
            self.has_past, self.positions, self._counts = True, self._counts[:, None], self._counts + 1
            return last, np.zeros(len(tokens), int)
        self._tokens, self.positions = np.concatenate([self._tokens, last], 1), np.maximum(self.mask.cumsum(1) - 1, 0)
        return self._tokens, np.full(len(tokens), self._tokens.shape[1] - 1)
