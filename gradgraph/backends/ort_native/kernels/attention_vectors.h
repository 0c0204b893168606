// Attention of one head with vectors, forward and backward: where there are no tiles, and for numbers that cannot be
// divided into parts.
//
// Scores are computed for a few queries and a block of keys at a time, which stay in the first-level cache, and are
// never written elsewhere. In the forward pass a row's sum is rescaled when its largest score grows (Milakov and
// Gimelshein, 2018, arXiv:1805.02867); in the backward pass both are known. Vectors run along keys, so that masks are
// read as stored, and, for sums over keys, along the columns of the result. Blocks that the mask hides from all their
// queries are skipped.
#pragma once

#include "attention_sight.h"
#include "elementary.h"
#include "products.h"
#include "sums.h"

namespace gradgraph::attention {

using products::kHeight, products::kLanes, products::kVectors, products::kWidth;

constexpr size_t kQueries = 4 * kHeight;  // in a block
constexpr size_t kKeys = 4 * kWidth;      // in a block
constexpr size_t kBlocksOfGroup = 8;      // blocks of queries added in float; the groups are added in double

constexpr size_t rounded(size_t count, size_t unit) { return amx::up(count, unit) * unit; }
// Pads the number of columns of a matrix to whole vectors: a half one suffices for small heads.
constexpr size_t columns_of(size_t size) { return size <= kLanes / 2 ? kLanes / 2 : rounded(size, kLanes); }

// --- products --------------------------------------------------------------------------------------------------------

template <size_t kNumbers>
struct Vectors {
  static constexpr size_t kCount = kNumbers;
  typedef float Vector __attribute__((vector_size(kCount * sizeof(float)), aligned(4), may_alias));
  static Vector& at(float* numbers, size_t i) { return *reinterpret_cast<Vector*>(numbers + i * kCount); }
  static const Vector& at(const float* numbers, size_t i) {
    return *reinterpret_cast<const Vector*>(numbers + i * kCount);
  }
};
using Whole = Vectors<kLanes>;
using Half = Vectors<kLanes / 2>;

// A left factor: the distances from one row to the next, and from one term of a sum to the next.
struct Left {
  const float* at;
  size_t row, term;
  Left below(size_t rows) const { return {at + rows * row, row, term}; }
};

// A matrix, row by row.
template <class T>
struct Matrix {
  T* at;
  size_t stride;
  Matrix<T> from(size_t row, size_t column) const { return {at + row * stride + column, stride}; }
  T* operator[](size_t row) const { return at + row * stride; }
  operator Matrix<const T>() const { return {at, stride}; }
};

// kRows x kColumns vectors of out = a·b, or += unless `fresh`
template <class Kind, size_t kColumns, size_t kRows>
inline void multiply_few(Left a, Matrix<const float> b, size_t terms, bool fresh, Matrix<float> out) {
  using Vector = typename Kind::Vector;
  Vector sums[kRows][kColumns]{};
  for (size_t k = 0; k < terms; ++k) {
    Vector line[kColumns];
    for (size_t v = 0; v < kColumns; ++v) line[v] = Kind::at(b[k], v);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t v = 0; v < kColumns; ++v) sums[r][v] += a.at[r * a.row + k * a.term] * line[v];
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kColumns; ++v) {
      Vector& to = Kind::at(out[r], v);
      to = fresh ? sums[r][v] : to + sums[r][v];
    }
  }
}

template <class Kind, size_t kColumns, size_t kRows>
inline void multiply_rows(Left a, Matrix<const float> b, size_t rows, size_t terms, bool fresh, Matrix<float> out) {
  for (size_t r = 0; r < rows; r += kRows) {
    for (size_t k = 0; k < terms; k += products::kTerms) {
      const Left some{a.at + r * a.row + k * a.term, a.row, a.term};
      const size_t count = std::min(products::kTerms, terms - k);
      multiply_few<Kind, kColumns, kRows>(some, b.from(k, 0), count, fresh && k == 0, out.from(r, 0));
    }
  }
}

