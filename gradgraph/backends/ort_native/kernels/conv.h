// Convolutions of images with tiles (see amx.h): the layout of images.
//
// A tile needs 16 contiguous numbers, in pairs of terms of the sum. So an image is copied with its padding into one run
// of positions, row after row: for each tap, consecutive windows then read consecutive positions. No tap needs a copy
// of its own. At the end of a row of windows, a few positions belong to no window.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "amx.h"
#include "kernel.h"

namespace gradgraph::windows {

using std::size_t;

using amx::up;

struct Maps {
  size_t images, channels, rows, columns;

  Maps(size_t n, size_t c, size_t h, size_t w) : images(n), channels(c), rows(h), columns(w) {}
  explicit Maps(const Dims& dims) : images(0), channels(0), rows(0), columns(0) {
    if (dims.rank != 4) throw std::runtime_error("images should have four axes");
    const std::array<size_t*, 4> sizes{&images, &channels, &rows, &columns};
    for (size_t i = 0; i < 4; ++i) *sizes[i] = static_cast<size_t>(dims.size[i]);
  }
  size_t pixels() const { return rows * columns; }
  Dims dims() const {
    Dims dims;
    dims.rank = 4;
    const std::array<size_t, 4> sizes{images, channels, rows, columns};
    std::copy(sizes.begin(), sizes.end(), dims.size.begin());
    return dims;
  }
};

// The geometry of windows: along rows, along columns.
struct Geometry {
  std::array<size_t, 2> strides, dilations, begins, ends;

  explicit Geometry(const Attributes& attributes)
      : strides(pair(attributes, "strides")),
        dilations(pair(attributes, "dilations")),
        begins(pair(attributes, "begins")),
        ends(pair(attributes, "ends")) {
    for (size_t axis = 0; axis < 2; ++axis) {
      if (strides[axis] - 1 > 1 || dilations[axis] == 0) throw std::runtime_error("its strides should be 1 or 2");
    }
  }

  std::array<size_t, 2> counts(const Maps& x, std::array<size_t, 2> kernel) const {
    std::array<size_t, 2> found{x.rows, x.columns};
    for (size_t axis = 0; axis < 2; ++axis) {
      const size_t padded = found[axis] + begins[axis] + ends[axis], extent = (kernel[axis] - 1) * dilations[axis] + 1;
      if (padded < extent) throw std::runtime_error("its windows are larger than the padded image");
      found[axis] = (padded - extent) / strides[axis] + 1;
    }
    return found;
  }

 private:
  static std::array<size_t, 2> pair(const Attributes& attributes, const char* name) {
    const auto given = attributes.integers<2>(name);
    if (given[0] < 0 || given[1] < 0) throw std::runtime_error(std::string(name) + " should not be negative");
    return {static_cast<size_t>(given[0]), static_cast<size_t>(given[1])};
  }
};

// Returns the kernel size of weights [m, c, *kernel].
inline std::array<size_t, 2> kernel_of(const Dims& w, size_t channels) {
  if (w.rank != 4 || w.size[1] != static_cast<int64_t>(channels) || w.size[2] < 1 || w.size[3] < 1) {
    throw std::runtime_error("its weights do not fit its images");
  }
  return {static_cast<size_t>(w.size[2]), static_cast<size_t>(w.size[3])};
}

// A tap: windows read it at (down, right) from their first pixel in a padded image; `weight` is its index among the
// taps of w.
struct Tap {
  size_t down, right, weight;
};

// Windows in `rows` x `columns`; their results are written to (row, column), and further ones by `Layer::step`.
struct Grid {
  std::vector<Tap> taps;
  size_t rows, columns, row, column;
};

// A convolution: sums over windows of `in`, `stride` apart. There is one grid, except for input gradients with a
// stride.
struct Layer {
  Maps in, out;
  std::array<size_t, 2> stride, step, begin;  // begin: the padding before rows and columns
  size_t taps;                                // the number of taps of w
  std::vector<Grid> grids;

