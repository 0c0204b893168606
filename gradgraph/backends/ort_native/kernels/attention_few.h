// Attention of one small head without a mask, with vectors.
//
// A vector contains one number of many queries (forward) or of many keys (backward). So all numbers of these queries or
// keys stay in registers while the kernel iterates over the others, and scores need only a small buffer in the
// first-level cache. Scores are in units of log 2, as powers of 2 are cheaper than those of e.
#pragma once

#include "attention_vectors.h"

namespace gradgraph::attention {

using products::Lanes, products::lanes;
typedef int32_t Bits __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

#if defined(__AVX512F__)
constexpr size_t kMostNumbers = 16;  // head size: its numbers take half of the registers
#else
constexpr size_t kMostNumbers = 8;
#endif
constexpr size_t kPiece = 64;  // keys (forward), or keys and queries (backward), whose scores are buffered
constexpr float kLog2OfE = 1.44269504f, kLogOf2 = 0.693147181f;

// 2^x for x <= 0, relative error 2e-7; 0 below the smallest normal number, NaN of NaN.
inline Lanes power_of_two(Lanes x) {
  constexpr float kRound = 12582912.0f;  // 1.5·2^23: a number added to it loses its fraction
  const auto none = x < -126.0f;
  x = none ? Lanes{} : x;
  const Lanes whole = (x + kRound) - kRound, r = x - whole;
  Lanes p = r * 0.00132647273f + 0.00967151299f;
  p = p * r + 0.0555073358f;
  p = p * r + 0.240222424f;
  p = p * r + 0.693147004f;
  p = p * r + 1.0f;
  const Bits raised = reinterpret_cast<Bits>(p) + (__builtin_convertvector(whole, Bits) << 23);
  return none ? Lanes{} : reinterpret_cast<Lanes>(raised);
}

// The dot product of the `kSize` numbers of each lane and a row.
template <size_t kSize>
inline Lanes along(const Lanes (&numbers)[kSize], const float* row) {
  Lanes sum = numbers[0] * row[0];
  for (size_t d = 1; d < kSize; ++d) sum += numbers[d] * row[d];
  return sum;
}

template <size_t kSize>
inline void add(Lanes (&sums)[kSize], const float* row, Lanes factor) {
  for (size_t d = 0; d < kSize; ++d) sums[d] += factor * row[d];
}

// Loads `kSize` numbers of each of `kLanes` rows, starting with row `first`, times `scale`; zeros where there are none.
template <size_t kSize>
inline void load(const Rows<const float>& x, size_t first, size_t count, size_t size, float scale, Lanes (&numbers)[kSize]) {
  for (Lanes& all : numbers) all = Lanes{};
  for (size_t r = 0; r < std::min(kLanes, count - first); ++r) {
    for (size_t d = 0; d < size; ++d) numbers[d][r] = x[first + r][d] * scale;
  }
}

// Copies rows of `kSize` numbers, contiguously, times `scale`.
template <size_t kSize>
inline void pack(const Rows<const float>& x, size_t count, size_t size, float scale, float* out) {
  for (size_t r = 0; r < count; ++r) {
    for (size_t d = 0; d < kSize; ++d) out[r * kSize + d] = d < size ? x[r][d] * scale : 0.0f;
  }
}

// The largest score in units of log 2, which both passes compute in the same way from the saved one.
inline float base_of(float largest) { return largest * kLog2OfE; }

// The forward pass, for kVectors vectors of queries at a time.
template <size_t kSize, size_t kVectors>
class ForwardOfFew {
 public:
  explicit ForwardOfFew(const Result& result) : result_(result), h_(result.head) {
    lay_out();
    space_.begin();
    lay_out();
  }

  void run() {
    pack<kSize>(h_.k, h_.keys, h_.size, 1.0f, k_);
    pack<kSize>(h_.v, h_.keys, h_.value_size, 1.0f, v_);
    for (size_t query = 0; query < h_.queries; query += kVectors * kLanes) compute(query);
  }

 private:
  void lay_out() {
    k_ = space_.numbers(h_.keys * kSize);
    v_ = space_.numbers(h_.keys * kSize);
    scores_ = space_.numbers(kPiece * kVectors * kLanes);
  }

