// BatchNormalization in training mode, forward and backward: two passes over memory each. Runs of pixels are added in
// float, sums of runs in double. A Clip or Relu after it costs nothing.

#include <cmath>

#include "bounds.h"
#include "channels.h"
#include "kernels.h"

namespace gradgraph {
namespace {

constexpr size_t kRun = 256;    // numbers per lane that are added in float
constexpr size_t kStrip = 512;  // pixels from which adding the lanes of sums pays

// Rows of the same channels, of consecutive images: one row of many pixels, or several of few.
struct Strips {
  const Maps& maps;
  size_t deep, count;  // images per strip, and strips over all images

  explicit Strips(const Maps& of) : maps(of) {
    const size_t wanted = (kStrip - 1) / std::max<size_t>(1, maps.pixels) + 1;
    deep = std::max<size_t>(1, std::min(maps.images, wanted));
    count = (maps.images + deep - 1) / deep;
  }

  size_t units() const { return count * maps.groups(); }
  size_t grain() const { return std::max<size_t>(1, maps.grain() / deep); }
  size_t first_image(size_t strip) const { return strip * deep; }
  size_t last_image(size_t strip) const { return std::min(maps.images, (strip + 1) * deep); }
  double pixels(size_t strip) const {
    return static_cast<double>((last_image(strip) - first_image(strip)) * maps.pixels);
  }
  // The two sums of a channel in a strip: in a block, first the first sums of all channels, then the second ones.
  double* sums(std::vector<double>& all, size_t strip, size_t channel) const {
    const size_t block = maps.block;
    return all.data() + 2 * (strip * maps.channels + channel / block * block) + channel % block;
  }
};

// term(place, first, second) adds the two terms of the lanes at this place; the sums of a unit go to sums[0..B)
// and sums[B..2B).
template <size_t B, class Term>
void add_up(const Strips& strips, size_t unit, double* sums, const Term& term) {
  constexpr size_t L = Place<B>::kLanes;
  const Maps& maps = strips.maps;
  const size_t strip = unit / maps.groups(), group = unit % maps.groups();
  typename Lanes<L>::type first{}, second{};
  size_t terms = 0;
  const auto fold = [&] {
    add_lanes<B>(first, sums);
    add_lanes<B>(second, sums + B);
    first = second = typename Lanes<L>::type{};
    terms = 0;
  };
  for (size_t image = strips.first_image(strip); image < strips.last_image(strip); ++image) {
    size_t begin = (image * maps.groups() + group) * maps.row_size();
    const size_t end = begin + maps.row_size();
    while (begin < end) {
      if (terms == kRun) fold();
      const size_t last = std::min(end, begin + (kRun - terms) * L);
      walk<B>(begin, last, [&](const auto& at) { term(at, first, second); });
      terms += (last - begin + L - 1) / L;
      begin = last;
    }
  }
  fold();
}

// Maps of few pixels in the plain layout do not fill vectors. There, the pixels of neighbouring channels are one row,
// the same in every image; numbers per channel are repeated for each pixel.
class Planes {
 public:
  using At = Place<1>;
  using V = At::V;

  // Measured on an AMD EPYC (Zen 4, AVX512), one thread: planes of 9 pixels took 0.5 to 0.7 of the time of rows with 32
  // images, 1.5 to 1.8 with 1 or 2; planes of 4 pixels 0.5 with 8 images, planes of 36 pixels 1.2 to 1.5 with 32.
  static bool serve(const Maps& maps) {
    return maps.block == 1 && maps.pixels < kPixels && maps.images >= kEnough;
  }
  static size_t units(const Maps& maps) { return (maps.channels + kChannels - 1) / kChannels; }
  static size_t grain(const Maps& maps) {
    return std::max<size_t>(1, kGrain / std::max<size_t>(1, kChannels * maps.pixels * maps.images));
  }

  Planes(const Maps& maps, size_t unit)
      : first(unit * kChannels),
        channels(std::min(kChannels, maps.channels - first)),
        maps_(maps),
        begin_(first * maps.pixels),
        size_(channels * maps.pixels) {}

