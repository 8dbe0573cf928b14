// One direction of one layer in bf16, forward and back in time, of an LSTM
//   i, f, g, o = sigma, sigma, tanh, sigma (w_ih x + b_ih + w_hh h + b_hh),  c' = f c + i g,  h' = o tanh(c')
// or a GRU, whose w x and w h of the last gate stay apart:
//   r, z = sigma (w_ih x + b_ih + w_hh h + b_hh),  n = tanh(w_in x + b_in + r (w_hn h + b_hn)),  h' = n + z (h - n).
// A thread takes its rows of the batch through all steps of time without waiting for another. Sums, gates and states (c, or the h of a
// GRU) are fp32; h as an operand, what waits for backward of the gates, and the gradients of the sums are rounded to bf16. Products are
// of pairs of bf16 (AVX512-BF16).

#include <algorithm>

#include "formats.h"
#include "pairs.h"

#if defined(MEZZO_PAIRS)
constexpr int64_t kUnits = 16;  // hidden units of a group: one register for each of the four sums
constexpr int64_t kRows = 6;    // rows at once: 24 sums in registers
constexpr int kLstm = 4, kGru = 3;  // gates

// A tensor of [time, batch, width] in bf16; the elements of a row lie side by side.
struct Rows {
  uint16_t* data;
  int64_t time, batch;
  uint16_t* at(int64_t t, int64_t b) const { return data + t * this->time + b * this->batch; }
};

struct Sizes {
  int64_t steps, batch, inputs, units, gates;
  int64_t groups() const { return (units + kUnits - 1) / kUnits; }
  int64_t padded() const { return groups() * kUnits; }
  int64_t input_pairs() const { return (inputs + 1) / 2; }
  int64_t unit_pairs() const { return (units + 1) / 2; }
  int64_t pairs() const { return input_pairs() + unit_pairs(); }
  int64_t operand_row() const { return 2 * pairs() + 32; }  // a stride that is no multiple of a page
  int64_t pair() const { return gates * 2 * kUnits; }       // packed weights of a pair of inputs and 16 units
  int64_t sum_pairs() const { return (gates * units + 1) / 2; }
  int64_t sum_row() const { return 2 * sum_pairs(); }  // gradients of a row's sums
};

// sums[r] += a[r] w for R rows a, and w [pairs][N][16][2], whose last column goes to the sum `Last`.
template <int R, int N, int Last> ON_PAIRS inline __attribute__((always_inline)) void add_products(__m512 (&sums)[R][4], const uint16_t* a, int64_t a_row, const uint16_t* w, int64_t pairs) {
  for (int64_t x = 0; x < pairs; x++, w += N * 2 * kUnits) {
    __m512bh right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = (__m512bh)_mm512_loadu_si512(w + 2 * kUnits * n);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, a + r * a_row + 2 * x, 4);
      const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        __m512& sum = sums[r][n < N - 1 ? n : Last];
        sum = _mm512_dpbf16_ps(sum, left, right[n]);
      }
    }
  }
}

// 1 / x to 2^-27 of it.
inline __m512 reciprocal(__m512 x) {
  const __m512 y = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.f)));
}

// 2^x, to 3e-6 of it, from -120 to 120, where it ends.
inline __m512 exp2(__m512 x) {
  return exp2_of(_mm512_min_ps(_mm512_set1_ps(120.f), _mm512_max_ps(_mm512_set1_ps(-120.f), x)));  // NaN stays: it is the second
}

inline __m512 sigma(__m512 x) { return reciprocal(_mm512_add_ps(_mm512_set1_ps(1.f), exp2(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f))))); }

