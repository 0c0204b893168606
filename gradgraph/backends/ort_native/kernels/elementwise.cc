// Chains of elementwise operators in one pass over memory: a program is run tile by tile, so that intermediate results
// stay in the first-level cache, and each tensor is read and written once.
//
//   Elementwise <program = "Mul 0 1; Sub #1 2", arity = 2, outputs = [3]> (x, y)
//
// A line of the program, up to a semicolon, is an instruction and its operands: values or #numbers. Values are
// numbered: first the inputs, then the results of lines; `outputs` lists the values that the node returns. Booleans are
// 1 and 0. All values have the shape to which NumPy broadcasts the inputs; an output may share the memory of an input.

#include <locale>
#include <memory>
#include <sstream>
#include <vector>

#include "elementary.h"
#include "kernels.h"

namespace gradgraph {
namespace {

// name(operands), value
#define GRADGRAPH_INSTRUCTIONS(UNARY, BINARY, TERNARY)                        \
  UNARY(Identity, x)                                                          \
  UNARY(Neg, -x)                                                              \
  UNARY(Abs, std::fabs(x))                                                    \
  UNARY(Sign, x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : (x == x ? 0.0f : x)))     \
  UNARY(Floor, std::floor(x))                                                 \
  UNARY(Ceil, std::ceil(x))                                                   \
  UNARY(Round, std::nearbyint(x))                                             \
  UNARY(Sqrt, std::sqrt(x))                                                   \
  UNARY(Reciprocal, 1.0f / x)                                                 \
  UNARY(Exp, fast_exp(x))                                                     \
  UNARY(Log, fast_log(x))                                                     \
  UNARY(Erf, fast_erf(x))                                                     \
  UNARY(Tanh, fast_tanh(x))                                                   \
  UNARY(Sigmoid, fast_sigmoid(x))                                             \
  UNARY(Softplus, fast_softplus(x))                                           \
  UNARY(Relu, x < 0.0f ? 0.0f : x)                                            \
  UNARY(Not, x == 0.0f ? 1.0f : 0.0f)                                         \
  BINARY(Add, x + y)                                                          \
  BINARY(Sub, x - y)                                                          \
  BINARY(Mul, x * y)                                                          \
  BINARY(Div, x / y)                                                          \
  BINARY(Pow, std::pow(x, y))                                                 \
  BINARY(Max, x > y ? x : (x == x ? y : x))                                   \
  BINARY(Min, x < y ? x : (x == x ? y : x))                                   \
  BINARY(Greater, x > y ? 1.0f : 0.0f)                                        \
  BINARY(GreaterOrEqual, x >= y ? 1.0f : 0.0f)                                \
  BINARY(Less, x < y ? 1.0f : 0.0f)                                           \
  BINARY(LessOrEqual, x <= y ? 1.0f : 0.0f)                                   \
  BINARY(Equal, x == y ? 1.0f : 0.0f)                                         \
  BINARY(NotEqual, x == y ? 0.0f : 1.0f)                                      \
  BINARY(And, x == 0.0f ? 0.0f : y)                                           \
  BINARY(Or, x == 0.0f ? y : 1.0f)                                            \
  BINARY(LeakyRelu, x < 0.0f ? y * x : x)        /* y: the slope below 0 */   \
  BINARY(Elu, x > 0.0f ? x : y * fast_expm1(x))  /* y: alpha */               \
  BINARY(ReluGrad, y > 0.0f ? x : 0.0f)          /* of x, the cotangent */    \
  BINARY(TanhGeluGrad, x * tanh_gelu_slope(y))                                \
  BINARY(HardSwishGrad, x * hard_swish_slope(y))                              \
  TERNARY(GeluGrad, x * (y * normal_density(y) + z))  /* z: Φ(y) */           \
  TERNARY(ClipGrad, y == z ? x : 0.0f)                                        \
  TERNARY(SiluGrad, x * (y * (1.0f - z) + z))                                 \
  TERNARY(Where, x == 0.0f ? z : y)                                           \
  TERNARY(HardSigmoid, within_unit(x * y + z))

inline float within_unit(float x) { return x < 0.0f ? 0.0f : (x > 1.0f ? 1.0f : x); }

// of x·min(max(x/6 + 1/2, 0), 1)
inline float hard_swish_slope(float x) {
  const float above = x < 3.0f ? x * (1.0f / 3.0f) + 0.5f : (x >= 3.0f ? 1.0f : x);  // a NaN stays one
  return x <= -3.0f ? 0.0f : above;
}

// φ(x), with log √2π
inline float normal_density(float x) { return exp_below(-0.918938533f - 0.5f * x * x); }

// of x·σ(v), v = 2√(2/π)·(x + 0.044715·x³)
inline float tanh_gelu_slope(float given) {
  constexpr float k = 1.59576912f, cubic = 0.044715f * k;
  const float x = given < -20.0f ? -20.0f : (given > 20.0f ? 20.0f : given);  // beyond, the result is 0 or 1
  const float square = x * x, e = exp_below(-std::fabs(x * (square * cubic + k))), larger = 1.0f / (1.0f + e);
  const float sigmoid = x < 0.0f ? e * larger : larger, slope = e * larger * larger;
  return slope * (x * (square * (3.0f * cubic) + k)) + sigmoid;
}

// A tile of a value; `number`: whether it is one number, repeated.
struct Operand {
  const float* data;
  bool number;
};

#define GRADGRAPH_UNARY(name, value)                        \
  struct name {                                             \
    static float of(float x) { return value; }              \
  };
#define GRADGRAPH_BINARY(name, value)                       \
  struct name {                                             \
    static float of(float x, float y) { return value; }     \
  };
#define GRADGRAPH_TERNARY(name, value)                      \
  struct name {                                             \
    static float of(float x, float y, float z) { return value; } \
  };
GRADGRAPH_INSTRUCTIONS(GRADGRAPH_UNARY, GRADGRAPH_BINARY, GRADGRAPH_TERNARY)
#undef GRADGRAPH_UNARY
#undef GRADGRAPH_BINARY
#undef GRADGRAPH_TERNARY

template <class F>
void unary(float* out, const Operand* in, size_t n) {
  const float* a = in[0].data;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) out[i] = F::of(a[i]);
}

