"""The networks in PyTorch, which ``prepare`` exports to ONNX for the other libraries.

There is no dropout (masks would differ between libraries), and batch normalization is in training mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def conv_bn(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width)]


# --- ResNet-18 ----------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_bn(channels, width, 3, stride), nn.ReLU(), *conv_bn(width, width, 3))
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_bn(channels, width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [ResidualBlock(channels, width, 1 if width == 64 else 2), ResidualBlock(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        first = [*conv_bn(channels, width, 1), nn.ReLU()]
        self.body = nn.Sequential(*first, *conv_bn(width, width, 3, stride), nn.ReLU(), *conv_bn(width, 4 * width, 1))
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*conv_bn(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if i == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


# --- MobileNetV2 --------------------------------------------------------------------------------------------

INVERTED_RESIDUALS = (  # expansion, channels, blocks, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        expand = [*conv_bn(channels, hidden, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.body = nn.Sequential(*expand, *depthwise, *conv_bn(hidden, width, 1))
        self.residual = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


def mobilenetv2(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [*conv_bn(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for expansion, width, blocks, stride in INVERTED_RESIDUALS:
        for i in range(blocks):
            layers.append(InvertedResidual(channels, width, stride if i == 0 else 1, expansion))
            channels = width
    head = [*conv_bn(channels, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes)]
    return nn.Sequential(*layers, *head)


# --- MBConv (EfficientNet, MobileNetV3), ConvNeXt, TCN ---------------------------------------------------------------


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        pool = nn.AdaptiveAvgPool2d(1)
        self.scale = nn.Sequential(pool, nn.Conv2d(channels, squeezed, 1), nn.SiLU(), nn.Conv2d(squeezed, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.scale(x))


class MBConv(nn.Module):
    def __init__(
        self, channels: int, width: int, kernel: int, stride: int, expansion: int, act: type[nn.Module]
    ) -> None:
        super().__init__()
        hidden = channels * expansion
        expand = [*conv_bn(channels, hidden, 1), act()] if expansion > 1 else []
        depthwise = [*conv_bn(hidden, hidden, kernel, stride, groups=hidden), act()]
        squeeze = SqueezeExcitation(hidden, max(channels // 4, 8))
        self.body = nn.Sequential(*expand, *depthwise, squeeze, *conv_bn(hidden, width, 1))
        self.residual = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


EFFICIENTNET = (  # kernel, stride of the first, expansion, channels, blocks
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
MOBILENETV3 = (
    (3, 2, 1, 16, 1),
    (3, 2, 4, 24, 2),
    (5, 2, 4, 40, 3),
    (5, 1, 4, 48, 2),
    (5, 2, 6, 96, 3),
)


def mbconv_network(
    rows: tuple[tuple[int, ...], ...], first: int, last: int, act: type[nn.Module], classes: int = 1000
) -> nn.Module:
    layers: list[nn.Module] = [*conv_bn(3, first, 3, 2), act()]
    channels = first
    for kernel, stride, expansion, width, blocks in rows:
        for i in range(blocks):
            layers.append(MBConv(channels, width, kernel, stride if i == 0 else 1, expansion, act))
            channels = width
    head = [*conv_bn(channels, last, 1), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*layers, *head)


def efficientnet() -> nn.Module:
    """EfficientNet-B0 without stochastic depth."""
    return mbconv_network(EFFICIENTNET, 32, 1280, nn.SiLU)


def mobilenetv3_small() -> nn.Module:
    """A network of MobileNetV3-small's sizes, with Hardswish and squeeze-and-excitation in all blocks."""
    return mbconv_network(MOBILENETV3, 16, 576, nn.Hardswish)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.mlp(self.depthwise(x).permute(0, 2, 3, 1))
        return x + y.permute(0, 3, 1, 2)


def convnext(classes: int = 1000, widths: tuple[int, ...] = (48, 96, 192, 384)) -> nn.Module:
    """ConvNeXt's first stages at half the width of its smallest size, three blocks each."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0])]
    for i, width in enumerate(widths):
        if i:
            layers += [LayerNorm2d(widths[i - 1]), nn.Conv2d(widths[i - 1], width, 2, 2)]
        layers += [ConvNeXtBlock(width) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layers, *head)


class TemporalBlock(nn.Module):
    def __init__(self, channels: int, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = (2 * dilation, 0)  # causal
        self.first = nn.Conv1d(channels, width, 3, dilation=dilation)
        self.second = nn.Conv1d(width, width, 3, dilation=dilation)
        self.shortcut = nn.Conv1d(channels, width, 1) if channels != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(F.pad(x, self.pad)))
        return F.relu(F.relu(self.second(F.pad(y, self.pad))) + self.shortcut(x))


def tcn(channels: int = 16, width: int = 64, classes: int = 10) -> nn.Module:
    """A temporal convolutional network of six dilated, causal blocks."""
    blocks = [TemporalBlock(channels if i == 0 else width, width, 2**i) for i in range(6)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, classes))


# --- U-Net --------------------------------------------------------------------------------------------------


def two_convolutions(channels: int, width: int) -> nn.Module:
    return nn.Sequential(*conv_bn(channels, width, 3), nn.ReLU(), *conv_bn(width, width, 3), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, channels: int = 1, classes: int = 2, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        pairs = list(zip((channels, *widths), widths, strict=False))
        self.down = nn.ModuleList(two_convolutions(a, b) for a, b in pairs)
        levels = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in levels)
        self.up = nn.ModuleList(two_convolutions(2 * b, b) for _, b in levels)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for rise, block, skipped in zip(self.rise, self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([skipped, rise(x)], 1))
        return self.head(x)


# --- Transformers -------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, time, width = x.shape
        q, k, v = (part.view(n, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, time, width))


class TransformerLayer(nn.Module):
    """A transformer layer with normalization before each part (GPT) or after its residual sum (BERT)."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int = 1000, time: int = 128, width: int = 256, heads: int = 4, layers: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(time, width))
        self.layers = nn.Sequential(*[TransformerLayer(width, heads, 4 * width, True, True) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(self.tokens(x) + self.positions)
        return self.head(self.norm(h)).flatten(0, 1)


def gpt2() -> nn.Module:
    return GPT(vocabulary=50257, time=512, width=768, heads=12, layers=12)


class BERT(nn.Module):
    """BERT with a head for sentence classification."""

    def __init__(
        self, vocabulary: int = 30522, time: int = 128, width: int = 256, heads: int = 4, layers: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(time, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*[TransformerLayer(width, heads, 4 * width, False, False) for _ in range(layers)])
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(self.norm(self.tokens(x) + self.positions))
        return self.head(torch.tanh(self.pooler(h[:, 0])))


# --- LSTM ---------------------------------------------------------------------------------------------------


class CharacterModel(nn.Module):
    def __init__(self, vocabulary: int = 128, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.tokens(x))
        return self.head(h).flatten(0, 1)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "mobilenetv2": mobilenetv2,
    "mobilenetv3": mobilenetv3_small,
    "efficientnet": efficientnet,
    "convnext": convnext,
    "tcn": tcn,
    "unet": UNet,
    "gpt": GPT,
    "bert": BERT,
    "lstm": CharacterModel,
    "resnet50": resnet50,
    "gpt2": gpt2,
}


def make(name: str) -> nn.Module:
    """Return a network in training mode, with initial weights that are equal in every process."""
    torch.manual_seed(0)
    return (NETWORKS if name in NETWORKS else _real())[name]().train()


def _real() -> dict[str, Callable[[], nn.Module]]:
    from benchmarks import real_networks  # slow to import

    return real_networks.NETWORKS
