// The gradient of a convolution with respect to its weights, with vectors: where there are no tiles (see conv.h), and
// for numbers that cannot be divided into parts.
//
// It is a product,  dw[m, (c, tap)] = Σ dy[m, window]·x[c, pixel of that window and tap].  Some images of x are
// transposed once, with their padding, so that all channels of a pixel are contiguous: then the numbers that a window
// reads through a tap are vectors, and nothing is copied for taps, strides or dilations. Of dy, kPanel channels of a
// window are contiguous. Both stay in the second-level cache. Sizes alone determine the pieces of work, so any number
// of threads gives the same bits.
#pragma once

#include <vector>

#include "conv.h"
#include "products.h"

namespace gradgraph::weights {

using products::kHeight;
using products::kLanes;
using products::Lanes;
using products::lanes;
using windows::Grid;
using windows::Layer;
using windows::Maps;
using windows::Tap;
using windows::up;

constexpr size_t kSide = 16;                // lines and numbers that are transposed at once
constexpr size_t kPanel = 16;               // channels of dy that are contiguous
constexpr size_t kVectors = 3;              // vectors of x that are multiplied by kHeight channels of dy at once
constexpr size_t kRun = 64;                 // terms of a sum in registers
constexpr size_t kTerms = 2 * kRun;         // terms of a tile: two runs are added before they join a longer sum
constexpr size_t kRoom = size_t{1} << 17;   // numbers of x transposed at a time, but at least kTerms windows
constexpr size_t kPieces = 16;              // the minimum number of pieces of work

struct Task {
  Layer layer;  // the forward convolution
  const float *x, *dy;
  float* dw;
  size_t block = 1;  // channels of x and of dy that are contiguous in the inputs (channels.h)

  const Grid& grid() const { return layer.grids.front(); }
};

// to(i)[line] = from[line][i] for up to kSide lines of up to kSide numbers.
template <class To>
inline void turn(const float* from, size_t stride, size_t lines_of_from, size_t count, const To& to) {
#if defined(__AVX512F__)
  const auto first = [](size_t n) { return static_cast<__mmask16>((1u << n) - 1); };
  __m512i rows[kSide];
  for (size_t i = 0; i < kSide; ++i) {
    rows[i] = i < lines_of_from ? _mm512_maskz_loadu_epi32(first(count), from + i * stride) : _mm512_setzero_si512();
  }
  transpose(rows);
  for (size_t i = 0; i < count; ++i) _mm512_mask_storeu_epi32(to(i), first(lines_of_from), rows[i]);
#else
  for (size_t i = 0; i < count; ++i) {
    float* const line = to(i);
    for (size_t k = 0; k < lines_of_from; ++k) line[k] = from[k * stride + i];
  }
#endif
}

// The positions of pixels of padded images x, and of the first pixels of windows.
struct Places {
  size_t channels;            // channels of x, padded to whole vectors
  size_t rows, columns;       // size of a padded image
  size_t windows;             // per image
  std::vector<uint32_t> of_pixels, of_windows;

  explicit Places(const Task& task)
      : channels(up(task.layer.in.channels, kLanes) * kLanes),
        rows(task.layer.begin[0] + task.layer.in.rows),
        columns(task.layer.begin[1] + task.layer.in.columns),
        windows(task.grid().rows * task.grid().columns) {
    const Layer& layer = task.layer;
    for (const Tap& tap : task.grid().taps) {
      rows = std::max(rows, (task.grid().rows - 1) * layer.stride[0] + tap.down + 1);
      columns = std::max(columns, (task.grid().columns - 1) * layer.stride[1] + tap.right + 1);
    }
    for (size_t i = 0; i < layer.in.pixels(); ++i) {
      of_pixels.push_back(place(layer.begin[0] + i / layer.in.columns, layer.begin[1] + i % layer.in.columns));
    }
    for (size_t i = 0; i < windows; ++i) {
      const size_t columns_of_y = task.grid().columns;
      of_windows.push_back(place(i / columns_of_y * layer.stride[0], i % columns_of_y * layer.stride[1]));
    }
  }

  uint32_t place(size_t row, size_t column) const { return static_cast<uint32_t>((row * columns + column) * channels); }
  size_t image() const { return rows * columns * channels; }
};

// Sums over terms of kHeight channels of dy times kVectors vectors of x.
struct Tile {
  const float* dy;               // for the first term; terms are kPanel apart
  const float* x[kVectors];      // for the first window of the first image
  const uint32_t* places;        // the positions of the terms
  size_t terms;
  float* sums;
  size_t stride;                 // distance between channels of dy in `sums`

