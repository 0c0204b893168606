// Convolutions with a filter per channel, and their gradients: everything is computed for a map, or a block of maps,
// while it is in the cache.
//
// A map is copied with its padding into a run of positions, row after row; with a stride, into one run per phase, of
// every second row or column. All rows have the same number of positions, a few more than there are windows. So tap t
// of the window at position p reads position p plus a constant offset, and consecutive windows read consecutive
// positions.
//
// Several channels at a time are faster: blocks, and maps in the plain layout that are transposed into the cache
// (depthwise_blocks.h). What is here serves few channels, and maps that are too large for that.
//
// The convolution may read a Clip or Relu: then its kernel computes that, too, and so does the kernel of its gradient.

#include <cmath>

#include "bounds.h"
#include "channels.h"
#include "depthwise.h"
#include "depthwise_blocks.h"
#include "kernels.h"

namespace gradgraph {
namespace {

using namespace depthwise;
using amx::up;

constexpr size_t kVectors = 6;  // vectors of positions whose sums are computed together

// --- copying into and out of runs ------------------------------------------------------------------------------------

// to[i] = finish(lanes of from, place) for the numbers of a row
template <class Finish>
void copy(const float* from, size_t count, float* to, const Finish& finish) {
  walk<1>(0, count, [&](const auto& at) { at.store(to, finish(at.load(from), at)); });
}

// Selects lanes of two vectors, numbered consecutively. GCC supports the first spelling from version 12 on, Clang only
// that one.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define GRADGRAPH_LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#if !defined(GRADGRAPH_LANES)
typedef int Places __attribute__((vector_size(Place<1>::kLanes * sizeof(int))));
#define GRADGRAPH_LANES(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

// every second of the lanes of two vectors, from the first or the second on; and the lanes of both in turns, the lower
// or the upper half
#if defined(__AVX2__) && !defined(__AVX512F__)
#define GRADGRAPH_EVEN(a, b) GRADGRAPH_LANES(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define GRADGRAPH_ODD(a, b) GRADGRAPH_LANES(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define GRADGRAPH_LOWER(a, b) GRADGRAPH_LANES(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define GRADGRAPH_UPPER(a, b) GRADGRAPH_LANES(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define GRADGRAPH_EVEN(a, b) GRADGRAPH_LANES(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define GRADGRAPH_ODD(a, b) GRADGRAPH_LANES(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define GRADGRAPH_LOWER(a, b) GRADGRAPH_LANES(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define GRADGRAPH_UPPER(a, b) GRADGRAPH_LANES(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#endif

// Lanes `begin` to `end` of a row that is divided into phases or joined from them.
Place<1> lanes_of(size_t begin, size_t end) {
  constexpr size_t L = Place<1>::kLanes;
  return {begin, begin < end ? std::min(L, end - begin) : 0};
}

// Divides pixels into phases: every second pixel to the first output, the others to the second.
void cut(const Layout& it, const Bounds& bounds, const float* x, float* runs) {
  const Part &even = it.columns[0], &odd = it.columns[1];
  constexpr size_t L = Place<1>::kLanes;
  for (size_t i = 0; i < it.wide.size; i += 2 * L) {
    const auto left = bounds.apply(lanes_of(i, it.wide.size).load(x));
    const auto right = bounds.apply(lanes_of(i + L, it.wide.size).load(x));
    lanes_of(i / 2, even.seen).store(runs + even.offset, GRADGRAPH_EVEN(left, right));
    lanes_of(i / 2, odd.seen).store(runs + odd.offset, GRADGRAPH_ODD(left, right));
  }
}

// Joins the runs that `cut` has divided: the cotangent of the rows that it has read.
void join(const Layout& it, const Bounds& bounds, const float* runs, const float* x, float* dx) {
  const Part &even = it.columns[0], &odd = it.columns[1];
  const bool chooses = bounds.kind != Bounds::kNone;
  constexpr size_t L = Place<1>::kLanes;
  for (size_t i = 0; i < it.wide.size; i += 2 * L) {
    const auto of_even = lanes_of(i / 2, even.seen).load(runs + even.offset);
    const auto of_odd = lanes_of(i / 2, odd.seen).load(runs + odd.offset);
    const auto put = [&](const Place<1>& at, const auto& lanes) {
      at.store(dx, chooses ? bounds.choose(at.load(x), lanes) : lanes);
    };
    put(lanes_of(i, it.wide.size), GRADGRAPH_LOWER(of_even, of_odd));
    put(lanes_of(i + L, it.wide.size), GRADGRAPH_UPPER(of_even, of_odd));
  }
}

// Copies maps of x to their runs; their padding is left unchanged.
void spread(const Layout& it, const Bounds& bounds, const float* x, float* runs) {
  for (size_t row : it.rows) {
    if (it.wide.stride == 2) {
      cut(it, bounds, x, runs + row);
    } else {
      const auto finish = [&](const auto& lanes, const auto&) { return bounds.apply(lanes); };
      copy(x, it.columns[0].seen, runs + row + it.columns[0].offset, finish);
    }
    x += it.wide.size;
  }
}

// Copies the runs of dx to its maps; x is the input of the activation, if there is one.
void gather(const Layout& it, const Bounds& bounds, const float* runs, const float* x, float* dx) {
  const float* read = x;
  const bool chooses = bounds.kind != Bounds::kNone;
  for (size_t row : it.rows) {
    if (it.wide.stride == 2) {
      join(it, bounds, runs + row, read, dx);
    } else {
      const auto& [offset, seen, count] = it.columns[0];
      copy(runs + row + offset, seen, dx, [&](const auto& lanes, const auto& at) {
        return chooses ? bounds.choose(at.load(read), lanes) : lanes;
      });
      std::fill(dx + seen, dx + count, 0.0f);
    }
    dx += it.wide.size;
    if (chooses) read += it.wide.size;
  }
  std::fill_n(dx, (it.high.size - it.rows.size()) * it.wide.size, 0.0f);
}

// Copies windows of y or dy between its maps and a run.
void lay_out(const Layout& it, const float* dy, float* run) {
  for (size_t i = 0; i < it.high.count; ++i, dy += it.wide.count, run += it.pitch) {
    copy(dy, it.wide.count, run, [](const auto& lanes, const auto&) { return lanes; });
  }
}

void take_up(const Layout& it, const float* run, float* y) {
  for (size_t i = 0; i < it.high.count; ++i, y += it.wide.count, run += it.pitch) {
    copy(run, it.wide.count, y, [](const auto& lanes, const auto&) { return lanes; });
  }
}

// --- sums over taps --------------------------------------------------------------------------------------------------

// to[p] = start + Σ weight · from[p + offset], for positions up to `end` and possibly a few more
template <size_t T>
void slide_over(const float* from, const Tap* taps, size_t count, const float* weights, Place<1>::V start, size_t end,
                float* to) {
  using V = Place<1>::V;
  constexpr size_t L = Place<1>::kLanes;
  if constexpr (T > 0) {
    V w[T];
    const float* at[T];
    for (size_t t = 0; t < T; ++t) w[t] = load<L>(weights + taps[t].weight * L), at[t] = from + taps[t].offset;
    for (size_t p = 0; p < end; p += L) {
      V sum = start;
      for (size_t t = 0; t < T; ++t) sum += w[t] * load<L>(at[t] + p);
      store<L>(to + p, sum);
    }
  } else {
    // several positions at once, so that each weight is loaded once for all of them
    const auto at = [&](auto known, size_t p) {
      constexpr size_t N = decltype(known)::value;
      V sums[N];
      std::fill_n(sums, N, start);
      for (size_t t = 0; t < count;) {
        V some[N]{};
        for (const size_t last = std::min(count, t + kTaps); t < last; ++t) {
          const V w = load<L>(weights + taps[t].weight * L);
          const float* x = from + taps[t].offset + p;
          for (size_t i = 0; i < N; ++i) some[i] += w * load<L>(x + i * L);
        }
        for (size_t i = 0; i < N; ++i) sums[i] += some[i];
      }
      for (size_t i = 0; i < N; ++i) store<L>(to + p + i * L, sums[i]);
    };
    size_t p = 0;
    for (; p + kVectors * L <= end; p += kVectors * L) at(std::integral_constant<size_t, kVectors>(), p);
    for (; p < end; p += L) at(std::integral_constant<size_t, 1>(), p);
  }
}

void slide(const float* from, const std::vector<Tap>& taps, const float* weights, Place<1>::V start, size_t end,
           float* to) {
  const auto by = [&](auto known) {
    slide_over<decltype(known)::value>(from, taps.data(), taps.size(), weights, start, end, to);
  };
  switch (taps.size()) {
    case 1: return by(std::integral_constant<size_t, 1>());
    case 2: return by(std::integral_constant<size_t, 2>());
    case 4: return by(std::integral_constant<size_t, 4>());
    case 9: return by(std::integral_constant<size_t, 9>());
    default: return by(std::integral_constant<size_t, 0>());
  }
}

// For each tap Σ dy[p] · x[p + offset], lane by lane; up to `kRun` positions of a lane are added in float.
class Dots {
 public:
  explicit Dots(const std::vector<Tap>& taps) : taps_(taps), parts_(taps.size() * L), totals_(taps.size() * L) {}