  void compute(size_t query) {
    Lanes q[kVectors][kSize], y[kVectors][kSize]{}, most[kVectors], sum[kVectors]{};
    for (size_t i = 0; i < kVectors; ++i) {
      most[i] = Lanes{} - kInfinity;
      const size_t first = std::min(query + i * kLanes, h_.queries);
      load(h_.q, first, h_.queries, h_.size, h_.scale * kLog2OfE, q[i]);
    }
    for (size_t key = 0; key < h_.keys; key += kPiece) {
      const size_t keys = std::min(kPiece, h_.keys - key);
      Lanes before[kVectors];
      std::copy_n(most, kVectors, before);
      score(q, k_ + key * kSize, keys, most);
      for (size_t i = 0; i < kVectors; ++i) sum_up(i, key, keys, before[i], most[i], y[i], sum[i]);
    }
    for (size_t i = 0; i < kVectors; ++i) write(query + i * kLanes, y[i], most[i], sum[i]);
  }

  void score(const Lanes (&q)[kVectors][kSize], const float* k, size_t keys, Lanes (&most)[kVectors]) {
    for (size_t j = 0; j < keys; ++j) {
      for (size_t i = 0; i < kVectors; ++i) {
        const Lanes x = along(q[i], k + j * kSize);
        most[i] = x > most[i] ? x : most[i];
        lanes(scores_ + (i * kPiece + j) * kLanes) = x;
      }
    }
  }

  // The sums so far are scaled to the new largest scores.
  void sum_up(size_t i, size_t key, size_t keys, Lanes before, Lanes most, Lanes (&y)[kSize], Lanes& sum) {
    const Lanes base = most == -kInfinity ? Lanes{} : most;  // no key has been processed yet
    Lanes more[kSize]{}, total{};
    for (size_t j = 0; j < keys; ++j) {
      const Lanes weight = power_of_two(lanes(scores_ + (i * kPiece + j) * kLanes) - base);
      total += weight;
      add(more, v_ + (key + j) * kSize, weight);
    }
    const Lanes factor = power_of_two(before - base);
    sum = sum * factor + total;
    for (size_t d = 0; d < kSize; ++d) y[d] = y[d] * factor + more[d];
  }

  void write(size_t query, const Lanes (&y)[kSize], Lanes most, Lanes sum) const {
    for (size_t r = 0; r < kLanes && query + r < h_.queries; ++r) {
      const float share = 1.0f / sum[r], largest = most[r] * kLogOf2;
      const float moved = most[r] - base_of(largest);  // the rounding error of `largest` in units of log 2
      result_.kept[query + r] = {largest, std::isfinite(largest) ? share * (1.0f - moved * kLogOf2) : share};
      for (size_t d = 0; d < h_.value_size; ++d) result_.y[query + r][d] = y[d][r] / sum[r];
    }
  }

  const Result& result_;
  const Head& h_;
  Space space_;
  float *k_, *v_, *scores_;
};

template <size_t kSize>
class BackwardOfFew {
 public:
  explicit BackwardOfFew(const Gradient& g) : g_(g), h_(g.head) {
    lay_out();
    space_.begin();
    lay_out();
  }

  void run() {
    pack<kSize>(h_.q, h_.queries, h_.size, h_.scale * kLog2OfE, q_);
    pack<kSize>(h_.k, h_.keys, h_.size, h_.scale, k_.at);
    for (size_t r = 0; r < h_.queries; ++r) {
      const Kept kept = g_.kept[r];
      pack<kSize>({g_.dy[r], 0}, 1, h_.value_size, kept.share, dy_ + r * kSize);
      double along = 0.0;  // in double: slopes of a query sum to 0, so most of their error would be that of this sum
      for (size_t d = 0; d < h_.value_size; ++d) along += double{dy_[r * kSize + d]} * g_.y[r][d];
      along_[r] = static_cast<float>(along);
      base_[r] = base_of(kept.largest);
    }
    for (size_t key = 0; key < h_.keys; key += kPiece) compute(key, std::min(kPiece, h_.keys - key));
    for (size_t r = 0; r < h_.queries; ++r) std::copy_n(dq_[r], h_.size, g_.dq[r]);
  }

 private:
  void lay_out() {
    q_ = space_.numbers(h_.queries * kSize);
    dy_ = space_.numbers(h_.queries * kSize);
    along_ = space_.numbers(h_.queries);
    base_ = space_.numbers(h_.queries);
    k_ = space_.matrix(h_.keys, kSize);
    dq_ = space_.matrix(rounded(h_.queries, kPiece), kSize);
    weights_ = space_.numbers(kPiece * kLanes);
    slopes_ = space_.matrix(kPiece, kPiece);
    dk_ = {space_, kPiece * kSize, kSize};
    dv_ = {space_, kPiece * kSize, kSize};
  }

