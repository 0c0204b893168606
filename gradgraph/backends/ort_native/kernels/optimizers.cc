// An optimizer's step for one parameter, in one pass over it and its state.

#include <cmath>

#include "kernels.h"

namespace gradgraph {
namespace {

// p·keep + rate·direction; `keep` is 1 if it is absent.
float kept(const Context& context, size_t index) { return context.has(index) ? context.scalar(index) : 1.0f; }

// (p, g, m, v, rate, floor[, keep]) -> (p, m, v). Computed as β·v + (1−β)·g², not v + (1−β)(g² − v), so that infinity
// stays infinity.
struct AdamUpdate {
  static constexpr Signature signature{"AdamUpdate", 7, 3, 1};
  std::array<float, 2> takes;

  explicit AdamUpdate(const Attributes& attributes) : takes(attributes.reals<2>("takes")) {}

  void compute(Context& context) const {
    const auto p = context.input(0), g = context.input(1), m = context.input(2), v = context.input(3);
    same_count(p, {g, m, v});
    const float rate = context.scalar(4), floor = context.scalar(5), keep = kept(context, 6);
    const float take_m = takes[0], take_v = takes[1];
    const float keep_m = static_cast<float>(1.0 - take_m), keep_v = static_cast<float>(1.0 - take_v);
    const auto new_p = context.output(0, p.dims), new_m = context.output(1, m.dims), new_v = context.output(2, v.dims);
    context.parallel(p.count, kGrain, [&](size_t begin, size_t end) {
#pragma omp simd
      for (size_t i = begin; i < end; ++i) {
        const float gradient = g.data[i], old_m = m.data[i], old_v = v.data[i];
        const float mean = keep_m * old_m + take_m * gradient;
        const float square = keep_v * old_v + take_v * (gradient * gradient);
        new_p.data[i] = p.data[i] * keep + mean / (std::sqrt(square) + floor) * rate;
        new_m.data[i] = mean;
        new_v.data[i] = square;
      }
    });
  }
};

// (p, g, m, rate[, keep]) -> (p, m)
struct MomentumUpdate {
  static constexpr Signature signature{"MomentumUpdate", 5, 2, 1};
  float decay;
  bool nesterov;

  explicit MomentumUpdate(const Attributes& attributes)
      : decay(attributes.real("decay")), nesterov(attributes.integer("nesterov") != 0) {}

  void compute(Context& context) const {
    const auto p = context.input(0), g = context.input(1), m = context.input(2);
    same_count(p, {g, m});
    const float rate = context.scalar(3), keep = kept(context, 4);
    const float fading = decay;
    const bool ahead = nesterov;
    const auto new_p = context.output(0, p.dims), new_m = context.output(1, m.dims);
    context.parallel(p.count, kGrain, [&](size_t begin, size_t end) {
#pragma omp simd
      for (size_t i = begin; i < end; ++i) {
        const float gradient = g.data[i], mean = fading * m.data[i] + gradient;
        new_p.data[i] = p.data[i] * keep + (ahead ? gradient + fading * mean : mean) * rate;
        new_m.data[i] = mean;
      }
    });
  }
};

}  // namespace

const ort::CustomOp adam_update = op<AdamUpdate>(), momentum_update = op<MomentumUpdate>();

}  // namespace gradgraph