  const size_t first, channels;

  // The numbers of the unit's channels, repeated for each pixel; `of` begins with the first channel of all.
  std::vector<float> repeated(const float* of) const {
    std::vector<float> row(size_);
    for (size_t i = 0; i < size_; ++i) row[i] = of[first + i / maps_.pixels];
    return row;
  }

  // term(place, place in the row, first, second) adds the terms of some lanes in an image; the sums of the unit's
  // channels are added to `firsts` and `seconds`.
  template <class Term>
  void add_up(double* firsts, double* seconds, const Term& term) const {
    std::vector<float> one(size_), other(size_);
    for (size_t image = 0; image < maps_.images; image += kRun) {
      const size_t last = std::min(maps_.images, image + kRun);
      walk<1>(0, size_, [&](const At& in_row) {
        V a{}, b{};
        for (size_t i = image; i < last; ++i) term(place(i, in_row), in_row, a, b);
        in_row.store(one.data(), a);
        in_row.store(other.data(), b);
      });
      for (size_t i = 0; i < size_; ++i) {
        firsts[i / maps_.pixels] += one[i];
        seconds[i / maps_.pixels] += other[i];
      }
    }
  }

  // body(place, place in the row) for all lanes of all images
  template <class Body>
  void each(const Body& body) const {
    for (size_t i = 0; i < maps_.images; ++i) {
      walk<1>(0, size_, [&](const At& in_row) { body(place(i, in_row), in_row); });
    }
  }

 private:
  static constexpr size_t kChannels = 16, kEnough = 8;

  At place(size_t image, const At& in_row) const {
    return {image * maps_.channels * maps_.pixels + begin_ + in_row.begin, in_row.count};
  }

  const Maps& maps_;
  size_t begin_, size_;
};

double inverse_deviation(float var, float epsilon) { return 1.0 / std::sqrt(static_cast<double>(var) + epsilon); }

// The norm's output. The gradient computes the same bits, so that both apply the activation to equal numbers.
template <class V>
V normalized(const V& x, const V& center, const V& slope, const V& bias) {
  return fused<V>(slope, x - center, bias);
}

// (dy, x, scale, mean, var[, bias]) -> (dx, dscale, db), or without the factor a: (u, a, dscale, db), where dx = a·u.
// With an activation, which requires the bias, dy is the cotangent of its output.
template <bool kScaled>
struct Gradient {
  static constexpr Signature signature{
      kScaled ? "BatchNormalizationGrad" : "UnscaledBatchNormalizationGrad", 6, kScaled ? 3 : 4, 1, -1, true};
  Bounds bounds;
  float epsilon;
  size_t block;

  explicit Gradient(const Attributes& attributes)
      : bounds(attributes), epsilon(attributes.real("epsilon")), block(attributes.integer("block")) {}

