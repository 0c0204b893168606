"""The generated files: header, source, an example, a README and files for build systems."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np

from gradgraph.errors import escaped_json
from gradgraph.export.c.c_functions import Function, Unit, input_key, result_key
from gradgraph.export.c.c_names import identifiers, is_named
from gradgraph.export.c.c_plan import ALIGNMENT, aligned
from gradgraph.export.c.c_text import at, elements, kernel_text
from gradgraph.export.c.operators import literal
from gradgraph.export.c.program import Tensor

HEADER_BYTES = 12
COPY, FILL, ZERO = range(3)  # how trainer_init sets a state tensor


def way_to_set(value: np.ndarray) -> int:
    """Return how to set a state tensor to its first value: COPY a constant array, FILL it with a number, or ZERO."""
    if not value.any():
        return ZERO
    return FILL if (value == value.ravel()[0]).all() else COPY


def files(unit: Unit) -> dict[str, bytes]:
    """Return the contents of the generated files by name."""
    writer = _Writer(unit)
    source = writer.source()  # first: it registers the constants whose sizes the other files state
    contents = {
        f"{unit.name}.h": writer.header(),
        f"{unit.name}.c": source,
        "example.c": writer.example(),
        "README.md": writer.readme(),
        "CMakeLists.txt": writer.cmake(),
        "library.properties": writer.properties(),
        "manifest.json": writer.manifest(),
    }
    state = {"state.bin": writer.saved()} if unit.state else {}
    return {**{name: text.encode() for name, text in contents.items()}, **state}


class _Writer:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.name, self.upper = unit.name, unit.name.upper()
        self.fields = identifiers(unit.state)

    # --- signatures ---------------------------------------------------------------------------------------

    @property
    def handle(self) -> str:
        return f"{self.name}_t *t"

    def signature(self, f: Function) -> str:
        c = self.unit.c_names
        arguments = [self.handle]
        for name, tensor in f.inputs.items():
            own = c[input_key(name)]
            arguments.append(f"{tensor.c_type} {own}" if not tensor.shape else f"const {tensor.c_type} *{own}")
        arguments += [f"{tensor.c_type} *{c[result_key(name)]}" for name, tensor in f.results.items()]
        return f"int {self.name}_{f.suffix}({', '.join(arguments)})"

    def header(self) -> str:
        unit, guard = self.unit, f"{self.upper}_H"
        lines = [
            f"/* {self.name}: written by gradgraph. Every array is row-major. */",
            f"#ifndef {guard}",
            f"#define {guard}",
            "",
            "#include <stdint.h>",
            "",
            "#ifdef __cplusplus",
            'extern "C" {',
            "#endif",
            "",
            f"#define {self.upper}_OK 0",
            f"#define {self.upper}_BAD_INDEX 1 /* a class label or an index is out of range */",
            f"#define {self.upper}_BAD_STATE 2 /* saved bytes are damaged, or belong to another program */",
            "",
        ]
        known: set[str] = set()
        for f in unit.functions:
            c = self.unit.c_names
            outputs = ((result_key(n), t) for n, t in f.declared.items())
            for key, tensor in [*((input_key(n), t) for n, t in f.inputs.items()), *outputs]:
                macro = f"{self.upper}_{c[key].upper()}_SIZE"
                if tensor.shape and macro not in known:
                    known.add(macro)
                    lines.append(f"#define {macro} {tensor.size} /* [{', '.join(map(str, tensor.shape))}] */")
        lines += [
            f"#define {self.upper}_ARENA_BYTES {unit.arena}",
            f"#define {self.upper}_STATE_BYTES {unit.state_bytes}",
        ]
        if unit.state:
            lines.append(f"#define {self.upper}_SAVED_BYTES {unit.state_bytes + HEADER_BYTES}")
        lines += ["", "/* Weights and all other state, then working memory. Do not put it on a small stack. */"]
        lines += ["typedef struct {"]
        for name, tensor in self.unit.state.items():
            comment = "".join(ch if ch.isascii() and (ch.isalnum() or ch in "._-") else "_" for ch in name[:80])
            lines.append(f"    {tensor.c_type} {self.fields[name]}[{tensor.length}]; /* {comment} */")
        lines += [f"    int64_t arena[{max(-(-unit.arena // ALIGNMENT), 1)}];", f"}} {self.name}_t;", ""]
        lines += [f"/* Sets the state to its first values. */\nvoid {self.name}_init({self.handle});", ""]
        for f in unit.functions:
            results = " Results may be NULL." if f.results else ""
            lines += [f"/* {f.about}{results}\n   Returns {self.upper}_OK or {self.upper}_BAD_INDEX. */"]
            lines += [self.signature(f) + ";", ""]
        if unit.state:
            lines += [
                f"/* Writes the state to {self.upper}_SAVED_BYTES bytes, with a checksum. */",
                f"void {self.name}_save(const {self.name}_t *t, unsigned char *bytes);",
                "",
                f"/* Reads the state from these bytes. Returns {self.upper}_OK,",
                f"   or {self.upper}_BAD_STATE without a change. */",
                f"int {self.name}_load({self.handle}, const unsigned char *bytes);",
                "",
            ]
        lines += ["#ifdef __cplusplus", "}", "#endif", "", "#endif", ""]
        return "\n".join(lines)

    # --- source -------------------------------------------------------------------------------------------

    def source(self) -> str:
        text = self.unit.text
        bodies = [(f, self._body(f)) for f in self.unit.functions]
        written = [(f, make()) for f, make in bodies]
        shared = set(text.arrays)  # all others are for trainer_init alone
        first = self._init()
        functions = text.functions()
        kernels = kernel_text(text.kernels)
        lines = [
            f"/* {self.name}: written by gradgraph. It needs C99, math.h and string.h. */",
            f'#include "{self.name}.h"',
            "",
            "#include <math.h>",
            "#include <stddef.h>",
            "#include <string.h>",
            "",
            "#ifndef TILE /* elements of a row computed at once; 16 or 32 may be faster on large processors */",
            "#ifdef __OPTIMIZE_SIZE__",
            "#define TILE 1",
            "#else",
            "#define TILE 8",
            "#endif",
            "#endif",
            "",
            *text.parameters(),
            "",
        ]
        arrays = {
            name: f"static const {tensor.c_type} {name}[{tensor.length}] = {{{elements(tensor) or '0'}}};"
            for name, tensor in text.arrays.items()
        }
        lines += [line for name, line in arrays.items() if name in shared]
        lines += self._weights([line for name, line in arrays.items() if name not in shared])
        lines += ["", kernels, "", *functions]
        lines += first
        for f, body in written:
            lines += self._function(f, body)
        if self.unit.state:
            lines += self._saving()
        return "\n".join(lines) + "\n"

    def _body(self, f: Function) -> Callable[[], list[str]]:
        c = self.unit.c_names
        plan = f.plan
        states = {t: self.fields[n] for n, t in self.unit.state.items()}
        arguments = {t: c[input_key(n)] for n, t in f.inputs.items()}

        def address(tensor: Tensor) -> str:
            tensor = plan.direct.get(tensor, tensor)
            if tensor in states:
                return f"t->{states[tensor]}"
            if tensor in arguments:
                return arguments[tensor] if tensor.shape else f"&{arguments[tensor]}"
            if tensor.data is not None:
                return self.unit.text.constant(tensor)
            return at(tensor, f"arena + {plan.offsets[tensor]}" if plan.offsets[tensor] else "arena")

        make = self.unit.text.program(plan, address, stop=f"if (fault) return {self.upper}_BAD_INDEX;")
        results = []
        for name, tensor in f.results.items():
            to = c[result_key(name)]
            results.append(f"    if ({to}) memcpy({to}, {address(tensor)}, {tensor.nbytes});")
        return lambda: [*self._label_checks(f), *make(), *results]

    def _label_checks(self, f: Function) -> Iterator[str]:
        """Yield code that returns BAD_INDEX for invalid class labels: ONNX counts negative indices from the end."""
        for name in [n for n in f.inputs if n in self.unit.labels]:
            spec, own = self.unit.labels[name], self.unit.c_names[input_key(name)]
            label = f"{own}[i]" if f.inputs[name].shape else own
            ignored = "" if spec.ignore_index is None else f" && {label} != {spec.ignore_index}"
            yield f"    for (int i = 0; i < {f.inputs[name].size}; i++)"
            yield f"        if (({label} < 0 || {label} >= {spec.classes}){ignored}) return {self.upper}_BAD_INDEX;"

    def _function(self, f: Function, body: list[str]) -> list[str]:
        whole = "\n".join(body)
        lines = [self.signature(f) + " {"]
        if is_named("arena", whole):
            lines.append("    unsigned char *const arena = (unsigned char *)t->arena;")
        elif "t->" not in whole:
            lines.append("    (void)t;")
        if is_named("fault", whole):
            lines.append("    int fault = 0;")
        lines += body
        c = self.unit.c_names
        unread = [own for own in (c[input_key(n)] for n in f.inputs) if not is_named(own, whole)]
        lines += [f"    (void){name};" for name in unread]
        return [*lines, f"    return {self.upper}_OK;", "}", ""]

    def _init(self) -> list[str]:
        lines, copied = [f"void {self.name}_init({self.handle}) {{", "    memset(t, 0, sizeof *t);"], []
        unit = self.unit

        def key(name: str) -> tuple[int, str, str]:
            return way_to_set(unit.initial[name]), unit.state[name].dtype, unit.kinds[name]

        for (way, dtype, _), group in groupby(unit.state, key):
            names = list(group)
            if way == FILL:
                for name in names:
                    value = literal(unit.initial[name].ravel()[0], dtype)
                    loop = f"    for (int i = 0; i < {unit.state[name].size}; i++)"
                    lines.append(f"{loop} t->{self.fields[name]}[i] = {value};")
            elif way == COPY:  # all that follow one another in trainer_t at once
                values = np.concatenate([unit.initial[n].ravel() for n in names])
                constant = unit.text.constant(Tensor(values.shape, dtype, names[0], "constant", values))
                to = f"(unsigned char *)t + offsetof({self.name}_t, {self.fields[names[0]]})"
                copied.append(f"    memcpy({to}, {constant}, {values.nbytes});")
        return [*lines, *self._weights(copied), "}", ""]

    def _weights(self, lines: list[str]) -> list[str]:
        """Return lines that a program without its first weights leaves out."""
        return [f"#ifndef {self.upper}_NO_WEIGHTS", *lines, "#endif"] if lines else []

    @property
    def _layout(self) -> int:
        """A checksum of names, types and shapes of the state, which saved bytes begin with."""
        return zlib.crc32(";".join(f"{n}:{t.dtype}:{t.shape}" for n, t in self.unit.state.items()).encode())

    def saved(self) -> bytes:
        """Return the first state as ``trainer_save`` writes it."""
        values = b"".join(
            np.resize(self.unit.initial[n].astype(t.dtype), t.length).tobytes() for n, t in self.unit.state.items()
        )
        return struct.pack("<III", 0x31544747, self._layout, zlib.crc32(values)) + values

    def _saving(self) -> list[str]:
        name, upper = self.name, self.upper
        return f"""/* the state comes first in {name}_t, without gaps, as in the saved bytes */
