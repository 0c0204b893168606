// Attention of one head: y = softmax(scale·q·kᵀ + mask)·v, and its gradient.
//
// The forward pass saves two numbers per query: its largest score, and the inverse of the sum of exponentials. From
// these the backward pass recomputes scores. attention_tiles.h implements it with AMX, attention_few.h for small heads,
// and attention_vectors.h for all others.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel.h"

namespace gradgraph::attention {

using std::size_t;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The rows of one head, whose numbers are contiguous.
template <class T>
struct Rows {
  T* at;
  size_t stride;
  T* operator[](size_t row) const { return at + row * stride; }
};

// What is added to the scores of one head, or, with `chosen`, replaces them where it is not 0.
struct Mask {
  const float* at;  // null if there is no mask
  size_t row, column;
  bool chosen;
  float operator()(size_t query, size_t key) const { return at[query * row + key * column]; }
  float apply(float score, size_t query, size_t key) const {
    if (at == nullptr) return score;
    const float mask = (*this)(query, key);
    return chosen ? (mask != 0.0f ? mask : score) : score + mask;
  }
};

struct Head {
  size_t queries, keys, size, value_size;
  float scale;
  Mask mask;
  Rows<const float> q, k, v;
};

// What is saved of the scores of a query.
struct Kept {
  float largest, share;  // share: 1 / the sum of exponentials; 0 if all weights must be 0
};

struct Result {
  Head head;
  Rows<float> y;
  Kept* kept;
};

struct Gradient {
  Head head;
  Rows<const float> y, dy;
  const Kept* kept;
  Rows<float> dq, dk, dv;
};

}  // namespace gradgraph::attention
