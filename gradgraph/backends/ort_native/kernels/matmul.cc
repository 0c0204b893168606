// Matrix products of float32 with tiles (see amx.h), and without tiles as in products.h.
//
// Four tiles accumulate a block of 32 x 32 of the result. Two panels of A at a time are packed into the first-level
// cache, and multiplied by all panels of B that fit into the second-level cache. A constant factor is packed once.

#include <atomic>

#include "constant.h"
#include "few_rows.h"
#include "kernels.h"
#include "panels.h"
#include "pieces.h"
#include "products.h"

namespace gradgraph {
namespace {

using namespace amx;

// alpha·A·B + beta·C, where C is read with strides (0 if it has a single row or column)
struct Product {
  Factor a, b;
  float alpha, beta;
  const float* c;
  size_t c_row, c_column;
  float* out;
  size_t parts;  // parts per number
  size_t rows() const { return a.lines; }
  size_t columns() const { return b.lines; }
  float finished(float sum, size_t row, size_t column) const {
    const float scaled = alpha * sum;
    return c == nullptr ? scaled : scaled + beta * c[row * c_row + column * c_column];
  }
};

// Computes one number after the other, where tiles cannot be used. A chain of additions is as fast in double, and more
// accurate.
void plain(const Product& p, size_t begin, size_t end) {
  for (size_t row = begin; row < end; ++row) {
    for (size_t column = 0; column < p.columns(); ++column) {
      const float* a = p.a.data + row * p.a.line_stride;
      const float* b = p.b.data + column * p.b.line_stride;
      double sum = 0;
      for (size_t k = 0; k < p.a.terms; ++k) {
        sum += static_cast<double>(a[k * p.a.term_stride]) * b[k * p.b.term_stride];
      }
      p.out[row * p.columns() + column] = p.finished(static_cast<float>(sum), row, column);
    }
  }
}

#if GRADGRAPH_TILES

constexpr size_t kWide = 32;  // panels of B at a time that fit into the second-level cache,
constexpr size_t kTall = 32;  // together with the sums for this many panels of A

constexpr int kRow = 64;  // bytes per row of a packed tile

// A·B of up to two panels each, over `steps` steps, into tiles 0 to 3; 4 and 5 contain A's tiles, 6 and 7 B's.
template <size_t kParts, bool kTwoA, bool kTwoB>
void multiply_panels(const Panels& a, const Panels& b, size_t steps) {
  const auto load_a = [&](size_t step, size_t part) {
    const uint16_t* tile = a.first + step * kStep<kParts> + part * kTile;
    _tile_loadd(4, tile, kRow);
    if constexpr (kTwoA) _tile_loadd(5, tile + a.apart, kRow);
  };
  const auto load_b = [&](size_t step, size_t part) {
    const uint16_t* tile = b.first + step * kStep<kParts> + part * kTile;
    _tile_loadd(6, tile, kRow);
    if constexpr (kTwoB) _tile_loadd(7, tile + b.apart, kRow);
  };
  const auto multiply = [](size_t, size_t) {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoB) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoA) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTwoA && kTwoB) _tile_dpbf16ps(3, 5, 7);
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  multiply_steps<kParts>(steps, load_a, load_b, multiply);
}

using Block = float[4][kSide * kSide];  // sums of 32 x 32, tile by tile

