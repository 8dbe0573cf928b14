// Number formats and their roundings, one value at a time, so that a loop over them becomes vector code.
// Definitions: rounding/__init__.py and torch's casts.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

enum Format : int32_t { kFp32, kBf16, kFp16 };

inline float from_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t to_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline uint32_t magnitude(float x) { return to_bits(x) & 0x7fffffff; }
inline bool finite(float x) { return magnitude(x) < 0x7f800000; }

inline float widen_bf16(uint16_t x) { return from_bits(uint32_t(x) << 16); }

inline uint16_t narrow_bf16(float x) {
  uint32_t bits = to_bits(x);
  uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
  return x != x ? 0x7fc0 : uint16_t(nearest);
}

inline float widen_fp16(uint16_t x) {
  uint32_t rest = uint32_t(x & 0x7fff) << 13, exponent = x & 0x7c00;
  // a subnormal is a whole number of 2^-24; no fp32 subnormal is met on the way, which some threads take for 0
  uint32_t small = to_bits(float(int32_t(x & 0x3ff)) * from_bits(0x33800000));
  uint32_t bits = exponent == 0x7c00 ? rest | 0x7f800000 : rest + 0x38000000;  // exponent plus 112
  return from_bits((exponent == 0 ? small : bits) | uint32_t(x & 0x8000) << 16);
}

inline uint16_t narrow_fp16(float x) {
  uint32_t rest = magnitude(x), sign = (to_bits(x) >> 16) & 0x8000;
  uint32_t normal = (rest + 0xc8000fff + ((rest >> 13) & 1)) >> 13;  // exponent less 112, ties to even
  uint32_t small = to_bits(from_bits(rest) + 0.5f) - 0x3f000000;     // fp32 rounds at 0.5 as fp16 does below 2^-14
  uint32_t half = rest < 0x38800000 ? small : normal;
  half = rest >= 0x477ff000 ? 0x7c00 : half;
  return uint16_t(sign | (rest > 0x7f800000 ? 0x7e00 : half));
}

template <int F> inline uint16_t narrow(float x) { return F == kBf16 ? narrow_bf16(x) : narrow_fp16(x); }

template <int F> inline float load(const void* p, int64_t i) {
  if constexpr (F == kFp32) return static_cast<const float*>(p)[i];
  uint16_t x = static_cast<const uint16_t*>(p)[i];
  return F == kBf16 ? widen_bf16(x) : widen_fp16(x);
}

inline uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}

inline uint32_t random_key(uint32_t seed, float step, uint32_t stream) {
  const uint32_t golden = 0x9e3779b9U;
  return mix(uint32_t(int64_t(step)) * golden + mix(seed + stream * golden));
}

template <int F> inline uint16_t stochastic_round(float x, uint32_t random_bits) {
  uint32_t bits = to_bits(x), low = random_bits & 0xffff;
  if constexpr (F == kBf16) return finite(x) ? uint16_t((bits + low) >> 16) : narrow_bf16(x);
  low >>= 3;
  float steps = std::floor(from_bits(magnitude(x)) * 16777216.0f + float(low) * (1.0f / 8192));
  float small = from_bits(to_bits(steps * (1.0f / 16777216)) | (bits & 0x80000000));
  float rounded = magnitude(x) < 0x38800000 ? small : from_bits((bits + low) & ~0x1fffU);
  return narrow_fp16(finite(x) ? rounded : x);
}
