// LoRA's two passes in bfloat16 with AMX tiles.
//
// A tile holds 16 tokens, 16 ranks or 16 output columns. Sums are in float32. v has 16 bits of
// significand: each number is the sum of two of bfloat16, which are the pairs that the second pass
// multiplies with the same number of B.
//
// At few tokens a step reads A and B once and little else. Both passes walk them as they lie in
// memory, along 16 ranks at once: 16 streams with long runs, which the processor fetches ahead.
//
// Letters: as in lora_plan.h.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "lora_plan.h"
#include "product.h"

namespace lora::tiles {

#if HAS_TILES

constexpr int64_t SIDE = 16;           // rows of a tile
constexpr int64_t DEPTH = 32;          // inputs of a tile
constexpr int64_t TILE = SIDE * SIDE;  // numbers of 32 bits in a tile
constexpr int64_t FULL_BLOCKS = 3;     // blocks of 16 tokens that share a tile of A
constexpr int64_t STEP_COLUMNS = 32;   // columns of B that are packed together: 64 bytes
constexpr int64_t LONG_COLUMNS = 512;  // columns that many tokens share; with 128 a tenth slower
constexpr int64_t MAX_SUMS = 4096;     // numbers of y that few tokens sum up before adding them

// Asks the system for the tile registers, once.
inline bool is_available() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)
  static const bool available = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return available;
}

// A buffer of this thread that only grows, aligned to whole cache lines.
struct Scratch {
  std::vector<uint32_t> storage;

  uint32_t* reserve(int64_t size) {
    if ((int64_t)storage.size() < size + LANES) storage.resize(size + LANES);
    return (uint32_t*)(((uintptr_t)storage.data() + 63) / 64 * 64);
  }
};

// The shapes of the tile registers. A segment's last block has `last` tokens, the others 16.
//   0, 1, 2: sums of full blocks   3, 4: sums of the last block
//   5: tokens of a full block      6: tokens of the last block       7: A or B
struct Shapes {
  int64_t last = 0;

  void set(int64_t count) {
    int64_t wanted = (count - 1) % SIDE + 1;
    if (wanted == last) return;
    last = wanted;
    product::TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = SIDE, config.row_bytes[tile] = 64;
    for (int tile : {3, 4, 6}) config.rows[tile] = (uint8_t)last;
    _tile_loadconfig(&config);
  }

  ~Shapes() {
    if (last) _tile_release();
  }
};

// The place of a slice in v.
inline int64_t first_of(const Module& m, int64_t slot, int64_t p) {
  int64_t place = 0;
  for (int64_t q = 0; q < p; ++q) place += padded(m.rank(slot, q));
  return place;
}

// Segments of a single block: bound by reading A and B.
inline bool is_few(const Step& s, int64_t g) { return s.count(g) > 0 && s.count(g) <= SIDE; }

// Calls work(segment, begin, end) for this thread's blocks of the longer segments, whose work is
// shared out evenly: the same blocks in both passes.
template <typename F>
void for_own_blocks(const Step& s, const Plan& plan, F work) {
  auto tiles_of = [&](int64_t g) { return s.count(g) > SIDE ? plan.width[g] / SIDE : 0; };
  int64_t total = 0, place = 0;
  for (int64_t g = 0; g < s.num_segments; ++g) total += tiles_of(g) * ceil_div(s.count(g), SIDE);
  Share own(total);
  for (int64_t g = 0; g < s.num_segments; ++g) {
    int64_t tiles = tiles_of(g), blocks = ceil_div(s.count(g), SIDE);
    if (!tiles) continue;
    int64_t begin = std::clamp((own.begin - place) / tiles, (int64_t)0, blocks);
    int64_t end = std::clamp((own.end - place) / tiles, (int64_t)0, blocks);
    if (begin < end) work(g, begin, end);
    place += tiles * blocks;
  }
}

// Fetches what follows in a stream of A or B: the next slice's or slot's numbers at a row's end.
inline void fetch(const bf16* place) {
  constexpr int64_t AHEAD = 512;  // bytes; 1024 gained nothing more
  _mm_prefetch((const char*)place + AHEAD, _MM_HINT_T0);
}

#else

inline bool is_available() { return false; }

#endif

}  // namespace lora::tiles
