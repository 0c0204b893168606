// Convolutions with a filter per channel, and their gradients: everything is computed for a map, or a block of maps,
// while it is in the cache.
//
// A map is copied with its padding into a run of positions, row after row; with a stride, into one run per phase, of
// every second row or column. All rows have the same number of positions, a few more than there are windows. So tap t
// of the window at position p reads position p plus a constant offset, and consecutive windows read consecutive
// positions.
//
// In the plain layout, short rows would not fill the lanes: there, sixteen channels are transposed into the cache and
// back, where they form blocks. Wide rows, other numbers of channels, and maps that are too large for that are
// processed one by one.
//
// The convolution may read a Clip or Relu: then its kernel computes that, too, and so does the kernel of its gradient.

#include <cmath>

#include "bounds.h"
#include "channels.h"
#include "depthwise.h"
#include "kernels.h"
#include "transpose.h"

namespace gradgraph {
namespace {

using namespace depthwise;
using amx::up;

constexpr size_t kRun = 256;   // numbers per lane that are added in float
constexpr size_t kAtOnce = 6;  // positions, in lanes, whose sums are computed together
constexpr size_t kTaps = 32;   // taps whose products are added before they join a longer sum

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
template <size_t B>
void cut(const Layout& it, const Bounds& bounds, const float* x, float* runs) {
  const Part &even = it.columns[0], &odd = it.columns[1];
  if constexpr (B == 1) {
    constexpr size_t L = Place<1>::kLanes;
    for (size_t i = 0; i < it.wide.size; i += 2 * L) {
      const auto left = bounds.apply(lanes_of(i, it.wide.size).load(x));
      const auto right = bounds.apply(lanes_of(i + L, it.wide.size).load(x));
      lanes_of(i / 2, even.seen).store(runs + even.offset, GRADGRAPH_EVEN(left, right));
      lanes_of(i / 2, odd.seen).store(runs + odd.offset, GRADGRAPH_ODD(left, right));
    }
  } else {
    for (size_t part = 0; part < 2; ++part) {
      float* to = runs + it.columns[part].offset;
      for (size_t i = 0; i < it.columns[part].seen; ++i) {
        store<B>(to + i * B, bounds.apply(load<B>(x + (2 * i + part) * B)));
      }
    }
  }
}

// Joins the runs that `cut` has divided: the cotangent of the rows that it has read.
template <size_t B>
void join(const Layout& it, const Bounds& bounds, const float* runs, const float* x, float* dx) {
  const Part &even = it.columns[0], &odd = it.columns[1];
  const bool chooses = bounds.kind != Bounds::kNone;
  if constexpr (B == 1) {
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
  } else {
    for (size_t part = 0; part < 2; ++part) {
      const auto [offset, seen, count] = it.columns[part];
      for (size_t i = 0; i < count; ++i) {
        const auto lanes = i < seen ? load<B>(runs + offset + i * B) : typename Lanes<B>::type{};
        const size_t at = (2 * i + part) * B;
        store<B>(dx + at, chooses ? bounds.choose(load<B>(x + at), lanes) : lanes);
      }
    }
  }
}

#if defined(__AVX2__)

#if defined(__AVX512F__)
using Row = __m512i;
#else
using Row = __m256i;
#endif

// Transposes kTurned pixels of as many maps between the layouts.
void turn(Place<1>::V (&lanes)[kTurned]) {
  Row rows[kTurned];
  for (size_t i = 0; i < kTurned; ++i) rows[i] = (Row)lanes[i];
  transpose(rows);
  for (size_t i = 0; i < kTurned; ++i) lanes[i] = (Place<1>::V)rows[i];
}

// Copies kTurned maps to a run, in which each pixel has its own offset.
template <class Finish>
void turn_in(const float* maps, const std::vector<size_t>& places, float* run, const Finish& finish) {
  walk<1>(0, places.size(), [&](const Place<1>& at) {
    Place<1>::V lanes[kTurned];
    for (size_t c = 0; c < kTurned; ++c) lanes[c] = finish(at.load(maps + c * places.size()));
    turn(lanes);
    for (size_t i = 0; i < at.count; ++i) {
      if (places[at.begin + i] != kUnseen) store<kTurned>(run + places[at.begin + i], lanes[i]);
    }
  });
}

// Copies them back; finish(lanes, place, offset of the map) is applied.
template <class Finish>
void turn_out(const float* run, const std::vector<size_t>& places, float* maps, const Finish& finish) {
  walk<1>(0, places.size(), [&](const Place<1>& at) {
    Place<1>::V lanes[kTurned]{};
    for (size_t i = 0; i < at.count; ++i) {
      if (places[at.begin + i] != kUnseen) lanes[i] = load<kTurned>(run + places[at.begin + i]);
    }
    turn(lanes);
    for (size_t c = 0; c < kTurned; ++c) {
      at.store(maps + c * places.size(), finish(lanes[c], at, c * places.size()));
    }
  });
}

#else

template <class... Given>
void turn_in(const Given&...) {}
template <class... Given>
void turn_out(const Given&...) {}

#endif

// Copies maps of x to their runs; their padding is left unchanged.
template <size_t B>
void spread(const Layout& it, const Bounds& bounds, const float* x, float* runs) {
  if (it.is_turned()) return turn_in(x, it.of_x, runs, [&](const auto& lanes) { return bounds.apply(lanes); });
  for (size_t row : it.rows) {
    if (it.wide.stride == 2) {
      cut<B>(it, bounds, x, runs + row);
    } else {
      const auto finish = [&](const auto& lanes, const auto&) { return bounds.apply(lanes); };
      copy(x, it.columns[0].seen * B, runs + row + it.columns[0].offset, finish);
    }
    x += it.row_of_x();
  }
}

// Copies the runs of dx to its maps; x is the input of the activation, if there is one.
template <size_t B>
void gather(const Layout& it, const Bounds& bounds, const float* runs, const float* x, float* dx) {
  const float* read = x;
  const bool chooses = bounds.kind != Bounds::kNone;
  if (it.is_turned()) {
    return turn_out(runs, it.of_x, dx, [&](const auto& lanes, const auto& at, size_t offset) {
      return chooses ? bounds.choose(at.load(read + offset), lanes) : lanes;
    });
  }
  for (size_t row : it.rows) {
    if (it.wide.stride == 2) {
      join<B>(it, bounds, runs + row, read, dx);
    } else {
      const auto& [offset, seen, count] = it.columns[0];
      copy(runs + row + offset, seen * B, dx, [&](const auto& lanes, const auto& at) {
        return chooses ? bounds.choose(at.load(read), lanes) : lanes;
      });
      std::fill(dx + seen * B, dx + count * B, 0.0f);
    }
    dx += it.row_of_x();
    if (chooses) read += it.row_of_x();
  }
  std::fill_n(dx, (it.high.size - it.rows.size()) * it.row_of_x(), 0.0f);
}

// Copies windows of y or dy between its maps and a run.
template <size_t B>
void lay_out(const Layout& it, const float* dy, float* run) {
  if (it.is_turned()) return turn_in(dy, it.of_y, run, [](const auto& lanes) { return lanes; });
  for (size_t i = 0; i < it.high.count; ++i, dy += it.row_of_y(), run += it.pitch) {
    copy(dy, it.row_of_y(), run, [](const auto& lanes, const auto&) { return lanes; });
  }
}

template <size_t B>
void take_up(const Layout& it, const float* run, float* y) {
  if (it.is_turned()) return turn_out(run, it.of_y, y, [](const auto& lanes, const auto&, size_t) { return lanes; });
  for (size_t i = 0; i < it.high.count; ++i, y += it.row_of_y(), run += it.pitch) {
    copy(run, it.row_of_y(), y, [](const auto& lanes, const auto&) { return lanes; });
  }
}

// --- sums over taps --------------------------------------------------------------------------------------------------

// to[p] = start + Σ weight · from[p + offset], for positions up to `end` and possibly a few more
template <size_t B, size_t T>
void slide_over(const float* from, const Tap* taps, size_t count, const float* weights, typename Place<B>::V start,
                size_t end, float* to) {
  using V = typename Place<B>::V;
  constexpr size_t L = Place<B>::kLanes;
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
    for (; p + kAtOnce * L <= end; p += kAtOnce * L) at(std::integral_constant<size_t, kAtOnce>(), p);
    for (; p < end; p += L) at(std::integral_constant<size_t, 1>(), p);
  }
}

template <size_t B>
void slide(const float* from, const std::vector<Tap>& taps, const float* weights, typename Place<B>::V start, size_t end,
           float* to) {
  const auto by = [&](auto known) {
    slide_over<B, decltype(known)::value>(from, taps.data(), taps.size(), weights, start, end, to);
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
template <size_t B>
class Dots {
 public:
  explicit Dots(const std::vector<Tap>& taps) : taps_(taps), parts_(taps.size() * L), totals_(taps.size() * L) {}

  // Adds the products of the positions up to `end`.
  void add(const float* dy, const float* x, size_t end) {
    for (size_t begin = 0; begin < end;) {
      if (terms_ == kRun) flush();
      const size_t last = std::min(end, begin + (kRun - terms_) * L);
      size_t t = 0;
      for (; t + kTapsAtOnce <= taps_.size(); t += kTapsAtOnce) add_some<kTapsAtOnce>(dy, x, t, begin, last);
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
  static constexpr size_t L = Place<B>::kLanes, kTapsAtOnce = 9;

  template <size_t T>
  void add_some(const float* dy, const float* x, size_t first, size_t begin, size_t end) {
    typename Place<B>::V sums[T];
    const float* at_x[T];
    for (size_t t = 0; t < T; ++t) sums[t] = load<L>(&parts_[(first + t) * L]), at_x[t] = x + taps_[first + t].offset;
    walk<B>(begin, end, [&](const auto& at) {
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

// Some images of one channel, or of one block of channels.
struct Unit {
  size_t group, chunk, first, last;

  Unit(const Layout& it, size_t i)
      : group(i % it.groups()),
        chunk(i / it.groups()),
        first(chunk * it.chunk),
        last(std::min(it.maps.images, first + it.chunk)) {}

  size_t row(const Layout& it, size_t image) const { return image * it.groups() + group; }
};

// Calls body(lanes, unit, memory) for all units; memory, of the calling thread, has `count` floats.
template <class Body>
void for_units(Context& context, const Layout& it, size_t count, const Body& body) {
  context.parallel(it.chunks * it.groups(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      float* memory = reinterpret_cast<float*>(amx::scratch(2 * count));
      std::fill_n(memory, count, 0.0f);
      by_block(it.lanes, [&](auto lanes) { body(lanes, Unit(it, i), memory); });
    }
  });
}

// The filters of a group, for as many lanes as there are.
template <size_t B>
std::vector<float> filters(const Layout& it, const float* w, size_t group) {
  constexpr size_t L = Place<B>::kLanes;
  const size_t taps = it.taps.size();
  std::vector<float> found(taps * L);
  for (size_t t = 0; t < taps; ++t) {
    for (size_t lane = 0; lane < L; ++lane) found[t * L + lane] = w[(group * B + lane % B) * taps + t];
  }
  return found;
}

void check_filters(const Dims& w, const Maps& maps) {
  if (w.rank != 4 || w.size[0] != static_cast<int64_t>(maps.channels)) {
    throw std::runtime_error("it should have a filter for each channel");
  }
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
    const Layout it(x.dims, windows::kernel_of(w.dims, 1), geometry, block);
    check_filters(w.dims, it.maps);
    std::vector<float> bias(it.maps.channels);
    if (context.has(2)) {
      const auto b = context.input(2);
      if (b.count != bias.size()) throw std::runtime_error("its bias should have a number for each channel");
      std::copy_n(b.data, b.count, bias.data());
    }
    const auto y = context.output(0, it.dims_of_y());
    const size_t runs = it.phases() * it.run;
    for_units(context, it, runs + it.run, [&](auto lanes, const Unit& unit, float* memory) {
      constexpr size_t B = decltype(lanes)::value;
      const std::vector<float> weights = filters<B>(it, w.data, unit.group);
      const auto start = Place<B>::channels(bias.data() + unit.group * B);
      float* out = memory + runs;
      for (size_t image = unit.first; image < unit.last; ++image) {
        const size_t row = unit.row(it, image);
        spread<B>(it, bounds, x.data + row * it.map_of_x(), memory);
        slide<B>(memory, it.taps, weights.data(), start, it.end(), out);
        take_up<B>(it, out, y.data + row * it.map_of_y());
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
    const Layout it(x_dims, windows::kernel_of(w_dims, 1), geometry, block);
    if (dy.dims.size != it.dims_of_y().size) throw std::runtime_error("its dy does not fit x");
    Tensor<const float> x, w;
    if (kWanted == kWeight || context.has(2)) x = context.input(kWanted == kWeight ? 0 : 2);
    if (x.data != nullptr && x.dims.size != x_dims.size) throw std::runtime_error("its x should be of another size");
    if (bounds.kind != Bounds::kNone && x.data == nullptr) throw std::runtime_error("its x is missing");
    if constexpr (kWanted & kInput) {
      w = context.input(1);
      check_filters(w.dims, it.maps);
      if (w.dims.size != w_dims.size) throw std::runtime_error("its filters should be of another size");
    }
    float *dx = nullptr, *dw = nullptr;
    if constexpr (kWanted & kInput) dx = context.output(0, x_dims).data;
    if constexpr (kWanted & kWeight) dw = context.output(kWanted == kWeight ? 0 : 1, w_dims).data;
    run(context, it, dy.data, w.data, x.data, dx, dw);
  }

  void run(Context& context, const Layout& it, const float* dy, const float* w, const float* x, float* dx,
           float* dw) const {
    const size_t runs = it.phases() * it.run, taps = it.taps.size();
    std::vector<double> sums(kWanted & kWeight ? it.chunks * it.maps.channels * taps : 0);
    for_units(context, it, 2 * runs + it.back, [&](auto lanes, const Unit& unit, float* memory) {
      constexpr size_t B = decltype(lanes)::value;
      float *of_dx = memory + runs, *of_dy = of_dx + runs;
      std::vector<float> weights;
      if constexpr (kWanted & kInput) weights = filters<B>(it, w, unit.group);
      Dots<B> dots(it.taps);
      for (size_t image = unit.first; image < unit.last; ++image) {
        const size_t row = unit.row(it, image);
        lay_out<B>(it, dy + row * it.map_of_y(), of_dy + it.first());
        if constexpr (kWanted & kWeight) {
          spread<B>(it, bounds, x + row * it.map_of_x(), memory);
          dots.add(of_dy + it.first(), memory, it.end());
        }
        if constexpr (kWanted & kInput) {
          for (size_t phase = 0; phase < it.phases(); ++phase) {
            constexpr typename Place<B>::V kNothing{};
            slide<B>(of_dy, it.into[phase], weights.data(), kNothing, it.high.lines() * it.pitch, of_dx + phase * it.run);
          }
          const float* read = bounds.kind == Bounds::kNone ? nullptr : x + row * it.map_of_x();
          gather<B>(it, bounds, of_dx, read, dx + row * it.map_of_x());
        }
      }
      if constexpr (kWanted & kWeight) {
        const auto& totals = dots.totals();
        const auto is_finite = [](double total) { return std::isfinite(total); };
        if (!std::all_of(totals.begin(), totals.end(), is_finite)) add_by_rows(it, unit, dy, x, memory, of_dy, dots);
        fold<B>(dots.totals(), taps, sums.data() + (unit.chunk * it.groups() + unit.group) * taps * B);
      }
    });
    if constexpr (kWanted & kWeight) add_chunks(it, sums, dw);
  }

  // Repeats the sum without the positions between rows, where an infinity in x was multiplied by a zero of the padding
  // of dy.
  template <size_t B>
  void add_by_rows(const Layout& it, const Unit& unit, const float* dy, const float* x, float* runs, float* of_dy,
                   Dots<B>& dots) const {
    dots.clear();
    for (size_t image = unit.first; image < unit.last; ++image) {
      const size_t row = unit.row(it, image);
      lay_out<B>(it, dy + row * it.map_of_y(), of_dy + it.first());
      spread<B>(it, bounds, x + row * it.map_of_x(), runs);
      for (size_t i = 0; i < it.high.count; ++i) {
        dots.add(of_dy + it.first() + i * it.pitch, runs + i * it.pitch, it.row_of_y());
      }
    }
  }

  // Adds lanes to channels.
  template <size_t B>
  static void fold(const std::vector<double>& totals, size_t taps, double* sums) {
    constexpr size_t L = Place<B>::kLanes;
    for (size_t t = 0; t < taps; ++t) {
      for (size_t lane = 0; lane < L; ++lane) sums[t * B + lane % B] += totals[t * L + lane];
    }
  }

  static void add_chunks(const Layout& it, const std::vector<double>& sums, float* dw) {
    const size_t taps = it.taps.size(), lanes = it.lanes;
    for (size_t c = 0; c < it.maps.channels; ++c) {
      for (size_t t = 0; t < taps; ++t) {
        double total = 0;
        for (size_t chunk = 0; chunk < it.chunks; ++chunk) {
          total += sums[((chunk * it.groups() + c / lanes) * taps + t) * lanes + c % lanes];
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
