// An LSTM for training: one direction, all steps in one call, forward and backward (see recurrent.h).
//
// c' = f c + i g and h' = o tanh c', with gates i, o, f (sigmoid) and g (tanh) of the contribution of the input plus R
// h. The forward pass overwrites the contribution of the input by the gates, the backward pass the gates by their
// cotangents. Sizes: T steps, N sequences, H units.

#include "elementary.h"
#include "kernels.h"
#include "recurrent.h"

namespace gradgraph {
namespace {

using namespace recurrent;

constexpr size_t kGates = 4;

// Sizes, and the order of steps.
struct Layer {
  size_t steps, rows, units;
  bool backwards;

  Layer(const Tensor<const float>& gates, const Tensor<const float>& weight, bool reverse) : backwards(reverse) {
    if (gates.dims.rank != 3 || weight.dims.rank != 2) throw std::runtime_error("its tensors should have 3 and 2 axes");
    steps = static_cast<size_t>(gates.dims.size[0]);
    rows = static_cast<size_t>(gates.dims.size[1]);
    units = static_cast<size_t>(weight.dims.size[1]);
    const auto wide = static_cast<int64_t>(kGates * units);
    if (weight.dims.size[0] != wide || gates.dims.size[2] != wide) throw std::runtime_error("its tensors differ in size");
  }
  size_t of_state() const { return rows * units; }
  // The step that is k-th in the forward order.
  size_t step(size_t k) const { return backwards ? steps - 1 - k : k; }
  // The offset of a row of that step in [T, N, H]; in the gates it is four times as large.
  size_t at(size_t k, size_t row) const { return (step(k) * rows + row) * units; }

  Dims states() const { return dims({steps, rows, units}); }
  Dims state() const { return dims({rows, units}); }
  Dims bias() const { return dims({kGates * units}); }
  static void expect(std::initializer_list<Tensor<const float>> all, size_t count) {
    for (const auto& x : all) {
      if (x.count != count) throw std::runtime_error("its tensors differ in size");
    }
  }

 private:
  static Dims dims(std::initializer_list<size_t> sizes) {
    Dims made;
    for (size_t size : sizes) made.size[made.rank++] = static_cast<int64_t>(size);
    return made;
  }
};

// The sigmoid; 0 where it would be below the smallest normal number.
inline float gate_of(float x) {
  constexpr float kFar = 87.0f;
  const float y = 1.0f / (1.0f + near_exp(x < -kFar ? kFar : (x > kFar ? -kFar : -x)));
  return x < -kFar ? 0.0f : y;
}

// Rows that are prefetched: the rows of a step are far from each other.
constexpr size_t kAhead = 4;

inline void fetch(const float* at) { __builtin_prefetch(at, 1, 2); }

// 32 units of 32 rows.
struct Block {
  alignas(64) float at[kRows][kUnits] = {};
  void squash(size_t rows) {
    float* all = at[0];
#pragma omp simd
    for (size_t i = 0; i < rows * kUnits; ++i) all[i] = fast_tanh(all[i]);
  }
};

// State k is the state before step k.
template <size_t kParts>
struct Forward {
  const Layer& layer;
  Recurrence<kParts>& recurrence;
  const float *x, *first_h, *first_c;
  float *gates, *after, *before, *cells;

  const float* h(size_t k) const { return k == 0 ? first_h : after + layer.at(k - 1, 0); }
  const float* c(size_t k) const { return k == 0 ? first_c : cells + layer.at(k - 1, 0); }

  void begin(const Place& place) const {
    recurrence.pack_weight(place);
    for (size_t r = 0; r < place.rows; ++r) {
      alignas(64) float values[kUnits] = {};
      copy(first_h + (place.row + r) * layer.units + place.unit, values, place);
      keep(0, place, r, values);
    }
  }

  void step(size_t k, const Place& place) const {
    Sums sums[kGates];
    for (size_t gate = 0; gate < kGates; ++gate) recurrence.multiply(k, h(k), place, gate, sums[gate]);
    Block outputs, states;
    for (size_t r = 0; r < place.rows; ++r) {
      for (size_t half = 0; half < 2; ++half) {
        units(k, place, r, half, sums, outputs.at[r] + half * kLanes, states.at[r] + half * kLanes);
      }
    }
    states.squash(place.rows);
    for (size_t r = 0; r < place.rows; ++r) {
      alignas(64) float values[kUnits];
      for (size_t j = 0; j < kUnits; ++j) values[j] = outputs.at[r][j] * states.at[r][j];
      copy(values, after + layer.at(k, place.row + r) + place.unit, place);
      keep(k + 1, place, r, values);
    }
  }

