// From a stored weight to its fp32 master and back. Definitions: weights.py, split/ and rounding/.
#pragma once

#include "formats.h"

enum Mode : int32_t { kOwn, kSplit, kMaster, kKahan, kChance };

constexpr int width(int format) { return format == kFp32 ? 4 : 2; }
constexpr int kept_width(int mode) { return mode == kMaster ? 4 : mode == kSplit || mode == kKahan ? 2 : 0; }

template <int M, int F> inline float read_master(const void* value, const void* aux, int64_t i) {
  float weight = load<F>(value, i);
  if constexpr (M == kSplit) {
    float joined = from_bits(to_bits(weight) + uint32_t(int32_t(static_cast<const int16_t*>(aux)[i])));
    return joined != joined ? weight : joined;
  } else if constexpr (M == kMaster) {
    float master = static_cast<const float*>(aux)[i];
    uint16_t rounded = narrow<F>(master);
    return load<F>(&rounded, 0) == weight ? master : weight;
  } else if constexpr (M == kKahan) {
    float rest = load<F>(aux, i), half_spacing = F == kBf16 ? 1.0f / 256 : 1.0f / 2048;
    return std::fabs(rest) <= std::fabs(weight) * half_spacing ? weight + rest : weight;
  } else {
    return weight;
  }
}

template <int M, int F> inline void write_master(void* value, void* aux, int64_t i, float master, uint32_t random_bits) {
  uint16_t* low = static_cast<uint16_t*>(value) + i;
  if constexpr (M == kOwn) {
    static_cast<float*>(value)[i] = master;
  } else if constexpr (M == kSplit) {
    uint32_t bits = master != master ? 0x7fc00000 : to_bits(master), high = (bits + 0x8000) >> 16;
    *low = uint16_t(high);
    static_cast<int16_t*>(aux)[i] = int16_t(bits - (high << 16));
  } else if constexpr (M == kMaster) {
    *low = narrow<F>(master);
    static_cast<float*>(aux)[i] = master;
  } else if constexpr (M == kKahan) {
    uint16_t rounded = narrow<F>(master);
    float weight = load<F>(&rounded, 0);
    *low = rounded;
    static_cast<uint16_t*>(aux)[i] = narrow<F>(finite(weight) ? master - weight : 0.0f);
  } else {
    *low = stochastic_round<F>(master, random_bits);
  }
}

template <int F> inline void write_mean(void* p, int64_t i, float x, uint32_t random_bits) {
  if constexpr (F == kFp32) static_cast<float*>(p)[i] = x;
  else static_cast<uint16_t*>(p)[i] = stochastic_round<F>(x, random_bits);
}
