"""C identifiers for names in the model, which may come from untrusted files."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TEXT = (
    "auto break case char const continue default do double else enum extern float for goto if inline int long register "
    "restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
    "alignas alignof bool constexpr false nullptr static_assert thread_local true typeof typeof_unqual "  # C23
    "and and_eq asm bitand bitor catch class compl concept const_cast consteval constinit co_await co_return co_yield "
    "decltype delete dynamic_cast explicit export friend mutable namespace new noexcept not not_eq operator or or_eq "
    "private protected public reinterpret_cast requires static_cast template this throw try typeid typename using "
    "virtual xor xor_eq "  # C++
    "linux unix "  # macros of GCC without -std=c99
    "errno stderr stdin stdout fault arena t i main printf"
)
_KEYWORDS = frozenset(_TEXT.split(" "))
_HEADERS = (
    "assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdalign stdarg stdatomic "
    "stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time uchar wchar wctype"
)
_FILES = frozenset(f"{_HEADERS} example".split(" "))  # of C, and of the exported folder
_TYPES = re.compile("u?int(_least|_fast)?[0-9]*|u?int(ptr|max)|s?size|ptrdiff|off|clock|l{0,2}div|max_align|fpos")  # _t
_OWN = re.compile(
    "(step|turn|loop|constant|window)_[0-9]+|mem[a-z]+|gather.*|scatter.*|max_.*|cumulative.*|cross_.*|put|place|"
    "(gemm|conv|conv_input|conv_weight|average_pool|average_pool_input)_rows(_stored)?|conv(_input)?_sums|weight_at|stored|"
    "(log_)?softmax|(next_)?position|checksum|"
    ".*_t|[A-Z0-9]+(_[A-Z0-9]+)+|"  # types; macros, such as TRAINER_OK and INT32_MAX
    "EOF|INFINITY|NAN|NULL|TILE|A[0-9]+|B[01]+|CHANGE|DEFAULT|HIGH|INPUT|LOW|OUTPUT|PI"  # the last of Arduino.h
)
LONGEST = 40


def identifiers(names: Iterable[str], reserved: Iterable[str] = ()) -> dict[str, str]:
    """Return a C identifier for each name, similar to the name, and not in ``reserved``.

    Identifiers are distinct in upper case, too, for macros.
    """
    found: dict[str, str] = {}
    taken = {name.lower() for name in reserved}
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


def is_prefix(text: str) -> bool:
    """Whether ``text`` can be the prefix of C names, and the name of a header: of none that C has."""
    taken = text in _KEYWORDS or text.lower() in _FILES or _TYPES.fullmatch(text) is not None
    return re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,30}", text) is not None and not taken
