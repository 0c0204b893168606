// Depthwise convolutions of a block of channels, as many as fill a register: every pixel is a vector. Maps in the plain
// layout are transposed on the way into the cache and back.
//
// Rows of x and dy are copied with their padding; rows of padding are skipped. So maps of 3 x 3 pixels do not multiply
// mostly zeros. With a stride, nothing changes but the distance between the pixels that neighbouring windows read.
#pragma once

#include <cmath>
#include <utility>

#include "bounds.h"
#include "depthwise.h"
#include "transpose.h"

namespace gradgraph::depthwise {

// Measured on an AMD EPYC (Zen 4, AVX512), one thread, kernels of 3 to 7, 1 to 64 images: channels that fill 0.75 of the
// lanes took 0.5 to 0.8 of the time of vectors of pixels, 0.56 of them 1.1 to 1.5; maps of 112 x 112 pixels took 0.65 to
// 1.07, of 128 x 128 pixels 1.6 to 1.9. Prefetching the next image's maps: 0.55 to 0.8 of the time without, up to 24 x 24
// pixels; 1.1 to 1.2 for maps of 48 x 48.
constexpr size_t kFilled = 75;           // percentage of the lanes that channels should fill
constexpr size_t kLargest = 200 << 10;   // floats of a block's map
constexpr size_t kSmall = 1 << 14;       // floats of a map from which on it is not prefetched as a whole,
constexpr size_t kAhead = 64;            // but so many floats ahead
constexpr size_t kFirstCache = 1 << 13;  // floats of the first-level cache
constexpr size_t kAtOnce = 8;            // neighbouring pixels whose sums are computed together
constexpr size_t kFewTaps = 9;           // taps whose weights fit in registers
constexpr size_t kTapsAtOnce = 7;        // taps of a row of the filter whose dot products are computed together

// A row of a map that a row of the filter meets.
struct Line {
  size_t tap, row;
};

// A column of the filter, and the offset of the pixel that it meets first.
struct Column {
  size_t tap, offset;
};

// The rows that meet each of `count` rows.
class Lines {
 public:
  template <class Meets>
  Lines(size_t count, size_t taps, const Meets& meets) {
    for (size_t i = 0; i < count; ++i) {
      ends_.push_back(lines_.size());
      for (size_t tap = 0; tap < taps; ++tap) {
        const size_t row = meets(i, tap);
        if (row != kUnseen) lines_.push_back({tap, row});
      }
    }
    ends_.push_back(lines_.size());
  }

  const Line* begin(size_t i) const { return lines_.data() + ends_[i]; }
  const Line* end(size_t i) const { return lines_.data() + ends_[i + 1]; }
  // Whether the same rows of the filter meet rows i and j.
  bool are_alike(size_t i, size_t j) const {
    const size_t met = ends_[i + 1] - ends_[i];
    return met == ends_[j + 1] - ends_[j] && (met == 0 || begin(i)->tap == begin(j)->tap);
  }

 private:
  std::vector<Line> lines_;
  std::vector<size_t> ends_;
};

// The row or column of x that tap `tap` of window `i` reads; and the window whose tap reads `x`. kUnseen if none does.
inline size_t read_by(const Axis& axis, size_t i, size_t tap) {
  const size_t at = i * axis.stride + tap * axis.dilation;
  return at >= axis.begin && at - axis.begin < axis.size ? at - axis.begin : kUnseen;
}
inline size_t window_of(const Axis& axis, size_t x, size_t tap) {
  const size_t at = x + axis.begin, back = tap * axis.dilation;
  if (at < back || (at - back) % axis.stride) return kUnseen;
  return (at - back) / axis.stride < axis.count ? (at - back) / axis.stride : kUnseen;
}

// Every stride-th pixel of a row of dx, from `first` on: they are sums over the same columns of the filter.
struct Phase {
  size_t first, count;
  std::vector<Column> columns;
};

struct Blocks {
  Maps maps;
  Axis high, wide;
  size_t lanes;           // channels of a block
  size_t left;            // columns of zeros before a row of dy
  size_t row_x, row_y;    // floats of a padded row
  Lines of_y, of_x;       // the rows of x that give a row of y, and the rows of dy that give one of dx
  std::vector<Column> columns;  // what a window reads
  std::vector<Phase> phases;    // what gives dx
  std::vector<size_t> places_x, places_y;  // if channels are transposed: the offset of each pixel in the padded rows
  size_t chunk, chunks;   // images per unit of work, and their number
  size_t together;        // images that are in the cache at a time

