// Products with frozen weights of 4 or 8 bits in blocks, read as they are stored: x·Wᵀ, and dy·W for the gradient of x.
//
// Numbers are converted to float32 when a panel is packed (see products.h), into the second-level cache: no float
// weight is ever written. They are (q - zero point)·scale, with the same bits as by DequantizeLinear.

#include <cstring>

#include "kernels.h"
#include "pieces.h"
#include "products.h"
#include "transpose.h"

namespace gradgraph {
namespace {

using products::kLanes;
using products::Lanes;
using products::lanes;
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef int32_t Whole __attribute__((vector_size(kLanes * sizeof(int32_t))));

constexpr size_t kUnit = 16;  // terms, or lines, that share a scale: block sizes are multiples of it

// W as it is stored: `rows` lines of `columns` numbers, with a scale per `block` of a line.
struct Stored {
  const uint8_t* numbers;
  const float* scales;
  const uint8_t* points;  // without gaps, or nullptr for zero
  size_t rows, columns, block, bits;
  uint32_t flip;  // for signed numbers: the sign bit, which the zero point subtracts again
  size_t blocks() const { return columns / block; }
  size_t stride() const { return columns * bits / 8; }  // bytes per line
  float zero(size_t row, size_t column) const {
    if (points == nullptr) return static_cast<float>(flip);
    const size_t i = row * blocks() + column / block;
    const uint32_t q = bits == 8 ? points[i] : points[i / 2] >> (i % 2 * 4) & 15;
    return static_cast<float>(q ^ flip);
  }
  float scale(size_t row, size_t column) const { return scales[row * blocks() + column / block]; }
};

// A factor of a product: its line i is row i of W, or column i.
template <bool kRows>
struct PackedFactor {
  Stored w;
  size_t lines() const { return kRows ? w.rows : w.columns; }
  size_t terms() const { return kRows ? w.columns : w.rows; }
};

inline uint32_t word(const uint8_t* at) {
  uint32_t w;
  std::memcpy(&w, at, sizeof(w));
  return w;
}

inline Lanes floats(const Bits& q, const Stored& w) {
  return __builtin_convertvector((Whole)(q ^ w.flip), Lanes);
}

constexpr size_t kWords = 16;  // words that are read from a row at a time

// words[j][i]: word j of row i
inline void read_words(const uint8_t* const (&from)[kLanes], size_t byte, size_t count, Bits (&words)[kWords]) {
#if defined(__AVX512F__)
  if (count == kWords) {
    __m512i r[kWords];
    for (size_t i = 0; i < kLanes; ++i) r[i] = _mm512_loadu_si512(from[i] + byte);
    transpose(r);
    for (size_t j = 0; j < kWords; ++j) words[j] = (Bits)r[j];
    return;
  }
#endif
  for (size_t j = 0; j < count; ++j) {
    for (size_t i = 0; i < kLanes; ++i) words[j][i] = word(from[i] + byte + j * sizeof(uint32_t));
  }
}

// Lines are rows of W: a word of each of kLanes rows contains their next few terms.
template <size_t kBits>
inline void pack_rows(const Stored& w, size_t row, size_t column, size_t terms, float* out, size_t apart) {
  constexpr size_t kEach = 32 / kBits;
  const uint8_t* from[kLanes];
  size_t rows[kLanes];
  for (size_t i = 0; i < kLanes; ++i) {
    rows[i] = std::min(row + i, w.rows - 1);  // for lines after the last one
    from[i] = w.numbers + rows[i] * w.stride() + column * kBits / 8;
  }
  Lanes scale{}, zero{};
  Bits words[kWords];
  for (size_t k = 0; k < terms; k += kEach) {
    const size_t at = k / kEach % kWords;
    if (at == 0) read_words(from, k * kBits / 8, std::min(kWords, (terms - k) / kEach), words);
    if (k == 0 || (column + k) % w.block == 0) {
      for (size_t i = 0; i < kLanes; ++i) scale[i] = w.scale(rows[i], column + k), zero[i] = w.zero(rows[i], column + k);
    }
    for (size_t j = 0; j < kEach; ++j) {
      const Bits q = words[at] >> static_cast<uint32_t>(j * kBits) & ((1u << kBits) - 1);
      lanes(out + (k + j) * apart) = (floats(q, w) - zero) * scale;
    }
  }
}

// Lines are columns of W: kLanes of them are contiguous, in one block.
template <size_t kBits>
inline void pack_columns(const Stored& w, size_t row, size_t column, size_t terms, float* out, size_t apart) {
  constexpr size_t kEach = 32 / kBits;
  Bits shifts;
  for (size_t i = 0; i < kLanes; ++i) shifts[i] = i % kEach * kBits;
  const uint8_t* from = w.numbers + row * w.stride() + column * kBits / 8;
  for (size_t k = 0; k < terms; ++k, from += w.stride(), out += apart) {
    Bits words;
    for (size_t part = 0; part < kLanes / kEach; ++part) {
      const uint32_t one = word(from + part * sizeof(uint32_t));
      for (size_t i = 0; i < kEach; ++i) words[part * kEach + i] = one;
    }
    const Bits q = words >> shifts & ((1u << kBits) - 1);
    lanes(out) = (floats(q, w) - w.zero(row + k, column)) * w.scale(row + k, column);
  }
}

// As products::pack. Lines after the last one are arbitrary: their results are not stored.
template <size_t kCount, bool kRows>
inline void pack(const PackedFactor<kRows>& f, size_t line, size_t term, size_t terms, float* out) {
  for (size_t i = 0; i < kCount; i += kLanes) {
    if (line + i >= f.lines()) {
      for (size_t k = 0; k < terms; ++k) lanes(out + k * kCount + i) = Lanes{};
    } else if constexpr (kRows) {
      (f.w.bits == 4 ? pack_rows<4> : pack_rows<8>)(f.w, line + i, term, terms, out + i, kCount);
    } else {
      (f.w.bits == 4 ? pack_columns<4> : pack_columns<8>)(f.w, term, line + i, terms, out + i, kCount);
    }
  }
}

struct Result {
  float* data;
  size_t rows, columns;
  void store(size_t row, size_t column, const products::Sums& sums, bool fresh) const {
    const size_t count = std::min(products::kWidth, columns - column);
    for (size_t i = 0; i < std::min(products::kHeight, rows - row); ++i) {
      float* const out = data + (row + i) * columns + column;
      if (fresh) std::copy_n(sums.at[i], count, out);
      else for (size_t j = 0; j < count; ++j) out[j] += sums.at[i][j];
    }
  }
};

template <bool kRows>
void multiply(const Context& context, const float* x, const PackedFactor<kRows>& w, const Result& y) {
  using products::kHeight, products::kWidth;
  const products::Factor a{x, y.rows, w.terms(), w.terms(), 1};
  const amx::Pieces pieces(amx::up(y.rows, kHeight), amx::up(y.columns, kWidth), amx::processors());
  context.parallel(pieces.count(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const amx::Piece p = pieces[i];
      products::compute(a, w, p.row * kHeight, std::min(y.rows, p.row_end * kHeight), p.column * kWidth,
                        std::min(y.columns, p.column_end * kWidth),
                        [&](size_t row, size_t column, const products::Sums& sums, bool fresh, bool) {
                          y.store(row, column, sums, fresh);
                        });
    }
  });
}

// (x, numbers, scales[, zero points]) -> x·Wᵀ, or with `by_rows` = 0 x·W; W has N rows of K numbers
struct PackedMatMul {
  static constexpr Signature signature{"PackedMatMul", 4, 1, 1, -1, false, false, 0b1010};
  size_t rows, columns, bits, block;
  bool by_rows, has_sign;

