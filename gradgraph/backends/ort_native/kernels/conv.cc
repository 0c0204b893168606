// Convolutions and their gradients with respect to x, with tiles (see conv.h).
//
// The weights are packed once for all images. Then each thread processes some rows of an image, or a few images: it
// divides them into parts, and multiplies 32 channels of y by 32 windows at a time.

#include <atomic>
#include <limits>

#include "conv.h"
#include "kernels.h"

namespace gradgraph {
namespace {

using namespace amx;
using namespace windows;

// What is applied to sums before they are written: a bias and bounds.
struct Finish {
  const float* bias;  // one number per channel, or null
  float lower, upper;
};

// w [m, c, taps] as the factor of sums over `terms` channels, with a row for each of `rows` channels.
struct Weights {
  const float* data;
  size_t rows, terms, row_stride, term_stride;
};

struct Task {
  Layer layer;
  Weights w;
  Finish finish;
  const float* in;
  float* out;
};

// Computes one window after the other, where tiles cannot be used.
void plain(const Task& task, size_t map) {
  const Layer& layer = task.layer;
  const size_t image = map / layer.out.channels, channel = map % layer.out.channels;
  const float* w = task.w.data + channel * task.w.row_stride;
  const float bias = task.finish.bias == nullptr ? 0.0f : task.finish.bias[channel];
  float* out = task.out + map * layer.out.pixels();
  for (const Grid& grid : layer.grids) {
    for (size_t i = 0; i < grid.rows; ++i) {
      for (size_t j = 0; j < grid.columns; ++j) {
        double sum = 0;
        for (const Tap& tap : grid.taps) {
          const size_t y = i * layer.stride[0] + tap.down - layer.begin[0];
          const size_t x = j * layer.stride[1] + tap.right - layer.begin[1];
          if (y >= layer.in.rows || x >= layer.in.columns) continue;
          const float* pixel = task.in + image * layer.in.channels * layer.in.pixels() + y * layer.in.columns + x;
          for (size_t c = 0; c < layer.in.channels; ++c) {
            sum += static_cast<double>(pixel[c * layer.in.pixels()]) * w[c * task.w.term_stride + tap.weight];
          }
        }
        const float y = static_cast<float>(sum + bias);
        const float above = y < task.finish.lower ? task.finish.lower : y;
        const size_t at = (grid.row + i * layer.step[0]) * layer.out.columns + grid.column + j * layer.step[1];
        out[at] = above > task.finish.upper ? task.finish.upper : above;
      }
    }
  }
}

#if GRADGRAPH_TILES

constexpr size_t kSums = kSide * kSide;

// --- weights ---------------------------------------------------------------------------------------------------------

// Tiles of 16 rows by 32 terms, in pairs of a term and the 16th after it. For each panel of 16 rows they are ordered by
// chunk of terms, and within a chunk by tap.
size_t steps_of(const Task& task, const Grid& grid) { return up(task.w.terms, kDepth) * grid.taps.size(); }
size_t panels_of(const Task& task) { return up(task.w.rows, kSide); }

__m512 strided(const float* from, size_t stride, size_t count) {
  if (count == 0) return _mm512_setzero_ps();
  if (stride == 1) return _mm512_maskz_loadu_ps(first(count), from);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i at = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(stride)));
  return _mm512_mask_i32gather_ps(_mm512_setzero_ps(), first(count), at, from, 4);
}

// Packs one tile, whose first weight is `from`, reading along the axis with the smaller stride.
template <size_t kParts>
void pack_tile(const Weights& w, const float* from, size_t rows, size_t terms, uint16_t* tile, Watch& watch) {
  const size_t low = std::min(terms, kSide), high = terms - low;
  if (w.term_stride <= w.row_stride) {
    for (size_t i = 0; i < kSide; ++i, from += w.row_stride) {
      const bool is_there = i < rows;
      store_row<kParts>(strided(from, w.term_stride, is_there ? low : 0),
                        strided(from + kSide * w.term_stride, w.term_stride, is_there ? high : 0), i, tile, watch);
    }
    return;
  }
  __m512i half[2][kSide];
  for (size_t k = 0; k < kDepth; ++k, from += w.term_stride) {
    half[k / kSide][k % kSide] = _mm512_castps_si512(strided(from, w.row_stride, k < terms ? rows : 0));
  }
  transpose(half[0]);
  transpose(half[1]);
  for (size_t i = 0; i < kSide; ++i) {
    store_row<kParts>(_mm512_castsi512_ps(half[0][i]), _mm512_castsi512_ps(half[1][i]), i, tile, watch);
  }
}

