// RMS norm of rows, and its gradients:
//   y = x r w,  r = 1 / sqrt(mean(x x) + eps),
//   dx = r (g w - x r mean(g w x r)),  dw = the sum over rows of g x r.
// Arithmetic is fp32, results are rounded once. Sums of a row run over lanes, those of dw over kRows rows, then over the rows of a part, then in
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
  const float* weight;
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

template <int X, int Y> void backward(const Rows& r, int64_t row, float* sums) {
  const char* x = static_cast<const char*>(r.x) + row * r.size * width(X);
  const auto* grad = static_cast<const uint16_t*>(r.grad) + row * r.size;
  char* grad_x = static_cast<char*>(r.grad_x) + row * r.size * width(X);
  const float *weight = r.weight, rstd = r.rstd[row];
  const float mean = sum_of(r.size, [=](int64_t i) { return load<Y>(grad, i) * weight[i] * (load<X>(x, i) * rstd); }) / float(r.size);
  for (int64_t i = 0; i < r.size; i++) {
    const float dx = rstd * (load<Y>(grad, i) * weight[i] - load<X>(x, i) * rstd * mean);
    if constexpr (X == kFp32) reinterpret_cast<float*>(grad_x)[i] = dx;
    else reinterpret_cast<uint16_t*>(grad_x)[i] = narrow<X>(dx);
  }
  for (int64_t i = 0; i < r.size; i++) sums[i] += load<Y>(grad, i) * (load<X>(x, i) * rstd);
}

template <int X, int Y> void backward(const Rows& r, const Part& part, float* total) {
  std::vector<float> sums(r.size);
  const int64_t end = part.start + part.size / r.size;
  for (int64_t first = part.start; first < end; first += kRows) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t row = first; row < std::min(first + kRows, end); row++) backward<X, Y>(r, row, sums.data());
    for (int64_t i = 0; i < r.size; i++) total[i] += sums[i];
  }
}

template <int X, int Y> void take(const Rows& r, int64_t rows, int32_t threads) {
  const auto parts = parts_of_rows(rows, r.size);
  for_each(parts, threads, [&](int64_t n) {
    for (int64_t row = parts[n].start; row < parts[n].start + parts[n].size / r.size; row++) forward<X, Y>(r, row);
  });
}

template <int X, int Y> void take_back(const Rows& r, int64_t rows, float* grad_weight, int32_t threads) {
  const auto parts = parts_of_rows(rows, r.size);
  std::vector<float> totals(parts.size() * r.size);
  for_each(parts, threads, [&](int64_t n) { backward<X, Y>(r, parts[n], totals.data() + n * r.size); });
  for (int64_t i = 0; i < r.size; i++) {
    double sum = 0;
    for (size_t n = 0; n < parts.size(); n++) sum += totals[n * r.size + i];
    grad_weight[i] = float(sum);
  }
}

// x: [rows][size], of `x_format`; weight: [size]; out: of x's 16-bit format, or `format` where x is fp32; rstd: [rows].
extern "C" void mezzo_rms_norm(const void* x, const float* weight, void* out, float* rstd, int64_t rows, int64_t size, float eps, int32_t x_format, int32_t format, int32_t threads) {
  const Rows r{x, nullptr, weight, out, nullptr, rstd, size, eps};
  const bool is_wide = x_format == kFp32;
  const auto run = format == kBf16 ? (is_wide ? take<kFp32, kBf16> : take<kBf16, kBf16>) : (is_wide ? take<kFp32, kFp16> : take<kFp16, kFp16>);
  run(r, rows, threads);
}

// grad: as `out`; grad_x: as x; grad_weight: [size].
extern "C" void mezzo_rms_norm_backward(const void* grad, const void* x, const float* weight, float* rstd, void* grad_x, float* grad_weight, int64_t rows, int64_t size, int32_t x_format, int32_t format, int32_t threads) {
  const Rows r{x, grad, weight, nullptr, grad_x, rstd, size, 0.0f};
  const bool is_wide = x_format == kFp32;
  const auto run = format == kBf16 ? (is_wide ? take_back<kFp32, kBf16> : take_back<kBf16, kBf16>) : (is_wide ? take_back<kFp32, kFp16> : take_back<kFp16, kFp16>);
  run(r, rows, grad_weight, threads);
}
