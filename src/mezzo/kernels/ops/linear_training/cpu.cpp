// Linear layers in bf16: y = x w' + b, and their gradients dx = g w, dw = g' x and db, the sum of g's rows. One operand of each product is
// laid out in panels of 32 columns of the result, in pairs along the sum, as the instruction takes them (AVX512-BF16), and cast on the way; of
// the other, pairs of 8 rows are broadcast. Where the processor has none, a pair is two products in fp32. Where rows are few, w is not worth it, and is read as it lies. Sums are fp32, in one order for any
// number of threads, rounded once, or not at all where a gradient is fp32. A thread reads and writes the same rows of w and dw in all of them, those that it updates too where an optimizer shares
// them out in order: rows that two processors write in turn go back and forth between their caches.

#if !defined(MEZZO_ARITHMETIC)
#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>

#include "formats.h"
#include "pairs.h"

#if defined(MEZZO_PAIRS)
// What follows is compiled twice: in the processor's products of pairs, and in fp32 where it has none.
#define MEZZO_ARITHMETIC ON_PAIRS
namespace in_pairs {
MEZZO_ARITHMETIC inline __m512 add_pairs(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
MEZZO_ARITHMETIC inline __m512i narrow_both(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
#include "cpu.cpp"
}  // namespace in_pairs
#undef MEZZO_ARITHMETIC
#define MEZZO_ARITHMETIC
namespace in_fp32 {
inline __m512 first_of(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
inline __m512 second_of(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000))); }
inline __m512 add_pairs(__m512 sum, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(second_of(a), second_of(b), _mm512_fmadd_ps(first_of(a), first_of(b), sum));
}
// Rounded as narrow_bf16 does, to the upper half.
inline __m512i rounded(__m512 x) {
  const __m512i bits = (__m512i)x, last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
inline __m512i narrow_both(__m512 high, __m512 low) {
  const __m512i first = _mm512_add_epi32(_mm512_slli_epi32(lanes(), 2), _mm512_set1_epi32(1));
  const __m512i upper = _mm512_or_si512(first, _mm512_slli_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(2)), 16));
  return _mm512_permutex2var_epi16(rounded(low), upper, rounded(high));
}
#include "cpu.cpp"
}  // namespace in_fp32

extern "C" void mezzo_linear_training_forward(
    uint16_t* y, const uint16_t* x, const void* weight, const void* bias, int32_t weight_format, int32_t bias_format,
    int64_t rows, int64_t inner, int64_t width, int32_t threads) {
  (has_pairs() ? in_pairs::forward : in_fp32::forward)(y, x, weight, bias, weight_format, bias_format, rows, inner, width, threads);
}

extern "C" int32_t mezzo_linear_training_backward(
    uint16_t* dx, void* dw, void* db, const uint16_t* grad, const uint16_t* x, const void* weight, int32_t weight_format, int32_t bias_format,
    int64_t rows, int64_t inner, int64_t width, int32_t threads) {
  return (has_pairs() ? in_pairs::backward : in_fp32::backward)(dx, dw, db, grad, x, weight, weight_format, bias_format, rows, inner, width, threads);
}

// Whether it is the faster one here: the processor has no tiles, on which torch's runs, and pairs where there are many rows.
extern "C" int32_t mezzo_linear_training_is_faster(int32_t has_many_rows) { return !has_tiles() && (!has_many_rows || has_pairs()); }
#else
extern "C" int32_t mezzo_linear_training_is_faster(int32_t) { return 0; }
#endif
#else
constexpr int64_t kPanel = 32;     // columns of sums: two registers
constexpr int64_t kBlock = 64;     // rows that a thread multiplies with one panel after the other
constexpr int64_t kPanels = 8;     // that it does so with, if they take no more than
constexpr int64_t kNear = 131072;  // elements
constexpr int64_t kPiece = 512;    // of a sum, for which w is laid out while what comes next is on its way
constexpr int64_t kStep = 4;       // pairs of products between calls for it
constexpr int64_t kLong = 32;      // pairs, while which are summed up a line of memory comes
constexpr int64_t kFew = 32;       // rows up to which w is read as it lies for dx
constexpr int64_t kSide = 64;      // rows of w that are read side by side for their sum
constexpr int64_t kAhead = 128;    // elements of them that are called for before they are read

