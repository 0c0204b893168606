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
inline void transpose(const float* from, std::size_t stride, float* to, std::size_t to_stride) {
  __m512i r[16];
  for (std::size_t i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + i * stride);
  transpose(r);
  for (std::size_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * to_stride, r[i]);
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

}  // namespace gradgraph

#endif
