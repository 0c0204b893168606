// A few rows times a matrix that is read as it lies: what a library does for many rows, putting the matrix into the order
// of its kernel first, costs as much as the product.
#pragma once

#include <algorithm>
#include <cstddef>

namespace gradgraph::few {

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
constexpr size_t kLanes = 16, kHeight = 8, kColumns = 3 * kLanes;  // sums in registers: 8 rows of 3 vectors
constexpr size_t kTerms = 192;  // 192 rows of 48 numbers fit into the first cache
constexpr size_t kAhead = 16;   // rows of the matrix that are fetched before they are read

struct Rows {
  const float* a;  // [rows, terms]
  const float* b;  // [terms, columns]
  float* out;      // [rows, columns]
  size_t rows, terms, columns;
};

// out[row.., column..] (+)= a[row.., k..]·b[k.., column..]
template <size_t kRows, size_t kVectors>
inline void block(const Rows& p, size_t row, size_t column, size_t k, size_t end) {
  Lanes sums[kRows][kVectors]{};
  const float* b = p.b + k * p.columns + column;
  const float* a = p.a + row * p.terms;
  for (size_t i = k; i < end; ++i, b += p.columns) {
    if (row == 0) {
      for (size_t v = 0; v < kVectors; ++v) __builtin_prefetch(b + kAhead * p.columns + v * kLanes);
    }
    Lanes line[kVectors];
    for (size_t v = 0; v < kVectors; ++v) line[v] = *reinterpret_cast<const Lanes*>(b + v * kLanes);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t v = 0; v < kVectors; ++v) sums[r][v] += a[r * p.terms + i] * line[v];
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kVectors; ++v) {
      Lanes& out = *reinterpret_cast<Lanes*>(p.out + (row + r) * p.columns + column + v * kLanes);
      out = k == 0 ? sums[r][v] : out + sums[r][v];
    }
  }
}

template <size_t kVectors>
void stripe(const Rows& p, size_t column) {
  for (size_t k = 0; k < p.terms; k += kTerms) {
    const size_t end = std::min(k + kTerms, p.terms);
    size_t row = 0;
    for (; row + kHeight <= p.rows; row += kHeight) block<kHeight, kVectors>(p, row, column, k, end);
    for (; row + 2 <= p.rows; row += 2) block<2, kVectors>(p, row, column, k, end);
    if (row < p.rows) block<1, kVectors>(p, row, column, k, end);
  }
}

// Fewer columns than a vector has.
inline void rest(const Rows& p, size_t column) {
  for (size_t row = 0; row < p.rows; ++row) {
    for (size_t j = column; j < p.columns; ++j) {
      float sum = 0.0f;
      for (size_t k = 0; k < p.terms; ++k) sum += p.a[row * p.terms + k] * p.b[k * p.columns + j];
      p.out[row * p.columns + j] = sum;
    }
  }
}

// The stripes [begin, end) of kColumns each, the last one of what is left.
inline void multiply(const Rows& p, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    size_t column = i * kColumns;
    const size_t last = std::min(column + kColumns, p.columns);
    if (column + kColumns <= last) {
      stripe<3>(p, column);
      continue;
    }
    if (column + 2 * kLanes <= last) stripe<2>(p, column), column += 2 * kLanes;
    if (column + kLanes <= last) stripe<1>(p, column), column += kLanes;
    if (column < last) rest(p, column);
  }
}

}  // namespace gradgraph::few
