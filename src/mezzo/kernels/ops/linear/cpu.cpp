// y = x w' + b for a few rows of x, in bf16: every weight is read once and multiplied with all rows while it is at hand.
// Products are summed in fp32, lane by lane, then over lanes pair by pair, and the sum is rounded once. Where the processor
// multiplies tiles (AMX), which it is asked when this runs, tiles of weights are multiplied with all rows in one instruction.

#if defined(__clang__)
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")  // the order of the sum is ours to choose, and so is its rounding
#endif

#include <algorithm>
#include <vector>

#include "formats.h"
#include "tiles.h"

#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int64_t kRows = 8;          // of x that a weight is multiplied with once it is read
constexpr int64_t kWeights = 1 << 18;  // of a block that stay in a second-level cache

typedef float Lanes __attribute__((vector_size(4 * kLanes)));

#if defined(__AVX512BF16__)
// Two products in each lane at once. Subnormal inputs count as 0 there, as in torch's own product on such a processor.
#include <immintrin.h>
using Stored = uint16_t;
constexpr int kStep = 2 * kLanes;
typedef __m512bh Chunk;
inline Chunk load_chunk(const uint16_t* p) { return (Chunk)_mm512_loadu_si512(p); }
inline void add_product(Lanes& sum, Chunk w, Chunk x) { sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, w, x); }
inline uint16_t stored(uint16_t x) { return x; }
#else
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
using Stored = float;
constexpr int kStep = kLanes;
typedef Lanes Chunk;
inline Chunk load_chunk(const uint16_t* p) {
  Halves low;
  std::memcpy(&low, p, sizeof low);
#if defined(__AVX512F__)  // in one instruction, which GCC 12 does not find
  const Bits bits = (Bits)_mm512_cvtepu16_epi32((__m256i)low) << 16;
#else
  const Bits bits = __builtin_convertvector(low, Bits) << 16;
#endif
  return (Chunk)bits;
}
inline Chunk load_chunk(const float* p) {
  Chunk x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void add_product(Lanes& sum, Chunk w, Chunk x) { sum += w * x; }
inline float stored(uint16_t x) { return widen_bf16(x); }
#endif

// What suits a first-level cache of 32 KB, and one of 48 KB on a processor that multiplies pairs, where alone it was measured: how many weights of a row
// are taken at a time, so that their part of x stays in the cache; outputs of a thread at a time, whole groups of 3 and of 4; how many groups before
// they are needed weights are called for into the second-level cache, how many weights of a row before into the first (0 is never), and from how many
// rows of x on.
struct Small {
  static constexpr int64_t block = 24, ahead = 8, near = 0, rows = 1;
  template <int M> static constexpr int64_t piece = 12288 / int64_t(sizeof(Stored)) / M / kStep * kStep;
};
struct Large {
  static constexpr int64_t block = 96, ahead = 1, near = 768, rows = 3;
  template <int M> static constexpr int64_t piece = M < rows ? Small::piece<M> : 1024;
};

struct Product {
  const Stored* chunks;  // of x, for each step those of all rows: rows as far apart as weights' would share cache lines' places
  const uint16_t *x, *weight, *bias;
  uint16_t* out;
  int64_t inner, width, apart;  // the chunks of a row, as many as fill lines of the cache, after those of the last one
  int64_t block = 0;  // outputs that a thread takes at a time

  // The rows from one on.
  Product from(int64_t row) const { return {chunks + row * apart, x + row * inner, weight, bias, out + row * width, inner, width, apart, block}; }
};

// Adds to N outputs of M rows their products at k, and calls for as many weights: those at `soon` into the first-level cache, at `later` into the second.
template <class Cache, int M, int N>
inline void add_step(const Product& p, const uint16_t* weight, int64_t k, const uint16_t* soon, const uint16_t* later, Lanes (&sums)[N][M]) {
  Chunk w[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++) {
    if (M >= Cache::rows && Cache::near) __builtin_prefetch(soon + n * p.inner, 0, 3);
    if (M >= Cache::rows) __builtin_prefetch(later + n * p.inner, 0, 2);
    w[n] = load_chunk(weight + n * p.inner + k);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    const Chunk x = load_chunk(p.chunks + k * M + m * kStep);
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) add_product(sums[n][m], w[n], x);
  }
}

