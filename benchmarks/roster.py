"""The benchmarked libraries: the module that trains, its requirements, and its process's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# PyTorch is faster with an allocator that keeps freed memory
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
    "MALLOC_TOP_PAD_": "200000000",
}


@dataclass(frozen=True)
class Entry:
    """A benchmarked library: one column of the table.

    Attributes:
        module: the name of a module in ``benchmarks.peers``.
        mode: the variant, passed to the module.
        needs: the packages of its own environment; empty for the environment of the benchmark.
        variables: the environment variables of the process.
        first_loss: the largest relative difference of its first loss from PyTorch's.
    """

    module: str
    mode: str = ""
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    first_loss: float = 1e-4


PEERS = {
    "gradgraph": Entry("gradgraph_step"),
    "gradgraph-native": Entry("gradgraph_native_step"),
    "torch": Entry("torch_step", "eager", variables=KEEP_MEMORY),
    "torch-compile": Entry("torch_step", "compile", variables=KEEP_MEMORY),
    "ort-training": Entry(
        "ort_training_step", needs=("numpy<2", "onnx==1.16.2", "onnxruntime-training-cpu==1.19.2", "torch==2.13.0")
    ),
    "onnxsim": Entry("onnxsim_step", needs=("onnxsim==0.8.1", "onnx==1.23.2", "onnxruntime==1.31.1")),
    "onnx-ad": Entry("onnx_ad_step", needs=("onnx-ad==0.3.0", "onnx==1.23.2", "onnxruntime==1.31.1")),
    "jax": Entry("jax_step", needs=("jax==0.10.2",)),
}
# for real sizes, whose state is large
REAL_PEERS = {
    "gradgraph": PEERS["gradgraph"],
    "gradgraph-lean": Entry("gradgraph_step", "lean"),
    "gradgraph-native": PEERS["gradgraph-native"],
    "torch": PEERS["torch"],
    "torch-compile": PEERS["torch-compile"],
}
REAL_OURS = [name for name in REAL_PEERS if name.startswith("gradgraph")]
# only if named, as their products are less exact: torch.set_float32_matmul_precision("medium") rounds the factors of
# matrix products to bfloat16, so that losses differ (and "high" changes nothing on a CPU)
LESS_EXACT = {
    "gradgraph-native-high": Entry("gradgraph_native_step", "high"),
    "torch-medium": Entry("torch_step", "medium", variables=KEEP_MEMORY, first_loss=1e-2),
}
# on a CUDA device, in the environment of the benchmark
DEVICE_PEERS = {
    "gradgraph": Entry("gradgraph_step"),
    "gradgraph-graphs": Entry("gradgraph_graph_step"),
    "torch": Entry("torch_step", "eager"),
    "torch-compile": Entry("torch_step", "compile"),
}
OURS = "gradgraph"
NATIVE = "gradgraph-native"
TORCH = ("torch", "torch-compile")  # the reference of the targets
YARDSTICK = Entry("matmul_step")
YARDSTICKS = {  # timed in addition to the libraries, by device
    "cpu": {"matmul": YARDSTICK, "floor": Entry("floor_step")},
    "cuda": {"matmul": YARDSTICK},
}
YARDSTICK_SIZE = 2048
YARDSTICK_FLOPS = 2 * YARDSTICK_SIZE**3
