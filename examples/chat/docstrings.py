"""Write chats on functions of Python's standard library; answers are the first sentences of their docstrings.

python examples/chat/docstrings.py chat.jsonl [--count 200]
"""

import argparse
import importlib
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "ast base64 bisect calendar cmath collections copy csv datetime decimal difflib dis email.utils filecmp fnmatch "
    "fractions functools gc glob gzip hashlib heapq html inspect itertools json locale logging math operator os "
    "os.path pathlib platform pprint random re shlex shutil socket statistics string struct subprocess sys tempfile "
    "textwrap threading time tokenize types unicodedata urllib.parse urllib.request weakref zipfile zlib"
)


def sentences() -> Iterator[tuple[str, str]]:
    """Yield the name of each public function and the first sentence of its docstring."""
    for module in MODULES.split():
        for name, function in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or inspect.isclass(function) or not callable(function):
                continue
            paragraph = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
            sentence = paragraph.split(". ")[0].strip().rstrip(".")
            if 25 < len(sentence) < 120 and "->" not in sentence and not sentence.startswith(name):
                yield f"{module}.{name}", f"{sentence}."


def chats(count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return ``count`` chats with one question and one answer each, in random order."""
    found = list(sentences())
    random.Random(0).shuffle(found)
    question = "What does Python's {} do?".format
    return [
        {"messages": [{"role": "user", "content": question(name)}, {"role": "assistant", "content": sentence}]}
        for name, sentence in found[:count]
    ]


def main(out: Path, count: int = 200) -> None:
    out.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats(count)), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the .jsonl file")
    parser.add_argument("--count", type=int, default=200)
    asked = parser.parse_args()
    main(asked.out, asked.count)
