// exp and erf as polynomials, which compilers turn into vector code (calls of the C library they do not). Least-squares
// fits that approach the minimax ones; tests hold them against the C library's.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace gradgraph {

inline float from_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Relative error 1e-7; 0 below the smallest normal number, infinity beyond the largest.
inline float fast_exp(float x) {
  constexpr float kLow = -87.336f, kHigh = 88.722f;
  const float bounded = x < kLow ? kLow : (x > kHigh ? kHigh : x);
  // x = n·ln 2 + r, with ln 2 in two parts
  const float n = std::nearbyint(bounded * 1.44269504f);
  const float r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 0.00138146058f;
  p = p * r + 0.00836871564f;
  p = p * r + 0.041668389f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  p = (p * r) * r + r + 1.0f;
  // 2^n in two factors, as n = 128 is none by itself
  const int32_t whole = static_cast<int32_t>(n), half = whole >> 1;
  const float y = p * from_bits((half + 127) << 23) * from_bits((whole - half + 127) << 23);
  return x < kLow ? 0.0f : (x > kHigh ? std::numeric_limits<float>::infinity() : y);
}

// Absolute error 1.2e-7.
inline float fast_erf(float x) {
  const float t = std::fabs(x), q = x * x;
  float near = -0.000599960214f;  // erf(x) = x + x·P(x²) up to 0.92
  near = near * q + 0.00499487622f;
  near = near * q - 0.0267677587f;
  near = near * q + 0.112818472f;
  near = near * q - 0.376124978f;
  near = near * q + 0.128379151f;
  near = near * x + x;
  const float u = t < 3.95f ? t : 3.95f;  // beyond, 1 − erf is less than half a unit of the last place
  float far = 1.0433263e-05f;             // log(1 − erf(t)) = −t·Q(t)
  far = far * u - 0.000314859528f;
  far = far * u + 0.0036103474f;
  far = far * u - 0.0236945767f;
  far = far * u + 0.106159061f;
  far = far * u + 0.635198057f;
  far = far * u + 1.12863708f;
  far = std::copysign(1.0f - fast_exp(-(far * u)), x);
  return t < 0.92f ? near : (t == t ? far : x);
}

}  // namespace gradgraph