  Blocks(const Dims& x, std::array<size_t, 2> kernel, const windows::Geometry& at, size_t block)
      : maps(x, block),
        high(axis_of(x, kernel, at, 0)),
        wide(axis_of(x, kernel, at, 1)),
        lanes(block > 1 ? block : kPixels),
        left(up(std::max(wide.extent(), wide.begin) - wide.begin, wide.stride)),
        row_x(std::max(wide.begin + wide.size, (wide.count - 1) * wide.stride + wide.extent() + 1) * lanes),
        row_y((left + std::max(wide.count, (std::max<size_t>(1, wide.size) - 1 + wide.begin) / wide.stride + 1)) * lanes),
        of_y(high.count, high.kernel, [&](size_t i, size_t tap) { return read_by(high, i, tap); }),
        of_x(high.size, high.kernel, [&](size_t i, size_t tap) { return window_of(high, i, tap); }) {
    for (size_t tap = 0; tap < wide.kernel; ++tap) columns.push_back({tap, tap * wide.dilation * lanes});
    for (size_t first = 0; first < std::min(wide.stride, wide.size); ++first) add_phase(first);
    if (is_turned()) find_places();
    const size_t pieces = std::min(maps.images, up(kUnits, std::max<size_t>(1, groups())));
    chunk = up(maps.images, std::max<size_t>(1, pieces));
    chunks = chunk == 0 ? 0 : up(maps.images, chunk);
    together = std::min(kFirstCache / std::max<size_t>(1, floats_x()), kRun / std::max<size_t>(1, pixels_y()));
    together = std::max<size_t>(1, std::min(chunk, together));
  }

  // Whether vectors of pixels in the plain layout would be slower.
  static bool serve(const Dims& x, size_t block) {
    if (block > 1) return true;
#if defined(__AVX2__)
    const auto channels = static_cast<size_t>(x.size[1]);
    const bool filled = 100 * channels >= kFilled * up(channels, kPixels) * kPixels;
    return filled && x.count(2, 4) * kPixels <= kLargest;
#else
    return false;
#endif
  }

  bool is_turned() const { return maps.block == 1; }
  size_t groups() const { return up(maps.channels, lanes); }
  size_t pixels_x() const { return high.size * wide.size; }
  size_t pixels_y() const { return high.count * wide.count; }
  // How far ahead maps are prefetched: that of the next image, if it is small.
  size_t ahead(size_t pixels) const { return pixels * lanes <= kSmall ? maps.channels * pixels : kAhead; }
  size_t floats_x() const { return high.size * row_x; }
  size_t floats_y() const { return high.count * row_y; }
  size_t taps() const { return high.kernel * wide.kernel; }

 private:
  void add_phase(size_t first) {
    Phase phase{first, (wide.size - first - 1) / wide.stride + 1, {}};
    for (size_t tap = 0; tap < wide.kernel; ++tap) {
      const size_t at = first + wide.begin + left * wide.stride, back = tap * wide.dilation;
      if ((at - back) % wide.stride == 0) phase.columns.push_back({tap, (at - back) / wide.stride * lanes});
    }
    phases.push_back(std::move(phase));
  }

