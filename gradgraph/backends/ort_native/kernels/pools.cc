// The gradient of MaxPool: every window finds its first largest element again and adds its cotangent there.

#include "channels.h"
#include "kernels.h"

namespace gradgraph {
namespace {

// The windows along one axis.
struct Axis {
  int64_t kernel, stride, dilation, begin, size, count;

  // Whether the windows are adjacent, ``n`` long and inside the image.
  bool tiles(int64_t n) const {
    return kernel == n && stride == n && (dilation == 1 || n == 1) && begin == 0 && count * n <= size;
  }
};

// (dy, x) -> dx; [N, C, H, W], windows as in ``gradgraph.rules.windows``
struct MaxPoolGrad {
  static constexpr Signature signature{"MaxPoolGrad", 2, 1};
  std::array<int64_t, 2> kernel, strides, dilations, begins;
  size_t block;

  explicit MaxPoolGrad(const Attributes& attributes)
      : kernel(attributes.integers<2>("kernel")),
        strides(attributes.integers<2>("strides")),
        dilations(attributes.integers<2>("dilations")),
        begins(attributes.integers<2>("begins")),
        block(attributes.integer("block")) {}

  void compute(Context& context) const {
    const auto dy = context.input(0), x = context.input(1);
    if (x.dims.rank != 4 || dy.dims.rank != 4) throw std::runtime_error("its tensors should have four axes");
    const Maps maps(x.dims, block), given(dy.dims, block);
    if (given.rows() != maps.rows()) throw std::runtime_error("its tensors differ in size");
    const Axis high = axis(0, x.dims, dy.dims), wide = axis(1, x.dims, dy.dims);
    const auto dx = context.output(0, x.dims);
    context.parallel(maps.rows(), maps.grain(), [&](size_t first, size_t last) {
      for (size_t row = first; row < last; ++row) {
        const float *from = dy.data + row * given.row_size(), *seen = x.data + row * maps.row_size();
        float* to = dx.data + row * maps.row_size();
        std::fill_n(to, maps.row_size(), 0.0f);
        if (block == 1 && high.tiles(2) && wide.tiles(2)) {
          pairs(high, wide, from, seen, to);
          continue;
        }
        by_block(block, [&](auto lanes) { one_map<decltype(lanes)::value>(high, wide, from, seen, to); });
      }
    });
  }

  Axis axis(size_t i, const Dims& x, const Dims& dy) const {
    return {kernel[i], strides[i], dilations[i], begins[i], x.size[2 + i], dy.size[2 + i]};
  }

  // A map in adjacent windows of 2 x 2, without branches, so that compilers vectorise it.
  static void pairs(const Axis& high, const Axis& wide, const float* __restrict dy, const float* __restrict x,
                    float* __restrict dx) {
    for (int64_t i = 0; i < high.count; ++i, dy += wide.count) {
      const float *above = x + 2 * i * wide.size, *below = above + wide.size;
      float *to = dx + 2 * i * wide.size, *under = to + wide.size;
#pragma omp simd
      for (int64_t j = 0; j < wide.count; ++j) {
        const float a = above[2 * j], b = above[2 * j + 1], c = below[2 * j], d = below[2 * j + 1], g = dy[j];
        const float two = b > a ? b : a, three = c > two ? c : two;
        const bool is_d = d > three, is_c = c > two && !is_d, is_b = b > a && !(c > two) && !is_d;
        to[2 * j] = is_b || is_c || is_d ? 0.0f : g;
        to[2 * j + 1] = is_b ? g : 0.0f;
        under[2 * j] = is_c ? g : 0.0f;
        under[2 * j + 1] = is_d ? g : 0.0f;
      }
    }
  }

  template <size_t B>
  static void one_map(const Axis& high, const Axis& wide, const float* dy, const float* x, float* dx) {
    for (int64_t i = 0; i < high.count; ++i) {
      for (int64_t j = 0; j < wide.count; ++j) one_window<B>(high, wide, i, j, dy + (i * wide.count + j) * B, x, dx);
    }
  }

  // Calls body(place) for the taps of a window that are inside the image, row by row.
  template <class Body>
  static void taps(const Axis& high, const Axis& wide, int64_t i, int64_t j, const Body& body) {
    for (int64_t k = 0; k < high.kernel; ++k) {
      const int64_t row = i * high.stride + k * high.dilation - high.begin;
      if (row < 0 || row >= high.size) continue;
      for (int64_t l = 0; l < wide.kernel; ++l) {
        const int64_t column = j * wide.stride + l * wide.dilation - wide.begin;
        if (column >= 0 && column < wide.size) body(row * wide.size + column);
      }
    }
  }

  template <size_t B>
  static void one_window(const Axis& high, const Axis& wide, int64_t i, int64_t j, const float* dy, const float* x,
                         float* dx) {
    if constexpr (B == 1) {
      int64_t best = -1;
      taps(high, wide, i, j, [&](int64_t at) {
        if (best < 0 || x[at] > x[best]) best = at;
      });
      if (best >= 0) dx[best] += *dy;
    } else {
      // the same in every lane: the cotangent is added at the first element that equals the largest, and then set to 0
      using V = typename Lanes<B>::type;
      bool any = false;
      V largest{};
      taps(high, wide, i, j, [&](int64_t at) {
        const V v = load<B>(x + at * B);
        largest = any ? (v > largest ? v : largest) : v;
        any = true;
      });
      V left = load<B>(dy);
      taps(high, wide, i, j, [&](int64_t at) {
        const auto here = load<B>(x + at * B) == largest;
        store<B>(dx + at * B, load<B>(dx + at * B) + (here ? left : V{}));
        left = here ? V{} : left;
      });
    }
  }
};

}  // namespace

const ort::CustomOp max_pool_grad = op<MaxPoolGrad>();

}  // namespace gradgraph
