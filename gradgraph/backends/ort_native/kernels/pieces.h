// How the result of a product is divided among threads.
#pragma once

#include <algorithm>
#include <thread>

#include "amx.h"

namespace gradgraph::amx {

// A rectangle of the result: [row, row_end) x [column, column_end), in panels.
struct Piece {
  size_t row, row_end, column, column_end;
};

inline size_t processors() {
  static const size_t count = std::max(1u, std::thread::hardware_concurrency());
  return count;
}

// Divides the result into at least as many pieces as there are threads, each with an even number of panels except at
// the edges, so that as little as possible is packed more than once.
struct Pieces {
  size_t rows, columns, height, width;
  Pieces(size_t row_panels, size_t column_panels, size_t threads) : rows(row_panels), columns(column_panels) {
    size_t least = SIZE_MAX;
    for (size_t down = 1; down <= threads; ++down) {
      const size_t across = up(threads, down), tall = 2 * up(rows, 2 * down), wide = 2 * up(columns, 2 * across);
      // the work of the busiest thread: its products, and packing, which costs as much as about ten rows or columns
      const size_t cost = tall * wide + tall + wide;
      if (cost < least) least = cost, height = tall, width = wide;
    }
  }
  size_t count() const { return up(rows, height) * up(columns, width); }
  Piece operator[](size_t i) const {
    const size_t row = i % up(rows, height) * height, column = i / up(rows, height) * width;
    return {row, std::min(rows, row + height), column, std::min(columns, column + width)};
  }
};

}  // namespace gradgraph::amx
