// Linear layers in bf16: y = x w' + b, and their gradients dx = g w, dw = g' x and db, the sum of g's rows. One operand of each product is
// laid out in panels of 32 columns of the result, in pairs along the sum, as the instruction takes them (AVX512-BF16), and cast on the way; of
// the other, pairs of 8 rows are broadcast. Sums are fp32, in one order for any number of threads, rounded once, or not at all where a
// gradient is fp32. A thread reads and writes the same rows of w and dw in all of them, those that it updates too where an optimizer shares
// them out in order: rows that two processors write in turn go back and forth between their caches.

#include <algorithm>
#include <memory>
#include <new>

#include "formats.h"
#include "pairs.h"

#if defined(MEZZO_PAIRS)
constexpr int64_t kPanel = 32;     // columns of sums: two registers
constexpr int64_t kRows = 8;       // rows of sums at once: 16 registers
constexpr int64_t kChunk = 128;    // pairs of rows of both operands of dw that stay in the nearest cache
constexpr int64_t kBlock = 64;     // rows that a thread multiplies with one panel after the other
constexpr int64_t kPanels = 8;     // that it does so with, if they take no more than
constexpr int64_t kNear = 131072;  // elements

// [rows][columns], side by side, fp32 or bf16.
struct Matrix {
  const void* data;
  int32_t format;
  int64_t rows, columns;
};

inline int64_t panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }
inline int64_t pairs(int64_t count) { return (count + 1) / 2; }
inline int64_t panel_size(int64_t count) { return panels(count) * kPanel * kPanel; }  // elements for sums over `count`

// Memory that is as it comes, on a multiple of 64 bytes; null if there is none.
struct alignas(64) Line { uint16_t values[kPanel]; };
using Lines = std::unique_ptr<Line[]>;
inline Lines lines(int64_t elements) { return Lines(new (std::nothrow) Line[elements / kPanel + 1]); }
inline uint16_t* start(const Lines& lines) { return lines[0].values; }

// This thread's memory for panels, which it keeps.
uint16_t* scratch(int64_t elements) {
  static thread_local Lines own;
  static thread_local int64_t there = 0;
  if (there < elements) {
    own.reset();
    own.reset(new Line[elements / kPanel + 1]);
    there = elements;
  }
  return start(own);
}

// Up to 32 values as bf16, 0 for those beyond.
inline __m512i load_low(const uint16_t* p, __mmask32 there) { return _mm512_maskz_loadu_epi16(there, p); }
ON_PAIRS inline __m512i load_low(const float* p, __mmask32 there) {
  const __m512 low = _mm512_maskz_loadu_ps(__mmask16(there), p), high = _mm512_maskz_loadu_ps(__mmask16(there >> 16), p + 16);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// 32 rows from `first` on to [pairs of columns][32][2].
template <class T> ON_PAIRS void pack_rows(uint16_t* to, const T* from, const Matrix& m, int64_t first) {
  for (int64_t column = 0; column < m.columns; column += kPanel) {
    const __mmask32 there = first_words(m.columns - column);
    for (int64_t half = 0; half < kPanel; half += 16) {
      __m512i r[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++) {
        const int64_t row = first + half + i;
        r[i] = row < m.rows ? load_low(from + row * m.columns + column, there) : _mm512_setzero_si512();
      }
      transpose(r);
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++) _mm512_store_si512(to + (column / 2 + i) * 2 * kPanel + 2 * half, r[i]);
    }
  }
}

// The pairs of rows in [begin, end) of the columns [first, last) to panels [pairs of rows][32][2], `size` elements apart.
template <class T> ON_PAIRS void pack_columns(uint16_t* to, int64_t size, const T* from, const Matrix& m, int64_t first, int64_t last, int64_t begin, int64_t end) {
  const __m512i low = woven(32), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t pair = begin; pair < end; pair++) {
    uint16_t* at = to + pair * 2 * kPanel;
    for (int64_t column = first; column < last; column += kPanel, at += size) {
      const __mmask32 there = first_words(m.columns - column);
      const __m512i one = load_low(from + 2 * pair * m.columns + column, there);
      const __m512i other = load_low(from + (2 * pair + 1) * m.columns + column, 2 * pair + 1 < m.rows ? there : 0);
      _mm512_store_si512(at, _mm512_permutex2var_epi16(one, low, other));
      _mm512_store_si512(at + kPanel, _mm512_permutex2var_epi16(one, high, other));
    }
  }
}