  void add(bool fresh) const {
    Lanes total[kHeight][kVectors]{};
    for (size_t k = 0, end; k < terms; k = end) {
      end = std::min(k + kRun, terms);
      add_run(k, end, total);
    }
    for (size_t r = 0; r < kHeight; ++r) {
      for (size_t v = 0; v < kVectors; ++v) {
        Lanes& sum = lanes(sums + r * stride + v * kLanes);
        sum = fresh ? total[r][v] : sum + total[r][v];
      }
    }
  }

  void add_run(size_t begin, size_t end, Lanes (&sum)[kHeight][kVectors]) const {
    Lanes total[kHeight][kVectors]{};
    for (size_t k = begin; k < end; ++k) {
      Lanes seen[kVectors];
      for (size_t v = 0; v < kVectors; ++v) seen[v] = lanes(x[v] + places[k]);
      for (size_t r = 0; r < kHeight; ++r) {
        for (size_t v = 0; v < kVectors; ++v) total[r][v] += dy[k * kPanel + r] * seen[v];
      }
    }
    for (size_t r = 0; r < kHeight; ++r) {
      for (size_t v = 0; v < kVectors; ++v) sum[r][v] += total[r][v];
    }
  }

  // The same without padding, by is_inside(k, v): numbers that are not finite must not be multiplied by its zeros.
  template <class Inside>
  void add_inside(bool fresh, const Inside& is_inside) const {
    for (size_t r = 0; r < kHeight; ++r) {
      for (size_t v = 0; v < kVectors; ++v) {
        Lanes total{};
        for (size_t k = 0, end; k < terms; k = end) {
          Lanes run{};
          for (end = std::min(k + kRun, terms); k < end; ++k) {
            if (is_inside(k, v)) run += dy[k * kPanel + r] * lanes(x[v] + places[k]);
          }
          total += run;
        }
        Lanes& sum = lanes(sums + r * stride + v * kLanes);
        sum = fresh ? total : sum + total;
      }
    }
  }
};

class ByVectors {
 public:
  explicit ByVectors(const Task& task)
      : task_(task),
        places_(task),
        taps_(task.grid().taps.size()),
        blocks_(places_.channels / kLanes),
        panels_(up(task.layer.out.channels, kPanel)),
        rows_(up(task.layer.out.channels, kHeight)),
        parts_(std::min(blocks_, up(kPieces, rows_))),
        most_(up(up(blocks_, parts_) * taps_, kVectors) * kVectors),
        images_(std::clamp(std::max(kRoom / places_.image(), up(kTerms, places_.windows)), size_t{1}, task.layer.in.images)),
        infinite_(panels_) {
    for (size_t n = 0; n < images_; ++n) {
      for (const uint32_t place : places_.of_windows) terms_.push_back(static_cast<uint32_t>(n * places_.image()) + place);
    }
  }

