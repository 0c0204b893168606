// Recurrent layers with tiles (see amx.h): each step multiplies a state by the same weight.
//
// The recurrent weight R [G·H, H] is divided into parts once per call, a state once per step. Units are processed in
// blocks of 32, the terms of one tile product. The thread that computes a block of a state also divides it into parts
// for the next step. A thread processes the same blocks in every step, so its share of R stays in its second-level
// cache.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "amx.h"
#include "kernel.h"

namespace gradgraph::recurrent {

using std::size_t;

using amx::up;

constexpr size_t kLanes = amx::kSide;    // units that are computed at a time
constexpr size_t kUnits = amx::kDepth;   // units per block
constexpr size_t kRows = 2 * amx::kSide; // sequences in a line of blocks

// --- consecutive steps -----------------------------------------------------------------------------------------------

inline void wait_for(const std::atomic<size_t>& done, size_t count) {
  constexpr size_t kPatience = 4096;
  for (size_t i = 0; done.load(std::memory_order_acquire) < count; ++i) {
    if (i > kPatience) std::this_thread::yield();  // there may be fewer cores than threads
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// The maximum number of threads: that of the machine, as a session does not reveal its own.
inline size_t threads() {
  static const size_t count = std::max(1u, std::thread::hardware_concurrency());
  return count;
}

// Calls body(step, part) for all parts of a step, then for those of the next one. A thread processes its own part
// first, then parts that no thread has started. It waits only for parts that other threads are processing, so that any
// number of threads works.
template <class Body>
void in_steps(const Context& context, size_t steps, size_t parts, const Body& body) {
  struct alignas(64) Mark {
    std::atomic<size_t> step{0};  // the next step of the part
  };
  std::vector<Mark> marks(parts);
  std::atomic<size_t> done{0};
  context.parallel(parts, 1, [&](size_t own, size_t) {
#if GRADGRAPH_TILES
    std::optional<amx::Tiles> tiles;
    if (amx::available()) tiles.emplace();
#endif
    for (size_t step = 0; step < steps; ++step) {
      for (size_t i = 0; i < parts; ++i) {
        const size_t part = (own + i) % parts;
        size_t due = step;
        if (!marks[part].step.compare_exchange_strong(due, step + 1)) continue;
        body(step, part);
        done.fetch_add(1, std::memory_order_acq_rel);
      }
      wait_for(done, (step + 1) * parts);
    }
  });
}

// --- products of states and the recurrent weight ---------------------------------------------------------------------

// 32 sequences times 32 units, in four tiles.
struct Sums {
  alignas(64) float at[4][amx::kSide * amx::kSide];
  const float* row(size_t r, size_t half) const { return at[r / amx::kSide * 2 + half] + r % amx::kSide * amx::kSide; }
  float* row(size_t r, size_t half) { return at[r / amx::kSide * 2 + half] + r % amx::kSide * amx::kSide; }
};

// A block of a line: `rows` sequences starting with `row`, `units` units starting with `unit`.
struct Place {
  size_t line, block, row, rows, unit, units;
  size_t lanes(size_t half) const { return units > half * kLanes ? std::min(kLanes, units - half * kLanes) : 0; }
};

// Forward, states are h [N, H], and h Rᵀ is computed gate by gate. Backward, states are the cotangents d of the gates
// [N, G·H], and d R is computed. States are numbered; 0 is the state before all steps.
template <size_t kParts>
class Recurrence {
 public:
  Recurrence(const float* weight, size_t gates, size_t units, size_t rows, size_t states, bool back)
      : weight_(weight),
        gates_(gates),
        units_(units),
        rows_(rows),
        back_(back),
        lines_(up(rows, kRows)),
        blocks_(up(units, kUnits)),
        parts_(std::max<size_t>(1, std::min(threads(), lines_ * blocks_))),
        strange_(states * lines_) {
    if (!amx::available()) return;
    const size_t of_weight = blocks_ * (back ? 1 : gates) * 2 * steps() * kStep;
    of_state_ = lines_ * 2 * steps() * kStep;
    packed_weight_ = amx::scratch(of_weight + 2 * of_state_);
    packed_states_ = packed_weight_ + of_weight;
  }

  size_t lines() const { return lines_; }
  size_t parts() const { return parts_; }

  // Calls do_it(place) for every block of a part.
  template <class Do>
  void each(size_t part, const Do& do_it) const {
    const size_t all = lines_ * blocks_;
    for (size_t i = all * part / parts_; i < all * (part + 1) / parts_; ++i) {
      const size_t line = i % lines_, block = i / lines_;
      do_it(Place{line, block, line * kRows, std::min(kRows, rows_ - line * kRows), block * kUnits,
                  std::min(kUnits, units_ - block * kUnits)});
    }
  }

  // Packs the part of R that a block needs; must be called once for each block.
  void pack_weight(const Place& place) {
#if GRADGRAPH_TILES
    if (place.line != 0 || packed_weight_ == nullptr) return;
    amx::Watch watch;
    uint16_t* out = tiles_of(place, 0);
    for (size_t gate = 0; gate < (back_ ? 1 : gates_); ++gate) {
      for (size_t half = 0; half < 2; ++half) {
        for (size_t step = 0; step < steps(); ++step, out += kStep) {
          back_ ? pack_back(place, half, step, out, watch) : pack_forward(place, gate, half, step, out, watch);
        }
      }
    }
    if (watch.found()) strange_weight_ = true;
#else
    (void)place;
#endif
  }

  // A row of a block of a state, of one gate: 32 units, with zeros after the last.
  void write(size_t state, const Place& place, size_t row, size_t gate, const float* values) {
#if GRADGRAPH_TILES
    if (packed_weight_ == nullptr) return;
    const size_t step = back_ ? place.block * gates_ + gate : place.block;
    uint16_t* tiles = rows_of(state, place.line, row / amx::kSide) + step * kStep;
    amx::Watch watch;
    amx::store_row<kParts>(_mm512_loadu_ps(values), _mm512_loadu_ps(values + kLanes), row % amx::kSide, tiles, watch);
    if (watch.found()) strange_[state * lines_ + place.line] = true;
#else
    (void)state, (void)place, (void)row, (void)gate, (void)values;
#endif
  }

  // Adds the contribution of a state to a block of one gate or, backward, to a block of h. `values`: the numbers of the
  // state, which are read where tiles cannot be used.
  void multiply(size_t state, const float* values, const Place& place, size_t gate, Sums& sums) const {
#if GRADGRAPH_TILES
    if (packed_weight_ != nullptr && !strange_weight_ && !strange_[state * lines_ + place.line]) {
      const uint16_t *a = rows_of(state, place.line, 0), *b = tiles_of(place, gate);
      return (place.rows > amx::kSide ? by_tiles<true> : by_tiles<false>)(a, b, steps(), sums);
    }
#endif
    (void)state;
    plain(values, place, gate, sums);
  }

 private:
  static constexpr size_t kStep = amx::kStep<kParts>;

  // Consecutive tile products, of 32 terms each.
  size_t steps() const { return blocks_ * (back_ ? gates_ : 1); }
  size_t terms() const { return units_ * (back_ ? gates_ : 1); }

  uint16_t* tiles_of(const Place& place, size_t gate) const {
    return packed_weight_ + (place.block * (back_ ? 1 : gates_) + gate) * 2 * steps() * kStep;
  }
  uint16_t* rows_of(size_t state, size_t line, size_t half) const {
    return packed_states_ + state % 2 * of_state_ + (line * 2 + half) * steps() * kStep;
  }

  void plain(const float* values, const Place& place, size_t gate, Sums& sums) const {
    const size_t line = back_ ? 1 : units_, term = back_ ? units_ : 1;  // strides of R along units and terms
    for (size_t r = 0; r < place.rows; ++r) {
      const float* state = values + (place.row + r) * terms();
      for (size_t j = 0; j < place.units; ++j) {
        const float* weight = weight_ + (gate * units_ + place.unit + j) * line;
        double sum = 0;
        for (size_t k = 0; k < terms(); ++k) sum += static_cast<double>(state[k]) * weight[k * term];
        sums.row(r, j / kLanes)[j % kLanes] = static_cast<float>(sum);
      }
    }
  }

#if GRADGRAPH_TILES
  // Columns are rows of R: 16 of them, with 32 terms each, transposed.
  void pack_forward(const Place& place, size_t gate, size_t half, size_t step, uint16_t* out, amx::Watch& watch) const {
    const size_t term = step * kUnits, terms = units_ - term, lanes = place.lanes(half);
    const __mmask16 near = amx::first(terms), far = amx::first(terms > kLanes ? terms - kLanes : 0);
    const float* from = weight_ + (gate * units_ + place.unit + half * kLanes) * units_ + term;
    __m512i rows[kParts][amx::kSide];
    for (size_t i = 0; i < amx::kSide; ++i) {
      const float* row = from + i * units_;
      const __m512 low = _mm512_maskz_loadu_ps(i < lanes ? near : 0, row);
      const __m512 high = _mm512_maskz_loadu_ps(i < lanes ? far : 0, row + kLanes);
      const amx::Pairs<kParts> pairs = amx::split<kParts>(low, high, watch);
      for (size_t part = 0; part < kParts; ++part) rows[part][i] = pairs.part[part];
    }
    for (auto& part : rows) {
      transpose(part);
      for (size_t i = 0; i < amx::kSide; ++i, out += amx::kDepth) _mm512_store_si512(out, part[i]);
    }
  }

  // Terms are rows of R: 32 of one gate.
  void pack_back(const Place& place, size_t half, size_t step, uint16_t* out, amx::Watch& watch) const {
    const size_t term = step / gates_ * kUnits, terms = units_ - term;
    const __mmask16 lanes = amx::first(place.lanes(half));
    const float* from = weight_ + (step % gates_ * units_ + term) * units_ + place.unit + half * kLanes;
    for (size_t i = 0; i < amx::kSide; ++i) {
      const __m512 low = _mm512_maskz_loadu_ps(i < terms ? lanes : 0, from + i * units_);
      const __m512 high = _mm512_maskz_loadu_ps(i + kLanes < terms ? lanes : 0, from + (i + kLanes) * units_);
      amx::store_row<kParts>(low, high, i, out, watch);
    }
  }

  // Sums of 128 terms are added to each other, small products first, so that they are as accurate as in float32.
  template <bool kTwo>
  static void by_tiles(const uint16_t* a, const uint16_t* b, size_t steps, Sums& sums) {
    constexpr size_t kFew = 4;
    for (size_t step = 0; step < steps; step += kFew) {
      const size_t count = std::min(kFew, steps - step), at = step * kStep;
      Sums made;
      Sums& out = step == 0 ? sums : made;
      amx::memory_is_used();
      multiply_tiles<kTwo>(a + at, b + at, steps * kStep, count);
      _tile_stored(0, out.at[0], kLine);
      _tile_stored(1, out.at[1], kLine);
      if constexpr (kTwo) {
        _tile_stored(2, out.at[2], kLine);
        _tile_stored(3, out.at[3], kLine);
      }
      amx::memory_is_used();
      if (step == 0) continue;
      for (size_t i = 0; i < (kTwo ? 4 : 2) * amx::kSide * amx::kSide; i += amx::kSide) {
        float* sum = sums.at[0] + i;
        _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_load_ps(made.at[0] + i)));
      }
    }
  }

  static constexpr int kLine = 64;  // bytes per row of a tile

  // Tiles 0 to 3 contain sums, 4 and 5 rows of the state, 6 and 7 columns of the weight, which are `apart` from each
  // other.
  template <bool kTwo>
  static void multiply_tiles(const uint16_t* a, const uint16_t* b, size_t apart, size_t steps) {
    const auto load_a = [&](size_t step, size_t part) {
      const uint16_t* tile = a + step * kStep + part * amx::kTile;
      _tile_loadd(4, tile, kLine);
      if constexpr (kTwo) _tile_loadd(5, tile + apart, kLine);
    };
    const auto load_b = [&](size_t step, size_t part) {
      const uint16_t* tile = b + step * kStep + part * amx::kTile;
      _tile_loadd(6, tile, kLine);
      _tile_loadd(7, tile + apart, kLine);
    };
    const auto fetch = [&](size_t step, size_t part, size_t panel) {  // prefetches into the first-level cache
      const size_t from = step * kStep + part * amx::kTile + panel * apart;
      for (size_t line = from; line < from + amx::kTile; line += amx::kDepth) {
        _mm_prefetch(reinterpret_cast<const char*>(a + line), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(b + line), _MM_HINT_T0);
      }
    };
    const auto multiply = [&](size_t step, size_t i) {
      constexpr size_t kLast = 2 * kParts - 2;  // the number of products that use a step for the first time
      if (i <= kLast) fetch(step + 1, i / 2, i % 2);
      if (i == kLast) fetch(step + 1, kParts - 1, 1);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTwo) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    amx::multiply_steps<kParts>(steps, load_a, load_b, multiply);
  }
#endif

  const float* weight_;
  size_t gates_, units_, rows_;
  bool back_;
  size_t lines_, blocks_, parts_;
  std::vector<std::atomic<bool>> strange_;  // states and lines that contain a number that cannot be divided into parts
  std::atomic<bool> strange_weight_{false};
  size_t of_state_ = 0;
  uint16_t* packed_weight_ = nullptr;  // null without tiles
  uint16_t* packed_states_ = nullptr;
};

// Calls do_it(j) for each of up to 16 units: loops of a constant length are vectorised if `do_it` is inlined.
#define GRADGRAPH_INLINE __attribute__((always_inline))
template <class Do>
inline void for_lanes(size_t count, const Do& do_it) {
  if (count == kLanes) {
#pragma omp simd
    for (size_t j = 0; j < kLanes; ++j) do_it(j);
  } else {
    for (size_t j = 0; j < count; ++j) do_it(j);
  }
}

// Up to 32 units of one row.
inline void copy(const float* from, float* to, const Place& place) {
  for (size_t half = 0; half < 2; ++half, from += kLanes, to += kLanes) {
    for_lanes(place.lanes(half), [=](size_t j) { to[j] = from[j]; });
  }
}

}  // namespace gradgraph::recurrent
