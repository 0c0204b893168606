"""gradgraph's step captured as CUDA graphs; on the CPU, the usual step."""

from __future__ import annotations

from dataclasses import replace

import gradgraph as gg
from benchmarks.peers import gradgraph_step
from gradgraph.runtime.execution.session import RuntimeOptions


class Peer(gradgraph_step.Peer):
    def open(self, options: RuntimeOptions) -> gg.Trainer:
        return super().open(replace(options, cuda_graph=self.job.device == "cuda"))