  void compute(Context& context) const {
    const auto dy = context.input(0), x = context.input(1), scale = context.input(2);
    const auto mean = context.input(3), var = context.input(4);
    const Maps maps(x.dims, block);
    same_count(x, {dy});
    same_count(scale, {mean, var});
    if (scale.count != maps.channels) throw std::runtime_error("its tensors differ in size");
    std::vector<float> bias(maps.channels);
    if (bounds.kind != Bounds::kNone) {
      const auto given = context.input(5);
      same_count(scale, {given});
      std::copy_n(given.data, given.count, bias.data());
    }
    const auto dx = context.output(0, x.dims);
    const auto dscale = context.output(kScaled ? 1 : 2, scale.dims), db = context.output(kScaled ? 2 : 3, scale.dims);
    std::vector<float> factors(3 * maps.channels);
    float *k = factors.data(), *s = k + maps.channels, *a = s + maps.channels;

    for (size_t c = 0; c < maps.channels; ++c) {
      a[c] = static_cast<float>(scale.data[c] * inverse_deviation(var.data[c], epsilon));
    }
    if (!kScaled) std::copy_n(a, maps.channels, context.output(1, scale.dims).data);
    const Rows rows{maps, dy.data, x.data, mean.data, a, bias.data()};
    // from Σ dy and Σ dy·(x − mean)
    const auto finish = [&](size_t c, double total, double along) {
      const double count = static_cast<double>(maps.images * maps.pixels);
      const double inverse = inverse_deviation(var.data[c], epsilon);
      db.data[c] = static_cast<float>(total);
      dscale.data[c] = static_cast<float>(along * inverse);
      k[c] = static_cast<float>(along * inverse * inverse / count);
      s[c] = static_cast<float>(total / count);
    };
    if (Planes::serve(maps)) {
      context.parallel(Planes::units(maps), Planes::grain(maps), [&](size_t begin, size_t end) {
        for (size_t unit = begin; unit < end; ++unit) run_planes(rows, Planes(maps, unit), finish, k, s, dx.data);
      });
      return;
    }
    const Strips strips(maps);
    std::vector<double> sums(2 * strips.count * maps.channels);
    context.parallel(strips.units(), strips.grain(), [&](size_t begin, size_t end) {
      for (size_t unit = begin; unit < end; ++unit) add_unit(rows, strips, unit, sums.data());
    });
    context.parallel(maps.channels, maps.channel_grain(), [&](size_t begin, size_t end) {
      for (size_t c = begin; c < end; ++c) {
        double total = 0, along = 0;
        for (size_t strip = 0; strip < strips.count; ++strip) {
          const double* of_strip = strips.sums(sums, strip, c);
          total += of_strip[0];
          along += of_strip[block];
        }
        finish(c, total, along);
      }
    });
    context.parallel(maps.rows(), maps.grain(), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        write_row(rows, row, k, s, dx.data);
      }
    });
  }

  // What both passes read: some values per row, some per channel.
  struct Rows {
    const Maps& maps;
    const float *dy, *x, *mean, *slope, *bias;
  };

  // Some channels, and the cotangents of the normalized values there.
  template <size_t B>
  struct Channels {
    using V = typename Place<B>::V;
    const Bounds bounds;
    const float *dy, *x;
    V center, slope, bias;

    Channels(const Bounds& given, const Rows& rows, size_t first)
        : bounds(given),
          dy(rows.dy),
          x(rows.x),
          center(Place<B>::channels(rows.mean + first)),
          slope(Place<B>::channels(rows.slope + first)),
          bias(Place<B>::channels(rows.bias + first)) {}

    V cotangent(const Place<B>& at, const V& lanes) const {
      return bounds.choose(normalized(lanes, center, slope, bias), at.load(dy));
    }
  };

  template <class Finish>
  void run_planes(const Rows& rows, const Planes& it, const Finish& finish, const float* all_k, const float* all_s,
                  float* dx) const {
    using At = Planes::At;
    const auto center = it.repeated(rows.mean), slope = it.repeated(rows.slope), bias = it.repeated(rows.bias);
    const auto cotangent = [&](const At& at, const At& in_row, const Planes::V& v) {
      const auto y = normalized(v, in_row.load(center.data()), in_row.load(slope.data()), in_row.load(bias.data()));
      return bounds.choose(y, at.load(rows.dy));
    };
    std::vector<double> totals(it.channels), alongs(it.channels);
    it.add_up(totals.data(), alongs.data(), [&](const At& at, const At& in_row, auto& total, auto& along) {
      const auto v = at.load(rows.x);
      const auto d = cotangent(at, in_row, v);
      total += d;
      along = fused<Planes::V>(d, v - in_row.load(center.data()), along);
    });
    for (size_t c = 0; c < it.channels; ++c) finish(it.first + c, totals[c], alongs[c]);
    const auto k = it.repeated(all_k), s = it.repeated(all_s);
    it.each([&](const At& at, const At& in_row) {
      const auto v = at.load(rows.x);
      const auto apart = v - in_row.load(center.data());
      const auto u = cotangent(at, in_row, v) - fused<Planes::V>(in_row.load(k.data()), apart, in_row.load(s.data()));
      at.store(dx, kScaled ? in_row.load(slope.data()) * u : u);
    });
  }