 private:
  // Computes gates and c, and returns o and c for the remaining work.
  void units(size_t k, const Place& place, size_t r, size_t half, const Sums (&sums)[kGates], float* o, float* c_now) const {
    const size_t n = place.row + r, unit = place.unit + half * kLanes, H = layer.units;
    const size_t at = layer.at(k, n) + unit, first = layer.at(k, n) * kGates + unit;
    const float *xs = x + first, *old = c(k) + n * H + unit;
    float *out = gates + first, *cell = cells + at;
    if (r + kAhead < place.rows) {
      for (size_t gate = 0; gate < kGates; ++gate) fetch(xs + (kAhead * kGates + gate) * H);
      fetch(cell + kAhead * H), fetch(after + at + kAhead * H);
    }
    const float *si = sums[0].row(r, half), *so = sums[1].row(r, half);
    const float *sf = sums[2].row(r, half), *sg = sums[3].row(r, half);
    for_lanes(place.lanes(half), [=](size_t j) GRADGRAPH_INLINE {
      const float i = gate_of(xs[j] + si[j]), f = gate_of(xs[j + 2 * H] + sf[j]);
      const float g = fast_tanh(xs[j + 3 * H] + sg[j]);
      o[j] = gate_of(xs[j + H] + so[j]);
      c_now[j] = cell[j] = f * old[j] + i * g;
      out[j] = i, out[j + H] = o[j], out[j + 2 * H] = f, out[j + 3 * H] = g;
    });
  }

  void keep(size_t state, const Place& place, size_t r, const float* values) const {
    if (state == layer.steps) return;
    recurrence.write(state, place, r, 0, values);
    copy(values, before + layer.at(state, place.row + r) + place.unit, place);
  }
};

// (x [T, N, 4H], R [4H, H], h [N, H], c [N, H]) -> gates [T, N, 4H]; h after and before each step, c after it [T, N,
// H]; the last h and c. x is the contribution of the input to the gates, biases included.
struct LSTM {
  static constexpr Signature signature{"LSTM", 4, 6, 0, -1, true};
  bool backwards;
  size_t parts;

  explicit LSTM(const Attributes& attributes)
      : backwards(attributes.integer("backwards") != 0), parts(amx::parts_of(attributes)) {}

  void compute(Context& context) const { parts == 2 ? compute_by<2>(context) : compute_by<3>(context); }

 private:
  template <size_t kParts>
  void compute_by(Context& context) const {
    const auto x = context.input(0), weight = context.input(1), h = context.input(2), c = context.input(3);
    const Layer layer(x, weight, backwards);
    layer.expect({h, c}, layer.of_state());
    const auto gates = context.output(0, x.dims), after = context.output(1, layer.states());
    const auto before = context.output(2, layer.states()), cells = context.output(3, layer.states());
    const auto last_h = context.output(4, layer.state()), last_c = context.output(5, layer.state());
    if (layer.of_state() == 0) return;
    Recurrence<kParts> recurrence(weight.data, kGates, layer.units, layer.rows, layer.steps + 1, false);
    const Forward<kParts> forward{layer, recurrence, x.data, h.data, c.data, gates.data, after.data, before.data, cells.data};
    in_steps(context, layer.steps + 1, recurrence.parts(), [&](size_t k, size_t part) {
      recurrence.each(part, [&](const Place& place) { k == 0 ? forward.begin(place) : forward.step(k - 1, place); });
    });
    std::copy_n(forward.h(layer.steps), layer.of_state(), last_h.data);
    std::copy_n(forward.c(layer.steps), layer.of_state(), last_c.data);
  }
};

// State k is the cotangents of the gates after k steps backward.
template <size_t kParts>
struct Backward {
  const Layer& layer;
  Recurrence<kParts>& recurrence;
  const float *gates, *cells, *first_c, *last_dh, *last_dc, *dy;  // dy may be null
  float *d, *dh, *dc;
  double* totals;  // [lines, 4H]: sums of d over all steps

  void step(size_t k, const Place& place) const {
    Sums sums;
    const size_t left = layer.steps - k;  // steps before this one
    if (k == 0) recurrence.pack_weight(place);
    if (k > 0) recurrence.multiply(k, d + layer.at(left, 0) * kGates, place, 0, sums);
    if (left == 0) return end(k, place, sums);
    Block squashed;
    for (size_t r = 0; r < place.rows; ++r) {
      copy(cells + layer.at(left - 1, place.row + r) + place.unit, squashed.at[r], place);
    }
    squashed.squash(place.rows);
    alignas(64) float total[kGates][kUnits] = {};
    for (size_t r = 0; r < place.rows; ++r) {
      alignas(64) float values[kGates][kUnits] = {};
      for (size_t half = 0; half < 2; ++half) {
        units(k, place, r, half, sums, squashed.at[r] + half * kLanes, values);
      }
      for (size_t gate = 0; gate < kGates; ++gate) {
        recurrence.write(k + 1, place, r, gate, values[gate]);
        for (size_t j = 0; j < kUnits; ++j) total[gate][j] += values[gate][j];
      }
    }
    for (size_t gate = 0; gate < kGates; ++gate) {
      double* all = totals + (place.line * kGates + gate) * layer.units + place.unit;
      for (size_t j = 0; j < place.units; ++j) all[j] += total[gate][j];
    }
  }

