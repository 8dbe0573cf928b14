// Sixteen values at a time, for loops whose sums a compiler does not keep in registers by itself. Roundings are those of formats.h, to the bit.
#pragma once

#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "batch.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // all is inlined: no call passes a register that the processor has not
#endif

constexpr int64_t kLanes = 16;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Flags __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <int F> using Stored = std::conditional_t<F == kFp32, Floats, Halves>;

#if defined(__AVX512F__)
inline Words words_of(Halves x) { return (Words)_mm512_cvtepu16_epi32((__m256i)x); }
inline Halves halves_of(Words x) { return (Halves)_mm512_cvtepi32_epi16((__m512i)x); }
#else
inline Words words_of(Halves x) { return __builtin_convertvector(x, Words); }
inline Halves halves_of(Words x) { return __builtin_convertvector(x, Halves); }
#endif

template <int F> inline Floats widened(Stored<F> x) {
  if constexpr (F == kFp32) return x;
  else if constexpr (F == kBf16) return (Floats)(words_of(x) << 16);
  else {
    Floats wide;
    for (int k = 0; k < kLanes; k++) wide[k] = widen_fp16(x[k]);
    return wide;
  }
}

template <int F> inline Stored<F> narrowed(Floats x) {
  if constexpr (F == kFp32) return x;
  else if constexpr (F == kBf16) {
    const Words bits = (Words)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, is_nan = (Words)(Flags)(x != x);
    return halves_of((nearest & ~is_nan) | (0x7fc0 & is_nan));
  } else {
    Halves half;
    for (int k = 0; k < kLanes; k++) half[k] = narrow_fp16(x[k]);
    return half;
  }
}

// The `count` values from i on, others being zeros; a count of kLanes that the compiler sees costs nothing.
template <int F> inline Floats load_lanes(const void* p, int64_t i, int64_t count) {
  Stored<F> x = {};
  std::memcpy(&x, static_cast<const char*>(p) + i * width(F), count * width(F));
  return widened<F>(x);
}

template <int F> inline void store_lanes(void* p, int64_t i, int64_t count, Floats value) {
  const Stored<F> x = narrowed<F>(value);
  std::memcpy(static_cast<char*>(p) + i * width(F), &x, count * width(F));
}

// Calls take(first, how many) for all of a row.
template <class Take> inline void by_lanes(int64_t size, const Take& take) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) take(i, kLanes);
  if (i < size) take(i, size - i);
}

inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  for (int k = 0; k < kLanes; k++) c[k] = fused(a[k], b[k], c[k]);
  return c;
#endif
}

inline float sum_of(Floats x) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int k = 0; k < half; k++) x[k] += x[k + half];
  return x[0];
}
