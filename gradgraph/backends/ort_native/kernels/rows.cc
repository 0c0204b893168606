// Gradients of LayerNormalization and Softmax, row by row.

#include <vector>

#include "kernels.h"
#include "sums.h"

namespace gradgraph {
namespace {

// (dy, x, scale, mean, inv) -> (dx, dscale); a row is all axes from `axis` on, as long as `scale`
struct LayerNormalizationGrad {
  static constexpr Signature signature{"LayerNormalizationGrad", 5, 2};
  static constexpr size_t kRows = 32;  // rows that one thread processes at a time; it sums them separately
  size_t axis;

  explicit LayerNormalizationGrad(const Attributes& attributes) : axis(attributes.integer("axis")) {}

  void compute(Context& context) const {
    const auto dy = context.input(0), x = context.input(1), scale = context.input(2);
    const auto mean = context.input(3), inv = context.input(4);
    same_count(x, {dy});
    same_count(mean, {inv});
    const size_t rows = x.dims.count(0, std::min(axis, x.dims.rank)), size = scale.count;
    if (rows * size != x.count || mean.count != rows) throw std::runtime_error("its tensors differ in size");
    const auto dx = context.output(0, x.dims), dscale = context.output(1, scale.dims);
    const size_t pieces = (rows + kRows - 1) / kRows;
    std::vector<float> partial(pieces * size);
    context.parallel(rows, kRows, [&](size_t begin, size_t end) {
      float* sums = partial.data() + begin / kRows * size;
      for (size_t row = begin; row < end; ++row) {
        const size_t at = row * size;
        one_row(dy.data + at, x.data + at, scale.data, mean.data[row], inv.data[row], dx.data + at, sums, size);
      }
    });
    for (size_t i = 0; i < size; ++i) {
      double total = 0;
      for (size_t piece = 0; piece < pieces; ++piece) total += partial[piece * size + i];
      dscale.data[i] = static_cast<float>(total);
    }
  }

  // dx = inv·(g − mean(g) − x̂·mean(g·x̂)) with g = dy·scale; sums += dy·x̂
  static void one_row(const float* dy, const float* x, const float* scale, float mean, float inv, float* dx,
                      float* sums, size_t size) {
    double all_plain = 0, all_along = 0;
    in_runs(size, [&](size_t begin, size_t end) {
      float plain = 0, along = 0;
#pragma omp simd reduction(+ : plain, along)
      for (size_t i = begin; i < end; ++i) {
        const float normal = (x[i] - mean) * inv, product = dy[i] * normal;
        sums[i] += product;
        plain += dy[i] * scale[i];
        along += product * scale[i];
      }
      all_plain += plain;
      all_along += along;
    });
    const double count = static_cast<double>(size);
    const float share = static_cast<float>(all_plain / count), slope = static_cast<float>(all_along / count);
#pragma omp simd
    for (size_t i = 0; i < size; ++i) {
      const float normal = (x[i] - mean) * inv;
      dx[i] = inv * (dy[i] * scale[i] - share - normal * slope);
    }
  }
};

// (dy, y[, do, o]) -> dx along the last axis: y·(dy − Σ dy·y), or with Σ do·o instead of this sum
struct SoftmaxGrad {
  static constexpr Signature signature{"SoftmaxGrad", 4, 1, 2};
  explicit SoftmaxGrad(const Attributes&) {}

  void compute(Context& context) const {
    const auto dy = context.input(0), y = context.input(1);
    same_count(y, {dy});
    const size_t size = y.dims.count(y.dims.rank - 1, y.dims.rank), rows = y.dims.count(0, y.dims.rank - 1);
    const bool other = context.has(2) && context.has(3);
    const auto a = other ? context.input(2) : dy, b = other ? context.input(3) : y;
    same_count(a, {b});
    const size_t length = a.dims.rank ? a.dims.count(a.dims.rank - 1, a.dims.rank) : 0;
    if (a.count != rows * length) throw std::runtime_error("its tensors differ in size");
    const auto dx = context.output(0, y.dims);
    if (y.count == 0) return;
    context.parallel(rows, std::max<size_t>(1, kGrain / size), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        const float sum = dot(a.data + row * length, b.data + row * length, length);
        const float *given = dy.data + row * size, *weight = y.data + row * size;
        float* out = dx.data + row * size;
#pragma omp simd
        for (size_t i = 0; i < size; ++i) out[i] = weight[i] * (given[i] - sum);
      }
    });
  }
};

}  // namespace

const ort::CustomOp layer_normalization_grad = op<LayerNormalizationGrad>(), softmax_grad = op<SoftmaxGrad>();

}  // namespace gradgraph