  void add_unit(const Rows& rows, const Strips& strips, size_t unit, double* all_sums) const {
    by_block(block, [&](auto lanes) {
      constexpr size_t B = decltype(lanes)::value;
      const Channels<B> it(bounds, rows, unit % rows.maps.groups() * B);
      add_up<B>(strips, unit, all_sums + 2 * unit * B, [=](const auto& at, auto& total, auto& along) {
        const auto v = at.load(it.x, it.center);
        const auto d = it.cotangent(at, v);
        total += d;
        along = fused<std::decay_t<decltype(v)>>(d, v - it.center, along);
      });
    });
  }

  // dx = a·(dy − (k·(x − mean) + s)), or without the factor a
  void write_row(const Rows& rows, size_t row, const float* all_k, const float* all_s, float* dx) const {
    by_block(block, [&](auto lanes) {
      constexpr size_t B = decltype(lanes)::value;
      const size_t c = rows.maps.first_channel(row), begin = row * rows.maps.row_size();
      const Channels<B> it(bounds, rows, c);
      const auto k = Place<B>::channels(all_k + c), s = Place<B>::channels(all_s + c);
      walk<B>(begin, begin + rows.maps.row_size(), [=](const auto& at) {
        const auto v = at.load(it.x);
        const auto u = it.cotangent(at, v) - fused<std::decay_t<decltype(v)>>(k, v - it.center, s);
        at.store(dx, kScaled ? it.slope * u : u);
      });
    });
  }
};

// (x, scale, bias) -> (y, mean, var) of this batch; y is clipped to the bounds
struct BatchNormalization {
  static constexpr Signature signature{"BatchNormalization", 3, 3};
  Bounds bounds;
  float epsilon;
  size_t block;

  explicit BatchNormalization(const Attributes& attributes)
      : bounds(attributes), epsilon(attributes.real("epsilon")), block(attributes.integer("block")) {}