// tanh, a quotient of polynomials from -7.9 to 7.9 (that of Eigen), where it is 1 in fp32.
inline __m512 tanh(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(7.90531110763549805f), _mm512_max_ps(_mm512_set1_ps(-7.90531110763549805f), x));
  const __m512 s = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-2.76076847742355e-16f);
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(2.00018790482477e-13f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(-8.60467152213735e-11f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(5.12229709037114e-08f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(1.48572235717979e-05f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(6.37261928875436e-04f));
  p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(4.89352455891786e-03f));
  __m512 q = _mm512_set1_ps(1.19825839466702e-06f);
  q = _mm512_fmadd_ps(q, s, _mm512_set1_ps(1.18534705686654e-04f));
  q = _mm512_fmadd_ps(q, s, _mm512_set1_ps(2.26843463243900e-03f));
  q = _mm512_fmadd_ps(q, s, _mm512_set1_ps(4.89352518554385e-03f));
  return _mm512_mul_ps(_mm512_mul_ps(x, p), reciprocal(q));
}

struct Forward {
  Sizes sizes;
  Rows x, y;
  const uint16_t* h;         // where time begins: [batch][units]
  uint16_t *kept, *packed;   // [time][batch][groups][4][16], or null: not kept; packed: weights [groups][pairs][gates][16][2]
  float *states, *bias;      // [time and one before, or 1][batch][padded]; bias: [groups][4][16]
  int64_t state_step;        // elements from one time's states to the next one's, 0 where they are not kept
  bool is_reversed;

  int64_t time(int64_t n) const { return is_reversed ? sizes.steps - 1 - n : n; }
};

// Weights of 16 units, as `add_products` reads them: of each pair of inputs those of the gates.
void pack_group(uint16_t* to, const uint16_t* weight, int64_t width, const Sizes& s, int64_t group) {
  for (int64_t x = 0; x < width; x += 32)
    for (int64_t gate = 0; gate < s.gates; gate++) {
      const __mmask32 real = first_words(width - x);
      __m512i rows[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++) {
        const int64_t unit = group * kUnits + i;
        rows[i] = _mm512_maskz_loadu_epi16(unit < s.units ? real : 0, weight + (gate * s.units + unit) * width + x);
      }
      transpose(rows);
      uint16_t* at = to + x / 2 * s.pair() + 2 * gate * kUnits;
#pragma GCC unroll 16
      for (int64_t i = 0; i < 16; i++)
        if (x + 2 * i < width) _mm512_storeu_si512(at + i * s.pair(), rows[i]);
    }
}

// What the four sums of 16 units begin with: [4][16].
void pack_bias(float* to, const uint16_t* b_ih, const uint16_t* b_hh, const Sizes& s, int64_t group) {
  for (int64_t sum = 0; sum < 4; sum++)
    for (int64_t n = group * kUnits; n < (group + 1) * kUnits; n++, to++) {
      const int64_t at = std::min(sum, s.gates - 1) * s.units + n;
      const bool is_there = b_ih && n < s.units, of_input = sum < s.gates, of_h = s.gates == kLstm || sum != 2;
      *to = (is_there && of_input ? widen_bf16(b_ih[at]) : 0.f) + (is_there && of_h ? widen_bf16(b_hh[at]) : 0.f);
    }
}

// Steps of R rows, from `b` on, of one group of units; `operand` holds x and h, `next` takes the new h.
template <int R, int Gates> ON_PAIRS void step_forward(const Forward& call, int64_t n, int64_t group, int64_t b, const uint16_t* operand, uint16_t* next) {
  const Sizes& s = call.sizes;
  __m512 sums[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int gate = 0; gate < 4; gate++) sums[r][gate] = _mm512_loadu_ps(call.bias + (4 * group + gate) * kUnits);
  const uint16_t* w = call.packed + group * s.pairs() * s.pair();
  add_products<R, Gates, Gates - 1>(sums, operand, s.operand_row(), w, s.input_pairs());
  add_products<R, Gates, 3>(sums, operand + 2 * s.input_pairs(), s.operand_row(), w + s.input_pairs() * s.pair(), s.unit_pairs());
  const __mmask16 real = first_lanes(s.units - group * kUnits);
  const int64_t t = call.time(n);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    float* states = call.states + t * call.state_step + (b + r) * s.padded() + group * kUnits;
    const __m512 old = _mm512_loadu_ps(states + call.is_reversed * call.state_step);
    __m512 state, h;
    if constexpr (Gates == kLstm) {
      const __m512 i = sigma(sums[r][0]), f = sigma(sums[r][1]), g = tanh(sums[r][2]), o = sigma(sums[r][3]);
      state = _mm512_fmadd_ps(f, old, _mm512_mul_ps(i, g));
      h = _mm512_mul_ps(o, tanh(state));
      sums[r][0] = i, sums[r][1] = f, sums[r][2] = g, sums[r][3] = o;
    } else {
      const __m512 reset = sigma(sums[r][0]), z = sigma(sums[r][1]), fresh = tanh(_mm512_fmadd_ps(reset, sums[r][3], sums[r][2]));
      h = state = _mm512_fmadd_ps(z, _mm512_sub_ps(old, fresh), fresh);
      sums[r][0] = reset, sums[r][1] = z, sums[r][2] = fresh;
    }
    _mm512_storeu_ps(states + !call.is_reversed * call.state_step, state);
    const __m256i low = (__m256i)_mm512_cvtneps_pbh(h);
    _mm256_mask_storeu_epi16(call.y.at(t, b + r) + group * kUnits, real, low);
    _mm256_mask_storeu_epi16(next + r * s.operand_row() + 2 * s.input_pairs() + group * kUnits, real, low);
    if (call.kept) {
      uint16_t* kept = call.kept + ((t * s.batch + b + r) * s.groups() + group) * 4 * kUnits;
      _mm512_storeu_si512(kept, (__m512i)_mm512_cvtne2ps_pbh(sums[r][1], sums[r][0]));
      _mm512_storeu_si512(kept + 2 * kUnits, (__m512i)_mm512_cvtne2ps_pbh(sums[r][3], sums[r][2]));
    }
  }
}