// out = a·b, or += unless `fresh`; `columns` as returned by `columns_of`, and `rows` a multiple of kHeight.
inline void multiply(Left a, Matrix<const float> b, size_t rows, size_t columns, size_t terms, bool fresh,
                     Matrix<float> out) {
  const bool in_pairs = rows % (2 * kHeight) == 0;  // more sums at a time if there are few columns
  for (size_t c = 0; c < columns;) {
    const auto left = b.from(0, c);
    const auto to = out.from(0, c);
    const size_t vectors = (columns - c) / kLanes;
    if (vectors >= kVectors) multiply_rows<Whole, kVectors, kHeight>(a, left, rows, terms, fresh, to);
    else if (vectors == 2) multiply_rows<Whole, 2, kHeight>(a, left, rows, terms, fresh, to);
    else if (vectors == 1 && in_pairs) multiply_rows<Whole, 1, 2 * kHeight>(a, left, rows, terms, fresh, to);
    else if (vectors == 1) multiply_rows<Whole, 1, kHeight>(a, left, rows, terms, fresh, to);
    else if (in_pairs) multiply_rows<Half, 1, 2 * kHeight>(a, left, rows, terms, fresh, to);
    else multiply_rows<Half, 1, kHeight>(a, left, rows, terms, fresh, to);
    c += vectors == 0 ? kLanes / 2 : std::min(vectors, kVectors) * kLanes;
  }
}

// --- factors ---------------------------------------------------------------------------------------------------------

// Memory for several matrices, one after the other: the layout is computed once to find the size, and once with the
// memory.
class Space {
 public:
  float* numbers(size_t count) {
    float* const made = base_ == nullptr ? nullptr : base_ + taken_;
    taken_ += rounded(count, kLanes);
    return made;
  }
  Matrix<float> matrix(size_t rows, size_t columns) { return {numbers(rows * columns), columns}; }
  void begin() { base_ = reinterpret_cast<float*>(amx::scratch(2 * taken_)), taken_ = 0; }

 private:
  float* base_ = nullptr;
  size_t taken_ = 0;
};

// Copies `count` rows, with zeros up to `rows` rows and to the stride of `out`.
inline void copy_rows(const Rows<const float>& x, size_t first, size_t count, size_t size, size_t rows, Matrix<float> out) {
  for (size_t r = 0; r < rows; ++r) {
    const size_t known = r < count ? size : 0;
    if (known > 0) std::copy_n(x[first + r], known, out[r]);
    std::fill(out[r] + known, out[r] + out.stride, 0.0f);
  }
}

// out[i][j] = x[j][i] for `rows` rows of x, and `size` columns
inline void turn(Matrix<const float> x, size_t rows, size_t size, Matrix<float> out) {
  size_t first = 0;  // the first column that is not transposed yet
#if defined(__AVX512F__)
  constexpr size_t kSide = 16;
  const size_t end = rows / kSide * kSide;
  for (; first + kSide <= size; first += kSide) {
    for (size_t j = 0; j < end; j += kSide) transpose(x[j] + first, x.stride, out[first] + j, out.stride);
    for (size_t j = end; j < rows; ++j) {
      for (size_t i = first; i < first + kSide; ++i) out[i][j] = x[j][i];
    }
  }
#endif
  for (size_t j = 0; j < rows; ++j) {
    for (size_t i = first; i < size; ++i) out[i][j] = x[j][i];
  }
}

// Transposes kWidth rows at a time: results are `size` rows of kWidth numbers each, one after the other.
inline void turn_rows(const Rows<const float>& x, size_t count, size_t size, float* out) {
  for (size_t i = 0; i < count; i += kWidth) {
    const size_t rows = std::min(kWidth, count - i);
    if (rows < kWidth) std::fill_n(out + i * size, kWidth * size, 0.0f);
    turn({x[i], x.stride}, rows, size, {out + i * size, kWidth});
  }
}

inline bool are_finite(const Rows<const float>& x, size_t count, size_t size) {
  float sum = 0;
  for (size_t r = 0; r < count; ++r) {
    const float* const row = x[r];
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < size; ++i) sum += row[i] * 0.0f;
  }
  return sum == 0.0f;
}

// --- masks -----------------------------------------------------------------------------------------------------------