  // Adds the products of the positions up to `end`.
  void add(const float* dy, const float* x, size_t end) {
    for (size_t begin = 0; begin < end;) {
      if (terms_ == kRun) flush();
      const size_t last = std::min(end, begin + (kRun - terms_) * L);
      size_t t = 0;
      for (; t + kTapsTogether <= taps_.size(); t += kTapsTogether) add_some<kTapsTogether>(dy, x, t, begin, last);
      for (; t < taps_.size(); ++t) add_some<1>(dy, x, t, begin, last);
      terms_ += up(last - begin, L);
      begin = last;
    }
  }

  const std::vector<double>& totals() {
    flush();
    return totals_;
  }

  void clear() { std::fill(totals_.begin(), totals_.end(), 0.0); }

 private:
  static constexpr size_t L = Place<1>::kLanes, kTapsTogether = 9;

  template <size_t T>
  void add_some(const float* dy, const float* x, size_t first, size_t begin, size_t end) {
    Place<1>::V sums[T];
    const float* at_x[T];
    for (size_t t = 0; t < T; ++t) sums[t] = load<L>(&parts_[(first + t) * L]), at_x[t] = x + taps_[first + t].offset;
    walk<1>(begin, end, [&](const auto& at) {
      const auto d = at.load(dy);
      for (size_t t = 0; t < T; ++t) sums[t] += d * at.load(at_x[t]);
    });
    for (size_t t = 0; t < T; ++t) store<L>(&parts_[(first + t) * L], sums[t]);
  }

