// Finds the blocks of scores of one head that must be computed: those that the mask does not hide from all their
// queries.
#pragma once

#include <numeric>

#include "amx.h"
#include "attention.h"

namespace gradgraph::attention {

// The steps of a sum: blocks of terms, of keys, or of queries.
using Steps = std::vector<size_t>;

inline Steps every(size_t count) {
  Steps steps(count);
  std::iota(steps.begin(), steps.end(), size_t{0});
  return steps;
}

// The blocks that the mask does not hide.
class Sight {
 public:
  // Scores below this are hidden. If a query's largest score is above a tenth of it, hidden scores have a weight of 0.
  static constexpr float kFar = -1e30f;

  // For blocks of these numbers of queries and keys.
  Sight(const Head& h, size_t queries, size_t keys)
      : h_(h),
        block_{queries, keys},
        queries_(amx::up(h.queries, queries)),
        keys_(amx::up(h.keys, keys)),
        seen_(queries_ * keys_, true) {
    if (h.mask.at == nullptr || !is_modest()) return;
    for (size_t i = 0; i < queries_; ++i) {
      for (size_t j = 0; j < keys_; ++j) seen_[i * keys_ + j] = !is_hidden(i * queries, j * keys);
    }
  }

  // Returns the blocks of keys that a block of queries sees; all blocks if it sees none.
  Steps of(size_t block) const {
    Steps steps;
    for (size_t j = 0; j < keys_; ++j) {
      if (seen_[block * keys_ + j]) steps.push_back(j);
    }
    return steps.empty() ? every(keys_) : steps;
  }
  // Makes all blocks of keys visible to a block of queries.
  void open(size_t block) { std::fill_n(seen_.begin() + static_cast<std::ptrdiff_t>(block * keys_), keys_, true); }
  static bool counts(float largest) { return largest > kFar / 10; }

 private:
  static float largest_of(const Rows<const float>& x, size_t rows, size_t size) {
    float most = 0;
    for (size_t i = 0; i < rows; ++i) {
      const float* row = x[i];
#pragma omp simd reduction(max : most)
      for (size_t j = 0; j < size; ++j) most = std::max(most, std::fabs(row[j]));
    }
    return most;
  }
  // Whether scores, before the mask is added, are much smaller than the numbers that hide them.
  bool is_modest() const {
    const float q = largest_of(h_.q, h_.queries, h_.size), k = largest_of(h_.k, h_.keys, h_.size);
    return q * k * std::fabs(h_.scale) * static_cast<float>(h_.size) < -kFar / 10;
  }
  bool is_hidden(size_t query, size_t key) const {
    const size_t queries = h_.mask.row == 0 ? 1 : std::min(block_.queries, h_.queries - query);
    const size_t keys = h_.mask.column == 0 ? 1 : std::min(block_.keys, h_.keys - key);
    for (size_t i = 0; i < queries; ++i) {
      const float* const row = h_.mask.at + (query + i) * h_.mask.row + key * h_.mask.column;
      int seen = 0;
#pragma omp simd reduction(+ : seen)
      for (size_t j = 0; j < keys; ++j) seen += !(row[j] <= kFar);
      if (seen != 0) return false;
    }
    return true;
  }

  const Head h_;
  struct {
    size_t queries, keys;
  } block_;
  size_t queries_, keys_;
  std::vector<bool> seen_;
};

}  // namespace gradgraph::attention