// Adds to N outputs of M rows, from `first` on, their products in [begin, end). A later group of outputs begins at `next`.
template <class Cache, int M, int N> inline void add_products(const Product& p, int64_t first, int64_t begin, int64_t end, const uint16_t* next, Lanes* sums) {
  Lanes own[N][M];
  std::memcpy(own, sums, sizeof own);
  const uint16_t* weight = p.weight + first * p.inner;
  const int64_t turn = std::max(begin, end - Cache::near);  // what is soon needed is the next group's from here on
  int64_t k = begin;
  for (; k < turn; k += kStep) add_step<Cache>(p, weight, k, weight + k + Cache::near, next + k - begin, own);
  for (; k < end; k += kStep) add_step<Cache>(p, weight, k, next + k - turn, next + k - begin, own);
  std::memcpy(sums, own, sizeof own);
}

inline float total(Lanes lanes) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)lanes);
#else
  float sums[kLanes];
  std::memcpy(sums, &lanes, sizeof sums);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) sums[i] += sums[i + half];
  return sums[0];
#endif
}

// Writes an output: its sum, what lies beyond the `whole` part of a row, and the bias.
inline void write_output(const Product& p, int64_t whole, int64_t m, int64_t n, float sum) {
  for (int64_t i = whole; i < p.inner; i++) sum += widen_bf16(p.weight[n * p.inner + i]) * widen_bf16(p.x[m * p.inner + i]);
  if (p.bias) sum += widen_bf16(p.bias[n]);
  p.out[m * p.width + n] = narrow_bf16(sum);
}

template <int M> constexpr int64_t kTogether = M > 5 ? 3 : 4;  // outputs whose sums fit the registers

// The outputs in [first, last), one piece of x after the other, so that all rows' piece is read from the nearest cache.
template <class Cache, int M> void outputs(const Product& p, int64_t first, int64_t last) {
  constexpr int N = kTogether<M>;
  constexpr int64_t piece = Cache::template piece<M>;
  const int64_t whole = p.inner / kStep * kStep, groups = std::max<int64_t>(1, (last - first) / N), pieces = (whole + piece - 1) / piece;
  Lanes sums[Cache::block * M];
  std::memset(sums, 0, sizeof(Lanes) * M * (last - first));
  for (int64_t i = 0; i < pieces; i++) {
    const int64_t begin = i * piece, end = std::min(whole, begin + piece);
    int64_t n = first;
    for (int64_t group = i * groups + Cache::ahead; n + N <= last; n += N, group++) {
      const int64_t block = group / groups / pieces, at = first + block * p.block + group % groups * N;
      add_products<Cache, M, N>(p, n, begin, end, p.weight + at * p.inner + group / groups % pieces * piece, sums + (n - first) * M);
    }
    for (; n < last; n++) add_products<Cache, M, 1>(p, n, begin, end, p.weight + n * p.inner + begin, sums + (n - first) * M);
  }
  for (int64_t n = first; n < last; n++)
    for (int m = 0; m < M; m++) write_output(p, whole, m, n, total(sums[(n - first) * M + m]));
}

template <class Cache> void product(Product p, int64_t rows, int32_t threads) {
  using Outputs = void (*)(const Product&, int64_t, int64_t);
  constexpr Outputs of[] = {outputs<Cache, 1>, outputs<Cache, 2>, outputs<Cache, 3>, outputs<Cache, 4>, outputs<Cache, 5>, outputs<Cache, 6>, outputs<Cache, 7>, outputs<Cache, 8>};
  const int64_t together = rows > 5 ? kTogether<8> : kTogether<1>;
  // What more rows than 8 read again lies in the second-level cache.
  const int64_t most = rows > kRows ? std::clamp<int64_t>(kWeights / p.inner, together, Cache::block) : Cache::block;
  const int64_t at_once = most * threads, blocks = (p.width + at_once - 1) / at_once * threads;  // as many for each thread
  p.block = ((p.width + blocks - 1) / blocks + together - 1) / together * together;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < p.width; first += p.block)
    for (int64_t row = 0; row < rows; row += kRows) of[std::min(kRows, rows - row) - 1](p.from(row), first, std::min(p.width, first + p.block));
}

extern "C" void mezzo_linear_forward(
    const uint16_t* x, const uint16_t* weight, uint16_t* out, const uint16_t* bias, int64_t rows, int64_t inner, int64_t width, int32_t threads, int32_t has_large_cache) {
  constexpr int64_t line = 64 / sizeof(Stored);  // no chunk lies across two lines of the cache
  std::vector<Stored> memory(rows * (inner + kStep) + line);
  Stored* chunks = reinterpret_cast<Stored*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  const int64_t apart = (inner + kStep - 1) / kStep * kStep;
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t own = std::min(kRows, rows - first);
    Stored* at = chunks + first * apart;
    for (int64_t k = 0; k + kStep <= inner; k += kStep)
      for (int64_t m = 0; m < own; m++)
        for (int64_t i = 0; i < kStep; i++) at[k * own + m * kStep + i] = stored(x[(first + m) * inner + k + i]);
  }