template <class F>
void binary(float* out, const Operand* in, size_t n) {
  const float *a = in[0].data, *b = in[1].data;
  if (in[1].number) {
    const float second = *b;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) out[i] = F::of(a[i], second);
  } else if (in[0].number) {
    const float first = *a;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) out[i] = F::of(first, b[i]);
  } else {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) out[i] = F::of(a[i], b[i]);
  }
}

template <class F>
void ternary(float* out, const Operand* in, size_t n) {
  const float *a = in[0].data, *b = in[1].data, *c = in[2].data;
#pragma omp simd
  for (size_t i = 0; i < n; ++i) out[i] = F::of(a[i], b[i], c[i]);
}

struct Instruction {
  const char* name;
  size_t operands;
  void (*run)(float* out, const Operand* in, size_t n);
};

constexpr Instruction kInstructions[] = {
#define GRADGRAPH_UNARY(name, value) {#name, 1, unary<name>},
#define GRADGRAPH_BINARY(name, value) {#name, 2, binary<name>},
#define GRADGRAPH_TERNARY(name, value) {#name, 3, ternary<name>},
    GRADGRAPH_INSTRUCTIONS(GRADGRAPH_UNARY, GRADGRAPH_BINARY, GRADGRAPH_TERNARY)
#undef GRADGRAPH_UNARY
#undef GRADGRAPH_BINARY
#undef GRADGRAPH_TERNARY
};
#undef GRADGRAPH_INSTRUCTIONS

const Instruction& instruction(const std::string& name) {
  for (const Instruction& known : kInstructions) {
    if (name == known.name) return known;
  }
  throw std::runtime_error("there is no instruction '" + name + "'");
}

