"""Many small networks as five exporters write them, each with what its own library calls trainable.

Needs what it exports: torch, torchvision, timm, transformers, diffusers, torch_geometric; tensorflow, keras, tf2onnx;
jax, flax and jax2onnx; scikit-learn and skl2onnx. Each exporter imports only its own.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx

Export = tuple[onnx.ModelProto, dict[str, Any], dict[str, Any]]  # the file, what is trained, what is not

# --- PyTorch ---------------------------------------------------------------------------------------------------

TIMM = {  # a small one of each family, and the size of its images
    **dict.fromkeys(["resnet10t", "resnetv2_18", "seresnet18", "regnetx_002", "regnety_002", "repvgg_a0"], 64),
    **dict.fromkeys(["mobilenetv2_035", "mobilenetv3_small_050", "mobilenetv4_conv_small_050", "mnasnet_050"], 64),
    **dict.fromkeys(["efficientnet_b0", "tf_efficientnetv2_b0", "lcnet_035", "tinynet_e", "hardcorenas_a"], 64),
    **dict.fromkeys(["densenet121", "dla34", "vgg11", "ghostnet_050", "semnasnet_050", "spnasnet_100"], 64),
    **dict.fromkeys(["convnext_atto", "convnextv2_atto", "inception_next_atto", "edgenext_xx_small"], 64),
    **dict.fromkeys(["starnet_s1", "repghostnet_050", "repvit_m0_9", "fastvit_t8", "mobileone_s0", "gernet_s"], 64),
    **dict.fromkeys(["vit_tiny_patch16_224", "deit_tiny_patch16_224", "cait_xxs24_224", "xcit_nano_12_p16_224"], 224),
    **dict.fromkeys(["pit_ti_224", "mixer_s32_224", "gmlp_ti16_224", "resmlp_12_224", "beit_base_patch16_224"], 224),
    **dict.fromkeys(["swin_tiny_patch4_window7_224", "levit_128s", "coat_lite_tiny", "twins_svt_small"], 224),
    **dict.fromkeys(["efficientformer_l1", "crossvit_tiny_240", "mobilevit_xxs", "mobilevitv2_050", "nest_tiny"], 224),
    **dict.fromkeys(["maxvit_rmlp_pico_rw_256", "volo_d1_224", "visformer_tiny", "eva02_tiny_patch14_224"], 224),
    **dict.fromkeys(["tiny_vit_5m_224", "efficientvit_b0", "mvitv2_tiny", "pvt_v2_b0", "focalnet_tiny_srf"], 224),
}  # fmt: skip
TINY = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim"), 64),
    "pad_token_id": 0,
    "use_cache": False,
    "head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 4,
    "n_positions": 64,
    "attention_hidden_size": 32,
    "num_decoder_layers": 2,
    "type_vocab_size": 2,
    "attn_implementation": "eager",
}
TRANSFORMERS = [
    *("BertModel", "RobertaModel", "DistilBertModel", "AlbertModel", "ElectraModel"),
    *("MPNetModel", "DebertaV2Model", "FNetModel", "ConvBertModel", "SqueezeBertModel"),
    *("CanineModel", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "BloomForCausalLM"),
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM"),
    *("PhiForCausalLM", "FalconForCausalLM", "RwkvForCausalLM", "MambaForCausalLM", "T5EncoderModel"),
    *("CodeGenForCausalLM", "StableLmForCausalLM", "Olmo2ForCausalLM", "MobileBertForMaskedLM"),
]  # fmt: skip


def torch_networks() -> Iterator[tuple[str, Callable[[], tuple[Any, tuple[Any, ...]]]]]:
    import torch

    for name, size in TIMM.items():
        yield f"timm/{name}", lambda name=name, size=size: (_timm(name), (torch.randn(2, 3, size, size),))
    for name in TRANSFORMERS:
        yield f"transformers/{name}", lambda name=name: (_transformer(name), (torch.randint(1, 60, (2, 8)),))
    for name in ("CLIPModel", "ViTModel", "SegformerModel", "Wav2Vec2Model", "WhisperModel"):
        yield f"transformers/{name}", lambda name=name: _other_transformer(name)
    for name in ("unet", "vae", "dit"):
        yield f"diffusers/{name}", lambda name=name: _diffuser(name)
    for name in ("GCNConv", "GATConv", "GINConv", "SAGEConv", "GraphConv", "ARMAConv", "TAGConv", "GENConv"):
        yield f"geometric/{name}", lambda name=name: _graph_network(name)
    for name in ("lstm", "gru", "encoder", "prelu", "gem", "rezero", "weight_norm", "spectral_norm"):
        yield f"torch/{name}", lambda name=name: _small(name)


def _timm(name: str) -> Any:
    import timm

    return timm.create_model(name)


def _transformer(name: str) -> Any:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**TINY)
    return _FirstOutput(kind(config))


def _other_transformer(name: str) -> tuple[Any, tuple[Any, ...]]:
    import torch
    import transformers as hf

    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    images = {**tiny, "image_size": 32, "patch_size": 8}
    if name == "CLIPModel":
        config = hf.CLIPConfig(text_config={**tiny, "vocab_size": 64}, vision_config=images, projection_dim=16)
        model = hf.CLIPModel(config)

        class Scores(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, token: Any, image: Any) -> Any:
                return self.model(input_ids=token, pixel_values=image).logits_per_text

        return Scores(), (torch.randint(1, 60, (2, 8)), torch.randn(2, 3, 32, 32))
    if name == "WhisperModel":
        sizes = {k: v for k, v in TINY.items() if k not in ("pad_token_id", "use_cache", "head_dim")}
        model = hf.WhisperModel(
            hf.WhisperConfig(**sizes, max_source_positions=32, num_mel_bins=8, decoder_start_token_id=1)
        )

        class Heard(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, sound: Any, token: Any) -> Any:
                return self.model(sound, decoder_input_ids=token).last_hidden_state

        return Heard(), (torch.randn(2, 8, 64), torch.randint(1, 60, (2, 4)))
    if name == "Wav2Vec2Model":
        model = hf.Wav2Vec2Model(hf.Wav2Vec2Config(**tiny, conv_dim=(16,) * 7, num_conv_pos_embeddings=16))
        return _FirstOutput(model), (torch.randn(2, 2000),)
    if name == "SegformerModel":
        return _FirstOutput(hf.SegformerModel(hf.SegformerConfig(hidden_sizes=[8, 16, 32, 64]))), (
            torch.randn(2, 3, 64, 64),
        )
    return _FirstOutput(hf.ViTModel(hf.ViTConfig(**images))), (torch.randn(2, 3, 32, 32),)


def _FirstOutput(model: Any) -> Any:  # noqa: N802 (a class that is made where torch is imported)
    import torch

    class FirstOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model(x, return_dict=True)[0]

    return FirstOutput()


def _diffuser(name: str) -> tuple[Any, tuple[Any, ...]]:
    import diffusers
    import torch

    if name == "vae":
        model = diffusers.AutoencoderKL(block_out_channels=(32,), layers_per_block=1, norm_num_groups=8)
        return _FirstOutput2(model), (torch.randn(1, 3, 16, 16),)
    if name == "dit":
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8
        )

        class Dit(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Any, t: Any, label: Any) -> Any:
                return self.model(x, t, label, return_dict=False)[0]

        return Dit(), (torch.randn(1, 4, 8, 8), torch.tensor([7]), torch.tensor([3]))
    model = diffusers.UNet2DModel(sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
                                  down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                  up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip

    class Unet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any, t: Any) -> Any:
            return self.model(x, t, return_dict=False)[0]

    return Unet(), (torch.randn(1, 3, 16, 16), torch.tensor([7]))


def _FirstOutput2(model: Any) -> Any:  # noqa: N802
    import torch

    class FirstOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model(x, return_dict=False)[0]

    return FirstOutput()


def _graph_network(name: str) -> tuple[Any, tuple[Any, ...]]:
    import torch
    import torch_geometric.nn as pyg

    if name == "GINConv":
        layer = pyg.GINConv(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), train_eps=True)
    elif name == "GENConv":
        layer = pyg.GENConv(8, 8, learn_t=True)
    else:
        layer = getattr(pyg, name)(8, 8)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any, edges: Any) -> Any:
            return self.layer(x, edges)

    return Net(), (torch.randn(6, 8), torch.randint(0, 6, (2, 12)))


def _small(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Layers of which single numbers are learned, or that are computed from parameters."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)
            self.one = nn.Linear(16, 1)
            self.power, self.gate = nn.Parameter(torch.ones(1) * 3), nn.Parameter(torch.ones(1))
            self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}.get(name, nn.RNN)(16, 16, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.slope = nn.PReLU()
            normed = {"weight_norm": nn.utils.parametrizations.weight_norm}.get(
                name, nn.utils.parametrizations.spectral_norm
            )
            self.normed = normed(nn.Linear(16, 16))

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.fc(x))
            if name in ("lstm", "gru"):
                x = self.rnn(x)[0]
            if name == "encoder":
                x = self.encoder(x)
            if name == "prelu":
                x = self.slope(x)
            if name == "gem":
                x = nn.functional.relu6(x).clamp(min=1e-6).pow(self.power).mean(1).pow(1 / self.power)
            if name == "rezero":
                x = x + self.gate * self.fc(x)
            if name.endswith("norm"):
                x = self.normed(x)
            return self.one(x)

    return Net(), (torch.randn(2, 5, 16),)


def torch_export(dynamo: bool) -> Iterator[tuple[str, Callable[[], Export]]]:
    import torch

    from benchmarks import torchvision_operators

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torchvision_operators.declare()

    def export(make: Callable[[], tuple[Any, tuple[Any, ...]]]) -> Export:
        torch.manual_seed(0)
        module, inputs = make()
        module.eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
            for name, buffer in module.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_()
                if name.endswith("running_var"):
                    buffer.uniform_(0.5, 2)
        truth = _used(torch, module, inputs)
        rest = {n: b.numpy().copy() for n, b in module.named_buffers() if b.is_floating_point()}
        rest |= {n: p.detach().numpy().copy() for n, p in module.named_parameters() if not p.requires_grad}
        if dynamo:
            return torch.onnx.export(module, inputs, dynamo=True, verbose=False).model_proto, truth, rest
        file = io.BytesIO()
        keep = torch.onnx.TrainingMode.PRESERVE  # or convolutions take up their norms
        torch.onnx.export(module, inputs, file, dynamo=False, training=keep)
        return onnx.load_from_string(file.getvalue()), truth, rest

    for name, make in torch_networks():
        yield name, lambda make=make: export(make)


def _used(torch: Any, module: Any, inputs: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """The numbers of each parameter that a gradient reaches: not rows of a table that nobody looks up."""
    result = module(*inputs)
    (result if isinstance(result, torch.Tensor) else result[0]).float().square().sum().backward()
    reached = {n: p for n, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    return {n: p.detach().numpy()[p.grad.numpy() != 0] for n, p in reached.items()}


# --- TensorFlow and Keras ----------------------------------------------------------------------------------------


def keras_export() -> Iterator[tuple[str, Callable[[], Export]]]:
    import keras
    import tensorflow as tf
    import tf2onnx

    apps = ["MobileNet", "MobileNetV2", "MobileNetV3Small", "ResNet50V2", "ConvNeXtTiny"]

    def app(name: str) -> Any:
        options = {"alpha": 0.5} if name.startswith("Mobile") else {}
        return getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=7, **options)

    def layers(name: str) -> Any:
        sequence, image = keras.Input((9, 8)), keras.Input((16, 16, 3))
        if name in ("LSTM", "GRU", "SimpleRNN"):
            return keras.Model(sequence, keras.layers.Dense(3)(getattr(keras.layers, name)(12)(sequence)))
        if name == "Attention":
            x = keras.layers.MultiHeadAttention(2, 4)(sequence, sequence)
            return keras.Model(sequence, keras.layers.Dense(3)(keras.layers.LayerNormalization()(sequence + x)))
        x = keras.layers.Conv2D(8, 3)(image)
        x = {"PReLU": lambda: keras.layers.PReLU(shared_axes=[1, 2]), "ReLU6": lambda: keras.layers.ReLU(6.0, 0.1, 0.2),
             "GroupNorm": lambda: keras.layers.GroupNormalization(4)}[name]()(x)  # fmt: skip
        return keras.Model(image, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(x)))

    def export(make: Callable[[str], Any], name: str) -> Export:
        keras.utils.set_random_seed(0)
        model = make(name)
        rng = np.random.default_rng(0)
        for weight in model.trainable_weights:
            weight.assign(weight.numpy() + rng.normal(size=weight.shape).astype(np.float32) * 0.02)
        signature = [tf.TensorSpec([2, *x.shape[1:]], tf.float32, name="x") for x in model.inputs]
        file, _ = tf2onnx.convert.from_function(tf.function(lambda x: model(x)), signature, opset=17)
        truth = {f"{i}:{w.path}": w.numpy() for i, w in enumerate(model.trainable_weights)}
        rest = {f"{i}:{w.path}": w.numpy() for i, w in enumerate(model.non_trainable_weights) if "seed" not in w.path}
        return file, truth, rest

    for name in ("LSTM", "GRU", "SimpleRNN", "Attention", "PReLU", "ReLU6", "GroupNorm"):
        yield f"keras/{name}", lambda name=name: export(layers, name)
    for name in apps:
        yield f"keras/{name}", lambda name=name: export(app, name)


# --- JAX -------------------------------------------------------------------------------------------------------


def jax_export() -> Iterator[tuple[str, Callable[[], Export]]]:
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax2onnx import to_onnx

    class Residual(nnx.Module):
        def __init__(self, body: Any) -> None:
            self.body = body

        def __call__(self, x: Any) -> Any:
            return x + self.body(x)

    class Gated(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.gate, self.temperature = nnx.Param(jnp.ones(())), nnx.Param(jnp.zeros(()))
            self.fc = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.fc(x) * self.gate[...] * jnp.exp(self.temperature[...]) + 1e-3

    r = nnx.Rngs(0)
    vector, image, sequence = (2, 8), (2, 12, 12, 3), (2, 5, 8)

    def linear() -> Any:
        return nnx.Linear(8, 16, rngs=r)

    def conv() -> Any:
        return nnx.Conv(3, 8, (3, 3), rngs=r)

    nets: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
        "mlp": (lambda: nnx.Sequential(linear(), nnx.relu, nnx.Linear(16, 3, rngs=r)), vector),
        "relu6": (lambda: nnx.Sequential(linear(), jax.nn.relu6, nnx.Linear(16, 1, rngs=r)), vector),
        "gelu": (lambda: nnx.Sequential(linear(), nnx.gelu, nnx.Linear(16, 3, rngs=r)), vector),
        "layer_norm": (lambda: nnx.Sequential(linear(), nnx.LayerNorm(16, rngs=r)), vector),
        "rms_norm": (lambda: nnx.Sequential(linear(), nnx.RMSNorm(16, rngs=r)), vector),
        "batch_norm": (lambda: nnx.Sequential(linear(), nnx.BatchNorm(16, rngs=r)), vector),
        "group_norm": (lambda: nnx.Sequential(conv(), nnx.GroupNorm(8, 2, rngs=r)), image),
        "cnn": (lambda: nnx.Sequential(conv(), nnx.relu, nnx.Conv(8, 4, (3, 3), rngs=r)), image),
        "residual": (lambda: Residual(nnx.Sequential(nnx.Linear(8, 8, rngs=r), nnx.silu)), vector),
        "gated": (lambda: Gated(r), vector),
        "attention": (lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r), sequence),
        "conv_transpose": (lambda: nnx.ConvTranspose(3, 4, (3, 3), rngs=r), image),
    }  # fmt: skip

    def export(make: Callable[[], Any], shape: tuple[int, ...]) -> Export:
        model = make()
        model.eval()
        rng = np.random.default_rng(0)
        state = nnx.state(model, nnx.Param)
        state = jax.tree.map(lambda a: a + rng.normal(size=a.shape).astype(np.float32) * 0.02, state)
        nnx.update(model, state)
        truth = {str(i): np.asarray(a) for i, a in enumerate(jax.tree.leaves(nnx.state(model, nnx.Param)))}
        rest = {f"rest {i}": np.asarray(a) for i, a in enumerate(jax.tree.leaves(nnx.state(model, nnx.BatchStat)))}
        return to_onnx(lambda x: model(x), [shape]), truth, rest

    for name, (make, shape) in nets.items():
        yield f"jax/{name}", lambda make=make, shape=shape: export(make, shape)


# --- scikit-learn ------------------------------------------------------------------------------------------------


def sklearn_export() -> Iterator[tuple[str, Callable[[], Export]]]:
    from skl2onnx import to_onnx
    from sklearn import (
        cross_decomposition,
        decomposition,
        linear_model,
        neural_network,
        pipeline,
        preprocessing,
    )

    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(80, 5)).astype(np.float32), rng.integers(0, 3, 80)
    y = x @ rng.normal(size=5).astype(np.float32) + 0.3

    def scaled(last: Any) -> Any:
        return pipeline.make_pipeline(preprocessing.StandardScaler(), last)

    small = {"hidden_layer_sizes": (6, 4), "max_iter": 30}
    makers: dict[str, tuple[Any, Any]] = {
        "mlp_regressor": (neural_network.MLPRegressor(**small), y),
        "mlp_classifier": (neural_network.MLPClassifier(**small), labels),
        "mlp_logistic": (scaled(neural_network.MLPRegressor(activation="logistic", **small)), y),
        "linear": (linear_model.LinearRegression(), y),
        "ridge": (scaled(linear_model.Ridge()), y),
        "lasso": (linear_model.Lasso(0.01), y),
        "logistic": (linear_model.LogisticRegression(), labels),
        "sgd_regressor": (linear_model.SGDRegressor(), y),
        "poisson": (linear_model.PoissonRegressor(), np.abs(y)),
        "pca_linear": (pipeline.make_pipeline(decomposition.PCA(3), linear_model.LinearRegression()), y),
        "pls": (cross_decomposition.PLSRegression(2), y),
        "bayesian_ridge": (linear_model.BayesianRidge(), y),
    }

    def export(estimator: Any, target: Any) -> Export:
        estimator.fit(x, target)
        last = estimator[-1] if isinstance(estimator, pipeline.Pipeline) else estimator
        held = [*last.coefs_, *last.intercepts_] if hasattr(last, "coefs_") else [last.coef_, last.intercept_]
        truth = {str(i): np.asarray(a, np.float32) for i, a in enumerate(held)}
        return to_onnx(estimator, x[:1]), truth, {}

    for name, (estimator, target) in makers.items():
        yield f"sklearn/{name}", lambda estimator=estimator, target=target: export(estimator, target)


EXPORTERS: dict[str, Callable[[], Iterator[tuple[str, Callable[[], Export]]]]] = {
    "torch": lambda: torch_export(dynamo=True),
    "torch-legacy": lambda: torch_export(dynamo=False),
    "keras": keras_export,
    "jax": jax_export,
    "sklearn": sklearn_export,
}
