"""Creation of onnxruntime sessions: on the requested device, without log output, and with one-sentence errors."""

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
from gradgraph.backends.ort_native.native_precision import HIGHEST, PRECISIONS, Precision, at_precision
from gradgraph.errors import DataError, GradgraphError, ModelError, RuntimeUnavailableError, shown
from gradgraph.machine import custom_ops
from gradgraph.machine.forked_sessions import survives_forks
from gradgraph.runtime.execution import denormals
from gradgraph.runtime.execution.frozen_weights import FrozenWeights
from gradgraph.runtime.execution.useless_optimizations import failing_optimizations, useless_optimizations

log = logging.getLogger("gradgraph")

Device = Literal["auto", "cpu", "cuda"]
Provider = str | tuple[str, dict[str, Any]]
Memory = Callable[[ort.SessionOptions], contextlib.AbstractContextManager[None]]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
STOCK = "stock"  # onnxruntime's kernels alone
MOST_PACKED = 1 << 30  # bytes of frozen weights that each session may copy
LEAST_PASSED = 1 << 26  # bytes of frozen weights; a second copy below is small beside onnxruntime
LARGEST_FILLED = 1 << 20  # maximum bytes of a folded constant that is not computed from weights


@dataclass(frozen=True)
class RuntimeOptions:
    """Settings of onnxruntime that matter for training.

    Attributes:
        threads: number of threads within one operator; None means one per physical core.
        memory_pattern: plan all intermediate tensors as one block per batch shape. Off by default, since it is at most
            2 % faster and can need half as much memory again, or more.
        spinning: let threads that wait for work within a step spin before they sleep. This is 4 to 24 % faster; without
            it, other programs get the processor sooner.
        optimization: onnxruntime's own graph optimization: "none", "basic", "extended" or "all".
        in_place: overwrite state tensors with their next values where this is provably safe (on the CPU), which saves
            up to half of the memory. "auto" does so if there are tensors of at least 262,144 elements: for these, and
            for smaller ones if it needs no further nodes, such as optimizer state. It does so after the loss is known
            to be finite: a step that diverges, or fails before its loss, leaves the state unchanged, but a later
            failure, such as out of memory, loses it. True does so for all tensors and without waiting: a step that
            fails or diverges loses the state. False keeps two copies of each tensor.
        flush_denormals: flush numbers below 1.2e-38 to zero while a session computes (on Linux x86-64; no effect on
            other platforms). An operation on such a number takes ten times as long. They occur in masked attention
            scores and in decayed optimizer moments.
        deterministic: request kernels that return the same bits in every run (CPU kernels always do).
        cuda_graph: on CUDA, record the step for batches of the usual shape as CUDA graphs, so that its kernels are not
            launched one by one. True raises an error for steps that cannot be recorded (with loops, or nodes that run
            on the CPU); "auto" runs these kernel by kernel.
        native_kernels: train with the C++ kernels (CPU provider, float32). None uses them if they were installed with
            the package or built by ``gradgraph native build``, and can be loaded; ``gradgraph env`` prints whether
            they are used, and otherwise the reason. True requires them. False uses only onnxruntime's kernels. The
            environment variable ``GRADGRAPH_NATIVE_KERNELS`` (0 or 1) overrides None.
        matmul_precision: precision of matrix products, convolutions and LSTMs in native kernels. "highest" is as
            accurate as float32. "high" is faster: it splits each number into two bfloat16 numbers instead of three,
            with errors of at most 2^-15 of the sum of the absolute values of the terms. It requires native kernels and
            a processor with AMX.
        custom_ops: path or paths of libraries with custom onnxruntime operators
            (``gradgraph.extend.library`` registers one for all sessions).
        pack_weights: let each session keep a copy of large frozen weights in the order in which its matrix products
            read them (on the CPU). Each session then needs their size in memory again. Without it, products of 4 to 32
            rows take twice as long, and products of 128 or more rows 1.1 to 1.2 times. "auto" copies weights of up to
            1 GiB in total (blockwise quantized weights of 4 or 8 bits: 256 MiB); larger ones are read from their mapped
            file. With "auto", the session of ``Trainer.evaluate`` copies weights only below 64 MiB, since the training
            session already has a copy.
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
        """Return whether these settings let a session copy frozen weights of ``size`` bytes.

        For quantized weights, the backend decides.
        """
        return size <= MOST_PACKED if self.pack_weights == "auto" else self.pack_weights

    def session_options(self) -> ort.SessionOptions:
        """Return onnxruntime's session options for these settings; ``native_kernels=None`` is treated as False here."""
        options = ort.SessionOptions()
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        options.enable_mem_pattern = self.memory_pattern
        options.enable_mem_reuse = False  # otherwise a buffer is kept until a tensor of the same shape needs it
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.spinning)))
        options.add_session_config_entry(denormals.SETTING, str(int(self._flushes)))
        # for 4-bit weights onnxruntime may use MatMulNBits, which would otherwise round the other factor to 8 bits
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", _FLOAT32)
        options.use_deterministic_compute = self.deterministic
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, _LEVELS[self.optimization])
        options.log_severity_level = 4  # errors are raised, so onnxruntime need not print them as well
        if self.native_kernels:
            library.here().add_to(options)
        custom_ops.register(options, self.custom_ops)
        return options

    @property
    def _flushes(self) -> bool:
        return self.flush_denormals and denormals.known_here()

    @property
    def session_type(self) -> type[ort.InferenceSession]:
        """The session class for these settings; it flushes denormals if ``flush_denormals`` applies here."""
        return denormals.FlushingSession if self._flushes else ort.InferenceSession

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for many runs that flushes denormals in this thread, if these settings do.

        Code between the runs must only copy numbers, since its arithmetic would be affected, too.
        """
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
    """The execution providers of a trainer, and the device memory that contains its state."""

    providers: tuple[Provider, ...]
    memory: Literal["cpu", "cuda"] = "cpu"
    device_id: int = 0

    @property
    def backend(self) -> Backend:
        """The backend of the first execution provider, for which models are lowered by default."""
        return of_provider(_name(self.providers[0]))

    def computes_for(self, options: RuntimeOptions) -> Backend:
        """Return the backend for which evaluation and prediction models are lowered."""
        return packing(self.backend, options.pack_weights)

    def settled(self, options: RuntimeOptions) -> RuntimeOptions:
        """Return ``options`` with ``native_kernels=None`` replaced by whether to use native kernels on this machine.

        Raises:
            RuntimeUnavailableError: if ``GRADGRAPH_NATIVE_KERNELS`` has an invalid value.
        """
        if options.native_kernels is not None:
            return options
        wanted = options.matmul_precision != HIGHEST or (self.backend == ORT_CPU and in_use.by_default())
        return replace(options, native_kernels=wanted)

    def trains_for(self, options: RuntimeOptions) -> Backend:
        """Return the backend to lower training for.

        Raises:
            RuntimeUnavailableError: if native kernels or a lower ``matmul_precision`` are requested, and the kernels
                are not built or cannot run on this machine.
        """
        options, precision = self.settled(options), options.matmul_precision
        if precision not in PRECISIONS:
            raise RuntimeUnavailableError(
                f"there is no matmul_precision '{shown(precision)}'; use {' or '.join(PRECISIONS)}"
            )
        if precision != HIGHEST and not options.native_kernels:
            raise RuntimeUnavailableError(
                f"matmul_precision '{precision}' requires native kernels, which are turned off",
                remedy="remove native_kernels=False or matmul_precision",
                shell="remove --no-native-kernels or --matmul-precision",
            )
        if not options.native_kernels:
            return self.computes_for(options)
        if self.backend != ORT_CPU:
            raise RuntimeUnavailableError(
                f"native kernels need onnxruntime's CPU provider, but the first provider here is "
                f"{_name(self.providers[0])}",
                remedy="add device='cpu', or remove native_kernels",
                shell="add --device cpu, or remove --native-kernels",
            )
        library.here().required()
        if precision != HIGHEST and not library.here().has_tiles:
            raise RuntimeUnavailableError.of_options(
                f"matmul_precision '{precision}' needs a processor with AMX bfloat16 tiles (Intel Sapphire Rapids or "
                "later) and native kernels from a compiler that supports AMX; "
                "remove --matmul-precision"
            )
        return packing(at_precision(precision), options.pack_weights)

    def kernels(self, options: RuntimeOptions) -> str:
        """Return the kernels that train with ``options`` from :meth:`settled`: the native library's name, or ``STOCK``.

        The result is "" if the provider is not the CPU.
        """
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
        """Return the placement for a device or a list of providers, after checking that the first provider starts.

        Args:
            device: ``"auto"`` means CUDA if it starts. If onnxruntime has the CUDA provider and it does not start,
                ``"auto"`` logs a warning and uses the CPU.
            providers: onnxruntime's execution providers, instead of ``device``.
            gpu: returns the index of the GPU to use.

        Raises:
            RuntimeUnavailableError: if a requested provider is not in this onnxruntime, or does not start.
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
            log.warning("%s; device 'auto' uses the CPU instead", error.problem)
            return cls((CPU,))

    @classmethod
    def _started(cls, providers: list[Provider]) -> Placement:
        available = ort.get_available_providers()
        for name in map(_name, providers):
            if name not in available:
                instead = "onnxruntime-gpu instead of onnxruntime" if name == CUDA else "a build that has it"
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
    """Create a session for ``model`` on the providers of ``placement``; raise an error rather than fall back silently.

    Args:
        weights: values of initializers with external data.
        optimized: where to write the model as onnxruntime executes it.
        profile: prefix of the file to which onnxruntime writes a profile.
        packs: whether the session may keep a copy of ``weights``, if the options allow it.
        memory: sets the arena for tensors on the CPU, from ``regions``; by default onnxruntime's own arena.
        runs: whether the session will be run. If False, it only writes ``optimized``: it does not copy weights, so
            they are not written to the file either.

    Raises:
        RuntimeUnavailableError: if onnxruntime has the provider but could not start it.
        ModelError: if onnxruntime refuses the model.
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
        copied = runs and copies_weights(model, placement, options, weights.size, packs)
        model = weights.given_to(settings, model, copied)
    try:
        content = model.SerializeToString()
    except ValueError:
        raise ModelError(
            "the model exceeds 2 GB including its weights; save the step to a folder and load it from there"
        ) from None
    read = weights.read_by_path() if weights is not None else contextlib.nullcontext()
    released = weights.passing_through() if weights is not None and copied else contextlib.nullcontext()
    with read, explained("onnxruntime refuses the model"), warnings.catch_warnings(), released, memory(settings):
        warnings.simplefilter("ignore", UserWarning)  # onnxruntime's only sign of a fallback; checked below instead
        session = survives_forks(
            options.session_type(
                content,
                settings,
                providers=list(placement.providers),
                enable_fallback=0,
                disabled_optimizers=[*useless_optimizations(model), *failing_optimizations(model)],
            )
        )
    annotated = cast("Any", session)
    annotated._model_bytes = None  # the serialized model, which only onnxruntime's fallback would read again
    annotated.gradgraph_weights = weights  # onnxruntime reads this memory, but does not keep it alive
    annotated.gradgraph_passed = (
        weights if weights is not None and not copied and weights.size >= LEAST_PASSED else None
    )
    obtained = session.get_providers()
    missing = [_name(p) for p in placement.providers if _name(p) not in obtained]
    if missing:
        raise RuntimeUnavailableError(
            f"onnxruntime could not start {missing[0]} (driver or libraries missing?); it started "
            + ", ".join(obtained),
            remedy="repair the installation, or choose device='cpu'",
            shell="repair the installation, or choose --device cpu",
        )
    return session


def copies_weights(
    model: onnx.ModelProto, placement: Placement, options: RuntimeOptions, size: int, packs: bool = True
) -> bool:
    """Whether a session of ``model`` will have its own copy of external weights of ``size`` bytes in total.

    ``packs`` is as for :func:`create_session`.
    """
    packs = packs or any(node.op_type == _FEW_BITS for node in model.graph.node)  # its kernel is slow without packing
    return placement.providers[0] != CPU or (packs and options.packs(size))


def _most_folded(model: onnx.ModelProto) -> int:
    """Return the size limit in bytes for constants that onnxruntime may fold in ``model``.

    It admits constants computed from weights. Larger constants are filled with one number, such as the zeros in which
    an embedding's gradient is accumulated; folded, they would stay in memory and still be copied in each step.
    """
    largest = max((math.prod(t.dims) for t in model.graph.initializer), default=0)
    return max(LARGEST_FILLED, 8 * largest)


def results(session: ort.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Run ``session`` on ``feeds``; return the values of ``outputs``, which must be tensors, by name."""
    arrays = cast("Sequence[np.ndarray]", session.run(outputs, dict(feeds)))
    return dict(zip(outputs, arrays, strict=True))