// [rows][columns], side by side, fp32 or bf16.
struct Matrix {
  const void* data;
  int32_t format;
  int64_t rows, columns;

  // Calls `take` with the data, as what they are.
  template <class Take> void typed(const Take& take) const {
    format == kFp32 ? take(static_cast<const float*>(data)) : take(static_cast<const uint16_t*>(data));
  }
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
MEZZO_ARITHMETIC inline __m512i load_low(const float* p, __mmask32 there) {
  const __m512 low = _mm512_maskz_loadu_ps(__mmask16(there), p), high = _mm512_maskz_loadu_ps(__mmask16(there >> 16), p + 16);
  return narrow_both(high, low);
}

// The columns [begin, end) of 32 rows from `first` on to [pairs of columns][32][2].
template <class T> MEZZO_ARITHMETIC void pack_rows(uint16_t* to, const T* from, const Matrix& m, int64_t first, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += kPanel, to += kPanel * kPanel) {
    const __mmask32 there = first_words(end - column);
    for (int64_t half = 0; half < kPanel; half += 16) {
      __m512i r[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++) {
        const int64_t row = first + half + i;
        r[i] = row < m.rows ? load_low(from + row * m.columns + column, there) : _mm512_setzero_si512();
      }
      transpose(r);
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++) _mm512_store_si512(to + i * 2 * kPanel + 2 * half, r[i]);
    }
  }
}

// The pairs of rows in [begin, end) of the columns [first, last) to panels [pairs of rows][32][2], `size` elements apart.
template <class T> MEZZO_ARITHMETIC void pack_columns(uint16_t* to, int64_t size, const T* from, const Matrix& m, int64_t first, int64_t last, int64_t begin, int64_t end) {
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

// All columns, to panels `size` apart. To be called by all threads, each of which reads a share of the rows.
void pack_all_columns(uint16_t* to, int64_t size, const Matrix& m, int32_t threads) {
#pragma omp for schedule(static)
  for (int64_t share = 0; share < threads; share++)
    m.typed([&](auto* from) { pack_columns(to, size, from, m, 0, m.columns, pairs(m.rows) * share / threads, pairs(m.rows) * (share + 1) / threads); });
}

// Calls `take` with numbers of rows for which there is code, and those before them.
template <class Take> inline void by_rows(int64_t rows, const Take& take) {
  int64_t done = 0;
  for (; rows - done >= 8; done += 8) take(std::integral_constant<int, 8>(), done);
  if (rows - done >= 4) take(std::integral_constant<int, 4>(), done), done += 4;
  if (rows - done >= 2) take(std::integral_constant<int, 2>(), done), done += 2;
  if (rows - done >= 1) take(std::integral_constant<int, 1>(), done);
}

// The operand of which pairs are broadcast: for the sums' rows, and for each step of the sum, so many elements apart.
struct Broadcast {
  const uint16_t* data;
  int64_t row, pair;
};

// Where up to 32 columns of a result are written, in rows so many elements apart, after a bias of 32 was added.
struct Result {
  void* data;
  int32_t format;
  int64_t at, row;
  const float* bias;
  int64_t columns;

  // Calls for R rows, to be written: a sum is taken in less time than a line takes to come.
  template <int R> inline void call_for() const {
    const int64_t size = format == kFp32 ? 4 : 2;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const char* p = static_cast<const char*>(data) + (at + r * row) * size;
      __builtin_prefetch(p, 1, 3), __builtin_prefetch(p + 64, 1, 3);
    }
  }
};

// A block whose sums are added to in the arithmetic that this is compiled for, and written rounded.
template <int R> struct Sums : Block<R> {
  using Block<R>::sum;

  MEZZO_ARITHMETIC inline __attribute__((always_inline)) void add(const uint16_t* a, int64_t row, __m512i left, __m512i right) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, a + r * row, 4);
      const __m512i both = _mm512_set1_epi32(pair);
      sum[r][0] = add_pairs(sum[r][0], both, left);
      sum[r][1] = add_pairs(sum[r][1], both, right);
    }
  }
  MEZZO_ARITHMETIC inline __attribute__((always_inline)) void write(const Result& to) const {
    const __mmask32 there = first_words(to.columns);
    const __m512 bias[2] = {_mm512_load_ps(to.bias), _mm512_load_ps(to.bias + 16)};
    int64_t at = to.at;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++, at += to.row) {
      const __m512 low = _mm512_add_ps(sum[r][0], bias[0]), high = _mm512_add_ps(sum[r][1], bias[1]);
      if (to.format == kFp32) {
        _mm512_mask_storeu_ps(static_cast<float*>(to.data) + at, __mmask16(there), low);
        _mm512_mask_storeu_ps(static_cast<float*>(to.data) + at + 16, __mmask16(there >> 16), high);
      } else {
        _mm512_mask_storeu_epi16(static_cast<uint16_t*>(to.data) + at, there, narrow_both(high, low));
      }
    }
  }
};