// A line of the program.
struct Line {
  Instruction instruction;
  std::array<size_t, 3> operands{};  // values, or numbers after all values
};

// Parses the number after a #, independently of the locale.
float number(const std::string& text) {
  if (text == "inf") return std::numeric_limits<float>::infinity();
  if (text == "-inf") return -std::numeric_limits<float>::infinity();
  if (text == "nan") return std::numeric_limits<float>::quiet_NaN();
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  double value = 0;
  if (!(stream >> value) || !stream.eof()) throw std::runtime_error("'#" + text + "' is no number");
  return static_cast<float>(value);
}

// The axes of the operands, where neighbouring axes are merged if every operand treats them alike: reads all, or one
// element for all.
struct Walk {
  std::array<size_t, kMaxRank> size{}, stride{};
  size_t rank = 0;

  // An operand of shape `given`, broadcast to the shape `all`.
  Walk(const Dims& given, const Dims& all) {
    std::array<size_t, kMaxRank> wide{}, step{};
    size_t elements = 1;
    for (size_t i = all.rank; i-- > 0;) {
      const size_t before = all.rank - given.rank;
      const size_t own = i < before ? 1 : static_cast<size_t>(given.size[i - before]);
      wide[i] = static_cast<size_t>(all.size[i]);
      step[i] = own == 1 ? 0 : elements;
      elements *= own;
    }
    for (size_t i = 0; i < all.rank; ++i) {
      if (wide[i] == 1) continue;
      if (rank > 0 && stride[rank - 1] == step[i] * wide[i]) {
        size[rank - 1] *= wide[i];
        stride[rank - 1] = step[i];
      } else {
        size[rank] = wide[i];
        stride[rank++] = step[i];
      }
    }
  }

  // The elements [begin, begin + n) of `data`, in the order of the broadcast shape.
  void copy(const float* data, size_t begin, size_t n, float* out) const {
    std::array<size_t, kMaxRank> at{};
    for (size_t i = rank, rest = begin; i-- > 0; rest /= size[i]) at[i] = rest % size[i];
    const size_t last = rank - 1;
    while (n > 0) {
      const float* from = data;
      for (size_t i = 0; i < rank; ++i) from += at[i] * stride[i];
      const size_t run = std::min(n, size[last] - at[last]);
      if (stride[last] == 0) {
        std::fill_n(out, run, *from);
      } else {
        std::copy_n(from, run, out);
      }
      out += run;
      n -= run;
      at[last] = 0;
      for (size_t i = last; i-- > 0 && ++at[i] == size[i];) at[i] = 0;
    }
  }
};

// The shape to which all inputs broadcast.
Dims broadcast(const std::vector<Tensor<const float>>& inputs) {
  Dims all;
  for (const auto& x : inputs) all.rank = std::max(all.rank, x.dims.rank);
  std::fill_n(all.size.begin(), all.rank, 1);
  for (const auto& x : inputs) {
    for (size_t i = 0; i < x.dims.rank; ++i) {
      int64_t& size = all.size[all.rank - x.dims.rank + i];
      const int64_t own = x.dims.size[i];
      if (size != own && size != 1 && own != 1) throw std::runtime_error("the shapes of its inputs do not broadcast");
      if (size == 1) size = own;
    }
  }
  return all;
}

class Elementwise {
 public:
  static constexpr Signature signature{"Elementwise", 1, 1, 0, -1, true, true};

  explicit Elementwise(const Attributes& attributes) {
    const int64_t inputs = attributes.integer("arity");
    if (inputs < 1) throw std::runtime_error("it should have an input");
    inputs_ = static_cast<size_t>(inputs);
    read(attributes.text("program"));
    for (const int64_t value : attributes.every_integer("outputs")) {
      const size_t line = static_cast<size_t>(value) - inputs_;  // a large number if it is negative
      if (line >= program_.size()) {
        throw std::runtime_error("output " + std::to_string(value) + " is not what a line of the program gives");
      }
      if (std::find(outputs_.begin(), outputs_.end(), line) != outputs_.end()) {
        throw std::runtime_error("output " + std::to_string(value) + " is named twice");
      }
      outputs_.push_back(line);
    }
    find_places();
  }

