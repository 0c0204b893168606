// The layout of maps for depthwise convolutions in the plain layout: runs of positions, and which windows read which
// positions (see depthwise.cc).
#pragma once

#include "channels.h"
#include "conv.h"

namespace gradgraph::depthwise {

using std::size_t;

using amx::up;

constexpr size_t kUnits = 64;       // the minimum number of pieces of work, if there are as many maps
constexpr size_t kRun = 256;        // numbers per lane that are added in float
constexpr size_t kTaps = 32;        // taps whose products are added before they join a longer sum
constexpr size_t kUnseen = static_cast<size_t>(-1);

// The geometry along rows or columns.
struct Axis {
  size_t size, count, kernel, stride, dilation, begin;

  size_t extent() const { return (kernel - 1) * dilation; }
  // The number of positions of one phase by which windows reach beyond their own.
  size_t reach() const { return up(extent(), stride); }
  size_t lines() const { return count + reach(); }
  size_t phase(size_t tap) const { return tap * dilation % stride; }
  size_t step(size_t tap) const { return tap * dilation / stride; }
};

inline Axis axis_of(const Dims& x, std::array<size_t, 2> kernel, const windows::Geometry& at, size_t i) {
  const auto counts = at.counts(windows::Maps(x), kernel);
  return {static_cast<size_t>(x.size[2 + i]), counts[i], kernel[i], at.strides[i], at.dilations[i], at.begins[i]};
}

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
  size_t pitch, run, back;             // lengths of a row, of the run of a phase, and of the run of a padded dy
  std::vector<Tap> taps;               // from windows to the runs of x
  std::vector<std::vector<Tap>> into;  // for each phase of x, from its pixels to the run of dy
  std::vector<size_t> rows;            // the offsets of rows of x in its runs, for rows that windows read
  std::array<Part, 2> columns;         // every stride-th column, starting with the first or the second one
  size_t chunk, chunks;                // images per unit of work, and their number

  Layout(const Dims& x, std::array<size_t, 2> kernel, const windows::Geometry& at)
      : maps(x, 1), high(axis_of(x, kernel, at, 0)), wide(axis_of(x, kernel, at, 1)) {
    measure();
    find_taps();
    find_rows();
    const size_t pieces = std::min(maps.images, up(kUnits, std::max<size_t>(1, maps.channels)));
    chunk = up(maps.images, std::max<size_t>(1, pieces));
    chunks = chunk == 0 ? 0 : up(maps.images, chunk);
  }

  size_t phases() const { return high.stride * wide.stride; }
  // The end of the windows, counted from the first, and the offset of dy in its run.
  size_t end() const { return (high.count - 1) * pitch + wide.count; }
  size_t first() const { return high.reach() * pitch + wide.reach(); }
  size_t map_of_x() const { return high.size * wide.size; }
  size_t map_of_y() const { return high.count * wide.count; }

 private:
  static constexpr size_t kPadded = 16;

  void measure() {
    pitch = wide.lines();
    run = up(high.lines() * pitch, kPadded) * kPadded + kPadded;
    back = up((high.lines() + high.reach()) * pitch + wide.reach(), kPadded) * kPadded + kPadded;
  }

  void find_taps() {
    into.resize(phases());
    for (size_t i = 0; i < high.kernel; ++i) {
      for (size_t j = 0; j < wide.kernel; ++j) {
        const size_t phase = high.phase(i) * wide.stride + wide.phase(j), weight = i * wide.kernel + j;
        taps.push_back({weight, phase * run + high.step(i) * pitch + wide.step(j)});
        into[phase].push_back({weight, (high.reach() - high.step(i)) * pitch + wide.reach() - wide.step(j)});
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
      columns[i] = {phase * run + first, std::min(count, std::max(wide.lines(), first) - first), count};
    }
  }
};

}  // namespace gradgraph::depthwise
