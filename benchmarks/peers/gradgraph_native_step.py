"""gradgraph's step with native kernels, which are built if missing; "high" has less exact products."""

from __future__ import annotations

from dataclasses import replace

import gradgraph as gg
from benchmarks.job import CannotError
from benchmarks.peers import gradgraph_step
from gradgraph.backends.ort_native import library as native
from gradgraph.backends.ort_native.native_precision import Precision
from gradgraph.errors import GradgraphError
from gradgraph.runtime.execution.session import RuntimeOptions


class Peer(gradgraph_step.Peer):
    def open(self, options: RuntimeOptions) -> gg.Trainer:
        if not native.here().is_built:
            try:
                native.build()
            except GradgraphError as error:
                raise CannotError(str(error)) from None
        precision: Precision = "high" if self.job.mode == "high" else "highest"
        return super().open(replace(options, native_kernels=True, matmul_precision=precision))