def weights_pass_through(session: ort.InferenceSession) -> contextlib.AbstractContextManager[None]:
    """Return a context for runs of ``session`` in which pages of mapped weights are released after they were read."""
    weights: FrozenWeights | None = cast("Any", session).gradgraph_passed
    return contextlib.nullcontext() if weights is None else weights.passing_through()


def check_weights(session: ort.InferenceSession) -> None:
    """Raise ModelError if a file with weights that ``session`` maps was overwritten since it was opened."""
    weights: FrozenWeights | None = getattr(session, "gradgraph_weights", None)
    if weights is not None:
        weights.check_unchanged()


# --- errors ------------------------------------------------------------------------------------------------

_AT_NODE = re.compile(r"running (\w+) node\. Name:'([^']*)' Status Message: (.*)", re.DOTALL)
_NOISE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : |/[\w./+-]+\.(?:cc|h):\d+ [^\n]*?\) (?=\S)|\s+")


class TerminatedError(GradgraphError):
    """Raised when a run is terminated through its ``RunOptions`` before it ends."""


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert onnxruntime's exceptions to one-sentence errors that begin with ``what`` and name the node."""
    try:
        yield
    except Exception as error:
        raise explanation(error, what) from error


def explanation(error: Exception, what: str) -> Exception:
    """Return the error to raise instead of an onnxruntime exception; other exceptions are returned unchanged."""
    if not type(error).__module__.startswith("onnxruntime") and type(error) is not RuntimeError:
        return error
    text = str(error)
    if "terminate flag" in text:
        return TerminatedError("the run was terminated")
    at_node = _AT_NODE.search(text)
    if at_node:
        op, name, reason = at_node.groups()
        short, is_compared, _ = name.partition(COMPARED)
        if is_compared:
            return DataError(
                f"the size of '{shown(short)}' does not match another input of the batch "
                f"({_sentence(reason).rstrip('.')}); give all inputs of a batch matching sizes"
            )
        return ModelError(f"{what} at {op} (node '{shown(name)}'): {_sentence(reason)}")
    if "is not a registered function/op" in text:
        return ModelError(
            f"{what}: {_sentence(text)}",
            remedy="load the library with this operator: gradgraph.extend.library(path)",
            shell="load the library with this operator by --custom-ops",
        )
    return ModelError(f"{what}: {_sentence(text)}")


def _sentence(text: str) -> str:
    plain = _NOISE.sub(lambda m: " " if m.group().isspace() else "", text)
    return " ".join(shown(word) for word in plain.split()[:60])
