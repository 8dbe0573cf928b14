// The norms of gradients; __init__.py beside this file defines them.

#ifdef __AVX512F__
#pragma GCC target("prefer-vector-width=512")  // as in sgd
#endif

#include "batch.h"

// Sums of squares over 64 lanes in fp32, at most 1024 terms each, then in fp64.
template <int G> double sum_of_squares(const void* grad, int64_t size) {
  float lanes[64] = {};
  int64_t i = 0;
  for (; i + 64 <= size; i += 64)
    for (int64_t k = 0; k < 64; k++) lanes[k] = fused(load<G>(grad, i + k), load<G>(grad, i + k), lanes[k]);
  for (; i < size; i++) lanes[i % 64] = fused(load<G>(grad, i), load<G>(grad, i), lanes[i % 64]);
  double sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

inline double sum_of_squares(int format, const void* grad, int64_t size) {
  switch (format) {
    case kFp32: return sum_of_squares<kFp32>(grad, size);
    case kBf16: return sum_of_squares<kBf16>(grad, size);
    default: return sum_of_squares<kFp16>(grad, size);
  }
}

extern "C" void mezzo_gradients_norms(int64_t tensors, const int64_t* sizes, void* const* grads, const int32_t* formats, int32_t threads, float* norms) {
  const auto parts = parts_of(tensors, sizes, kPart);
  std::vector<double> sums(parts.size()), totals(tensors);
  for_each(parts, threads, [&](int64_t i) {
    const Part& p = parts[i];
    const int format = formats[p.tensor];
    sums[i] = sum_of_squares(format, static_cast<const char*>(grads[p.tensor]) + p.start * width(format), p.size);
  });
  for (size_t i = 0; i < parts.size(); i++) totals[parts[i].tensor] += sums[i];
  for (int64_t t = 0; t < tensors; t++) norms[t] = float(std::sqrt(totals[t]));
}

// Step counts that lie apart, as torch's optimizers keep them.
extern "C" void mezzo_gradients_add_one(int64_t tensors, float* const* counts) {
  for (int64_t t = 0; t < tensors; t++) counts[t][0] += 1.0f;
}
