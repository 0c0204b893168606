"""The ranks of an MPI job as the team of a trainer.

All ranks wait for each other at every step. A waiting rank measures how long it waits. After the timeout it sends a
roll call, which all other waiting ranks answer, so that the error can name the rank that is missing.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnx
import onnxruntime as ort
from mpi4py import MPI

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.specs import numpy_dtype
from gradgraph.errors import BuildError, GradgraphError, ParallelError, RuntimeUnavailableError, listed, shown
from gradgraph.parallel.accumulated import SUM, WEIGHT, adds_up_here, always_due
from gradgraph.parallel.buckets import Buckets
from gradgraph.parallel.compressions import Compression
from gradgraph.parallel.fingerprints import digest_of_state, digest_of_step
from gradgraph.parallel.joint_norms import JointNorms, Message, joint_norms, norms_of
from gradgraph.parallel.local_steps import LocalSteps, mean_of
from gradgraph.parallel.nccl import Begun, Nccl, gpu_of
from gradgraph.parallel.remote_state import RemoteState
from gradgraph.parallel.sharded import ShardedUpdate
from gradgraph.parallel.split_session import SplitSession
from gradgraph.parallel.summable_loss import check_loss
from gradgraph.parallel.update_parts import Shards, shards_of, too_large
from gradgraph.parallel.wide_gradients import widened
from gradgraph.runtime.execution.ort_values import fill, on_device
from gradgraph.runtime.execution.team import Team
from gradgraph.runtime.saved.checkpoint import BESIDE
from gradgraph.runtime.saved.record import Progress
from gradgraph.step.manifest import UPDATE, Manifest, package_version

if TYPE_CHECKING:
    from gradgraph.runtime.execution.part import Part
    from gradgraph.runtime.execution.session import Placement, RuntimeOptions
    from gradgraph.runtime.execution.shaped import Sizes
    from gradgraph.runtime.execution.state import State
    from gradgraph.runtime.execution.step_session import StepSession
    from gradgraph.step.step import Step

log = logging.getLogger("gradgraph")

T = TypeVar("T")

STATE = "state/"  # prefix of tensors of a rank's own state
AWAKE = 200  # polls before a waiting rank yields its core
LONG = 1.0  # seconds after which a waiting rank sleeps between polls, and answers roll calls
ROLL_CALL = 5.0  # seconds within which waiting ranks answer a roll call


class MpiTeam(Team):
    """The team of a trainer (``gradgraph.runtime.execution.team``), whose ranks are processes of an MPI job.

    Args:
        timeout, check_every, shard_state, sync_batch_norm: as for ``DataParallel``.
        compress: the gradient compression; None to send whole gradients.
        compress_name: ``compress`` as written by the user.

    Attributes:
        joint_norms: the gradient graph and its messages, if norms use the samples of all ranks.
        usual: the expected number of loss terms of a batch on all ranks. Gradients are divided by it before they are
            summed, and rescaled afterwards only if the batch has a different number of terms.
        sent: the number of bytes that each rank has sent in steps, assuming ring algorithms.
        keeps_gradients: whether gradients of batches without an update stay on their rank until the update.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        timeout: float,
        check_every: int,
        shard_state: bool = False,
        sync_batch_norm: bool = False,
        compress: Compression | None = None,
        compress_name: str = "",
    ) -> None:
        self.rank, self.ranks = comm.rank, comm.size
        self.usual = 1
        self.sent = 0.0
        self._comm, self._roll = comm.Dup(), comm.Dup()
        self._timeout, self._check_every = timeout, check_every
        self._neighbours = comm.Split_type(MPI.COMM_TYPE_SHARED)  # the ranks on this machine
        self._compress = compress
        self._local = compress if isinstance(compress, LocalSteps) else None
        self._averages: list[str] = []
        self._is_begun = False
        self._buckets: Buckets | None = None
        self._far: Nccl | None = None
        self._new_far: Callable[..., ort.OrtValue] | None = None
        self.keeps_gradients = False
        self._shards: Shards | None = None
        self._state: State | None = None  # once it is sharded
        self.joint_norms: JointNorms | None = None
        self._sync_batch_norm, self._has_warned_of_norms = sync_batch_norm, False
        self._options = {
            "shard_state": shard_state,
            "check_every": check_every,
            "compress": compress_name,
            "sync_batch_norm": sync_batch_norm,
        }
        self._shard_state, self._remote_state = shard_state, RemoteState(comm.Dup(), self._wait, timeout, self._lent)
        self._remote_state.is_shared = compress is not None and compress.remembers
        self._steps = 0
        self._own, self._total = (0, 0), (0, 0)
        self._asks: tuple[bool, int | None] = (False, None)  # this rank's request to stop, and the signal it received
        self._heard: tuple[bool, int | None] = (False, None)  # the same over all ranks

    # --- the step -----------------------------------------------------------------------------------------------

    @property
    def gpu(self) -> int:
        return gpu_of(self._neighbours.rank, self._neighbours.size)

    def opened(self, step: Step, placement: Placement, options: RuntimeOptions) -> tuple[Step, RuntimeOptions]:
        where = self.gathered("CPU" if placement.memory == "cpu" else "GPU")
        if other := next((rank for rank, kind in enumerate(where) if kind != where[0]), None):
            raise ParallelError(
                f"rank {other} trains on the {where[other]} and rank 0 on the {where[0]}; all ranks must use the same "
                "kind of device",
                remedy="pass device='cpu', or device='cuda' to see why a rank cannot use its GPU",
                shell="add --device cpu, or --device cuda to see why a rank cannot use its GPU",
            )
        if placement.memory != "cpu":
            self._check_far(options)
            self._far = Nccl(self._comm, placement.memory, placement.device_id)
            self._new_far = functools.partial(on_device, device=placement.memory, device_id=placement.device_id)
        if options.threads is None:
            options = replace(options, threads=max(1, _cores() // self._neighbours.size))
        if self._neighbours.size > _cores():
            options = replace(options, spinning=False)
        halves = widened(step.apart())
        check_loss(halves.manifest)
        self.keeps_gradients = self._far is None and adds_up_here(halves)
        halves = always_due(halves) if self.keeps_gradients else halves
        if self._shard_state and UPDATE in halves.manifest.hyperparameters and not self.keeps_gradients:
            raise BuildError(
                "sharded state does not support the gradient norm that this step reports for each accumulated batch",
                remedy="build the step without grad_norm",
                shell="remove --grad-norm or --shard-state",
            )
        if (
            self._compress is not None
            and self._compress.remembers
            and halves.manifest.precision.get("name") == "float16"
        ):
            raise BuildError(
                "compression with error feedback does not support float16 training, as the saved errors would keep "
                "an old loss scale",
                remedy="build the step with precision='bfloat16', or compress with 'float16' or 'bfloat16'",
                shell="use --precision bfloat16, or --compress float16 or bfloat16",
            )
        if self._local is not None and (UPDATE in halves.manifest.hyperparameters or _adds_up(halves)):
            raise BuildError(
                "local steps (compress) support neither gradient accumulation nor a loss that is a sum",
                remedy="build the step without accumulate, with a loss that is a mean",
                shell="remove --accumulate, and use a loss that is a mean",
            )
        if self._sync_batch_norm and self._local is not None:
            raise BuildError.of_options(
                "sync_batch_norm requires the same weights on all ranks, but local steps train different ones; "
                "remove --sync-batch-norm or --compress"
            )
        self.joint_norms = joint_norms(halves) if self._sync_batch_norm else None
        self._averages = list(halves.manifest.averages.values())
        if self._shard_state:
            self._shards = shards_of(halves, self.ranks)
            if self.is_first and (found := too_large(halves.manifest, self.ranks)) is not None:
                log.warning(
                    "the weight '%s' has %.0f %% of all parameters, and weights are not split: the rank that updates "
                    "it keeps %.0f %% of the optimizer state instead of %.0f %%",
                    shown(found[0]), found[1] * 100, found[1] * 100, 100 / self.ranks,
                )  # fmt: skip
        return halves, options

    def _check_far(self, options: RuntimeOptions) -> None:
        """Raise RuntimeUnavailableError for options that are supported on the CPU only."""
        asked = {"shard_state": self._shard_state, "sync_batch_norm": self._sync_batch_norm,
                 "compress": self._compress is not None}  # fmt: skip
        for name in (name for name, is_asked in asked.items() if is_asked):
            flag = name.replace("_", "-")
            raise RuntimeUnavailableError(
                f"{name} is supported for ranks on the CPU only",
                remedy=f"pass device='cpu', or remove {name}",
                shell=f"add --device cpu, or remove --{flag}",
            )
        if options.cuda_graph is True:
            raise RuntimeUnavailableError("CUDA graphs capture whole steps, but ranks run a step in two halves; remove "
                                          "cuda_graph")  # fmt: skip

    def session(self, step: StepSession, part: Part, sizes: Sizes) -> SplitSession:
        if self._buckets is None:  # sessions for all batch sizes share them
            owners = self._shards.owners if self._shards else None
            joint = self.joint_norms is not None
            self._buckets = Buckets(step.definition, self.rank, owners, self.ranks, joint, self._new_far)
        return SplitSession.of(step, part, sizes, self._buckets, self)

    def sharded(self, step: StepSession) -> ShardedUpdate | None:
        if self._shards is None:
            return None
        self._share_out(step.state)
        return ShardedUpdate(self._shards, self.rank, self, step)

    def _share_out(self, state: State) -> None:
        """Release the optimizer state that other ranks update; later reads fetch it from these ranks."""
        assert self._shards is not None
        self._remote_state.is_shared = True
        state.leave(self._shards.elsewhere(self.rank), functools.partial(self._fetched, state))
        self._state = state

    def _lent(self, name: str) -> Array:
        """Return the array that another rank requests, from the state, the compression or ``Buckets.kept``."""
        if name.startswith(BESIDE):
            assert self._compress is not None
            name = name.removeprefix(BESIDE)
            if not name.startswith(STATE):
                return self._compress.memory[name]
            name = name.removeprefix(STATE)
        if name.isdecimal():
            assert self._buckets is not None
            return self._buckets.kept[int(name)]
        assert self._state is not None
        return self._state.seen([name])[name]

    def _fetched(self, state: State, names: list[str]) -> dict[str, Array]:
        assert self._shards is not None
        specs = {name: state.specs[name] for name in names}
        found = {n: np.empty([int(d or 0) for d in s.shape], numpy_dtype(s.dtype)) for n, s in specs.items()}
        self._remote_state.fetch([(self._shards.owners[name], name, array) for name, array in found.items()])
        return found

    def completed(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``values`` with the gradients added that ranks have kept since the last update (``Buckets.kept``).

        Gradients that other ranks have kept are fetched; each rank's own are not changed.
        """
        buckets = self._buckets
        if buckets is None or not any(buckets.waiting):
            return dict(values)
        kept = [array.copy() for array in buckets.kept]
        for rank in range(self.ranks):
            if rank != self.rank:
                theirs = [(rank, str(i), np.empty_like(array)) for i, array in enumerate(kept)]
                self._remote_state.fetch(theirs)
                for array, (_, _, part) in zip(kept, theirs, strict=True):
                    array += part
        return {**values, **_with_sums(values, *buckets.sums(kept, self.usual))}

    def _settle_sums(self, state: State) -> None:
        """Add the gradients that ranks have kept since the last update to the accumulated sums in the state."""
        buckets = self._buckets
        if buckets is None or not any(buckets.waiting):
            return
        for array in buckets.kept:
            self.all_reduce(array)
        sums = buckets.sums(buckets.kept, self.usual)
        for name, array in _with_sums(state.seen(state.here), *sums).items():
            state.put(name, array)
        buckets.waiting = (0.0, 0)

    def counts(self, rows: int, counted: int) -> None:
        self._own = (0, 0) if self.spare else (rows, counted)

    def of_all(self, rows: int, counted: int) -> tuple[int, int]:
        return self._total

    def reduce(self, put_results: Callable[[], None], due: bool) -> None:
        """Sum the buckets of all ranks, with their sample counts and requests to stop."""
        buckets = self._buckets
        assert buckets is not None
        over, signal = self._asks
        weight = buckets.scale(*self._own, self.usual)
        buckets.write([*_halved(self._own[0]), *_halved(self._own[1]), weight, over, signal == 2, signal == 15])
        put_results()
        if self._shards is not None and self._state is not None and not self._state.absent:
            self._share_out(self._state)  # the complete state was loaded
        if due:
            buckets.add_kept()
        for i in range(len(buckets.parts)):
            self._send(buckets, i, due)
        found = buckets.read()
        if self._far is not None:
            self._add_up_far(buckets, buckets.far_factor(*self._own, found[4]))
        self._total = round(found[0] * HALF + found[1]), round(found[2] * HALF + found[3])
        self._heard = found[5] > 0, 15 if found[7] else 2 if found[6] else None
        buckets.unscale(self._total, found[4], self.usual, due, None if self._local is None else weight)

    def _add_up_far(self, buckets: Buckets, factor: float) -> None:
        assert self._far is not None
        gradients = buckets.far.values()
        if not factor:  # all samples of this rank are ignored; a product by 0 would keep NaN
            for value in gradients:
                fill(value, np.zeros(value.shape(), onnx.helper.tensor_dtype_to_np_dtype(value.element_type())))
        self.sent += sum(2 * value.tensor_size_in_bytes() * (self.ranks - 1) / self.ranks for value in gradients)
        self._wait(self._far.add_up(gradients, factor or 1.0))

    def tell(self, told: Sequence[tuple[Message, Array, Array]]) -> None:
        """Exchange the sums of norms, in one message; entries are (message, array to send, array to receive).

        Sums are added in float64, which has enough digits for the variance of nearly constant values.
        """
        assert self._buckets is not None
        rows = self._own[0]
        unit = self._buckets.unit(*self._own)
        sums = np.concatenate([m.given(own, unit) if rows else np.zeros(m.size) for m, own, _ in told])
        self.all_reduce(sums)
        first = 0
        for m, _, array in told:
            array[...] = m.taken(sums[first : first + m.size], unit or 1.0)
            first += m.size

    def _send(self, buckets: Buckets, i: int, due: bool) -> None:
        part = buckets.parts[i]
        if due and self._shards is None and self._compress is None:
            self.all_reduce(part.array)
            return
        self.all_reduce(part.rest)
        if due and self._shards is not None:
            self.sent += part.gradients.nbytes * (self.ranks - 1) / self.ranks
            self._wait(self._comm.Ireduce_scatter(part.gradients, part.applied, part.counts))
        elif due and self._compress is not None and part.gradients.size:
            self._compress.add_up(f"{i}", part.gradients, buckets.tensors(part), self)

    def all_to_all(self, sent: Array, got: Array) -> None:
        """Send one equal part of ``sent`` to each rank; write the parts received from all ranks to ``got``."""
        self.sent += sent.nbytes * (self.ranks - 1) / self.ranks
        self._wait(self._comm.Ialltoall(sent, got))

    def all_reduce(self, array: Array) -> None:
        """Sum ``array`` over all ranks, in place."""
        if array.size:
            self.sent += 2 * array.nbytes * (self.ranks - 1) / self.ranks
            self._wait(self._comm.Iallreduce(MPI.IN_PLACE, array))

    def all_gather(self, array: Array, counts: Sequence[int]) -> None:
        """Fill ``array`` with the parts of all ranks, by rank; rank r sends ``counts[r]`` elements."""
        self.sent += array.nbytes * (self.ranks - 1) / self.ranks
        self._wait(self._comm.Iallgatherv(MPI.IN_PLACE, [array, list(counts)]))

    def after_step(self, state: State) -> None:
        """Compare the states of all ranks every ``check_every`` steps; average the weights after local steps."""
        if self._compress is not None:
            self._compress.settle()
        if self._local is not None:
            self._local.steps += 1
            if self._local.steps == self._local.every:
                self.meet(state)
            return  # during a round, the weights of ranks differ
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0:
            self.check_same(state)

    # --- interface for the loop ---------------------------------------------------------------------------------

    def begin(self, session: StepSession, facts: Mapping[str, Any], usual: int) -> None:
        versions = f"gradgraph {package_version()}, onnxruntime {ort.__version__}, Python {platform.python_version()}"
        step = digest_of_step(session.definition)
        own = {"versions": versions, "parallel options": self._options, "step": step, **facts}
        everyone = self.gathered(own)
        for rank, settings in enumerate(everyone):
            for name, value in settings.items():
                if value != everyone[0][name]:
                    raise ParallelError(
                        f"rank {rank} differs from rank 0 in its {name} ({value} instead of {everyone[0][name]}); "
                        f"start all ranks with the same {name}"
                    )
        state = session.state
        if self.agreed(not state.absent):
            state.make_whole()
        for name in self._on_all(state):
            array = state.seen([name])[name]
            self._wait(self._comm.Ibcast(array.reshape(-1).view(np.uint8)))
            if not state.on_cpu:  # then ``array`` is a copy
                state.put(name, array)
        session.go_on(self.agreed(session.progress))
        if self._local is not None:
            self._local.begin(state.read(session.manifest.trainable))
            self._state = state
        self._recall(session.progress)
        self._remote_state.is_open = self._is_begun = True
        self.usual = max(1, sum(self.gathered(usual)))
        self._warn_of_norms(session.manifest)
        self._asks = self._heard = (False, None)

    def _warn_of_norms(self, manifest: Manifest) -> None:
        """Warn once if norms use the samples of one rank only, unlike in one process."""
        norms = norms_of(manifest)
        if self.is_first and norms and self.joint_norms is None and not self._has_warned_of_norms:
            log.warning(
                "BatchNormalization normalises over the samples of its own rank (%s); sync_batch_norm=True "
                "(--sync-batch-norm) uses those of all ranks, as one process would",
                listed(norms),
            )
        self._has_warned_of_norms = True

    def check_same(self, state: State) -> None:
        self.meet(state)
        digests = self.gathered(digest_of_state(state.seen(self._on_all(state))))
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise ParallelError(
                f"the weights of {_named(others)} differ from those of rank 0: the machines round differently, or "
                "code changed the weights on one rank only; resume from the last checkpoint, on machines of the same "
                "kind"
            )

    def _on_all(self, state: State) -> list[str]:
        """Return the names of the state tensors that all ranks have, with equal values."""
        if self._local is not None and self._is_begun:
            # the other optimizer tensors differ between ranks
            return [n for n, s in state.specs.items() if s.kind != "optimizer" or n in self._averages]
        if self._shards is None or not state.absent:
            return list(state.specs)
        return [n for n in state.specs if n not in self._shards.owners or n in self._shards.gathered]

    def meet(self, state: State) -> None:
        if self._local is not None and self._local.steps:
            trained = state.seen(n for n, s in state.specs.items() if s.kind == "parameter")
            self._local.meet(trained, state.seen(self._averages), self)

    def _recall(self, progress: Progress) -> None:
        """Restore this rank's state of the compression, or of local steps, from a checkpoint."""
        beside, progress.beside = progress.beside, {}
        ranks: dict[int, dict[str, Array]] = {}
        for name, array in beside.items():
            rank, _, rest = name.partition("/")
            ranks.setdefault(int(rank), {})[rest] = array
        if self._compress is not None and ranks:
            shared = {n: a for n, a in ranks[0].items() if self._compress.is_shared(n)}
            self._compress.take([{**shared, **ranks[rank]} for rank in sorted(ranks)], self.rank, self.ranks)
            for name in [name for name in self._compress.memory if name.startswith(STATE)]:
                array = self._compress.memory.pop(name)
                if self._state is not None and len(ranks) == self.ranks:
                    self._state.put(name.removeprefix(STATE), array)
        elif ranks and self.is_first:
            log.warning("this run does not compress gradients, and ignores the compression state in the checkpoint")

    def kept(self, values: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        values, beside = self.completed(values), self._beside()
        if self._local is None:
            return values, beside
        first = f"{self.rank}/{STATE}"
        for own in [name for name in beside if name.startswith(first)]:
            # the mean, from which a run with a different number of ranks resumes
            name = own.removeprefix(first)
            values[name] = mean_of([beside[f"{rank}/{STATE}{name}"] for rank in range(self.ranks)])
        return values, beside

    def _beside(self) -> dict[str, Array]:
        """Return the rank-specific state of all ranks, with the names ``rank/name``."""
        if self._compress is None:
            return {}
        memory = dict(self._compress.memory)
        if self._local is not None and self._state is not None:
            apart = [n for n, s in self._state.specs.items() if s.kind in ("parameter", "optimizer")]
            memory |= {f"{STATE}{name}": array for name, array in self._state.seen(apart).items()}
        found = {f"{self.rank}/{name}": array for name, array in memory.items()}
        own = {name: array for name, array in memory.items() if not self._compress.is_shared(name)}
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        wanted = [(rank, name, np.empty_like(array)) for rank in others for name, array in own.items()]
        self._remote_state.fetch([(rank, f"{BESIDE}{name}", array) for rank, name, array in wanted])
        return found | {f"{rank}/{name}": array for rank, name, array in wanted}

    def lend(self) -> None:
        self._remote_state.serve()

    def end(self, state: State) -> None:
        self._wait(self._comm.Ibarrier())
        self._remote_state.is_open = self._is_begun = False
        self._settle_sums(state)
        self._wait(self._comm.Ibarrier())  # no rank reads the state before all have updated it

    def heard(self, over: bool, signal: int | None) -> tuple[bool, int | None]:
        self._asks, heard = (over, signal), self._heard
        self._heard = (False, None)
        return heard

    def from_first(self, give: Callable[[], T]) -> T:
        found: Any = None
        problem: GradgraphError | None = None
        if self.is_first:
            try:
                found = give()
            except GradgraphError as error:
                problem = error
        found, problem = self.agreed((found, problem))
        if problem is not None:
            raise problem
        given: T = found
        return given

    def agreed(self, value: T) -> T:
        self._wait(self._comm.Ibarrier())
        given: T = self._comm.bcast(value if self.is_first else None)
        return given

    def gathered(self, value: T) -> list[T]:
        self._wait(self._comm.Ibarrier())
        found: list[T] = self._comm.allgather(value)
        return found

    # --- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, request: MPI.Request | Begun) -> None:
        """Answer requests of other ranks until ``request`` is complete; raise ParallelError after the timeout."""
        begin, polls = time.monotonic(), 0
        while not request.Test():
            polls += 1
            if polls < AWAKE:
                continue
            self._remote_state.answer()
            waited = time.monotonic() - begin
            if waited > self._timeout:
                self._call_the_roll(waited)
            if waited > LONG:
                self._answer()
            time.sleep(1e-3 if waited > LONG else 0)  # 0 lets another process use the core

    def _answer(self) -> set[int]:
        """Answer roll calls; return the ranks that have sent an answer or a roll call."""
        found, status = set[int](), MPI.Status()
        while self._roll.Iprobe(status=status):
            calls = self._roll.recv(source=status.source)
            found.add(status.source)
            if calls:
                self._roll.isend(False, status.source)
        return found

    def _call_the_roll(self, waited: float) -> None:
        """Raise ParallelError with the numbers of the ranks that do not answer a roll call."""
        requests = [self._roll.isend(True, other) for other in range(self.ranks) if other != self.rank]
        here, until = {self.rank}, time.monotonic() + ROLL_CALL
        while time.monotonic() < until and len(here) < self.ranks:
            here |= self._answer()
            time.sleep(0.01)
        missing = [rank for rank in range(self.ranks) if rank not in here]
        if self.rank != min(here):  # the first rank that is present prints the error and ends all
            time.sleep(2 * ROLL_CALL)
        del requests
        has = "has" if len(missing) == 1 else "have"
        who = f"{_named(missing)} {has} not answered" if missing else "a message between the ranks has not arrived"
        raise ParallelError(
            f"{who} for {waited:.0f} seconds (after step {self._steps}); check the processes and machines of these "
            "ranks and their network, or set a longer timeout"
        )


def _with_sums(values: Mapping[str, Array], sums: Mapping[str, Array], weight: float) -> dict[str, Array]:
    """Return the accumulation tensors in ``values``, increased by ``sums`` of gradients and the divisor ``weight``."""
    found = {f"{n}{SUM}": values[f"{n}{SUM}"] + add for n, add in sums.items() if f"{n}{SUM}" in values}
    if WEIGHT in values:
        found[WEIGHT] = values[WEIGHT] + np.float32(weight)
    return found


HALF = 1 << 12  # counts of up to 36 bits are sent as quotient and remainder, which float32 represents exactly


def _halved(count: int) -> tuple[int, int]:
    return count // HALF, count % HALF


def _adds_up(step: Step) -> bool:
    return step.manifest.separate is not None and step.manifest.separate.adds_up


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
