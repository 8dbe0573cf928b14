// Laying out operands for products of pairs of bf16 (AVX512-BF16), and the sums of these: registers of 32 values, or of 16 pairs.
#pragma once

#include <cstring>

#include "tiles.h"

#if defined(MEZZO_PAIRS)
inline __m512i lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// For _mm512_permutex2var_epi16: words 0 to 15 of a register, each with the one `apart` places on.
inline __m512i woven(int apart) {
  return _mm512_or_si512(lanes(), _mm512_slli_epi32(_mm512_add_epi32(lanes(), _mm512_set1_epi32(apart)), 16));
}

// Even words from the first 16 of `both`, odd ones from the others.
inline __m512i woven(__m512i both) { return _mm512_permutexvar_epi16(woven(16), both); }
inline __m512i woven(__m256i even, __m256i odd) { return woven(_mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1)); }

// Masks of as many lanes, or words, as are `left`.
inline __mmask16 first_lanes(int64_t left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : uint16_t((1u << left) - 1); }
inline __mmask32 first_words(int64_t left) { return left >= 32 ? 0xffffffff : left <= 0 ? 0 : (1u << left) - 1; }

inline __m512 widened(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline __m512 load_wide(const uint16_t* p, __mmask16 there) { return widened(_mm256_maskz_loadu_epi16(there, p)); }

// The sums of R rows of 32 columns, in registers; in memory rows lie `row` apart.
template <int R> struct Block {
  __m512 sum[R][2];

  void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  }
  void load(const float* from, int64_t row) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sum[r][0] = _mm512_loadu_ps(from + r * row), sum[r][1] = _mm512_loadu_ps(from + r * row + 16);
  }
  void store(float* to, int64_t row) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) _mm512_storeu_ps(to + r * row, sum[r][0]), _mm512_storeu_ps(to + r * row + 16, sum[r][1]);
  }
  // Adds the products of a pair of each row with pairs of the columns.
  ON_PAIRS inline __attribute__((always_inline)) void add(const uint16_t* a, int64_t row, __m512i left, __m512i right) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, a + r * row, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, (__m512bh)left);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, (__m512bh)right);
    }
  }
};

// 16 rows of 16 lanes, turned.
inline void transpose(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#endif
