// Matrix products of float32 where there are no tiles.
//
// A block of B is packed in panels of kWidth columns that stay in the second-level cache. kHeight rows of A at a time
// are packed into the first-level cache, and multiplied by all of these panels. Packing reads a factor in either order,
// so that a transpose costs nothing: onnxruntime transposes a left factor again for every 128 columns of the result.
#pragma once

#include <algorithm>

#include "panels.h"

namespace gradgraph::products {

#if defined(__AVX512F__)
constexpr size_t kLanes = 16, kVectors = 3, kHeight = 8;  // 24 sums and 3 vectors of B in 32 registers
constexpr size_t kPanels = 16;                            // panels of B at a time: 3/4 of a megabyte
#else
constexpr size_t kLanes = 8, kVectors = 3, kHeight = 4;  // half as many registers, of half the size
constexpr size_t kPanels = 20;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
constexpr size_t kWidth = kLanes * kVectors;
constexpr size_t kTerms = 256;  // terms of a sum in registers; longer sums are sums of such sums

using amx::Factor;

inline Lanes& lanes(float* at) { return *reinterpret_cast<Lanes*>(at); }
inline const Lanes& lanes(const float* at) { return *reinterpret_cast<const Lanes*>(at); }

// out[term][line] of up to kCount lines, starting with `line`; missing ones are zero
template <size_t kCount>
inline void pack(const Factor& f, size_t line, size_t term, size_t terms, float* out) {
  const size_t count = std::min(kCount, f.lines - line);
  const float* const from = f.data + line * f.line_stride + term * f.term_stride;
  if (count < kCount) std::fill_n(out, terms * kCount, 0.0f);
  if (f.line_stride == 1) {
    for (size_t k = 0; k < terms; ++k) {
      if (count == kCount) std::copy_n(from + k * f.term_stride, kCount, out + k * kCount);
      else std::copy_n(from + k * f.term_stride, count, out + k * kCount);
    }
    return;
  }
  for (size_t first = 0; first < terms; first += kLanes) {
    const size_t end = std::min(terms, first + kLanes);
    for (size_t i = 0; i < count; ++i) {
      for (size_t k = first; k < end; ++k) out[k * kCount + i] = from[i * f.line_stride + k * f.term_stride];
    }
  }
}

struct Sums {
  float at[kHeight][kWidth];
};

// sums = a·b of packed panels
inline void multiply(const float* a, const float* b, size_t terms, Sums& out) {
  Lanes sums[kHeight][kVectors]{};
  for (size_t k = 0; k < terms; ++k, a += kHeight, b += kWidth) {
    Lanes line[kVectors];
    for (size_t v = 0; v < kVectors; ++v) line[v] = lanes(b + v * kLanes);
    for (size_t r = 0; r < kHeight; ++r) {
      for (size_t v = 0; v < kVectors; ++v) sums[r][v] += a[r] * line[v];
    }
  }
  for (size_t r = 0; r < kHeight; ++r) {
    for (size_t v = 0; v < kVectors; ++v) lanes(out.at[r] + v * kLanes) = sums[r][v];
  }
}

// Computes the rectangle [row, row_end) x [column, column_end) of a·b: store(row, column, sums, fresh, last) receives
// the sums of a few terms at a time, for the block that starts at this row and column. `b` is a Factor, or has a `pack`
// of its own.
template <class Other, class Store>
inline void compute(const Factor& a, const Other& b, size_t row, size_t row_end, size_t column, size_t column_end,
                    const Store& store) {
  constexpr size_t kPacked = kPanels * kWidth * kTerms;
  float* const panels = reinterpret_cast<float*>(amx::scratch(2 * (kPacked + kHeight * kTerms)));
  float* const some = panels + kPacked;
  Sums sums;
  for (size_t left = column; left < column_end; left += kPanels * kWidth) {
    const size_t right = std::min(column_end, left + kPanels * kWidth);
    for (size_t term = 0; term < a.terms; term += kTerms) {
      const size_t terms = std::min(kTerms, a.terms - term);
      for (size_t j = left; j < right; j += kWidth) pack<kWidth>(b, j, term, terms, panels + (j - left) * terms);
      for (size_t i = row; i < row_end; i += kHeight) {
        pack<kHeight>(a, i, term, terms, some);
        for (size_t j = left; j < right; j += kWidth) {
          multiply(some, panels + (j - left) * terms, terms, sums);
          store(i, j, sums, term == 0, term + terms == a.terms);
        }
      }
    }
  }
}

}  // namespace gradgraph::products