// sums = A·B, or += unless `fresh`: sums of sums of a few steps are more accurate than long sums.
template <size_t kParts, bool kTwoA, bool kTwoB>
void add_up(const Panels& a, const Panels& b, size_t steps, bool fresh, Block& sums) {
  alignas(64) Block made;
  Block& out = fresh ? sums : made;
  memory_is_used();
  multiply_panels<kParts, kTwoA, kTwoB>(a, b, steps);
  _tile_stored(0, out[0], kRow);
  if constexpr (kTwoB) _tile_stored(1, out[1], kRow);
  if constexpr (kTwoA) _tile_stored(2, out[2], kRow);
  if constexpr (kTwoA && kTwoB) _tile_stored(3, out[3], kRow);
  memory_is_used();
  if (fresh) return;
  for (size_t tile = 0; tile < 4; ++tile) {
    if ((tile / 2 != 0 && !kTwoA) || (tile % 2 != 0 && !kTwoB)) continue;
    for (size_t i = 0; i < kSide * kSide; i += kSide) {
      _mm512_store_ps(sums[tile] + i, _mm512_add_ps(_mm512_load_ps(sums[tile] + i), _mm512_load_ps(made[tile] + i)));
    }
  }
}

void finish(const Product& p, const Block& sums, size_t row_panel, size_t column_panel) {
  for (size_t tile = 0; tile < 4; ++tile) {
    const size_t row = (row_panel + tile / 2) * kSide, column = (column_panel + tile % 2) * kSide;
    if (row >= p.rows() || column >= p.columns()) continue;
    const size_t rows = std::min(kSide, p.rows() - row);
    const __mmask16 lanes = first(p.columns() - column);
    const __m512 alpha = _mm512_set1_ps(p.alpha), beta = _mm512_set1_ps(p.beta);
    for (size_t i = 0; i < rows; ++i) {
      __m512 y = _mm512_mul_ps(alpha, _mm512_load_ps(sums[tile] + i * kSide));
      if (p.c != nullptr) {
        const float* c = p.c + (row + i) * p.c_row + column * p.c_column;
        const __m512 added = p.c_column != 0 ? _mm512_maskz_loadu_ps(lanes, c) : _mm512_set1_ps(*c);
        y = _mm512_add_ps(y, _mm512_mul_ps(beta, added));
      }
      _mm512_mask_storeu_ps(p.out + (row + i) * p.columns() + column, lanes, y);
    }
  }
}

// Computes a piece whose sums and part of B fit into the second-level cache. Returns false if a number cannot be
// divided into parts.
template <size_t kParts>
bool compute_small(const Product& p, const Piece& piece) {
  const size_t steps = up(p.a.terms, kDepth), across = up(piece.column_end - piece.column, 2);
  const size_t blocks = steps > kSteps ? up(piece.row_end - piece.row, 2) * across : 1;
  constexpr size_t kPanel = kSteps * kStep<kParts>, kBlock = sizeof(Block) / sizeof(uint16_t);
  uint16_t* const b = scratch(kWide * kPanel + 2 * kPanel + blocks * kBlock);
  uint16_t* const a = b + kWide * kPanel;
  Block* const sums = reinterpret_cast<Block*>(a + 2 * kPanel);
  Watch watch;
  const auto ready = [&](const Factor& f, size_t panel, size_t end, size_t step, bool in_rows, uint16_t* out) {
    if (f.packed != nullptr) return panels<kParts>(f, panel, step);
    for (size_t i = panel; i < end; ++i) {
      pack<kParts>(f, i, step, std::min(kSteps, steps - step), in_rows, out + (i - panel) * kPanel, watch);
    }
    return Panels{out, kPanel};
  };
  for (size_t step = 0; step < steps; step += kSteps) {
    const size_t count = std::min(kSteps, steps - step);
    const Panels all_b = ready(p.b, piece.column, piece.column_end, step, false, b);
    for (size_t i = piece.row; i < piece.row_end; i += 2) {
      const bool two_a = i + 1 < piece.row_end;
      const Panels some_a = ready(p.a, i, i + 1 + two_a, step, true, a);
      for (size_t j = piece.column; j < piece.column_end; j += 2) {
        const bool two_b = j + 1 < piece.column_end;
        const Panels some_b{all_b.first + (j - piece.column) * all_b.apart, all_b.apart};
        Block& block = sums[blocks > 1 ? (i - piece.row) / 2 * across + (j - piece.column) / 2 : 0];
        (two_a ? (two_b ? add_up<kParts, true, true> : add_up<kParts, true, false>)
               : (two_b ? add_up<kParts, false, true> : add_up<kParts, false, false>))(some_a, some_b, count, step == 0,
                                                                                       block);
        if (step + count == steps) finish(p, block, i, j);
      }
    }
    if (watch.found()) return false;
  }
  return true;
}