  // Adds the contributions of all queries and a piece of keys to each other's gradients.
  void compute(size_t key, size_t keys) {
    const size_t vectors = amx::up(keys, kLanes);
    Lanes k[kPiece / kLanes][kSize], v[kPiece / kLanes][kSize];
    for (size_t i = 0; i < vectors; ++i) {
      load(h_.k, key + i * kLanes, h_.keys, h_.size, 1.0f, k[i]);
      load(h_.v, key + i * kLanes, h_.keys, h_.value_size, 1.0f, v[i]);
    }
    dk_.begin();
    dv_.begin();
    for (size_t query = 0; query < h_.queries; query += kPiece) {
      const size_t queries = std::min(kPiece, h_.queries - query);
      for (size_t i = 0; i < vectors; ++i) {
        weigh(k[i], query, queries, dv_.group + i * kSize * kLanes);
        slope(v[i], query, queries, slopes_.at + i * kLanes, dk_.group + i * kSize * kLanes);
      }
      multiply({slopes_.at, kPiece, 1}, k_.from(key, 0), rounded(queries, kHeight), kSize, keys, key == 0,
               dq_.from(query, 0));
      if ((query / kPiece + 1) % kPiecesOfGroup == 0 || query + kPiece >= h_.queries) dk_.end_group(), dv_.end_group();
    }
    take(dk_, kLogOf2, key, keys, h_.size, g_.dk);  // q_ is in units of log 2
    take(dv_, 1.0f, key, keys, h_.value_size, g_.dv);
  }

  // Computes the weights of some queries for the keys of one vector, without the factor `share`, which dy_ includes.
  // Separate loops, so that each has enough registers.
  void weigh(const Lanes (&k)[kSize], size_t query, size_t queries, float* dv) {
    for (size_t r = 0; r < queries; ++r) {
      lanes(weights_ + r * kLanes) = power_of_two(along(k, q_ + (query + r) * kSize) - base_[query + r]);
    }
    add_up(weights_, kLanes, dy_ + query * kSize, queries, dv);
  }

  // Computes the gradients of their scores, without the factor of the scale.
  void slope(const Lanes (&v)[kSize], size_t query, size_t queries, float* slopes, float* dk) {
    for (size_t r = 0; r < queries; ++r) {
      const Lanes ahead = along(v, dy_ + (query + r) * kSize) - along_[query + r];
      lanes(slopes + r * kPiece) = lanes(weights_ + r * kLanes) * ahead;
    }
    add_up(slopes, kPiece, q_ + query * kSize, queries, dk);
  }

  // out += the factors of some queries for a vector of keys, times the rows of these queries
  static void add_up(const float* factors, size_t stride, const float* rows, size_t queries, float* out) {
    Lanes sums[kSize]{};
    for (size_t r = 0; r < queries; ++r) add(sums, rows + r * kSize, lanes(factors + r * stride));
    for (size_t d = 0; d < kSize; ++d) lanes(out + d * kLanes) += sums[d];
  }

  void take(const SumsOfQueries& sums, float scale, size_t key, size_t keys, size_t size, const Rows<float>& out) const {
    for (size_t j = 0; j < keys; ++j) {
      const double* const at = sums.all + j / kLanes * kSize * kLanes + j % kLanes;
      for (size_t d = 0; d < size; ++d) out[key + j][d] = static_cast<float>(at[d * kLanes]) * scale;
    }
  }

  static constexpr size_t kPiecesOfGroup = kBlocksOfGroup * kQueries / kPiece;
  const Gradient& g_;
  const Head& h_;
  Space space_;
  float *q_, *dy_, *along_, *base_, *weights_;
  Matrix<float> k_, dq_, slopes_;
  SumsOfQueries dk_, dv_;
};

inline size_t numbers_of(const Head& h) { return h.mask.at == nullptr ? std::max(h.size, h.value_size) : kMostNumbers + 1; }

// Computes the head if it is small enough; returns whether it did.
inline bool by_few(const Result& result) {
  if (numbers_of(result.head) > kMostNumbers) return false;
  if (numbers_of(result.head) <= 8) ForwardOfFew<8, kMostNumbers / 8>(result).run();
  else ForwardOfFew<kMostNumbers, 1>(result).run();
  return true;
}

inline bool by_few(const Gradient& g) {
  if (numbers_of(g.head) > kMostNumbers) return false;
  for (size_t r = 0; r < g.head.queries; ++r) {
    if (g.kept[r].share == 0.0f) return false;  // all weights must be 0
  }
  if (numbers_of(g.head) <= 8) BackwardOfFew<8>(g).run();
  else BackwardOfFew<kMostNumbers>(g).run();
  return true;
}

}  // namespace gradgraph::attention
