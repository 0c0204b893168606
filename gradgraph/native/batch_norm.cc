// BatchNormalization in training mode, forwards and backwards: two passes over memory each. Sums are taken by runs of
// pixels in float and from there on in double. A Clip or Relu behind it costs nothing.

#include <cmath>

#include "bounds.h"
#include "channels.h"
#include "kernels.h"

namespace gradgraph {
namespace {

constexpr size_t kRun = 256;  // numbers of a lane that are added up in float

// term(place, first, second) adds the two terms of the lanes there; of a row they go to sums[0..B) and sums[B..2B)
template <size_t B, class Term>
void add_up(size_t pixels, double* sums, const Term& term) {
  constexpr size_t L = Place<B>::kLanes;
  for (size_t begin = 0; begin < pixels * B; begin += kRun * L) {
    typename Lanes<L>::type first{}, second{};
    walk<B>(begin, std::min(pixels * B, begin + kRun * L), [&](const auto& at) { term(at, first, second); });
    add_lanes<B>(first, sums);
    add_lanes<B>(second, sums + B);
  }
}

double inverse_deviation(float var, float epsilon) { return 1.0 / std::sqrt(static_cast<double>(var) + epsilon); }

// What it gives; backwards these are the same bits, so that cotangents are chosen as numbers were.
template <class V>
V normalized(const V& x, const V& center, const V& slope, const V& bias) {
  return slope * (x - center) + bias;
}

// (dy, x, scale, mean, var[, bias]) -> (dx, dscale, db), or without the factor a: (u, a, dscale, db), where dx = a·u. With
// an activation, which needs the bias, dy is the cotangent of what that gives.
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
    std::vector<double> sums(2 * maps.images * maps.channels);  // of each row: Σ dy, Σ dy·(x − mean)
    const Rows rows{maps, dy.data, x.data, mean.data, a, bias.data()};
    context.parallel(maps.rows(), maps.grain(), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) row_sums(rows, row, sums.data());
    });
    context.parallel(maps.channels, maps.channel_grain(), [&](size_t begin, size_t end) {
      const double count = static_cast<double>(maps.images * maps.pixels);
      for (size_t c = begin; c < end; ++c) {
        const double inverse = inverse_deviation(var.data[c], epsilon);
        double total = 0, along = 0;
        for (size_t image = 0; image < maps.images; ++image) {
          const double* row = sums.data() + 2 * (image * maps.channels + c / block * block);
          total += row[c % block];
          along += row[block + c % block];
        }
        db.data[c] = static_cast<float>(total);
        dscale.data[c] = static_cast<float>(along * inverse);
        k[c] = static_cast<float>(along * inverse * inverse / count);
        s[c] = static_cast<float>(total / count);
      }
    });
    if (!kScaled) std::copy_n(a, maps.channels, context.output(1, scale.dims).data);
    context.parallel(maps.rows(), maps.grain(), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        write_row(rows, row, k, s, dx.data);
      }
    });
  }

  // What both passes read: of every row, and of every channel.
  struct Rows {
    const Maps& maps;
    const float *dy, *x, *mean, *slope, *bias;
  };

  // The channels of a row, and the cotangents of what was normalized there.
  template <size_t B>
  struct Row {
    using V = typename Place<B>::V;
    const Bounds bounds;
    const float *dy, *x;
    V center, slope, bias;

    Row(const Bounds& given, const Rows& rows, size_t row)
        : bounds(given),
          dy(rows.dy + row * rows.maps.row_size()),
          x(rows.x + row * rows.maps.row_size()),
          center(Place<B>::channels(rows.mean + rows.maps.first_channel(row))),
          slope(Place<B>::channels(rows.slope + rows.maps.first_channel(row))),
          bias(Place<B>::channels(rows.bias + rows.maps.first_channel(row))) {}

    V cotangent(const Place<B>& at, const V& lanes) const {
      return bounds.choose(normalized(lanes, center, slope, bias), at.load(dy));
    }
  };

  void row_sums(const Rows& rows, size_t row, double* all_sums) const {
    by_block(block, [&](auto lanes) {
      constexpr size_t B = decltype(lanes)::value;
      const Row<B> it(bounds, rows, row);
      add_up<B>(rows.maps.pixels, all_sums + 2 * row * B, [=](const auto& at, auto& total, auto& along) {
        const auto v = at.load(it.x, it.center);
        const auto d = it.cotangent(at, v);
        total += d;
        along += d * (v - it.center);
      });
    });
  }

  // dx = a·(dy − (k·(x − mean) + s)), or without a
  void write_row(const Rows& rows, size_t row, const float* all_k, const float* all_s, float* all_dx) const {
    by_block(block, [&](auto lanes) {
      constexpr size_t B = decltype(lanes)::value;
      const Row<B> it(bounds, rows, row);
      const size_t c = rows.maps.first_channel(row);
      const auto k = Place<B>::channels(all_k + c), s = Place<B>::channels(all_s + c);
      float* dx = all_dx + row * rows.maps.row_size();
      walk<B>(0, rows.maps.row_size(), [=](const auto& at) {
        const auto v = at.load(it.x);
        const auto u = it.cotangent(at, v) - (k * (v - it.center) + s);
        at.store(dx, kScaled ? it.slope * u : u);
      });
    });
  }
};

// (x, scale, bias) -> (y, mean, var), of this batch; y between the bounds
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

    // of each row its mean, and the sum of squares of what is left, while the row is in the cache
    std::vector<double> moments(2 * maps.images * maps.channels);
    context.parallel(maps.rows(), maps.grain(), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) row_moments(maps, row, x.data, moments.data());
    });
    context.parallel(maps.channels, maps.channel_grain(), [&](size_t begin, size_t end) {
      for (size_t c = begin; c < end; ++c) {
        double center = 0, squares = 0;
        const auto of_image = [&](size_t i) { return moments.data() + 2 * (i * maps.channels + c / block * block) + c % block; };
        for (size_t i = 0; i < maps.images; ++i) center += of_image(i)[0];
        center /= static_cast<double>(maps.images);
        for (size_t i = 0; i < maps.images; ++i) {
          const double apart = of_image(i)[0] - center;
          squares += of_image(i)[block] + apart * apart * static_cast<double>(maps.pixels);
        }
        const double variance = squares / static_cast<double>(maps.images * maps.pixels);
        mean.data[c] = static_cast<float>(center);
        var.data[c] = static_cast<float>(variance);
        slope[c] = static_cast<float>(scale.data[c] * inverse_deviation(var.data[c], epsilon));
      }
    });
    context.parallel(maps.rows(), maps.grain(), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        write_row(maps, row, x.data, mean.data, slope.data(), bias.data, y.data);
      }
    });
  }

  static void row_moments(const Maps& maps, size_t row, const float* all_x, double* all_moments) {
    const float* x = all_x + row * maps.row_size();
    double* moments = all_moments + 2 * row * maps.block;
    const double share = 1.0 / static_cast<double>(maps.pixels);
    by_block(maps.block, [&](auto lanes) {
      constexpr size_t B = decltype(lanes)::value;
      double rest[2 * B] = {};
      float centers[B];
      add_up<B>(maps.pixels, moments, [=](const auto& at, auto& total, auto&) { total += at.load(x); });
      for (size_t lane = 0; lane < B; ++lane) centers[lane] = static_cast<float>(moments[lane] * share);
      // the second sum is that of the rest itself: what rounding has left of the mean
      const auto center = Place<B>::channels(centers);
      add_up<B>(maps.pixels, rest, [=](const auto& at, auto& square, auto& left) {
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