typedef char state_has_no_gaps[offsetof({name}_t, arena) < {upper}_STATE_BYTES + {ALIGNMENT} ? 1 : -1];

static uint32_t checksum(const unsigned char *bytes, size_t count) {{ /* CRC-32 */
    uint32_t sum = 0xFFFFFFFFu;
    while (count--) {{
        sum ^= *bytes++;
        for (int bit = 0; bit < 8; bit++) sum = (sum >> 1) ^ (0xEDB88320u & (0u - (sum & 1u)));
    }}
    return ~sum;
}}

static void put(unsigned char *to, uint32_t number) {{
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(number >> (8 * i));
}}

void {name}_save(const {name}_t *t, unsigned char *bytes) {{
    memcpy(bytes + {HEADER_BYTES}, t, {upper}_STATE_BYTES);
    put(bytes, 0x31544747u); /* GGT1 */
    put(bytes + 4, 0x{self._layout:08X}u);
    put(bytes + 8, checksum(bytes + {HEADER_BYTES}, {upper}_STATE_BYTES));
}}

int {name}_load({name}_t *t, const unsigned char *bytes) {{
    unsigned char head[{HEADER_BYTES}];
    put(head, 0x31544747u);
    put(head + 4, 0x{self._layout:08X}u);
    put(head + 8, checksum(bytes + {HEADER_BYTES}, {upper}_STATE_BYTES));
    if (memcmp(head, bytes, {HEADER_BYTES})) return {upper}_BAD_STATE;
    memcpy(t, bytes + {HEADER_BYTES}, {upper}_STATE_BYTES);
    return {upper}_OK;
}}
""".split("\n")

    # --- other files --------------------------------------------------------------------------------------

    def example(self) -> str:
        f = self.unit.functions[0]
        c = self.unit.c_names
        declared, passed = [], []
        for name, tensor in f.inputs.items():
            own = c[input_key(name)]
            if tensor.shape:
                declared.append(f"    static {tensor.c_type} {own}[{self.upper}_{own.upper()}_SIZE];")
                passed.append(own)
            else:
                passed.append("1" if np.dtype(tensor.dtype).kind in "iub" else "0.01f")
        for name, tensor in f.results.items():
            own = c[result_key(name)]
            declared.append(f"    static {tensor.c_type} {own}[{max(tensor.size, 1)}];")
            passed.append(own)
        shown = next((c[result_key(n)] for n, t in f.results.items() if t.dtype == "float32"), None)
        report = f'        printf("%d %g\\n", i, (double){shown}[0]);\n' if shown else ""
        return f"""/* Calls {self.name}_{f.suffix} ten times with zeros in place of data. */
