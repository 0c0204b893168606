"""The networks of ``benchmarks.networks`` in plain JAX, with the same parameter names.

Batch normalization uses batch statistics; running statistics are not updated, so JAX does slightly less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax, nn

Array = jax.Array
Parameters = Mapping[str, Array]

WIDTH, HEADS, LAYERS = 256, 4, 4  # of the transformers


def linear(p: Parameters, name: str, x: Array) -> Array:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def conv(p: Parameters, name: str, x: Array, stride: int = 1, groups: int = 1) -> Array:
    w = p[f"{name}.weight"]
    pads = [(k // 2, k // 2) for k in w.shape[2:]]
    layout = ("NCHW", "OIHW", "NCHW")
    y = lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=layout, feature_group_count=groups)
    return y + p[f"{name}.bias"][:, None, None] if f"{name}.bias" in p else y


def batch_norm(p: Parameters, name: str, x: Array) -> Array:
    mean, var = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    weight, bias = (p[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
    return (x - mean) * lax.rsqrt(var + 1e-5) * weight + bias


def conv_bn(p: Parameters, prefix: str, i: int, x: Array, stride: int = 1, groups: int = 1) -> Array:
    return batch_norm(p, f"{prefix}{i + 1}", conv(p, f"{prefix}{i}", x, stride, groups))


def max_pool(x: Array, kernel: int = 2, stride: int = 2, pad: int = 0) -> Array:
    window, strides = (1, 1, kernel, kernel), (1, 1, stride, stride)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, ((0, 0), (0, 0), (pad, pad), (pad, pad)))


def mlp(p: Parameters, x: Array) -> Array:
    return linear(p, "4", nn.relu(linear(p, "2", nn.relu(linear(p, "0", x)))))


def cnn(p: Parameters, x: Array) -> Array:
    x = max_pool(nn.relu(conv(p, "0", x)))
    x = max_pool(nn.relu(conv(p, "3", x)))
    return linear(p, "9", nn.relu(linear(p, "7", x.reshape(len(x), -1))))


def resnet18(p: Parameters, x: Array) -> Array:
    x = max_pool(nn.relu(conv_bn(p, "", 0, x, 2)), 3, 2, 1)
    for i in range(4, 12):
        stride = 2 if i in (6, 8, 10) else 1
        y = nn.relu(conv_bn(p, f"{i}.body.", 0, x, stride))
        shortcut = conv_bn(p, f"{i}.shortcut.", 0, x, stride) if f"{i}.shortcut.0.weight" in p else x
        x = nn.relu(conv_bn(p, f"{i}.body.", 3, y) + shortcut)
    return linear(p, "14", x.mean((2, 3)))


def mobilenetv2(p: Parameters, x: Array) -> Array:
    x = nn.relu6(conv_bn(p, "", 0, x, 2))
    for i in range(3, 20):
        y, prefix, at = x, f"{i}.body.", 0
        if f"{prefix}6.weight" in p:
            y, at = nn.relu6(conv_bn(p, prefix, 0, y)), 3
        stride = 2 if i in (4, 6, 9, 16) else 1
        y = nn.relu6(conv_bn(p, prefix, at, y, stride, groups=y.shape[1]))
        y = conv_bn(p, prefix, at + 3, y)
        x = x + y if x.shape == y.shape else y
    return linear(p, "25", nn.relu6(conv_bn(p, "", 20, x)).mean((2, 3)))


def unet(p: Parameters, x: Array) -> Array:
    def twice(prefix: str, x: Array) -> Array:
        return nn.relu(conv_bn(p, prefix, 3, nn.relu(conv_bn(p, prefix, 0, x))))

    kept = []
    for i in range(4):
        x = twice(f"down.{i}.", x if i == 0 else max_pool(x))
        kept.append(x)
    for i in range(3):
        n, _, height, width = x.shape
        x = jnp.einsum("nchw,cokl->nohkwl", x, p[f"rise.{i}.weight"]).reshape(n, -1, 2 * height, 2 * width)
        x = x + p[f"rise.{i}.bias"][:, None, None]
        x = twice(f"up.{i}.", jnp.concatenate([kept[2 - i], x], 1))
    return conv(p, "head", x)


def layer_norm(p: Parameters, name: str, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def attention(p: Parameters, name: str, x: Array, causal: bool) -> Array:
    n, time, width = x.shape
    q, k, v = jnp.split(linear(p, f"{name}.qkv", x).reshape(n, time, 3 * HEADS, width // HEADS), 3, axis=2)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    return linear(p, f"{name}.out", y.reshape(n, time, width))


def feed_forward(p: Parameters, name: str, x: Array) -> Array:
    return linear(p, f"{name}.2", nn.gelu(linear(p, f"{name}.0", x), approximate=False))


def gpt(p: Parameters, x: Array) -> Array:
    h = p["tokens.weight"][x] + p["positions"]
    for i in range(LAYERS):
        h = h + attention(p, f"layers.{i}.attention", layer_norm(p, f"layers.{i}.norm1", h), True)
        h = h + feed_forward(p, f"layers.{i}.feed_forward", layer_norm(p, f"layers.{i}.norm2", h))
    return linear(p, "head", layer_norm(p, "norm", h)).reshape(x.size, -1)


def bert(p: Parameters, x: Array) -> Array:
    h = layer_norm(p, "norm", p["tokens.weight"][x] + p["positions"])
    for i in range(LAYERS):
        h = layer_norm(p, f"layers.{i}.norm1", h + attention(p, f"layers.{i}.attention", h, False))
        h = layer_norm(p, f"layers.{i}.norm2", h + feed_forward(p, f"layers.{i}.feed_forward", h))
    return linear(p, "head", jnp.tanh(linear(p, "pooler", h[:, 0])))


def lstm(p: Parameters, x: Array) -> Array:
    h = p["tokens.weight"][x].swapaxes(0, 1)
    for i in range(2):
        bias = p[f"lstm.bias_ih_l{i}"] + p[f"lstm.bias_hh_l{i}"]
        gates, recurrent = h @ p[f"lstm.weight_ih_l{i}"].T + bias, p[f"lstm.weight_hh_l{i}"].T

        def cell(
            state: tuple[Array, Array], given: Array, recurrent: Array = recurrent
        ) -> tuple[tuple[Array, Array], Array]:
            y, c = state
            i, f, g, o = jnp.split(given + y @ recurrent, 4, axis=-1)
            c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
            y = nn.sigmoid(o) * jnp.tanh(c)
            return (y, c), y

        start = jnp.zeros((x.shape[0], WIDTH))
        _, h = lax.scan(cell, (start, start), gates)
    return linear(p, "head", h.swapaxes(0, 1)).reshape(x.size, -1)


NETWORKS: dict[str, Callable[[Parameters, Array], Array]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet18": resnet18,
    "mobilenetv2": mobilenetv2,
    "unet": unet,
    "gpt": gpt,
    "bert": bert,
    "lstm": lstm,
}