void pack_rows(uint16_t* to, const Matrix& m, int64_t first) {
  if (m.format == kFp32)
    pack_rows(to, static_cast<const float*>(m.data), m, first);
  else
    pack_rows(to, static_cast<const uint16_t*>(m.data), m, first);
}

void pack_columns(uint16_t* to, int64_t size, const Matrix& m, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (m.format == kFp32)
    pack_columns(to, size, static_cast<const float*>(m.data), m, first, last, begin, end);
  else
    pack_columns(to, size, static_cast<const uint16_t*>(m.data), m, first, last, begin, end);
}

// All columns, to panels `size` apart. To be called by all threads, each of which reads a share of the rows.
void pack_all_columns(uint16_t* to, int64_t size, const Matrix& m, int32_t threads) {
#pragma omp for schedule(static)
  for (int64_t share = 0; share < threads; share++) pack_columns(to, size, m, 0, m.columns, pairs(m.rows) * share / threads, pairs(m.rows) * (share + 1) / threads);
}

// The operand of which pairs are broadcast: for the sums' rows, and for each step of the sum, so many elements apart.
struct Broadcast {
  const uint16_t* data;
  int64_t row, pair;
};

// sums [R][32] = or += the products of R rows with a panel.
template <int R> ON_PAIRS inline void add_products(float* sums, bool is_first, const Broadcast& a, const uint16_t* panel, int64_t pairs) {
  __m512 sum[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) sum[r][n] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kPanel + 16 * n);
  const uint16_t* from = a.data;
  for (int64_t p = 0; p < pairs; p++, from += a.pair, panel += 2 * kPanel) {
    const __m512bh left = (__m512bh)_mm512_load_si512(panel), right = (__m512bh)_mm512_load_si512(panel + kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, from + r * a.row, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, left);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, right);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) _mm512_store_ps(sums + r * kPanel + 16 * n, sum[r][n]);
}

// As add_products, for any number of rows.
ON_PAIRS void add_rows(float* sums, bool is_first, Broadcast a, const uint16_t* panel, int64_t pairs, int64_t rows) {
  auto next = [&](int64_t done) { rows -= done, sums += done * kPanel, a.data += done * a.row; };
  for (; rows >= 8; next(8)) add_products<8>(sums, is_first, a, panel, pairs);
  if (rows >= 4) add_products<4>(sums, is_first, a, panel, pairs), next(4);
  if (rows >= 2) add_products<2>(sums, is_first, a, panel, pairs), next(2);
  if (rows >= 1) add_products<1>(sums, is_first, a, panel, pairs);
}

constexpr float kNothing alignas(64)[kPanel] = {};