// The effect of a mask on a block of keys of one query.
class MaskedRow {
 public:
  MaskedRow(const Mask& mask, size_t query, size_t key, size_t count) : chosen_(mask.chosen) {
    if (mask.at == nullptr) return;
    at_ = mask.at + query * mask.row + key * mask.column;
    if (mask.column == 0) std::fill_n(same_, count, *at_), at_ = same_;
  }
  // Calls body(score, i, hidden) for the first `count` scores, which are scaled and masked products.
  template <class Body>
  void each(const float* products, float scale, size_t count, const Body& body) const {
    if (at_ == nullptr) {
#pragma omp simd
      for (size_t i = 0; i < count; ++i) body(products[i] * scale, i, false);
    } else if (chosen_) {
#pragma omp simd
      for (size_t i = 0; i < count; ++i) body(at_[i] != 0.0f ? at_[i] : products[i] * scale, i, at_[i] != 0.0f);
    } else {
#pragma omp simd
      for (size_t i = 0; i < count; ++i) body(products[i] * scale + at_[i], i, false);
    }
  }

 private:
  const float* at_ = nullptr;
  bool chosen_;
  float same_[kKeys];
};

// --- forward ---------------------------------------------------------------------------------------------------------

// What both passes know about a head.
class ByVectors {
 protected:
  ByVectors(const Head& h, bool is_finite)
      : h_(h), is_finite_(is_finite && are_finite(h.q, h.queries, h.size) && are_finite(h.k, h.keys, h.size) &&
                          are_finite(h.v, h.keys, h.value_size)) {}

  // The blocks that may be skipped: none if a number is not finite, as it affects results also through hidden keys.
  Sight sight() const {
    Head seen = h_;
    if (!is_finite_) seen.mask.at = nullptr;
    return Sight(seen, kQueries, kKeys);
  }
  size_t blocks() const { return amx::up(h_.queries, kQueries); }
  size_t queries_of(size_t block) const { return std::min(kQueries, h_.queries - block * kQueries); }
  size_t keys_of(size_t block) const { return std::min(kKeys, h_.keys - block * kKeys); }

  // The columns of a product for the keys of a block, starting with key `i`.
  static size_t width_of(size_t keys, size_t i) { return std::min(kWidth, rounded(keys - i, kLanes)); }

  // out = a·(rows of a block of keys)ᵀ; `turned` contains all rows of keys, transposed
  static void multiply_out(Matrix<const float> a, size_t rows, const float* turned, size_t size, size_t block, size_t keys,
                           Matrix<float> out) {
    for (size_t i = 0; i < keys; i += kWidth) {
      const Matrix<const float> b{turned + (block * kKeys + i) * size, kWidth};
      multiply({a.at, a.stride, 1}, b, rows, width_of(keys, i), size, true, out.from(0, i));
    }
  }

  const Head& h_;
  const bool is_finite_;
};

class ForwardByVectors : ByVectors {
 public:
  explicit ForwardByVectors(const Result& result) : ByVectors(result.head, true), result_(result) {
    lay_out();
    space_.begin();
    lay_out();
  }

  void run() {
    turn_rows(h_.k, h_.keys, h_.size, turned_k_);
    copy_rows(h_.v, 0, h_.keys, h_.value_size, h_.keys, v_);
    Sight sight = this->sight();
    for (size_t block = 0; block < blocks(); ++block) {
      const Steps steps = sight.of(block);
      if (!compute(block, steps) && steps.size() < amx::up(h_.keys, kKeys)) {  // hidden keys must be computed after all
        sight.open(block);
        compute(block, sight.of(block));
      }
    }
  }

 private:
  void lay_out() {
    turned_k_ = space_.numbers(rounded(h_.keys, kWidth) * h_.size);
    v_ = space_.matrix(h_.keys, columns_of(h_.value_size));
    q_ = space_.matrix(kQueries, h_.size);
    y_ = space_.matrix(kQueries, v_.stride);
    scores_ = space_.matrix(kQueries, kKeys);
  }

