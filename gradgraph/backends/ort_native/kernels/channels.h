// Tensors whose second axis is the channels, in either layout: [N, C, pixels], or in blocks [N, C/b, pixels, b].
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernel.h"

namespace gradgraph {

// The number of channels of one pixel that are contiguous: 1, 8 or 16.
template <size_t B>
struct Lanes {
  typedef float type __attribute__((vector_size(B * sizeof(float))));
};

template <size_t B>
typename Lanes<B>::type load(const float* from) {
  typename Lanes<B>::type lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

template <size_t B>
void store(float* to, const typename Lanes<B>::type& lanes) {
  std::memcpy(to, &lanes, sizeof lanes);
}

// a·b + c, rounded once with FMA. Written as a sum, a compiler decides anew for each copy of a loop whether to fuse it, so
// that loops with and without an activation differed in the last bit.
template <class V>
V fused(const V& a, const V& b, const V& c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
  if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
  return a * b + c;
}

// Consecutive pixels per vector in the plain layout: one register. GCC keeps wider vectors in memory (with AVX2, 16
// lanes take 2 to 7 times as long as 8).
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr size_t kPixels = 8;
#else
constexpr size_t kPixels = 16;
#endif

// The lanes of a vector in a row: in blocks, the channels of a pixel; in the plain layout, consecutive pixels, at the
// end of a row possibly fewer.
template <size_t B>
struct Place {
  static constexpr size_t kLanes = B == 1 ? kPixels : B;
  using V = typename Lanes<kLanes>::type;

  size_t begin, count;

  // The numbers per channel for the row's channels, starting at its first channel.
  static V channels(const float* from) { return B == 1 ? V{} + *from : gradgraph::load<kLanes>(from); }

  // Lanes after the end of the row are `rest`.
  V load(const float* row, V rest = V{}) const {
    row += begin;
    if (is_whole()) return gradgraph::load<kLanes>(row);
#if defined(__AVX512F__)
    if constexpr (B == 1) return (V)_mm512_mask_loadu_ps((__m512)rest, mask(), row);
#elif defined(__AVX2__)
    if constexpr (B == 1) return (V)_mm256_blendv_ps((__m256)rest, _mm256_maskload_ps(row, mask()), (__m256)mask());
#endif
    for (size_t i = 0; i < count; ++i) rest[i] = row[i];
    return rest;
  }

  void store(float* row, const V& lanes) const {
    row += begin;
    if (is_whole()) return gradgraph::store<kLanes>(row, lanes);
#if defined(__AVX512F__)
    if constexpr (B == 1) return _mm512_mask_storeu_ps(row, mask(), (__m512)lanes);
#elif defined(__AVX2__)
    if constexpr (B == 1) return _mm256_maskstore_ps(row, mask(), (__m256)lanes);
#endif
    for (size_t i = 0; i < count; ++i) row[i] = lanes[i];
  }

 private:
  bool is_whole() const { return B > 1 || count == kLanes; }
#if defined(__AVX512F__)
  uint16_t mask() const { return static_cast<uint16_t>((1u << count) - 1); }
#elif defined(__AVX2__)
  __m256i mask() const {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
#endif
};

// Calls body(place) for the numbers [begin, end) of a row.
template <size_t B, class Body>
void walk(size_t begin, size_t end, const Body& body) {
  constexpr size_t L = Place<B>::kLanes;
  for (; begin + L <= end; begin += L) body(Place<B>{begin, L});
  if constexpr (B == 1) {
    if (begin < end) body(Place<B>{begin, end - begin});
  }
}

// Adds to B sums: lane by lane, or pixels of the same channel.
template <size_t B>
void add_lanes(const typename Place<B>::V& lanes, double* sums) {
  if constexpr (B > 1) {
    for (size_t lane = 0; lane < B; ++lane) sums[lane] += lanes[lane];
  } else {
    double pixels[Place<B>::kLanes];
    for (size_t lane = 0; lane < Place<B>::kLanes; ++lane) pixels[lane] = lanes[lane];
    for (size_t half = Place<B>::kLanes / 2; half > 0; half /= 2) {
      for (size_t lane = 0; lane < half; ++lane) pixels[lane] += pixels[lane + half];
    }
    *sums += *pixels;
  }
}

// Rows: the contiguous pixels of one image, of one channel or one block of channels.
struct Maps {
  size_t images, channels, pixels, block;

  Maps(const Dims& dims, size_t block_size) : images(0), channels(0), pixels(0), block(block_size) {
    if (dims.rank < 3) throw std::runtime_error("a tensor with channels should have three axes or more");
    images = static_cast<size_t>(dims.size[0]);
    channels = static_cast<size_t>(dims.size[1]);
    pixels = dims.count(2, dims.rank);
    if (channels % block) throw std::runtime_error("its channels are no whole number of blocks");
  }

  size_t groups() const { return channels / block; }
  size_t rows() const { return images * groups(); }
  size_t row_size() const { return pixels * block; }
  size_t first_channel(size_t row) const { return row % groups() * block; }
  // The number of rows that one thread processes at a time.
  size_t grain() const { return std::max<size_t>(1, kGrain / std::max<size_t>(1, row_size())); }
  size_t channel_grain() const { return std::max<size_t>(1, kGrain / 16 / std::max<size_t>(1, images)); }
};

// Calls body(std::integral_constant<size_t, B>) for the block size of `maps`.
template <class Body>
void by_block(size_t block, const Body& body) {
  switch (block) {
    case 1: return body(std::integral_constant<size_t, 1>());
    case 8: return body(std::integral_constant<size_t, 8>());
    case 16: return body(std::integral_constant<size_t, 16>());
    default: throw std::runtime_error("there is no kernel for blocks of " + std::to_string(block) + " channels");
  }
}

}  // namespace gradgraph
