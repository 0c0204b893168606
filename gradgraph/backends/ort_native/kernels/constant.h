// A constant factor of a product, divided into parts once instead of in every run.
#pragma once

#include <memory>
#include <mutex>

#include "kernel.h"
#include "panels.h"

namespace gradgraph::amx {

// The packed copy, 2 bytes per number and part; shared by all kernels that read the same numbers in the same order.
class Copy;

class Constant {
 public:
  // `is_constant`: whether the session says that the input is constant; `parts`: the number of parts.
  Constant(bool is_constant, size_t parts) : is_constant_(is_constant), parts_(parts) {}

  // Returns its panels, which the first caller packs while others wait, with lines along the rows of tiles, as for A,
  // or across, as for B. Returns nullptr if the factor is not constant, there are no tiles, a number cannot be divided
  // into parts, or the copies of the process already take 1 GiB.
  const uint16_t* packed(const Context& context, const Factor& f, bool in_rows) const;

 private:
  bool is_constant_;
  size_t parts_;
  mutable std::once_flag once_;
  mutable std::shared_ptr<const Copy> copy_;
};

}  // namespace gradgraph::amx
