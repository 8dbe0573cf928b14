// The SGD step; __init__.py beside this file defines it.

#ifdef __AVX512F__
#pragma GCC target("prefer-vector-width=512")  // else half a register on Intel's processors; AdamW, which divides, gains nothing
#endif

#include "batch.h"

struct SGD {
  float weight_decay, momentum, nesterov;
};

struct SGDStep {
  using Rule = SGD;

  template <int M, int F, int G, int S, bool Sums> static void run(const Batch& b, const Part& p, const Rule& rule) {
    const Slice<M, F, G> slice(b, p);
    void* sums = Sums ? at<S>(b.means, p) : nullptr;
    const float* scalars = b.scalars + 3 * p.tensor;
    const float rate = scalars[0], keep = scalars[1], add = scalars[2];
    const float weight_decay = rule.weight_decay, momentum = rule.momentum;
    const bool decays = weight_decay != 0, nesterov = rule.nesterov != 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < p.size; i++) {
      float master = slice.read(i), grad = slice.read_grad(i);
      grad = decays ? fused(master, weight_decay, grad) : grad;
      if constexpr (Sums) {
        float total = fused(grad, add, load<S>(sums, i) * keep);
        write_mean<S>(sums, i, total, slice.template mean_random_bits<S>(i));
        grad = nesterov ? fused(total, momentum, grad) : total;
      }
      slice.write(i, fused(grad, rate, master));
    }
  }
};

extern "C" int32_t mezzo_sgd_step(const Batch* batch, const SGD* rule) {
  return take<SGDStep>(*batch, *rule, rule->momentum != 0);
}