using StepForward = void (*)(const Forward&, int64_t, int64_t, int64_t, const uint16_t*, uint16_t*);
template <int G> constexpr StepForward kStepForward[] = {step_forward<1, G>, step_forward<2, G>, step_forward<3, G>,
                                                         step_forward<4, G>, step_forward<5, G>, step_forward<6, G>};

// Calls `work(first, rows)` for blocks of up to 6 of the rows in [first, last), as even as can be.
template <typename Work> inline void by_rows(int64_t first, int64_t last, Work work) {
  for (int64_t blocks = (last - first + kRows - 1) / kRows; blocks > 0; blocks--) {
    const int64_t rows = (last - first + blocks - 1) / blocks;
    work(first, rows);
    first += rows;
  }
}

// All steps of time of the rows in [first, last).
void run_forward(const Forward& call, int64_t first, int64_t last, uint16_t* operands) {
  const Sizes& s = call.sizes;
  const int64_t row = s.operand_row(), h_at = 2 * s.input_pairs();
  const StepForward* step = s.gates == kLstm ? kStepForward<kLstm> : kStepForward<kGru>;
  uint16_t* two[2] = {operands, operands + (last - first) * row};
  std::fill_n(operands, 2 * (last - first) * row, uint16_t(0));
  for (int64_t b = first; b < last; b++) std::copy_n(call.h + b * s.units, s.units, two[0] + (b - first) * row + h_at);
  for (int64_t n = 0; n < s.steps; n++) {
    uint16_t *now = two[n % 2], *next = two[(n + 1) % 2];
    for (int64_t b = first; b < last; b++) std::copy_n(call.x.at(call.time(n), b), s.inputs, now + (b - first) * row);
    for (int64_t group = 0; group < s.groups(); group++)
      by_rows(first, last, [&](int64_t b, int64_t rows) {
        step[rows - 1](call, n, group, b, now + (b - first) * row, next + (b - first) * row);
      });
  }
}

// Bytes that forward needs: packed weights, biases, and two operands of each row.
extern "C" int64_t mezzo_recurrent_forward_workspace(const int64_t* sizes) {
  const Sizes& s = *(const Sizes*)sizes;
  return s.groups() * s.pairs() * s.pair() * 2 + s.groups() * 16 * kUnits + 4 * s.batch * s.operand_row();
}

// tensors: x, y, w_ih, w_hh, b_ih, b_hh, h, kept; both biases and the last may be null. strides: time and batch of x and of y, time of states.
extern "C" void mezzo_recurrent_forward(uint16_t* const* tensors, float* states, const int64_t* strides, const int64_t* sizes, int32_t is_reversed, char* workspace, int32_t threads) {
  const Sizes& s = *(const Sizes*)sizes;
  uint16_t* packed = (uint16_t*)workspace;
  float* bias = (float*)(packed + s.groups() * s.pairs() * s.pair());
  uint16_t* operands = (uint16_t*)(bias + s.groups() * 4 * kUnits);
  const Forward call{s, {tensors[0], strides[0], strides[1]}, {tensors[1], strides[2], strides[3]}, tensors[6], tensors[7], packed,
                     states, bias, strides[4], is_reversed != 0};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t group = 0; group < s.groups(); group++) {
      uint16_t* to = packed + group * s.pairs() * s.pair();
      pack_group(to, tensors[2], s.inputs, s, group);
      pack_group(to + s.input_pairs() * s.pair(), tensors[3], s.units, s, group);
      pack_bias(bias + group * 4 * kUnits, tensors[4], tensors[5], s, group);
    }
