// Gradients of attention in bf16, from its result and the log-sum-exp of its rows: dq, dk and dv of
//   o = p v,  p = exp(s - lse),  s = scale q k' + mask.
// A thread takes a head of keys after the other, with all heads of queries that share it, and goes through the scores in blocks,
// keys by queries: ds = p (do v' - delta), delta = the row sums of do o; dv += p' do, dk += ds' q, dq' += k' ds. Sums are fp32; p and
// ds are rounded to bf16 for the products. Products are of tiles (AMX), or of pairs (AVX512-BF16), which the processor is asked when this runs.

#include <algorithm>

#include "formats.h"
#include "pairs.h"

#if defined(MEZZO_PAIRS)
constexpr int64_t kBlock = 64;  // keys, and queries, of a block of scores
constexpr float kLog2E = 1.44269504f;

// A tensor of [batch, head, row, width]; the elements of a row lie side by side.
struct Rows {
  uint16_t* data;
  int64_t batch, head, row;
  uint16_t* at(int64_t b, int64_t h, int64_t i) const { return data + b * this->batch + h * this->head + i * this->row; }
};

// c (+)= a b: c [m][n] fp32; a [m][k] bf16; b [k / 2][n][2] bf16; m, n and k whole multiples of 32, strides in elements.
using Multiply = void (*)(float* c, int64_t c_row, const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row, int64_t m, int64_t n, int64_t k, bool adds);

struct Call {
  Rows query, key, value, out, grad, grad_query, grad_key, grad_value;
  const float *logsumexp, *mask;  // mask: [batch, head, key, query], or null
  const int64_t *lse_strides, *mask_strides;
  int64_t heads, kv_heads, queries, keys, width;
  float scale;
  bool is_causal;
  Multiply multiply;
};

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A thread's memory. Blocks of 64 rows lie one after the other, so that no stride is a multiple of a page; what is beyond the end is 0.
struct Workspace {
  int64_t keys, queries, width;  // padded
  float *scores, *dp, *dq, *dk, *dv, *lse, *delta;
  uint16_t *p, *ds, *ds_pairs, *rows, *k, *v, *k_across, *q_pairs, *do_pairs, *q_rows, *do_rows;

  Workspace(int64_t keys_, int64_t queries_, int64_t width_) : keys(padded(keys_, kBlock)), queries(padded(queries_, kBlock)), width(padded(width_, 32)) {}

  // Lays everything out from `memory` on and returns how many bytes that is.
  int64_t lay(char* memory) {
    char* at = memory;
    const int64_t block = kBlock * kBlock, k_size = keys * width, q_size = queries * width;
    auto take = [&at](auto*& part, int64_t count) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at);
      at += padded(count * int64_t(sizeof *part), 64);
    };
    take(scores, block); take(dp, block); take(dq, q_size); take(dk, k_size); take(dv, k_size); take(lse, queries); take(delta, queries);
    take(p, block); take(ds, block); take(ds_pairs, block); take(rows, kBlock * width);
    take(k, k_size); take(v, k_size); take(k_across, k_size);
    take(q_pairs, q_size); take(do_pairs, q_size); take(q_rows, q_size); take(do_rows, q_size);
    return at - memory;
  }
};

ON_PAIRS void multiply_pairs(float* c, int64_t c_row, const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row, int64_t m, int64_t n, int64_t k, bool adds) {
  constexpr int R = 8;  // rows at once: 16 sums in registers
  for (int64_t i = 0; i < m; i += R)
    for (int64_t j = 0; j < n; j += 32) {
      Block<R> sums;
      if (adds)
        sums.load(c + i * c_row + j, c_row);
      else
        sums.clear();
      for (int64_t x = 0; x < k; x += 2) {
        const uint16_t* at = b + x / 2 * b_row + 2 * j;
        sums.add(a + i * a_row + x, a_row, _mm512_loadu_si512(at), _mm512_loadu_si512(at + 32));
      }
      sums.store(c + i * c_row + j, c_row);
    }
}

