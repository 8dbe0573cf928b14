// Gradients of a convolution's weight and bias in bf16: dw[o, i, tap] = the sum over pixels p of every picture of g[o, p] x[i, where tap meets p].
// Pictures go in pairs: what two have at one place is one operand of a product of pairs (AVX512-BF16), so sizes, strides and taps are free.
// Taps beyond a picture's border are left out, not multiplied with 0. Sums are fp32, rounded once; a thread takes whole outputs.

#include <algorithm>

#include "formats.h"
#include "pairs.h"

#if defined(MEZZO_PAIRS)

constexpr int64_t kPanel = 16;         // channels that lie side by side once packed
constexpr int64_t kIn = 8, kOut = 32;  // channels of a block of sums: 16 registers
constexpr int64_t kPixels = 1024;      // of pairs of pictures that are gone through at a time, so that they stay in the near cache
constexpr int64_t kAhead = 8;          // pixels by which operands are called for before they are needed
constexpr int64_t kSums = 256 * 1024;  // bytes of sums that a thread keeps meanwhile

struct Sizes {
  int64_t batch, in, height, width, out, rows, columns, tap_rows, tap_columns, row_stride, column_stride, row_pad, column_pad;
  int64_t taps() const { return tap_rows * tap_columns; }
  int64_t pairs() const { return (batch + 1) / 2; }
  int64_t in_blocks() const { return (in + kIn - 1) / kIn; }
  int64_t out_blocks() const { return (out + kOut - 1) / kOut; }
  int64_t in_panels() const { return (in + kPanel - 1) / kPanel; }
  int64_t out_panels() const { return kOut / kPanel * out_blocks(); }
  int64_t in_panel() const { return pairs() * height * width * 2 * kPanel; }  // elements
  int64_t out_panel() const { return pairs() * rows * columns * 2 * kPanel; }
  int64_t block_sums() const { return taps() * kIn * kOut; }
  int64_t blocks_at_once() const { return std::clamp<int64_t>(kSums / 4 / block_sums(), 1, 16); }
};

// Panels of x and of g, then each thread's sums.
struct Workspace {
  uint16_t *x, *grad;
  float* sums;

  // Lays everything out from `memory` on and returns how many bytes that is; all parts are multiples of 64.
  int64_t lay(char* memory, const Sizes& s, int64_t threads) {
    char* at = memory;
    auto take = [&at](auto*& part, int64_t count) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at);
      at += count * int64_t(sizeof *part);
    };
    take(x, s.in_panels() * s.in_panel());
    take(grad, s.out_panels() * s.out_panel());
    take(sums, threads * s.blocks_at_once() * s.block_sums());
    return at - memory;
  }
};

// Channels of two pictures, [16][size] each, to [size][16][2]; 0 for channels beyond the last and for a picture that is not there.
void pack(uint16_t* to, const uint16_t* first, const uint16_t* second, int64_t channels, int64_t size) {
  const __m512i low = woven(32), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t at = 0; at < size; at += 32) {
    __m512i r[2][16];
#pragma GCC unroll 16
    for (int64_t c = 0; c < 16; c++) {
      const __mmask32 there = c < channels ? first_words(size - at) : 0;
      const __m512i one = _mm512_maskz_loadu_epi16(there, first + c * size + at);
      const __m512i other = _mm512_maskz_loadu_epi16(second ? there : 0, second + c * size + at);
      r[0][c] = _mm512_permutex2var_epi16(one, low, other);
      r[1][c] = _mm512_permutex2var_epi16(one, high, other);
    }
    for (int64_t half = 0; half < 2; half++) {
      transpose(r[half]);
      const int64_t begin = at + 16 * half, count = std::clamp<int64_t>(size - begin, 0, 16);
      for (int64_t i = 0; i < count; i++) _mm512_store_si512(to + (begin + i) * 32, r[half][i]);
    }
  }
}

