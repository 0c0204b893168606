// A factor of a product that never changes, cut into parts once instead of at every run.
#pragma once

#include <memory>
#include <mutex>

#include "kernel.h"
#include "panels.h"

namespace gradgraph::amx {

// The packed copy, 2 bytes a number for each part; shared by all kernels that read the same numbers in the same order.
class Copy;

class Constant {
 public:
  // `is_constant`: the session says that the input never changes; `parts`: of each number.
  Constant(bool is_constant, size_t parts) : is_constant_(is_constant), parts_(parts) {}

  // Its panels, packed by the first caller while others wait, with lines along the rows of tiles, as for A, or across, as
  // for B; nullptr if it may change, if there are no tiles, if one of its numbers has no parts, or if
  // the copies of the process take 1 GiB already.
  const uint16_t* packed(const Context& context, const Factor& f, bool in_rows) const;

 private:
  bool is_constant_;
  size_t parts_;
  mutable std::once_flag once_;
  mutable std::shared_ptr<const Copy> copy_;
};

}  // namespace gradgraph::amx
