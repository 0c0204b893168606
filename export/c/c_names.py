"""C identifiers for names in the model, which may come from untrusted files."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TEXT = (
    "auto break case char const continue default do double else enum extern float for goto if inline int long register "
    "restrict return short signed sizeof static struct switch typedef union unsigned void volatile while bool true "
    "false and or not xor class new delete this try catch throw template typename namespace private public protected "
    "virtual operator asm fault arena t i main printf NULL INFINITY NAN TILE"
)
_KEYWORDS = frozenset(_TEXT.split(" "))
_OWN = re.compile(
    "(step|turn|loop|constant|window)_[0-9]+|mem[a-z]+|gather.*|scatter.*|max_.*|cumulative.*|cross_.*|put|place|"
    "(gemm|conv|conv_input|conv_weight|average_pool|average_pool_input)_rows(_stored)?|conv(_input)?_sums|weight_at|stored|"
    "(log_)?softmax|(next_)?position|checksum|"
    "(u?int[0-9]*|size)_t|[A-Z0-9]+(_[A-Z0-9]+)+"  # types; macros, such as TRAINER_OK and INT32_MAX
)
LONGEST = 40


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return a C identifier for each name, similar to the name; distinct also in upper case, for macros."""
    found: dict[str, str] = {}
    taken = set[str]()
    for name in names:
        plain = re.sub("[^A-Za-z0-9]+", "_", name)[:LONGEST].strip("_")
        plain = f"v_{plain}" if not plain[:1].isalpha() or _is_used(plain) else plain
        own, count = plain, 1
        while own.lower() in taken:
            count += 1
            own = f"{plain}_{count}"
        taken.add(own.lower())
        found[name] = own
    return found


def _is_used(name: str) -> bool:
    """Whether ``name`` is reserved in C or used elsewhere in the generated code."""
    return name.lower() in _KEYWORDS or _OWN.fullmatch(name) is not None


def is_named(name: str, text: str) -> bool:
    """Whether the identifier ``name`` occurs in C source."""
    return re.search(rf"\b{name}\b", text) is not None


def is_identifier(text: str) -> bool:
    return re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,30}", text) is not None and text not in _KEYWORDS
