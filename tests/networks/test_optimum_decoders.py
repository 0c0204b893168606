"""Decoders that optimum exports: scores, adapters of PEFT, losses and answers are those of PyTorch; folders learn.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="optimum exports modules of PyTorch")

import gradgraph as gg  # noqa: E402
from benchmarks import torchvision_operators  # noqa: E402
from gradgraph import surgery  # noqa: E402
from gradgraph.chat.adapted_layers import adapted_layers  # noqa: E402
from gradgraph.chat.model_folder import ModelFolder  # noqa: E402
from gradgraph.errors import BuildError  # noqa: E402
from tests.networks import optimum_decoders as decoders  # noqa: E402 (without PyTorch there is nothing to import)
from tests.networks.exporters import by_optimum  # noqa: E402
from tests.surgery.beside_torch import IDS, of_torch, scores  # noqa: E402
from tests.surgery.family_tables import named  # noqa: E402

torchvision_operators.declare()  # its wheels have operators for one build of PyTorch; the networks here need none
pytest.importorskip("optimum.exporters.onnx", reason="in no extra; `make shipped-models` runs these tests with it")
peft = pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

PAST = "text-generation-with-past"
TRIED = ("gpt2", "opt", "llama")  # Conv1D, nodes without a prefix, and what most are like


@pytest.fixture(scope="module", params=TRIED)
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return decoders.exported(request.param, tmp_path_factory.mktemp("optimum"), PAST)


@pytest.mark.parametrize("check", decoders.CHECKS)
def test_a_decoder_is_that_of_pytorch(written: tuple[Any, Path], check: str) -> None:
    decoders.CHECKS[check](*written)


def test_the_table_of_the_page_has_every_family() -> None:
    assert named("optimum") == list(decoders.FAMILIES)


def test_a_folder_as_it_is_learns_and_peft_reads_it(written: tuple[Any, Path], tmp_path: Path) -> None:
    """model.onnx, config.json and tokenizer.json in; PEFT, the merged model and ``generate`` say the same."""
    network, folder = written
    (folder / "chat_template.jinja").write_text(
        "<s>{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    chats = [{"prompt": "One?", "completion": "first"}, {"prompt": "Two?", "completion": "second"}]
    options = {"rank": 8, "epochs": 10, "learning_rate": 2e-2, "held_out": 0.0, "progress": False}
    tuned = gg.finetune(folder, chats * 2, tmp_path / "tuned", **options)
    assert tuned.history["loss"][-1] < 0.9 * tuned.history["loss"][0]
    read = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path / "tuned" / "adapter").eval()
    merged = scores(tmp_path / "tuned" / "model.onnx", IDS)
    np.testing.assert_allclose(of_torch(read, IDS), merged, atol=3e-5)
    assert np.abs(merged - of_torch(network, IDS)).max() > 0.1
    said = gg.chat.generate(tmp_path / "tuned", "One?", max_tokens=8)
    assert said == gg.chat.generate(folder, "One?", adapter=tmp_path / "tuned" / "adapter", max_tokens=8)


def test_layers_get_adapters_by_default(written: tuple[Any, Path]) -> None:
    """Also where they have other names than most."""
    decoder = ModelFolder.of(written[1]).decoder()
    adapted = gg.lora(decoder, adapted_layers(decoder, gg.chat.Recipe()), rank=2)
    trained = gg.build(surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1)).manifest.trainable
    linear = [m for m in written[0].modules() if type(m).__name__ in ("Linear", "Conv1D")]
    assert len(trained) == 2 * (len(linear) - 1)  # all but the head


def test_of_two_decoders_in_one_file_the_one_without_a_past_trains(tmp_path: Path) -> None:
    """T5: both branches, with what the encoder says."""
    import transformers

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    network = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=decoders.WORDS, **sizes, decoder_start_token_id=0)
    ).eval()
    out = by_optimum(network, "text2text-generation-with-past", tmp_path).parent
    states = np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)
    feeds = {"input_ids": IDS, "encoder_hidden_states": states, "encoder_attention_mask": np.ones((2, 5), np.int64)}
    alone = surgery.fix_inputs(out / "decoder_model_merged.onnx", {"use_cache_branch": False})
    model = surgery.language_model(gg.lora(alone, "*", rank=2))
    found = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu").predict(feeds)
    given = {"encoder_outputs": (torch.tensor(states),), "decoder_input_ids": torch.tensor(IDS)}
    np.testing.assert_allclose(found, network(**given).logits.detach().numpy(), atol=3e-6)
    with pytest.raises(BuildError, match="is computed from the encoder's states"):
        surgery.language_model(out / "decoder_with_past_model.onnx")
