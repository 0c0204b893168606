// Blocks of scores of one head, with tiles (see amx.h): factors in parts, products, masks and exponentials.
//
// Queries and keys are processed 32 at a time: a block of scores is four tiles.
#pragma once

#include <array>

#include "attention_sight.h"
#include "panels.h"

namespace gradgraph::attention {

#if GRADGRAPH_TILES

using amx::kDepth, amx::kSide, amx::kTile, amx::up;

constexpr size_t kBlock = 2 * kSide;         // queries, and keys, in a block of scores
constexpr size_t kNumbers = kBlock * kBlock; // four tiles: top left, top right, bottom left, bottom right
constexpr size_t kGroup = 4;                 // blocks of queries, or of keys, in one short sum

// Returns the address of 16 numbers in a row of a block.
inline float* lanes(float* block, size_t row, size_t half) {
  return block + (row / kSide * 2 + half) * kSide * kSide + row % kSide * kSide;
}

// Two panels of a factor, `panel` numbers apart.
struct Operand {
  const uint16_t* at;
  size_t panel;
};

// A factor, divided into parts: its panels one after the other, each with its steps.
template <size_t kParts>
struct Packed {
  static constexpr size_t kStep = amx::kStep<kParts>;
  uint16_t* at;
  size_t panels, steps;

  uint16_t* tile(size_t panel, size_t step) const { return at + (panel * steps + step) * kStep; }
  Operand operand(size_t panel, size_t step = 0) const { return {tile(panel, step), steps * kStep}; }
  // The next two panels, or the last ones if there are no more.
  Operand after(size_t panel, size_t step = 0) const { return operand(panel + 2 < panels ? panel + 2 : panel, step); }
  // Packs the panels from number `first` of the factor on.
  void pack(const amx::Factor& f, size_t first, bool in_rows, amx::Watch& watch) const {
    for (size_t i = 0; i < std::min(panels, up(f.lines, kSide) - first); ++i) {
      amx::pack<kParts>(f, first + i, 0, steps, in_rows, tile(i, 0), watch);
    }
  }
};

// Memory for several factors, one after the other: the layout is computed once to find the size, and once with the
// memory.
template <size_t kParts>
class Shelf {
 public:
  Packed<kParts> packed(size_t panels, size_t steps) {
    const Packed<kParts> made{base_ == nullptr ? nullptr : base_ + taken_, panels, steps};
    taken_ += panels * steps * amx::kStep<kParts>;
    return made;
  }
  float* numbers(size_t count) {
    float* const made = base_ == nullptr ? nullptr : reinterpret_cast<float*>(base_ + taken_);
    taken_ += up(count, kSide) * kSide * 2;
    return made;
  }
  void begin() { base_ = amx::scratch(taken_), taken_ = 0; }

 private:
  uint16_t* base_ = nullptr;
  size_t taken_ = 0;
};

// The rows of a matrix as a factor: terms of the sum along rows (`along`), or one row per term (`across`).
inline amx::Factor along(const Rows<const float>& x, size_t rows, size_t size) { return {x.at, rows, size, x.stride, 1}; }
inline amx::Factor across(const Rows<const float>& x, size_t rows, size_t size) { return {x.at, size, rows, 1, x.stride}; }

// --- products, and the work done meanwhile ---------------------------------------------------------------------------

// Rows that the next head reads and writes, which are prefetched into the second-level cache, a few at a time, while
// this head is computed: they are far from each other, so that the processor does not prefetch them by itself.
class Ahead {
 public:
  template <class T>
  void add(const Rows<T>& rows, size_t count, size_t size) {
    if (count * size > kMost) return;
    const auto at = reinterpret_cast<const char*>(rows.at);
    all_[tensors_++] = {at, rows.stride * sizeof(float), count, size * sizeof(float)};
  }
  void one() {
    if (tensor_ == tensors_) return;
    const Some& some = all_[tensor_];
    const char* const row = some.at + row_ * some.stride;
    for (size_t byte = 0; byte < some.bytes; byte += kLine) _mm_prefetch(row + byte, _MM_HINT_T1);
    _mm_prefetch(row + some.bytes - 1, _MM_HINT_T1);
    if (++row_ == some.rows) row_ = 0, ++tensor_;
  }

 private:
  static constexpr size_t kMost = 1 << 15;  // numbers per tensor: more would evict the data in use
  static constexpr size_t kLine = 64;
  struct Some {
    const char* at;
    size_t stride, rows, bytes;
  };
  std::array<Some, 8> all_;
  size_t tensors_ = 0, tensor_ = 0, row_ = 0;
};

// Pieces of work without tiles, which are done one by one between tile products.
template <class Piece>
class Meanwhile {
 public:
  Meanwhile(size_t count, const Piece& piece, Ahead& ahead) : count_(count), piece_(piece), ahead_(ahead) {}
  void one() {
    if (done_ < count_) piece_(done_++);
    ahead_.one(), ahead_.one();
  }
  void rest() {
    while (done_ < count_) piece_(done_++);
  }

