// Tensors whose second axis is the channels, in either layout: [N, C, pixels], or in blocks [N, C/b, pixels, b].
#pragma once

#include <cstring>
#include <vector>

#include "kernel.h"

namespace gradgraph {

// As many channels of one pixel as lie side by side: 1, 8 or 16.
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

// Rows: the pixels of one image that lie together, of one channel or one block of channels.
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
  // Rows that one thread takes at a time.
  size_t grain() const { return std::max<size_t>(1, kGrain / std::max<size_t>(1, row_size())); }
  size_t channel_grain() const { return std::max<size_t>(1, kGrain / 16 / std::max<size_t>(1, images)); }
};

// body(std::integral_constant<size_t, B>) for the block size of `maps`
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
