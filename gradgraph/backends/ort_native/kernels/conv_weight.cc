// The gradient of a convolution with respect to its weights, with tiles (see conv.h).
//
// It is a sum over windows and images. Images are processed in pairs: a position contains a pixel of each of the two.
// Each piece of work sums over some images for some channels of y; at the end the pieces are added. Sizes alone
// determine the pieces, so results are the same for any number of threads.

#include <atomic>

#include "conv_weight.h"
#include "kernels.h"

namespace gradgraph {
namespace {

using namespace amx;
using namespace windows;

using weights::Task;

#if GRADGRAPH_TILES

constexpr size_t kBlock = 4 * kSide * kSide;    // sums of 32 x 32
constexpr size_t kRoom = size_t{1} << 20;       // bytes of a piece's factors, which stay in the second-level cache
constexpr size_t kPositions = 512;              // from here on, reading the sums takes little of the time
constexpr size_t kChunk = 4;                     // times 16 positions that are read for all taps in turn
constexpr size_t kPieces = 8;
constexpr size_t kMostSums = size_t{16} << 20;  // bytes of sums up to which threads divide the images

// How many images, rows and channels a piece of work has.
struct Pieces {
  size_t channels, parts;   // channels of y per part, at most, and the number of parts
  size_t rows, strips;      // rows of windows per strip, and strips
  size_t pairs, all_pairs;  // pairs of images per run, and in total
  size_t runs;              // pieces by images

  Pieces(const Layer& layer, size_t of_number) {
    const size_t m = layer.out.channels, c = up(layer.in.channels, kSide) * kSide;
    channels = std::min(up(m, 32) * 32, size_t{layer.taps >= 4 ? 64u : 256u});
    parts = up(m, channels);
    rows = layer.out.rows;
    pairs = 1, all_pairs = up(layer.in.images, 2);
    const auto slab = [&] { return Run(layer, rows, 1).slab(); };
    const size_t phases = layer.stride[0] * layer.stride[1], position = 4 * of_number * (c * phases + 2 * channels);
    while (rows > 1 && slab() * position > kRoom) rows = up(rows, 2);
    strips = up(layer.out.rows, rows);
    if (strips == 1) pairs = std::min({all_pairs, up(kPositions, slab()), std::max<size_t>(1, kRoom / (slab() * position))});
    pairs = std::max<size_t>(pairs, 1);
    const size_t most = std::max<size_t>(1, kMostSums / (sums() * sizeof(float) * layer.taps * up(layer.in.channels, 32) * parts));
    runs = std::max<size_t>(1, std::min({units(), kPieces / std::min(kPieces, parts), most}));
  }
  size_t units() const { return up(all_pairs, pairs) * strips; }
  size_t sums() const { return channels / 32 * kBlock; }  // sums of one tap and 32 channels of x
};

// Packs dy, which is contiguous along positions, as tiles of 16 channels: for each 16 positions and each part, a row
// per position.
template <size_t kParts>
void turn(const uint32_t* rows, size_t length, size_t part, size_t blocks, uint16_t* tiles) {
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t p = 0; p < kParts; ++p, tiles += kTile) {
      __m512i r[kSide];
      for (size_t i = 0; i < kSide; ++i) r[i] = _mm512_loadu_si512(rows + p * part + i * length + block * kSide);
      transpose(r);
      for (size_t i = 0; i < kSide; ++i) _mm512_store_si512(tiles + i * kDepth, r[i]);
    }
  }
}

// Some images and some channels of y.
template <size_t kParts>
struct Piece {
  const Task& task;
  const Pieces& pieces;
  size_t first_channel;  // of y
  Watch watch{};

  // Computes the sums over windows in `rows` rows, starting with `begin`, of `pairs` pairs of images: [tap, 32 channels
  // of x, 32 channels of y, 2 x 2 tiles].
  void compute(size_t first_pair, size_t pairs, size_t begin, size_t rows, float* sums) {
    const Layer& layer = task.layer;
    const Grid& grid = layer.grids.front();
    const Run run(layer, rows, pairs);
    const size_t x_row = run.phases() * run.length, x_channels = up(layer.in.channels, kSide) * kSide;
    const size_t x_part = x_channels * x_row;
    auto* x = reinterpret_cast<uint32_t*>(scratch(2 * kParts * x_part, 0));
    std::fill_n(x, kParts * x_part, 0u);
    read(run, task.x, layer.in, 0, layer.in.channels, first_pair, pairs, begin, run.slab(), x, x_row, x_part);

    const size_t positions = (pairs - 1) * run.slab() + (rows - 1) * run.pitch + grid.columns, blocks = up(positions, kSide);
    Run of_dy = run;
    of_dy.maps = layer.out;
    of_dy.stride = {1, 1}, of_dy.begin = {0, 0};
    of_dy.lines = rows;
    of_dy.length = (blocks | 1) * kSide;
    const size_t channels = std::min(pieces.channels, layer.out.channels - first_channel);
    const size_t panels = up(channels, kSide), y_part = panels * kSide * of_dy.length;
    uint16_t* tiles = scratch(2 * kParts * y_part + panels * blocks * kStep<kParts>, 1);
    auto* flat = reinterpret_cast<uint32_t*>(tiles + panels * blocks * kStep<kParts>);
    std::fill_n(flat, kParts * y_part, 0u);
    read(of_dy, task.dy, layer.out, first_channel, channels, first_pair, pairs, begin, run.slab(), flat, of_dy.length, y_part);
    for (size_t i = 0; i < panels; ++i) {
      turn<kParts>(flat + i * kSide * of_dy.length, of_dy.length, y_part, blocks, tiles + i * blocks * kStep<kParts>);
    }

    // a few positions of both factors stay in the first-level cache for all taps
    const size_t chunk = grid.taps.size() > 1 ? kChunk : blocks;
    for (size_t i = 0; i < x_channels / kSide; i += 2) {
      for (size_t j = 0; j < panels; j += 2) {
        for (size_t block = 0; block < blocks; block += chunk) {
          const Operand b{tiles + (j * blocks + block) * kStep<kParts>, 64, blocks * kStep<kParts>, kTile};
          float* to = sums + (i / 2 * (pieces.channels / 32) + j / 2) * kBlock;
          for (const Tap& tap : grid.taps) {
            const uint32_t* seen = x + i * kSide * x_row + run.phase(tap) * run.length + run.place(tap) + block * kSide;
            const Operand a{reinterpret_cast<const uint16_t*>(seen), 4 * x_row, 2 * kSide * x_row, 2 * x_part};
            add_up<kParts>(std::min<size_t>(2, x_channels / kSide - i), std::min<size_t>(2, panels - j),
                           std::min(chunk, blocks - block), a, [](size_t step) { return step * kDepth; }, b,
                           [](size_t step) { return step * kStep<kParts>; }, to, block == 0);
            to += up(layer.in.channels, 32) * pieces.sums();
          }
        }
      }
    }
  }

 private:
  void read(const Run& run, const float* data, const Maps& maps, size_t first, size_t channels, size_t first_pair,
            size_t pairs, size_t begin, size_t slab, uint32_t* to, size_t row, size_t part) {
    const size_t image = maps.channels * maps.pixels();
    for (size_t i = 0; i < pairs; ++i) {
      const size_t n = 2 * (first_pair + i);
      const float* even = data + n * image + first * maps.pixels();
      for (size_t c = 0; c < channels; ++c, even += maps.pixels()) {
        const float* odd = n + 1 < maps.images ? even + image : nullptr;
        fill<kParts>(run, even, odd, begin, to + c * row + i * slab, part, watch);
      }
    }
  }
};

// Writes the weights between 16 channels of x and 16 of y: the sums of one tap are at `sums`, those of the next tap
// `next` further on, and those of other runs `apart` from each other.
void write(const Task& task, size_t c, size_t m, const float* sums, size_t next, size_t runs, size_t apart) {
  const size_t taps = task.layer.taps, channels = task.layer.in.channels;
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(taps)));
  const __mmask16 some = first(channels - c);
  for (size_t tap = 0; tap < taps; ++tap, sums += next) {
    __m512i r[kSide];
    for (size_t i = 0; i < kSide; ++i) {
      __m512 sum = _mm512_load_ps(sums + i * kSide);
      for (size_t run = 1; run < runs; ++run) sum = _mm512_add_ps(sum, _mm512_load_ps(sums + run * apart + i * kSide));
      r[i] = _mm512_castps_si512(sum);
    }
    transpose(r);
    for (size_t i = 0; i < std::min(kSide, task.layer.out.channels - m); ++i) {
      float* to = task.dw + ((m + i) * channels + c) * taps + tap;
      if (taps == 1) {
        _mm512_mask_storeu_ps(to, some, _mm512_castsi512_ps(r[i]));
      } else {
        _mm512_mask_i32scatter_ps(to, some, places, _mm512_castsi512_ps(r[i]), 4);
      }
    }
  }
}

