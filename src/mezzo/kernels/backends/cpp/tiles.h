// Products of bf16 on tiles (AMX) or in pairs (AVX512-BF16): whether this processor has them, and how a thread sets its tiles.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#define MEZZO_TILES 1
#define ON_TILES __attribute__((target("amx-tile,amx-bf16")))

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row, by tile
  uint8_t rows[16] = {};
};

ON_TILES inline void set_tiles(const TileConfig& config) {
  asm volatile("" ::"r"(&config) : "memory");  // GCC believes that only the first bytes are read
  _tile_loadconfig(&config);
}

// Whether the processor multiplies tiles of bf16, and Linux lets this process keep tiles. Asked once: a virtual machine is left for each answer, 5 us.
inline bool has_tiles() {
  static const bool has = [] {
    unsigned a, b, c, d = 0;
    constexpr unsigned both = 1u << 24 | 1u << 22;  // AMX-TILE, AMX-BF16
    constexpr int ask = 0x1023, tile_data = 18;     // ARCH_REQ_XCOMP_PERM
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & both) == both && !syscall(SYS_arch_prctl, ask, tile_data);
  }();
  return has;
}
#else
inline bool has_tiles() { return false; }
#endif

#if defined(MEZZO_TILES) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MEZZO_PAIRS 1
#define ON_PAIRS __attribute__((target("avx512bf16")))

inline bool has_pairs() {
  static const bool has = [] {
    unsigned a = 0, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
  }();
  return has;
}

// 2^x, to 3e-6 of it, for what is not too large to round.
inline __m512 exp2_of(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(0.0013333558f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0096181291f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0555041087f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.2402265070f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.6931471806f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(y, f, _mm512_set1_ps(1.f)), whole);
}
#else
inline bool has_pairs() { return false; }
#endif
