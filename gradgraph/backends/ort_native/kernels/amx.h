// Products of float32 matrices on the bfloat16 tiles of AMX, as accurate as float32, or less accurate on request.
//
// A float32 is the sum of three bfloat16 numbers, its parts: a = a₁ + a₂ + a₃, with 8 of its 24 bits each. The product
// of two such sums has nine products of parts. Six of them are computed:  a·b ≈ a₁b₁ + a₁b₂ + a₂b₁ + a₁b₃ + a₂b₂ +
// a₃b₁.  The other three are below 2⁻²² of a·b, with either sign. Tiles accumulate in float32 and flush denormals to
// zero. A number that is not finite, or that bfloat16 would round to infinity, cannot be divided into parts; `Watch`
// detects such numbers.
//
// Six products at the speed of tiles are two to three times as fast as one with AVX512. With two parts there are three
// products:  a·b ≈ a₁b₁ + a₁b₂ + a₂b₁,  where a₂ is rounded; the error is below 2⁻¹⁵ of a·b. The number of parts is a
// template parameter of kernels; a node chooses it (`parts_of`).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel.h"
#include "transpose.h"

#if defined(GRADGRAPH_TILES)  // 0: tiles must not be used
#elif defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define GRADGRAPH_TILES 1
#include <immintrin.h>
#else
#define GRADGRAPH_TILES 0
#endif

namespace gradgraph::amx {

// Whether the library was compiled for tiles, and the system lets this process use them.
bool available();

constexpr size_t kSide = 16;   // rows of a tile, and its columns of float32
constexpr size_t kDepth = 32;  // terms that one tile product sums: the bfloat16 numbers in a row of a tile
constexpr size_t kTile = kSide * kDepth;  // bfloat16 numbers in a tile, 1 KiB
template <size_t kParts>
constexpr size_t kStep = kParts * kTile;  // numbers in a step: the tiles, one per part, for 16 x 32 float32 numbers

// Returns the number of parts that a node requests: 3 by default, or 2.
inline size_t parts_of(const Attributes& attributes) {
  const int64_t parts = attributes.integer("parts", 3);
  if (parts != 2 && parts != 3) throw std::runtime_error("its parts should be 2 or 3");
  return static_cast<size_t>(parts);
}

constexpr size_t up(size_t count, size_t unit) { return (count + unit - 1) / unit; }

// Memory for packed factors, in large pages if it is large enough.
class Memory {
 public:
  Memory() = default;
  ~Memory() { release(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint16_t* at_least(size_t count);  // growing loses the content
  void release();

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory of the calling thread, which is reused between calls; `slot` distinguishes several such memories.
uint16_t* scratch(size_t count, size_t slot = 0);

#if GRADGRAPH_TILES

// A compiler barrier: compilers do not know that tile instructions read and write memory.
inline void memory_is_used() { __asm__ volatile("" ::: "memory"); }

// Configures the tiles of this thread during its lifetime: eight tiles of 16 rows of 64 bytes.
class Tiles {
 public:
  Tiles() {
    memory_is_used();
    _tile_loadconfig(&kConfig);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static constexpr Config kConfig{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};

// Detects numbers that cannot be divided into parts: what remains of them after subtracting parts is not finite.
class Watch {
 public:
  void see(__m512 left) { sum_ = _mm512_fmadd_ps(left, _mm512_setzero_ps(), sum_); }
  bool found() const { return _mm512_cmp_ps_mask(sum_, sum_, _CMP_UNORD_Q) != 0; }

 private:
  __m512 sum_ = _mm512_setzero_ps();
};

// Two terms of each of 16 rows or columns, as tiles need them, for each part: 32 bits contain one of `low` and one of
// `high`.
template <size_t kParts>
struct Pairs {
  __m512i part[kParts];
};

template <size_t kParts>
inline Pairs<kParts> split(__m512 low, __m512 high, Watch& watch) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000)), half = _mm512_set1_epi32(0x8000);
  const auto bits = [](__m512 x) { return _mm512_castps_si512(x); };
  // rounded to nearest (halves away from zero), or truncated: the sign of the second part is random, so errors cancel
  const auto rounded = [&](__m512 x) { return _mm512_and_si512(_mm512_add_epi32(bits(x), half), upper); };
  const auto cut = [&](__m512 x) { return _mm512_and_si512(bits(x), upper); };
  const auto paired = [](__m512i l, __m512i h) { return _mm512_or_si512(_mm512_srli_epi32(l, 16), h); };
  const auto less = [](__m512 x, __m512i part) { return _mm512_sub_ps(x, _mm512_castsi512_ps(part)); };

  Pairs<kParts> pairs;
  const __m512i low_1 = rounded(low), high_1 = rounded(high);
  pairs.part[0] = paired(low_1, high_1);
  low = less(low, low_1), high = less(high, high_1);
  if constexpr (kParts == 2) {
    pairs.part[1] = paired(rounded(low), rounded(high));
  } else {
    const __m512i low_2 = cut(low), high_2 = cut(high);
    pairs.part[1] = paired(low_2, high_2);
    low = less(low, low_2), high = less(high, high_2);
    pairs.part[2] = paired(bits(low), cut(high));  // the last 8 of the 24 bits
  }
  watch.see(low);
  watch.see(high);
  return pairs;
}

// Writes row `row` of the tiles, one per part, that start at `tiles`.
template <size_t kParts>
inline void store_row(__m512 low, __m512 high, size_t row, uint16_t* tiles, Watch& watch) {
  const Pairs<kParts> pairs = split<kParts>(low, high, watch);
  for (size_t part = 0; part < kParts; ++part) {
    _mm512_store_si512(tiles + part * kTile + row * kDepth, pairs.part[part]);
  }
}

// Computes the tile products of `steps` steps: `load_a(step, part)` and `load_b(step, part)` are called in the order
// with the fewest loads, `multiply(step, i)` for the i-th product of a step. With three parts, the product of the first
// parts, the largest, comes last: so the small ones are added while sums are small, and lose less.
template <size_t kParts, class A, class B, class Multiply>
[[gnu::always_inline]] inline void multiply_steps(size_t steps, const A& load_a, const B& load_b, const Multiply& multiply) {
  for (size_t i = 0; i < steps; ++i) {
    if constexpr (kParts == 3) {
      load_a(i, 0), load_b(i, 2), multiply(i, 0);
      load_b(i, 1), multiply(i, 1);
      load_a(i, 1), multiply(i, 2);
      load_b(i, 0), multiply(i, 3);
      load_a(i, 2), multiply(i, 4);
    } else {
      load_a(i, 0), load_b(i, 1), multiply(i, 0);
      load_b(i, 0), multiply(i, 1);
      load_a(i, 1), multiply(i, 2);
    }
  }
  if constexpr (kParts == 3) {
    for (size_t i = 0; i < steps; ++i) load_a(i, 0), load_b(i, 0), multiply(i, 5);
  }
}

// A mask of the lanes below `count`.
inline __mmask16 first(size_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << count) - 1);
}

#endif

}  // namespace gradgraph::amx
