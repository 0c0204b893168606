"""Lowering: the same step, written the way one machine computes it fastest.

``for_machine`` takes a training model as it is saved (gradient operators are calls of functions with portable bodies)
and returns one for a single target, which is run and not saved:

1. symbolic dimensions that the caller knows (the batch at hand) become numbers, and what follows from them is folded;
2. what takes several nodes at once is rewritten: products of few rows with one weight (``stacks``); ``recurrent``
   layers, attention (``native_attention``), and BatchNormalization with the convolution below it (``conv_norm``), each
   with its gradients;
3. every node that the table has forms for is replaced by the best that applies; other gradient operators by their
   portable form;
4. numbers get the rank of what they meet (``scalars``);
5. peepholes, and what nobody reads goes;
6. with native kernels, element-wise nodes that hang together become one (``chains``).

The table is spread over one file per family: ``conv``, …. A form that is right only on one target says so in its row.
"""

from __future__ import annotations

from gradgraph.passes.lower import (  # noqa: F401  (fills the table)
    activation,
    conv,
    cuda,
    cuda_formulas,
    linear,
    movement,
    native,
    native_conv,
    native_depthwise,
    native_products,
    norm,
    openvino,
    optimizer,
    pool,
    softmax,
)
from gradgraph.passes.lower.machine import for_machine, lower
from gradgraph.passes.lower.native_precision import HIGHEST, PRECISIONS, Precision
from gradgraph.passes.lower.table import (
    OPENVINO,
    ORT_CPU,
    ORT_CPU_NATIVE,
    ORT_CUDA,
    PORTABLE,
    TARGETS,
    Call,
    Form,
    every_form,
    form,
)

__all__ = [
    "HIGHEST",
    "OPENVINO",
    "ORT_CPU",
    "ORT_CPU_NATIVE",
    "ORT_CUDA",
    "PORTABLE",
    "PRECISIONS",
    "TARGETS",
    "Call",
    "Form",
    "Precision",
    "every_form",
    "for_machine",
    "form",
    "lower",
]