  // Computes the outputs of a block of queries from some blocks of keys; returns whether hidden scores have no weight.
  bool compute(size_t block, const Steps& steps) {
    const size_t first = block * kQueries, count = queries_of(block), rows = rounded(count, kHeight);
    copy_rows(h_.q, first, count, h_.size, rows, q_);
    std::fill_n(most_, count, -kInfinity);
    std::fill_n(sums_, count, 0.0f);
    for (size_t step : steps) {
      const size_t keys = keys_of(step);
      multiply_out(q_, rows, turned_k_, h_.size, step, keys, scores_);
      for (size_t r = 0; r < count; ++r) weigh(first + r, r, step * kKeys, keys);
      multiply({scores_.at, kKeys, 1}, v_.from(step * kKeys, 0), rows, v_.stride, keys, step == steps[0], y_);
    }
    bool counts = true;
    for (size_t r = 0; r < count; ++r) {
      const float share = 1.0f / sums_[r];
      result_.kept[first + r] = {most_[r], share};
      for (size_t i = 0; i < h_.value_size; ++i) result_.y[first + r][i] = y_[r][i] * share;
      counts = counts && Sight::counts(most_[r]);
    }
    return counts;
  }

  // Replaces a row of scores by exponentials; the sums so far are scaled to the new largest score.
  void weigh(size_t query, size_t r, size_t key, size_t keys) {
    float* const row = scores_[r];
    float most = most_[r], sum = 0;
    MaskedRow(h_.mask, query, key, keys).each(row, h_.scale, keys, [row](float score, size_t i, bool) { row[i] = score; });
#pragma omp simd reduction(max : most)
    for (size_t i = 0; i < keys; ++i) most = row[i] > most ? row[i] : most;
    const float base = most == -kInfinity ? 0.0f : most;  // no key has been processed yet
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < keys; ++i) sum += row[i] = exp_below(row[i] - base);
    if (most > most_[r] && sums_[r] != 0.0f) {
      const float factor = exp_below(most_[r] - most);
      sums_[r] *= factor;
      for (size_t i = 0; i < v_.stride; ++i) y_[r][i] *= factor;
    }
    most_[r] = most;
    sums_[r] += sum;
  }

  const Result& result_;
  Space space_;
  float* turned_k_;
  Matrix<float> v_, q_, y_, scores_;
  float most_[kQueries], sums_[kQueries];
};

// --- backward --------------------------------------------------------------------------------------------------------

// Sums over queries, for some keys: the transposes of gradients of K and V.
struct SumsOfQueries {
  size_t count = 0, size = 0;  // the count of all numbers, and the number of columns that are used
  float* group = nullptr;
  double* all = nullptr;

  SumsOfQueries() = default;
  SumsOfQueries(Space& space, size_t numbers, size_t columns)
      : count(numbers),
        size(columns),
        group(space.numbers(count)),
        all(reinterpret_cast<double*>(space.numbers(2 * count))) {}
  void begin() const { std::fill_n(group, count, 0.0f), std::fill_n(all, count, 0.0); }
  void end_group() const {
#pragma omp simd
    for (size_t i = 0; i < count; ++i) all[i] += static_cast<double>(group[i]), group[i] = 0.0f;
  }
};

class BackwardByVectors : ByVectors {
 public:
  explicit BackwardByVectors(const Gradient& g)
      : ByVectors(g.head, are_finite(g.dy, g.head.queries, g.head.value_size)),
        g_(g),
        size_(rounded(h_.size, kHeight)),
        value_size_(rounded(h_.value_size, kHeight)) {
    lay_out();
    space_.begin();
    lay_out();
  }

  void run() {
    turn_rows(h_.k, h_.keys, h_.size, turned_k_);
    turn_rows(h_.v, h_.keys, h_.value_size, turned_v_);
    copy_rows(h_.k, 0, h_.keys, h_.size, h_.keys, k_);
    dk_.begin();
    dv_.begin();
    Sight sight = this->sight();
    for (size_t block = 0; block < blocks(); ++block) {
      for (size_t r = 0; r < queries_of(block); ++r) {
        if (!Sight::counts(g_.kept[block * kQueries + r].largest)) sight.open(block);
      }
      compute(block, sight.of(block));
      if ((block + 1) % kBlocksOfGroup == 0 || block + 1 == blocks()) dk_.end_group(), dv_.end_group();
    }
    take(dk_, g_.dk);
    take(dv_, g_.dv);
  }