bool compute(const Product& p, const Piece& piece) {
  for (size_t i = piece.row; i < piece.row_end; i += kTall) {
    for (size_t j = piece.column; j < piece.column_end; j += kWide) {
      const Piece part{i, std::min(i + kTall, piece.row_end), j, std::min(j + kWide, piece.column_end)};
      if (!(p.parts == 2 ? compute_small<2> : compute_small<3>)(p, part)) return false;
    }
  }
  return true;
}

// All threads compute one product. Returns false if a number cannot be divided into parts.
bool together(const Context& context, const Product& p) {
  const Pieces pieces(up(p.rows(), kSide), up(p.columns(), kSide), processors());
  std::atomic<bool> fits{true};
  context.parallel(pieces.count(), 1, [&](size_t begin, size_t end) {
    const Tiles tiles;
    for (size_t i = begin; i < end; ++i) {
      if (!compute(p, pieces[i])) fits = false;
    }
  });
  return fits;
}

// The calling thread computes a product alone. Returns false if a number cannot be divided into parts.
bool alone(const Product& p) {
  const Tiles tiles;
  return compute(p, {0, up(p.rows(), kSide), 0, up(p.columns(), kSide)});
}

#else

bool together(const Context&, const Product&) { return false; }
bool alone(const Product&) { return false; }

#endif

// --- without tiles ---------------------------------------------------------------------------------------------------

void store(const Product& p, size_t row, size_t column, const products::Sums& sums, bool fresh, bool last) {
  using products::kLanes, products::lanes;
  const size_t rows = std::min(products::kHeight, p.rows() - row), columns = std::min(products::kWidth, p.columns() - column);
  for (size_t i = 0; i < rows; ++i) {
    float* const out = p.out + (row + i) * p.columns() + column;
    const float* const from = sums.at[i];
    size_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) {
      products::Lanes sum = lanes(from + j);
      if (!fresh) sum += lanes(out + j);
      if (last) sum *= p.alpha;
      if (last && p.c != nullptr) {
        const float* const c = p.c + (row + i) * p.c_row + (column + j) * p.c_column;
        sum += p.beta * (p.c_column != 0 ? lanes(c) : products::Lanes{} + *c);
      }
      lanes(out + j) = sum;
    }
    for (; j < columns; ++j) {
      const float sum = fresh ? from[j] : out[j] + from[j];
      out[j] = last ? p.finished(sum, row + i, column + j) : sum;
    }
  }
}

void compute_plainly(const Product& p, const Piece& piece) {
  const size_t row_end = std::min(p.rows(), piece.row_end * products::kHeight);
  const size_t column_end = std::min(p.columns(), piece.column_end * products::kWidth);
  products::compute(p.a, p.b, piece.row * products::kHeight, row_end, piece.column * products::kWidth, column_end,
                    [&](auto... what) { store(p, what...); });
}

void together_plainly(const Context& context, const Product& p) {
  const Pieces pieces(up(p.rows(), products::kHeight), up(p.columns(), products::kWidth), processors());
  context.parallel(pieces.count(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) compute_plainly(p, pieces[i]);
  });
}

void alone_plainly(const Product& p) {
  compute_plainly(p, {0, up(p.rows(), products::kHeight), 0, up(p.columns(), products::kWidth)});
}

constexpr size_t kLeastPacked = size_t{1} << 15;  // multiplications from which packing pays
bool is_packed_plainly(const Product& p) {
  return !available() && p.a.terms != 0 && p.rows() * p.columns() * p.a.terms >= kLeastPacked;
}

