// A factor of a product that never changes, cut into parts once instead of at every run.
#pragma once

#include <memory>
#include <mutex>

#include "kernel.h"
#include "panels.h"

namespace gradgraph::amx {

// The packed copy, 6 bytes a number; shared by all kernels that read the same numbers in the same order.
class Copy;

class Constant {
 public:
  // `is_constant`: the session says that the input never changes.
  explicit Constant(bool is_constant) : is_constant_(is_constant) {}

  // Its panels, packed by the first caller while others wait, with lines along the rows of tiles, as for A, or across, as
  // for B; nullptr if it may change, if there are no tiles, or if one of its numbers has no parts.
  const uint16_t* packed(const Context& context, const Factor& f, bool in_rows) const;

 private:
  bool is_constant_;
  mutable std::once_flag once_;
  mutable std::shared_ptr<const Copy> copy_;
};

}  // namespace gradgraph::amx