#if !defined(__AVX512BF16__)
  has_large_cache = 0;
#endif
  (has_large_cache ? product<Large> : product<Small>)({chunks, x, weight, bias, out, inner, width, apart}, rows, threads);
}

#if defined(MEZZO_TILES)
constexpr int kTile = 16;   // outputs, rows of x and pairs of products that a tile holds
constexpr int64_t kPairs = 2 * kTile;

// Sets this thread's tiles: 0 to 3 sums [outputs][rows], 4 and 5 weights [outputs][32], 6 and 7 pairs of x [16][rows][2].
ON_TILES inline void set_tiles_for(int64_t outputs, int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.bytes[tile] = tile / 2 == 2 ? 64 : uint16_t(4 * rows);
    config.rows[tile] = tile < 6 ? uint8_t(outputs) : kTile;
  }
  set_tiles(config);
}

// Up to 16 outputs of all rows, from `first` on, and calls for each weight one step before it is needed.
ON_TILES void tile_outputs(const Product& p, const uint16_t* pairs, int64_t rows, int64_t first, int64_t outputs) {
  const int64_t whole = p.inner / kPairs * kPairs, stride = 2 * p.inner;
  const uint16_t* weight = p.weight + first * p.inner;
  int64_t k = 0;
  set_tiles_for(outputs, rows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
#define ADD_TILE(SUM, W, X, K) \
  { _tile_loadd(W, weight + (K), stride); _tile_loadd(X, pairs + (K) * rows, 4 * rows); _tile_dpbf16ps(SUM, W, X); }
  for (; k + 4 * kPairs <= whole; k += 4 * kPairs) {
    for (int64_t n = 0; n < outputs; n++)
      for (int64_t i = 4; i < 8; i++) __builtin_prefetch(weight + n * p.inner + k + i * kPairs, 0, 2);
    ADD_TILE(0, 4, 6, k)
    ADD_TILE(1, 5, 7, k + kPairs)
    ADD_TILE(2, 4, 6, k + 2 * kPairs)
    ADD_TILE(3, 5, 7, k + 3 * kPairs)
  }
  for (; k < whole; k += kPairs) ADD_TILE(0, 4, 6, k)
#undef ADD_TILE
  float sums[4][kTile * kTile];
  _tile_stored(0, sums[0], 4 * rows);
  _tile_stored(1, sums[1], 4 * rows);
  _tile_stored(2, sums[2], 4 * rows);
  _tile_stored(3, sums[3], 4 * rows);
  _tile_release();
  for (int64_t n = 0; n < outputs; n++)
    for (int64_t m = 0; m < rows; m++) {
      const int64_t i = n * rows + m;
      write_output(p, whole, m, first + n, (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]));
    }
}

// As mezzo_linear_forward, for up to 16 rows, where `has_tiles`.
extern "C" void mezzo_linear_tiles(const uint16_t* x, const uint16_t* weight, uint16_t* out, const uint16_t* bias, int64_t rows, int64_t inner, int64_t width, int32_t threads, int32_t) {
  std::vector<uint16_t> pairs(rows * inner);
  for (int64_t k = 0; k + 2 <= inner; k += 2)
    for (int64_t m = 0; m < rows; m++) std::memcpy(&pairs[(k * rows) + 2 * m], x + m * inner + k, 4);
  const Product p{nullptr, x, weight, bias, out, inner, width, 0};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < width; first += kTile) tile_outputs(p, pairs.data(), rows, first, std::min<int64_t>(kTile, width - first));
}
#endif

// Rows up to which this is faster than torch's product, in measurements: with tiles, with pairs of bf16 in an instruction, and without, where torch may
// have them, or emulates.
extern "C" int32_t mezzo_linear_most_rows(int32_t is_emulated) {
  if (has_tiles()) return 16;
#if defined(__AVX512BF16__)
  return 8;
#else
  return is_emulated ? 4 * kLanes : 4;
#endif
}

// Whether the first-level cache holds 48 KB. Python's own sysconf does not know the name.
extern "C" int32_t mezzo_linear_has_large_cache() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  return sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 * 1024;
#else
  return 0;
#endif
}