// Returns false if a weight cannot be divided into parts.
template <size_t kParts>
bool pack_panel(const Task& task, const Grid& grid, size_t panel, uint16_t* packed) {
  Watch watch;
  const Weights& w = task.w;
  uint16_t* tile = packed + panel * steps_of(task, grid) * kStep<kParts>;
  const float* rows = w.data + panel * kSide * w.row_stride;
  for (size_t term = 0; term < w.terms; term += kDepth) {
    for (const Tap& tap : grid.taps) {
      pack_tile<kParts>(w, rows + term * w.term_stride + tap.weight, std::min(kSide, w.rows - panel * kSide),
                        std::min(kDepth, w.terms - term), tile, watch);
      tile += kStep<kParts>;
    }
  }
  return !watch.found();
}

// --- results ---------------------------------------------------------------------------------------------------------

// The windows in a block of 16 positions, written contiguously, or `step` apart.
struct Target {
  size_t block, lane, count, at;
  __mmask16 lanes;
};

// Rows of windows [begin, end) of `images` images, starting with `image`.
std::vector<Target> targets(const Layer& layer, const Grid& grid, const Run& run, size_t image, size_t images, size_t begin,
                            size_t end) {
  std::vector<Target> found;
  for (size_t i = 0; i < images; ++i) {
    for (size_t row = begin; row < std::min(end, grid.rows); ++row) {
      const size_t from = i * run.slab() + (row - begin) * run.pitch;
      const size_t to = (image + i) * layer.out.channels * layer.out.pixels() +
                        (grid.row + row * layer.step[0]) * layer.out.columns + grid.column;
      for (size_t column = 0; column < grid.columns;) {
        const size_t block = (from + column) / kSide, lane = (from + column) % kSide;
        const size_t count = std::min(kSide - lane, grid.columns - column), at = to + column * layer.step[1];
        const auto lanes = static_cast<__mmask16>(first(count) << lane);
        Target* last = found.empty() ? nullptr : &found.back();
        if (last != nullptr && last->block == block && layer.step[1] == 1 && last->at + last->count == at) {
          last->count += count;
          last->lanes |= lanes;
        } else {
          found.push_back({block, lane, count, at, lanes});
        }
        column += count;
      }
    }
  }
  return found;
}

// 16 positions of up to 16 channels.
void write(const Task& task, const Target* target, const Target* end, size_t block, size_t channel, const float* sums) {
  const size_t rows = std::min(kSide, task.w.rows - channel), pixels = task.layer.out.pixels();
  const size_t step = task.layer.step[1];
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i apart = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(step)));
  const __m512 lower = _mm512_set1_ps(task.finish.lower), upper = _mm512_set1_ps(task.finish.upper);
  for (; target != end && target->block == block; ++target) {
    float* out = task.out + target->at + channel * pixels;
    for (size_t i = 0; i < rows; ++i, out += pixels) {
      __m512 y = _mm512_load_ps(sums + i * kSide);
      if (task.finish.bias != nullptr) y = _mm512_add_ps(y, _mm512_set1_ps(task.finish.bias[channel + i]));
      y = _mm512_min_ps(upper, _mm512_max_ps(lower, y));  // the second operand if either is NaN
      y = _mm512_maskz_compress_ps(target->lanes, y);
      if (step == 1) {
        _mm512_mask_storeu_ps(out, first(target->count), y);
      } else {
        _mm512_mask_i32scatter_ps(out, first(target->count), apart, y, 4);
      }
    }
  }
}

// --- pieces of work --------------------------------------------------------------------------------------------------

constexpr size_t kRoom = size_t{512} << 10;  // bytes of an image in parts, which stay in the second-level cache
constexpr size_t kLong = 24;                 // steps that tiles add up by themselves: longer sums round more often
constexpr size_t kPositions = 256;           // from here on, reading the weights takes little of the time