  void compute(Context& context) const {
    const auto x = context.input(0), scale = context.input(1), bias = context.input(2);
    const Maps maps(x.dims, block);
    same_count(scale, {bias});
    if (scale.count != maps.channels) throw std::runtime_error("its tensors differ in size");
    const auto y = context.output(0, x.dims), mean = context.output(1, scale.dims), var = context.output(2, scale.dims);
    std::vector<float> slope(maps.channels);
    const auto finish = [&](size_t c, double center, double variance) {
      mean.data[c] = static_cast<float>(center);
      var.data[c] = static_cast<float>(variance);
      slope[c] = static_cast<float>(scale.data[c] * inverse_deviation(var.data[c], epsilon));
    };
    if (Planes::serve(maps)) {
      context.parallel(Planes::units(maps), Planes::grain(maps), [&](size_t begin, size_t end) {
        for (size_t unit = begin; unit < end; ++unit) {
          const Planes it(maps, unit);
          find_moments(it, x.data, static_cast<double>(maps.images * maps.pixels), finish);
          write_planes(it, x.data, mean.data, slope.data(), bias.data, y.data);
        }
      });
      return;
    }

    // the mean of each strip, and the sum of squared deviations from it, while the strip is in the cache
    const Strips strips(maps);
    std::vector<double> moments(2 * strips.count * maps.channels);
    context.parallel(strips.units(), strips.grain(), [&](size_t begin, size_t end) {
      for (size_t unit = begin; unit < end; ++unit) add_moments(strips, unit, x.data, moments.data());
    });
    context.parallel(maps.channels, maps.channel_grain(), [&](size_t begin, size_t end) {
      const double count = static_cast<double>(maps.images * maps.pixels);
      for (size_t c = begin; c < end; ++c) {
        double center = 0, squares = 0;
        for (size_t strip = 0; strip < strips.count; ++strip) {
          center += strips.sums(moments, strip, c)[0] * strips.pixels(strip);
        }
        center /= count;
        for (size_t strip = 0; strip < strips.count; ++strip) {
          const double* of_strip = strips.sums(moments, strip, c);
          const double apart = of_strip[0] - center;
          squares += of_strip[block] + apart * apart * strips.pixels(strip);
        }
        finish(c, center, squares / count);
      }
    });
    context.parallel(maps.rows(), maps.grain(), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        write_row(maps, row, x.data, mean.data, slope.data(), bias.data, y.data);
      }
    });
  }

  template <class Finish>
  static void find_moments(const Planes& it, const float* x, double count, const Finish& finish) {
    using At = Planes::At;
    std::vector<double> totals(it.channels), squares(it.channels), none(it.channels), left(it.channels);
    it.add_up(totals.data(), none.data(), [&](const At& at, const At&, auto& total, auto&) { total += at.load(x); });
    std::vector<float> centers(it.first + it.channels);
    for (size_t c = 0; c < it.channels; ++c) centers[it.first + c] = static_cast<float>(totals[c] / count);
    const auto center = it.repeated(centers.data());
    it.add_up(squares.data(), left.data(), [&](const At& at, const At& in_row, auto& square, auto& rest) {
      const auto apart = at.load(x) - in_row.load(center.data());
      rest += apart;
      square += apart * apart;
    });
    for (size_t c = 0; c < it.channels; ++c) {
      const double off = left[c] / count;  // the rounding error of the mean
      finish(it.first + c, centers[it.first + c] + off, squares[c] / count - off * off);
    }
  }

  void write_planes(const Planes& it, const float* x, const float* all_mean, const float* all_slope,
                    const float* all_bias, float* y) const {
    using At = Planes::At;
    const auto center = it.repeated(all_mean), slope = it.repeated(all_slope), bias = it.repeated(all_bias);
    it.each([&](const At& at, const At& in_row) {
      const auto v = normalized(at.load(x), in_row.load(center.data()), in_row.load(slope.data()),
                                in_row.load(bias.data()));
      at.store(y, bounds.apply(v));
    });
  }

  static void add_moments(const Strips& strips, size_t unit, const float* x, double* all_moments) {
    const Maps& maps = strips.maps;
    double* moments = all_moments + 2 * unit * maps.block;
    const double share = 1.0 / strips.pixels(unit / maps.groups());
    by_block(maps.block, [&](auto lanes) {
      constexpr size_t B = decltype(lanes)::value;
      double rest[2 * B] = {};
      float centers[B];
      add_up<B>(strips, unit, moments, [=](const auto& at, auto& total, auto&) { total += at.load(x); });
      for (size_t lane = 0; lane < B; ++lane) centers[lane] = static_cast<float>(moments[lane] * share);
      // the second sum is that of the deviations: the rounding error of the mean
      const auto center = Place<B>::channels(centers);
      add_up<B>(strips, unit, rest, [=](const auto& at, auto& square, auto& left) {
        const auto apart = at.load(x, center) - center;
        left += apart;
        square += apart * apart;
      });
      for (size_t lane = 0; lane < B; ++lane) {
        const double left = rest[B + lane];
        moments[lane] = centers[lane] + left * share;
        moments[B + lane] = rest[lane] - left * left * share;
      }
    });
  }

  void write_row(const Maps& maps, size_t row, const float* all_x, const float* all_mean, const float* all_slope,
                 const float* all_bias, float* all_y) const {
    const size_t at = row * maps.row_size(), c = maps.first_channel(row);
    const float* x = all_x + at;
    float* y = all_y + at;
    by_block(maps.block, [&](auto lanes) {
      constexpr size_t B = decltype(lanes)::value;
      const auto center = Place<B>::channels(all_mean + c), slope = Place<B>::channels(all_slope + c);
      const auto bias = Place<B>::channels(all_bias + c);
      const Bounds own = bounds;
      walk<B>(0, maps.row_size(), [=](const auto& at) {
        at.store(y, own.apply(normalized(at.load(x), center, slope, bias)));
      });
    });
  }
};

}  // namespace

const ort::CustomOp batch_normalization_grad = op<Gradient<true>>(),
                    unscaled_batch_normalization_grad = op<Gradient<false>>(),
                    batch_normalization = op<BatchNormalization>();

}  // namespace gradgraph
