// Constant factors: who packs them, and how kernels share the packed copies.

#include "constant.h"

#include <atomic>
#include <cstring>
#include <map>
#include <tuple>

namespace gradgraph::amx {

#if GRADGRAPH_TILES

namespace {

// Address, read order, packing and content of the numbers: memory that a session has freed may contain other numbers
// before the last of its kernels is destroyed.
using Key = std::tuple<const float*, size_t, size_t, size_t, bool, size_t, uint64_t>;

uint64_t fingerprint(const float* data, size_t count) {
  constexpr size_t kLanes = 8;
  constexpr uint64_t kPrime = 0x9e3779b97f4a7c15;
  uint64_t lanes[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = (lane + 1) * kPrime;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, data + i, sizeof(bits));
    uint64_t& lane = lanes[i % kLanes];
    lane = (lane ^ bits) * kPrime;
    lane ^= lane >> 29;
  }
  uint64_t all = 0;
  for (const uint64_t lane : lanes) all = (all ^ lane) * kPrime, all ^= all >> 32;
  return all;
}

constexpr size_t kMostBytes = size_t{1} << 30;  // of all copies in a process; then factors are packed in every run
std::atomic<size_t> bytes_of_copies{0};

}  // namespace

class Copy {
 public:
  explicit Copy(size_t bytes) : bytes_(bytes) { bytes_of_copies += bytes_; }
  ~Copy() { bytes_of_copies -= bytes_; }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  template <size_t kParts>
  void fill(const Context& context, const Factor& f, bool in_rows) {
    std::call_once(once_, [&] {
      const size_t panels = up(f.lines, kSide), steps = up(f.terms, kDepth);
      uint16_t* const out = memory_.at_least(panels * steps * kStep<kParts>);
      std::atomic<bool> fits{true};
      context.parallel(panels, 1, [&](size_t begin, size_t end) {
        Watch watch;
        for (size_t step = 0; step < steps; step += kSteps) {
          const size_t count = std::min(kSteps, steps - step);
          uint16_t* const at = out + step * kStep<kParts> * panels;
          for (size_t i = begin; i < end; ++i) {
            pack<kParts>(f, i, step, count, in_rows, at + i * count * kStep<kParts>, watch);
          }
        }
        if (watch.found()) fits = false;
      });
      if (fits) panels_ = out;
      else memory_.release();
    });
  }
  const uint16_t* panels() const { return panels_; }

 private:
  std::once_flag once_;
  const size_t bytes_;
  Memory memory_;
  const uint16_t* panels_ = nullptr;
};

namespace {

// Returns nullptr if there is no room for another copy.
std::shared_ptr<Copy> shared_copy(const Factor& f, bool in_rows, size_t parts) {
  static std::mutex mutex;
  static auto& known = *new std::map<Key, std::weak_ptr<Copy>>;  // never destroyed: sessions may outlive statics
  const Key key{f.data, f.lines, f.terms, f.line_stride, in_rows, parts, fingerprint(f.data, f.lines * f.terms)};
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = known.begin(); it != known.end();) it = it->second.expired() ? known.erase(it) : std::next(it);
  std::weak_ptr<Copy>& entry = known[key];
  std::shared_ptr<Copy> copy = entry.lock();
  if (copy != nullptr) return copy;
  const size_t bytes = f.lines * f.terms * parts * sizeof(uint16_t);
  if (bytes_of_copies + bytes > kMostBytes) return nullptr;
  entry = copy = std::make_shared<Copy>(bytes);
  return copy;
}

}  // namespace

const uint16_t* Constant::packed(const Context& context, const Factor& f, bool in_rows) const {
  if (!is_constant_ || f.lines * f.terms == 0 || !available()) return nullptr;
  std::call_once(once_, [&] {
    const auto copy = shared_copy(f, in_rows, parts_);
    if (copy == nullptr) return;
    parts_ == 2 ? copy->fill<2>(context, f, in_rows) : copy->fill<3>(context, f, in_rows);
    copy_ = copy;
  });
  return copy_ == nullptr ? nullptr : copy_->panels();
}

#else

class Copy {};

const uint16_t* Constant::packed(const Context&, const Factor&, bool) const { return nullptr; }

#endif

}  // namespace gradgraph::amx
