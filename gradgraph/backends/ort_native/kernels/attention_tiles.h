// Attention of one head with tiles (see amx.h), forward and backward.
//
// Factors are divided into parts once per head; these parts stay in the second-level cache, and scores in the first.
// While tiles multiply for one block, vector units compute the weights of another: the processor does both at once.
// Blocks that the mask hides from all their queries are skipped.
#pragma once

#include "attention_blocks.h"

namespace gradgraph::attention {

#if GRADGRAPH_TILES

// --- forward ---------------------------------------------------------------------------------------------------------

// The forward pass. While the weights of a block of queries are computed, tiles compute the scores of the next block
// and the output of the previous one.
template <size_t kParts>
class Forward {
 public:
  using Factor = Packed<kParts>;

  Forward(const Result& result, Ahead& ahead)
      : result_(result),
        ahead_(ahead),
        h_(result.head),
        sight_(h_, kBlock, kBlock),
        blocks_(up(h_.queries, kBlock)),
        terms_(every(up(h_.size, kDepth))) {
    lay_out();
    shelf_.begin();
    lay_out();
  }

  // Returns false if a number cannot be divided into parts.
  bool run() {
    k_.pack(along(h_.k, h_.keys, h_.size), 0, false, watch_);
    v_.pack(across(h_.v, h_.keys, h_.value_size), 0, false, watch_);
    if (watch_.found()) return false;
    for (size_t first = 0; first < blocks_;) {
      const size_t missed = all(first);
      if (watch_.found()) return false;
      if (missed < blocks_) sight_.open(missed);
      first = missed;
    }
    return true;
  }

 private:
  void lay_out() {
    const size_t keys = up(h_.keys, kBlock);
    q_ = shelf_.packed(2, terms_.size());
    k_ = shelf_.packed(2 * keys, terms_.size());
    v_ = shelf_.packed(up(h_.value_size, kSide), keys);
    for (size_t i = 0; i < 2; ++i) {
      weights_[i] = shelf_.packed(2, keys);
      scores_[i] = shelf_.numbers(keys * kNumbers);
    }
  }

  // Computes the blocks of queries starting with `first`. Returns the number of blocks, or the first block whose hidden
  // keys must be computed after all.
  size_t all(size_t first) {
    for (size_t i = first; i < blocks_ + 2; ++i) {
      bool counts = true;
      const bool weighs = i > first && i - 1 < blocks_;
      const auto piece = [&](size_t r) { counts = weigh(i - 1, r) && counts; };
      Meanwhile work(weighs ? kBlock : 0, piece, ahead_);
      std::swap(steps_[i % 2], steps_of_output_);
      if (i < blocks_) score(i, work);
      if (i > first + 1) sum_up(i - 2, work);
      work.rest();
      if (!counts && steps_[(i - 1) % 2].size() < up(h_.keys, kBlock)) return i - 1;
      if (watch_.found()) return blocks_;
    }
    return blocks_;
  }

  template <class Work>
  void score(size_t block, Work& work) {
    Steps& steps = steps_[block % 2];
    steps = sight_.of(block);
    q_.pack(along(h_.q, h_.queries, h_.size), 2 * block, true, watch_);
    for (size_t i = 0; i < steps.size(); ++i) {
      const size_t j = steps[i], next = steps[i + 1 < steps.size() ? i + 1 : 0];
      const Product product{up(h_.queries, kSide) - 2 * block, up(h_.keys, kSide) - 2 * j, terms_, q_.operand(0),
                            k_.operand(2 * j), q_.operand(0), k_.operand(2 * next)};
      multiply<kParts>(product, scores_[block % 2] + j * kNumbers, work);
    }
  }

