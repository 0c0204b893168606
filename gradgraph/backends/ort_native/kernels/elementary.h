// Elementary functions as polynomials, which compilers turn into vector code (calls of the C library they do not).
// Least-squares fits that approach the minimax ones; tests hold them against the C library's.
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

inline int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// n, in the exponent bits of a float; unsigned, as negative numbers must not be shifted.
inline int32_t as_exponent(int32_t n) { return static_cast<int32_t>(static_cast<uint32_t>(n) << 23); }

// a - b, modulo 2^32: the difference of bit patterns may overflow.
inline int32_t difference(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

// 2^n, for -127 < n < 128
inline float two_to(int32_t n) { return from_bits(as_exponent(n + 127)); }

constexpr float kLogSmallest = -103.972084f;  // the logarithm of half the smallest number; computing near it is slow

// exp(x) = y·2^n, y between √½ and √2
inline float exp_in_parts(float x, int32_t& n) {
  // x = n·ln 2 + r, with ln 2 as the sum of two numbers
  const float whole = std::nearbyint(x * 1.44269504f);
  const float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  float p = 0.00138146058f;
  p = p * r + 0.00836871564f;
  p = p * r + 0.041668389f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  n = static_cast<int32_t>(whole);
  return (p * r) * r + r + 1.0f;
}

// Relative error 1e-7; 0 below the smallest number, infinity beyond the largest.
inline float fast_exp(float x) {
  const bool none = x < kLogSmallest;
  int32_t n;
  const float y = exp_in_parts(none ? 0.0f : (x > 89.0f ? 89.0f : x), n);
  // 2^n as two factors, as n may be less than -126, or 128
  const int32_t half = n >> 1;
  return y * (none ? 0.0f : two_to(half)) * two_to(n - half);
}

// The same for x <= 0.
inline float exp_below(float x) {
  const bool none = x < kLogSmallest;
  int32_t n;
  const float y = exp_in_parts(none ? 0.0f : x, n);
  const float scale = two_to(n + 64);  // n may be less than -126
  return y * (none ? 0.0f : scale) * 5.42101086e-20f;
}

// The same for -87 < x < 88.
inline float near_exp(float x) {
  int32_t n;
  const float y = exp_in_parts(x, n);
  return y * two_to(n);
}

// exp(x) - 1 up to x = 0; errors of two units of the last place.
inline float fast_expm1(float x) {
  const float bounded = x < -20.0f ? -20.0f : (x > 0.0f ? 0.0f : x);
  const float n = std::nearbyint(bounded * 1.44269504f);
  const float r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = (p * r) * r + r;
  const float scale = two_to(static_cast<int32_t>(n));
  return p * scale + (scale - 1.0f);
}

// log(1 + f) for 1 + f between √½ and √2
inline float log_near_one(float f) {
  const float q = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  return (p * f * q - 0.5f * q) + f;
}

inline float fast_log(float x) {
  constexpr float kSmallest = std::numeric_limits<float>::min(), kInfinity = std::numeric_limits<float>::infinity();
  const bool small = x < kSmallest;
  const float normal = small ? x * 8388608.0f : x;
  // x = m·2^n, with m between √½ and √2
  const int32_t bits = bits_of(normal), whole = difference(bits, 0x3f3504f3) >> 23;
  const float f = from_bits(difference(bits, as_exponent(whole))) - 1.0f;
  const float n = static_cast<float>(whole) - (small ? 23.0f : 0.0f);
  const float y = (log_near_one(f) + n * 1.42860677e-6f) + n * 0.693145752f;
  const float special = x == 0.0f ? -kInfinity : (x < 0.0f ? std::numeric_limits<float>::quiet_NaN() : x);
  return x > 0.0f && x < kInfinity ? y : special;
}

inline float fast_tanh(float x) {
  const float t = std::fabs(x);
  const float m = fast_expm1(-2.0f * t);
  return x == x ? std::copysign(-m / (2.0f + m), x) : x;
}

inline float fast_sigmoid(float x) {
  const float e = exp_below(-std::fabs(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// log(1 + exp(x))
inline float fast_softplus(float x) {
  const float e = exp_below(-std::fabs(x));
  const bool large = e > 0.414213562f;  // 1 + e is then above √2
  const float y = log_near_one(large ? (e - 1.0f) * 0.5f : e) + (large ? 0.693147181f : 0.0f);
  return (x > 0.0f ? x : 0.0f) + y;
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
  far = std::copysign(1.0f - near_exp(-(far * u)), x);
  return t < 0.92f ? near : (t == t ? far : x);
}

}  // namespace gradgraph