 private:
  void end(size_t k, const Place& place, const Sums& sums) const {
    for (size_t r = 0; r < place.rows; ++r) {
      const size_t at = (place.row + r) * layer.units + place.unit;
      for (size_t j = 0; j < place.units; ++j) {
        dh[at + j] = k == 0 ? last_dh[at + j] : sums.row(r, j / kLanes)[j % kLanes];
        if (k == 0) dc[at + j] = last_dc[at + j];
      }
    }
  }

  // Writes the cotangents of the gates to `d` and `values`, and updates that of c.
  void units(size_t k, const Place& place, size_t r, size_t half, const Sums& sums, const float* squashed,
             float (&values)[kGates][kUnits]) const {
    const size_t n = place.row + r, unit = place.unit + half * kLanes, H = layer.units, left = layer.steps - k - 1;
    const size_t at = layer.at(left, n) + unit, first = layer.at(left, n) * kGates + unit, state = n * H + unit;
    const float *in = gates + first, *before = left == 0 ? first_c + state : cells + layer.at(left - 1, n) + unit;
    if (r + kAhead < place.rows) {
      for (size_t gate = 0; gate < kGates; ++gate) fetch(in + (kAhead * kGates + gate) * H);
      fetch(before + kAhead * H);
    }
    const float *given = k == 0 ? last_dh + state : sums.row(r, half), *later = (k == 0 ? last_dc : dc) + state;
    alignas(64) float arrived[kLanes];
    for_lanes(place.lanes(half), [&](size_t j) { arrived[j] = given[j]; });
    if (dy != nullptr) for_lanes(place.lanes(half), [&, dy = dy + at](size_t j) { arrived[j] += dy[j]; });
    float *out = d + first, *earlier = dc + state, *kept = values[0] + half * kLanes;
    for_lanes(place.lanes(half), [=, &arrived](size_t j) GRADGRAPH_INLINE {
      const float i = in[j], o = in[j + H], f = in[j + 2 * H], g = in[j + 3 * H], dhidden = arrived[j];
      const float dcell = later[j] + dhidden * (o * (1.0f - squashed[j] * squashed[j]));
      const float di = dcell * (g * (i * (1.0f - i))), dout = dhidden * (squashed[j] * (o * (1.0f - o)));
      const float df = dcell * (before[j] * (f * (1.0f - f))), dg = dcell * (i * (1.0f - g * g));
      earlier[j] = dcell * f;
      out[j] = di, out[j + H] = dout, out[j + 2 * H] = df, out[j + 3 * H] = dg;
      kept[j] = di, kept[j + kUnits] = dout, kept[j + 2 * kUnits] = df, kept[j + 3 * kUnits] = dg;
    });
  }
};

// (gates, c after each step, R, the first c, cotangents of the last h and c[, and of h after each step]) -> cotangents of
// the gates [T, N, 4H], of the first h and c, and of a bias [4H]
struct LSTMGrad {
  static constexpr Signature signature{"LSTMGrad", 7, 4, 1, -1, true};
  bool backwards;
  size_t parts;

  explicit LSTMGrad(const Attributes& attributes)
      : backwards(attributes.integer("backwards") != 0), parts(amx::parts_of(attributes)) {}

  void compute(Context& context) const { parts == 2 ? compute_by<2>(context) : compute_by<3>(context); }

 private:
  template <size_t kParts>
  void compute_by(Context& context) const {
    const auto gates = context.input(0), cells = context.input(1), weight = context.input(2);
    const auto first_c = context.input(3), last_dh = context.input(4), last_dc = context.input(5);
    const Layer layer(gates, weight, backwards);
    layer.expect({first_c, last_dh, last_dc}, layer.of_state());
    layer.expect({cells}, layer.steps * layer.of_state());
    const float* dy = nullptr;
    if (context.has(6)) {
      layer.expect({context.input(6)}, cells.count);
      dy = context.input(6).data;
    }
    const auto d = context.output(0, gates.dims), dh = context.output(1, layer.state());
    const auto dc = context.output(2, layer.state()), bias = context.output(3, layer.bias());
    if (layer.of_state() == 0) {
      std::fill_n(bias.data, bias.count, 0.0f);
      return;
    }
    Recurrence<kParts> recurrence(weight.data, kGates, layer.units, layer.rows, layer.steps + 2, true);
    std::vector<double> totals(recurrence.lines() * bias.count);
    const Backward<kParts> back{layer, recurrence, gates.data, cells.data, first_c.data, last_dh.data, last_dc.data,
                        dy, d.data, dh.data, dc.data, totals.data()};
    in_steps(context, layer.steps + 1, recurrence.parts(), [&](size_t k, size_t part) {
      recurrence.each(part, [&](const Place& place) { back.step(k, place); });
    });
    for (size_t i = bias.count; i < totals.size(); ++i) totals[i % bias.count] += totals[i];
    std::copy_n(totals.data(), bias.count, bias.data);
  }
};

}  // namespace

const ort::CustomOp lstm = op<LSTM>(), lstm_grad = op<LSTMGrad>();

}  // namespace gradgraph