  void find_places() {
    for (size_t i = 0; i < pixels_x(); ++i) {
      places_x.push_back(i / wide.size * row_x + (wide.begin + i % wide.size) * lanes);
    }
    for (size_t i = 0; i < pixels_y(); ++i) places_y.push_back(i / wide.count * row_y + (left + i % wide.count) * lanes);
  }
};

// --- copying into the cache and back ---------------------------------------------------------------------------------

#if defined(__AVX2__)

#if defined(__AVX512F__)
using Row = __m512i;
#else
using Row = __m256i;
#endif

// Transposes kPixels pixels of as many maps between the layouts.
inline void turn(Place<1>::V (&lanes)[kPixels]) {
  Row rows[kPixels];
  for (size_t i = 0; i < kPixels; ++i) rows[i] = (Row)lanes[i];
  transpose(rows);
  for (size_t i = 0; i < kPixels; ++i) lanes[i] = (Place<1>::V)rows[i];
}

// Copies `held` maps to pixels, each of which has a place; finish(lanes) is applied. So many short rows are more than the
// processor prefetches by itself: `ahead` floats further lie the maps of the next image.
template <class Finish>
void turn_in(const float* maps, size_t held, const std::vector<size_t>& places, size_t ahead, float* to,
             const Finish& finish) {
  walk<1>(0, places.size(), [&](const Place<1>& at) {
    for (size_t c = 0; c < held; ++c) __builtin_prefetch(maps + ahead + c * places.size() + at.begin, 0, 2);
    Place<1>::V lanes[kPixels]{};
    if (held == kPixels) {
      for (size_t c = 0; c < kPixels; ++c) lanes[c] = finish(at.load(maps + c * places.size()));
    } else {
      for (size_t c = 0; c < held; ++c) lanes[c] = finish(at.load(maps + c * places.size()));
    }
    turn(lanes);
    const size_t* place = places.data() + at.begin;
    if (at.count == kPixels) {
      for (size_t i = 0; i < kPixels; ++i) store<kPixels>(to + place[i], lanes[i]);
    } else {
      for (size_t i = 0; i < at.count; ++i) store<kPixels>(to + place[i], lanes[i]);
    }
  });
}

// Copies pixels to `held` maps; finish(lanes, place, offset of the map) is applied.
template <class Finish>
void turn_out(const float* from, size_t pixels, size_t ahead, float* maps, size_t held, const Finish& finish) {
  walk<1>(0, pixels, [&](const Place<1>& at) {
    for (size_t c = 0; c < held; ++c) __builtin_prefetch(maps + ahead + c * pixels + at.begin, 1, 2);
    Place<1>::V lanes[kPixels]{};
    const float* first = from + at.begin * kPixels;
    if (at.count == kPixels) {
      for (size_t i = 0; i < kPixels; ++i) lanes[i] = load<kPixels>(first + i * kPixels);
    } else {
      for (size_t i = 0; i < at.count; ++i) lanes[i] = load<kPixels>(first + i * kPixels);
    }
    turn(lanes);
    if (held == kPixels) {
      for (size_t c = 0; c < kPixels; ++c) at.store(maps + c * pixels, finish(lanes[c], at, c * pixels));
    } else {
      for (size_t c = 0; c < held; ++c) at.store(maps + c * pixels, finish(lanes[c], at, c * pixels));
    }
  });
}

#else

template <class... Given>
void turn_in(const Given&...) {}
template <class... Given>
void turn_out(const Given&...) {}

#endif

// Sets the columns of padding of `rows` rows to zero.
inline void clear_margins(float* rows, size_t count, size_t row, size_t begin, size_t seen) {
  for (size_t i = 0; i < count; ++i, rows += row) {
    std::fill(rows, rows + begin, 0.0f);
    std::fill(rows + begin + seen, rows + row, 0.0f);
  }
}

// Some images of a block of channels.
struct Piece {
  size_t group, chunk, first, last, held;

