// Activations backwards, in one pass each. Cotangents are chosen, not multiplied by 0 or 1: what is infinite stays out.

#include "elementary.h"
#include "kernels.h"

namespace gradgraph {
namespace {

// dx[i] = slope(dy[i], others[i]…), where all are as large as the first of the others.
template <class Slope, class... Others>
void pass(Context& context, const Slope& slope, const Tensor<const float>& like, const Others&... others) {
  const auto dy = context.input(0);
  same_count(like, {dy, others...});
  const auto dx = context.output(0, like.dims);
  context.parallel(like.count, kGrain, [&](size_t begin, size_t end) {
    const float* given = dy.data;
    float* out = dx.data;
#pragma omp simd
    for (size_t i = begin; i < end; ++i) out[i] = slope(given[i], like.data[i], others.data[i]...);
  });
}

// (dy, y) -> dx
struct ReluGrad {
  static constexpr Signature signature{"ReluGrad", 2, 1, 0, -1, true};
  explicit ReluGrad(const Attributes&) {}
  void compute(Context& context) const {
    pass(context, [](float dy, float y) { return y > 0.0f ? dy : 0.0f; }, context.input(1));
  }
};

// (dy, x, y) -> dx
struct ClipGrad {
  static constexpr Signature signature{"ClipGrad", 3, 1, 0, -1, true};
  explicit ClipGrad(const Attributes&) {}
  void compute(Context& context) const {
    pass(context, [](float dy, float x, float y) { return x == y ? dy : 0.0f; }, context.input(1), context.input(2));
  }
};

// (dy, y, gate) -> dx, where y = x·gate and gate is the sigmoid of x
struct SiluGrad {
  static constexpr Signature signature{"SiluGrad", 3, 1, 0, -1, true};
  explicit SiluGrad(const Attributes&) {}
  void compute(Context& context) const {
    const auto slope = [](float dy, float y, float gate) { return dy * (y * (1.0f - gate) + gate); };
    pass(context, slope, context.input(1), context.input(2));
  }
};

// Φ(x) + x·φ(x), in s = x/√2
inline float gelu_slope(float x) {
  const float s = x * 0.707106781f;
  const float cdf = fast_erf(s) * 0.5f + 0.5f;
  return s * fast_exp(-0.572364943f - s * s) + cdf;
}

// of x·σ(v), v = 2√(2/π)·(x + 0.044715·x³)
inline float tanh_gelu_slope(float x) {
  constexpr float k = 1.59576912f, cubic = 0.044715f * k;
  const float square = x * x;
  const float sigmoid = 1.0f / (1.0f + fast_exp(-x * (square * cubic + k)));
  return sigmoid * ((1.0f - sigmoid) * (x * (square * (3.0f * cubic) + k)) + 1.0f);
}

// (dy, x) -> dx
struct GeluGrad {
  static constexpr Signature signature{"GeluGrad", 2, 1, 0, -1, true};
  bool by_tanh;
  explicit GeluGrad(const Attributes& attributes) : by_tanh(attributes.integer("tanh") != 0) {}
  void compute(Context& context) const {
    const auto x = context.input(1);
    if (by_tanh) {
      pass(context, [](float dy, float v) { return dy * tanh_gelu_slope(v); }, x);
    } else {
      pass(context, [](float dy, float v) { return dy * gelu_slope(v); }, x);
    }
  }
};

}  // namespace

const ort::CustomOp relu_grad = op<ReluGrad>(), clip_grad = op<ClipGrad>(), silu_grad = op<SiluGrad>(),
                    gelu_grad = op<GeluGrad>();

}  // namespace gradgraph