#include "{self.name}.h"

#include <stdio.h>

static {self.name}_t t;

int main(void) {{
{chr(10).join(declared)}
    {self.name}_init(&t);
    for (int i = 0; i < 10; i++) {{
        if ({self.name}_{f.suffix}({", ".join(["&t", *passed])}) != {self.upper}_OK) return 1;
{report}    }}
    return 0;
}}
"""

    def readme(self) -> str:
        unit = self.unit
        flash = sum(t.nbytes for t in unit.text.arrays.values())
        kinds: dict[str, int] = {}
        for name, tensor in unit.state.items():
            kind = unit.kinds.get(name, "state")
            kinds[kind] = kinds.get(kind, 0) + tensor.nbytes
        rows = [f"| {_KINDS.get(kind, kind)} | {size:,} |" for kind, size in kinds.items()]
        rows += [f"| working memory of `{self.name}_{f.suffix}` | {f.plan.arena:,} |" for f in unit.functions]
        largest = max(unit.functions, key=lambda f: f.plan.arena)
        node, alive = largest.plan.peak
        peak = [f"| {_plain(t.name)} | {list(t.shape)} | {t.nbytes:,} |" for t in alive[:8]]
        work = ", ".join(f"{f.plan.multiply_adds:,} in `{self.name}_{f.suffix}`" for f in unit.functions)
        ram = unit.state_bytes + unit.arena
        inputs = sum(t.nbytes for t in unit.functions[0].inputs.values() if t.shape)
        saved = f"""
