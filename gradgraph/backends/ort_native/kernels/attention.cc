// Scaled dot-product attention for training (see attention.h): heads are read and written in place.
//
// Each tensor has a layout [offset, batch, head, row]: the offset of its first row, and the strides from one batch,
// head and row to the next. So queries, keys and values may be parts of one tensor, and so may their gradients.

#include "attention_few.h"
#include "attention_tiles.h"
#include "kernels.h"

namespace gradgraph {
namespace {

using namespace attention;

std::array<size_t, 4> counts(const Attributes& attributes, const char* name) {
  std::array<size_t, 4> counts{};
  const auto given = attributes.integers<4>(name);
  for (size_t i = 0; i < 4; ++i) {
    if (given[i] < 0) throw std::runtime_error(std::string(name) + " should not be negative");
    counts[i] = static_cast<size_t>(given[i]);
  }
  return counts;
}

struct Layout {
  size_t offset, batch, head, row;

  Layout(const Attributes& attributes, const char* name) {
    const auto given = counts(attributes, name);
    offset = given[0], batch = given[1], head = given[2], row = given[3];
  }
};

// The strides of a mask along batch, head, query and key.
struct MaskLayout {
  size_t batch, head, query, key;

  explicit MaskLayout(const Attributes& attributes) {
    const auto given = counts(attributes, "mask");
    batch = given[0], head = given[1], query = given[2], key = given[3];
    if (key > 1) throw std::runtime_error("the keys of its mask should lie side by side");
  }
};

Dims shape_of(const Attributes& attributes, const char* name) {
  const auto sizes = attributes.every_integer(name);
  if (sizes.size() > kMaxRank) throw std::runtime_error(std::string(name) + " has too many axes");
  Dims dims;
  dims.rank = sizes.size();
  std::copy(sizes.begin(), sizes.end(), dims.size.begin());
  return dims;
}

// What both kernels share.
struct Heads {
  size_t batch, heads, queries, keys, size, value_size;
  size_t parts;
  float scale;
  Layout q, k, v, y;
  MaskLayout mask;
  bool chosen;

  explicit Heads(const Attributes& attributes)
      : parts(amx::parts_of(attributes)),
        scale(attributes.real("scale")),
        q(attributes, "q"),
        k(attributes, "k"),
        v(attributes, "v"),
        y(attributes, "y"),
        mask(attributes),
        chosen(attributes.integer("chosen") != 0) {
    const auto sizes = attributes.integers<6>("sizes");
    const std::array<size_t*, 6> all{&batch, &heads, &queries, &keys, &size, &value_size};
    for (size_t i = 0; i < 6; ++i) {
      if (sizes[i] < 1) throw std::runtime_error("its sizes should be positive");
      *all[i] = static_cast<size_t>(sizes[i]);
    }
  }

  template <class T>
  Rows<T> rows(const Tensor<T>& x, const Layout& layout, size_t head) const {
    return {x.data + layout.offset + head / heads * layout.batch + head % heads * layout.head, layout.row};
  }

  template <class T>
  void expect(const Tensor<T>& x, const Layout& layout, size_t length, size_t width) const {
    const size_t last =
        layout.offset + (batch - 1) * layout.batch + (heads - 1) * layout.head + (length - 1) * layout.row;
    if (last + width > x.count) throw std::runtime_error("its tensors are smaller than their layouts");
  }

  // The i-th head, without its outputs.
  Head head(const std::array<Tensor<const float>, 3>& qkv, const float* masks, size_t i) const {
    const float* const at = masks == nullptr ? nullptr : masks + i / heads * mask.batch + i % heads * mask.head;
    const Mask given{at, mask.query, mask.key, chosen};
    return {queries, keys, size, value_size, scale, given, rows(qkv[0], q, i), rows(qkv[1], k, i), rows(qkv[2], v, i)};
  }

  std::array<Tensor<const float>, 3> inputs(const Context& context, size_t first) const {
    const std::array qkv{context.input(first), context.input(first + 1), context.input(first + 2)};
    expect(qkv[0], q, queries, size);
    expect(qkv[1], k, keys, size);
    expect(qkv[2], v, keys, value_size);
    return qkv;
  }

  // The mask, if there is one.
  const float* masks(const Context& context, size_t input) const {
    if (!context.has(input)) return nullptr;
    const auto given = context.input(input);
    const size_t last = (batch - 1) * mask.batch + (heads - 1) * mask.head + (queries - 1) * mask.query +
                        (keys - 1) * mask.key;
    if (last >= given.count) throw std::runtime_error("its mask is smaller than its layout");
    return given.data;
  }

