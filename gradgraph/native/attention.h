// Attention of one head: y = softmax(scale·q·kᵀ + mask)·v, and its gradient.
//
// What a weight is made of is kept for the way back: the largest score of a query, and one over the sum of exponentials;
// there scores are computed again. Here it is computed query by query; attention_tiles.h does it with AMX.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elementary.h"
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
  float largest, share;  // one over the sum of exponentials
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

inline float dot(const float* a, const float* b, size_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

inline void add_scaled(float factor, const float* x, float* y, size_t count) {
#pragma omp simd
  for (size_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

inline void clear(const Rows<float>& rows, size_t count, size_t size) {
  for (size_t i = 0; i < count; ++i) std::fill_n(rows[i], size, 0.0f);
}

inline void plain(const Result& result) {
  const Head& h = result.head;
  std::vector<float> weights(h.keys);
  clear(result.y, h.queries, h.value_size);
  for (size_t i = 0; i < h.queries; ++i) {
    float most = -kInfinity, sum = 0;
    for (size_t j = 0; j < h.keys; ++j) {
      weights[j] = h.mask.apply(h.scale * dot(h.q[i], h.k[j], h.size), i, j);
      if (!(weights[j] <= most)) most = weights[j];
    }
    for (float& weight : weights) sum += weight = exp_below(weight - most);
    result.kept[i] = {most, 1.0f / sum};
    for (size_t j = 0; j < h.keys; ++j) add_scaled(weights[j] * result.kept[i].share, h.v[j], result.y[i], h.value_size);
  }
}

inline void plain(const Gradient& g) {
  const Head& h = g.head;
  clear(g.dq, h.queries, h.size), clear(g.dk, h.keys, h.size), clear(g.dv, h.keys, h.value_size);
  for (size_t i = 0; i < h.queries; ++i) {
    const float along = dot(g.dy[i], g.y[i], h.value_size);
    for (size_t j = 0; j < h.keys; ++j) {
      const float score = h.mask.apply(h.scale * dot(h.q[i], h.k[j], h.size), i, j);
      const float weight = exp_below(score - g.kept[i].largest) * g.kept[i].share;
      const bool hidden = h.mask.at != nullptr && h.mask.chosen && h.mask(i, j) != 0.0f;
      const float slope = hidden ? 0.0f : weight * (dot(g.dy[i], h.v[j], h.value_size) - along) * h.scale;
      add_scaled(weight, g.dy[i], g.dv[j], h.value_size);
      add_scaled(slope, h.k[j], g.dq[i], h.size);
      add_scaled(slope, h.q[i], g.dk[j], h.size);
    }
  }
}

}  // namespace gradgraph::attention