  Piece(const Blocks& it, size_t i)
      : group(i % it.groups()),
        chunk(i / it.groups()),
        first(chunk * it.chunk),
        last(std::min(it.maps.images, first + it.chunk)),
        held(std::min(it.lanes, it.maps.channels - group * it.lanes)) {}

  // The first float of the block's map in an image, for maps of so many pixels.
  size_t map(const Blocks& it, size_t image, size_t pixels) const {
    return (image * it.maps.channels + group * it.lanes) * pixels;
  }
};

// Copies a block of maps of x into padded rows.
template <size_t B>
void bring_x(const Blocks& it, const Piece& piece, const Bounds& bounds, const float* x, float* rows) {
  const bool free = bounds.kind == Bounds::kNone;
  if (it.is_turned()) {
    const size_t ahead = it.ahead(it.pixels_x());
    if (free) return turn_in(x, piece.held, it.places_x, ahead, rows, [](const auto& lanes) { return lanes; });
    return turn_in(x, piece.held, it.places_x, ahead, rows, [&](const auto& lanes) { return bounds.apply(lanes); });
  }
  rows += it.wide.begin * B;
  for (size_t i = 0; i < it.high.size; ++i, rows += it.row_x, x += it.wide.size * B) {
    if (free) {
      for (size_t j = 0; j < it.wide.size * B; j += B) store<B>(rows + j, load<B>(x + j));
    } else {
      for (size_t j = 0; j < it.wide.size * B; j += B) store<B>(rows + j, bounds.apply(load<B>(x + j)));
    }
  }
}

template <size_t B>
void bring_dy(const Blocks& it, const Piece& piece, const float* dy, float* rows) {
  if (it.is_turned()) {
    const size_t ahead = it.ahead(it.pixels_y());
    return turn_in(dy, piece.held, it.places_y, ahead, rows, [](const auto& lanes) { return lanes; });
  }
  rows += it.left * B;
  for (size_t i = 0; i < it.high.count; ++i, rows += it.row_y, dy += it.wide.count * B) {
    for (size_t j = 0; j < it.wide.count * B; j += B) store<B>(rows + j, load<B>(dy + j));
  }
}

// --- sums ------------------------------------------------------------------------------------------------------------

// Pixels that are sums over the same rows and columns of a filter, relative to their own: rows of `count` pixels, of some
// images.
struct Sums {
  const float* from;  // padded rows, `row` floats apart
  size_t row;
  const Line *lines, *end;  // of the first row
  const std::vector<Column>& columns;
  const float* weights;
  size_t kernel;        // columns of the filter
  const float* start;   // what the products are added to
  float* to;
  size_t images, rows, count;
  size_t image, shift, step;            // floats between what images, rows and neighbouring pixels read
  size_t to_image, to_shift, to_step;   // and between themselves
};

// sums[n] += Σ weight · pixel over some rows of the filter, for N pixels, the first of which begins at `at`.
template <size_t B, size_t N>
void add_lines(const Sums& of, const Line* line, const Line* end, size_t at, typename Lanes<B>::type (&sums)[N]) {
  using V = typename Lanes<B>::type;
  const Column *first = of.columns.data(), *last = first + of.columns.size();
  for (; line < end; ++line) {
    const float *row = of.from + line->row * of.row + at, *weights = of.weights + line->tap * of.kernel * B;
    for (const Column* column = first; column < last; ++column) {
      const V weight = load<B>(weights + column->tap * B);
      const float* x = row + column->offset;
      for (size_t n = 0; n < N; ++n) sums[n] = fused<V>(weight, load<B>(x + n * of.step), sums[n]);
    }
  }
}

// N pixels; up to kTaps products join a longer sum.
template <size_t B, size_t N>
void add_pixels(const Sums& of, size_t at, float* to) {
  using V = typename Lanes<B>::type;
  const size_t together = std::max<size_t>(1, kTaps / of.kernel);
  V sums[N];
  for (size_t n = 0; n < N; ++n) sums[n] = load<B>(of.start);
  const Line* line = of.lines;
  for (; static_cast<size_t>(of.end - line) > together; line += together) {
    V some[N]{};
    add_lines<B, N>(of, line, line + together, at, some);
    for (size_t n = 0; n < N; ++n) sums[n] += some[n];
  }
  if (line == of.lines) {
    add_lines<B, N>(of, line, of.end, at, sums);
  } else {
    V some[N]{};
    add_lines<B, N>(of, line, of.end, at, some);
    for (size_t n = 0; n < N; ++n) sums[n] += some[n];
  }
  for (size_t n = 0; n < N; ++n) store<B>(to + n * of.to_step, sums[n]);
}

template <size_t B, size_t... N>
void add_many_taps(const Sums& of, std::index_sequence<N...>) {
  using Add = void (*)(const Sums&, size_t, float*);
  static constexpr Add adds[] = {add_pixels<B, N + 1>...};
  for (size_t image = 0; image < of.images; ++image) {
    for (size_t row = 0; row < of.rows; ++row) {
      const size_t at = image * of.image + row * of.shift, to = image * of.to_image + row * of.to_shift;
      for (size_t parts = up(of.count, kAtOnce), done = 0; parts > 0; --parts) {
        const size_t n = up(of.count - done, parts);
        adds[n - 1](of, at + done * of.step, of.to + to + done * of.to_step);
        done += n;
      }
    }
  }
}

// The same for T taps, whose weights stay in registers.
template <size_t B, size_t T>
void add_few_taps(const Sums& of) {
  using V = typename Lanes<B>::type;
  V weights[T];
  const float* from[T];
  size_t t = 0;
  for (const Line* line = of.lines; line < of.end; ++line) {
    for (const Column& column : of.columns) {
      weights[t] = load<B>(of.weights + (line->tap * of.kernel + column.tap) * B);
      from[t++] = of.from + line->row * of.row + column.offset;
    }
  }
  const V start = load<B>(of.start);
  for (size_t image = 0; image < of.images; ++image) {
    for (size_t row = 0; row < of.rows; ++row) {
      size_t at = image * of.image + row * of.shift;
      float* to = of.to + image * of.to_image + row * of.to_shift;
      for (size_t j = 0; j < of.count; ++j, at += of.step, to += of.to_step) {
        V sum = start;
        for (t = 0; t < T; ++t) sum = fused<V>(weights[t], load<B>(from[t] + at), sum);
        store<B>(to, sum);
      }
    }
  }
}

template <size_t B, size_t... T>
void add_taps(const Sums& of, std::index_sequence<T...>) {
  using Add = void (*)(const Sums&);
  static constexpr Add adds[] = {add_few_taps<B, T>...};
  const size_t taps = static_cast<size_t>(of.end - of.lines) * of.columns.size();
  if (taps < sizeof...(T)) {
    adds[taps](of);
  } else {
    add_many_taps<B>(of, std::make_index_sequence<kAtOnce>());
  }
}

// Sums for rows first, first + step, …, below `last`; `of` describes the first row of all.
template <size_t B>
void add_rows(Sums of, const Lines& lines, size_t first, size_t last, size_t step) {
  float* const to = of.to;
  for (size_t next = first; first < last; first = next) {
    while (next < last && lines.are_alike(first, next)) next += step;
    of.lines = lines.begin(first);
    of.end = lines.end(first);
    of.rows = (next - first) / step;
    of.to = to + first * (of.to_shift / step);
    add_taps<B>(of, std::make_index_sequence<kFewTaps + 1>());
  }
}

// Σ dy · x for taps of a row of the filter, over rows of dy and the rows of x that they meet.
struct Products {
  const float *dy, *x;
  size_t row_y, row_x, rows, count;
  size_t images, image_y, image_x;  // their number, and floats between them
  size_t stride;     // rows of x between rows of windows
  size_t step, tap;  // floats between neighbouring windows, and between taps
};

template <size_t B, size_t T>
void add_products(const Products& of, float* parts) {
  using V = typename Lanes<B>::type;
  V sums[T], others[T]{};
  for (size_t t = 0; t < T; ++t) sums[t] = load<B>(parts + t * B);
  for (size_t n = 0; n < of.images * of.rows; ++n) {
    const size_t image = n / of.rows, i = n % of.rows;
    const float* dy = of.dy + image * of.image_y + i * of.row_y;
    const float* x = of.x + image * of.image_x + i * of.row_x * of.stride;
    size_t j = 0;
    for (; j + 2 <= of.count; j += 2) {
      const V d = load<B>(dy + j * B), e = load<B>(dy + (j + 1) * B);
      const float *at = x + j * of.step, *next = at + of.step;
      for (size_t t = 0; t < T; ++t) {
        sums[t] = fused<V>(d, load<B>(at + t * of.tap), sums[t]);
        others[t] = fused<V>(e, load<B>(next + t * of.tap), others[t]);
      }
    }
    if (j < of.count) {
      const V d = load<B>(dy + j * B);
      const float* at = x + j * of.step;
      for (size_t t = 0; t < T; ++t) sums[t] = fused<V>(d, load<B>(at + t * of.tap), sums[t]);
    }
  }
  for (size_t t = 0; t < T; ++t) store<B>(parts + t * B, sums[t] + others[t]);
}

template <size_t B, size_t... T>
void add_so_many_taps(size_t taps, const Products& of, float* parts, std::index_sequence<T...>) {
  using Add = void (*)(const Products&, float*);
  static constexpr Add adds[] = {add_products<B, T + 1>...};
  adds[taps - 1](of, parts);
}

// Σ dy · x for T taps, over rows of dy that all of them meet; `lines`: those of the first row.
template <size_t B, size_t T>
void add_few_products(const Products& of, const Line* lines, size_t taps_of_row, float* parts) {
  using V = typename Lanes<B>::type;
  V sums[T];
  const float* at[T];
  float* part[T];
  for (size_t t = 0; t < T; ++t) {
    const Line& line = lines[t / taps_of_row];
    part[t] = parts + (line.tap * taps_of_row + t % taps_of_row) * B;
    at[t] = of.x + line.row * of.row_x + t % taps_of_row * of.tap;
    sums[t] = load<B>(part[t]);
  }
  for (size_t n = 0; n < of.images * of.rows; ++n) {
    const size_t image = n / of.rows, i = n % of.rows;
    const float* dy = of.dy + image * of.image_y + i * of.row_y;
    const size_t shift = image * of.image_x + i * of.row_x * of.stride;
    for (size_t j = 0; j < of.count; ++j) {
      const V d = load<B>(dy + j * B);
      for (size_t t = 0; t < T; ++t) sums[t] = fused<V>(d, load<B>(at[t] + shift + j * of.step), sums[t]);
    }
  }
  for (size_t t = 0; t < T; ++t) store<B>(part[t], sums[t]);
}

template <size_t B, size_t... T>
void add_so_few_products(size_t taps, const Products& of, const Line* lines, size_t taps_of_row, float* parts,
                         std::index_sequence<T...>) {
  using Add = void (*)(const Products&, const Line*, size_t, float*);
  static constexpr Add adds[] = {add_few_products<B, T>...};
  adds[taps](of, lines, taps_of_row, parts);
}

// The gradient of a block's filters: up to kRun products are added in float, lane by lane, then in double.
template <size_t B>
class FilterGradient {
 public:
  explicit FilterGradient(const Blocks& it) : it_(it), parts_(it.taps() * B), totals_(it.taps() * B) {}