  // Computes task(i) for every head.
  template <class Task, class Finish>
  void each(const Context& context, const Task& task, const Finish& finish) const {
    const size_t count = batch * heads;
    context.parallel(count, 1, [&](size_t i, size_t) {
      const auto now = task(i), next = task(std::min(i + 1, count - 1));  // threads mostly process consecutive heads
      const auto* const after = i + 1 < count ? &next : nullptr;
      const bool done = (parts == 3 ? by_tiles<3>(now, after) : by_tiles<2>(now, after)) || by_few(now);
      if (!done) by_vectors(now);
      finish(now);
    });
  }

  // For each query: the largest score, and 1 / the sum of exponentials.
  Dims kept() const {
    Dims dims;
    for (size_t n : {batch, heads, queries, size_t{2}}) dims.size[dims.rank++] = static_cast<int64_t>(n);
    return dims;
  }
};

// (q, k, v[, mask]) -> y, and two numbers for each row of scores; `guarded`: zeros for a query whose weights are NaN
struct Attention {
  static constexpr Signature signature{"Attention", 4, 2, 1};
  Heads heads;
  Dims shape;
  bool guarded;

  explicit Attention(const Attributes& attributes)
      : heads(attributes), shape(shape_of(attributes, "shape")), guarded(attributes.integer("guarded", 0) != 0) {}

  void compute(Context& context) const {
    const auto qkv = heads.inputs(context, 0);
    const float* const mask = heads.masks(context, 3);
    const auto y = context.output(0, shape), kept = context.output(1, heads.kept());
    heads.expect(y, heads.y, heads.queries, heads.value_size);
    const auto task = [&](size_t i) {
      return Result{heads.head(qkv, mask, i), heads.rows(y, heads.y, i),
                    reinterpret_cast<Kept*>(kept.data) + i * heads.queries};
    };
    heads.each(context, task, [this](const Result& result) {
      for (size_t i = 0; guarded && i < heads.queries; ++i) {
        if (std::isfinite(result.kept[i].share)) continue;
        std::fill_n(result.y[i], heads.value_size, 0.0f);
        result.kept[i] = {0.0f, 0.0f};
      }
    });
  }
};

// (dy, q, k, v, y, kept[, mask]) -> dq, dk, dv, or one tensor with all of them
template <bool kPacked>
struct AttentionGrad {
  static constexpr Signature signature{kPacked ? "PackedAttentionGrad" : "AttentionGrad", 7, kPacked ? 1 : 3, 1};
  Heads heads;
  Layout dy, dq, dk, dv;
  std::array<Dims, 3> shapes;

  explicit AttentionGrad(const Attributes& attributes)
      : heads(attributes),
        dy(attributes, "dy"),
        dq(attributes, "dq"),
        dk(attributes, "dk"),
        dv(attributes, "dv"),
        shapes{shape_of(attributes, "shape"), {}, {}} {
    if (kPacked) return;
    shapes[1] = shape_of(attributes, "shape_of_dk");
    shapes[2] = shape_of(attributes, "shape_of_dv");
  }

  void compute(Context& context) const {
    const auto given = context.input(0), y = context.input(4), kept = context.input(5);
    const auto qkv = heads.inputs(context, 1);
    const float* const mask = heads.masks(context, 6);
    if (kept.count != heads.kept().count()) throw std::runtime_error("its tensors differ in size");
    std::array<Tensor<float>, 3> out;
    for (size_t i = 0; i < 3; ++i) out[i] = i == 0 || !kPacked ? context.output(i, shapes[i]) : out[0];
    heads.expect(given, dy, heads.queries, heads.value_size);
    heads.expect(y, heads.y, heads.queries, heads.value_size);
    heads.expect(out[0], dq, heads.queries, heads.size);
    heads.expect(out[1], dk, heads.keys, heads.size);
    heads.expect(out[2], dv, heads.keys, heads.value_size);
    const auto task = [&](size_t i) {
      return Gradient{heads.head(qkv, mask, i), heads.rows(y, heads.y, i), heads.rows(given, dy, i),
                      reinterpret_cast<const Kept*>(kept.data) + i * heads.queries, heads.rows(out[0], dq, i),
                      heads.rows(out[1], dk, i), heads.rows(out[2], dv, i)};
    };
    heads.each(context, task, [](const Gradient&) {});
  }
};

}  // namespace

const ort::CustomOp attention_op = op<Attention>(), attention_grad = op<AttentionGrad<false>>(),
                    packed_attention_grad = op<AttentionGrad<true>>();

}  // namespace gradgraph