  // The rows or columns, of every stride-th pixel, by which taps reach beyond their windows.
  size_t reach(size_t axis) const {
    size_t most = 0;
    for (const Grid& grid : grids) {
      for (const Tap& tap : grid.taps) most = std::max(most, (axis == 0 ? tap.down : tap.right) / stride[axis]);
    }
    return most;
  }
};

// Conv: windows of x.
inline Layer forward(const Maps& x, size_t channels, std::array<size_t, 2> kernel, const Geometry& at,
                     std::array<size_t, 2> counts) {
  Grid grid{{}, counts[0], counts[1], 0, 0};
  for (size_t i = 0; i < kernel[0] * kernel[1]; ++i) {
    grid.taps.push_back({i / kernel[1] * at.dilations[0], i % kernel[1] * at.dilations[1], i});
  }
  return {x, {x.images, channels, counts[0], counts[1]}, at.strides, {1, 1}, at.begins, kernel[0] * kernel[1], {grid}};
}

// Its input gradient: windows of dy, for the pixels of x of each phase. Along one axis, tap t of window i reads pixel
// s·i + t − p. So pixel s·q + a (phase a) receives window q + (a + p − t)/s, for every t for which that is an integer.
inline Layer backward(const Maps& dy, const Maps& x, std::array<size_t, 2> kernel, const Geometry& at) {
  struct Phase {
    std::vector<std::array<long, 2>> taps;  // pairs (window, tap)
  };
  std::array<std::vector<Phase>, 2> phases;
  std::array<size_t, 2> pads{};
  for (size_t axis = 0; axis < 2; ++axis) {
    const long s = static_cast<long>(at.strides[axis]);
    for (long a = 0; a < s; ++a) {
      Phase phase;
      for (long t = 0; t < static_cast<long>(kernel[axis]); ++t) {
        const long from = a + static_cast<long>(at.begins[axis]) - t * static_cast<long>(at.dilations[axis]);
        if (from % s != 0) continue;
        phase.taps.push_back({from / s, t});
        pads[axis] = static_cast<size_t>(std::max(static_cast<long>(pads[axis]), -from / s));
      }
      phases[axis].push_back(phase);
    }
  }
  Layer layer{dy, x, {1, 1}, at.strides, pads, kernel[0] * kernel[1], {}};
  for (size_t a = 0; a < at.strides[0]; ++a) {
    for (size_t b = 0; b < at.strides[1]; ++b) {
      const size_t rows = x.rows > a ? up(x.rows - a, at.strides[0]) : 0;
      const size_t columns = x.columns > b ? up(x.columns - b, at.strides[1]) : 0;
      Grid grid{{}, rows, columns, a, b};
      for (const auto& [down, i] : phases[0][a].taps) {
        for (const auto& [right, j] : phases[1][b].taps) {
          grid.taps.push_back({static_cast<size_t>(down) + pads[0], static_cast<size_t>(right) + pads[1],
                               static_cast<size_t>(i) * kernel[1] + static_cast<size_t>(j)});
        }
      }
      layer.grids.push_back(std::move(grid));
    }
  }
  return layer;
}

#if GRADGRAPH_TILES

// The positions, in a run, of pixels in some rows of some images: images one after the other, each row by row. With a
// stride there is a run for each phase, of every stride-th row and column.
struct Run {
  Maps maps;
  std::array<size_t, 2> stride, begin;
  size_t pitch;   // positions per row
  size_t lines;   // rows of a phase
  size_t length;  // positions of one phase of all images, and some after them that tiles may read

