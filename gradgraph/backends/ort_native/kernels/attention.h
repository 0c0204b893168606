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
#include "sums.h"

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

// Sums over queries or keys: in double, as one number after the other is added.
class SumsOfRows {
 public:
  SumsOfRows(size_t rows, size_t size) : size_(size), sums_(rows * size) {}
  void add(size_t row, float factor, const float* x) {
    double* const sums = sums_.data() + row * size_;
#pragma omp simd
    for (size_t i = 0; i < size_; ++i) sums[i] += static_cast<double>(factor) * x[i];
  }
  // The row `row` to `out`; from there on it is zero again.
  void take(size_t row, float* out) {
    double* const sums = sums_.data() + row * size_;
    for (size_t i = 0; i < size_; ++i) out[i] = static_cast<float>(sums[i]), sums[i] = 0;
  }

 private:
  size_t size_;
  std::vector<double> sums_;
};

inline void plain(const Result& result) {
  const Head& h = result.head;
  std::vector<float> weights(h.keys);
  SumsOfRows y(1, h.value_size);
  for (size_t i = 0; i < h.queries; ++i) {
    float most = -kInfinity;
    double sum = 0;
    for (size_t j = 0; j < h.keys; ++j) {
      weights[j] = h.mask.apply(h.scale * dot(h.q[i], h.k[j], h.size), i, j);
      if (!(weights[j] <= most)) most = weights[j];
    }
    for (float& weight : weights) sum += weight = exp_below(weight - most);
    result.kept[i] = {most, 1.0f / static_cast<float>(sum)};
    for (size_t j = 0; j < h.keys; ++j) y.add(0, weights[j] * result.kept[i].share, h.v[j]);
    y.take(0, result.y[i]);
  }
}

inline void plain(const Gradient& g) {
  const Head& h = g.head;
  SumsOfRows dq(1, h.size), dk(h.keys, h.size), dv(h.keys, h.value_size);
  for (size_t i = 0; i < h.queries; ++i) {
    const float along = dot(g.dy[i], g.y[i], h.value_size);
    for (size_t j = 0; j < h.keys; ++j) {
      const float score = h.mask.apply(h.scale * dot(h.q[i], h.k[j], h.size), i, j);
      const float weight = exp_below(score - g.kept[i].largest) * g.kept[i].share;
      const bool hidden = h.mask.at != nullptr && h.mask.chosen && h.mask(i, j) != 0.0f;
      const float slope = hidden ? 0.0f : weight * (dot(g.dy[i], h.v[j], h.value_size) - along) * h.scale;
      dv.add(j, weight, g.dy[i]);
      dq.add(0, slope, h.k[j]);
      dk.add(j, slope, h.q[i]);
    }
    dq.take(0, g.dq[i]);
  }
  for (size_t j = 0; j < h.keys; ++j) dk.take(j, g.dk[j]), dv.take(j, g.dv[j]);
}

}  // namespace gradgraph::attention
