"""Creating onnxruntime sessions: on the device that was asked for, quietly, with errors of one sentence."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort

from gradgraph.arguments import TEXT
from gradgraph.autodiff.shared_sizes import COMPARED
from gradgraph.backends import of_provider
from gradgraph.backends.backend import Backend
from gradgraph.backends.ort_cpu import ORT_CPU
from gradgraph.backends.ort_cpu.cpu_lowering import packing
from gradgraph.backends.ort_native import in_use, library
from gradgraph.backends.ort_native.chosen_precision import at_precision
from gradgraph.backends.ort_native.native_precision import HIGHEST, PRECISIONS, Precision
from gradgraph.errors import DataError, GradgraphError, ModelError, RuntimeUnavailableError, shown
from gradgraph.machine import custom_ops
from gradgraph.runtime.execution import denormals
from gradgraph.runtime.execution.frozen_weights import FrozenWeights
from gradgraph.runtime.execution.useless_optimizations import useless_optimizations

log = logging.getLogger("gradgraph")

Device = Literal["auto", "cpu", "cuda"]
Provider = str | tuple[str, dict[str, Any]]
Memory = Callable[[ort.SessionOptions], contextlib.AbstractContextManager[None]]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
STOCK = "stock"  # onnxruntime's kernels alone
MOST_PACKED = 1 << 30  # bytes of frozen weights that each session may copy
LEAST_PASSED = 1 << 26  # bytes of frozen weights: of fewer, a second copy is less than what onnxruntime takes
LARGEST_FILLED = 1 << 20  # bytes of a constant that is computed in advance, and not of weights


@dataclass(frozen=True)
class RuntimeOptions:
    """Settings of onnxruntime that matter for training.

    Attributes:
        threads: threads within one operator; None is one per physical core.
        memory_pattern: plan all intermediates as one block per batch shape. At most 2 % faster, and up to half as much
            memory again and more: off.
        spinning: threads that wait for work within a step spin for a while before they sleep. 4 to 24 % faster; off
            leaves the processor to others sooner.
        optimization: onnxruntime's own graph optimisation: "none", "basic", "extended" or "all".
        in_place: write next values over the current ones where that is provably safe (on the CPU), which takes up to
            half of the memory. "auto" does so with tensors of 262,144 numbers and more, once the loss is known to be a
            number: a step that diverges leaves the state as it was, and so does one that fails before its loss. (One
            that fails later, for want of memory, loses it.) True does so with all tensors, and without waiting: a
            step that fails or diverges loses the state. False keeps two of each.
        flush_denormals: numbers below 1.2e-38 count as zero while a session computes, and only then (in Linux on
            x86-64; elsewhere this changes nothing). Each costs as much as ten others: those behind an attention mask,
            or moments that have faded away.
        deterministic: ask for kernels that give the same bits in every run (on CPU they do anyway).
        cuda_graph: on CUDA, record the step for batches of the usual shape as CUDA graphs, which spares launching its
            kernels one by one. True is an error for steps that cannot be recorded (with loops, or work for the CPU),
            "auto" runs these kernel by kernel.
        native_kernels: train with kernels in C++ (on the CPU provider, in float32). None: where they came with the
            package or ``gradgraph native build`` has built them, and they load; ``gradgraph env`` says whether, and
            why not. True: they are required. False: onnxruntime's alone. The environment variable
            ``GRADGRAPH_NATIVE_KERNELS`` (0 or 1) stands for None.
        matmul_precision: of products, convolutions and LSTMs that native kernels train with. "highest" is as exact as
            float32; "high" takes two bfloat16 for each number instead of three, which is faster: errors are at most
            2^-15 of the sum of the magnitudes that are added. Needs native kernels and a processor with AMX.
        custom_ops: libraries of operators that onnxruntime does not have: a path or several
            (``gradgraph.extend.library`` names one for all sessions).
        pack_weights: let each session keep a copy of large frozen weights in the order in which its products read them
            (on the CPU). That takes their size again for each session; without it, products of 4 to 32 rows take twice
            as long, of 128 rows and more 1.1 to 1.2 times. "auto" copies weights of up to 1 GiB in all, and of those
            of 4 or 8 bits in blocks up to 256 MiB; beyond, they are read from their file, where it is mapped. The
            session of ``Trainer.evaluate`` copies less than 64 MiB then, as that which trains has a copy.
    """

    threads: int | None = None
    memory_pattern: bool = False
    spinning: bool = True
    optimization: Literal["none", "basic", "extended", "all"] = "all"
    in_place: bool | Literal["auto"] = "auto"
    flush_denormals: bool = True
    deterministic: bool = False
    cuda_graph: bool | Literal["auto"] = False
    native_kernels: bool | None = None
    matmul_precision: Precision = HIGHEST
    custom_ops: custom_ops.Paths = ()
    pack_weights: bool | Literal["auto"] = "auto"

    def packs(self, size: int) -> bool:
        """Whether a session copies frozen weights of so many bytes; ``Placement.trains_for`` sees to few bits."""
        return size <= MOST_PACKED if self.pack_weights == "auto" else self.pack_weights

    def session_options(self) -> ort.SessionOptions:
        """The options of onnxruntime itself for a session with these settings: without native kernels where None."""
        options = ort.SessionOptions()
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        options.enable_mem_pattern = self.memory_pattern
        options.enable_mem_reuse = False  # or a buffer is held until a tensor of the same shape comes
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.spinning)))
        options.add_session_config_entry(denormals.SETTING, str(int(self._flushes)))
        # onnxruntime may read weights of 4 bits by MatMulNBits, and would round what they multiply to 8 bits
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", _FLOAT32)
        options.use_deterministic_compute = self.deterministic
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[self.optimization])
        options.log_severity_level = 4  # what is wrong is raised, so onnxruntime need not print it as well
        if self.native_kernels:
            library.here().add_to(options)
        custom_ops.register(options, self.custom_ops)
        return options

    @property
    def _flushes(self) -> bool:
        return self.flush_denormals and denormals.known_here()

    @property
    def session_type(self) -> type[ort.InferenceSession]:
        """The class of session that takes ``session_options()``."""
        return denormals.FlushingSession if self._flushes else ort.InferenceSession

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Set this thread for many runs of such sessions: between them it must only move numbers."""
        return denormals.Flushed() if self._flushes else contextlib.nullcontext()


