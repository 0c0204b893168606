"""Models that onnxruntime-genai's builder writes here: a step computes what PyTorch does, and merged models generate.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import surgery

genai = pytest.importorskip("onnxruntime_genai", reason="in no extra; `make shipped-models` runs these tests with it")
torch = pytest.importorskip("torch", reason="the builder reads modules of PyTorch")
transformers = pytest.importorskip("transformers", reason="the builder reads files of transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0, "tie_word_embeddings": False, "vocab_size": 98}  # fmt: skip
FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SIZES, original_max_position_embeddings=128)
    ),
}
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps."
TOKENS = [1, *(ord(letter) - ord(" ") + 3 for letter in TEXT), 2]


def letters_as_tokens(folder: Path) -> None:
    """A tokenizer of one token for each printable character."""
    from tokenizers import Tokenizer, decoders, models

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(ord(" ") + i): 3 + i for i in range(95)}}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


@pytest.fixture(scope="module", params=[(f, p) for f in FAMILIES for p in ("int4", "fp16")], ids="-".join)
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """The precision, the network in PyTorch, and the folder that the builder has written."""
    family, precision = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{precision}")
    torch.manual_seed(0)
    network = FAMILIES[family]()
    network.save_pretrained(folder / "hf")
    letters_as_tokens(folder / "hf")
    words = ["-m", folder / "hf", "-i", folder / "hf", "-o", folder / "out", "-p", precision, "-e", "cpu"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return precision, network.float().eval(), folder / "out"


def test_scores_are_those_of_pytorch(written: tuple[str, Any, Path]) -> None:
    precision, network, folder = written
    ids = np.random.default_rng(0).integers(3, 98, (2, 17))
    wanted = network(torch.tensor(ids)).logits.detach().numpy()
    model = surgery.language_model(gg.lora(folder / "model.onnx", "*attn*", rank=2))
    found = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu").predict(ids)
    assert np.abs(found - wanted).max() < (1e-3 if precision == "fp16" else 0.2)  # four bits are few


def test_a_merged_model_writes_its_text(written: tuple[str, Any, Path], tmp_path: Path) -> None:
    precision, _, folder = written
    adapted = gg.lora(folder / "model.onnx", ["*attn*", "*mlp*", "*lm_head*"], rank=8)
    step = gg.build(surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1), gg.optim.adam(5e-3))
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit(surgery.next_tokens([TOKENS]), epochs=130, batch_size=1, progress=False)
    merged = surgery.forget_sizes(surgery.merge_adapters(adapted, trainer.state_dict()))
    for file in folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    onnx.save(merged, tmp_path / "model.onnx")
    assert in_a_plain_loop(tmp_path / "model.onnx") == TOKENS
    assert in_genai(tmp_path) == TOKENS, precision


def in_a_plain_loop(path: Path) -> list[int]:
    import onnxruntime as ort

    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from finetune_llm import written as generated

    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return list(generated(session, TOKENS[:2], len(TOKENS) + 3))


def in_genai(folder: Path) -> list[int]:
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(TOKENS) + 3, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(TOKENS[:2])
    tokens = list(TOKENS[:2])
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens
