// What torch's bernoulli_ writes on a CPU, of the same random numbers in the same order, and the state that it leaves.
// Source: Matsumoto and Nishimura 1998 (mt19937); torch, aten/src/ATen/core/MT19937RNGEngine.h and DistributionsHelper.h.

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int kWords = 624, kShift = 397;

// As torch's Generator.get_state() begins.
struct State {
  uint64_t seed;
  int32_t left, is_seeded;
  uint64_t next, words[kWords];
};

inline uint32_t mixed(uint32_t one, uint32_t next) {
  return (((one & 0x80000000) | (next & 0x7fffffff)) >> 1) ^ (next & 1 ? 0x9908b0df : 0);
}

inline void twist(uint32_t* words) {
  for (int i = 0; i < kWords - kShift; i++) words[i] = words[i + kShift] ^ mixed(words[i], words[i + 1]);
  for (int i = kWords - kShift; i < kWords - 1; i++) words[i] = words[i + kShift - kWords] ^ mixed(words[i], words[i + 1]);
  words[kWords - 1] = words[kShift - 1] ^ mixed(words[kWords - 1], words[0]);
}

inline uint32_t tempered(uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680;
  word ^= (word << 15) & 0xefc60000;
  return word ^ (word >> 18);
}

// A number is kept where its 53 random bits, of two words, are below `limit`: the chance to be kept times 2^53, rounded up.
template <class Number> void draw(State& state, Number* out, int64_t count, uint64_t limit, Number kept) {
  uint32_t words[kWords], drawn[kWords + 1];
  for (int i = 0; i < kWords; i++) words[i] = uint32_t(state.words[i]);
  int64_t at = state.left == 1 ? kWords : int64_t(state.next), held = 0;
  while (count > 0) {
    if (at == kWords) twist(words), at = 0;
    const int64_t taken = std::min(kWords - at, 2 * count - held), pairs = (held + taken) / 2;
    for (int64_t i = 0; i < taken; i++) drawn[held + i] = tempered(words[at + i]);
    for (int64_t i = 0; i < pairs; i++) {
      const uint64_t bits = uint64_t(drawn[2 * i] & 0x1fffff) << 32 | drawn[2 * i + 1];
      out[i] = bits < limit ? kept : Number(0);
    }
    at += taken, out += pairs, count -= pairs;
    drawn[0] = drawn[held + taken - 1], held = (held + taken) % 2;  // a word whose other one is of the next turn
  }
  for (int i = 0; i < kWords; i++) state.words[i] = words[i];
  state.left = int32_t(kWords + 1 - at), state.next = at;
}

// out: [count] numbers of `width` bytes; kept: their bits where they are not 0. Writes: out and the state.
extern "C" void mezzo_dropout_draw(void* state, void* out, int64_t count, uint64_t limit, uint32_t kept, int32_t width) {
  State& from = *static_cast<State*>(state);
  if (width == 4) draw(from, static_cast<uint32_t*>(out), count, limit, kept);
  else draw(from, static_cast<uint16_t*>(out), count, limit, uint16_t(kept));
}