  // Computes the exponentials of a row of scores, in parts, and saves its two numbers; returns whether hidden scores
  // have no weight.
  __attribute__((noinline)) bool weigh(size_t block, size_t r) {
    const size_t query = block * kBlock + r;
    const Steps& steps = steps_[block % 2];
    float* const numbers = scores_[block % 2];
    __m512 most = _mm512_set1_ps(-kInfinity), sum = _mm512_setzero_ps();
    for (size_t j : steps) {
      for (size_t half = 0; half < 2; ++half) {
        float* const at = lanes(numbers + j * kNumbers, r, half);
        const Scores scores(h_, at, query, j * kBlock + half * kSide);
        most = _mm512_mask_max_ps(most, scores.known, most, scores.at);
        _mm512_store_ps(at, scores.at);
      }
    }
    const float largest = _mm512_reduce_max_ps(most);
    for (size_t j : steps) {
      __m512 made[2];
      for (size_t half = 0; half < 2; ++half) {
        const size_t key = j * kBlock + half * kSide;
        const __mmask16 known = query < h_.queries && key < h_.keys ? amx::first(h_.keys - key) : 0;
        const __m512 score = _mm512_load_ps(lanes(numbers + j * kNumbers, r, half));
        made[half] = exponential(_mm512_sub_ps(score, _mm512_set1_ps(largest)), known);
        sum = _mm512_add_ps(sum, made[half]);
      }
      amx::store_row<kParts>(made[0], made[1], r % kSide, weights_[block % 2].tile(r / kSide, j), watch_);
    }
    if (query >= h_.queries) return true;
    result_.kept[query] = {largest, 1.0f / _mm512_reduce_add_ps(sum)};
    return Sight::counts(largest);
  }

  template <class Work>
  void sum_up(size_t block, Work& work) {
    const Factor& weights = weights_[block % 2];
    const size_t first = block * kBlock, count = std::min(kBlock, h_.queries - first);
    for (size_t panel = 0; panel < v_.panels; panel += 2) {
      alignas(64) float made[kNumbers];
      const Product product{up(count, kSide), v_.panels - panel, steps_of_output_, weights.operand(0), v_.operand(panel),
                            weights.operand(0), v_.after(panel)};
      multiply<kParts>(product, made, work);
      for (size_t r = 0; r < count; ++r) {
        const __m512 share = _mm512_set1_ps(result_.kept[first + r].share);
        for (size_t half = 0; half < 2; ++half) {
          const size_t at = (panel + half) * kSide;
          if (at >= h_.value_size) continue;
          const __m512 y = _mm512_mul_ps(_mm512_load_ps(lanes(made, r, half)), share);
          _mm512_mask_storeu_ps(result_.y[first + r] + at, amx::first(h_.value_size - at), y);
        }
      }
    }
  }

  const Result& result_;
  Ahead& ahead_;
  const Head& h_;
  Sight sight_;
  const size_t blocks_;
  const Steps terms_;
  Shelf<kParts> shelf_;
  Factor q_, k_, v_;
  std::array<Factor, 2> weights_;
  std::array<float*, 2> scores_;
  std::array<Steps, 2> steps_;  // of the block whose scores, and of the one whose weights, are computed
  Steps steps_of_output_;       // of the block whose output is computed
  amx::Watch watch_;
};

// --- backward --------------------------------------------------------------------------------------------------------

// The backward pass, block by block of scores: tiles compute S = Q·Kᵀ and dP = dY·Vᵀ of one block while weights and
// slopes (the gradients of scores) of the previous one are computed. Sums over queries are computed transposed, dVᵀ =
// dYᵀ·P, so that weights and slopes need not be transposed.
template <size_t kParts>
class Backward {
 public:
  using Factor = Packed<kParts>;

  Backward(const Gradient& g, Ahead& ahead)
      : g_(g),
        ahead_(ahead),
        h_(g.head),
        blocks_of_queries_(up(h_.queries, kBlock)),
        blocks_of_keys_(up(h_.keys, kBlock)),
        terms_(every(up(h_.size, kDepth))),
        value_terms_(every(up(h_.value_size, kDepth))),
        queries_(blocks_of_keys_) {
    Sight sight(h_, kBlock, kBlock);
    for (size_t i = 0; i < blocks_of_queries_; ++i) {
      for (size_t q = i * kBlock; q < std::min(h_.queries, (i + 1) * kBlock); ++q) {
        if (!Sight::counts(g_.kept[q].largest)) sight.open(i);
      }
      steps_.push_back(sight.of(i));
    }
    lay_out();
    shelf_.begin();
    lay_out();
  }

