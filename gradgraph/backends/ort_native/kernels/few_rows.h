// A few rows times a matrix that is read in place. Libraries first reorder the matrix for their kernel; for few rows
// that takes as long as the product.
//
// Sums are sums of short sums of shorter ones: adding one number after the other would round more often.
#pragma once

#include <algorithm>
#include <cstddef>

namespace gradgraph::few {

#if defined(__AVX512F__)
constexpr size_t kLanes = 16, kHeight = 8;
#else
constexpr size_t kLanes = 8, kHeight = 4;  // half as many registers, of half the size
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
constexpr size_t kWidth = 3 * kLanes;  // columns of sums in registers: kHeight rows of 3 vectors
constexpr size_t kTerms = 128;  // vectors whose copy fits into the first-level cache
constexpr size_t kLong = 512;   // terms of a short sum
constexpr size_t kAhead = 16;   // rows of the matrix that are prefetched
constexpr size_t kThin = 4;     // up to this many rows, only the speed of memory matters;
constexpr size_t kWidest = 256; // then this is the maximum number of columns of a stripe
constexpr size_t kDeep = 8;     // rows of the matrix that are read at the same time
constexpr size_t kMost = 48;    // the most rows that are multiplied this way

constexpr size_t up(size_t count, size_t unit) { return (count + unit - 1) / unit; }

struct Rows {
  const float* a;  // [rows, terms]
  const float* b;  // [terms, columns]
  float* out;      // [rows, columns]
  size_t rows, terms, columns;

  // The columns that one thread processes at a time: long rows if there are few rows, in an even number of pieces.
  size_t stripe() const {
    const size_t pieces = up(columns, kWidest * 2) * 2;
    return rows <= kThin ? up(columns, pieces * kLanes) * kLanes : kWidth;
  }
};

inline Lanes& lanes(float* at) { return *reinterpret_cast<Lanes*>(at); }
inline const Lanes& lanes(const float* at) { return *reinterpret_cast<const Lanes*>(at); }

// Sums for some rows and columns.
struct Sums {
  float* at;
  size_t stride;
  Lanes& operator()(size_t row, size_t column) const { return lanes(at + row * stride + column); }
  void add(const Sums& from, size_t rows, size_t columns) const {
    for (size_t row = 0; row < rows; ++row) {
      for (size_t column = 0; column < columns; column += kLanes) (*this)(row, column) += from(row, column);
    }
  }
};

// Calls body(first, end, sums) for the terms [first, end) of each short sum; `memory` is for sums that are added to
// others.
template <class Body>
inline void in_short_sums(const Rows& p, size_t column, size_t width, float* memory, size_t stride, const Body& body) {
  const Sums out{p.out + column, p.columns}, more{memory, stride};
  for (size_t first = 0; first < p.terms; first += kLong) {
    body(first, std::min(first + kLong, p.terms), first == 0 ? out : more);
    if (first != 0) out.add(more, p.rows, width);
  }
}

// --- up to kThin rows: the matrix is read row by row, from end to end ------------------------------------------------

// sums (+)= kCount terms, starting with term `k`
template <size_t kRows, size_t kCount>
inline void add_lines(const Rows& p, size_t column, size_t width, size_t k, bool fresh, const Sums& kept) {
  for (size_t j = 0; j < width; j += kLanes) {
    Lanes old[kRows]{}, sums[kRows]{};
    if (!fresh) {
      for (size_t row = 0; row < kRows; ++row) old[row] = kept(row, j);
    }
    for (size_t i = k; i < k + kCount; ++i) {
      const Lanes line = lanes(p.b + i * p.columns + column + j);
      for (size_t row = 0; row < kRows; ++row) sums[row] += p.a[row * p.terms + i] * line;
    }
    for (size_t row = 0; row < kRows; ++row) kept(row, j) = old[row] + sums[row];
  }
}

template <size_t kRows>
void thin(const Rows& p, size_t column, size_t last) {
  if constexpr (kRows > 1) {
    if (p.rows < kRows) return thin<kRows - 1>(p, column, last);
  }
  alignas(64) float memory[kRows * kWidest];
  const size_t width = last - column;
  in_short_sums(p, column, width, memory, kWidest, [&](size_t first, size_t end, const Sums& kept) {
    size_t k = first;
    for (; k + kDeep <= end; k += kDeep) add_lines<kRows, kDeep>(p, column, width, k, k == first, kept);
    for (; k < end; ++k) add_lines<kRows, 1>(p, column, width, k, k == first, kept);
  });
}

// --- more rows: the first ones copy the part of the matrix that they read, for the following rows --------------------

// out[row..] (+)= a[row.., k..]·b[k.., column..]
template <size_t kRows, size_t kVectors>
inline void block(const Rows& p, size_t row, size_t column, size_t k, size_t end, bool fresh, float* kept, Sums out) {
  Lanes sums[kRows][kVectors]{};
  const float* b = p.b + k * p.columns + column;
  const float* a = p.a + row * p.terms;
  for (size_t i = k; i < end; ++i, b += p.columns, kept += kWidth) {
    Lanes line[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      if (row == 0) {
        __builtin_prefetch(b + kAhead * p.columns + v * kLanes);
        lanes(kept + v * kLanes) = line[v] = lanes(b + v * kLanes);
      } else {
        line[v] = lanes(kept + v * kLanes);
      }
    }
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t v = 0; v < kVectors; ++v) sums[r][v] += a[r * p.terms + i] * line[v];
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kVectors; ++v) {
      Lanes& sum = out(row + r, v * kLanes);
      sum = fresh ? sums[r][v] : sum + sums[r][v];
    }
  }
}