 private:
  void lay_out() {
    turned_k_ = space_.numbers(rounded(h_.keys, kWidth) * h_.size);
    turned_v_ = space_.numbers(rounded(h_.keys, kWidth) * h_.value_size);
    k_ = space_.matrix(h_.keys, columns_of(h_.size));
    dk_ = {space_, rounded(h_.keys, kWidth) * size_, h_.size};
    dv_ = {space_, rounded(h_.keys, kWidth) * value_size_, h_.value_size};
    q_ = space_.matrix(kQueries, size_);
    dy_ = space_.matrix(kQueries, value_size_);
    dq_ = space_.matrix(kQueries, k_.stride);
    weights_ = space_.matrix(kQueries, kKeys);
    slopes_ = space_.matrix(kQueries, kKeys);
  }

  void compute(size_t block, const Steps& steps) {
    const size_t first = block * kQueries, count = queries_of(block), rows = rounded(count, kHeight);
    copy_rows(h_.q, first, count, h_.size, rows, q_);
    copy_rows(g_.dy, first, count, h_.value_size, rows, dy_);
    for (size_t r = 0; r < count; ++r) along_[r] = dot(g_.dy[first + r], g_.y[first + r], h_.value_size);
    for (size_t step : steps) {
      const size_t keys = keys_of(step);
      multiply_out(q_, rows, turned_k_, h_.size, step, keys, weights_);
      multiply_out(dy_, rows, turned_v_, h_.value_size, step, keys, slopes_);
      for (size_t r = 0; r < count; ++r) weigh(first + r, r, step * kKeys, keys);
      for (size_t i = 0; i < keys; i += kWidth) {
        const size_t at = step * kKeys + i, width = width_of(keys, i);
        const Matrix<float> dk{dk_.group + at * size_, kWidth}, dv{dv_.group + at * value_size_, kWidth};
        multiply({dy_.at, 1, dy_.stride}, weights_.from(0, i), value_size_, width, count, false, dv);
        multiply({q_.at, 1, q_.stride}, slopes_.from(0, i), size_, width, count, false, dk);
      }
      multiply({slopes_.at, kKeys, 1}, k_.from(step * kKeys, 0), rows, k_.stride, keys, step == steps[0], dq_);
    }
    for (size_t r = 0; r < count; ++r) std::copy_n(dq_[r], h_.size, g_.dq[first + r]);
  }

  // Replaces scores by weights, and dP by the gradients of scores; both are 0 after the last key.
  void weigh(size_t query, size_t r, size_t key, size_t keys) {
    float* const weights = weights_[r];
    float* const slopes = slopes_[r];
    const Kept kept = g_.kept[query];
    const float along = along_[r], scale = h_.scale;
    const size_t end = rounded(keys, kLanes);
    if (kept.share == 0.0f) keys = 0;
    MaskedRow(h_.mask, query, key, keys).each(weights, scale, keys, [=](float score, size_t i, bool hidden) {
      const float weight = exp_below(score - kept.largest) * kept.share;
      weights[i] = weight;
      const float slope = weight * (slopes[i] - along) * scale;
      slopes[i] = hidden ? 0.0f : slope;
    });
    std::fill(weights + keys, weights + end, 0.0f);
    std::fill(slopes + keys, slopes + end, 0.0f);
  }

  void take(const SumsOfQueries& sums, const Rows<float>& out) const {
    const size_t rows = sums.count / rounded(h_.keys, kWidth);
    for (size_t i = 0; i < sums.count; ++i) sums.group[i] = static_cast<float>(sums.all[i]);
    for (size_t j = 0; j < h_.keys; j += kWidth) {
      turn({sums.group + j * rows, kWidth}, sums.size, std::min(kWidth, h_.keys - j), {out[j], out.stride});
    }
  }

  const Gradient& g_;
  const size_t size_, value_size_;
  Space space_;
  float *turned_k_, *turned_v_;
  SumsOfQueries dk_, dv_;
  Matrix<float> k_, q_, dy_, dq_, weights_, slopes_;
  float along_[kQueries];
};

inline void by_vectors(const Result& result) { ForwardByVectors(result).run(); }
inline void by_vectors(const Gradient& gradient) { BackwardByVectors(gradient).run(); }

}  // namespace gradgraph::attention
