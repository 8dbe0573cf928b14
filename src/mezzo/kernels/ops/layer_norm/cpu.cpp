// RMS norm of rows, and its gradients and those of layer norm:
//   y = x' w,  x' = x r,  r = 1 / sqrt(mean(x x) + eps),
//   dx = r (g w - x' mean(g w x')),  dw = the sum over rows of g x'.
// Of layer norm x' is (x - mean(x)) r, mean(g w) goes off inside the brackets, and db is the sum over rows of g.
// Arithmetic is fp32, results are rounded once. Sums of a row run over 16 lanes, those of dw and db over kRows rows, then over the rows of a part, then in
// fp64 over parts, which the shape alone decides: any number of threads gives the same bits.

#include <algorithm>

#include "batch.h"
#include "lanes.h"

constexpr int64_t kRows = 64;
constexpr int kTogether = 4;  // rows whose sums are taken at a time, so that those of dw and db are read and written once for all

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
  Floats squares = {};
  by_lanes(r.size, [&](int64_t i, int64_t count) {
    const Floats one = load_lanes<X>(x, i, count);
    squares = fused(one, one, squares);
  });
  const float rstd = r.rstd[row] = 1.0f / std::sqrt(sum_of(squares) / float(r.size) + r.eps);
  by_lanes(r.size, [&](int64_t i, int64_t count) {
    store_lanes<Y>(out, i, count, load_lanes<X>(x, i, count) * rstd * load_lanes<kFp32>(r.weight, i, count));
  });
}

// What backward reads of a row.
template <int X, int Y, bool CENTRED> struct Kept {
  const void *x, *grad;
  float rstd, mean;

  Kept() = default;
  Kept(const Rows& r, int64_t row)
      : x(static_cast<const char*>(r.x) + row * r.size * width(X)),
        grad(static_cast<const uint16_t*>(r.grad) + row * r.size),
        rstd(r.rstd[row]), mean(CENTRED ? r.mean[row] : 0.0f) {}

  Floats g(int64_t i, int64_t count) const { return load_lanes<Y>(grad, i, count); }
  Floats centred(int64_t i, int64_t count) const {
    const Floats one = load_lanes<X>(x, i, count);
    return CENTRED ? one - mean : one;
  }
};

// Adds N rows' parts of dw and db to `sums`, and writes their dx.
template <int X, int Y, bool CENTRED, int N> void backward(const Rows& r, int64_t row, float* sums) {
  Kept<X, Y, CENTRED> kept[N];
  Floats along[N] = {}, across[N] = {};
  for (int n = 0; n < N; n++) kept[n] = {r, row + n};
  by_lanes(r.size, [&](int64_t i, int64_t count) {
    const Floats weight = load_lanes<kFp32>(r.weight, i, count);
    Floats dw = load_lanes<kFp32>(sums, i, count), db = {};
    if (CENTRED) db = load_lanes<kFp32>(sums + r.size, i, count);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const Floats g = kept[n].g(i, count), x_hat = kept[n].centred(i, count) * kept[n].rstd, weighted = g * weight;
      along[n] = fused(weighted, x_hat, along[n]);
      dw = fused(g, x_hat, dw);
      if (CENTRED) across[n] += weighted, db += g;
    }
    store_lanes<kFp32>(sums, i, count, dw);
    if (CENTRED) store_lanes<kFp32>(sums + r.size, i, count, db);
  });
  for (int n = 0; n < N; n++) {
    const float rstd = kept[n].rstd, of_x = -rstd * rstd * (sum_of(along[n]) / float(r.size)), rest = -rstd * (sum_of(across[n]) / float(r.size));
    char* grad_x = static_cast<char*>(r.grad_x) + (row + n) * r.size * width(X);
    by_lanes(r.size, [&](int64_t i, int64_t count) {
      const Floats weighted = kept[n].g(i, count) * load_lanes<kFp32>(r.weight, i, count);
      store_lanes<X>(grad_x, i, count, fused(weighted, Floats{} + rstd, fused(kept[n].centred(i, count), Floats{} + of_x, Floats{} + rest)));
    });
  }
}

template <int X, int Y, bool CENTRED> void backward(const Rows& r, const Part& part, float* total) {
  std::vector<float> sums((1 + CENTRED) * r.size);
  const int64_t end = part.start + part.size / r.size;
  for (int64_t first = part.start; first < end; first += kRows) {
    const int64_t last = std::min(first + kRows, end);
    std::fill(sums.begin(), sums.end(), 0.0f);
    int64_t row = first;
    for (; row + kTogether <= last; row += kTogether) backward<X, Y, CENTRED, kTogether>(r, row, sums.data());
    for (; row < last; row++) backward<X, Y, CENTRED, 1>(r, row, sums.data());
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
extern "C" void mezzo_layer_norm_rms_forward(const void* x, const float* weight, void* out, float* rstd, int64_t rows, int64_t size, float eps, int32_t x_format, int32_t format, int32_t threads) {
  const Rows r{x, nullptr, weight, nullptr, out, nullptr, rstd, size, eps};
  const bool is_wide = x_format == kFp32;
  const auto run = format == kBf16 ? (is_wide ? take<kFp32, kBf16> : take<kBf16, kBf16>) : (is_wide ? take<kFp32, kFp16> : take<kFp16, kFp16>);
  run(r, rows, threads);
}

// grad: as `out`; mean: [rows], null for an RMS norm; grad_x: as x; grads: of weight [size], of layer norm then those of bias.
extern "C" void mezzo_layer_norm_backward(const void* grad, const void* x, const float* weight, float* rstd, void* grad_x, float* grads, const float* mean, int64_t rows, int64_t size, int32_t x_format, int32_t format, int32_t threads) {
  const Rows r{x, grad, weight, mean, nullptr, grad_x, rstd, size, 0.0f};
  const bool is_wide = x_format == kFp32;
  const auto run = format == kBf16 ? (is_wide ? take_back<kFp32, kBf16> : take_back<kBf16, kBf16>) : (is_wide ? take_back<kFp32, kFp16> : take_back<kFp16, kFp16>);
  run(r, rows, grads, threads);
}
