// RMS norm of rows, and its gradients and those of layer norm:
//   y = x' w,  x' = x r,  r = 1 / sqrt(mean(x x) + eps),
//   dx = r (g w - x' mean(g w x')),  dw = the sum over rows of g x'.
// Of layer norm x' is (x - mean(x)) r, mean(g w) goes off inside the brackets, and db is the sum over rows of g.
// Arithmetic is fp32, results are rounded once. Sums of a row run over lanes, those of dw and db over kRows rows, then over the rows of a part, then in
// fp64 over parts, which the shape alone decides: any number of threads gives the same bits.

#include <algorithm>

#include "batch.h"

constexpr int64_t kLanes = 64;
constexpr int64_t kRows = 64;

template <class Term> inline float sum_of(int64_t size, const Term& term) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int64_t k = 0; k < kLanes; k++) lanes[k] += term(i + k);
  for (; i < size; i++) lanes[i % kLanes] += term(i);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t k = 0; k < half; k++) lanes[k] += lanes[k + half];
  return lanes[0];
}

struct Rows {
  const void *x, *grad;
  const float *weight, *mean;
  void *out, *grad_x;
  float* rstd;
  int64_t size;
  float eps;
};

// Rows of a part: whole sums of kRows, and about as many elements as a thread takes at a time.
std::vector<Part> parts_of_rows(int64_t rows, int64_t size) {
  const int64_t count = std::max<int64_t>(1, kPart / size / kRows) * kRows;
  std::vector<Part> parts;
  for (int64_t at = 0; at < rows; at += count) parts.push_back({0, at, std::min(count, rows - at) * size});
  return parts;
}

template <int X, int Y> void forward(const Rows& r, int64_t row) {
  const char* x = static_cast<const char*>(r.x) + row * r.size * width(X);
  auto* out = static_cast<uint16_t*>(r.out) + row * r.size;
  const float* weight = r.weight;
  const float squares = sum_of(r.size, [=](int64_t i) { return load<X>(x, i) * load<X>(x, i); });
  const float rstd = r.rstd[row] = 1.0f / std::sqrt(squares / float(r.size) + r.eps);
  for (int64_t i = 0; i < r.size; i++) out[i] = narrow<Y>(load<X>(x, i) * rstd * weight[i]);
}

template <int X, int Y, bool CENTRED> void backward(const Rows& r, int64_t row, float* sums) {
  const char* x = static_cast<const char*>(r.x) + row * r.size * width(X);
  const auto* grad = static_cast<const uint16_t*>(r.grad) + row * r.size;
  char* grad_x = static_cast<char*>(r.grad_x) + row * r.size * width(X);
  const float *weight = r.weight, rstd = r.rstd[row], mean = CENTRED ? r.mean[row] : 0.0f;
  const auto x_hat = [=](int64_t i) { return (CENTRED ? load<X>(x, i) - mean : load<X>(x, i)) * rstd; };
  const auto weighted = [=](int64_t i) { return load<Y>(grad, i) * weight[i]; };
  const float along = sum_of(r.size, [=](int64_t i) { return weighted(i) * x_hat(i); }) / float(r.size);
  const float across = CENTRED ? sum_of(r.size, weighted) / float(r.size) : 0.0f;
  for (int64_t i = 0; i < r.size; i++) {
    const float dx = rstd * ((CENTRED ? weighted(i) - across : weighted(i)) - x_hat(i) * along);
    if constexpr (X == kFp32) reinterpret_cast<float*>(grad_x)[i] = dx;
    else reinterpret_cast<uint16_t*>(grad_x)[i] = narrow<X>(dx);
  }
  for (int64_t i = 0; i < r.size; i++) sums[i] += load<Y>(grad, i) * x_hat(i);
  if constexpr (CENTRED)
    for (int64_t i = 0; i < r.size; i++) sums[r.size + i] += load<Y>(grad, i);
}

template <int X, int Y, bool CENTRED> void backward(const Rows& r, const Part& part, float* total) {
  std::vector<float> sums((1 + CENTRED) * r.size);
  const int64_t end = part.start + part.size / r.size;
  for (int64_t first = part.start; first < end; first += kRows) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t row = first; row < std::min(first + kRows, end); row++) backward<X, Y, CENTRED>(r, row, sums.data());
    for (size_t i = 0; i < sums.size(); i++) total[i] += sums[i];
  }
}

template <int X, int Y> void take(const Rows& r, int64_t rows, int32_t threads) {
  const auto parts = parts_of_rows(rows, r.size);
  for_each(parts, threads, [&](int64_t n) {
    for (int64_t row = parts[n].start; row < parts[n].start + parts[n].size / r.size; row++) forward<X, Y>(r, row);
  });
}

template <int X, int Y, bool CENTRED> void take_back(const Rows& r, int64_t rows, float* grads, int32_t threads) {
  const auto parts = parts_of_rows(rows, r.size);
  const int64_t count = (1 + CENTRED) * r.size;
  std::vector<float> totals(parts.size() * count);
  for_each(parts, threads, [&](int64_t n) { backward<X, Y, CENTRED>(r, parts[n], totals.data() + n * count); });
  for (int64_t i = 0; i < count; i++) {
    double sum = 0;
    for (size_t n = 0; n < parts.size(); n++) sum += totals[n * count + i];
    grads[i] = float(sum);
  }
}

template <int X, int Y> void take_back(const Rows& r, int64_t rows, float* grads, int32_t threads) {
  (r.mean ? take_back<X, Y, true> : take_back<X, Y, false>)(r, rows, grads, threads);
}

// x: [rows][size], of `x_format`; weight: [size]; out: of x's 16-bit format, or `format` where x is fp32; rstd: [rows].
extern "C" void mezzo_rms_norm(const void* x, const float* weight, void* out, float* rstd, int64_t rows, int64_t size, float eps, int32_t x_format, int32_t format, int32_t threads) {
  const Rows r{x, nullptr, weight, nullptr, out, nullptr, rstd, size, eps};
  const bool is_wide = x_format == kFp32;
  const auto run = format == kBf16 ? (is_wide ? take<kFp32, kBf16> : take<kBf16, kBf16>) : (is_wide ? take<kFp32, kFp16> : take<kFp16, kFp16>);
  run(r, rows, threads);
}

// grad: as `out`; mean: [rows], null for an RMS norm; grad_x: as x; grads: of weight [size], of layer norm then those of bias.
extern "C" void mezzo_norm_backward(const void* grad, const void* x, const float* weight, float* rstd, void* grad_x, float* grads, const float* mean, int64_t rows, int64_t size, int32_t x_format, int32_t format, int32_t threads) {
  const Rows r{x, grad, weight, mean, nullptr, grad_x, rstd, size, 0.0f};
  const bool is_wide = x_format == kFp32;
  const auto run = format == kBf16 ? (is_wide ? take_back<kFp32, kBf16> : take_back<kBf16, kBf16>) : (is_wide ? take_back<kFp32, kFp16> : take_back<kFp16, kFp16>);
  run(r, rows, grads, threads);
}