  void flush() {
    for (size_t i = 0; i < parts_.size(); ++i) totals_[i] += parts_[i];
    std::fill(parts_.begin(), parts_.end(), 0.0f);
    terms_ = 0;
  }

  const std::vector<Tap>& taps_;
  std::vector<float> parts_;
  std::vector<double> totals_;
  size_t terms_ = 0;
};

// --- units of work ---------------------------------------------------------------------------------------------------

// Some images of one channel.
struct Unit {
  size_t channel, chunk, first, last;

  Unit(const Layout& it, size_t i)
      : channel(i % it.maps.channels),
        chunk(i / it.maps.channels),
        first(chunk * it.chunk),
        last(std::min(it.maps.images, first + it.chunk)) {}

  size_t map(const Layout& it, size_t image) const { return image * it.maps.channels + channel; }
};

// Calls body(unit, memory) for all units; memory, of the calling thread, has `count` zeros.
template <class Body>
void for_units(Context& context, const Layout& it, size_t count, const Body& body) {
  context.parallel(it.chunks * it.maps.channels, 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      float* memory = reinterpret_cast<float*>(amx::scratch(2 * count));
      std::fill_n(memory, count, 0.0f);
      body(Unit(it, i), memory);
    }
  });
}

// The same for pieces, body(lanes, piece, memory), whose memory is not set.
template <class Body>
void for_pieces(Context& context, const Blocks& it, size_t count, const Body& body) {
  context.parallel(it.chunks * it.groups(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      float* memory = reinterpret_cast<float*>(amx::scratch(2 * count));
      by_block(it.lanes, [&](auto lanes) { body(lanes, Piece(it, i), memory); });
    }
  });
}