ON_TILES void multiply_tiles(float* c, int64_t c_row, const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_row, int64_t m, int64_t n, int64_t k, bool adds) {
  for (int64_t i = 0; i < m; i += 32)
    for (int64_t j = 0; j < n; j += 32) {
      float *top = c + i * c_row + j, *low = top + 16 * c_row;
      if (adds) {
        _tile_loadd(0, top, 4 * c_row);
        _tile_loadd(1, top + 16, 4 * c_row);
        _tile_loadd(2, low, 4 * c_row);
        _tile_loadd(3, low + 16, 4 * c_row);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t x = 0; x < k; x += 32) {
        _tile_loadd(4, a + i * a_row + x, 2 * a_row);
        _tile_loadd(5, a + (i + 16) * a_row + x, 2 * a_row);
        _tile_loadd(6, b + x / 2 * b_row + 2 * j, 2 * b_row);
        _tile_loadd(7, b + x / 2 * b_row + 2 * j + 32, 2 * b_row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, top, 4 * c_row);
      _tile_stored(1, top + 16, 4 * c_row);
      _tile_stored(2, low, 4 * c_row);
      _tile_stored(3, low + 16, 4 * c_row);
    }
}

ON_TILES void begin_tiles() {
  TileConfig config;
  std::fill_n(config.bytes, 8, 64);
  std::fill_n(config.rows, 8, 16);
  set_tiles(config);
}

ON_TILES void end_tiles() { _tile_release(); }

// Copies up to 64 rows from `first` on, of `count`, and fills up with 0 to [64][padded].
void copy_rows(uint16_t* to, const Rows& from, int64_t b, int64_t h, int64_t first, int64_t count, int64_t width, int64_t padded) {
  for (int64_t i = 0; i < kBlock; i++, to += padded) {
    const int64_t have = first + i < count ? width : 0;
    if (have) std::memcpy(to, from.at(b, h, first + i), 2 * have);
    std::fill(to + have, to + padded, uint16_t(0));
  }
}

// Column pair `x` of 16 rows, from `rows` on.
inline __m512i pairs_of(const uint16_t* rows, int64_t width, int64_t x) {
  return _mm512_i32gather_epi32(_mm512_mullo_epi32(lanes(), _mm512_set1_epi32(int(width / 2))), rows + x, 4);
}

// [64][width] to [width / 2][64][2].
void pack_pairs(uint16_t* to, const uint16_t* rows, int64_t width) {
  for (int64_t x = 0; x < width; x += 2)
    for (int64_t i = 0; i < kBlock; i += 16, to += 32) _mm512_storeu_si512(to, pairs_of(rows + i * width, width, x));
}

// [64][width] to [width][64].
void pack_across(uint16_t* to, const uint16_t* rows, int64_t width) {
  for (int64_t x = 0; x < width; x += 2)
    for (int64_t i = 0; i < kBlock; i += 16) {
      const __m512i pairs = pairs_of(rows + i * width, width, x);
      _mm256_storeu_si256((__m256i*)(to + x * kBlock + i), _mm512_cvtepi32_epi16(pairs));
      _mm256_storeu_si256((__m256i*)(to + (x + 1) * kBlock + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16)));
    }
}

// [64][width] to [32][width][2].
void pack_rows(uint16_t* to, const uint16_t* rows, int64_t width) {
  for (int64_t i = 0; i < kBlock; i += 2, rows += 2 * width)
    for (int64_t x = 0; x < width; x += 16, to += 32) {
      const __m256i even = _mm256_loadu_si256((const __m256i*)(rows + x)), odd = _mm256_loadu_si256((const __m256i*)(rows + width + x));
      _mm512_storeu_si512(to, woven(even, odd));
    }
}