// Packs panel `n` of the pictures [batch][channels][size], pair `pair`.
void pack_panel(uint16_t* panels, const uint16_t* from, int64_t n, int64_t pair, const Sizes& s, int64_t channels, int64_t size) {
  const int64_t left = channels - n * kPanel;
  if (left <= 0) {
    std::fill_n(panels + (n * s.pairs() + pair) * size * 2 * kPanel, size * 2 * kPanel, uint16_t(0));
    return;
  }
  const uint16_t* first = from + (2 * pair * channels + n * kPanel) * size;
  pack(panels + (n * s.pairs() + pair) * size * 2 * kPanel, first, 2 * pair + 1 < s.batch ? first + channels * size : nullptr, std::min(left, kPanel), size);
}

struct Range { int64_t begin, end; };

// Outputs of a row, or of a column, for which a tap is inside of the picture.
inline Range inside(int64_t tap, int64_t stride, int64_t pad, int64_t size, int64_t outputs) {
  const int64_t begin = tap >= pad ? 0 : (pad - tap + stride - 1) / stride, reach = size - 1 + pad - tap;
  return {begin, reach < 0 ? begin : std::max(begin, std::min(reach / stride + 1, outputs))};
}

// Adds to the sums [8][32] of one tap, rows `row` apart, what `pairs` pairs of pictures give, from the panels' addresses on.
ON_PAIRS void add_tap(float* sums, int64_t row, const uint16_t* x, const uint16_t* grad, const Sizes& s, int64_t pairs, int64_t tap, bool is_first) {
  const int64_t tap_row = tap / s.tap_columns, tap_column = tap % s.tap_columns;
  const Range rows = inside(tap_row, s.row_stride, s.row_pad, s.height, s.rows);
  const Range columns = inside(tap_column, s.column_stride, s.column_pad, s.width, s.columns);
  Block<kIn> block;
  if (is_first)
    block.clear();
  else
    block.load(sums, row);
  for (int64_t b = 0; b < pairs; b++)
    for (int64_t r = rows.begin; r < rows.end; r++) {
      const int64_t above = b * s.height + r * s.row_stride + tap_row - s.row_pad;
      const uint16_t* from = x + 2 * kPanel * (above * s.width + columns.begin * s.column_stride + tap_column - s.column_pad);
      const uint16_t* with = grad + 2 * kPanel * ((b * s.rows + r) * s.columns + columns.begin);
      for (int64_t c = columns.begin; c < columns.end; c++, from += 2 * kPanel * s.column_stride, with += 2 * kPanel) {
        for (const uint16_t* soon : {from + kAhead * 2 * kPanel * s.column_stride, with + kAhead * 2 * kPanel, with + s.out_panel() + kAhead * 2 * kPanel})
          _mm_prefetch((const char*)soon, _MM_HINT_T0);
        block.add(from, 2, _mm512_load_si512(with), _mm512_load_si512(with + s.out_panel()));
      }
    }
  block.store(sums, row);
}

// Writes sums [count][32] as bf16, a row of `count` for each of up to 32 channels, `row` apart.
ON_PAIRS void write(uint16_t* to, int64_t row, int64_t channels, const float* sums, int64_t count) {
  for (int64_t half = 0; half < channels; half += 16)
    for (int64_t at = 0; at < count; at += 32) {
      __m512i r[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++) {
        const float* from = sums + (at + 2 * i) * kOut + half;
        const __m512 even = at + 2 * i < count ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
        const __m512 odd = at + 2 * i + 1 < count ? _mm512_loadu_ps(from + kOut) : _mm512_setzero_ps();
        r[i] = woven((__m512i)_mm512_cvtne2ps_pbh(odd, even));
      }
      transpose(r);
      for (int64_t i = 0; i < std::min<int64_t>(16, channels - half); i++)
        _mm512_mask_storeu_epi16(to + (half + i) * row + at, first_words(count - at), r[i]);
    }
}

