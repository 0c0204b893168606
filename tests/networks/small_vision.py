"""Convolutional networks of PyTorch in the style of the well-known ones, a few layers each, for 32x32 images."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 5


def conv_norm(c: int, m: int, kernel: int = 1, stride: int = 1, groups: int = 1, after: Any = None) -> nn.Sequential:
    conv = nn.Conv2d(c, m, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(m), *([after] if after is not None else []))


class Sum(nn.Module):
    """What its modules give for one x, added up."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.terms = nn.ModuleList(modules)

    def forward(self, x: Any) -> Any:
        return sum((m(x) for m in self.terms[1:]), self.terms[0](x))


class Excitation(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(c, c // 4, 1), nn.Conv2d(c // 4, c, 1)

    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Concatenated(nn.Module):
    """DenseNet's layer."""

    def __init__(self, c: int, growth: int) -> None:
        super().__init__()
        first = [nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 4 * growth, 1, bias=False)]
        self.new = nn.Sequential(*first, nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, 1, 1))

    def forward(self, x: Any) -> Any:
        return torch.cat([x, self.new(x)], 1)


class LastAxis(nn.Module):
    """A module on channels that lie last."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def classifier(c: int, *body: nn.Module, norm: nn.Module | None = None) -> nn.Module:
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, *pool, *([norm] if norm is not None else []), nn.Linear(c, CLASSES))


def repvit() -> nn.Module:
    def block(c: int) -> list[nn.Module]:
        mixed = Sum(conv_norm(c, c, 3, 1, c), nn.Conv2d(c, c, 1, groups=c), nn.Identity())
        mlp = nn.Sequential(conv_norm(c, 2 * c, after=nn.GELU()), conv_norm(2 * c, c))
        return [mixed, nn.BatchNorm2d(c), Excitation(c), Sum(nn.Identity(), mlp)]

    down = [conv_norm(16, 16, 3, 2, 16), conv_norm(16, 32)]
    stem = [conv_norm(3, 8, 3, 2, after=nn.GELU()), conv_norm(8, 16, 3, 2)]
    return classifier(32, *stem, *block(16), *down, *block(32), norm=nn.BatchNorm1d(32))


def mobilenet() -> nn.Module:
    def inverted(c: int, m: int, stride: int) -> nn.Module:
        wide = [conv_norm(c, 6 * c, after=nn.ReLU6()), conv_norm(6 * c, 6 * c, 3, stride, 6 * c, after=nn.ReLU6())]
        inner = nn.Sequential(*wide, conv_norm(6 * c, m))
        return Sum(nn.Identity(), inner) if stride == 1 else inner

    blocks = [inverted(16, 24, 2), inverted(24, 24, 1), inverted(24, 32, 2), inverted(32, 32, 1)]
    return classifier(64, conv_norm(3, 16, 3, 2, after=nn.ReLU6()), *blocks, conv_norm(32, 64, after=nn.ReLU6()))


def resnet() -> nn.Module:
    def bottleneck(c: int, m: int, stride: int) -> list[nn.Module]:
        inner = [conv_norm(c, m, after=nn.ReLU()), conv_norm(m, m, 3, stride, after=nn.ReLU()), conv_norm(m, 4 * m)]
        return [Sum(nn.Sequential(*inner), conv_norm(c, 4 * m, 1, stride)), nn.ReLU()]

    stem = [conv_norm(3, 16, 3, 2, after=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    return classifier(96, *stem, *bottleneck(16, 16, 1), *bottleneck(64, 24, 2))


def convnext() -> nn.Module:
    def block(c: int) -> nn.Module:
        mlp = LastAxis(nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)))
        return Sum(nn.Identity(), nn.Sequential(nn.Conv2d(c, c, 7, 1, 3, groups=c), mlp))

    down = [LastAxis(nn.LayerNorm(16)), nn.Conv2d(16, 32, 2, 2)]
    stem = [nn.Conv2d(3, 16, 4, 4), LastAxis(nn.LayerNorm(16))]
    return classifier(32, *stem, block(16), *down, block(32), norm=nn.LayerNorm(32))


def densenet() -> nn.Module:
    stem = [conv_norm(3, 16, 3, 2, after=nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    between = [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1, bias=False), nn.AvgPool2d(2, 2)]
    layers = [Concatenated(16, 8), Concatenated(24, 8), *between, Concatenated(16, 8), Concatenated(24, 8)]
    return classifier(32, *stem, *layers, nn.BatchNorm2d(32), nn.ReLU())


def grouped() -> nn.Module:
    """Groups of 64, 4 and 2 numbers, and maps of 16 and 4."""
    norms = [nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True), nn.GroupNorm(16, 32)]
    norms += [nn.InstanceNorm2d(32, affine=True), nn.GroupNorm(16, 32)]
    channels = (3, 16, 16, 32, 32, 32)
    convs = [nn.Conv2d(c, m, 3, 2, 1) for c, m in itertools.pairwise(channels)]
    return classifier(32, *(m for conv, norm in zip(convs, norms, strict=True) for m in (conv, norm, nn.SiLU())))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f for f in (repvit, mobilenet, resnet, convnext, densenet, grouped)
}