// The rows of windows and the images that one thread processes at a time.
struct Pieces {
  size_t rows = 0, images = 1, most;
  Pieces(const Layer& layer, size_t parts) {
    for (const Grid& grid : layer.grids) rows = std::max(rows, grid.rows);
    most = rows;
    const size_t pairs = up(layer.in.channels, kDepth) * kSide;
    const auto bytes = [&](size_t lines) {
      const Run run(layer, lines, 1);
      return parts * sizeof(uint32_t) * pairs * run.phases() * run.slab();
    };
    while (rows > 1 && bytes(rows) > kRoom) rows = up(rows, 2);
    const size_t slab = Run(layer, rows, 1).slab();
    if (rows == most) images = std::min({layer.in.images, up(kPositions, slab), std::max<size_t>(1, kRoom / bytes(rows))});
  }
  size_t strips() const { return up(most, rows); }
};

// Computes one piece; returns false if a number cannot be divided into parts.
template <size_t kParts>
bool compute(const Task& task, const Pieces& pieces, const uint16_t* packed, size_t piece) {
  const Layer& layer = task.layer;
  const size_t begin = piece % pieces.strips() * pieces.rows, end = std::min(pieces.most, begin + pieces.rows);
  const size_t image = piece / pieces.strips() * pieces.images;
  const size_t images = std::min(pieces.images, layer.in.images - image);
  const Run run(layer, end - begin, images);
  const size_t pairs = up(layer.in.channels, kDepth) * kSide, row = run.phases() * run.length, part = pairs * row;
  auto* parts = reinterpret_cast<uint32_t*>(scratch(2 * kParts * part, 0));
  std::fill_n(parts, kParts * part, 0u);
  Watch watch;
  for (size_t i = 0; i < images; ++i) {
    const float* maps = task.in + (image + i) * layer.in.channels * layer.in.pixels();
    for (size_t pair = 0; pair < pairs; ++pair) {
      const size_t c = pair / kSide * kDepth + pair % kSide;
      if (c >= layer.in.channels) continue;
      const float* even = maps + c * layer.in.pixels();
      const float* odd = c + kSide < layer.in.channels ? even + kSide * layer.in.pixels() : nullptr;
      fill<kParts>(run, even, odd, begin, parts + pair * row + i * run.slab(), part, watch);
    }
  }
  if (watch.found()) return false;

  alignas(64) float sums[4 * kSums], more[4 * kSums] = {};
  for (const Grid& grid : layer.grids) {
    const std::vector<Target> found = targets(layer, grid, run, image, images, begin, end);
    const size_t steps = steps_of(task, grid), panel = steps * kStep<kParts>;
    std::vector<size_t> places;
    for (size_t pair = 0; pair < pairs; pair += kSide) {
      for (const Tap& tap : grid.taps) places.push_back(2 * (pair * row + run.phase(tap) * run.length + run.place(tap)));
    }
    const size_t blocks = found.empty() ? 0 : found.back().block + 1;
    for (size_t i = 0; i < panels_of(task); i += 2) {
      const size_t tall = std::min<size_t>(2, panels_of(task) - i);
      const Target* target = found.data();
      for (size_t j = 0; j < blocks; j += 2) {
        const size_t wide = std::min<size_t>(2, blocks - j);
        const Operand a{packed + i * panel, 64, panel, kTile};
        const Operand b{reinterpret_cast<const uint16_t*>(parts + j * kSide), 4 * row, kDepth, 2 * part};
        size_t from = 0;
        do {  // at least once, as windows without a tap have sums of 0
          const auto weight = [&](size_t step) { return (from + step) * kStep<kParts>; };
          const auto place = [&](size_t step) { return places[from + step]; };
          add_up<kParts>(tall, wide, std::min(kLong, steps - from), a, weight, b, place, from == 0 ? sums : more, true);
          if (from != 0) add(more, sums, 4 * kSums);
        } while ((from += kLong) < steps);
        const Target* const last = found.data() + found.size();
        for (size_t block = j; block < j + wide; ++block) {
          while (target != last && target->block < block) ++target;
          for (size_t k = 0; k < tall; ++k) {
            write(task, target, last, block, (i + k) * kSide, sums + (2 * k + block - j) * kSums);
          }
        }
      }
    }
    packed += panels_of(task) * panel;
  }
  return true;
}