  Run(const Layer& layer, size_t rows, size_t images) : maps(layer.in), stride(layer.stride), begin(layer.begin) {
    size_t columns = 0;
    for (const Grid& grid : layer.grids) columns = std::max(columns, grid.columns);
    const size_t data = up(begin[1] + maps.columns, stride[1]), padded = std::max(data, columns + layer.reach(1));
    // padding after a row also serves as the padding before the next one
    const size_t shared = stride[1] == 1 ? std::min(begin[1], padded - data) : 0;
    pitch = columns + shared <= padded ? padded - shared : padded;
    lines = rows + layer.reach(0);
    const size_t read = images * slab() + padded + layer.reach(1) + 2 * amx::kSide;
    length = (up(read, amx::kSide) | 1) * amx::kSide;  // odd, so that rows of a tile are in different cache sets
  }
  size_t phases() const { return stride[0] * stride[1]; }
  size_t slab() const { return lines * pitch; }  // positions of one image
  size_t place(const Tap& tap) const { return tap.down / stride[0] * pitch + tap.right / stride[1]; }
  size_t phase(const Tap& tap) const { return tap.down % stride[0] * stride[1] + tap.right % stride[1]; }
};

// 16 pixels, every kStride-th.
template <size_t kStride>
__m512 pixels(const float* from, size_t count) {
  if constexpr (kStride == 1) {
    return _mm512_maskz_loadu_ps(amx::first(count), from);
  } else {
    const size_t span = (count - 1) * 2 + 1;
    const __m512 low = _mm512_maskz_loadu_ps(amx::first(span), from);
    const __m512 high = _mm512_maskz_loadu_ps(amx::first(span > 16 ? span - 16 : 0), from + 16);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(low, even, high);
  }
}

// Writes `count` pixels of two maps, as pairs, in parts; `odd` may be null.
template <size_t kParts, size_t kStride>
void write_pairs(const float* even, const float* odd, size_t count, uint32_t* to, size_t part, amx::Watch& watch) {
  for (size_t i = 0; i < count; i += 16) {
    const size_t some = std::min<size_t>(16, count - i);
    const __m512 x = pixels<kStride>(even + i * kStride, some);
    const __m512 y = odd == nullptr ? _mm512_setzero_ps() : pixels<kStride>(odd + i * kStride, some);
    const amx::Pairs<kParts> pairs = amx::split<kParts>(x, y, watch);
    for (size_t p = 0; p < kParts; ++p) {
      _mm512_mask_storeu_epi32(to + p * part + i, amx::first(some), pairs.part[p]);
    }
  }
}

// Writes two maps (the second may be null), starting with row `row` of windows, to `to`, which contains zeros; `part`
// is the distance between parts.
template <size_t kParts, size_t kStride>
void fill_by(const Run& run, const float* even, const float* odd, size_t row, uint32_t* to, size_t part, amx::Watch& watch) {
  const size_t columns = run.maps.columns, s = run.stride[0];
  for (size_t a = 0; a < s; ++a) {
    for (size_t line = 0; line < run.lines; ++line) {
      const size_t y = (row + line) * s + a - run.begin[0];  // wraps to a large number for rows in the padding
      if (y >= run.maps.rows) continue;
      for (size_t b = 0; b < kStride; ++b) {
        const size_t j = up(run.begin[1] > b ? run.begin[1] - b : 0, kStride);  // the first one that contains a pixel
        const size_t x = j * kStride + b - run.begin[1];
        if (x >= columns) continue;
        const size_t from = y * columns + x;
        write_pairs<kParts, kStride>(even + from, odd == nullptr ? nullptr : odd + from, up(columns - x, kStride),
                                     to + (a * kStride + b) * run.length + line * run.pitch + j, part, watch);
      }
    }
  }
}

template <size_t kParts>
void fill(const Run& run, const float* even, const float* odd, size_t row, uint32_t* to, size_t part, amx::Watch& watch) {
  (run.stride[1] == 1 ? fill_by<kParts, 1> : fill_by<kParts, 2>)(run, even, odd, row, to, part, watch);
}

// --- products of tiles -----------------------------------------------------------------------------------------------

// The two tiles of one factor, in parts: bytes per row, and distances in 16-bit numbers from tile to tile, part to
// part.
struct Operand {
  const uint16_t* at;
  size_t stride, tile, part;
};

// sums (+)= A·B of kRows x kColumns tiles; in each step the factors are at a(step) and b(step). Tiles 0 to 3 contain
// sums, 4 and 5 A's tiles, 6 and 7 B's.
template <size_t kParts, size_t kRows, size_t kColumns, class A, class B>
void add_up(size_t steps, const Operand& left, const A& a, const Operand& right, const B& b, float* sums, bool fresh) {
  constexpr size_t kSums = amx::kSide * amx::kSide, kLine = 64;
  const auto load_a = [&](const uint16_t* at) {
    _tile_loadd(4, at, left.stride);
    if constexpr (kRows == 2) _tile_loadd(5, at + left.tile, left.stride);
  };
  const auto load_b = [&](const uint16_t* at) {
    _tile_loadd(6, at, right.stride);
    if constexpr (kColumns == 2) _tile_loadd(7, at + right.tile, right.stride);
  };
  const auto multiply = [] {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRows == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRows == 2 && kColumns == 2) _tile_dpbf16ps(3, 5, 7);
  };
  amx::memory_is_used();
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kLine);
    if constexpr (kColumns == 2) _tile_loadd(1, sums + kSums, kLine);
    if constexpr (kRows == 2) _tile_loadd(2, sums + 2 * kSums, kLine);
    if constexpr (kRows == 2 && kColumns == 2) _tile_loadd(3, sums + 3 * kSums, kLine);
  }
  for (size_t step = 0; step < steps; ++step) {
    const uint16_t *at = left.at + a(step), *bt = right.at + b(step);
    const uint16_t* next = right.at + b(std::min(step + 2, steps - 1));
    const auto fetch = [&](size_t part, size_t line) {  // prefetches what is not in the first-level cache
      if (right.stride == kLine) return;  // the processor prefetches such streams by itself
      const char* row = reinterpret_cast<const char*>(next + part * right.part) + line * kLine;
      for (size_t i = 0; i < amx::kSide; ++i, row += right.stride) _mm_prefetch(row, _MM_HINT_T0);
    };
    if constexpr (kParts == 3) {
      load_a(at), load_b(bt + 2 * right.part), multiply();  // the order with the fewest loads
      fetch(2, 0), load_b(bt + right.part), fetch(2, 1), multiply();
      fetch(2, 2), load_a(at + left.part), fetch(1, 0), multiply();
      fetch(1, 1), load_b(bt), fetch(1, 2), multiply();
      fetch(0, 0), load_a(at), fetch(0, 1), multiply();
      load_a(at + 2 * left.part), fetch(0, 2), multiply();
    } else {
      load_a(at), load_b(bt + right.part), fetch(1, 0), multiply();
      fetch(1, 1), load_b(bt), fetch(1, 2), fetch(0, 0), multiply();
      fetch(0, 1), load_a(at + left.part), fetch(0, 2), multiply();
    }
  }
  _tile_stored(0, sums, kLine);
  if constexpr (kColumns == 2) _tile_stored(1, sums + kSums, kLine);
  if constexpr (kRows == 2) _tile_stored(2, sums + 2 * kSums, kLine);
  if constexpr (kRows == 2 && kColumns == 2) _tile_stored(3, sums + 3 * kSums, kLine);
  amx::memory_is_used();
}

// The same for one or two rows and columns of tiles.
template <size_t kParts, class A, class B>
void add_up(size_t rows, size_t columns, size_t steps, const Operand& left, const A& a, const Operand& right, const B& b,
            float* sums, bool fresh) {
  (rows == 2 ? (columns == 2 ? add_up<kParts, 2, 2, A, B> : add_up<kParts, 2, 1, A, B>)
             : (columns == 2 ? add_up<kParts, 1, 2, A, B> : add_up<kParts, 1, 1, A, B>))(steps, left, a, right, b, sums,
                                                                                         fresh);
}

// to += from
inline void add(const float* from, float* to, size_t count) {
#pragma omp simd
  for (size_t i = 0; i < count; ++i) to[i] += from[i];
}

#endif

}  // namespace gradgraph::windows