constexpr size_t kAlone = size_t{1} << 21;  // multiplications up to which one thread computes a product alone

// Computes products with few rows, whose factors are read in place. Returns false if their layout does not allow it.
bool few_rows(const Context& context, const Product& p) {
  if (p.rows() > few::kMost || p.a.term_stride != 1 || p.b.line_stride != 1 || p.a.terms == 0) return false;
  const few::Rows given{p.a.data, p.b.data, p.out, p.rows(), p.a.terms, p.columns()};
  const size_t stripe = given.stripe(), each = p.rows() * p.a.terms * stripe;
  context.parallel(up(p.columns(), stripe), up(kAlone / 16, each), [&](size_t begin, size_t end) {
    few::multiply(given, begin, end);
    if (p.c == nullptr && p.alpha == 1.0f) return;
    for (size_t row = 0; row < p.rows(); ++row) {
      float* const out = p.out + row * p.columns();
      for (size_t column = begin * stripe; column < std::min(end * stripe, p.columns()); ++column) {
        out[column] = p.finished(out[column], row, column);
      }
    }
  });
  return true;
}

void multiply(const Context& context, const Product& p) {
  if (p.rows() == 0 || p.columns() == 0) return;
  const bool is_packed = p.a.packed != nullptr || p.b.packed != nullptr;
  if (!is_packed && few_rows(context, p)) return;
  if (is_packed_plainly(p)) return together_plainly(context, p);
  if (p.a.terms != 0 && available() && together(context, p)) return;
  context.parallel(p.rows(), up(kAlone, p.columns() * (p.a.terms + 1)),
                   [&](size_t begin, size_t end) { plain(p, begin, end); });
}

// The axes before the last two, broadcast as in NumPy.
struct Batch {
  Dims dims;
  std::array<size_t, kMaxRank> a{}, b{};  // strides, in matrices

  Batch(const Dims& left, const Dims& right) {
    dims.rank = std::max(left.rank, right.rank) - 2;
    size_t a_stride = 1, b_stride = 1;
    for (size_t axis = dims.rank; axis-- > 0;) {
      const int64_t of_a = size_of(left, dims.rank - axis), of_b = size_of(right, dims.rank - axis);
      if (of_a != of_b && of_a != 1 && of_b != 1) throw std::runtime_error("the leading axes of its factors differ");
      dims.size[axis] = of_a == 1 ? of_b : of_a;
      a[axis] = of_a == 1 ? 0 : a_stride;
      b[axis] = of_b == 1 ? 0 : b_stride;
      a_stride *= static_cast<size_t>(of_a);
      b_stride *= static_cast<size_t>(of_b);
    }
  }
  size_t offset(const std::array<size_t, kMaxRank>& strides, size_t index) const {
    size_t sum = 0;
    for (size_t axis = dims.rank; axis-- > 0; index /= static_cast<size_t>(dims.size[axis])) {
      sum += index % static_cast<size_t>(dims.size[axis]) * strides[axis];
    }
    return sum;
  }

 private:
  // The size of the axis `back` places before the last two.
  static int64_t size_of(const Dims& of, size_t back) { return back + 2 > of.rank ? 1 : of.size[of.rank - 2 - back]; }
};

// (a, b[, c]) -> alpha·op(a)·op(b) + beta·c, with the leading axes of a product of matrices and the summand of a Gemm
struct MatMul {
  static constexpr Signature signature{"MatMul", 3, 1, 1};
  bool turned_a, turned_b;
  float alpha, beta;
  size_t parts;

  explicit MatMul(const Attributes& attributes)
      : turned_a(attributes.integer("transA") != 0),
        turned_b(attributes.integer("transB") != 0),
        alpha(attributes.real("alpha")),
        beta(attributes.real("beta")),
        parts(parts_of(attributes)),
        constant_a_(attributes.is_constant(0), parts),
        constant_b_(attributes.is_constant(1), parts) {}