inline float dot(const uint16_t* a, const uint16_t* b, int64_t width) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t x = 0; x < width; x += 16) {
    const __mmask16 lanes = first_lanes(width - x);
    sum = _mm512_fmadd_ps(load_wide(a + x, lanes), load_wide(b + x, lanes), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

// 2^x, to 3e-6 of it; 0 from -200 down.
inline __m512 exp2(__m512 x) {
  return exp2_of(_mm512_max_ps(_mm512_set1_ps(-200.f), x));  // NaN stays: it is the second
}

// Lanes of 16 queries, from `query` on, that see a key.
inline __mmask16 seeing(const Call& call, int64_t key, int64_t query) {
  if (key >= call.keys) return 0;
  const __mmask16 real = first_lanes(call.queries - query);
  return call.is_causal ? real & ~first_lanes(key - query) : real;
}

// p and ds of a block, from its scores and dp: keys by queries, and ds in pairs of keys too.
ON_PAIRS void probabilities(const Call& call, const Workspace& w, const float* mask, int64_t first_key, int64_t first_query) {
  const __m512 factor = _mm512_set1_ps(call.scale * kLog2E), log2e = _mm512_set1_ps(kLog2E);
  for (int64_t j = 0; j < kBlock; j += 2)
    for (int64_t i = 0; i < kBlock; i += 32) {
      __m512 p[2][2], ds[2][2];
#pragma GCC unroll 2
      for (int r = 0; r < 2; r++)
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++) {
          const int64_t key = first_key + j + r, query = first_query + i + 16 * s, at = (j + r) * kBlock + i + 16 * s;
          const __mmask16 sees = seeing(call, key, query);
          __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(w.scores + at), factor, _mm512_loadu_ps(w.lse + query));
          if (mask && sees) {
            const float* from = mask + key * call.mask_strides[2] + query * call.mask_strides[3];
            x = _mm512_fmadd_ps(call.mask_strides[3] ? _mm512_maskz_loadu_ps(sees, from) : _mm512_set1_ps(*from), log2e, x);
          }
          p[r][s] = _mm512_maskz_mov_ps(sees, exp2(x));
          ds[r][s] = _mm512_maskz_mul_ps(sees, p[r][s], _mm512_sub_ps(_mm512_loadu_ps(w.dp + at), _mm512_loadu_ps(w.delta + query)));
        }
#pragma GCC unroll 2
      for (int r = 0; r < 2; r++) {
        _mm512_storeu_si512(w.p + (j + r) * kBlock + i, (__m512i)_mm512_cvtne2ps_pbh(p[r][1], p[r][0]));
        _mm512_storeu_si512(w.ds + (j + r) * kBlock + i, (__m512i)_mm512_cvtne2ps_pbh(ds[r][1], ds[r][0]));
        _mm512_storeu_si512(w.ds_pairs + j * kBlock + 2 * i + 32 * r, woven((__m512i)_mm512_cvtne2ps_pbh(ds[1][r], ds[0][r])));
      }
    }
}

// Writes rows of a gradient, times `factor`; the sums of a row lie `row` apart, those of a column `column`.
ON_PAIRS void write_rows(const Rows& to, int64_t b, int64_t h, const float* sums, int64_t row, int64_t column, int64_t first, int64_t last, int64_t width, float factor) {
  const __m512i steps = _mm512_mullo_epi32(lanes(), _mm512_set1_epi32(int(column)));
  for (int64_t i = first; i < last; i++, sums += row)
    for (int64_t x = 0; x < width; x += 16) {
      const __m512 found = column == 1 ? _mm512_loadu_ps(sums + x) : _mm512_i32gather_ps(steps, sums + x * column, 4);
      const __m256bh low = _mm512_cvtneps_pbh(_mm512_mul_ps(found, _mm512_set1_ps(factor)));
      _mm256_mask_storeu_epi16(to.at(b, h, i) + x, first_lanes(width - x), (__m256i)low);
    }
}

// Queries of a head: their pairs and rows, log-sum-exp and delta.
void take_queries(const Call& call, const Workspace& w, int64_t b, int64_t h) {
  for (int64_t i = 0; i < w.queries; i += kBlock) {
    copy_rows(w.rows, call.query, b, h, i, call.queries, call.width, w.width);
    pack_pairs(w.q_pairs + i * w.width, w.rows, w.width);
    pack_rows(w.q_rows + i * w.width, w.rows, w.width);
    copy_rows(w.rows, call.grad, b, h, i, call.queries, call.width, w.width);
    pack_pairs(w.do_pairs + i * w.width, w.rows, w.width);
    pack_rows(w.do_rows + i * w.width, w.rows, w.width);
  }
  const int64_t* strides = call.lse_strides;
  for (int64_t i = 0; i < w.queries; i++) {
    const bool is_real = i < call.queries;
    w.lse[i] = is_real ? call.logsumexp[b * strides[0] + h * strides[1] + i * strides[2]] * kLog2E : 0.f;
    w.delta[i] = is_real ? dot(call.grad.at(b, h, i), call.out.at(b, h, i), call.width) : 0.f;
  }
}