// The filters of `lanes` channels from `first` on, tap by tap; those of channels that there are not are 0.
std::vector<float> filters(size_t taps, const float* w, size_t first, size_t held, size_t lanes) {
  std::vector<float> found(taps * lanes);
  for (size_t t = 0; t < taps; ++t) {
    for (size_t lane = 0; lane < held; ++lane) found[t * lanes + lane] = w[(first + lane) * taps + t];
  }
  return found;
}

// The filter of a channel, each weight in all lanes.
std::vector<float> filter(size_t taps, const float* w, size_t channel) {
  constexpr size_t L = Place<1>::kLanes;
  std::vector<float> found(taps * L);
  for (size_t t = 0; t < taps; ++t) std::fill_n(found.data() + t * L, L, w[channel * taps + t]);
  return found;
}

void check_filters(const Dims& w, const Dims& x) {
  if (w.rank != 4 || w.size[0] != x.size[1]) throw std::runtime_error("it should have a filter for each channel");
}

Dims dims_of_y(const Dims& x, std::array<size_t, 2> kernel, const windows::Geometry& geometry) {
  Dims dims = x;
  for (size_t i = 0; i < 2; ++i) dims.size[2 + i] = static_cast<int64_t>(axis_of(x, kernel, geometry, i).count);
  return dims;
}

// (x, w[, b]) -> y
struct DepthwiseConv {
  static constexpr Signature signature{"DepthwiseConv", 3, 1, 1};
  windows::Geometry geometry;
  Bounds bounds;
  size_t block;

  explicit DepthwiseConv(const Attributes& attributes)
      : geometry(attributes), bounds(attributes), block(attributes.integer("block")) {}

  void compute(Context& context) const {
    const auto x = context.input(0), w = context.input(1);
    const auto kernel = windows::kernel_of(w.dims, 1);
    const auto y = context.output(0, dims_of_y(x.dims, kernel, geometry));
    check_filters(w.dims, x.dims);
    const auto channels = static_cast<size_t>(x.dims.size[1]);
    std::vector<float> bias(up(channels, size_t{16}) * 16);
    if (context.has(2)) {
      const auto b = context.input(2);
      if (b.count != channels) throw std::runtime_error("its bias should have a number for each channel");
      std::copy_n(b.data, b.count, bias.data());
    }
    if (Blocks::serve(x.dims, block)) {
      in_blocks(context, Blocks(x.dims, kernel, geometry, block), x.data, w.data, bias.data(), y.data);
    } else {
      by_channels(context, Layout(x.dims, kernel, geometry), x.data, w.data, bias.data(), y.data);
    }
  }

  void by_channels(Context& context, const Layout& it, const float* x, const float* w, const float* bias,
                   float* y) const {
    const size_t runs = it.phases() * it.run;
    for_units(context, it, runs + it.run, [&](const Unit& unit, float* memory) {
      const std::vector<float> weights = filter(it.taps.size(), w, unit.channel);
      float* out = memory + runs;
      for (size_t image = unit.first; image < unit.last; ++image) {
        const size_t map = unit.map(it, image);
        spread(it, bounds, x + map * it.map_of_x(), memory);
        slide(memory, it.taps, weights.data(), Place<1>::channels(bias + unit.channel), it.end(), out);
        take_up(it, out, y + map * it.map_of_y());
      }
    });
  }