  void compute(const Context& context) {
    const size_t all = task_.layer.in.images, sums = kHeight * most_ * kLanes;
    const bool once = images_ == all;
    const size_t numbers = images_ * places_.image();
    x_ = room(numbers, 0), dy_ = room(panels_ * images_ * places_.windows * kPanel, 1);
    float* const kept = once ? nullptr : room(rows_ * parts_ * sums, 2);
    std::fill_n(x_, numbers, 0.0f);
    std::fill_n(dy_, panels_ * images_ * places_.windows * kPanel, 0.0f);
    for (size_t first = 0; first < all; first += images_) {
      const size_t count = std::min(images_, all - first);
      context.parallel(count * blocks_of_x(), 1, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) turn_x(first, i / blocks_of_x(), i % blocks_of_x() * kSide);
      });
      context.parallel(panels_, 1, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) turn_dy(first, count, i);
      });
      context.parallel(rows_ * parts_, 1, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
          float* const total = once ? room(sums, 3) : kept + i * sums;
          add(i / parts_, i % parts_, count, total, first == 0);
          if (first + count == all) write(i / parts_, i % parts_, total);
        }
      });
    }
  }

 private:
  static float* room(size_t count, size_t slot) { return reinterpret_cast<float*>(amx::scratch(2 * count, slot)); }
  size_t blocks_of_x() const { return up(task_.layer.in.channels, kSide); }
  // The first block of channels of x, kLanes each, of a part.
  size_t block(size_t part) const { return part * blocks_ / parts_; }
  size_t vectors(size_t part) const { return (block(part + 1) - block(part)) * taps_; }

  // Writes some channels, starting with `c`, of pixel i of an image to to(i).
  template <class To>
  void turn_image(const float* data, const Maps& maps, size_t image, size_t c, const To& to) const {
    const size_t some = std::min(kSide, maps.channels - c), pixels = maps.pixels(), block = task_.block;
    const float* from = data + (image * maps.channels + c) * pixels;
    if (block > 1) {
      for (size_t first = 0; first < some; first += block, from += block * pixels) {
        for (size_t i = 0; i < pixels; ++i) {
          if (block == kSide) std::copy_n(from + i * kSide, kSide, to(i));
          else std::copy_n(from + i * kSide / 2, kSide / 2, to(i) + first);
        }
      }
      return;
    }
    for (size_t i = 0; i < pixels; i += kSide) {
      turn(from + i, pixels, some, std::min(kSide, pixels - i), [&](size_t k) { return to(i + k); });
    }
  }

  void turn_x(size_t first, size_t image, size_t c) {
    float* const to = x_ + image * places_.image() + c;
    turn_image(task_.x, task_.layer.in, first + image, c, [&](size_t i) { return to + places_.of_pixels[i]; });
  }

  void turn_dy(size_t first, size_t count, size_t panel) {
    const size_t image = places_.windows * kPanel;
    float* to = dy_ + panel * images_ * image;
    Lanes found{};
    for (size_t n = 0; n < count; ++n, to += image) {
      turn_image(task_.dy, task_.layer.out, first + n, panel * kPanel, [&](size_t i) { return to + i * kPanel; });
      for (size_t i = 0; i < image; i += kLanes) found += 0.0f * lanes(to + i);
    }
    float sum = 0;
    for (size_t i = 0; i < kLanes; ++i) sum += found[i];
    infinite_[panel] = sum != 0.0f;  // NaN if a number is not finite
  }

  void add(size_t row, size_t part, size_t count, float* sums, bool fresh) const {
    const size_t m = row * kHeight, panel = m / kPanel, all = count * places_.windows;
    const float* const dy = dy_ + panel * images_ * places_.windows * kPanel + m % kPanel;
    for (size_t term = 0; term < all; term += kTerms) {
      Tile tile{dy + term * kPanel, {}, terms_.data() + term, std::min(kTerms, all - term), nullptr, most_ * kLanes};
      for (size_t vector = 0; vector < vectors(part); vector += kVectors) {
        const Tap* taps[kVectors];
        for (size_t v = 0; v < kVectors; ++v) {  // beyond the last vector, any one will do
          const size_t at = std::min(vector + v, vectors(part) - 1);
          taps[v] = &task_.grid().taps[at % taps_];
          tile.x[v] = x_ + places_.place(taps[v]->down, taps[v]->right) + (block(part) + at / taps_) * kLanes;
        }
        tile.sums = sums + vector * kLanes;
        const bool is_first = fresh && term == 0;
        if (!infinite_[panel]) tile.add(is_first);
        else tile.add_inside(is_first, [&](size_t k, size_t v) { return is_inside((term + k) % places_.windows, *taps[v]); });
      }
    }
  }

  bool is_inside(size_t window, const Tap& tap) const {
    const Layer& layer = task_.layer;
    const size_t columns = task_.grid().columns;
    const size_t row = window / columns * layer.stride[0] + tap.down - layer.begin[0];  // large for padding
    const size_t column = window % columns * layer.stride[1] + tap.right - layer.begin[1];
    return row < layer.in.rows && column < layer.in.columns;
  }

  // Converts sums [channel of dy, block of channels of x, tap, kLanes] to weights.
  void write(size_t row, size_t part, const float* sums) const {
    const size_t channels = task_.layer.in.channels, last = std::min((row + 1) * kHeight, task_.layer.out.channels);
    for (size_t m = row * kHeight; m < last; ++m, sums += most_ * kLanes) {
      for (size_t b = block(part); b < block(part + 1); ++b) {
        const float* const from = sums + (b - block(part)) * taps_ * kLanes;
        float* const to = task_.dw + (m * channels + b * kLanes) * taps_;
        for (size_t tap = 0; tap < taps_; tap += kSide) {
          turn(from + tap * kLanes, kLanes, std::min(kSide, taps_ - tap), std::min(kLanes, channels - b * kLanes),
               [&](size_t k) { return to + k * taps_ + tap; });
        }
      }
    }
  }

  const Task& task_;
  const Places places_;
  const size_t taps_, blocks_;  // taps, and blocks of kLanes channels of x
  const size_t panels_, rows_;  // blocks of kPanel, and of kHeight, channels of dy
  const size_t parts_, most_;   // parts of the blocks, and vectors in the largest one
  const size_t images_;         // images transposed at a time
  std::vector<char> infinite_;  // for each panel, whether a number is not finite
  std::vector<uint32_t> terms_;
  float *x_ = nullptr, *dy_ = nullptr;
};

}  // namespace gradgraph::weights