## Save the state

`{self.name}_save` writes {self.upper}_SAVED_BYTES bytes with a checksum; `{self.name}_load` checks them before it
changes anything. To survive a power cut, keep two slots in flash and write them in turn: after a restart, load the
newer slot, and the other one if that returns `{self.upper}_BAD_STATE`. Numbers are stored in the byte order of the
processor.
""" if unit.state else ""  # fmt: skip
        without = f"""- `-D{self.upper}_NO_WEIGHTS` leaves out the first weights. The program then has to
  load them from `state.bin` by `{self.name}_load`.
""" if unit.state else ""  # fmt: skip
        return f"""# {self.name}

C99 code without a runtime: `{self.name}.h` and `{self.name}.c`. It allocates no memory, calls nothing but `math.h` and
`string.h`, and keeps everything in one `{self.name}_t`, so that a program can have several.

## Memory

Working memory is shared by all functions: {unit.arena:,} bytes. A `{self.name}_t` needs {ram:,} bytes of RAM, the
arguments of `{self.name}_{unit.functions[0].suffix}` {inputs:,} more. Constant arrays (first weights and
frozen weights) need {flash:,} bytes of flash; the code is not included.

| part | bytes |
|---|---|
{chr(10).join(rows)}

Working memory is fullest in `{self.name}_{largest.suffix}` at `{node or "-"}`, with these tensors:

| tensor | shape | bytes |
|---|---|---|
{chr(10).join(peak) or "| - | | 0 |"}

## Work

Multiply-adds of products and convolutions, padding included: {work}.

## Build

- Desktop: `cc -std=c99 -O3 -march=native {self.name}.c example.c -lm -o example`, or
  `cmake -B build && cmake --build build`.
- Arduino: copy this folder to `libraries/{self.name}` without `example.c`, and include `{self.name}.h`.
- Zephyr, ESP-IDF: add `{self.name}.c` to the sources of your application.
- On a processor with floating-point hardware, enable it: `-mcpu=cortex-m4 -mfpu=fpv4-sp-d16 -mfloat-abi=hard -Os`.
- For the smallest program: `-Os -ffunction-sections -fdata-sections -Wl,--gc-sections`. The linker then drops the
  functions that nothing calls. `-DTILE=8` makes products faster and larger.
- WebAssembly, by Clang of Zig (`pip install ziglang`) or of wasi-sdk:

    {self.wasm_command()}

  The module imports nothing. `manifest.json` lists the arguments of its functions, and the size of a `{self.name}_t`,
  for which there is room from `__heap_base` on, once the memory has grown.
{without}{saved}"""

    def wasm_command(self) -> str:
        """Return the command that compiles the functions to a WebAssembly module without imports."""
        own = ["init", *(f.suffix for f in self.unit.functions), *(("save", "load") if self.unit.state else ())]
        exports = ",".join(f"--export={e}" for e in [*(f"{self.name}_{o}" for o in own), "__heap_base"])
        flags = "-target wasm32-wasi -mexec-model=reactor -std=c99 -Os -DTILE=8 -s"
        return f"python -m ziglang cc {flags} {self.name}.c -o {self.name}.wasm -Wl,{exports}"

    def cmake(self) -> str:
        return f"""cmake_minimum_required(VERSION 3.10)
project({self.name} C)
set(CMAKE_C_STANDARD 99)
add_library({self.name} STATIC {self.name}.c)
target_include_directories({self.name} PUBLIC ${{CMAKE_CURRENT_SOURCE_DIR}})
if(NOT MSVC)
  target_link_libraries({self.name} PUBLIC m)
endif()
add_executable(example example.c)
target_link_libraries(example {self.name})
"""

    def manifest(self) -> str:
        """Return memory sizes, the byte layout of a saved state, and the arguments of the functions, as JSON."""
        state, at = [], HEADER_BYTES
        for name, tensor in self.unit.state.items():
            state.append({**_described(name, tensor), "c_name": self.fields[name], "saved_at": at})
            at += tensor.length * np.dtype(tensor.dtype).itemsize
        functions = {
            f.suffix: {
                "inputs": [_described(n, t) for n, t in f.inputs.items()],
                "results": [_described(n, t) for n, t in f.declared.items()],
            }
            for f in self.unit.functions
        }
        facts = {
            "c": self.name,
            "bytes": aligned(self.unit.state_bytes) + aligned(max(self.unit.arena, 1)),
            "arena": self.unit.arena,
            "state_bytes": self.unit.state_bytes,
            "state": state,
            "functions": functions,
        }
        return escaped_json(json.dumps(facts, indent=1, ensure_ascii=False))

    def properties(self) -> str:
        return f"""name={self.name}
version=1.0.0
author=gradgraph
maintainer=gradgraph
sentence=A training step in C
paragraph=Generated by gradgraph export --c
category=Data Processing
url=
architectures=*
includes={self.name}.h
"""


def _described(name: str, tensor: Tensor) -> dict[str, object]:
    return {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}


_KINDS = {
    "parameter": "weights that are trained",
    "statistic": "running statistics",
    "optimizer": "optimizer state",
    "counter": "counters",
    "average": "averages of weights",
}


def _plain(name: str) -> str:
    return "".join(ch if ch.isascii() and (ch.isalnum() or ch in "._-/ ") else "_" for ch in name[:80]) or "-"