  void in_blocks(Context& context, const Blocks& it, const float* x, const float* w, const float* bias,
                 float* y) const {
    const size_t pixels = it.pixels_y(), padded = it.together * it.floats_x(), row = it.wide.count * it.lanes;
    for_pieces(context, it, padded + it.together * pixels * it.lanes, [&](auto lanes, const Piece& piece, float* rows) {
      constexpr size_t B = decltype(lanes)::value;
      const size_t first = piece.group * B;
      const std::vector<float> weights = filters(it.taps(), w, first, piece.held, B);
      clear_margins(rows, it.together * it.high.size, it.row_x, it.wide.begin * B, it.wide.size * B);
      for (size_t image = piece.first; image < piece.last; image += it.together) {
        const size_t images = std::min(it.together, piece.last - image);
        for (size_t i = 0; i < images; ++i) {
          bring_x<B>(it, piece, bounds, x + piece.map(it, image + i, it.pixels_x()), rows + i * it.floats_x());
        }
        float* out = it.is_turned() ? rows + padded : y + piece.map(it, image, pixels);
        const size_t to_image = it.is_turned() ? pixels * B : it.maps.channels * pixels;
        const Sums of{rows,           it.row_x,       nullptr,        nullptr,
                      it.columns,     weights.data(), it.wide.kernel, bias + first,
                      out,            images,         0,              it.wide.count,
                      it.floats_x(),  it.row_x * it.high.stride,      it.wide.stride * B,
                      to_image,       row,            B};
        add_rows<B>(of, it.of_y, 0, it.high.count, 1);
        for (size_t i = 0; i < images && it.is_turned(); ++i) {
          turn_out(out + i * pixels * B, pixels, it.ahead(pixels), y + piece.map(it, image + i, pixels), piece.held,
                   [](const auto& all, const auto&, size_t) { return all; });
        }
      }
    });
  }
};

enum Wanted { kInput = 1, kWeight = 2 };

// (dy, w[, x]) -> dx;  (x, dy) -> dw;  (dy, w, x) -> (dx, dw)
template <int kWanted>
struct Gradient {
  static constexpr Signature signature =
      kWanted == kInput    ? Signature{"DepthwiseConvGradInput", 3, 1, 1}
      : kWanted == kWeight ? Signature{"DepthwiseConvGradWeight", 2, 1}
                           : Signature{"DepthwiseConvGrad", 3, 2};
  windows::Geometry geometry;
  Bounds bounds;
  size_t block;
  std::array<int64_t, 2> size, kernel;  // sizes of x and of w

  // What is read and written; nullptr if it is not wanted.
  struct Data {
    const float *dy, *w, *x;
    float *dx, *dw;
  };

  explicit Gradient(const Attributes& attributes)
      : geometry(attributes),
        bounds(attributes),
        block(attributes.integer("block")),
        size(attributes.integers<2>("size")),
        kernel(attributes.integers<2>("kernel")) {}

  void compute(Context& context) const {
    const auto dy = context.input(kWanted == kWeight ? 1 : 0);
    if (dy.dims.rank != 4) throw std::runtime_error("images should have four axes");
    Dims x_dims = dy.dims, w_dims = dy.dims;
    w_dims.size = {dy.dims.size[1], 1, kernel[0], kernel[1]};
    for (size_t i = 0; i < 2; ++i) x_dims.size[2 + i] = size[i];
    const auto windows = windows::kernel_of(w_dims, 1);
    if (dy.dims.size != dims_of_y(x_dims, windows, geometry).size) throw std::runtime_error("its dy does not fit x");
    Tensor<const float> x, w;
    if (kWanted == kWeight || context.has(2)) x = context.input(kWanted == kWeight ? 0 : 2);
    if (x.data != nullptr && x.dims.size != x_dims.size) throw std::runtime_error("its x should be of another size");
    if (bounds.kind != Bounds::kNone && x.data == nullptr) throw std::runtime_error("its x is missing");
    if constexpr (kWanted & kInput) {
      w = context.input(1);
      check_filters(w.dims, x_dims);
      if (w.dims.size != w_dims.size) throw std::runtime_error("its filters should be of another size");
    }
    Data data{dy.data, w.data, x.data, nullptr, nullptr};
    if constexpr (kWanted & kInput) data.dx = context.output(0, x_dims).data;
    if constexpr (kWanted & kWeight) data.dw = context.output(kWanted == kWeight ? 0 : 1, w_dims).data;
    if (Blocks::serve(x_dims, block)) {
      in_blocks(context, Blocks(x_dims, windows, geometry, block), data);
    } else {
      by_channels(context, Layout(x_dims, windows, geometry), data);
    }
  }

