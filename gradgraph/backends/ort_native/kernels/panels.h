// How the factors of a product are packed for tiles (see amx.h).
//
// A panel is 16 rows of A, or 16 columns of B: for each step of 32 terms of the sum, it contains a tile per part. A few
// steps of some panels are packed at a time. A constant factor is packed once as a whole, in the same order.
#pragma once

#include <algorithm>

#include "amx.h"

namespace gradgraph::amx {

// A matrix in memory: element (i, k), where i is the axis that the product keeps and k the one that is summed over.
struct Factor {
  const float* data;
  size_t lines, terms;              // sizes of i and k
  size_t line_stride, term_stride;  // one of them is 1
  const uint16_t* packed = nullptr; // all of its panels, if it is constant: see `panels`
};


#if GRADGRAPH_TILES

constexpr size_t kSteps = 4;  // steps packed at a time, so that two panels of A fit into the first-level cache

// Terms are packed in pairs, k and k + 16 of a step: any order is correct if it is the same for both factors. Packs 16
// rows of 16 pairs: `read(i, far)` returns the first 16 terms of row i, or the 16 terms after them.
template <size_t kParts, class Read>
inline void pack_tile(const Read& read, uint16_t* out, Watch& watch) {
  for (size_t i = 0; i < kSide; ++i) store_row<kParts>(read(i, false), read(i, true), i, out, watch);
}

// Packs tiles whose rows are lines.
template <size_t kParts>
inline void pack_lines(const Factor& f, size_t line, size_t term, uint16_t* out, Watch& watch) {
  const float* from = f.data + line * f.line_stride + term;
  const size_t lines = f.lines - line, terms = f.terms - term, stride = f.line_stride;
  if (lines >= kSide && terms >= kDepth) {
    const auto read = [=](size_t i, bool far) { return _mm512_loadu_ps(from + i * stride + far * kSide); };
    return pack_tile<kParts>(read, out, watch);
  }
  const __mmask16 near = first(terms), rest = first(terms > kSide ? terms - kSide : 0);
  const auto read = [=](size_t i, bool far) {
    return _mm512_maskz_loadu_ps(i < lines ? (far ? rest : near) : 0, from + i * stride + far * kSide);
  };
  pack_tile<kParts>(read, out, watch);
}

// Packs tiles whose rows are pairs of terms.
template <size_t kParts>
inline void pack_terms(const Factor& f, size_t line, size_t term, uint16_t* out, Watch& watch) {
  const float* from = f.data + line + term * f.term_stride;
  const size_t lines = f.lines - line, terms = f.terms - term, stride = f.term_stride;
  if (lines >= kSide && terms >= kDepth) {
    const auto read = [=](size_t i, bool far) { return _mm512_loadu_ps(from + (i + far * kSide) * stride); };
    return pack_tile<kParts>(read, out, watch);
  }
  const auto read = [=](size_t i, bool far) {
    const size_t k = i + far * kSide;
    return _mm512_maskz_loadu_ps(k < terms ? first(lines) : 0, from + k * stride);
  };
  pack_tile<kParts>(read, out, watch);
}

inline void turn(uint16_t* tile) {
  __m512i r[kSide];
  for (size_t i = 0; i < kSide; ++i) r[i] = _mm512_load_si512(tile + i * kDepth);
  transpose(r);
  for (size_t i = 0; i < kSide; ++i) _mm512_store_si512(tile + i * kDepth, r[i]);
}

// Packs `steps` steps of a panel, with lines along the rows of its tiles, as for A, or across, as for B.
template <size_t kParts>
inline void pack(const Factor& f, size_t panel, size_t step, size_t steps, bool in_rows, uint16_t* out, Watch& watch) {
  const bool lie_in_rows = f.term_stride == 1;
  for (size_t i = 0; i < steps; ++i, out += kStep<kParts>) {
    (lie_in_rows ? pack_lines<kParts> : pack_terms<kParts>)(f, panel * kSide, (step + i) * kDepth, out, watch);
    if (lie_in_rows == in_rows) continue;
    for (size_t part = 0; part < kParts; ++part) turn(out + part * kTile);
  }
}

// Some steps of neighbouring panels.
struct Panels {
  const uint16_t* first;
  size_t apart;  // the distance between panels
};

// Returns the panels starting with `panel` and `step`, at most kSteps steps, of a factor that is packed as a whole.
template <size_t kParts>
inline Panels panels(const Factor& f, size_t panel, size_t step) {
  const size_t apart = std::min(kSteps, up(f.terms, kDepth) - step) * kStep<kParts>;
  return {f.packed + step * kStep<kParts> * up(f.lines, kSide) + panel * apart, apart};
}

#endif

}  // namespace gradgraph::amx
