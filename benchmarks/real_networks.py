"""Networks of real sizes from torchvision, transformers and diffusers, with random weights.

Dropout is off, as masks would differ between libraries; batch normalization is in training mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import torchvision_operators

torchvision_operators.declare()

import diffusers  # noqa: E402 (after the declaration)
import torchvision  # noqa: E402
import transformers  # noqa: E402

Tensor = torch.Tensor


class Answer(nn.Module):
    """A network of transformers or diffusers as a function from tensors to one tensor."""

    def __init__(self, network: nn.Module, names: tuple[str, ...], answer: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.network, self.names, self.answer = network, names, answer

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.answer(self.network(**dict(zip(self.names, inputs, strict=True)), return_dict=True))


def _token_scores(answer: Any) -> Tensor:
    scores: Tensor = answer.logits
    return scores.flatten(0, 1)


def mobilenetv3() -> nn.Module:
    return torchvision.models.mobilenet_v3_large(dropout=0.0)


def bert_base() -> nn.Module:
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    network = transformers.BertForSequenceClassification(config)
    return Answer(network, ("input_ids", "attention_mask"), lambda answer: answer.logits)


def gpt2_small() -> nn.Module:
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return Answer(transformers.GPT2LMHeadModel(config), ("input_ids",), _token_scores)


def whisper_base() -> nn.Module:
    layers = {"encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    widths = {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    config = transformers.WhisperConfig(**layers, **widths, dropout=0.0, use_cache=False)
    network = transformers.WhisperForConditionalGeneration(config)
    return Answer(network, ("input_features", "decoder_input_ids"), _token_scores)


def diffusion_unet() -> nn.Module:
    network = diffusers.UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128, 256, 256), cross_attention_dim=256
    )
    return Answer(network, ("sample", "timestep", "encoder_hidden_states"), lambda answer: answer.sample)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet50-224": torchvision.models.resnet50,
    "mobilenetv3-224": mobilenetv3,
    "vit-b16": torchvision.models.vit_b_16,
    "bert-base": bert_base,
    "gpt2-124m": gpt2_small,
    "whisper-base": whisper_base,
    "diffusion-unet": diffusion_unet,
}