  // Returns false if a number cannot be divided into parts.
  bool run() {
    k_.pack(along(h_.k, h_.keys, h_.size), 0, false, watch_);
    v_.pack(along(h_.v, h_.keys, h_.value_size), 0, false, watch_);
    k_across_.pack(across(h_.k, h_.keys, h_.size), 0, false, watch_);
    q_across_.pack(across(h_.q, h_.queries, h_.size), 0, true, watch_);
    dy_across_.pack(across(g_.dy, h_.queries, h_.value_size), 0, true, watch_);
    if (watch_.found()) return false;
    std::fill_n(dk_, of_sums(q_across_), 0.0f);
    std::fill_n(dv_, of_sums(dy_across_), 0.0f);
    Block last{0, 0, 0}, block{0, steps_[0][0], 0};
    multiply_out(block, ahead_);
    for (size_t i = 0; i < blocks_of_queries_; ++i) {
      for (size_t step = 0; step < steps_[i].size(); ++step) {
        last = block;
        const auto piece = [&](size_t r) { weigh(last, r); };
        Meanwhile work(kSide, piece, ahead_);
        const bool ends = step + 1 == steps_[i].size();
        if (!ends || i + 1 < blocks_of_queries_) {
          block = ends ? Block{i + 1, steps_[i + 1][0], 1 - last.half} : Block{i, steps_[i][step + 1], 1 - last.half};
          multiply_out(block, work);
        }
        work.rest();
        queries_[last.keys].push_back(i % kGroup);
      }
      if (watch_.found()) return false;
      sum_over_keys(i);
      if ((i + 1) % kGroup == 0 || i + 1 == blocks_of_queries_) sum_over_queries(i / kGroup * kGroup);
    }
    turn(dv_, dy_across_.panels, h_.value_size, g_.dv);
    turn(dk_, q_across_.panels, h_.size, g_.dk);
    return true;
  }

 private:
  // A block of scores: its queries and keys, and the addresses of its numbers.
  struct Block {
    size_t queries, keys, half;
  };

  void lay_out() {
    const size_t keys = blocks_of_keys_;
    q_ = shelf_.packed(2, terms_.size());
    k_ = shelf_.packed(2 * keys, terms_.size());
    dy_ = shelf_.packed(2, value_terms_.size());
    v_ = shelf_.packed(2 * keys, value_terms_.size());
    k_across_ = shelf_.packed(up(h_.size, kSide), keys);
    q_across_ = shelf_.packed(up(h_.size, kSide), blocks_of_queries_);
    dy_across_ = shelf_.packed(up(h_.value_size, kSide), blocks_of_queries_);
    slopes_by_row_ = shelf_.packed(2, keys);
    weights_ = shelf_.packed(2 * keys, kGroup);
    slopes_ = shelf_.packed(2 * keys, kGroup);
    for (size_t half = 0; half < 2; ++half) {
      scores_[half] = shelf_.numbers(kNumbers);
      cotangents_[half] = shelf_.numbers(kNumbers);
    }
    dk_ = shelf_.numbers(of_sums(q_across_));
    dv_ = shelf_.numbers(of_sums(dy_across_));
  }
  size_t of_sums(const Factor& across) const { return up(across.panels, 2) * blocks_of_keys_ * kNumbers; }

  template <class Work>
  void multiply_out(const Block& block, Work& work) {
    const size_t rows = up(h_.queries, kSide) - 2 * block.queries, columns = up(h_.keys, kSide) - 2 * block.keys;
    if (block.keys == steps_[block.queries][0]) {
      q_.pack(along(h_.q, h_.queries, h_.size), 2 * block.queries, true, watch_);
      dy_.pack(along(g_.dy, h_.queries, h_.value_size), 2 * block.queries, true, watch_);
      for (size_t r = 0; r < kBlock; ++r) {
        const size_t query = block.queries * kBlock + r;
        along_[block.queries % 2][r] = query < h_.queries ? sum_of_products(g_.dy[query], g_.y[query], h_.value_size) : 0.0f;
      }
    }
    const Operand k = k_.operand(2 * block.keys), v = v_.operand(2 * block.keys);
    const Product scores{rows, columns, terms_, q_.operand(0), k, dy_.operand(0), v};
    const Product cotangents{rows, columns, value_terms_, dy_.operand(0), v, q_.operand(0), k_.after(2 * block.keys)};
    multiply<kParts>(scores, scores_[block.half], work);
    multiply<kParts>(cotangents, cotangents_[block.half], work);
  }

