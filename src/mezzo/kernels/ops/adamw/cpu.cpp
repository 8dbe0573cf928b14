// The AdamW step; __init__.py beside this file defines it.

#include "batch.h"

struct AdamW {
  float lerp1, keep2, add2, eps, l2, amsgrad;
};

struct AdamWStep {
  using Rule = AdamW;

  template <int M, int F, int G, int S, bool Peaks> static void run(const Batch& b, const Part& p, const Rule& rule) {
    const Slice<M, F, G> slice(b, p);
    void *means = at<S>(b.means, p), *squares = at<S>(b.squares, p), *peaks = Peaks ? at<S>(b.peaks, p) : nullptr;
    const float* scalars = b.scalars + 3 * p.tensor;
    const float decay = scalars[0], size = scalars[1], unbias = scalars[2], l2 = rule.l2;
    const float keep2 = rule.keep2, add2 = rule.add2, eps = rule.eps;
    const bool near = rule.lerp1 < 0.5f;  // torch's lerp starts from the nearer end
    const float lerp1 = near ? rule.lerp1 : rule.lerp1 - 1.0f;
#pragma GCC ivdep
    for (int64_t i = 0; i < p.size; i++) {
      float master = slice.read(i) * decay, grad = slice.read_grad(i), mean = load<S>(means, i);
      grad = l2 != 0 ? fused(master, l2, grad) : grad;
      mean = fused(lerp1, grad - mean, near ? mean : grad);
      float square = fused(add2 * grad, grad, load<S>(squares, i) * keep2), peak = square;
      if constexpr (Peaks) {
        float before = load<S>(peaks, i);
        peak = before > square || before != before ? before : square;
      }
      master += mean * size / (std::sqrt(peak) / unbias + eps);
      uint32_t random_bits = slice.template mean_random_bits<S>(i);
      slice.write(i, master);
      write_mean<S>(means, i, mean, random_bits);
      write_mean<S>(squares, i, square, random_bits >> 16);
      if constexpr (Peaks && S == kFp32) static_cast<float*>(peaks)[i] = peak;
      if constexpr (Peaks && S != kFp32) static_cast<uint16_t*>(peaks)[i] = narrow<S>(peak);
    }
  }
};

extern "C" int32_t mezzo_adamw_step(const Batch* batch, const AdamW* rule) {
  return take<AdamWStep>(*batch, *rule, rule->amsgrad != 0);
}