template <size_t kVectors>
void stripe(const Rows& p, size_t column) {
  alignas(64) float kept[kTerms * kWidth], memory[kMost * kWidth];
  in_short_sums(p, column, kVectors * kLanes, memory, kWidth, [&](size_t first, size_t last, Sums out) {
    for (size_t k = first; k < last; k += kTerms) {
      const size_t end = std::min(k + kTerms, last);
      const bool fresh = k == first;
      size_t row = 0;
      for (; row + kHeight <= p.rows; row += kHeight) block<kHeight, kVectors>(p, row, column, k, end, fresh, kept, out);
      if (row + 4 <= p.rows) block<4, kVectors>(p, row, column, k, end, fresh, kept, out), row += 4;
      if (row + 2 <= p.rows) block<2, kVectors>(p, row, column, k, end, fresh, kept, out), row += 2;
      if (row < p.rows) block<1, kVectors>(p, row, column, k, end, fresh, kept, out);
    }
  });
}

inline void move(Lanes* from, Lanes* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] += from[i], from[i] = Lanes{};
}

// Fewer columns than a vector has lanes.
inline void rest(const Rows& p, size_t column) {
  const size_t count = p.columns - column;
  for (size_t row = 0; row < p.rows; row += kHeight) {
    const size_t height = std::min(kHeight, p.rows - row);
    Lanes sums[kHeight]{}, parts[kHeight]{}, some[kHeight]{};
    alignas(64) float line[kLanes]{};
    for (size_t k = 0; k < p.terms; ++k) {
      std::copy_n(p.b + k * p.columns + column, count, line);
      for (size_t r = 0; r < height; ++r) some[r] += p.a[(row + r) * p.terms + k] * lanes(line);
      if ((k + 1) % kDeep == 0 || k + 1 == p.terms) move(some, parts, height);
      if ((k + 1) % kLong == 0 || k + 1 == p.terms) move(parts, sums, height);
    }
    for (size_t r = 0; r < height; ++r) {
      for (size_t j = 0; j < count; ++j) p.out[(row + r) * p.columns + column + j] = sums[r][j];
    }
  }
}

// The stripes [begin, end); the last one has the remaining columns.
inline void multiply(const Rows& p, size_t begin, size_t end) {
  const size_t last = std::min(end * p.stripe(), p.columns);
  size_t column = begin * p.stripe();
  if (p.rows <= kThin) {
    const size_t whole = column + (last - column) / kLanes * kLanes;
    for (; column < whole; column += p.stripe()) thin<kThin>(p, column, std::min(column + p.stripe(), whole));
    column = whole;
  } else {
    for (; column + kWidth <= last; column += kWidth) stripe<3>(p, column);
    if (column + 2 * kLanes <= last) stripe<2>(p, column), column += 2 * kLanes;
    if (column + kLanes <= last) stripe<1>(p, column), column += kLanes;
  }
  if (column < last) rest(p, column);
}

}  // namespace gradgraph::few
