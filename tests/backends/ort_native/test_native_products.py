"""Matrix products by tiles: as exact as float32, whatever the shapes, orders and numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from gradgraph.backends.engine import for_machine
from gradgraph.backends.ort_native import ORT_NATIVE
from gradgraph.backends.ort_native import library as native
from gradgraph.runtime.execution.session import Placement, RuntimeOptions, create_session

pytestmark = pytest.mark.usefixtures("library")

CPU = Placement(("CPUExecutionProvider",))
HEAD = f'<ir_version: 10, opset_import: ["" : 21, "{native.DOMAIN}" : 1, "com.microsoft" : 1]>'


def opened(*inputs: np.ndarray, threads: int, turned: tuple[int, int], constant: str, **factors: float) -> Any:
    """One native node, of shapes that it sees when it runs; ``constant`` says which of its factors, a and b, are."""
    names = "abc"[: len(inputs)]
    types = ", ".join(
        f"float[{', '.join(f'{n}_{d}' for d in range(x.ndim))}] {n}"
        for n, x in zip(names, inputs, strict=True)
        if n not in constant
    )
    alpha, beta = factors.get("alpha", 1.0), factors.get("beta", 1.0)
    parts = f", parts = {factors['parts']}" if "parts" in factors else ""
    model = onnx.parser.parse_model(
        f"{HEAD} g ({types}) => (float[m, n] y) {{ y = {native.DOMAIN}.MatMul "
        f"<transA = {turned[0]}, transB = {turned[1]}, alpha = {alpha}, beta = {beta}{parts}> ({', '.join(names)}) }}"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(x, n) for n, x in zip(names, inputs, strict=True) if n in constant
    )
    return create_session(model, CPU, RuntimeOptions(native_kernels=True, threads=threads))


def product(
    *inputs: np.ndarray, threads: int = 2, turned: tuple[int, int] = (0, 0), constant: str = "", **factors: float
) -> np.ndarray:
    feeds = {n: x for n, x in zip("abc", inputs) if n not in constant}  # noqa: B905
    session = opened(*inputs, threads=threads, turned=turned, constant=constant, **factors)
    (first,), (second,) = session.run(None, feeds), session.run(None, feeds)
    np.testing.assert_array_equal(first, second)
    return first


def as_exact_as_float32(a: np.ndarray, b: np.ndarray, found: np.ndarray) -> None:
    """Within a few units of the last place of the sum of magnitudes, as onnxruntime's own are."""
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    magnitude = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    assert (np.abs(found - wanted) <= 3e-7 * magnitude + 1e-37).all()


LARGER = [(17, 33, 15), (5, 300, 31), (33, 7, 50), (100, 520, 70), (600, 40, 530)]
SIZES = [(1, 1, 1), (16, 32, 16), *LARGER, (3, 0, 4), (0, 5, 4), (4, 5, 0)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_products_are_as_exact_as_float32(size: tuple[int, int, int], turned: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    m, k, n = size
    a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((m, k), (k, n)))
    given = a.T.copy() if turned[0] else a, b.T.copy() if turned[1] else b
    one, two = product(*given, turned=turned, threads=1), product(*given, turned=turned)
    assert one.shape == (m, n)
    as_exact_as_float32(a, b, one)
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("size", [(49, 300, 31), (600, 40, 530), *SIZES[-3:]], ids=str)
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("constant", ["a", "b"])
def test_constant_factors_give_the_same_bits(
    size: tuple[int, int, int], turned: tuple[int, int], constant: str
) -> None:
    rng = np.random.default_rng(5)
    m, k, n = size
    a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((m, k), (k, n)))
    given = a.T.copy() if turned[0] else a, b.T.copy() if turned[1] else b
    bias = rng.normal(0, 1, n).astype(np.float32)
    wanted = product(*given, bias, turned=turned, alpha=0.5)
    for threads in (1, 2):
        found = product(*given, bias, threads=threads, turned=turned, constant=constant, alpha=0.5)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("left", "right", "constant"),
    [((7, 50, 30), (30, 20), "b"), ((7, 50, 30), (30, 20), "a"), ((50, 30), (7, 30, 20), "a"),
     ((2, 50, 30), (2, 30, 20), "b"), ((1, 50, 30), (3, 30, 20), "a")],
    ids=str,
)  # fmt: skip
def test_constant_factors_of_stacks(left: tuple[int, ...], right: tuple[int, ...], constant: str) -> None:
    rng = np.random.default_rng(6)
    a, b = (rng.normal(0, 1, s).astype(np.float32) for s in (left, right))
    found = product(a, b, constant=constant)
    np.testing.assert_array_equal(found, product(a, b))
    np.testing.assert_allclose(found, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


def test_few_rows_and_a_constant_are_as_exact_as_float32() -> None:
    rng = np.random.default_rng(7)
    for rows in (1, 2, 17, 48):
        a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((rows, 200), (200, 70)))
        as_exact_as_float32(a, b, product(a, b, constant="b"))


