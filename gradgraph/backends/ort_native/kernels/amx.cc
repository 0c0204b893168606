// Requests permission to use tiles from the system, and allocates memory for them.

#include "amx.h"

#include <cstdlib>
#include <new>

#if GRADGRAPH_TILES
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace gradgraph::amx {

#if GRADGRAPH_TILES
// Linux enables tiles for a process on request, once for all of its threads.
bool available() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#else
bool available() { return false; }
#endif

uint16_t* Memory::at_least(size_t count) {
  constexpr size_t kPage = size_t{1} << 21, kLine = 64;
  size_t bytes = count * sizeof(uint16_t);
  if (bytes > bytes_) {
    release();
    const size_t unit = bytes >= kPage ? kPage : kLine;
    bytes = (bytes + unit - 1) / unit * unit;
    data_ = std::aligned_alloc(unit, bytes);
    if (data_ == nullptr) throw std::bad_alloc();
    bytes_ = bytes;
#if GRADGRAPH_TILES
    if (unit == kPage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  return static_cast<uint16_t*>(data_);
}

void Memory::release() {
  std::free(data_);
  data_ = nullptr;
  bytes_ = 0;
}

uint16_t* scratch(size_t count, size_t slot) {
  static thread_local Memory memories[4];
  return memories[slot].at_least(count);
}

}  // namespace gradgraph::amx

// Called by gradgraph before it writes an operator that is faster only with tiles.
extern "C" __attribute__((visibility("default"))) int gradgraph_has_tiles() { return gradgraph::amx::available(); }