#pragma omp for schedule(static)
    for (int64_t thread = 0; thread < threads; thread++) {
      const int64_t first = s.batch * thread / threads, last = s.batch * (thread + 1) / threads;
      run_forward(call, first, last, operands + 2 * first * s.operand_row());
    }
  }
}

struct Backward {
  Sizes sizes;
  Rows dy;                            // gradients of y; null: none
  const uint16_t *dh, *kept, *packed;  // dh: of the last h, or null; packed: weights [blocks][pairs of sums][64][2]
  const float* states;
  float* d_state;                     // [batch][padded]: of the states, step by step
  uint16_t *d_input, *d_hidden;       // [time][batch][gates units]: of the sums as w_ih x, and as w_hh h; one for an LSTM
  bool is_reversed;

  int64_t time(int64_t n) const { return is_reversed ? sizes.steps - 1 - n : n; }
};

// Not a lambda: those do not inherit the target of the function that they are in.
ON_PAIRS inline void store_low(uint16_t* to, __mmask16 there, __m512 values) { _mm256_mask_storeu_epi16(to, there, (__m256i)_mm512_cvtneps_pbh(values)); }

// Steps back of R rows, from `b` on, of four groups of units.
template <int R, int Gates> ON_PAIRS void step_back(const Backward& call, int64_t n, int64_t block, int64_t b) {
  const Sizes& s = call.sizes;
  const int64_t t = call.time(n), width = s.sum_row();
  __m512 sums[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sums[r][i] = _mm512_setzero_ps();
  if (n + 1 < s.steps) {
    const uint16_t* later = call.d_hidden + (call.time(n + 1) * s.batch + b) * width;
    add_products<R, 4, 3>(sums, later, width, call.packed + block * s.sum_pairs() * 8 * kUnits, s.sum_pairs());
  }
  const __m512 one = _mm512_set1_ps(1.f);
  for (int r = 0; r < R; r++)
    for (int64_t group = 4 * block; group < std::min(4 * block + 4, s.groups()); group++) {
      const int64_t unit = group * kUnits, row = t * s.batch + b + r, step = s.batch * s.padded();
      const __mmask16 real = first_lanes(s.units - unit);
      __m512 dh = sums[r][group % 4];
      if (call.dy.data) dh = _mm512_add_ps(dh, load_wide(call.dy.at(t, b + r) + unit, real));
      if (call.dh && n + 1 == s.steps) dh = _mm512_add_ps(dh, load_wide(call.dh + (b + r) * s.units + unit, real));
      const uint16_t* kept = call.kept + (row * s.groups() + group) * 4 * kUnits;
      const __m512i first = _mm512_loadu_si512(kept), second = _mm512_loadu_si512(kept + 2 * kUnits);
      const __m512 k0 = widened(_mm512_castsi512_si256(first)), k1 = widened(_mm512_extracti64x4_epi64(first, 1));
      const __m512 k2 = widened(_mm512_castsi512_si256(second)), k3 = widened(_mm512_extracti64x4_epi64(second, 1));
      const float* state = call.states + row * s.padded() + unit;
      const __m512 old = _mm512_loadu_ps(state + call.is_reversed * step);
      float* d_state = call.d_state + (b + r) * s.padded() + unit;
      __m512 found[4];
      if constexpr (Gates == kLstm) {
        const __m512 i = k0, f = k1, g = k2, o = k3, bent = tanh(_mm512_loadu_ps(state + !call.is_reversed * step));
        const __m512 dho = _mm512_mul_ps(dh, o);
        const __m512 dc = _mm512_add_ps(_mm512_loadu_ps(d_state), _mm512_mul_ps(dho, _mm512_fnmadd_ps(bent, bent, one)));
        _mm512_storeu_ps(d_state, _mm512_mul_ps(dc, f));
        const __m512 dci = _mm512_mul_ps(dc, i);
        found[0] = _mm512_mul_ps(_mm512_mul_ps(dci, g), _mm512_sub_ps(one, i));
        found[1] = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(dc, old), f), _mm512_sub_ps(one, f));
        found[2] = _mm512_mul_ps(dci, _mm512_fnmadd_ps(g, g, one));
        found[3] = _mm512_mul_ps(_mm512_mul_ps(dho, bent), _mm512_sub_ps(one, o));
      } else {
        const __m512 reset = k0, z = k1, fresh = k2, of_h = k3;
        dh = _mm512_add_ps(dh, _mm512_loadu_ps(d_state));
        _mm512_storeu_ps(d_state, _mm512_mul_ps(dh, z));
        const __m512 dhz = _mm512_mul_ps(dh, _mm512_sub_ps(one, z));
        found[2] = _mm512_mul_ps(dhz, _mm512_fnmadd_ps(fresh, fresh, one));
        found[3] = _mm512_mul_ps(found[2], reset);
        found[0] = _mm512_mul_ps(_mm512_mul_ps(found[3], of_h), _mm512_sub_ps(one, reset));
        found[1] = _mm512_mul_ps(_mm512_mul_ps(dhz, _mm512_sub_ps(old, fresh)), z);
      }
      const int64_t at = row * width + unit;
      for (int gate = 0; gate < Gates; gate++) store_low(call.d_input + at + gate * s.units, real, found[gate]);
      if constexpr (Gates == kGru)
        for (int gate = 0; gate < Gates; gate++) store_low(call.d_hidden + at + gate * s.units, real, found[gate < 2 ? gate : 3]);
    }
}