 private:
  size_t done_ = 0, count_;
  const Piece& piece_;
  Ahead& ahead_;
};

// A product of two panels each, or one, over some steps; the operands after it are prefetched.
struct Product {
  size_t rows, columns;
  const Steps& steps;
  Operand a, b, after_a, after_b;
};

inline void add(const float* from, float* to, size_t count) {
#pragma omp simd
  for (size_t i = 0; i < count; ++i) to[i] += from[i];
}

inline void fetch(const uint16_t* tile) {  // prefetches into the first-level cache
  for (size_t line = 0; line < kTile; line += kDepth) {
    _mm_prefetch(reinterpret_cast<const char*>(tile + line), _MM_HINT_T0);
  }
}

// Tiles 0 to 3 = A·B over `count` steps, starting with step `first`.
template <size_t kParts, bool kTwoA, bool kTwoB, class Work>
inline void multiply_steps(const Product& p, size_t first, size_t count, Work& work) {
  constexpr int kRow = 64;  // bytes per row of a tile
  constexpr size_t kStep = amx::kStep<kParts>;
  const auto load_a = [&](size_t i, size_t part) {
    const uint16_t* const tile = p.a.at + p.steps[first + i] * kStep + part * kTile;
    _tile_loadd(4, tile, kRow);
    if constexpr (kTwoA) _tile_loadd(5, tile + p.a.panel, kRow);
  };
  const auto load_b = [&](size_t i, size_t part) {
    const uint16_t* const tile = p.b.at + p.steps[first + i] * kStep + part * kTile;
    _tile_loadd(6, tile, kRow);
    if constexpr (kTwoB) _tile_loadd(7, tile + p.b.panel, kRow);
  };
  const auto fetch_next = [&](size_t i, size_t place) {
    const bool more = first + i + 1 < p.steps.size();
    const size_t at = p.steps[more ? first + i + 1 : 0] * kStep + place / 2 * kTile, second = place % 2;
    fetch((more ? p.a : p.after_a).at + at + (kTwoA ? second * p.a.panel : 0));
    fetch((more ? p.b : p.after_b).at + at + (kTwoB ? second * p.b.panel : 0));
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  amx::multiply_steps<kParts>(count, load_a, load_b, [&](size_t i, size_t place) {
    constexpr size_t kLast = 2 * kParts - 2;  // the number of small products
    if (place <= kLast) fetch_next(i, place);
    if (place == kLast) fetch_next(i, place + 1);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoB) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoA) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTwoA && kTwoB) _tile_dpbf16ps(3, 5, 7);
    work.one();
  });
}

template <size_t kParts, bool kTwoA, bool kTwoB, class Work>
inline void multiply(const Product& p, float* block, Work& work) {
  constexpr size_t kSums = kSide * kSide, kRow = 64;
  alignas(64) float more[kNumbers];
  for (size_t first = 0; first < p.steps.size(); first += kGroup) {  // sums of sums are more accurate
    float* const out = first == 0 ? block : more;
    amx::memory_is_used();
    multiply_steps<kParts, kTwoA, kTwoB>(p, first, std::min(kGroup, p.steps.size() - first), work);
    _tile_stored(0, out, kRow);
    if constexpr (kTwoB) _tile_stored(1, out + kSums, kRow);
    if constexpr (kTwoA) _tile_stored(2, out + 2 * kSums, kRow);
    if constexpr (kTwoA && kTwoB) _tile_stored(3, out + 3 * kSums, kRow);
    amx::memory_is_used();
    if (first > 0) add(more, block, kTwoA ? kNumbers : kNumbers / 2);
  }
}

// block = A·B
template <size_t kParts, class Work>
inline void multiply(const Product& p, float* block, Work& work) {
  (p.rows > 1 ? (p.columns > 1 ? multiply<kParts, true, true, Work> : multiply<kParts, true, false, Work>)
              : (p.columns > 1 ? multiply<kParts, false, true, Work> : multiply<kParts, false, false, Work>))(p, block, work);
}

// --- scores and weights ----------------------------------------------------------------------------------------------

// exp(x) for x <= 0, relative error 1e-7; 0 below the smallest normal number, NaN of NaN.
inline __m512 exponential(__m512 x, __mmask16 lanes) {
  const auto constant = [](float c) { return _mm512_set1_ps(c); };
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, constant(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, constant(0.693145752f), x);  // ln 2 in two parts
  r = _mm512_fnmadd_ps(n, constant(1.42860677e-6f), r);
  __m512 p = _mm512_fmadd_ps(constant(0.00138146058f), r, constant(0.00836871564f));
  p = _mm512_fmadd_ps(p, r, constant(0.041668389f));
  p = _mm512_fmadd_ps(p, r, constant(0.166665211f));
  p = _mm512_fmadd_ps(p, r, constant(0.49999994f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), constant(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_mask_cmp_ps_mask(lanes, x, constant(-87.3365479f), _CMP_NLT_UQ), p, n);
}

// 16 scores of one query.
struct Scores {
  __m512 at;
  __mmask16 known, free;  // known: lanes with a key; free: lanes whose score is not replaced by the mask

  // Scales and masks the products.
  Scores(const Head& h, const float* product, size_t query, size_t key) {
    known = free = query < h.queries && key < h.keys ? amx::first(h.keys - key) : 0;
    at = _mm512_mul_ps(_mm512_load_ps(product), _mm512_set1_ps(h.scale));
    if (h.mask.at == nullptr || known == 0) return;
    const float* from = h.mask.at + query * h.mask.row + key * h.mask.column;
    const __m512 mask = h.mask.column == 0 ? _mm512_set1_ps(*from) : _mm512_maskz_loadu_ps(known, from);
    if (h.mask.chosen) {
      const __mmask16 chosen = _mm512_cmp_ps_mask(mask, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      free = static_cast<__mmask16>(known & ~chosen);
      at = _mm512_mask_mov_ps(at, chosen, mask);
    } else {
      at = _mm512_add_ps(at, mask);
    }
  }
  __m512 above(float largest) const { return exponential(_mm512_sub_ps(at, _mm512_set1_ps(largest)), known); }
};

#endif

}  // namespace gradgraph::attention
