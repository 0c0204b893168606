// Every operator of the library.
#pragma once

#include "kernel.h"

namespace gradgraph {

extern const ort::CustomOp adam_update, momentum_update;

}  // namespace gradgraph
