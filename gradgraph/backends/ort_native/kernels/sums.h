// Sums of many numbers that are accurate for any length: runs are added in float, and their sums in double.
#pragma once

#include <algorithm>
#include <cstddef>

namespace gradgraph {

constexpr size_t kTermsOfRun = 1024;  // on many lanes; a chain of that many additions would lose two digits

// Calls body(begin, end) for the runs of [0, count).
template <class Body>
inline void in_runs(size_t count, const Body& body) {
  for (size_t begin = 0; begin < count; begin += kTermsOfRun) body(begin, std::min(count, begin + kTermsOfRun));
}

inline float dot(const float* a, const float* b, size_t count) {
  double total = 0;
  in_runs(count, [&](size_t begin, size_t end) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = begin; i < end; ++i) sum += a[i] * b[i];
    total += sum;
  });
  return static_cast<float>(total);
}

}  // namespace gradgraph