  void in_blocks(Context& context, const Blocks& it, const Data& of) const {
    const size_t x_size = it.together * it.floats_x(), y_size = it.together * it.floats_y();
    const size_t pixels = it.pixels_x(), dx_size = it.is_turned() ? it.together * pixels * it.lanes : 0;
    std::vector<double> sums(kWanted & kWeight ? it.chunks * it.groups() * it.lanes * it.taps() : 0);
    for_pieces(context, it, x_size + y_size + dx_size, [&](auto lanes, const Piece& piece, float* rows_x) {
      constexpr size_t B = decltype(lanes)::value;
      float *rows_dy = rows_x + x_size, *dx = rows_dy + y_size;
      std::vector<float> weights;
      if constexpr (kWanted & kInput) weights = filters(it.taps(), of.w, piece.group * B, piece.held, B);
      clear_margins(rows_x, it.together * it.high.size, it.row_x, it.wide.begin * B, it.wide.size * B);
      clear_margins(rows_dy, it.together * it.high.count, it.row_y, it.left * B, it.wide.count * B);
      FilterGradient<B> gradient(it);
      for (size_t image = piece.first; image < piece.last; image += it.together) {
        const size_t images = std::min(it.together, piece.last - image);
        for (size_t i = 0; i < images; ++i) {
          bring_dy<B>(it, piece, of.dy + piece.map(it, image + i, it.pixels_y()), rows_dy + i * it.floats_y());
          if constexpr (kWanted & kWeight) {
            bring_x<B>(it, piece, bounds, of.x + piece.map(it, image + i, pixels), rows_x + i * it.floats_x());
          }
        }
        if constexpr (kWanted & kWeight) gradient.add(rows_dy, rows_x, images);
        if constexpr (kWanted & kInput) {
          float* out = it.is_turned() ? dx : of.dx + piece.map(it, image, pixels);
          add_maps<B>(it, rows_dy, weights.data(), images, out);
          for (size_t i = 0; i < images; ++i) {
            const size_t map = piece.map(it, image + i, pixels);
            float* const to = of.dx + map;
            put<B>(it, piece, it.is_turned() ? dx + i * pixels * B : to, of.x == nullptr ? nullptr : of.x + map, to);
          }
        }
      }
      if constexpr (kWanted & kWeight) {
        if (!all_finite(gradient.totals())) {
          for (size_t image = piece.first; image < piece.last; ++image) {
            bring_dy<B>(it, piece, of.dy + piece.map(it, image, it.pixels_y()), rows_dy);
            gradient.add_padding(rows_dy);
          }
        }
        const size_t unit = piece.chunk * it.groups() + piece.group;
        std::copy(gradient.totals().begin(), gradient.totals().end(), sums.begin() + unit * it.taps() * B);
      }
    });
    if constexpr (kWanted & kWeight) add_chunks(it.chunks, it.maps.channels, it.lanes, it.taps(), sums, of.dw);
  }

  // dx of some images, before the gradient of the activation
  template <size_t B>
  static void add_maps(const Blocks& it, const float* rows_dy, const float* weights, size_t images, float* dx) {
    static constexpr float kNothing[B]{};
    const size_t row = it.wide.size * B, to_image = (it.is_turned() ? B : it.maps.channels) * it.pixels_x();
    for (const Phase& phase : it.phases) {
      const Sums of{rows_dy,       it.row_y, nullptr,        nullptr,  phase.columns,
                    weights,       it.wide.kernel,           kNothing, dx + phase.first * B,
                    images,        0,        phase.count,    it.floats_y(),
                    it.row_y,      B,        to_image,       row * it.high.stride,  it.wide.stride * B};
      for (size_t i = 0; i < std::min(it.high.stride, it.high.size); ++i) {
        add_rows<B>(of, it.of_x, i, it.high.size, it.high.stride);
      }
    }
  }

  template <size_t B>
  void put(const Blocks& it, const Piece& piece, const float* from, const float* x, float* dx) const {
    const bool chooses = bounds.kind != Bounds::kNone;
    if (it.is_turned()) {
      const auto chosen = [&](const auto& lanes, const auto& at, size_t map) {
        return chooses ? bounds.choose(at.load(x + map), lanes) : lanes;
      };
      turn_out(from, it.pixels_x(), it.ahead(it.pixels_x()), dx, piece.held, chosen);
    } else if (chooses) {
      for (size_t i = 0; i < it.pixels_x() * B; i += B) store<B>(dx + i, bounds.choose(load<B>(x + i), load<B>(from + i)));
    }
  }

