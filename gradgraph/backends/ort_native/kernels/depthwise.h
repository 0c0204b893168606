// The layout of maps for depthwise convolutions: runs of positions, and which windows read which positions (see
// depthwise.cc).
#pragma once

#include "channels.h"
#include "conv.h"

namespace gradgraph::depthwise {

using std::size_t;

using amx::up;

constexpr size_t kUnits = 64;       // the minimum number of pieces of work, if there are as many maps
constexpr size_t kTurned = kPixels;  // channels that are transposed together
constexpr size_t kWide = 24;        // columns from which rows fill lanes well enough, without phases
constexpr size_t kCache = 1 << 18;  // floats for which the second-level cache has room
constexpr size_t kUnseen = static_cast<size_t>(-1);

// The geometry along rows or columns.
struct Axis {
  size_t size, count, kernel, stride, dilation, begin;

  // The number of positions of one phase by which windows reach beyond their own.
  size_t reach() const { return up((kernel - 1) * dilation, stride); }
  size_t lines() const { return count + reach(); }
  size_t phase(size_t tap) const { return tap * dilation % stride; }
  size_t step(size_t tap) const { return tap * dilation / stride; }
};

// A tap: the index of its weight, and the offset at which it reads.
struct Tap {
  size_t weight, offset;
};

// The columns of a row of x that are consecutive in a run; windows read only the first ones.
struct Part {
  size_t offset, seen, count;
};

// The layout of maps, windows and runs; offsets and lengths are in floats.
struct Layout {
  Maps maps;
  Axis high, wide;
  size_t lanes;                        // contiguous channels in runs: the block, or the transposed channels
  size_t pitch, run, back;             // lengths of a row, of the run of a phase, and of the run of a padded dy
  std::vector<Tap> taps;               // from windows to the runs of x
  std::vector<std::vector<Tap>> into;  // for each phase of x, from its pixels to the run of dy
  std::vector<size_t> rows;            // the offsets of rows of x in its runs, for rows that windows read
  std::array<Part, 2> columns;         // every stride-th column, starting with the first or the second one
  std::vector<size_t> of_x, of_y;       // if channels are transposed: the offset of each pixel in the runs
  size_t chunk, chunks;                // images per unit of work, and their number

  Layout(const Dims& x, std::array<size_t, 2> kernel, const windows::Geometry& at, size_t block)
      : maps(x, block), high(axis(x, kernel, at, 0)), wide(axis(x, kernel, at, 1)), lanes(block) {
    measure();
    if (can_turn()) {
      lanes = kTurned;
      measure();
      if (2 * phases() * run + back > kCache) {
        lanes = block;
        measure();
      }
    }
    find_taps();
    find_rows();
    if (is_turned()) find_places();
    const size_t pieces = std::min(maps.images, up(kUnits, std::max<size_t>(1, groups())));
    chunk = up(maps.images, std::max<size_t>(1, pieces));
    chunks = chunk == 0 ? 0 : up(maps.images, chunk);
  }

  bool is_turned() const { return lanes != maps.block; }
  size_t groups() const { return maps.channels / lanes; }
  size_t phases() const { return high.stride * wide.stride; }
  // The end of the windows, counted from the first, and the offset of dy in its run.
  size_t end() const { return (high.count - 1) * pitch + wide.count * lanes; }
  size_t first() const { return high.reach() * pitch + wide.reach() * lanes; }
  size_t row_of_x() const { return wide.size * lanes; }
  size_t row_of_y() const { return wide.count * lanes; }
  size_t map_of_x() const { return high.size * row_of_x(); }
  size_t map_of_y() const { return high.count * row_of_y(); }
  Dims dims_of_y() const {
    Dims dims;
    dims.rank = 4;
    dims.size = {static_cast<int64_t>(maps.images), static_cast<int64_t>(maps.channels),
                 static_cast<int64_t>(high.count), static_cast<int64_t>(wide.count)};
    return dims;
  }

 private:
  static constexpr size_t kPadded = 16;

  bool can_turn() const {
#if defined(__AVX2__)
    return maps.block == 1 && maps.channels % kTurned == 0 && (wide.size < kWide || wide.stride == 2);
#else
    return false;
#endif
  }

  void measure() {
    pitch = wide.lines() * lanes;
    run = up(high.lines() * pitch, kPadded) * kPadded + kPadded;
    back = up((high.lines() + high.reach()) * pitch + wide.reach() * lanes, kPadded) * kPadded + kPadded;
  }

  void find_taps() {
    into.resize(phases());
    for (size_t i = 0; i < high.kernel; ++i) {
      for (size_t j = 0; j < wide.kernel; ++j) {
        const size_t phase = high.phase(i) * wide.stride + wide.phase(j), weight = i * wide.kernel + j;
        taps.push_back({weight, phase * run + high.step(i) * pitch + wide.step(j) * lanes});
        into[phase].push_back({weight, (high.reach() - high.step(i)) * pitch + (wide.reach() - wide.step(j)) * lanes});
      }
    }
  }

  void find_rows() {
    for (size_t i = 0; i < high.size; ++i) {
      const size_t phase = (i + high.begin) % high.stride, line = (i + high.begin) / high.stride;
      if (line < high.lines()) rows.push_back(phase * wide.stride * run + line * pitch);
    }
    for (size_t i = 0; i < wide.stride; ++i) {
      const size_t phase = (i + wide.begin) % wide.stride, first = (i + wide.begin) / wide.stride;
      const size_t count = wide.size > i ? up(wide.size - i, wide.stride) : 0;
      columns[i] = {phase * run + first * lanes, std::min(count, std::max(wide.lines(), first) - first), count};
    }
  }

  void find_places() {
    for (size_t i = 0; i < high.size; ++i) {
      for (size_t j = 0; j < wide.size; ++j) {
        const Part& part = columns[j % wide.stride];
        const bool seen = i < rows.size() && j / wide.stride < part.seen;
        of_x.push_back(seen ? rows[i] + part.offset + j / wide.stride * lanes : kUnseen);
      }
    }
    for (size_t i = 0; i < high.count * wide.count; ++i) {
      of_y.push_back(i / wide.count * pitch + i % wide.count * lanes);
    }
  }

  static Axis axis(const Dims& x, std::array<size_t, 2> kernel, const windows::Geometry& at, size_t i) {
    const auto counts = at.counts(windows::Maps(x), kernel);
    return {static_cast<size_t>(x.size[2 + i]), counts[i], kernel[i], at.strides[i], at.dilations[i], at.begins[i]};
  }
};

}  // namespace gradgraph::depthwise