template <size_t kParts>
bool by_tiles(const Context& context, const Task& task) {
  size_t size = 0;
  for (const Grid& grid : task.layer.grids) size += panels_of(task) * steps_of(task, grid) * kStep<kParts>;
  uint16_t* packed = scratch(size, 2);
  std::atomic<bool> fits{true};
  context.parallel(panels_of(task), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      uint16_t* to = packed;
      for (const Grid& grid : task.layer.grids) {
        if (!pack_panel<kParts>(task, grid, i, to)) fits = false;
        to += panels_of(task) * steps_of(task, grid) * kStep<kParts>;
      }
    }
  });
  if (!fits) return false;
  const Pieces pieces(task.layer, kParts);
  context.parallel(up(task.layer.in.images, pieces.images) * pieces.strips(), 1, [&](size_t begin, size_t end) {
    const Tiles tiles;
    for (size_t i = begin; i < end; ++i) {
      if (!compute<kParts>(task, pieces, packed, i)) fits = false;
    }
  });
  return fits;
}

#else

template <size_t>
bool by_tiles(const Context&, const Task&) { return false; }

#endif

void run(const Context& context, const Task& task, size_t parts) {
  if (task.layer.in.images == 0) return;
  if (available() && (parts == 2 ? by_tiles<2> : by_tiles<3>)(context, task)) return;
  context.parallel(task.layer.out.images * task.layer.out.channels, 1, [&](size_t begin, size_t end) {
    for (size_t map = begin; map < end; ++map) plain(task, map);
  });
}

// (x, w[, b]) -> y, clipped to the bounds
struct Conv {
  static constexpr Signature signature{"Conv", 3, 1, 1};
  Geometry geometry;
  float lower, upper;
  size_t parts;

  explicit Conv(const Attributes& attributes)
      : geometry(attributes),
        lower(attributes.real("lower")),
        upper(attributes.real("upper")),
        parts(parts_of(attributes)) {}

  void compute(Context& context) const {
    const auto x = context.input(0), w = context.input(1);
    const Maps maps(x.dims);
    const std::array<size_t, 2> kernel = kernel_of(w.dims, maps.channels), counts = geometry.counts(maps, kernel);
    const auto m = static_cast<size_t>(w.dims.size[0]);
    Tensor<const float> bias;
    if (context.has(2)) bias = context.input(2);
    if (bias.data != nullptr && bias.count != m) throw std::runtime_error("its bias should have a number for each channel");
    const Layer layer = forward(maps, m, kernel, geometry, counts);
    const auto y = context.output(0, layer.out.dims());
    run(context, {layer, {w.data, m, maps.channels, maps.channels * layer.taps, layer.taps}, {bias.data, lower, upper},
                  x.data, y.data}, parts);
  }
};

// (dy, w) -> dx, for images of `size`
struct ConvGradInput {
  static constexpr Signature signature{"ConvGradInput", 2, 1};
  Geometry geometry;
  std::array<int64_t, 2> size;
  size_t parts;

  explicit ConvGradInput(const Attributes& attributes)
      : geometry(attributes), size(attributes.integers<2>("size")), parts(parts_of(attributes)) {}

  void compute(Context& context) const {
    const auto dy = context.input(0), w = context.input(1);
    const Maps maps(dy.dims);
    if (w.dims.rank != 4 || w.dims.size[0] != dy.dims.size[1]) throw std::runtime_error("its weights do not fit dy");
    const auto c = static_cast<size_t>(w.dims.size[1]);
    const Maps of_x{maps.images, c, static_cast<size_t>(size[0]), static_cast<size_t>(size[1])};
    const Layer layer = backward(maps, of_x, kernel_of(w.dims, c), geometry);
    const auto dx = context.output(0, of_x.dims());
    constexpr float kAny = std::numeric_limits<float>::infinity();
    run(context, {layer, {w.data, c, maps.channels, layer.taps, c * layer.taps}, {nullptr, -kAny, kAny}, dy.data, dx.data},
        parts);
  }
};

}  // namespace

const ort::CustomOp conv = op<Conv>(), conv_grad_input = op<ConvGradInput>();

}  // namespace gradgraph
