// Transpose, with the output divided among the threads.
//
//   Permute <perm = [0, 2, 1]> (x)
//
// onnxruntime divides each image among its threads, and convolutions divide the images: on cores without a common
// cache, half of a tensor would move from one to the other and back. It is not called Transpose, as onnxruntime's
// optimizer compares only this name, not the domain.

#include "kernels.h"
#include "transpose.h"

namespace gradgraph {
namespace {

// An axis of the output: its size, and how far apart its elements are in the input and in the output.
struct Axis {
  size_t size, from, to;
};

constexpr size_t kSide = 16;   // of a tile
constexpr size_t kRun = 1024;  // elements of the last axis that one thread writes at a time

// The axes of the output without those of size 1; neighbours that also lie side by side in the input are one axis.
std::vector<Axis> merged(const Dims& given, const std::vector<int64_t>& perm) {
  std::array<size_t, kMaxRank> from{};
  for (size_t axis = given.rank, step = 1; axis-- > 0; step *= static_cast<size_t>(given.size[axis])) from[axis] = step;
  std::vector<Axis> axes;
  for (const int64_t axis : perm) {
    const size_t size = static_cast<size_t>(given.size[axis]);
    if (size == 1) continue;
    if (!axes.empty() && axes.back().from == from[axis] * size) {
      axes.back() = {axes.back().size * size, from[axis], 0};
    } else {
      axes.push_back({size, from[axis], 0});
    }
  }
  for (size_t i = axes.size(), step = 1; i-- > 0; step *= axes[i].size) axes[i].to = step;
  return axes;
}

// out[j][i] = in[i][j] for `rows` j and `count` i, at most kSide of each
inline void tile(const float* in, size_t from, float* out, size_t to, size_t rows, size_t count) {
#if defined(__AVX512F__)
  if (rows == kSide && count == kSide) return transpose(in, from, out, to);
  const __mmask16 across = (1u << rows) - 1, along = (1u << count) - 1;
  __m512i r[kSide];
  for (size_t i = 0; i < kSide; ++i) r[i] = i < count ? _mm512_maskz_loadu_epi32(across, in + i * from) : __m512i{};
  transpose(r);
  for (size_t j = 0; j < rows; ++j) _mm512_mask_storeu_epi32(out + j * to, along, r[j]);
#elif defined(__AVX2__)
  constexpr size_t kHalf = 8;
  size_t full_rows = rows / kHalf * kHalf, full_count = count / kHalf * kHalf;
  for (size_t i = 0; i < full_count; i += kHalf) {
    for (size_t j = 0; j < full_rows; j += kHalf) transpose(in + i * from + j, from, out + j * to + i, to);
  }
  for (size_t j = 0; j < rows; ++j) {
    for (size_t i = j < full_rows ? full_count : 0; i < count; ++i) out[j * to + i] = in[i * from + j];
  }
#else
  for (size_t j = 0; j < rows; ++j) {
    for (size_t i = 0; i < count; ++i) out[j * to + i] = in[i * from + j];
  }
#endif
}

struct Permute {
  static constexpr Signature signature{"Permute", 1, 1};
  std::vector<int64_t> perm;

  explicit Permute(const Attributes& attributes) : perm(attributes.every_integer("perm")) {}

  void compute(Context& context) const {
    const auto x = context.input(0);
    Dims dims = x.dims;
    std::vector<bool> seen(dims.rank);
    for (const int64_t axis : perm) {
      if (axis < 0 || static_cast<size_t>(axis) >= dims.rank || seen[axis]) throw std::runtime_error("its perm does not fit");
      seen[axis] = true;
    }
    if (perm.size() != dims.rank) throw std::runtime_error("its perm does not fit");
    for (size_t i = 0; i < dims.rank; ++i) dims.size[i] = x.dims.size[perm[i]];
    const auto y = context.output(0, dims);
    if (x.count == 0) return;
    std::vector<Axis> axes = merged(x.dims, perm);
    if (axes.empty()) axes.push_back({1, 1, 1});
    move(context, x.data, y.data, axes);
  }

  // A piece is some lines of the output, up to kRun elements of each: lines are runs of the last axis along another one,
  // the axis along which the input is contiguous, or if that is the last one too, the axis before it.
  static void move(const Context& context, const float* x, float* y, const std::vector<Axis>& axes) {
    const size_t rank = axes.size();
    const Axis last = axes[rank - 1];
    const bool copies = last.from == 1;
    size_t other = rank > 1 ? rank - 2 : 0;
    for (size_t i = 0; i < rank && !copies; ++i) other = axes[i].from == 1 ? i : other;
    std::vector<size_t> step(rank, 1);
    step[other] = std::max<size_t>(1, kRun / last.size);
    if (!copies) step[other] = (step[other] + kSide - 1) / kSide * kSide;
    step[rank - 1] = kRun;
    const auto parts = [&](size_t i) { return (axes[i].size + step[i] - 1) / step[i]; };
    size_t pieces = 1;
    for (size_t i = 0; i < rank; ++i) pieces *= parts(i);
    const size_t each = std::min(kRun, last.size) * std::min(step[other], axes[other].size);
    context.parallel(pieces, std::max<size_t>(1, kGrain / each), [&](size_t begin, size_t end) {
      std::array<size_t, kMaxRank> at{};  // the first element of the piece, by axis
      for (size_t i = rank, left = begin; i-- > 0; left /= parts(i)) at[i] = left % parts(i) * step[i];
      for (size_t piece = begin; piece < end; ++piece) {
        const float* in = x;
        float* out = y;
        for (size_t i = 0; i < rank; ++i) {
          in += at[i] * axes[i].from;
          out += at[i] * axes[i].to;
        }
        const size_t count = std::min(kRun, last.size - at[rank - 1]);
        const size_t lines = rank == 1 ? 1 : std::min(step[other], axes[other].size - at[other]);
        if (copies) {
          for (size_t j = 0; j < lines; ++j) std::copy_n(in + j * axes[other].from, count, out + j * axes[other].to);
        } else {
          for (size_t j = 0; j < lines; j += kSide) {
            for (size_t i = 0; i < count; i += kSide) {
              tile(in + i * last.from + j, last.from, out + j * axes[other].to + i, axes[other].to,
                   std::min(kSide, lines - j), std::min(kSide, count - i));
            }
          }
        }
        for (size_t i = rank; i-- > 0 && (at[i] += step[i]) >= axes[i].size;) at[i] = 0;
      }
    });
  }
};

}  // namespace

const ort::CustomOp permute = op<Permute>();

}  // namespace gradgraph