def test_threads_that_meet_at_the_first_call_wait_for_one_copy() -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((64, 512), (512, 384)))
    wanted = product(a, b)
    for _ in range(5):
        session = opened(a, b, threads=2, turned=(0, 0), constant="b")
        with ThreadPoolExecutor(8) as pool:
            for (found,) in pool.map(lambda _, s=session: s.run(None, {"a": a}), range(16)):
                np.testing.assert_array_equal(found, wanted)


def test_nodes_that_read_one_constant_in_several_ways() -> None:
    rng = np.random.default_rng(9)
    x, w = (rng.normal(0, 1, (64, 64)).astype(np.float32) for _ in range(2))
    node = f"{native.DOMAIN}.MatMul <transA = 0, transB = {{}}, alpha = 1.0, beta = 1.0>"
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[64, 64] x) => (float[64, 64] p, float[64, 64] q, float[64, 64] r, float[64, 64] s) {{"
        f"p = {node.format(0)} (x, w) q = {node.format(1)} (x, w) "
        f"r = {node.format(0)} (w, x) s = {node.format(0)} (p, w) }}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    p, q, r, s = create_session(model, CPU, RuntimeOptions(native_kernels=True, threads=2)).run(None, {"x": x})
    for found, (a, b) in zip((p, q, r, s), ((x, w), (x, w.T), (w, x), (p, w)), strict=True):
        as_exact_as_float32(a, b, found)


def errors(a: np.ndarray, b: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Of each number, in units of the magnitudes that are added up."""
    wanted, magnitude = (x.astype(np.float64) @ y.astype(np.float64) for x, y in ((a, b), (np.abs(a), np.abs(b))))
    return np.abs(found - wanted) / np.maximum(magnitude, 1e-300)


@pytest.mark.one_level  # lower levels have no tiles, and compute as with three parts
@pytest.mark.sweep(0.4)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("constant", ["", "a", "b"])
def test_two_parts_keep_their_bound(size: tuple[int, int, int], turned: tuple[int, int], constant: str) -> None:
    rng = np.random.default_rng(0)
    m, k, n = size
    a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((m, k), (k, n)))
    given = a.T.copy() if turned[0] else a, b.T.copy() if turned[1] else b
    one, two, four = (product(*given, turned=turned, threads=t, constant=constant, parts=2) for t in (1, 2, 4))
    assert errors(a, b, one).max(initial=0.0) <= 2.0**-15
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, four)


@pytest.mark.parametrize("spread", ["normal", "one sign", "all magnitudes", "worst"])
def test_two_parts_are_less_exact_than_three(library: native.Library, spread: str) -> None:
    """Both kinds in one process, of fed and of constant factors: each node has its own."""
    if not library.has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, (100, 520)), rng.normal(0, 1, (520, 70))
    if spread == "one sign":
        a, b = np.abs(a), np.abs(b)
    elif spread == "all magnitudes":
        a, b = a * 10.0 ** rng.integers(-12, 12, a.shape), b * 10.0 ** rng.integers(-12, 12, b.shape)
    elif spread == "worst":  # both parts are rounded as far as they can be, and what is left out is largest
        a, b = (np.full(x.shape, 1 + 2.0**-8 - 2.0**-17 - 2.0**-23) for x in (a, b))
    a, b = a.astype(np.float32), b.astype(np.float32)
    for constant in ("", "a", "b"):
        two, three = (errors(a, b, product(a, b, constant=constant, parts=parts)).max() for parts in (2, 3))
        assert three <= 3e-7 and 2.0**-20 < two <= 2.0**-15
        assert spread != "worst" or two > 0.95 * 2.0**-15
    np.testing.assert_array_equal(product(a, b), product(a, b, parts=3))


def test_other_numbers_of_parts_are_refused() -> None:
    with pytest.raises(Exception, match="MatMul: its parts should be 2 or 3"):
        product(np.ones((4, 5), np.float32), np.ones((5, 4), np.float32), parts=1)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 13, 48, 49])
@pytest.mark.parametrize(("terms", "columns"), [(1, 3), (30, 16), (193, 47), (400, 48), (192, 131), (20, 1029)])
def test_few_rows_meet_a_matrix_as_it_lies(rows: int, terms: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((rows, terms), (terms, columns)))
    one, two = product(a, b, threads=1), product(a, b)
    as_exact_as_float32(a, b, one)
    np.testing.assert_array_equal(one, two)
    bias = rng.normal(0, 1, columns).astype(np.float32)
    wanted = 0.5 * (a.astype(np.float64) @ b) - 2.0 * bias
    np.testing.assert_allclose(product(a, b, bias, alpha=0.5, beta=-2.0), wanted, rtol=1e-5, atol=1e-4)


def test_numbers_of_all_magnitudes_and_sums_of_one_sign() -> None:
    rng = np.random.default_rng(1)
    scale = 10.0 ** rng.integers(-15, 15, (40, 90))
    a = (scale * rng.uniform(1, 2, scale.shape)).astype(np.float32)
    b = (10.0 ** rng.integers(-15, 15, (90, 40)) * rng.uniform(1, 2, (90, 40))).astype(np.float32)
    as_exact_as_float32(a, b, product(a, b))


@pytest.mark.parametrize("terms", [128, 2_000, 20_000])
def test_long_sums_of_one_sign_are_as_exact_as_those_of_onnxruntime(terms: int) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.uniform(0, 1, (terms, 48)).astype(np.float32) for _ in range(2))
    wanted = a.T.astype(np.float64) @ b
    model = onnx.parser.parse_model(
        f"{HEAD} g (float[k, 48] a, float[k, 48] b) => (float[48, 48] y) {{ y = Gemm <transA = 1> (a, b) }}"
    )
    (theirs,) = create_session(model, CPU, RuntimeOptions(threads=2)).run(None, {"a": a, "b": b})
    assert np.abs(product(a, b, turned=(1, 0)) - wanted).mean() <= 1.5 * np.abs(theirs - wanted).mean()


SPECIAL = [np.inf, -np.inf, np.nan, 3.4e38, -3.39e38]


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.one_level), 3])
@pytest.mark.parametrize("number", SPECIAL)
@pytest.mark.parametrize("where", [0, 1])
def test_numbers_without_parts_are_multiplied_one_by_one(number: float, where: int, parts: int) -> None:
    rng = np.random.default_rng(2)
    factors = [rng.normal(0, 0.1, s).astype(np.float32) for s in ((40, 70), (70, 50))]
    factors[where][3, 5] = number
    with np.errstate(all="ignore"):
        wanted = (factors[0].astype(np.float64) @ factors[1].astype(np.float64)).astype(np.float32)
        for constant in ("", "a", "b"):
            np.testing.assert_allclose(product(*factors, constant=constant, parts=parts), wanted, rtol=1e-4, atol=1e-5)
        stacks = [np.stack([f] * 6) for f in factors]
        found = product(*stacks, parts=parts)
        np.testing.assert_allclose(found, np.stack([wanted] * 6), rtol=1e-4, atol=1e-5)


def test_subnormal_numbers_count_as_zero_at_most() -> None:
    tiny = np.full((8, 8), 1e-40, np.float32)
    assert (np.abs(product(tiny, np.full((8, 8), 1e30, np.float32))) <= 8.1e-10).all()


def test_a_summand_for_each_row_of_a_stack() -> None:
    rng = np.random.default_rng(10)
    a, b, each, column = (rng.normal(0, 1, s).astype(np.float32) for s in ((3, 20, 9), (9, 7), (3, 20, 7), (3, 20, 1)))
    for c in (each, column):
        np.testing.assert_allclose(product(a, b, c), a @ b + c, rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match="MatMul: its summand does not fit its result"):
        product(a, b, each[0])  # one for all matrices


def test_factors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Exception, match="MatMul: the inner sizes of its factors differ"):
        product(np.ones((4, 5), np.float32), np.ones((6, 4), np.float32))
    with pytest.raises(Exception, match="MatMul: its summand does not fit its result"):
        product(np.ones((4, 5), np.float32), np.ones((5, 4), np.float32), np.ones((3, 4), np.float32))
    with pytest.raises(Exception, match="MatMul: the leading axes of its factors differ"):
        product(np.ones((2, 4, 5), np.float32), np.ones((3, 5, 4), np.float32))


LARGE = """ g (float[256, 128] x, float[256, 128] w) => (float[256, 256] y) {
    t = Transpose <perm = [1, 0]> (w)
    y = MatMul (x, t)
}"""


def lowered(text: str, **dims: int) -> list[tuple[str, str]]:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text))
    return [(n.domain, n.op_type) for n in for_machine(model, ORT_NATIVE, dims).graph.node]


def test_large_products_are_written_and_read_factors_as_they_lie(library: native.Library) -> None:
    if not library.has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")
    assert lowered(LARGE) == [(native.DOMAIN, "MatMul")]
    assert lowered(
        LARGE.replace("x, f", "z, f").replace("(x,", "(z,").replace("[256, 128] z", "[n, 128] z"), n=512
    ) == [(native.DOMAIN, "MatMul")]


TURNED = {  # a layer's input and the gradient of its output, the weight beside them
    "Gemm": "y = Gemm <transA = 1> (x, d)",
    "update": "y = Gemm <transA = 1, alpha = -0.5> (x, d, w)",
    "FusedMatMul": "y = com.microsoft.FusedMatMul <transA = 1> (x, d)",
    "MatMul": "t = Transpose <perm = [1, 0]> (x) y = MatMul (t, d)",
}


def turned(text: str, terms: int = 1024) -> list[tuple[str, str]]:
    types = f"float[{terms}, 768] x, float[{terms}, 768] d, float[768, 768] w"
    return lowered(f" g ({types}) => (float[768, 768] y) {{ {text} }}")


@pytest.mark.parametrize("name", TURNED)
def test_gradients_of_large_weights_are_written(library: native.Library, name: str) -> None:
    """With tiles, all large products are; with AVX2, those whose left factor onnxruntime turns again and again."""
    if not (library.has_tiles or library.has_fast_vectors):
        assert native.DOMAIN not in dict(turned(TURNED[name]))
        return
    assert turned(TURNED[name]) == [(native.DOMAIN, "MatMul")]
    if not library.has_tiles:
        assert native.DOMAIN not in dict(turned(TURNED[name], terms=256))
        straight = " g (float[1024, 768] x, float[768, 768] w) => (float[1024, 768] y) { y = MatMul (x, w) }"
        assert lowered(straight) == [("", "MatMul")]


@pytest.mark.parametrize("flips", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_products_of_several_blocks(flips: tuple[int, int]) -> None:
    """Of terms, of columns, and of neither in whole panels; a summand is added once."""
    rng = np.random.default_rng(4)
    a, b, c = (rng.normal(0, 1, s).astype(np.float32) for s in ((21, 597), (597, 1603), (1603,)))
    given = a.T.copy() if flips[0] else a, b.T.copy() if flips[1] else b
    as_exact_as_float32(a, b, product(*given, turned=flips))
    wanted = 0.5 * (a.astype(np.float64) @ b) - 2.0 * c
    one, two = (product(*given, c, turned=flips, threads=t, alpha=0.5, beta=-2.0) for t in (1, 2))
    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(one, two)


def test_a_bias_is_added_as_the_product_is_written(library: native.Library) -> None:
    if not library.has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")
    biased = """ g (float[2, 256, 128] x, float[128, 256] w, float[256] b) => (float[2, 256, 256] y) {
        t = MatMul (x, w)
        y = Add (b, t)
    }"""
    assert lowered(biased) == [(native.DOMAIN, "MatMul")]
    shared = biased.replace("=> (float[2, 256, 256] y)", "=> (float[2, 256, 256] y, float[2, 256, 256] t)")
    assert lowered(shared) == [(native.DOMAIN, "MatMul"), ("", "Add")]


def test_small_and_open_products_stay_with_onnxruntime() -> None:
    assert ("", "MatMul") in lowered(LARGE.replace("256", "16"))
    assert ("", "MatMul") in lowered(LARGE.replace("[256, 128] x", "[n, 128] x").replace("[256, 256]", "[n, 256]"))


@pytest.mark.parametrize(("rows", "domain"), [(1, ""), (2, native.DOMAIN), (48, native.DOMAIN), (49, "")])
def test_few_rows_and_a_weight_that_is_fed_are_written(library: native.Library, rows: int, domain: str) -> None:
    if not library.has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")
    text = f" g (float[{rows}, 256] x, float[256, 256] w) => (float[{rows}, 256] y) {{ y = MatMul (x, w) }}"
    assert lowered(text) == [(domain, "MatMul")]


@pytest.mark.parametrize(("rows", "domain"), [(63, ""), (64, native.DOMAIN)])
@pytest.mark.parametrize("text", ["y = MatMul (x, w)", "t = Transpose <perm = [1, 0]> (w) y = MatMul (x, t)"])
def test_few_rows_and_a_weight_in_the_model_stay_with_onnxruntime(
    library: native.Library, rows: int, domain: str, text: str
) -> None:
    if not library.has_tiles:
        pytest.skip("this processor has no tiles (AMX with bfloat16)")
    model = onnx.parser.parse_model(f"{HEAD} g (float[{rows}, 512] x) => (float[{rows}, 512] y) {{ {text} }}")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((512, 512), np.float32), "w"))
    found = for_machine(onnx.shape_inference.infer_shapes(model), ORT_NATIVE).graph.node
    assert [n.domain for n in found if n.op_type == "MatMul"] == [domain]


def test_a_processor_without_tiles_keeps_the_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.Library, "has_tiles", False)
    assert ("", "MatMul") in lowered(LARGE)