  void compute(Context& context) const {
    if (context.inputs() != inputs_ || context.outputs() != outputs_.size()) {
      throw std::runtime_error("it should have " + std::to_string(inputs_) + " inputs and " +
                               std::to_string(outputs_.size()) + " outputs");
    }
    std::vector<Tensor<const float>> inputs;
    for (size_t i = 0; i < inputs_; ++i) inputs.push_back(context.input(i));
    const Dims all = broadcast(inputs);
    std::vector<Tensor<float>> outputs;
    for (size_t k = 0; k < outputs_.size(); ++k) outputs.push_back(context.output(k, all));
    const Run run{*this, inputs, outputs, all};
    context.parallel(all.count(), grain_, [&](size_t begin, size_t end) { run.piece(begin, end); });
  }

 private:
  void read(const std::string& text) {
    std::istringstream lines(text);
    for (std::string written; std::getline(lines, written, ';');) {
      std::istringstream words(written);
      std::string word;
      words >> word;
      Line line{instruction(word)};
      const size_t operands = line.instruction.operands;
      size_t found = 0;
      for (; words >> word; ++found) {
        if (found < operands) line.operands[found] = operand(word);
      }
      if (found != operands) {
        throw std::runtime_error("'" + written + "' should have " + std::to_string(operands) + " operands");
      }
      program_.push_back(line);
    }
    for (Line& line : program_) {
      for (size_t& value : line.operands) value = value < kNumbers ? value : value - kNumbers + values();
    }
  }

  // Returns the index of a value, or of a number plus `kNumbers`.
  size_t operand(const std::string& word) {
    if (word[0] == '#') {
      numbers_.push_back(number(word.substr(1)));
      return kNumbers + numbers_.size() - 1;
    }
    const bool counts = word.size() <= 9 && word.find_first_not_of("0123456789") == std::string::npos;
    const size_t value = counts ? std::stoul(word) : kNumbers;
    if (value >= values()) throw std::runtime_error("'" + word + "' is neither an input nor what a line before gives");
    return value;
  }

  size_t values() const { return inputs_ + program_.size(); }

  // Where each line writes: an output, or a tile of scratch memory that is free again after the last line that reads
  // it. That line may overwrite it, as no instruction reads an element after it has written it.
  void find_places() {
    const size_t lines = program_.size(), none = outputs_.size();
    last_.assign(values() + numbers_.size(), 0);
    for (size_t i = 0; i < lines; ++i) {
      for (size_t k = 0; k < program_[i].instruction.operands; ++k) last_[program_[i].operands[k]] = i;
    }
    std::vector<size_t> output(lines, none), free;
    for (size_t k = 0; k < outputs_.size(); ++k) output[outputs_[k]] = k;
    std::vector<bool> done(values() + numbers_.size());
    for (size_t i = 0; i < lines; ++i) {
      for (size_t k = 0; k < program_[i].instruction.operands; ++k) {
        const size_t value = program_[i].operands[k];
        if (value < inputs_ || value >= values() || last_[value] != i || done[value]) continue;
        done[value] = true;  // an operand may occur twice
        if (place_[value - inputs_] >= none) free.push_back(place_[value - inputs_]);
      }
      if (output[i] == none && free.empty()) free.push_back(none + tiles_++);
      place_.push_back(output[i] == none ? free.back() : output[i]);
      if (output[i] == none) free.pop_back();
    }
    tile_ = tiles_ <= 6 ? 1024 : (tiles_ <= 12 ? 512 : 256);
    grain_ = lines <= 8 ? kGrain : kGrain / 2;
  }