  // `images` padded maps of each; several if all of their windows are fewer than kRun
  void add(const float* dy, const float* x, size_t images) {
    const size_t wide = it_.wide.count, band = std::max<size_t>(1, kRun / std::max<size_t>(1, wide));
    for (size_t first = 0; first < it_.high.count; first += band) {
      const size_t last = std::min(it_.high.count, first + band);
      for (size_t begin = 0; begin < wide; begin += kRun) {
        const size_t count = std::min(kRun, wide - begin);
        const size_t terms = images * (last - first) * count;
        if (terms_ + terms > kRun) flush();
        terms_ += terms;
        if (it_.taps() <= kFewTaps) {
          add_few(dy, x, images, first, last, begin, count);
        } else {
          for (size_t tap = 0; tap < it_.high.kernel; ++tap) add_rows(dy, x, images, tap, first, last, begin, count);
        }
      }
    }
  }

  // Adds dy times the rows of padding, which `add` has skipped: only numbers that are not finite make a difference.
  void add_padding(const float* dy) {
    for (size_t tap = 0; tap < it_.high.kernel; ++tap) {
      for (size_t i = 0; i < it_.high.count; ++i) {
        if (read_by(it_.high, i, tap) != kUnseen) continue;
        const float* row = dy + i * it_.row_y + it_.left * B;
        for (size_t j = 0; j < it_.wide.count * B; ++j) {
          for (size_t t = 0; t < it_.wide.kernel; ++t) {
            totals_[(tap * it_.wide.kernel + t) * B + j % B] += 0.0f * row[j];
          }
        }
      }
    }
  }

