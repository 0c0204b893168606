"""Generation with plain onnxruntime and a key-value cache: one run for the prompts, then one per token.

Other states, of convolutions and recurrences, start at zero and are passed on in the same way. A model without states
runs on the whole text for each token. If the exporter has fixed the number of tokens, texts are padded to it on the
right, and generation ends there.

Prompts of different lengths are padded. GroupQueryAttention only reads the number of tokens of a row from the mask, so
its rows are padded on the right; other models read the mask itself and are padded on the left. Convolutions and
recurrences would read padding, so models with such states run on prompts of one length at a time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from gradgraph.chat.picking import picked
from gradgraph.chat.prompts import Steps
from gradgraph.chat.sampling import Sampling
from gradgraph.data.arrays.batch import Array
from gradgraph.errors import DataError, ModelError, shown
from gradgraph.files.held_files import files_of, read_by_path
from gradgraph.files.models import load_model
from gradgraph.files.untrusted.regular import open_regular, reason_of
from gradgraph.machine.forked_sessions import survives_forks
from gradgraph.runtime.execution.session import explained
from gradgraph.surgery.language_models import MASK, POSITIONS, USE_CACHE, batch_axis, fixed_length
from gradgraph.surgery.model_states import states_of
from gradgraph.surgery.ort_adapters import SUFFIX
from gradgraph.surgery.packed_tokens import has_packed_tokens

_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
_WHOLE = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


class Decoder(Steps):
    """A generating model with its key-value cache.

    Args:
        model: a file written by onnxruntime-genai's builder or optimum. Inputs: tokens, and optionally a mask,
            positions, past keys and values, and other states. Outputs: scores and the next states. In a merged decoder
            of optimum, ``use_cache_branch`` is False in the first run and True in later runs.
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
        loaded = load_model(model)
        if has_packed_tokens(loaded):
            raise ModelError(
                f"'{shown(model)}' takes packed texts, with keys and values in pages, which onnxruntime computes only "
                "on GPUs; generate with onnxruntime-genai on one"
            )
        attentions = [node for node in loaded.graph if node.op_type == "GroupQueryAttention"]
        self.pads_behind, self._windows, self._head_size = bool(attentions), _windows(attentions), head_size
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        # float16 files of onnxruntime-genai 0.18 declare wrong shapes, so reused buffers would be too small
        options.enable_mem_reuse = all(v.dtype != ir.DataType.FLOAT16 for v in loaded.graph.inputs)
        self._files = [file for file in files_of(loaded) if not file.own]  # which onnxruntime maps
        with read_by_path(self._files), explained(f"onnxruntime rejects the model '{shown(model)}'"):
            self._session = survives_forks(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]))
        self._inputs = {v.name: v for v in self._session.get_inputs()}
        self._outputs = {v.name: v for v in self._session.get_outputs()}
        self._past = self._states_in(loaded, model)
        self._tokens = self._only_tokens(model)
        self._length = fixed_length(loaded)
        self._scores: str = "logits" if "logits" in self._outputs else next(iter(self._outputs))
        self._run = ort.RunOptions()
        if adapter is not None:
            self._adapter = _adapter_of(adapter, [v.name for v in self._session.get_overridable_initializers()])
            self._run.add_active_adapter(self._adapter)

    def _states_in(self, loaded: ir.Model, model: object) -> dict[str, _Cached]:
        """Return the states of the model by the name of the input, and how each continues."""
        others, found = {MASK, POSITIONS, USE_CACHE}, {}
        ids = (
            v for v in loaded.graph.inputs if v.name not in others and v.dtype in (ir.DataType.INT64, ir.DataType.INT32)
        )
        tokens = next(ids, None)
        for state in states_of(loaded, others):
            name, value = state.past.name or "", self._inputs[state.past.name or ""]
            if state.present is None or value.type not in _FLOATS:
                raise ModelError(
                    f"'{shown(model)}' has the state '{shown(name)}' ({value.type}, {value.shape}), which no output "
                    "continues, or whose type NumPy does not support; generate with onnxruntime-genai"
                )
            batch = 0 if tokens is None else batch_axis(state.past, tokens)
            found[name] = _Cached(state.present.name or "", batch, state.axis)
        return found

    def _only_tokens(self, model: object) -> str:
        known = {*self._past, MASK, POSITIONS, USE_CACHE}
        others = [name for name in self._inputs if name not in known]
        if len(others) != 1 or self._inputs[others[0]].type not in _WHOLE or len(self._inputs[others[0]].shape) != 2:
            told = ", ".join(f"'{shown(name)}'" for name in others)
            raise ModelError(
                f"'{shown(model)}' has the inputs {told} besides a mask, positions and states, but one input of tokens "
                "[batch, length] is expected; generate with onnxruntime-genai"
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

        A model whose number of tokens is fixed generates until the longest text has this length.

        Args:
            prompts: token ids, at least one each.
            stop: the tokens that end an answer.
            sampling: how tokens are chosen; by default the most likely ones, at most 128.
            rows: an index per prompt, which seeds its random draws; from 0 by default.

        Raises:
            DataError: a prompt is empty or too long; or prompts have different lengths, but the model does not support
                them.
            ModelError: onnxruntime fails, or a file with external data was overwritten since it was opened.
        """
        chosen = sampling or Sampling()
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise DataError("a prompt has no tokens; give each at least one, such as the begin-of-text token")
        if len(set(map(len, prompts))) > 1 and not self.pads:
            raise DataError(
                "the prompts have different lengths, but this model has no mask and positions, a sliding-window cache, "
                "or the state of a convolution or recurrence; generate for prompts of equal length"
            )
        placed = _Rows(prompts, self.pads_behind, bool(self._past))
        cache = {name: self._empty(name, len(prompts)) for name in self._past}
        draws, done = (
            [np.random.default_rng([chosen.seed, i]) for i in rows or range(len(prompts))],
            [False] * len(prompts),
        )
        seen = [list(prompt) for prompt in prompts]
        new, at = placed.first()
        for _ in range(self._most(new.shape[1], chosen.max_tokens)):
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

    def _most(self, longest: int, asked: int) -> int:
        """Return how many of the ``asked`` tokens can follow a prompt of ``longest`` tokens."""
        if self._length is None:
            return asked
        if longest > self._length:
            raise DataError(
                f"the prompt has {longest} tokens, but the model was exported for texts of {self._length}; shorten the "
                "prompt, or export the model for longer texts"
            )
        return min(asked, self._length - longest + 1)

    @property
    def pads(self) -> bool:
        """Whether prompts of different lengths can share a run."""
        reads = {MASK} if self.pads_behind else {MASK, POSITIONS}
        in_order = bool(self._past) or not self.pads_behind  # new tokens follow the padding of a row
        fixed = any(state.axis is None for state in self._past.values())  # would contain the padding
        return reads <= set(self._inputs) and not (self._windows or fixed) and in_order

    def _empty(self, name: str, rows: int) -> Any:
        """Return the state ``name`` before the first token of ``rows`` texts."""
        value, state = self._inputs[name], self._past[name]
        after = self._outputs[state.present].shape
        sizes = [next((size for size in each if isinstance(size, int)), None)
                 for each in zip(value.shape, after, strict=True)]  # fmt: skip
        sizes[state.batch] = rows
        if state.axis is not None and not isinstance(value.shape[state.axis], int):
            sizes[state.axis] = self._windows.get(name, 0)
            sizes[-1] = self._head_size if sizes[-1] is None else sizes[-1]
            if sizes[-1] is None:
                raise ModelError(
                    f"neither the cache input '{shown(name)}' nor a genai_config.json contains the head size",
                    remedy="put that file next to the model, or pass head_size=",
                    shell="put that file next to the model",
                )
        shape = [size for size in sizes if size is not None]
        if len(shape) < len(sizes):
            raise ModelError(
                f"the sizes of the state '{shown(name)}' are unknown ({value.shape}); export the model with fixed "
                "sizes of its states, or generate with onnxruntime-genai"
            )
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, _FLOATS[value.type]))

    def _scored(self, rows: _Rows, new: Array, cache: dict[str, Any]) -> Array:
        """Return the scores ``[rows, new tokens, vocabulary]`` and add the new tokens to the cache."""
        for file in self._files:
            file.check_unchanged()
        whole = {self._tokens: new, MASK: rows.mask, POSITIONS: rows.positions}
        arrays = {name: self._padded(array) for name, array in whole.items()}
        arrays[POSITIONS] = self._placed(arrays[POSITIONS])
        feeds = {
            name: ort.OrtValue.ortvalue_from_numpy(array.astype(_WHOLE[self._inputs[name].type]))
            for name, array in arrays.items()
            if name in self._inputs
        }
        if USE_CACHE in self._inputs:
            feeds[USE_CACHE] = ort.OrtValue.ortvalue_from_numpy(np.array([rows.has_past]))
        wanted = [self._scores, *(state.present for state in self._past.values())]
        with explained("running the model failed"):
            found = self._session.run_with_ort_values(wanted, {**feeds, **cache}, self._run)
        cache.update(zip(self._past, found[1:], strict=True))
        scores: Array = found[0].numpy()
        return scores

    def _padded(self, array: Array) -> Array:
        """Pad rows with zeros on the right, which causal models do not read, if the number of tokens is fixed."""
        return array if self._length is None else np.pad(array, ((0, 0), (0, self._length - array.shape[1])))

    def _placed(self, positions: Array) -> Array:
        """Return positions ``[rows, new]`` in the shape of the input, which may have axes of MRoPE in front."""
        shape: list[Any] = self._inputs[POSITIONS].shape if POSITIONS in self._inputs else []
        return np.broadcast_to(positions, (shape[0], *positions.shape)) if len(shape) == 3 else positions


@dataclass(frozen=True)
class _Cached:
    """A state that runs pass on.

    Attributes:
        present: the output with its next value.
        batch: the axis of the rows.
        axis: the axis along which it grows; None if its size is fixed.
    """

    present: str
    batch: int
    axis: int | None


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


def _windows(attentions: Sequence[ir.Node]) -> dict[str, int]:
    """Return the window size of each cache input of sliding-window attention, by input name."""
    found = dict[str, int]()
    for node in attentions:
        if node.attributes.get_int("sliding_window_cache", 0):
            names = [v.name or "" for v in node.inputs[3:5] if v is not None]
            found |= dict.fromkeys(names, node.attributes.get_int("local_window_size", 0))
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