  // The tensors of one run.
  struct Run {
    const Elementwise& kernel;
    const std::vector<Tensor<const float>>& inputs;
    const std::vector<Tensor<float>>& outputs;
    std::vector<size_t> spread;  // inputs that broadcast and are not single numbers
    std::vector<Walk> walks;     // for these inputs
    std::vector<bool> late;      // outputs that share the memory of an input that is read after they are written
    size_t count;

    Run(const Elementwise& of, const std::vector<Tensor<const float>>& in, const std::vector<Tensor<float>>& out,
        const Dims& all)
        : kernel(of), inputs(in), outputs(out), count(all.count()) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].count == count || inputs[i].count == 1) continue;
        spread.push_back(i);
        walks.emplace_back(inputs[i].dims, all);
      }
      for (size_t k = 0; k < outputs.size(); ++k) {
        bool read_later = false;
        for (size_t i = 0; i < inputs.size(); ++i) {
          const bool here = inputs[i].data == outputs[k].data;
          read_later = read_later || (here && kernel.last_[i] > kernel.outputs_[k]);
        }
        late.push_back(read_later);
      }
    }

    void piece(size_t begin, size_t end) const {
      const size_t first = inputs.size(), behind = kernel.values(), tile = kernel.tile_;
      // a cache line between tiles, so that they do not start in the same cache set
      const size_t stride = tile + 16, line = 64 / sizeof(float), places = outputs.size() + kernel.tiles_;
      const std::unique_ptr<float[]> memory(new float[(first + kernel.numbers_.size() + places) * stride + line]);
      float* scratch = memory.get() + (line - reinterpret_cast<uintptr_t>(memory.get()) / sizeof(float) % line) % line;
      std::vector<Operand> values(behind + kernel.numbers_.size());
      const auto repeat = [&](size_t value, float x) {
        values[value] = {scratch, true};
        std::fill_n(scratch, tile, x);
        scratch += stride;
      };
      for (size_t i = 0; i < first; ++i) {
        if (inputs[i].count == 1 && count != 1) repeat(i, *inputs[i].data);
      }
      for (size_t i = 0; i < kernel.numbers_.size(); ++i) repeat(behind + i, kernel.numbers_[i]);
      std::vector<float*> copies, written;
      for (size_t k = 0; k < spread.size(); ++k, scratch += stride) copies.push_back(scratch);
      for (size_t k = 0; k < places; ++k, scratch += stride) written.push_back(scratch);
      for (size_t at = begin; at < end; at += tile) {
        const size_t n = std::min(tile, end - at);
        for (size_t i = 0; i < first; ++i) {
          if (inputs[i].count == count) values[i] = {inputs[i].data + at, false};
        }
        for (size_t k = 0; k < spread.size(); ++k) {
          walks[k].copy(inputs[spread[k]].data, at, n, copies[k]);
          values[spread[k]] = {copies[k], false};
        }
        for (size_t k = 0; k < outputs.size(); ++k) {
          if (!late[k]) written[k] = outputs[k].data + at;
        }
        for (size_t i = 0; i < kernel.program_.size(); ++i) {
          const Line& of = kernel.program_[i];
          const Operand operands[] = {values[of.operands[0]], values[of.operands[1]], values[of.operands[2]]};
          float* out = written[kernel.place_[i]];
          of.instruction.run(out, operands, n);
          values[first + i] = {out, false};
        }
        for (size_t k = 0; k < outputs.size(); ++k) {
          if (late[k]) std::copy_n(written[k], n, outputs[k].data + at);
        }
      }
    }
  };

  static constexpr size_t kNumbers = size_t{1} << 40;  // more than there are values

  size_t inputs_ = 0;
  std::vector<Line> program_;
  std::vector<float> numbers_;
  std::vector<size_t> outputs_;  // lines
  std::vector<size_t> last_;     // for each value, the last line that reads it
  std::vector<size_t> place_;  // for each line, where it writes: outputs, then tiles
  size_t tiles_ = 0, tile_ = 0, grain_ = 0;
};

}  // namespace

const ort::CustomOp elementwise = op<Elementwise>();

}  // namespace gradgraph
