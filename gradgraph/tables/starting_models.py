"""Networks for tables, derived from the columns and targets of the training data.

Y. Gorishniy, I. Rubachev, V. Khrulkov, A. Babenko: Revisiting Deep Learning Models for Tabular Data (NeurIPS 2021).

Regression outputs are in the unit of their column: the network predicts standardised values, and the last node undoes
the standardisation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from gradgraph.arguments import WHOLE, Table, checked, instance
from gradgraph.data.preprocess import Preprocessing
from gradgraph.data.preprocess.column_kinds import Category
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import DataError
from gradgraph.frontend import Input, export, init, manual_seed, nn
from gradgraph.frontend import functional as F
from gradgraph.losses import LOSSES

LOGITS = "logits"
MODELS: Table[Callable[..., onnx.ModelProto]] = Table("starting model")
INDEXED = ("ft_transformer",)  # models that read category indices instead of one-hot vectors
PREPROCESSING = instance(Preprocessing, "a result of gradgraph.preprocess.fit")


@checked(plan=PREPROCESSING)
def loss(plan: Preprocessing) -> Any:
    """Return the losses of a starting model, for ``gradgraph.build``: cross_entropy for classes, mse for numbers.

    The mse is divided by the variance of the target column, so it is 1 for a model that predicts the mean.
    """
    if len(plan.targets) == 1 and next(iter(plan.targets.values())).classes:
        return "cross_entropy"
    return {
        output: "cross_entropy" if plan.targets[column].classes
        else (LOSSES.by_name("mse"), 1 / plan.targets[column].std ** 2)
        for column, output in _outputs(plan).items()
    }  # fmt: skip


@checked(plan=PREPROCESSING, hidden=instance(Sequence, "a list of numbers, such as [64, 64]").or_none(), seed=WHOLE)
def mlp(
    plan: Preprocessing, hidden: Sequence[int] | None = None, *, dropout: float = 0.0, seed: int = 0
) -> onnx.ModelProto:
    """Build a multilayer perceptron with ReLU.

    Args:
        plan: a result of ``gradgraph.preprocess.fit`` with a target.
        hidden: layer sizes; by default two layers, sized by the number of rows.
        dropout: dropout before each layer except the first.
        seed: random seed of the initial weights.
    """
    manual_seed(seed)
    sizes = [*(hidden or [_width(plan)] * 2)]
    body: list[nn.Module] = [nn.ReLU()]
    for a, b in itertools.pairwise(sizes):
        body += [*([nn.Dropout(dropout)] if dropout else []), nn.Linear(a, b), nn.ReLU()]
    return _exported(plan, _Net(plan, _Columns(plan, sizes[0]), nn.Sequential(*body), sizes[-1]))


@checked(plan=PREPROCESSING, width=WHOLE.or_none(), blocks=WHOLE, seed=WHOLE)
def resnet(
    plan: Preprocessing, width: int | None = None, blocks: int = 2, *, dropout: float = 0.1, seed: int = 0
) -> onnx.ModelProto:
    """Build a ResNet (Gorishniy et al.) of blocks ``x + Linear(Dropout(ReLU(Linear(BatchNorm(x)))))``.

    Args:
        plan: as for :func:`mlp`.
        width: width between blocks; twice as wide inside a block.
        blocks: number of blocks.
        dropout: dropout in each block.
        seed: random seed of the initial weights.
    """
    manual_seed(seed)
    size = width or _width(plan)
    body = nn.Sequential(*(_Block(size, dropout) for _ in range(blocks)), nn.BatchNorm1d(size), nn.ReLU())
    return _exported(plan, _Net(plan, _Columns(plan, size), body, size))


@checked(plan=PREPROCESSING, width=WHOLE, blocks=WHOLE, heads=WHOLE, seed=WHOLE)
def ft_transformer(
    plan: Preprocessing, width: int = 32, blocks: int = 2, heads: int = 4, *, dropout: float = 0.1, seed: int = 0
) -> onnx.ModelProto:
    """Build an FT-Transformer (Gorishniy et al.): a token per number and category, with self-attention.

    Args:
        plan: as for :func:`mlp`, but fitted with ``index=True``, so that a category is one token.
        width: token width.
        blocks: number of transformer blocks.
        heads: number of attention heads.
        dropout: dropout in each block.
        seed: random seed of the initial weights.
    """
    manual_seed(seed)
    block = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, "gelu", batch_first=True, norm_first=True)
    return _exported(plan, _Net(plan, _Tokens(plan, width), nn.Sequential(_Attending(block, blocks, width)), width))


for _model in (mlp, resnet, ft_transformer):
    MODELS.add(_model.__name__, _model)


# --- parts ----------------------------------------------------------------------------------------------------


class _Columns(nn.Module):
    """A layer from all columns to a vector [rows, size]: a linear layer of numbers plus an embedding per category.

    Embeddings of values without training rows start at zero.
    """

    def __init__(self, plan: Preprocessing, size: int) -> None:
        super().__init__()
        features = plan.features.get(plan.numbers, [])
        self.numbers = nn.Linear(len(features), size) if features else None
        if self.numbers is not None:
            # the features of category values that did not occur in training
            unseen = {f"{name}{kind.parts[-1]}" for name, kind in plan.read.items() if kind.name == "category"}
            self.numbers.weight.data[:, [i for i, name in enumerate(features) if name in unseen]] = 0
        self.categories = _Categories(plan, size) if plan.indices in plan.features else None

    def forward(self, numbers: Any, categories: Any) -> Any:
        parts = [] if self.numbers is None else [self.numbers(numbers)]
        return sum([*parts, *([] if self.categories is None else [self.categories(categories).sum(1)])])


class _Tokens(nn.Module):
    """A layer that embeds each column as a token, after a class token: [rows, 1 + columns, width]."""

    def __init__(self, plan: Preprocessing, width: int) -> None:
        super().__init__()
        count, bound = len(plan.features.get(plan.numbers, [])), width**-0.5
        self.of_all = init.uniform_(nn.Parameter(np.zeros((1, 1, width))), -bound, bound)
        self.scale = init.uniform_(nn.Parameter(np.zeros((count, width))), -bound, bound) if count else None
        self.shift = init.uniform_(nn.Parameter(np.zeros((count, width))), -bound, bound) if count else None
        self.categories = _Categories(plan, width) if plan.indices in plan.features else None

    def forward(self, numbers: Any, categories: Any) -> Any:
        given = numbers if numbers is not None else categories
        tokens = [self.of_all.expand(given.shape[0], -1, -1)]
        if self.scale is not None and numbers is not None:
            tokens.append(numbers.unsqueeze(2) * self.scale + self.shift)
        if self.categories is not None:
            tokens.append(self.categories(categories))
        return F.cat(tokens, 1)


class _Categories(nn.Module):
    """Embeddings of categorical columns, a table per column: indices [rows, columns] to [rows, columns, size]."""

    def __init__(self, plan: Preprocessing, size: int) -> None:
        super().__init__()
        slots = [len(kind.slots) for kind in plan.read.values() if isinstance(kind, Category) and kind.is_index]
        ends = np.cumsum(slots)
        self.starts = nn.Buffer(ends - slots)
        self.table = nn.Embedding(int(ends[-1]), size)
        self.table.weight.data *= size**-0.5
        self.table.weight.data[ends - 1] = 0

    def forward(self, x: Any) -> Any:
        return self.table(x + self.starts)


class _Block(nn.Module):
    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(size), nn.Linear(size, 2 * size), nn.ReLU(), nn.Dropout(dropout),
                                   nn.Linear(2 * size, size))  # fmt: skip

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


class _Attending(nn.Module):
    """Transformer blocks over tokens [rows, tokens, width]; returns the first token, [rows, width]."""

    def __init__(self, block: Any, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks, self.norm = nn.TransformerEncoder(block, blocks), nn.LayerNorm(width)

    def forward(self, tokens: Any) -> Any:
        return F.relu(self.norm(self.blocks(tokens)[:, 0]))


class _Net(nn.Module):
    """A network for tables: an embedding of the columns, a body, and a linear head per target."""

    def __init__(self, plan: Preprocessing, columns: nn.Module, body: nn.Module, size: int) -> None:
        super().__init__()
        self._plan, self._named, self.columns, self.body = plan, _outputs(plan), columns, body
        self.heads = nn.ModuleList([nn.Linear(size, len(t.classes) or 1) for t in plan.targets.values()])

    def forward(self, *given: Any) -> Any:
        inputs = dict(zip(self._plan.features, given, strict=True))
        x = self.body(self.columns(inputs.get(self._plan.numbers), inputs.get(self._plan.indices)))
        found = {}
        for (column, learnt), head in zip(self._plan.targets.items(), self.heads, strict=True):
            y = head(x)
            found[self._named[column]] = y if learnt.classes else y * learnt.std + learnt.mean
        return found


def _exported(plan: Preprocessing, net: nn.Module) -> onnx.ModelProto:
    """Export the network as a model whose metadata contain the preprocessing of its inputs."""
    types = {plan.numbers: "float32", plan.indices: "int64"}
    inputs = {name: Input(("batch", len(own)), types[name]) for name, own in plan.features.items()}
    model = export(net, inputs, name="table")
    for key, value in DataNames(preprocess=plan).as_metadata().items():
        model.metadata_props.add(key=key, value=value)
    return model


def _outputs(plan: Preprocessing) -> dict[str, str]:
    """Map target columns to output names: the column's name for numbers, ``logits`` for classes.

    With several targets, class outputs are named ``<column>_logits``.
    """
    if not plan.targets:
        raise DataError(
            "the preprocessing has no target",
            remedy="fit it with a target: gradgraph.preprocess.fit(table, target='price')",
            shell="name the column: --target price",
        )
    several = len(plan.targets) > 1
    return {column: (f"{column}_{LOGITS}" if several else LOGITS) if learnt.classes else column
            for column, learnt in plan.targets.items()}  # fmt: skip


def _width(plan: Preprocessing) -> int:
    """Return a layer size for the number of rows; a layer of 256 would memorise a few hundred rows."""
    return 64 if plan.rows < 2_000 else 128 if plan.rows < 20_000 else 256