using StepBack = void (*)(const Backward&, int64_t, int64_t, int64_t);
template <int G> constexpr StepBack kStepBack[] = {step_back<1, G>, step_back<2, G>, step_back<3, G>, step_back<4, G>, step_back<5, G>, step_back<6, G>};

// Columns [64 block, 64 block + 64) of w_hh, as `add_products` reads them: two rows woven.
void pack_block(uint16_t* to, const uint16_t* weight, const Sizes& s, int64_t block) {
  for (int64_t k = 0; k < s.sum_row(); k += 2)
    for (int64_t unit = 4 * kUnits * block; unit < 4 * kUnits * (block + 1); unit += kUnits, to += 2 * kUnits) {
      const __mmask16 real = first_lanes(s.units - unit), second = k + 1 < s.gates * s.units ? real : 0;
      const uint16_t* from = weight + k * s.units + unit;
      _mm512_storeu_si512(to, woven(_mm256_maskz_loadu_epi16(real, from), _mm256_maskz_loadu_epi16(second, from + s.units)));
    }
}

// Bytes that backward needs: packed weights.
extern "C" int64_t mezzo_recurrent_backward_workspace(const int64_t* sizes) {
  const Sizes& s = *(const Sizes*)sizes;
  return (s.groups() + 3) / 4 * s.sum_pairs() * 16 * kUnits;
}

// tensors: dy, dh, w_hh, kept, and where the gradients of the sums go, as w_ih x and as w_hh h; dy and dh may be null. strides: time and batch of dy.
extern "C" void mezzo_recurrent_backward(uint16_t* const* tensors, const float* states, float* d_state, const int64_t* strides, const int64_t* sizes, int32_t is_reversed, char* workspace, int32_t threads) {
  const Sizes& s = *(const Sizes*)sizes;
  uint16_t* packed = (uint16_t*)workspace;
  const int64_t blocks = (s.groups() + 3) / 4;
  const Backward call{s, {tensors[0], strides[0], strides[1]}, tensors[1], tensors[3], packed, states, d_state, tensors[4], tensors[5], is_reversed != 0};
  const StepBack* step = s.gates == kLstm ? kStepBack<kLstm> : kStepBack<kGru>;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) pack_block(packed + block * s.sum_pairs() * 8 * kUnits, tensors[2], s, block);
#pragma omp for schedule(static)
    for (int64_t thread = 0; thread < threads; thread++)
      for (int64_t n = s.steps - 1; n >= 0; n--)
        for (int64_t block = 0; block < blocks; block++)
          by_rows(s.batch * thread / threads, s.batch * (thread + 1) / threads, [&](int64_t b, int64_t rows) { step[rows - 1](call, n, block, b); });
  }
}
#endif

// What multiplies here: 1 pairs of bf16, 0 nothing that this is written for, or tiles, which torch's own kernel takes.
extern "C" int64_t mezzo_recurrent_products() { return has_pairs() && !has_tiles(); }