constexpr float kNothing alignas(64)[kPanel] = {};

// R rows of the products with a panel.
template <int R> MEZZO_ARITHMETIC void multiply_panel(const Result& to, const Broadcast& a, const uint16_t* panel, int64_t pairs) {
  Sums<R> sums;
  sums.clear();
  if (pairs >= kLong) to.template call_for<R>();
  const uint16_t* from = a.data;
  for (int64_t p = 0; p < pairs; p++, from += a.pair, panel += 2 * kPanel) sums.add(from, a.row, _mm512_load_si512(panel), _mm512_load_si512(panel + kPanel));
  sums.write(to);
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

  // Runs of panels that are multiplied together, as many for each thread, and of one length but for one panel.
  int64_t runs(int32_t threads) const {
    const int64_t most = std::max<int64_t>(1, std::min(kPanels, kNear / panel_size(inner)));
    return std::min(panels(width), (panels(width) + most * threads - 1) / (most * threads) * threads);
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

// What is laid out next, 32 rows of w: its lines of memory are called for, some with each step of the products before.
template <class T> struct Ahead {
  const T* from;
  int64_t row, lines_a_step, line = 0;

  inline void step() {
    for (int64_t i = 0; i < lines_a_step; i++, line++) __builtin_prefetch(from + line % kPanel * row + line / kPanel * (64 / sizeof(T)), 0, 2);
  }
};

// Adds the products of R rows with a piece of a panel to their sums [R][32], or begins them. The last piece's are written.
template <int R, class T> MEZZO_ARITHMETIC void add_piece(float* sums, bool is_first, const Result* to, const Broadcast& a, const uint16_t* panel, int64_t pairs, Ahead<T>& ahead) {
  Sums<R> own;
  if (is_first)
    own.clear();
  else
    own.load(sums, kPanel);
  if (to) to->template call_for<R>();
  const uint16_t* from = a.data;
  for (int64_t p = 0; p < pairs; p++, from += a.pair, panel += 2 * kPanel) {
    if (p % kStep == 0) ahead.step();
    own.add(from, a.row, _mm512_load_si512(panel), _mm512_load_si512(panel + kPanel));
  }
  if (to)
    own.write(*to);
  else
    own.store(sums, kPanel);
}

// Rows [begin, end) of a panel of the result, the sum in pieces of which each is laid out while the next is on its way.
template <class T> void multiply_pieces(const Product& p, const T* w, int64_t first, int64_t begin, int64_t end) {
  alignas(64) float bias[kPanel];
  uint16_t* panel = scratch(kPiece * kPanel + 2 * (end - begin) * kPanel);
  float* sums = reinterpret_cast<float*>(panel + kPiece * kPanel);
  read_bias(bias, p, first);
  for (int64_t k = 0; k < p.inner; k += kPiece) {
    const int64_t until = std::min(k + kPiece, p.inner), steps = (end - begin + 7) / 8 * ((until - k) / 2 / kStep + 1);
    const bool is_last = until == p.inner;
    pack_rows(panel, w, p.w, first, k, until);
    Ahead<T> ahead{is_last ? w + (first + kPanel) * p.inner : w + first * p.inner + until, p.inner, kPiece * kPanel * int64_t(sizeof(T)) / 64 / steps + 1};
    by_rows(end - begin, [&](auto count, int64_t done) {
      const int64_t row = begin + done;
      const Result to{p.y, kBf16, row * p.width + first, p.width, bias, p.width - first};
      add_piece<decltype(count)::value>(sums + done * kPanel, k == 0, is_last ? &to : nullptr, {p.x + row * p.inner + k, p.inner, 2}, panel, pairs(until - k), ahead);
    });
  }
}

void multiply(const Product& p, int64_t begin_panel, int64_t end_panel, int64_t begin, int64_t end) {
  const int64_t size = panel_size(p.inner);
  uint16_t* own = p.packed ? nullptr : scratch((end_panel - begin_panel) * size);
  const uint16_t* packed = p.packed ? p.packed + begin_panel * size : own;
  alignas(64) float bias[kPanels * kPanel];
  for (int64_t n = begin_panel; n < end_panel; n++) {
    if (own) p.w.typed([&](auto* from) { pack_rows(own + (n - begin_panel) * size, from, p.w, n * kPanel, 0, p.inner); });
    read_bias(bias + (n - begin_panel) * kPanel, p, n * kPanel);
  }
  for (int64_t block = begin; block < end; block += kBlock)
    for (int64_t n = begin_panel; n < end_panel; n++)
      by_rows(std::min(kBlock, end - block), [&](auto count, int64_t done) {
        const int64_t row = block + done, i = n - begin_panel, column = n * kPanel;
        const Result to{p.y, kBf16, row * p.width + column, p.width, bias + i * kPanel, p.width - column};
        multiply_panel<decltype(count)::value>(to, {p.x + row * p.inner, p.inner, 2}, packed + i * size, pairs(p.inner));
      });
}

// Whether rows of x stay near enough to be read again for each panel: then w is laid out in pieces.
inline bool is_near(int64_t rows, int64_t inner) { return rows <= 4 * kBlock || rows * inner <= 8 * kNear; }

// Whether w is read as it lies for y: rows are few, and more than 8 at once only where all of them stay in the nearest cache.
inline bool is_few(int64_t rows, int64_t inner) { return rows <= 8 || (rows <= 16 && rows * inner <= kNear / 8); }

// The threads' shares of a product: panels, and rows where there are more threads than panels. To be called by all of them; none waits.
void multiply_all(const Product& p, int32_t threads) {
  const int64_t all = panels(p.width), runs = p.runs(threads), shares = parts(runs, p.rows / kBlock, threads);
#pragma omp for schedule(static) nowait
  for (int64_t task = 0; task < runs * shares; task++) {
    const int64_t run = task / shares, share = task % shares, begin = p.rows * share / shares, end = p.rows * (share + 1) / shares;
    if (p.packed || !is_near(end - begin, p.inner))
      multiply(p, all * run / runs, all * (run + 1) / runs, begin, end);
    else
      for (int64_t n = all * run / runs; n < all * (run + 1) / runs; n++) p.w.typed([&](auto* w) { multiply_pieces(p, w, n * kPanel, begin, end); });
  }
}

// Calls for 32 values.
template <class T> inline void call_for(const T* p) {
  for (size_t i = 0; i < kPanel; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 0, 2);
}

// The products of R rows of x and N of w, to [R][32].
template <int R, int N, class T> MEZZO_ARITHMETIC void multiply_some(float* to, const uint16_t* x, const T* w, int64_t inner) {
  __m512 sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 3
    for (int n = 0; n < N; n++) sum[r][n] = _mm512_setzero_ps();
  for (int64_t i = 0; i < inner; i += kPanel) {
    const __mmask32 there = first_words(inner - i);
    __m512i of[N];
#pragma GCC unroll 3
    for (int n = 0; n < N; n++) of[n] = load_low(w + n * inner + i, there), call_for(w + (n + N) * inner + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512i with = _mm512_maskz_loadu_epi16(there, x + r * inner + i);
#pragma GCC unroll 3
      for (int n = 0; n < N; n++) sum[r][n] = add_pairs(sum[r][n], with, of[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 3
    for (int n = 0; n < N; n++) to[r * kPanel + n] = _mm512_reduce_add_ps(sum[r][n]);
}

// y of up to 32 rows of w.
template <class T> void multiply_rows(const Product& p, const T* w, int64_t first, int64_t columns) {
  alignas(64) float bias[kPanel], sums[kFew * kPanel];
  read_bias(bias, p, first);
  auto take = [&](auto some, int64_t n) {
    by_rows(p.rows, [&](auto count, int64_t r) {
      multiply_some<decltype(count)::value, decltype(some)::value>(sums + r * kPanel + n, p.x + r * p.inner, w + (first + n) * p.inner, p.inner);
    });
  };
  int64_t n = 0;
  for (; n + 3 <= columns; n += 3) take(std::integral_constant<int, 3>(), n);
  for (; n < columns; n++) take(std::integral_constant<int, 1>(), n);
  for (int64_t r = 0; r < p.rows; r++)
    for (n = 0; n < columns; n++) p.y[r * p.width + first + n] = narrow_bf16(sums[r * kPanel + n] + bias[n]);
}

// As multiply_all, for few rows: w is read once, as it lies.
void multiply_few(const Product& p, int32_t threads) {
  const int64_t step = kPanel / parts(panels(p.width), 8, threads);
#pragma omp for schedule(static) nowait
  for (int64_t first = 0; first < p.width; first += step) p.w.typed([&](auto* w) { multiply_rows(p, w, first, std::min(step, p.width - first)); });
}

// dx of few rows: w is read once, as it lies, in runs of rows whose sums are added up in order, whatever the number of threads.
struct FewRows {
  uint16_t* dx;
  float* sums;  // [runs][rows][columns]
  const uint16_t* grad;
  const Matrix& w;
  int64_t rows;

  static int64_t run(int64_t width) { return std::max<int64_t>(2 * kSide, panel_up(width, 16)); }
  static int64_t runs(int64_t width) { return (width + run(width) - 1) / run(width); }
  static int64_t panel_up(int64_t width, int64_t shares) { return (panels(width) + shares - 1) / shares * kPanel; }
  int64_t columns() const { return panels(w.columns) * kPanel; }
};

// sums = or += R rows of grad times rows of w, in pairs.
template <int R, class T> MEZZO_ARITHMETIC void add_side(float* to, int64_t row, bool is_first, const uint16_t* grad, int64_t width, const T* w, int64_t inner, int64_t pairs, __mmask32 there) {
  const __m512i low = woven(32), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  Sums<R> sums;
  if (is_first)
    sums.clear();
  else
    sums.load(to, row);
  for (int64_t p = 0; p < pairs; p++, grad += 2, w += 2 * inner) {
    const __m512i one = load_low(w, there), other = load_low(w + inner, there);
    call_for(w + kAhead), call_for(w + inner + kAhead);
    sums.add(grad, width, _mm512_permutex2var_epi16(one, low, other), _mm512_permutex2var_epi16(one, high, other));
  }
  sums.store(to, row);
}

// The panels [first, last) of the sums of a run.
template <class T> void add_run(const FewRows& f, const T* w, int64_t index, int64_t first, int64_t last) {
  const int64_t width = f.w.rows, inner = f.w.columns, row = f.columns(), begin = index * f.run(width), end = std::min(width, begin + f.run(width));
  float* sums = f.sums + index * f.rows * row;
  for (int64_t o = begin; o < end; o += kSide)
    for (int64_t i = first * kPanel; i < std::min(inner, last * kPanel); i += kPanel)
      by_rows(f.rows, [&](auto count, int64_t r) {
        add_side<decltype(count)::value>(sums + r * row + i, row, o == begin, f.grad + r * width + o, width, w + o * inner + i, inner, std::min(kSide, end - o) / 2, first_words(inner - i));
      });
}

// 32 columns of one row of dx.
MEZZO_ARITHMETIC void add_up_runs(const FewRows& f, int64_t r, int64_t column) {
  const int64_t inner = f.w.columns, row = f.columns();
  Sums<1> all, one;
  all.clear();
  for (int64_t n = 0; n < f.runs(f.w.rows); n++) {
    one.load(f.sums + (n * f.rows + r) * row + column, 0);
    for (int half = 0; half < 2; half++) all.sum[0][half] = _mm512_add_ps(all.sum[0][half], one.sum[0][half]);
  }
  all.write({f.dx, kBf16, r * inner + column, 0, kNothing, inner - column});
}

// To be called by all threads; none waits.
void multiply_back_few(const FewRows& f, int32_t threads) {
  const int64_t runs = f.runs(f.w.rows), across = panels(f.w.columns), shares = parts(runs, across, threads);
#pragma omp for schedule(static)
  for (int64_t task = 0; task < runs * shares; task++) {
    const int64_t share = task % shares;
    f.w.typed([&](auto* w) { add_run(f, w, task / shares, across * share / shares, across * (share + 1) / shares); });
  }
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < f.rows * across; i++) add_up_runs(f, i / across, i % across * kPanel);
}

// The gradient of w [width][inner]: sums over pairs of rows.
struct Gradient {
  void* to;
  int32_t format;
  int64_t pairs, inner, width;
};

// 32 rows from `first` on, which a packed panel of grad gives with the panels [begin, end) of x.
void differentiate(const Gradient& g, int64_t first, const uint16_t* grad, const uint16_t* x, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; panel++)
    by_rows(std::min(kPanel, g.width - first), [&](auto count, int64_t row) {
      const int64_t column = panel * kPanel;
      const Result to{g.to, g.format, (first + row) * g.inner + column, g.inner, kNothing, g.inner - column};
      multiply_panel<decltype(count)::value>(to, {grad + 2 * row, 2, 2 * kPanel}, x + panel * g.pairs * 2 * kPanel, g.pairs);
    });
}

// Sums of the columns of a packed panel.
MEZZO_ARITHMETIC void add_up(void* to, int32_t format, int64_t first, int64_t columns, const uint16_t* panel, int64_t pairs) {
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  Sums<1> sums;
  sums.clear();
  for (int64_t p = 0; p < pairs; p++, panel += 2 * kPanel)
    for (int half = 0; half < 2; half++) sums.sum[0][half] = add_pairs(sums.sum[0][half], _mm512_load_si512(panel + half * kPanel), ones);
  sums.write({to, format, first, 0, kNothing, columns - first});
}

// y [rows][width], bf16. x [rows][inner], bf16; weight [width][inner]; bias [width] or null. Inner and width are even.
void forward(
    uint16_t* y, const uint16_t* x, const void* weight, const void* bias, int32_t weight_format, int32_t bias_format,
    int64_t rows, int64_t inner, int64_t width, int32_t threads) {
  const Matrix w{weight, weight_format, width, inner};
  const Product p{y, x, w, nullptr, bias, bias_format, rows, inner, width};
#pragma omp parallel num_threads(threads)
  is_few(rows, inner) ? multiply_few(p, threads) : multiply_all(p, threads);
}

// dx [rows][inner], bf16, or null; dw as weight and db [width], or null, in the formats given. grad [rows][width], bf16; inner and width
// are even. Returns whether there was memory for it.
bool backward(
    uint16_t* dx, void* dw, void* db, const uint16_t* grad, const uint16_t* x, const void* weight, int32_t weight_format, int32_t bias_format,
    int64_t rows, int64_t inner, int64_t width, int32_t threads) {
  const Matrix g{grad, kBf16, rows, width}, input{x, kBf16, rows, inner}, w{weight, weight_format, width, inner};
  const Gradient to{dw, weight_format, pairs(rows), inner, width};
  const bool is_few = rows <= kFew;
  const int64_t size = to.pairs * 2 * kPanel, shares = parts(panels(width), panels(inner), threads);
  const int64_t of_weight = is_few ? FewRows::runs(width) * rows * 2 * kPanel : panel_size(width);
  const Lines memory = lines(panels(inner) * (size + (dx ? of_weight : 0)));
  if (!memory) return false;
  uint16_t *columns = start(memory), *rest = columns + panels(inner) * size;
#pragma omp parallel num_threads(threads)
  {
    if (dx && is_few) {
      multiply_back_few({dx, reinterpret_cast<float*>(rest), grad, w, rows}, threads);
    } else if (dx) {
      pack_all_columns(rest, of_weight, w, threads);
      multiply_all({dx, grad, w, rest, nullptr, kFp32, rows, width, inner}, threads);
    }
#pragma omp for schedule(static)
    for (int64_t n = 0; n < panels(inner); n++) pack_columns(columns + n * size, 0, x, input, n * kPanel, (n + 1) * kPanel, 0, to.pairs);
#pragma omp for schedule(static)
    for (int64_t task = 0; task < panels(width) * shares; task++) {
      const int64_t first = task / shares * kPanel, share = task % shares;
      uint16_t* panel = scratch(size);
      pack_columns(panel, 0, grad, g, first, first + kPanel, 0, to.pairs);
      if (db && share == 0) add_up(db, bias_format, first, width, panel, to.pairs);
      differentiate(to, first, panel, columns, panels(inner) * share / shares, panels(inner) * (share + 1) / shares);
    }
  }
  return true;
}
#endif