// Writes sums [rows][32], and a bias, as rows that are `row` elements apart, of up to 32 columns.
ON_PAIRS void write(void* to, int32_t format, int64_t at, int64_t row, const float* sums, const float* bias, int64_t rows, int64_t columns) {
  const __mmask32 there = first_words(columns);
  for (int64_t r = 0; r < rows; r++, at += row, sums += kPanel) {
    const __m512 low = _mm512_add_ps(_mm512_load_ps(sums), _mm512_load_ps(bias)), high = _mm512_add_ps(_mm512_load_ps(sums + 16), _mm512_load_ps(bias + 16));
    if (format == kFp32) {
      _mm512_mask_storeu_ps(static_cast<float*>(to) + at, __mmask16(there), low);
      _mm512_mask_storeu_ps(static_cast<float*>(to) + at + 16, __mmask16(there >> 16), high);
    } else {
      _mm512_mask_storeu_epi16(static_cast<uint16_t*>(to) + at, there, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

// Into how many parts the work on a panel is cut, so that all threads have some.
inline int64_t parts(int64_t panels, int64_t pieces, int32_t threads) {
  return std::max<int64_t>(1, std::min((threads + panels - 1) / panels, pieces));
}

// Rows of x [rows][inner] times w, to y [rows][width], in bf16.
struct Product {
  uint16_t* y;
  const uint16_t* x;
  const Matrix& w;
  const uint16_t* packed;  // panels of w's columns, if it is to be summed over its rows; null: over its columns
  const void* bias;
  int32_t bias_format;
  int64_t rows, inner, width;

  int64_t panels_at_once(int32_t threads) const {
    return std::max<int64_t>(1, std::min({kPanels, kNear / panel_size(inner), (panels(width) + threads - 1) / threads}));
  }
};

// The bias of a panel as autocast casts it.
void read_bias(float* to, const Product& p, int64_t first) {
  for (int64_t i = 0; i < kPanel; i++) {
    const bool is_there = p.bias && first + i < p.width;
    const float value = !is_there ? 0 : p.bias_format == kFp32 ? load<kFp32>(p.bias, first + i) : load<kBf16>(p.bias, first + i);
    to[i] = widen_bf16(narrow_bf16(value));
  }
}

void multiply(const Product& p, int64_t begin_panel, int64_t end_panel, int64_t begin, int64_t end) {
  const int64_t size = panel_size(p.inner);
  uint16_t* own = p.packed ? nullptr : scratch((end_panel - begin_panel) * size);
  const uint16_t* packed = p.packed ? p.packed + begin_panel * size : own;
  alignas(64) float bias[kPanels * kPanel], sums[kBlock * kPanel];
  for (int64_t n = begin_panel; n < end_panel; n++) {
    if (own) pack_rows(own + (n - begin_panel) * size, p.w, n * kPanel);
    read_bias(bias + (n - begin_panel) * kPanel, p, n * kPanel);
  }
  for (int64_t row = begin; row < end; row += kBlock)
    for (int64_t n = begin_panel; n < end_panel; n++) {
      const int64_t rows = std::min(kBlock, end - row), i = n - begin_panel;
      add_rows(sums, true, {p.x + row * p.inner, p.inner, 2}, packed + i * size, pairs(p.inner), rows);
      write(p.y, kBf16, row * p.width + n * kPanel, p.width, sums, bias + i * kPanel, rows, p.width - n * kPanel);
    }
}

// The threads' shares of a product: panels, and rows where there are more threads than panels. To be called by all of them.
void multiply_all(const Product& p, int32_t threads) {
  const int64_t at_once = p.panels_at_once(threads), all = panels(p.width), groups = (all + at_once - 1) / at_once;
  const int64_t shares = parts(groups, p.rows / kBlock, threads);
#pragma omp for schedule(static)
  for (int64_t task = 0; task < groups * shares; task++) {
    const int64_t group = task / shares, share = task % shares;
    multiply(p, group * at_once, std::min(all, (group + 1) * at_once), p.rows * share / shares, p.rows * (share + 1) / shares);
  }
}

// The gradient of w [width][inner]: sums over pairs of rows.
struct Gradient {
  void* to;
  int32_t format;
  int64_t pairs, inner, width;
};

// Calls for the memory of 32 rows by 32 columns before their sums are computed, which takes longer than to fetch it.
inline void call_for(const Gradient& g, int64_t first, int64_t column) {
  const int64_t bytes = g.format == kFp32 ? 4 : 2;
  for (int64_t row = first; row < std::min(g.width, first + kPanel); row++)
    for (int64_t byte = 0; byte < kPanel * bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(g.to) + (row * g.inner + column) * bytes + byte, 1);
}

// 32 rows from `first` on, which a packed panel of grad gives with the panels [begin, end) of x.
void differentiate(const Gradient& g, int64_t first, const uint16_t* grad, const uint16_t* x, int64_t begin, int64_t end) {
  alignas(64) float sums[kPanel * kPanel];
  for (int64_t panel = begin; panel < end; panel++) {
    const uint16_t* with = x + panel * g.pairs * 2 * kPanel;
    const int64_t column = panel * kPanel;
    call_for(g, first, column);
    for (int64_t p = 0; p < g.pairs; p += kChunk)
      add_rows(sums, p == 0, {grad + p * 2 * kPanel, 2, 2 * kPanel}, with + p * 2 * kPanel, std::min(kChunk, g.pairs - p), kPanel);
    write(g.to, g.format, first * g.inner + column, g.inner, sums, kNothing, std::min(kPanel, g.width - first), g.inner - column);
  }
}

// Sums of the columns of a packed panel.
ON_PAIRS void add_up(void* to, int32_t format, int64_t first, int64_t columns, const uint16_t* panel, int64_t pairs) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 low = _mm512_setzero_ps(), high = low;
  for (int64_t p = 0; p < pairs; p++, panel += 2 * kPanel) {
    low = _mm512_dpbf16_ps(low, (__m512bh)_mm512_load_si512(panel), ones);
    high = _mm512_dpbf16_ps(high, (__m512bh)_mm512_load_si512(panel + kPanel), ones);
  }
  alignas(64) float sums[kPanel];
  _mm512_store_ps(sums, low);
  _mm512_store_ps(sums + 16, high);
  write(to, format, first, 0, sums, kNothing, 1, columns - first);
}

// y [rows][width], bf16. x [rows][inner], bf16; weight [width][inner]; bias [width] or null. Inner is even.
extern "C" void mezzo_linear_forward(
    uint16_t* y, const uint16_t* x, const void* weight, const void* bias, int32_t weight_format, int32_t bias_format,
    int64_t rows, int64_t inner, int64_t width, int32_t threads) {
  const Matrix w{weight, weight_format, width, inner};
#pragma omp parallel num_threads(threads)
  multiply_all({y, x, w, nullptr, bias, bias_format, rows, inner, width}, threads);
}

// dx [rows][inner], bf16, or null; dw as weight and db [width], or null, in the formats given. grad [rows][width], bf16, of which the
// width is even. Returns whether there was memory for it.
extern "C" int32_t mezzo_linear_backward(
    uint16_t* dx, void* dw, void* db, const uint16_t* grad, const uint16_t* x, const void* weight, int32_t weight_format, int32_t bias_format,
    int64_t rows, int64_t inner, int64_t width, int32_t threads) {
  const Matrix g{grad, kBf16, rows, width}, input{x, kBf16, rows, inner}, w{weight, weight_format, width, inner};
  const Gradient to{dw, weight_format, pairs(rows), inner, width};
  const int64_t size = to.pairs * 2 * kPanel, of_weight = panel_size(width), shares = parts(panels(width), panels(inner), threads);
  const Lines memory = lines(panels(inner) * (size + (dx ? of_weight : 0)));
  if (!memory) return false;
  uint16_t *columns = start(memory), *packed = columns + panels(inner) * size;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < panels(inner); n++) pack_columns(columns + n * size, 0, input, n * kPanel, (n + 1) * kPanel, 0, to.pairs);
    if (dx) {
      pack_all_columns(packed, of_weight, w, threads);
      multiply_all({dx, grad, w, packed, nullptr, kFp32, rows, width, inner}, threads);
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels(width) * shares; task++) {
      const int64_t first = task / shares * kPanel, share = task % shares;
      uint16_t* panel = scratch(size);
      pack_columns(panel, 0, g, first, first + kPanel, 0, to.pairs);
      if (db && share == 0) add_up(db, bias_format, first, width, panel, to.pairs);
      differentiate(to, first, panel, columns, panels(inner) * share / shares, panels(inner) * (share + 1) / shares);
    }
  }
  return true;
}
#endif

// Whether it is the faster one here: in pairs, where the processor has no tiles, on which torch's runs.
extern "C" int32_t mezzo_linear_is_faster() { return has_pairs() && !has_tiles(); }