  void compute(Context& context) const {
    const auto a = context.input(0), b = context.input(1);
    if (a.dims.rank < 2 || b.dims.rank < 2) throw std::runtime_error("its factors should have two axes or more");
    Product product = matrices(a, b);
    Batch batch(a.dims, b.dims);
    Dims dims = batch.dims;
    dims.rank += 2;
    dims.size[dims.rank - 2] = static_cast<int64_t>(product.rows());
    dims.size[dims.rank - 1] = static_cast<int64_t>(product.columns());
    const auto out = context.output(0, dims);
    product.out = out.data;
    const bool one = b.count == product.b.lines * product.b.terms && !turned_a;
    if (one) product.a.lines = product.columns() == 0 ? 0 : out.count / product.columns();  // the rows of all matrices
    if (context.has(2)) summand(context.input(2), product);
    take_packed(context, a.count, b.count, product);
    one ? multiply(context, product) : several(context, product, batch);
  }

 private:
  Constant constant_a_, constant_b_;

  // Uses the packed copies of factors that are constant and a single matrix.
  void take_packed(const Context& context, size_t a_count, size_t b_count, Product& product) const {
    if (a_count == product.a.lines * product.a.terms) product.a.packed = constant_a_.packed(context, product.a, true);
    if (b_count == product.b.lines * product.b.terms) product.b.packed = constant_b_.packed(context, product.b, false);
  }

  static Factor factor(const Tensor<const float>& x, bool across) {
    const auto rows = static_cast<size_t>(x.dims.size[x.dims.rank - 2]);
    const auto columns = static_cast<size_t>(x.dims.size[x.dims.rank - 1]);
    return across ? Factor{x.data, columns, rows, 1, columns} : Factor{x.data, rows, columns, columns, 1};
  }

  Product matrices(const Tensor<const float>& a, const Tensor<const float>& b) const {
    const Factor left = factor(a, turned_a), right = factor(b, !turned_b);
    if (left.terms != right.terms) throw std::runtime_error("the inner sizes of its factors differ");
    return {left, right, alpha, beta, nullptr, 0, 0, nullptr, parts};
  }

  static void summand(const Tensor<const float>& c, Product& product) {
    const size_t rank = c.dims.rank, columns = product.columns();
    const size_t width = rank == 0 ? 1 : static_cast<size_t>(c.dims.size[rank - 1]);
    const size_t height = width == 0 ? product.rows() : c.count / width;
    if (c.count != width * height || (width != 1 && width != columns) || (height != 1 && height != product.rows())) {
      throw std::runtime_error("its summand does not fit its result");
    }
    product.c = c.data;
    product.c_row = height == 1 ? 0 : width;
    product.c_column = width == 1 ? 0 : 1;
  }

  static void several(const Context& context, const Product& product, const Batch& batch) {
    const size_t a_size = product.a.lines * product.a.terms, b_size = product.b.lines * product.b.terms;
    const size_t out_size = product.rows() * product.columns(), count = batch.dims.count();
    const auto one = [&](size_t i) {
      Product p = product;
      p.a.data += batch.offset(batch.a, i) * a_size;
      p.b.data += batch.offset(batch.b, i) * b_size;
      p.out += i * out_size;
      return p;
    };
    if (out_size == 0) return;
    if (count < kFew) {
      for (size_t i = 0; i < count; ++i) multiply(context, one(i));
      return;
    }
    context.parallel(count, up(kAlone / 16, out_size * (product.a.terms + 1)), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const Product p = one(i);
        if (is_packed_plainly(p)) alone_plainly(p);
        else if (p.a.terms == 0 || !available() || !alone(p)) plain(p, 0, p.rows());
      }
    });
  }

  static constexpr size_t kFew = 4;  // number of matrices from which each thread computes whole ones
};

}  // namespace

const ort::CustomOp matmul = op<MatMul>();

}  // namespace gradgraph