_FLOAT32 = "1"
_FEW_BITS = "MatMulNBits"
_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}


@dataclass(frozen=True)
class Placement:
    """The execution providers of a trainer and the memory that its state lives in."""

    providers: tuple[Provider, ...]
    memory: Literal["cpu", "cuda"] = "cpu"
    device_id: int = 0

    @property
    def backend(self) -> Backend:
        """The backend to lower for: that of the first provider."""
        return of_provider(_name(self.providers[0]))

    def computes_for(self, options: RuntimeOptions) -> Backend:
        """The backend to lower evaluation and prediction for."""
        return packing(self.backend, options.pack_weights)

    def settled(self, options: RuntimeOptions) -> RuntimeOptions:
        """``options`` that say whether to train with native kernels: where the caller does not, where they run.

        Raises:
            RuntimeUnavailableError: an environment variable holds what it cannot.
        """
        if options.native_kernels is not None:
            return options
        wanted = options.matmul_precision != HIGHEST or (self.backend == ORT_CPU and in_use.by_default())
        return replace(options, native_kernels=wanted)

    def trains_for(self, options: RuntimeOptions) -> Backend:
        """The backend to lower training for.

        Raises:
            RuntimeUnavailableError: native kernels, or products of theirs that are less exact, are asked for and are
                not built, or cannot run here.
        """
        options, precision = self.settled(options), options.matmul_precision
        if precision not in PRECISIONS:
            raise RuntimeUnavailableError(
                f"there is no matmul_precision '{shown(precision)}'; use {' or '.join(PRECISIONS)}"
            )
        if precision != HIGHEST and not options.native_kernels:
            raise RuntimeUnavailableError(
                f"the matmul_precision '{precision}' is that of native kernels",
                remedy="leave native_kernels=False out, or leave it out",
                shell="leave --no-native-kernels out, or leave it out",
            )
        if not options.native_kernels:
            return self.computes_for(options)
        if self.backend != ORT_CPU:
            raise RuntimeUnavailableError(
                f"native kernels run on onnxruntime's CPU provider, and the first provider here is "
                f"{_name(self.providers[0])}",
                remedy="add device='cpu', or leave native_kernels out",
                shell="add --device cpu, or leave --native-kernels out",
            )
        library.here().required()
        if precision != HIGHEST and not library.here().has_tiles:
            raise RuntimeUnavailableError(
                f"the matmul_precision '{precision}' needs a processor with tiles for bfloat16 (AMX: "
                "Intel, from Sapphire Rapids on) and a compiler that knows them; leave it out"
            )
        return packing(at_precision(precision), options.pack_weights)

    def kernels(self, options: RuntimeOptions) -> str:
        """Return which kernels train with settled ``options``: a native library, or ``STOCK``; "" off the CPU."""
        if self.backend != ORT_CPU:
            return ""
        return library.here().path.stem if options.native_kernels else STOCK

    @classmethod
    def choose(
        cls,
        device: Device = "auto",
        providers: Sequence[Provider] | None = None,
        gpu: Callable[[], int] = lambda: 0,
    ) -> Placement:
        """Translate ``device`` or an explicit provider list, and see that the first provider really starts.

        ``"auto"`` is CUDA where it starts, and says so with a warning where it should but does not. ``gpu`` numbers
        the GPU of a ``device``.

        Raises:
            RuntimeUnavailableError: a provider that was asked for is not in this onnxruntime, or does not start.
        """
        if providers is not None:
            if not _are_providers(providers):
                raise RuntimeUnavailableError("providers should be a list such as ['CPUExecutionProvider']")
            return cls._started(list(providers))
        TEXT.check("the device", device)
        if device not in ("auto", "cpu", "cuda"):
            raise RuntimeUnavailableError(f"there is no device '{shown(device)}'; use cpu, cuda or auto")
        if device == "cpu" or (device == "auto" and CUDA not in ort.get_available_providers()):
            return cls((CPU,))
        try:
            return cls._started([(CUDA, {"device_id": str(number)}) if (number := gpu()) else CUDA, CPU])
        except RuntimeUnavailableError as error:
            if device == "cuda":
                raise
            log.warning("%s; the device 'auto' goes on with the CPU", error.problem)
            return cls((CPU,))

    @classmethod
    def _started(cls, providers: list[Provider]) -> Placement:
        available = ort.get_available_providers()
        for name in map(_name, providers):
            if name not in available:
                instead = "onnxruntime-gpu in place of onnxruntime" if name == CUDA else "a build that has it"
                raise RuntimeUnavailableError(f"this onnxruntime has no {shown(name)} (it has {', '.join(available)}); "
                                              f"install {instead}, or choose another device")  # fmt: skip
        first = providers[0]
        on_cuda = _name(first) == CUDA
        settings = first[1] if isinstance(first, tuple) else {}
        placement = cls(tuple(providers), "cuda" if on_cuda else "cpu", int(settings.get("device_id", 0)))
        if _name(first) != CPU:
            create_session(_SMALLEST, placement)
        return placement


