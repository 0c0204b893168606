// What the tiles need of the system.

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
// Linux gives a process the state of its tiles when asked, once for all of its threads.
bool available() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#else
bool available() { return false; }
#endif

namespace {

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

uint16_t* scratch(size_t count, size_t slot) {
  constexpr size_t kPage = size_t{1} << 21, kLine = 64;
  static thread_local Buffer buffers[4];
  Buffer& buffer = buffers[slot];
  size_t bytes = count * sizeof(uint16_t);
  if (bytes > buffer.bytes) {
    const size_t unit = bytes >= kPage ? kPage : kLine;
    bytes = (bytes + unit - 1) / unit * unit;
    std::free(buffer.data);
    buffer.bytes = 0;
    buffer.data = std::aligned_alloc(unit, bytes);
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.bytes = bytes;
#if GRADGRAPH_TILES
    if (unit == kPage) madvise(buffer.data, bytes, MADV_HUGEPAGE);
#endif
  }
  return static_cast<uint16_t*>(buffer.data);
}

}  // namespace gradgraph::amx

// Asked by gradgraph before it writes an operator that is worth it with tiles only.
extern "C" __attribute__((visibility("default"))) int gradgraph_has_tiles() { return gradgraph::amx::available(); }