  static bool all_finite(const std::vector<double>& totals) {
    return std::all_of(totals.begin(), totals.end(), [](double total) { return std::isfinite(total); });
  }

  void by_channels(Context& context, const Layout& it, const Data& of) const {
    const size_t runs = it.phases() * it.run, taps = it.taps.size();
    std::vector<double> sums(kWanted & kWeight ? it.chunks * it.maps.channels * taps : 0);
    for_units(context, it, 2 * runs + it.back, [&](const Unit& unit, float* memory) {
      float *of_dx = memory + runs, *of_dy = of_dx + runs;
      std::vector<float> weights;
      if constexpr (kWanted & kInput) weights = filter(taps, of.w, unit.channel);
      Dots dots(it.taps);
      for (size_t image = unit.first; image < unit.last; ++image) {
        const size_t map = unit.map(it, image);
        lay_out(it, of.dy + map * it.map_of_y(), of_dy + it.first());
        if constexpr (kWanted & kWeight) {
          spread(it, bounds, of.x + map * it.map_of_x(), memory);
          dots.add(of_dy + it.first(), memory, it.end());
        }
        if constexpr (kWanted & kInput) {
          for (size_t phase = 0; phase < it.phases(); ++phase) {
            constexpr Place<1>::V kNothing{};
            slide(of_dy, it.into[phase], weights.data(), kNothing, it.high.lines() * it.pitch, of_dx + phase * it.run);
          }
          const float* read = bounds.kind == Bounds::kNone ? nullptr : of.x + map * it.map_of_x();
          gather(it, bounds, of_dx, read, of.dx + map * it.map_of_x());
        }
      }
      if constexpr (kWanted & kWeight) {
        if (!all_finite(dots.totals())) add_by_rows(it, unit, of.dy, of.x, memory, of_dy, dots);
        for (size_t t = 0; t < taps; ++t) {
          double& sum = sums[(unit.chunk * it.maps.channels + unit.channel) * taps + t];
          for (size_t lane = 0; lane < Place<1>::kLanes; ++lane) sum += dots.totals()[t * Place<1>::kLanes + lane];
        }
      }
    });
    if constexpr (kWanted & kWeight) add_chunks(it.chunks, it.maps.channels, 1, taps, sums, of.dw);
  }

  // Repeats the sum without the positions between rows, where an infinity in x was multiplied by a zero of the padding
  // of dy.
  void add_by_rows(const Layout& it, const Unit& unit, const float* dy, const float* x, float* runs, float* of_dy,
                   Dots& dots) const {
    dots.clear();
    for (size_t image = unit.first; image < unit.last; ++image) {
      const size_t map = unit.map(it, image);
      lay_out(it, dy + map * it.map_of_y(), of_dy + it.first());
      spread(it, bounds, x + map * it.map_of_x(), runs);
      for (size_t i = 0; i < it.high.count; ++i) {
        dots.add(of_dy + it.first() + i * it.pitch, runs + i * it.pitch, it.wide.count);
      }
    }
  }

  // The sums of all chunks: of a chunk, of a block of `lanes` channels, of a tap, of a channel.
  static void add_chunks(size_t chunks, size_t channels, size_t lanes, size_t taps, const std::vector<double>& sums,
                         float* dw) {
    const size_t groups = up(channels, lanes);
    for (size_t c = 0; c < channels; ++c) {
      for (size_t t = 0; t < taps; ++t) {
        double total = 0;
        for (size_t chunk = 0; chunk < chunks; ++chunk) {
          total += sums[((chunk * groups + c / lanes) * taps + t) * lanes + c % lanes];
        }
        dw[c * taps + t] = static_cast<float>(total);
      }
    }
  }
};

}  // namespace

const ort::CustomOp depthwise_conv = op<DepthwiseConv>(), depthwise_conv_grad_input = op<Gradient<kInput>>(),
                    depthwise_conv_grad_weight = op<Gradient<kWeight>>(),
                    depthwise_conv_grad = op<Gradient<kInput | kWeight>>();

}  // namespace gradgraph
