// Clip and Relu next to another operator: its inputs or outputs are clipped to bounds.
#pragma once

#include "kernel.h"

namespace gradgraph {

// Returns the cotangent where the number is between the bounds, else 0: at the bounds Clip passes it on, Relu does not.
struct Bounds {
  enum Kind : int64_t { kNone, kClosed, kOpen };

  float lower, upper;
  Kind kind;

  explicit Bounds(const Attributes& attributes)
      : lower(attributes.real("lower")), upper(attributes.real("upper")), kind(of(attributes.integer("activation"))) {}

  // NaN stays NaN.
  template <class V>
  V apply(const V& x) const {
    const V above = x < lower ? V{} + lower : x;
    return above > upper ? V{} + upper : above;
  }

  template <class V>
  V choose(const V& x, const V& cotangent) const {
    if (kind == kNone) return cotangent;
    const auto inside = kind == kOpen ? x > lower : (x >= lower) & (x <= upper);
    return inside ? cotangent : V{};
  }

 private:
  static Kind of(int64_t given) {
    if (given < kNone || given > kOpen) throw std::runtime_error("there is no such activation");
    return static_cast<Kind>(given);
  }
};

}  // namespace gradgraph