_SMALLEST = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> m (float x) => (float y) { y = Neg(x) }')


def _are_providers(given: Any) -> bool:
    if not isinstance(given, list | tuple) or not given:
        return False
    return all(isinstance(p, str) or (isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str)) for p in given)


def _name(provider: Provider) -> str:
    return provider if isinstance(provider, str) else provider[0]


def create_session(
    model: onnx.ModelProto,
    placement: Placement,
    options: RuntimeOptions | None = None,
    weights: FrozenWeights | None = None,
    optimized: Path | None = None,
    profile: Path | None = None,
    packs: bool = True,
    memory: Memory = contextlib.nullcontext,
    runs: bool = True,
) -> ort.InferenceSession:
    """A session for ``model`` on the providers of ``placement``, or an error; never a silent fallback.

    Args:
        weights: values for initializers whose data lie outside ``model``.
        optimized: where to write the model as it will be executed.
        profile: what the name of the file begins with that onnxruntime writes about each node that runs.
        packs: whether it may keep a copy of ``weights``, where the options let sessions do so.
        memory: where it takes memory for tensors on the CPU, as ``regions`` has it; by default onnxruntime's own arena.
        runs: whether it is to run. Else it is only to write ``optimized``, and copies no weights, so that it writes
            none of them either.

    Raises:
        RuntimeUnavailableError: onnxruntime has the provider, but could not start it.
        ModelError: onnxruntime refuses the model.
    """
    options = options or RuntimeOptions()
    settings = options.session_options()
    if optimized is not None:
        settings.optimized_model_filepath = str(optimized)
    if profile is not None:
        settings.enable_profiling, settings.profile_file_prefix = True, str(profile)
    settings.add_session_config_entry(
        "optimization.constant_folding_max_output_size_in_bytes", str(_most_folded(model))
    )
    copied = False
    if weights is not None:
        copied = runs and copies_weights(model, placement, options, weights, packs)
        model = weights.given_to(settings, model, copied)
    try:
        content = model.SerializeToString()
    except ValueError:
        raise ModelError(
            "the model exceeds 2 GB with its weights inside; save the step to a folder and load it from there"
        ) from None
    read = weights.passing_through() if weights is not None and copied else contextlib.nullcontext()
    with explained("onnxruntime refuses the model"), warnings.catch_warnings(), read, memory(settings):
        warnings.simplefilter("ignore", UserWarning)  # onnxruntime's only sign of a fallback; checked below instead
        session = options.session_type(
            content,
            settings,
            providers=list(placement.providers),
            enable_fallback=0,
            disabled_optimizers=useless_optimizations(model),
        )
    told = cast("Any", session)
    told.gradgraph_weights = weights  # which onnxruntime reads, and does not keep alive
    told.gradgraph_passed = weights if weights is not None and not copied and weights.size >= LEAST_PASSED else None
    obtained = session.get_providers()
    missing = [_name(p) for p in placement.providers if _name(p) not in obtained]
    if missing:
        raise RuntimeUnavailableError(
            f"onnxruntime could not start {missing[0]} (driver or libraries missing?), and offers "
            + ", ".join(obtained),
            remedy="repair the installation, or choose device='cpu'",
            shell="repair the installation, or choose --device cpu",
        )
    return session