  explicit PackedMatMul(const Attributes& attributes)
      : rows(static_cast<size_t>(attributes.integer("N"))),
        columns(static_cast<size_t>(attributes.integer("K"))),
        bits(static_cast<size_t>(attributes.integer("bits"))),
        block(static_cast<size_t>(attributes.integer("block_size"))),
        by_rows(attributes.integer("by_rows") != 0),
        has_sign(attributes.integer("signed") != 0) {
    if ((bits != 4 && bits != 8) || block == 0 || block % kUnit != 0 || rows == 0 || columns == 0 || columns % block != 0) {
      throw std::runtime_error("its weights should have 4 or 8 bits, in blocks of a multiple of 16");
    }
  }

  void compute(Context& context) const {
    const auto x = context.input(0), scales = context.input(2);
    const auto numbers = context.input<uint8_t>(1);
    const bool has_points = context.has(3);
    const auto points = has_points ? context.input<uint8_t>(3) : Tensor<const uint8_t>{};
    const size_t terms = by_rows ? columns : rows, blocks = rows * (columns / block);
    Dims dims = x.dims;
    if (dims.rank < 2 || static_cast<size_t>(dims.size[dims.rank - 1]) != terms) {
      throw std::runtime_error("the inner sizes of its factors differ");
    }
    if (numbers.count != rows * columns * bits / 8 || scales.count != blocks ||
        (has_points && points.count != (blocks * bits + 7) / 8)) {
      throw std::runtime_error("its weight has another size");
    }
    const Stored w{numbers.data, scales.data, points.data, rows, columns, block, bits, has_sign ? 1u << (bits - 1) : 0u};
    dims.size[dims.rank - 1] = static_cast<int64_t>(by_rows ? rows : columns);
    const auto out = context.output(0, dims);
    if (out.count == 0) return;
    const Result y{out.data, dims.count(0, dims.rank - 1), by_rows ? rows : columns};
    if (by_rows) multiply(context, x.data, PackedFactor<true>{w}, y);
    else multiply(context, x.data, PackedFactor<false>{w}, y);
  }
};

}  // namespace

const ort::CustomOp packed_matmul = op<PackedMatMul>();

}  // namespace gradgraph