  const std::vector<double>& totals() {
    flush();
    return totals_;
  }

 private:
  void add_rows(const float* dy, const float* x, size_t images, size_t tap, size_t first, size_t last, size_t begin,
                size_t count) {
    const Axis &high = it_.high, &wide = it_.wide;
    while (first < last && read_by(high, first, tap) == kUnseen) ++first;
    while (first < last && read_by(high, last - 1, tap) == kUnseen) --last;
    if (first == last) return;
    Products of{dy + first * it_.row_y + (it_.left + begin) * B,
                x + read_by(high, first, tap) * it_.row_x + begin * wide.stride * B,
                it_.row_y,
                it_.row_x,
                last - first,
                count,
                images,
                it_.floats_y(),
                it_.floats_x(),
                high.stride,
                wide.stride * B,
                wide.dilation * B};
    float* parts = &parts_[tap * wide.kernel * B];
    for (size_t t = 0; t < wide.kernel; t += kTapsAtOnce) {
      add_so_many_taps<B>(std::min(kTapsAtOnce, wide.kernel - t), of, parts + t * B,
                          std::make_index_sequence<kTapsAtOnce>());
      of.x += kTapsAtOnce * of.tap;
    }
  }

  void add_few(const float* dy, const float* x, size_t images, size_t first, size_t last, size_t begin, size_t count) {
    const Lines& lines = it_.of_y;
    for (size_t next = first; first < last; first = next) {
      while (next < last && lines.are_alike(first, next)) ++next;
      const Products of{dy + first * it_.row_y + (it_.left + begin) * B,
                        x + begin * it_.wide.stride * B,
                        it_.row_y,
                        it_.row_x,
                        next - first,
                        count,
                        images,
                        it_.floats_y(),
                        it_.floats_x(),
                        it_.high.stride,
                        it_.wide.stride * B,
                        it_.wide.dilation * B};
      const size_t taps = (lines.end(first) - lines.begin(first)) * it_.wide.kernel;
      add_so_few_products<B>(taps, of, lines.begin(first), it_.wide.kernel, parts_.data(),
                             std::make_index_sequence<kFewTaps + 1>());
    }
  }

  void flush() {
    for (size_t i = 0; i < parts_.size(); ++i) totals_[i] += parts_[i];
    std::fill(parts_.begin(), parts_.end(), 0.0f);
    terms_ = 0;
  }

  const Blocks& it_;
  std::vector<float> parts_;
  std::vector<double> totals_;
  size_t terms_ = 0;
};

}  // namespace gradgraph::depthwise
