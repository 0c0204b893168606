"""Multi-head attention and the Transformer encoder as layers, with PyTorch's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradgraph.errors import ModelError
from gradgraph.frontend import activations, attention, init, products, reductions
from gradgraph.frontend.layers import Dropout, LayerNorm, Linear, empty
from gradgraph.frontend.module import Module, ModuleList, clones
from gradgraph.frontend.trace import TensorLike, tensor

__all__ = ["MultiheadAttention", "TransformerEncoder", "TransformerEncoderLayer", "generate_square_subsequent_mask"]


class MultiheadAttention(Module):
    """Attention over ``num_heads`` heads; batch and sequence lengths may be dynamic.

    ``forward(query, key, value, ...)`` takes ``[L, N, E]``, ``[S, N, kdim]``, ``[S, N, vdim]`` (batch first with
    ``batch_first``) and returns ``(output, weights)``: the output ``[L, N, E]``, and the attention probabilities
    ``[N, L, S]`` (``None`` unless ``need_weights``). Boolean masks are true where attention is *not* allowed;
    floating-point masks are added to the scores. The output for a query without any allowed position is zero.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ModelError(f"embed_dim {embed_dim} must be divisible by the number of heads, {num_heads}")
        if add_bias_kv or add_zero_attn:
            raise ModelError("MultiheadAttention does not support add_bias_kv and add_zero_attn; leave them False")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        kdim, vdim = kdim or embed_dim, vdim or embed_dim
        self.packed = kdim == vdim == embed_dim
        shapes = (
            {"in_proj_weight": (3 * embed_dim, embed_dim)}
            if self.packed
            else {
                "q_proj_weight": (embed_dim, embed_dim),
                "k_proj_weight": (embed_dim, kdim),
                "v_proj_weight": (embed_dim, vdim),
            }
        )
        for name, shape in shapes.items():
            self.register_parameter(name, init.xavier_uniform_(empty(*shape)))
        self.register_parameter("in_proj_bias", empty(3 * embed_dim) if bias else None)
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: TensorLike,
        key: TensorLike,
        value: TensorLike,
        key_padding_mask: TensorLike | None = None,
        need_weights: bool = True,
        attn_mask: TensorLike | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        if is_causal and attn_mask is None:
            raise ModelError(
                "MultiheadAttention uses is_causal=True only as a hint, as PyTorch does; pass the causal attn_mask, too"
            )
        q, k, v = self._project(query, key, value)
        allowed, added = attention.combined_masks(attn_mask, key_padding_mask, self.num_heads)
        out, weights = attention.multi_head_attention(q, k, v, self.num_heads, allowed, added, self.dropout)
        out = self.out_proj(out)
        out = out if self.batch_first else out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, reductions.mean(weights, 1) if average_attn_weights else weights

    def _project(self, query: TensorLike, key: TensorLike, value: TensorLike) -> list[Any]:
        """Return the projected queries, keys and values, batch first; for self-attention, by a single product."""
        inputs = [tensor(x) for x in (query, key, value)]
        if any(x.ndim != 3 for x in inputs):
            raise ModelError(f"MultiheadAttention got a query of shape {inputs[0].shape}; expected 3 dimensions")
        itself = query is key and key is value
        if not self.batch_first:
            inputs = [x.transpose(0, 1) for x in (inputs[:1] * 3 if itself else inputs)]
        if self.packed and itself:
            return list(products.linear(inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        names = [f"{n}_proj_weight" for n in "qkv"]
        weights = tensor(self.in_proj_weight).chunk(3) if self.packed else [getattr(self, n) for n in names]
        biases = [None] * 3 if self.in_proj_bias is None else tensor(self.in_proj_bias).chunk(3)
        return [products.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


class TransformerEncoderLayer(Module):
    """Self-attention and a two-layer network, each with a residual connection, normalisation and dropout."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Any], Any] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        known: dict[str, Callable[[Any], Any]] = {"relu": activations.relu, "gelu": activations.gelu}
        if isinstance(activation, str) and activation not in known:
            raise ModelError(
                f"TransformerEncoderLayer has no activation {activation!r}; use 'relu', 'gelu' or a function"
            )
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first)
        self.linear1 = Linear(d_model, dim_feedforward, bias)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        self.norm_first = norm_first
        self.activation = known[activation] if isinstance(activation, str) else activation

    def forward(
        self,
        src: TensorLike,
        src_mask: TensorLike | None = None,
        src_key_padding_mask: TensorLike | None = None,
        is_causal: bool = False,
    ) -> Any:
        x = tensor(src)
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            x = x + self._attend(self.norm1(x), *masks)
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self._attend(x, *masks))
        return self.norm2(x + self._feed_forward(x))

    def _attend(self, x: Any, mask: TensorLike | None, padding: TensorLike | None, is_causal: bool) -> Any:
        out, _ = self.self_attn(
            x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False, is_causal=is_causal
        )
        return self.dropout1(out)

    def _feed_forward(self, x: Any) -> Any:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class TransformerEncoder(Module):
    """A stack of ``num_layers`` copies of an encoder layer, with an optional final normalisation."""

    def __init__(self, encoder_layer: TransformerEncoderLayer, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleList(clones(encoder_layer, num_layers))
        self.register_module("norm", norm)

    def forward(
        self,
        src: TensorLike,
        mask: TensorLike | None = None,
        src_key_padding_mask: TensorLike | None = None,
        is_causal: bool = False,
    ) -> Any:
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal)
        return src if self.norm is None else self.norm(src)


def generate_square_subsequent_mask(size: Any) -> Any:
    """Return the causal mask ``[size, size]``, true where attention is *not* allowed; ``size`` may be dynamic."""
    return ~attention.causal_mask(size, size)