  // The same as `dot`, for which compilers emit sixteen additions in sequence.
  static float sum_of_products(const float* a, const float* b, size_t count) {
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < count; i += kSide) {
      const __mmask16 some = amx::first(count - i);
      sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, a + i), _mm512_maskz_loadu_ps(some, b + i), sum);
    }
    return _mm512_reduce_add_ps(sum);
  }

  // Computes weights and slopes of rows r and r + 16, in parts: slopes packed for the product with keys, both for those
  // with queries.
  __attribute__((noinline)) void weigh(const Block& block, size_t r) {
    const size_t step = block.queries % kGroup;
    __m512 weight[2][2], slope[2][2];
    for (size_t row = 0; row < 2; ++row) {
      const size_t query = block.queries * kBlock + row * kSide + r;
      const Kept kept = query < h_.queries ? g_.kept[query] : Kept{0.0f, 0.0f};
      const __m512 along = _mm512_set1_ps(along_[block.queries % 2][row * kSide + r]);
      for (size_t half = 0; half < 2; ++half) {
        const float* const made = lanes(scores_[block.half], row * kSide + r, half);
        const Scores scores(h_, made, query, block.keys * kBlock + half * kSide);
        weight[row][half] = _mm512_mul_ps(scores.above(kept.largest), _mm512_set1_ps(kept.share));
        const __m512 cotangent = _mm512_load_ps(lanes(cotangents_[block.half], row * kSide + r, half));
        const __m512 above = _mm512_mul_ps(_mm512_sub_ps(cotangent, along), _mm512_set1_ps(h_.scale));
        slope[row][half] = _mm512_maskz_mul_ps(scores.free, weight[row][half], above);
      }
    }
    for (size_t half = 0; half < 2; ++half) {
      amx::store_row<kParts>(weight[0][half], weight[1][half], r, weights_.tile(2 * block.keys + half, step), watch_);
    }
    amx::Pairs<kParts> rows[2];
    for (size_t row = 0; row < 2; ++row) {
      rows[row] = amx::split<kParts>(slope[row][0], slope[row][1], watch_);
      store(rows[row].part, r, slopes_by_row_.tile(row, block.keys));
    }
    // from pairs of keys, k and k + 16, to pairs of queries
    constexpr __mmask32 kLow = 0x55555555;
    __m512i columns[2][kParts];
    for (size_t part = 0; part < kParts; ++part) {
      const __m512i upper = rows[0].part[part], lower = rows[1].part[part];
      columns[0][part] = _mm512_mask_mov_epi16(_mm512_slli_epi32(lower, 16), kLow, upper);
      columns[1][part] = _mm512_mask_mov_epi16(lower, kLow, _mm512_srli_epi32(upper, 16));
    }
    for (size_t half = 0; half < 2; ++half) store(columns[half], r, slopes_.tile(2 * block.keys + half, step));
  }

  static void store(const __m512i (&parts)[kParts], size_t row, uint16_t* tiles) {
    for (size_t part = 0; part < kParts; ++part) {
      _mm512_store_si512(tiles + part * kTile + row * kDepth, parts[part]);
    }
  }

  // Computes dQ of a block of queries.
  void sum_over_keys(size_t block) {
    const size_t first = block * kBlock, count = std::min(kBlock, h_.queries - first);
    const Operand slopes = slopes_by_row_.operand(0);
    for (size_t panel = 0; panel < k_across_.panels; panel += 2) {
      alignas(64) float made[kNumbers];
      const Product product{up(count, kSide), k_across_.panels - panel, steps_[block], slopes, k_across_.operand(panel),
                            slopes, k_across_.after(panel)};
      multiply<kParts>(product, made, ahead_);
      for (size_t r = 0; r < count; ++r) {
        for (size_t half = 0; half < 2; ++half) {
          const size_t at = (panel + half) * kSide;
          if (at >= h_.size) continue;
          _mm512_mask_storeu_ps(g_.dq[first + r] + at, amx::first(h_.size - at), _mm512_load_ps(lanes(made, r, half)));
        }
      }
    }
  }

  // Adds the contributions of a group of blocks of queries, starting with `first`, to dV and dK.
  void sum_over_queries(size_t first) {
    for (size_t j = 0; j < blocks_of_keys_; ++j) {
      if (queries_[j].empty()) continue;
      add_up(dy_across_, weights_, first, j, dv_);
      add_up(q_across_, slopes_, first, j, dk_);
      queries_[j].clear();
    }
  }

  void add_up(const Factor& a, const Factor& b, size_t first, size_t j, float* sums) const {
    for (size_t panel = 0; panel < a.panels; panel += 2) {
      alignas(64) float made[kNumbers];
      const Product product{a.panels - panel, 2, queries_[j], a.operand(panel, first), b.operand(2 * j),
                            a.after(panel, first), b.operand(2 * j)};
      multiply<kParts>(product, made, ahead_);
      float* const block = sums + (panel / 2 * blocks_of_keys_ + j) * kNumbers;
      add(made, block, a.panels - panel > 1 ? kNumbers : kNumbers / 2);
    }
  }

  // Transposes [size, keys] to [keys, size].
  void turn(const float* sums, size_t panels, size_t size, const Rows<float>& out) const {
    for (size_t panel = 0; panel < panels; ++panel) {
      for (size_t key = 0; key < h_.keys; key += kSide) {
        const float* const block = sums + (panel / 2 * blocks_of_keys_ + key / kBlock) * kNumbers;
        const float* const tile = block + (panel % 2 * 2 + key % kBlock / kSide) * kSide * kSide;
        __m512i rows[kSide];
        for (size_t i = 0; i < kSide; ++i) rows[i] = _mm512_load_si512(tile + i * kSide);
        transpose(rows);
        const size_t at = panel * kSide, count = std::min(kSide, h_.keys - key);
        for (size_t i = 0; i < count; ++i) {
          _mm512_mask_storeu_ps(out[key + i] + at, amx::first(size - at), _mm512_castsi512_ps(rows[i]));
        }
      }
    }
  }

  const Gradient& g_;
  Ahead& ahead_;
  const Head& h_;
  const size_t blocks_of_queries_, blocks_of_keys_;
  const Steps terms_, value_terms_;
  std::vector<Steps> steps_;    // for each block of queries, the blocks of keys that it sees
  std::vector<Steps> queries_;  // for each block of keys, the blocks of queries in the group that see it
  Shelf<kParts> shelf_;
  Factor q_, k_, dy_, v_, k_across_, q_across_, dy_across_, slopes_by_row_, weights_, slopes_;
  std::array<float*, 2> scores_, cotangents_;
  float along_[2][kBlock];  // Σ dY·Y of the rows of two blocks of queries
  float *dk_, *dv_;
  amx::Watch watch_;
};