// Blocks `begin` to `end` of 8 channels of x by the 32 of block `out` of g, few enough for the memory of `sums`.
void differentiate(uint16_t* to, const Workspace& w, float* sums, const Sizes& s, int64_t out, int64_t begin, int64_t end) {
  const int64_t taps = s.taps(), chunk = std::max<int64_t>(1, kPixels / (s.rows * s.columns));
  const uint16_t* grad = w.grad + out * (kOut / kPanel) * s.out_panel();
  for (int64_t pair = 0; pair < s.pairs(); pair += chunk)
    for (int64_t in = begin; in < end; in++) {
      const uint16_t* x = w.x + in / 2 * s.in_panel() + in % 2 * 2 * kIn + pair * s.height * s.width * 2 * kPanel;
      float* own = sums + (in - begin) * s.block_sums();
      for (int64_t tap = 0; tap < taps; tap++)
        add_tap(own + tap * kOut, taps * kOut, x, grad + pair * s.rows * s.columns * 2 * kPanel, s, std::min(chunk, s.pairs() - pair), tap, pair == 0);
    }
  for (int64_t in = begin; in < end; in++)
    write(to + (out * kOut * s.in + in * kIn) * taps, s.in * taps, std::min(kOut, s.out - out * kOut), sums + (in - begin) * s.block_sums(), std::min(kIn, s.in - in * kIn) * taps);
}

// The bias: sums of a panel of g.
ON_PAIRS void add_up(uint16_t* to, const Workspace& w, const Sizes& s, int64_t panel) {
  const uint16_t *at = w.grad + panel * s.out_panel(), *end = at + s.out_panel();
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 sum = _mm512_setzero_ps();
  for (; at < end; at += 2 * kPanel) sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(at), ones);
  const int64_t count = std::clamp<int64_t>(s.out - panel * kPanel, 0, kPanel);
  _mm256_mask_storeu_epi16(to + panel * kPanel, __mmask16(first_words(count)), (__m256i)_mm512_cvtneps_pbh(sum));
}

// sizes: those of Sizes, in its order. Bytes that all threads need together.
extern "C" int64_t mezzo_convolution_workspace(const int64_t* sizes, int32_t threads) {
  Workspace w;
  return w.lay(nullptr, *reinterpret_cast<const Sizes*>(sizes), threads);
}

// to [out, in, taps], bias [out] or null, x [batch, in, height, width], grad [batch, out, rows, columns]; workspace: on a multiple of 64 bytes.
extern "C" void mezzo_convolution_gradients(uint16_t* to, uint16_t* bias, const uint16_t* x, const uint16_t* grad, const int64_t* sizes, char* workspace, int32_t threads) {
  const Sizes s = *reinterpret_cast<const Sizes*>(sizes);
  Workspace w;
  w.lay(workspace, s, threads);
  const int64_t from_x = s.in_panels() * s.pairs(), from_grad = s.out_panels() * s.pairs(), ins = s.in_blocks(), blocks = ins * s.out_blocks();
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < from_x + from_grad; n++)
      if (n < from_x)
        pack_panel(w.x, x, n / s.pairs(), n % s.pairs(), s, s.in, s.height * s.width);
      else
        pack_panel(w.grad, grad, (n - from_x) / s.pairs(), n % s.pairs(), s, s.out, s.rows * s.columns);
#pragma omp for schedule(static) nowait
    for (int64_t thread = 0; thread < threads; thread++) {  // a share each, so that each has its own sums
      float* sums = w.sums + thread * s.blocks_at_once() * s.block_sums();
      const int64_t last = blocks * (thread + 1) / threads;
      for (int64_t n = blocks * thread / threads, end; n < last; n = end) {
        end = std::min({last, n + s.blocks_at_once(), (n / ins + 1) * ins});
        differentiate(to, w, sums, s, n / ins, n % ins, n % ins + end - n);
      }
    }
#pragma omp for schedule(static)
    for (int64_t panel = 0; panel < (bias ? s.out_panels() : 0); panel++) add_up(bias, w, s, panel);
  }
}
#endif

// Whether it is the faster one here: in pairs, where the processor has no tiles, on which torch's runs.
extern "C" int32_t mezzo_convolution_is_faster() { return has_pairs() && !has_tiles(); }