def copies_weights(
    model: onnx.ModelProto, placement: Placement, options: RuntimeOptions, weights: FrozenWeights, packs: bool = True
) -> bool:
    """Whether a session of ``model`` has its own copy of ``weights``; ``packs`` as for :func:`create_session`."""
    packs = packs or any(node.op_type == _FEW_BITS for node in model.graph.node)  # whose kernel is slow without
    return placement.providers[0] != CPU or (packs and options.packs(weights.size))


def _most_folded(model: onnx.ModelProto) -> int:
    """Bytes of the largest constant that onnxruntime may compute in advance.

    What it computes of frozen weights is about as large as they are. The rest is filled with one number: the zeros that
    gradients of an embedding are added to, which would stay in memory, and be copied in each step all the same.
    """
    largest = max((math.prod(t.dims) for t in model.graph.initializer), default=0)
    return max(LARGEST_FILLED, 8 * largest)


def results(session: ort.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The values that ``session`` gives for outputs that are tensors, by name."""
    arrays = cast("Sequence[np.ndarray]", session.run(outputs, dict(feeds)))
    return dict(zip(outputs, arrays, strict=True))


def weights_pass_through(session: ort.InferenceSession) -> contextlib.AbstractContextManager[None]:
    """A block of runs in which what ``session`` reads of mapped weights does not stay in memory."""
    weights: FrozenWeights | None = cast("Any", session).gradgraph_passed
    return contextlib.nullcontext() if weights is None else weights.passing_through()


# --- errors ------------------------------------------------------------------------------------------------

_AT_NODE = re.compile(r"running (\w+) node\. Name:'([^']*)' Status Message: (.*)", re.DOTALL)
_NOISE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : |/[\w./+-]+\.(?:cc|h):\d+ [^\n]*?\) (?=\S)|\s+")


class TerminatedError(GradgraphError):
    """The run was stopped from outside before it ended."""


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn onnxruntime's exceptions into one sentence that begins with ``what`` and names the node where it can."""
    try:
        yield
    except Exception as error:
        raise explanation(error, what) from error


def explanation(error: Exception, what: str) -> Exception:
    """The error to raise instead of one from onnxruntime; others stay themselves."""
    if not type(error).__module__.startswith("onnxruntime") and type(error) is not RuntimeError:
        return error
    text = str(error)
    if "terminate flag" in text:
        return TerminatedError("the run was stopped")
    at_node = _AT_NODE.search(text)
    if at_node:
        op, name, reason = at_node.groups()
        short, is_compared, _ = name.partition(COMPARED)
        if is_compared:
            return DataError(
                f"'{shown(short)}' is not as long as what it belongs to ({_sentence(reason).rstrip('.')}); "
                "give all parts of a batch the same size"
            )
        return ModelError(f"{what} at {op} (node '{shown(name)}'): {_sentence(reason)}")
    if "is not a registered function/op" in text:
        return ModelError(
            f"{what}: {_sentence(text)}",
            remedy="name the library that computes it: gradgraph.extend.library(path)",
            shell="name the library that computes it with --custom-ops",
        )
    return ModelError(f"{what}: {_sentence(text)}")


def _sentence(text: str) -> str:
    plain = _NOISE.sub(lambda m: " " if m.group().isspace() else "", text)
    return " ".join(shown(word) for word in plain.split()[:60])