template <size_t kParts>
bool by_tiles(const Context& context, const Task& task) {
  const Layer& layer = task.layer;
  const Pieces pieces(layer, kParts);
  const size_t across = up(layer.in.channels, 32), next = across * pieces.sums(), part = task.layer.taps * next;
  const size_t apart = pieces.parts * part;
  auto* sums = reinterpret_cast<float*>(scratch(2 * pieces.runs * apart, 3));
  std::atomic<bool> fits{true};
  context.parallel(pieces.runs * pieces.parts, 1, [&](size_t begin, size_t end) {
    const Tiles tiles;
    for (size_t i = begin; i < end; ++i) {
      const size_t run = i / pieces.parts, channels = i % pieces.parts;
      Piece<kParts> piece{task, pieces, channels * pieces.channels};
      float* const total = sums + run * apart + channels * part;
      const size_t first = run * pieces.units() / pieces.runs, last = (run + 1) * pieces.units() / pieces.runs;
      // tiles round after every product, so they add up one unit only
      float* const one = last - first == 1 ? nullptr : reinterpret_cast<float*>(scratch(2 * part, 2));
      for (size_t unit = first; unit < last; ++unit) {
        const size_t pair = unit / pieces.strips * pieces.pairs, row = unit % pieces.strips * pieces.rows;
        piece.compute(pair, std::min(pieces.pairs, pieces.all_pairs - pair), row,
                      std::min(pieces.rows, layer.out.rows - row), unit == first ? total : one);
        if (unit != first) add(one, total, part);
      }
      if (piece.watch.found()) fits = false;
    }
  });
  if (!fits) return false;
  const size_t of_x = up(layer.in.channels, kSide), of_y = up(layer.out.channels, kSide);
  context.parallel(of_x * of_y, up(64, task.layer.taps), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const size_t c = i % of_x, m = i / of_x, in_part = m % (pieces.channels / kSide);
      const float* from = sums + m * kSide / pieces.channels * part + (c / 2 * (pieces.channels / 32) + in_part / 2) * kBlock;
      write(task, c * kSide, m * kSide, from + (2 * (c % 2) + m % 2) * kSide * kSide, next, pieces.runs, apart);
    }
  });
  return true;
}

#else

template <size_t>
bool by_tiles(const Context&, const Task&) { return false; }

#endif

// (x, dy) -> dw, [m, c·taps], for windows of `kernel` taps
struct ConvGradWeight {
  static constexpr Signature signature{"ConvGradWeight", 2, 1};
  Geometry geometry;
  std::array<int64_t, 2> kernel;
  size_t parts, block;

  explicit ConvGradWeight(const Attributes& attributes)
      : geometry(attributes), kernel(attributes.integers<2>("kernel")), parts(parts_of(attributes)),
        block(static_cast<size_t>(attributes.integer("block", 1))) {
    if (block != 1 && block != 8 && block != 16) throw std::runtime_error("its block should be 1, 8 or 16");
  }

  void compute(Context& context) const {
    const auto x = context.input(0), dy = context.input(1);
    const Maps of_x(x.dims), of_dy(dy.dims);
    Dims dims, flat;
    dims.rank = 4, flat.rank = 2;
    dims.size = {dy.dims.size[1], x.dims.size[1], kernel[0], kernel[1]};
    const std::array<size_t, 2> taps = kernel_of(dims, of_x.channels);
    flat.size = {dims.size[0], static_cast<int64_t>(dims.count(1, 4))};
    if (of_dy.images != of_x.images || geometry.counts(of_x, taps) != std::array<size_t, 2>{of_dy.rows, of_dy.columns}) {
      throw std::runtime_error("its dy does not fit x");
    }
    const auto dw = context.output(0, flat);
    if (of_x.channels % block || of_dy.channels % block) throw std::runtime_error("its channels are no whole number of blocks");
    const Task task{forward(of_x, of_dy.channels, taps, geometry, {of_dy.rows, of_dy.columns}), x.data, dy.data, dw.data, block};
    const auto tiles = parts == 2 ? by_tiles<2> : by_tiles<3>;
    if (x.count != 0 && dy.count != 0 && block == 1 && available() && tiles(context, task)) return;
    if (x.count == 0 || dy.count == 0) std::fill_n(dw.data, dw.count, 0.0f);
    else weights::ByVectors(task).compute(context);
  }
};

}  // namespace

const ort::CustomOp conv_grad_weight = op<ConvGradWeight>();

}  // namespace gradgraph
