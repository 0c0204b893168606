// A tile of 16 x 16 (AVX512) or 8 x 8 (AVX2) times 32 bits, transposed in place.
#pragma once

#if defined(__AVX512F__)
#include <cstddef>
#include <immintrin.h>

namespace gradgraph {

inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (size_t i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (size_t i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (size_t half = 0; half < 16; half += 8) {
    for (size_t i = half; i < half + 4; ++i) {
      t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    }
  }
  for (size_t i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Transposes 16 x 16 numbers, whose rows are `stride` apart, to rows that are `to_stride` apart.
//
// Each load puts four numbers of rows i, i + 4, i + 8 and i + 12 side by side, so that half of the shuffles suffice.
inline void transpose(const float* from, std::size_t stride, float* to, std::size_t to_stride) {
  for (std::size_t column = 0; column < 16; column += 4, from += 4, to += 4 * to_stride) {
    __m512 r[4];
    for (std::size_t i = 0; i < 4; ++i) {
      const float* at = from + i * stride;
      r[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
      r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(at + 4 * stride), 1);
      r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(at + 8 * stride), 2);
      r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(at + 12 * stride), 3);
    }
    const __m512 low = _mm512_unpacklo_ps(r[0], r[1]), high = _mm512_unpackhi_ps(r[0], r[1]);
    const __m512 low2 = _mm512_unpacklo_ps(r[2], r[3]), high2 = _mm512_unpackhi_ps(r[2], r[3]);
    _mm512_storeu_ps(to, _mm512_shuffle_ps(low, low2, 0x44));
    _mm512_storeu_ps(to + to_stride, _mm512_shuffle_ps(low, low2, 0xee));
    _mm512_storeu_ps(to + 2 * to_stride, _mm512_shuffle_ps(high, high2, 0x44));
    _mm512_storeu_ps(to + 3 * to_stride, _mm512_shuffle_ps(high, high2, 0xee));
  }
}

}  // namespace gradgraph

#elif defined(__AVX2__)
#include <cstddef>
#include <immintrin.h>

namespace gradgraph {

inline void transpose(__m256i (&r)[8]) {
  __m256i t[8];
  for (size_t i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (size_t i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (size_t i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  for (size_t i = 0; i < 8; ++i) r[i] = t[i];
}

// Transposes 8 x 8 numbers, whose rows are `stride` apart, to rows that are `to_stride` apart.
//
// Each load puts four numbers of rows i and i + 4 side by side, which takes fewer shuffles.
inline void transpose(const float* from, std::size_t stride, float* to, std::size_t to_stride) {
  for (std::size_t column = 0; column < 8; column += 4, from += 4, to += 4 * to_stride) {
    __m256 r[4];
    for (std::size_t i = 0; i < 4; ++i) {
      const float* at = from + i * stride;
      r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at)), _mm_loadu_ps(at + 4 * stride), 1);
    }
    const __m256 low = _mm256_unpacklo_ps(r[0], r[1]), high = _mm256_unpackhi_ps(r[0], r[1]);
    const __m256 low2 = _mm256_unpacklo_ps(r[2], r[3]), high2 = _mm256_unpackhi_ps(r[2], r[3]);
    _mm256_storeu_ps(to, _mm256_shuffle_ps(low, low2, 0x44));
    _mm256_storeu_ps(to + to_stride, _mm256_shuffle_ps(low, low2, 0xee));
    _mm256_storeu_ps(to + 2 * to_stride, _mm256_shuffle_ps(high, high2, 0x44));
    _mm256_storeu_ps(to + 3 * to_stride, _mm256_shuffle_ps(high, high2, 0xee));
  }
}

}  // namespace gradgraph

#endif
