// What one step covers, and how it is shared out over chunks and threads.
//
// Precision of every step: 16-bit values are widened exactly; the arithmetic is fp32, in the order of the __init__.py
// beside each step; results are narrowed as formats.h and masters.h say. MEZZO_FMA is 1 where torch rounds a
// product and the sum after it once, so that masters equal the reference to the last bit.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <vector>

#include "masters.h"

constexpr int64_t kPart = 65536;  // elements that one sum of squares runs over
constexpr int64_t kStepPart = 32768;  // elements of a step that a thread takes at a time: two share three matrices of 256 x 256 evenly

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
  const int32_t* grad_formats;
  const float* scalars;  // 3 for each tensor
  const float* step;     // of each tensor
  const float* inv_scale;  // this and the next two may be null
  const float* clip_coef;
  const float* found_inf;
  int32_t mode, value_format, mean_format, maximize, threads;
};

// Subnormals are kept while this lives, whatever torch.set_flush_denormal told the calling thread, and only that one.
class KeepSubnormals {
#if defined(__SSE__)
  const unsigned before = _mm_getcsr();

 public:
  KeepSubnormals() { _mm_setcsr(before & ~0x8040u); }
  ~KeepSubnormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;

 public:
  KeepSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" : : "r"(before & ~(uint64_t(1) << 24)));
  }
  ~KeepSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#else
 public:
  KeepSubnormals() {}
#endif
};

struct Part {
  int64_t tensor, start, size;
};

// Waking another thread costs some microseconds; kPart elements are 15 to 60 of work.
inline int threads_for(const std::vector<Part>& parts, int threads) {
  int64_t total = 0;
  for (const Part& p : parts) total += p.size;
  return total > kPart ? threads : 1;
}

inline std::vector<Part> parts_of(int64_t tensors, const int64_t* sizes, int64_t most) {
  std::vector<Part> parts;
  for (int64_t t = 0; t < tensors; t++)
    for (int64_t at = 0; at < sizes[t]; at += most)
      parts.push_back({t, at, sizes[t] - at < most ? sizes[t] - at : most});
  return parts;
}

// Takes each part. One thread does so without OpenMP, whose way in takes 3 us in the middle of a step.
template <class Take> void for_each(const std::vector<Part>& parts, int threads, const Take& take) {
  const int64_t count = parts.size();
  const int used = threads_for(parts, threads);
  if (used == 1) {
    const KeepSubnormals mode;
    for (int64_t i = 0; i < count; i++) take(i);
    return;
  }
#pragma omp parallel num_threads(used)
  {
    const KeepSubnormals mode;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; i++) take(i);
  }
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
        key(random_key(b.seeds[p.tensor], b.step[p.tensor], 0)),
        mean_key(random_key(b.seeds[p.tensor], b.step[p.tensor], 1)),
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
template <class Step, int M, int F> Loop<Step> loop_for(const Batch& b, int grad, bool more) {
  if (grad == kFp32) return loop_for<Step, M, F, kFp32>(b, more);
  if constexpr (F != kFp32) return grad == F ? loop_for<Step, M, F, F>(b, more) : nullptr;
  return grad == kBf16 ? loop_for<Step, M, F, kBf16>(b, more) : loop_for<Step, M, F, kFp16>(b, more);
}
template <class Step, int M> Loop<Step> loop_for(const Batch& b, int grad, bool more) {
  return b.value_format == kBf16 ? loop_for<Step, M, kBf16>(b, grad, more) : loop_for<Step, M, kFp16>(b, grad, more);
}
template <class Step> Loop<Step> loop_for(const Batch& b, int grad, bool more) {
  switch (b.mode) {
    case kOwn: return loop_for<Step, kOwn, kFp32>(b, grad, more);
    case kSplit: return loop_for<Step, kSplit, kBf16>(b, grad, more);
    case kMaster: return loop_for<Step, kMaster>(b, grad, more);
    case kKahan: return loop_for<Step, kKahan>(b, grad, more);
    default: return loop_for<Step, kChance>(b, grad, more);
  }
}

// Returns 1, with nothing written, if a gradient has a format that no loop reads; else 0.
template <class Step> int32_t take(const Batch& b, const typename Step::Rule& rule, bool more) {
  if (b.found_inf && *b.found_inf != 0) return 0;
  const Loop<Step> loops[] = {loop_for<Step>(b, kFp32, more), loop_for<Step>(b, kBf16, more), loop_for<Step>(b, kFp16, more)};
  for (int64_t t = 0; t < b.tensors; t++)
    if (b.grad_formats[t] < kFp32 || b.grad_formats[t] > kFp16 || !loops[b.grad_formats[t]]) return 1;
  const auto parts = parts_of(b.tensors, b.sizes, kStepPart);
  for_each(parts, b.threads, [&](int64_t i) { loops[b.grad_formats[parts[i].tensor]](b, parts[i], rule); });
  return 0;
}
