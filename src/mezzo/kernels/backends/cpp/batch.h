// What one step covers, and how it is shared out over chunks and threads.
//
// Precision of every step: 16-bit values are widened exactly; the arithmetic is fp32, in the order of the reference.py
// beside each step; results are narrowed as formats.h and masters.h say. MEZZO_FMA is 1 where torch rounds a
// product and the sum after it once, so that masters equal the reference to the last bit.
#pragma once

#include <vector>

#include "masters.h"

constexpr int64_t kPart = 65536;  // elements that a thread takes at a time, and that one sum of squares runs over

inline float fused(float a, float b, float c) {
#if MEZZO_FMA
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

struct Batch {
  int64_t tensors;
  const int64_t* sizes;
  void* const* values;
  void* const* aux;
  void* const* grads;
  void* const* means;  // AdamW: of gradients; SGD: running sums
  void* const* squares;
  void* const* peaks;
  const uint32_t* seeds;
  const uint32_t* offsets;  // index of each tensor's first element in the whole of which it is a part, for the random_bits
  const float* scalars;
  const float* step;
  const float* inv_scale;  // this and the next two may be null
  const float* clip_coef;
  const float* found_inf;
  int32_t mode, value_format, grad_format, mean_format, maximize, threads;
};

struct Part {
  int64_t tensor, start, size;
};

// Waking another thread costs some microseconds; one part is 30 to 60 of work.
inline int threads_for(const std::vector<Part>& parts, int threads) {
  int64_t total = 0;
  for (const Part& p : parts) total += p.size;
  return total > kPart ? threads : 1;
}

inline std::vector<Part> parts_of(int64_t tensors, const int64_t* sizes) {
  std::vector<Part> parts;
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t at = 0; at < sizes[t]; at += kPart)
      parts.push_back({t, at, sizes[t] - at < kPart ? sizes[t] - at : kPart});
  return parts;
}

// What a loop over one part needs of its tensor and its step, in local variables.
template <int M, int F, int G> struct Slice {
  void *value, *aux;
  const void* grad;
  float inv_scale, clip_coef, sign;
  uint32_t key, mean_key, start;

  Slice(const Batch& b, const Part& p)
      : value(static_cast<char*>(b.values[p.tensor]) + p.start * width(F)),
        aux(kept_width(M) ? static_cast<char*>(b.aux[p.tensor]) + p.start * kept_width(M) : nullptr),
        grad(static_cast<const char*>(b.grads[p.tensor]) + p.start * width(G)),
        inv_scale(b.inv_scale ? *b.inv_scale : 1.0f),
        clip_coef(b.clip_coef ? *b.clip_coef : 1.0f),
        sign(b.maximize ? -1.0f : 1.0f),
        key(random_key(b.seeds[p.tensor], *b.step, 0)),
        mean_key(random_key(b.seeds[p.tensor], *b.step, 1)),
        start(b.offsets[p.tensor] + uint32_t(p.start)) {}

  float read_grad(int64_t i) const { return load<G>(grad, i) * inv_scale * clip_coef * sign; }
  float read(int64_t i) const { return read_master<M, F>(value, aux, i); }
  void write(int64_t i, float master) const {
    write_master<M, F>(value, aux, i, master, M == kChance ? mix((start + uint32_t(i)) ^ key) : 0);
  }
  template <int S> uint32_t mean_random_bits(int64_t i) const { return S == kFp32 ? 0 : mix((start + uint32_t(i)) ^ mean_key); }
};

template <int S> inline char* at(void* const* list, const Part& p) { return static_cast<char*>(list[p.tensor]) + p.start * width(S); }

template <class Step> using Loop = void (*)(const Batch&, const Part&, const typename Step::Rule&);

template <class Step, int M, int F, int G> Loop<Step> loop_for(const Batch& b, bool more) {
  if (b.mean_format == kFp32) return more ? Step::template run<M, F, G, kFp32, true> : Step::template run<M, F, G, kFp32, false>;
  return more ? Step::template run<M, F, G, kBf16, true> : Step::template run<M, F, G, kBf16, false>;
}
template <class Step, int M, int F> Loop<Step> loop_for(const Batch& b, bool more) {
  return b.grad_format == kFp32 ? loop_for<Step, M, F, kFp32>(b, more) : loop_for<Step, M, F, F>(b, more);
}
template <class Step, int M> Loop<Step> loop_for(const Batch& b, bool more) {
  return b.value_format == kBf16 ? loop_for<Step, M, kBf16>(b, more) : loop_for<Step, M, kFp16>(b, more);
}
template <class Step> Loop<Step> loop_for(const Batch& b, bool more) {
  switch (b.mode) {
    case kOwn: return loop_for<Step, kOwn, kFp32>(b, more);
    case kSplit: return loop_for<Step, kSplit, kBf16>(b, more);
    case kMaster: return loop_for<Step, kMaster>(b, more);
    case kKahan: return loop_for<Step, kKahan>(b, more);
    default: return loop_for<Step, kChance>(b, more);
  }
}

template <class Step> void take(const Batch& b, const typename Step::Rule& rule, bool more) {
  if (b.found_inf && *b.found_inf != 0) return;
  const auto loop = loop_for<Step>(b, more);
  const auto parts = parts_of(b.tensors, b.sizes);
#pragma omp parallel for schedule(dynamic) num_threads(threads_for(parts, b.threads))
  for (int64_t i = 0; i < int64_t(parts.size()); i++) loop(b, parts[i], rule);
}
