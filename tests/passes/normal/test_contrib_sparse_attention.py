"""SparseAttention of com.microsoft: onnxruntime's kernel computes the same as its standard form."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from gradgraph.errors import ModelError
from tests.kit.differences import wrong_gradients
from tests.kit.small_models import assert_same, model_of, normal_form, real, run
from tests.passes.normal.test_contrib import MICROSOFT, fused

BATCHED = ("q", "k", "v", "pk", "pv", "n")
B, HEADS, KV_HEADS, SIZE, BLOCK, ROOM = 2, 4, 2, 16, 16, 64

BLOCKS = {
    "one layout": [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]]],
    "two layouts": [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]],
    ],
}


def compressed(layouts):
    """Rows and columns of the blocks; rows of columns are padded with -1."""
    blocks = np.array(layouts)
    rows = np.pad(np.cumsum(blocks.sum(2), 1), [(0, 0), (1, 0)])
    columns = [np.nonzero(layout)[1] for layout in blocks]
    width = max(map(len, columns))
    padded = [np.pad(c, (0, width - len(c)), constant_values=-1) for c in columns]
    return {"rows": rows.astype(np.int32), "columns": np.array(padded, np.int32)}


def run_in_place(model, feeds):
    """Outputs of onnxruntime, whose kernel writes the present into the buffers of the past."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    held = {n: ort.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in feeds.items()}
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("y")
    binding.bind_ortvalue_output("present_k", held["pk"])
    binding.bind_ortvalue_output("present_v", held["pv"])
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()


# tokens of each sample, new ones, attributes
CASES = {
    "prompt": ([40, 40], 40, {}),
    "prompt of one block": ([7, 7], 7, {"scale": 0.3}),
    "prompts of two lengths": ([40, 23], 40, {}),
    "one more": ([50, 50], 1, {}),
    "one more, uneven": ([50, 33], 1, {}),
    "rotary prompt": ([20, 20], 20, {"do_rotary": 1}),
    "rotary, one more": ([50, 33], 1, {"do_rotary": 1, "rotary_interleaved": 1}),
}


def case_of(name, blocks, packed):
    lengths, new, attrs = CASES[name]
    parts = [real(B, new, n * SIZE, seed=i) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    feeds = dict(zip("qkv", parts, strict=True))
    feeds = {"q": np.concatenate(parts, -1), "k": None, "v": None} if packed else feeds
    feeds |= {n: real(B, KV_HEADS, ROOM, SIZE, seed=s) for n, s in (("pk", 5), ("pv", 6))}
    feeds |= compressed(BLOCKS[blocks]) | {"t": np.array(max(lengths), np.int32), "n": np.array(lengths, np.int32)}
    if "do_rotary" in attrs:
        feeds |= {"cos": real(ROOM, SIZE // 2, seed=7), "sin": real(ROOM, SIZE // 2, seed=8)}
    attrs = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "sparse_block_size": BLOCK, **attrs}
    model, given = fused("SparseAttention", feeds, attrs, ["y", "present_k", "present_v"])
    stored = {n: given.pop(n) for n in ("rows", "columns")}
    outputs = ["y", "present_k", "present_v"]
    return model_of(model.graph.node, given, outputs, 17, stored, domains=MICROSOFT), given


@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", CASES)
def test_sparse_attention(name, blocks, packed):
    """Each sample gets what the kernel computes for it alone (which differs from it in batches of several lengths)."""
    model, given = case_of(name, blocks, packed)
    found = normal_form(model)
    mine, *own = run(found, given)
    lengths, new, _ = CASES[name]
    for i, length in enumerate(lengths):
        kept = min(new, length)  # behind it is padding
        feeds = {n: a[i : i + 1] if n in BATCHED else a for n, a in given.items()}
        feeds |= {n: a[:, :kept] for n, a in feeds.items() if n in "qkv"} | {"t": np.array(length, np.int32)}
        alone = onnx.ModelProto.FromString(model.SerializeToString())
        for value in alone.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                dim.Clear()
        y, *caches = run_in_place(alone, feeds)
        assert_same([y[0]], [mine[i, :kept]], atol=1e-5, rtol=1e-4)
        for theirs, ours in zip(caches, own, strict=True):
            assert_same([theirs[0, :, :length]], [ours[i, :, :length]], atol=1e-5)
    if name == "prompt of one block" or new == 1:
        assert wrong_gradients(model, found, given, [n for n, a in given.items() if a.dtype == np.float32]) == []


def test_blocks_that_are_computed_are_refused():
    model, given = case_of("prompt", "one layout", False)
    feeds = given | compressed(BLOCKS["one layout"])
    names = ["q", "k", "v", "pk", "pv", "rows", "columns", "t", "n"]
    attrs = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "sparse_block_size": BLOCK}
    model, _ = fused("SparseAttention", {n: feeds[n] for n in names}, attrs, ["y", "present_k", "present_v"])
    with pytest.raises(ModelError, match=r"'fused'.*computes the blocks of its mask"):
        normal_form(model)