inline void add_inputs(const Head& h, Ahead& ahead) {
  ahead.add(h.k, h.keys, h.size), ahead.add(h.v, h.keys, h.value_size), ahead.add(h.q, h.queries, h.size);
}

// Computes a head with tiles; returns whether all its numbers could be divided into parts. `next` is prefetched.
template <size_t kParts>
bool by_tiles(const Result& result, const Result* next) {
  if (!amx::available()) return false;
  Ahead ahead;
  if (next != nullptr) add_inputs(next->head, ahead), ahead.add(next->y, next->head.queries, next->head.value_size);
  const amx::Tiles tiles;
  return Forward<kParts>(result, ahead).run();
}

template <size_t kParts>
bool by_tiles(const Gradient& gradient, const Gradient* next) {
  if (!amx::available()) return false;
  Ahead ahead;
  if (next != nullptr) {
    const Head& h = next->head;
    add_inputs(h, ahead), ahead.add(next->dy, h.queries, h.value_size), ahead.add(next->y, h.queries, h.value_size);
    ahead.add(next->dq, h.queries, h.size);
    ahead.add(next->dk, h.keys, h.size), ahead.add(next->dv, h.keys, h.value_size);
  }
  const amx::Tiles tiles;
  return Backward<kParts>(gradient, ahead).run();
}

#else

template <size_t kParts, class Task>
bool by_tiles(const Task&, const Task*) {
  return false;
}

#endif

}  // namespace gradgraph::attention