void take_keys(const Call& call, const Workspace& w, int64_t b, int64_t h) {
  for (int64_t j = 0; j < w.keys; j += kBlock) {
    copy_rows(w.k + j * w.width, call.key, b, h, j, call.keys, call.width, w.width);
    copy_rows(w.v + j * w.width, call.value, b, h, j, call.keys, call.width, w.width);
    pack_across(w.k_across + j * w.width, w.k + j * w.width, w.width);
  }
  std::fill_n(w.dk, w.keys * w.width, 0.f);
  std::fill_n(w.dv, w.keys * w.width, 0.f);
}

// One head of keys of one batch, and the heads of queries that share it.
void attend(const Call& call, const Workspace& w, int64_t b, int64_t kv_head) {
  const int64_t d = w.width, shared = call.heads / call.kv_heads;
  take_keys(call, w, b, kv_head);
  for (int64_t h = kv_head * shared; h < (kv_head + 1) * shared; h++) {
    const float* mask = call.mask ? call.mask + b * call.mask_strides[0] + h * call.mask_strides[1] : nullptr;
    take_queries(call, w, b, h);
    std::fill_n(w.dq, w.queries * d, 0.f);
    for (int64_t j = 0; j < w.keys; j += kBlock)
      for (int64_t i = call.is_causal ? j : 0; i < w.queries; i += kBlock) {
        call.multiply(w.scores, kBlock, w.k + j * d, d, w.q_pairs + i * d, 2 * kBlock, kBlock, kBlock, d, false);
        call.multiply(w.dp, kBlock, w.v + j * d, d, w.do_pairs + i * d, 2 * kBlock, kBlock, kBlock, d, false);
        probabilities(call, w, mask, j, i);
        call.multiply(w.dv + j * d, d, w.p, kBlock, w.do_rows + i * d, 2 * d, kBlock, d, kBlock, true);
        call.multiply(w.dk + j * d, d, w.ds, kBlock, w.q_rows + i * d, 2 * d, kBlock, d, kBlock, true);
        call.multiply(w.dq + i * d, kBlock, w.k_across + j * d, kBlock, w.ds_pairs, 2 * kBlock, d, kBlock, kBlock, true);
      }
    for (int64_t i = 0; i < call.queries; i += kBlock)
      write_rows(call.grad_query, b, h, w.dq + i * d, 1, kBlock, i, std::min(i + kBlock, call.queries), call.width, call.scale);
  }
  write_rows(call.grad_key, b, kv_head, w.dk, d, 1, 0, call.keys, call.width, call.scale);
  write_rows(call.grad_value, b, kv_head, w.dv, d, 1, 0, call.keys, call.width, 1.f);
}

// sizes: batch, heads, heads of keys, queries, keys, width. Bytes that each thread needs.
extern "C" int64_t mezzo_attention_workspace(const int64_t* sizes) { return Workspace(sizes[4], sizes[3], sizes[5]).lay(nullptr); }

// tensors: query, key, value, out, grad, then where the gradients of the first three go. strides: 3 of each, 3 of the log-sum-exp,
// 4 of the mask [batch, head, key, query], which may be null. workspace: on a multiple of 64 bytes, for each thread what it needs.
extern "C" void mezzo_attention_backward(uint16_t* const* tensors, const float* logsumexp, const float* mask, const int64_t* strides, const int64_t* sizes, float scale, int32_t is_causal, int32_t on_tiles, char* workspace, int32_t threads) {
  Rows rows[8];
  for (int n = 0; n < 8; n++) rows[n] = {tensors[n], strides[3 * n], strides[3 * n + 1], strides[3 * n + 2]};
  const Call call{rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7], logsumexp, mask, strides + 24, strides + 27,
                  sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], scale, is_causal != 0, on_tiles ? multiply_tiles : multiply_pairs};
  const int64_t heads = sizes[0] * sizes[2], bytes = mezzo_attention_workspace(sizes);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t thread = 0; thread < threads; thread++) {  // a share each, so that each has its own memory
    Workspace own(sizes[4], sizes[3], sizes[5]);
    own.lay(workspace + thread * bytes);
    if (on_tiles) begin_tiles();
    for (int64_t n = heads * thread / threads; n < heads * (thread + 1) / threads; n++) attend(call, own, n / sizes[2], n % sizes[2]);
    if (on_tiles) end_tiles();
  }
}
#endif

// What multiplies here: 2 tiles, 1 pairs of bf16, 0 nothing that this is written for.
extern "C" int64_t mezzo_attention_products() { return has_pairs() ? 1 + has_tiles() : 0; }
