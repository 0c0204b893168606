// Attention of one head: y = softmax(scale·q·kᵀ + mask)·v, and its gradient.
//
// What a weight is made of is kept for the way back: the largest score of a query, and one over the sum of exponentials;
// there scores are computed again. attention_tiles.h does it with AMX, attention_few.h for heads of few numbers, and
// attention_vectors.h for all others.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel.h"

namespace gradgraph::attention {

using std::size_t;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of one head, whose numbers lie side by side.
template <class T>
struct Rows {
  T* at;
  size_t stride;
  T* operator[](size_t row) const { return at + row * stride; }
};

// What is added to the scores of one head, or, `chosen`, put in their place where it is not 0.
struct Mask {
  const float* at;  // may be missing
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

// What is kept of the scores of a query.
struct Kept {
  float largest, share;  // one over the sum of exponentials; 0 where all weights are to be 0
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
