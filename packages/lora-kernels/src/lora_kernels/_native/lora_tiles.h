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

#include <cstring>

#include "lora_plan.h"
#include "product.h"

namespace lora::tiles {

#if HAS_TILES

constexpr int64_t SIDE = 16;              // rows of a tile
constexpr int64_t DEPTH = 32;             // inputs of a tile
constexpr int64_t TILE = SIDE * SIDE;     // numbers of 32 bits in a tile
constexpr int64_t FULL_BLOCKS = 3;        // blocks of 16 tokens that share a tile of A
constexpr int64_t STEP_COLUMNS = 32;      // columns of B that are packed together: 64 bytes
constexpr int64_t LONG_COLUMNS = 128;     // columns that many tokens walk along
constexpr int64_t MAX_SUMS = 4096;        // numbers of y that few tokens sum up before they are added

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

// rows[i][j] -> rows[j][i]
inline void transpose(__m512i* rows) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
  for (int j = 0; j < 4; ++j) {
    __m512i low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
    __m512i high = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    __m512i low2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    __m512i high2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    rows[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    rows[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
}

// ---------------------------------------------------------------------------------------------
// First pass

// Ranks [begin, end) of the 16 ranks of a tile; the others count as zeros.
struct Ranks {
  const bf16* first;  // of the tile
  int64_t stride;     // in numbers
  int64_t begin, end;
};

// 32 inputs of 16 ranks, as [pair of inputs][rank][2].
inline void pack_ranks(const Ranks& a, int64_t input, int64_t in_features, uint32_t* out) {
  int64_t left = in_features - input;
  __mmask32 mask = left >= DEPTH ? 0xffffffff : (__mmask32)((1ull << left) - 1);
  __m512i rows[SIDE];
  const bf16* row = a.first + input;
  if (a.begin == 0 && a.end == SIDE) {
    for (int r = 0; r < SIDE; ++r, row += a.stride) {
      rows[r] = _mm512_maskz_loadu_epi16(mask, row);
      fetch(row);
    }
  } else {
    for (int r = 0; r < SIDE; ++r, row += a.stride)
      rows[r] = r >= a.begin && r < a.end ? _mm512_maskz_loadu_epi16(mask, row)
                                          : _mm512_setzero_si512();
  }
  transpose(rows);
  for (int i = 0; i < SIDE; ++i) _mm512_store_si512(out + i * SIDE, rows[i]);
}

struct Rows {
  const bf16* first;
  int64_t stride;  // in bytes, as tile loads want it
};

// One pass of one thread.
struct Shrink {
  const Module& m;
  const Step& s;
  Plan& plan;
  const bf16* x;
  int64_t x_stride;
  Shapes shapes;
  Scratch &packed, &gathered;

  int64_t depth() const { return ceil_div(m.in_features, DEPTH); }

  // A block's tokens, where they are if they follow each other, else copied.
  Rows rows_of(int64_t g, int64_t block, int64_t place) {
    const int64_t* tokens = s.token_idx + s.seg_indptr[g] + block * SIDE;
    int64_t count = std::min(SIDE, s.count(g) - block * SIDE);
    bool is_run = m.in_features % DEPTH == 0 && tokens[count - 1] - tokens[0] == count - 1;
    for (int64_t t = 1; is_run && t < count; ++t) is_run = tokens[t] == tokens[0] + t;
    if (is_run) return {x + tokens[0] * x_stride, x_stride * (int64_t)sizeof(bf16)};
    int64_t width = depth() * DEPTH;
    bf16* copy = (bf16*)gathered.reserve((FULL_BLOCKS + 1) * SIDE * width / 2);
    copy += place * SIDE * width;
    for (int64_t t = 0; t < count; ++t) {
      memcpy(copy + t * width, x + tokens[t] * x_stride, m.in_features * sizeof(bf16));
      memset(copy + t * width + m.in_features, 0, (width - m.in_features) * sizeof(bf16));
    }
    return {copy, width * (int64_t)sizeof(bf16)};
  }

  // Scales a block's sums, and splits them for the second pass.
  void write(const float* sums, int64_t g, int64_t block, int64_t column, const Ranks& a,
             bool is_end) {
    int64_t entry = block * SIDE, count = std::min(SIDE, s.count(g) - entry);
    __mmask16 used = first(a.end) & ~first(a.begin);
    __mmask16 written = is_end ? ~first(a.begin) : used;  // with the zeros behind the last rank
    float* v = plan.v + plan.first[g] + entry * plan.width[g] + column;
    for (int64_t t = 0; t < count; ++t) {
      __m512 sum = _mm512_maskz_loadu_ps(used, sums + t * SIDE);
      if (s.scales)
        sum = _mm512_maskz_mul_ps(used, sum, _mm512_set1_ps(s.scales[s.seg_indptr[g] + entry + t]));
      __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(sum));
      __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(high, 16));
      constexpr int NAN_OR_INFINITE = 0x99;
      __mmask16 is_finite = ~_mm512_fpclass_ps_mask(value, NAN_OR_INFINITE);
      __m512 rest = _mm512_maskz_sub_ps(is_finite, sum, value);
      __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(rest));
      _mm512_mask_storeu_epi32(v + t * plan.width[g], written,
                               _mm512_or_si512(high, _mm512_slli_epi32(low, 16)));
    }
  }

  // Some ranks of a tile for the segment's last block: A is packed and used in one walk.
  void last_block(const Ranks& a, int64_t g, float* sums) {
    constexpr int64_t AHEAD = 4;
    uint32_t* tiles = packed.reserve(2 * AHEAD * TILE);
    Rows rows = rows_of(g, (s.count(g) - 1) / SIDE, FULL_BLOCKS);
    int64_t end = depth();
    _tile_zero(3);
    for (int64_t k = 0; k < end + AHEAD; ++k) {
      if (k < end) pack_ranks(a, k * DEPTH, m.in_features, tiles + k % (2 * AHEAD) * TILE);
      if (k < AHEAD) continue;
      int64_t used = k - AHEAD;
      _tile_loadd(6, rows.first + used * DEPTH, rows.stride);
      _tile_loadd(7, tiles + used % (2 * AHEAD) * TILE, 64);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(3, sums, 64);
  }

  void full_blocks(const uint32_t* tiles, const Rows* rows, float (*sums)[TILE]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t k = 0, end = depth(); k < end; ++k) {
      _tile_loadd(7, tiles + k * TILE, 64);
      _tile_loadd(5, rows[0].first + k * DEPTH, rows[0].stride);
      _tile_dpbf16ps(0, 5, 7);
      _tile_loadd(5, rows[1].first + k * DEPTH, rows[1].stride);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(5, rows[2].first + k * DEPTH, rows[2].stride);
      _tile_dpbf16ps(2, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
  }

  // All ranks of a tile for some blocks of a segment.
  void blocks(const Ranks& a, int64_t g, int64_t begin, int64_t end, int64_t column) {
    alignas(64) float sums[FULL_BLOCKS][TILE];
    int64_t last = (s.count(g) - 1) / SIDE, full_end = std::min(end, last);
    if (begin < full_end) {
      uint32_t* tiles = packed.reserve(depth() * TILE);
      for (int64_t k = 0; k < depth(); ++k)
        pack_ranks(a, k * DEPTH, m.in_features, tiles + k * TILE);
      for (int64_t block = begin; block < full_end; block += FULL_BLOCKS) {
        int64_t count = std::min(FULL_BLOCKS, full_end - block);
        Rows rows[FULL_BLOCKS];
        for (int64_t i = 0; i < FULL_BLOCKS; ++i)
          rows[i] = i < count ? rows_of(g, block + i, i) : rows[count - 1];
        full_blocks(tiles, rows, sums);
        for (int64_t i = 0; i < count; ++i) write(sums[i], g, block + i, column, a, true);
      }
    }
    if (begin <= last && last < end) {
      last_block(a, g, sums[0]);
      write(sums[0], g, last, column, a, true);
    }
  }

  // The tile of ranks from `rank`.
  Ranks ranks_of(int64_t g, int64_t p, int64_t rank) const {
    int64_t slot = s.seg_slots[g], stride = m.num_slices * m.num_slots * m.in_features;
    const bf16* a = (const bf16*)m.a + (p * m.num_slots + slot) * m.in_features;
    return {a + rank * stride, stride, 0, std::min(SIDE, m.rank(slot, p) - rank)};
  }

  // Segments of one block share their ranks out among the threads, in the order of memory.
  void few() {
    int64_t most = 0, total = 0;
    for (int64_t g = 0; g < s.num_segments; ++g)
      if (is_few(s, g))
        for (int64_t p = 0; p < m.num_slices; ++p) {
          int64_t rank = m.rank(s.seg_slots[g], p);
          most = std::max(most, rank);
          total += rank;
        }
    Share own(total);
    alignas(64) float sums[TILE];
    int64_t place = 0;  // of the tile's first rank
    for (int64_t rank = 0; rank < most && place < own.end; rank += SIDE)
      for (int64_t p = 0; p < m.num_slices; ++p)
        for (int64_t g = 0; g < s.num_segments; ++g) {
          if (!is_few(s, g) || m.rank(s.seg_slots[g], p) <= rank) continue;
          Ranks a = ranks_of(g, p, rank);
          int64_t size = a.end, begin = std::max(own.begin - place, (int64_t)0);
          a.begin = begin;
          a.end = std::min(size, own.end - place);
          place += size;
          if (a.begin >= a.end) continue;
          shapes.set(s.count(g));
          last_block(a, g, sums);
          write(sums, g, 0, first_of(m, s.seg_slots[g], p) + rank, a, a.end == size);
        }
  }

  // Longer segments: each thread packs what it needs of A for its blocks.
  void many() {
    for_own_blocks(s, plan, [&](int64_t g, int64_t begin, int64_t end) {
      shapes.set(s.count(g));
      int64_t column = 0;
      for (int64_t p = 0; p < m.num_slices; ++p)
        for (int64_t rank = 0; rank < m.rank(s.seg_slots[g], p); rank += SIDE, column += SIDE)
          blocks(ranks_of(g, p, rank), g, begin, end, column);
    });
  }
};

inline void shrink(const Module& m, const Step& s, Plan& plan, const bf16* x, int64_t x_stride) {
  static thread_local Scratch packed, gathered;
  Shrink pass{m, s, plan, x, x_stride, {}, packed, gathered};
  pass.few();
  pass.many();
}

// ---------------------------------------------------------------------------------------------
// Second pass

// 32 columns of up to 16 ranks, as two tiles [rank][column][2] with every number twice: the columns
// with even numbers, then the others.
inline void pack_columns(const bf16* b, int64_t stride, int64_t ranks, int64_t columns,
                         uint32_t* out) {
  __mmask32 mask = columns >= STEP_COLUMNS ? 0xffffffff : (__mmask32)((1ull << columns) - 1);
  const __m512i pairs = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i even = _mm512_mullo_epi32(pairs, _mm512_set1_epi32(0x00020002));
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(0x00010001));
  int r = 0;
  for (; r < ranks; ++r, b += stride) {
    __m512i row = _mm512_maskz_loadu_epi16(mask, b);
    fetch(b);
    _mm512_store_si512(out + r * SIDE, _mm512_permutexvar_epi16(even, row));
    _mm512_store_si512(out + TILE + r * SIDE, _mm512_permutexvar_epi16(odd, row));
  }
  for (; r < SIDE; ++r) {
    _mm512_store_si512(out + r * SIDE, _mm512_setzero_si512());
    _mm512_store_si512(out + TILE + r * SIDE, _mm512_setzero_si512());
  }
}

// y += sums over at most 32 columns; sums: the even columns, then the others.
template <bool IS_FULL>
inline void add_columns(bf16* y, const float* sums, __mmask32 mask, __m512i order) {
  __m512i row = IS_FULL ? _mm512_loadu_si512(y) : _mm512_maskz_loadu_epi16(mask, y);
  __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(row, 16));
  __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(row, _mm512_set1_epi32(0xffff0000)));
  even = _mm512_add_ps(even, _mm512_loadu_ps(sums));
  odd = _mm512_add_ps(odd, _mm512_loadu_ps(sums + LANES));
  __m512i sum = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
  if (IS_FULL)
    _mm512_storeu_si512(y, sum);
  else
    _mm512_mask_storeu_epi16(y, mask, sum);
}

// The rows of a block in y.
struct Places {
  bf16* rows[SIDE];
  int64_t count;
};

// The same for a block, at the columns from `column` that lie before `end`.
inline void add_rows(const Places& y, int64_t column, int64_t end, const float* sums,
                     int64_t stride = STEP_COLUMNS) {
  const __m512i pairs = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i order = _mm512_or_si512(
      pairs, _mm512_slli_epi32(_mm512_add_epi32(pairs, _mm512_set1_epi32(LANES)), 16));
  if (end - column >= STEP_COLUMNS) {
    for (int64_t t = 0; t < y.count; ++t)
      add_columns<true>(y.rows[t] + column, sums + t * stride, 0, order);
  } else {
    __mmask32 mask = (__mmask32)((1ull << (end - column)) - 1);
    for (int64_t t = 0; t < y.count; ++t)
      add_columns<false>(y.rows[t] + column, sums + t * stride, mask, order);
  }
}

// One pass of one thread.
struct Expand {
  const Module& m;
  const Step& s;
  const Plan& plan;
  bf16* y;
  int64_t y_stride;
  Shapes shapes;
  Scratch &packed, &sums_of_few;

  // Columns [begin, end) of a slice, for one segment.
  struct Part {
    int64_t g, slot, rank, column;  // column: of the slice in v
    int64_t begin, end;             // in y
  };

  const float* v(const Part& part, int64_t block, int64_t rank) const {
    return plan.v + plan.first[part.g] + block * SIDE * plan.width[part.g] + part.column + rank;
  }

  int64_t v_stride(const Part& part) const { return plan.width[part.g] * (int64_t)sizeof(float); }

  const bf16* b(const Part& part, int64_t rank) const {
    return (const bf16*)m.b + (rank * m.num_slots + part.slot) * m.out_features;
  }

  void find_rows(const Part& part, int64_t block, Places& places) const {
    const int64_t* tokens = s.token_idx + s.seg_indptr[part.g] + block * SIDE;
    places.count = std::min(SIDE, s.count(part.g) - block * SIDE);
    for (int64_t t = 0; t < places.count; ++t) places.rows[t] = y + tokens[t] * y_stride;
  }

  void pack(const Part& part, int64_t rank, int64_t column, uint32_t* out) const {
    pack_columns(b(part, rank) + column, m.num_slots * m.out_features,
                 std::min(SIDE, part.rank - rank), part.end - column, out);
  }

  // At most 16 tokens: along 16 ranks of B for many columns, then along the next 16.
  void few(const Part& part) {
    Places places;
    find_rows(part, 0, places);
    int64_t count = places.count;
    int64_t most = std::max(MAX_SUMS / count / STEP_COLUMNS, (int64_t)1) * STEP_COLUMNS;
    float* sums = (float*)sums_of_few.reserve(std::max(MAX_SUMS, SIDE * STEP_COLUMNS));
    uint32_t* tiles = packed.reserve(4 * TILE);
    for (int64_t begin = part.begin; begin < part.end; begin += most) {
      int64_t width = ceil_div(std::min(most, part.end - begin), STEP_COLUMNS) * STEP_COLUMNS;
      int64_t stride = width * (int64_t)sizeof(float);
      for (int64_t rank = 0; rank < part.rank; rank += SIDE) {
        _tile_loadd(6, v(part, 0, rank), v_stride(part));
        for (int64_t i = 0; i <= width; i += STEP_COLUMNS) {
          if (i < width) pack(part, rank, begin + i, tiles + i / STEP_COLUMNS % 2 * 2 * TILE);
          if (!i) continue;
          int64_t used = i - STEP_COLUMNS;
          const uint32_t* tile = tiles + used / STEP_COLUMNS % 2 * 2 * TILE;
          if (rank) {
            _tile_loadd(3, sums + used, stride);
            _tile_loadd(4, sums + used + SIDE, stride);
          } else {
            _tile_zero(3);
            _tile_zero(4);
          }
          _tile_loadd(7, tile, 64);
          _tile_dpbf16ps(3, 6, 7);
          _tile_loadd(7, tile + TILE, 64);
          _tile_dpbf16ps(4, 6, 7);
          _tile_stored(3, sums + used, stride);
          _tile_stored(4, sums + used + SIDE, stride);
        }
      }
      for (int64_t i = 0; i < width; i += STEP_COLUMNS)
        add_rows(places, begin + i, part.end, sums + i, width);
    }
  }

  // The sums of one block for 32 columns, whose tiles of B lie one after the other.
  void sum_block(const Part& part, int64_t block, bool is_last, const uint32_t* tiles,
                 float* sums) const {
    constexpr int64_t STRIDE = STEP_COLUMNS * sizeof(float);
    if (is_last) {
      _tile_zero(3);
      _tile_zero(4);
      for (int64_t rank = 0; rank < part.rank; rank += SIDE, tiles += 2 * TILE) {
        _tile_loadd(6, v(part, block, rank), v_stride(part));
        _tile_loadd(7, tiles, 64);
        _tile_dpbf16ps(3, 6, 7);
        _tile_loadd(7, tiles + TILE, 64);
        _tile_dpbf16ps(4, 6, 7);
      }
      _tile_stored(3, sums, STRIDE);
      _tile_stored(4, sums + SIDE, STRIDE);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t rank = 0; rank < part.rank; rank += SIDE, tiles += 2 * TILE) {
        _tile_loadd(5, v(part, block, rank), v_stride(part));
        _tile_loadd(7, tiles, 64);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, tiles + TILE, 64);
        _tile_dpbf16ps(1, 5, 7);
      }
      _tile_stored(0, sums, STRIDE);
      _tile_stored(1, sums + SIDE, STRIDE);
    }
  }

  // Some columns of B for a thread's blocks of a segment.
  void blocks(const Part& part, int64_t first, int64_t last) {
    alignas(64) float sums[2][SIDE * STEP_COLUMNS];
    int64_t size = 2 * ceil_div(part.rank, SIDE) * TILE, total = ceil_div(s.count(part.g), SIDE);
    int64_t steps = ceil_div(part.end - part.begin, STEP_COLUMNS);
    uint32_t* tiles = packed.reserve(steps * size);
    for (int64_t rank = 0; rank < part.rank; rank += SIDE)
      for (int64_t i = 0; i < steps; ++i)
        pack(part, rank, part.begin + i * STEP_COLUMNS,
             tiles + i * size + rank / SIDE * 2 * TILE);
    // The sums of one place are added while those of the next are computed, and what comes after
    // is fetched.
    Places places[2];
    bool is_odd = false;
    int64_t before = part.begin;  // the column of the sums that wait to be added
    for (int64_t block = first; block < last; ++block) {
      Places &own = places[block % 2], &other = places[(block + 1) % 2];
      if (block == first) find_rows(part, block, own);
      for (int64_t i = 0; i < steps; ++i, is_odd = !is_odd) {
        sum_block(part, block, block == total - 1, tiles + i * size, sums[is_odd]);
        if (i) {
          add_rows(own, part.begin + (i - 1) * STEP_COLUMNS, part.end, sums[!is_odd]);
        } else {
          if (block > first) add_rows(other, before, part.end, sums[!is_odd]);
          find_rows(part, std::min(block + 1, last - 1), other);
        }
        for (int64_t t = 0; t < other.count; ++t)
          _mm_prefetch((const char*)(other.rows[t] + part.begin + i * STEP_COLUMNS), _MM_HINT_T0);
      }
      before = part.begin + (steps - 1) * STEP_COLUMNS;
    }
    add_rows(places[(last - 1) % 2], before, part.end, sums[!is_odd]);
  }

  // Longer segments, from the last columns to the first: the base's product came along here before
  // and has left the last ones in the cache.
  void many() {
    for (int64_t p = m.num_slices - 1; p >= 0; --p) {
      int64_t begin = m.ranges[p], width = m.ranges[p + 1] - begin;
      for (int64_t column = (width - 1) / LONG_COLUMNS * LONG_COLUMNS; column >= 0;
           column -= LONG_COLUMNS)
        for_own_blocks(s, plan, [&](int64_t g, int64_t first, int64_t last) {
          int64_t slot = s.seg_slots[g], rank = m.rank(slot, p);
          if (!rank) return;
          shapes.set(s.count(g));
          blocks({g, slot, rank, first_of(m, s.seg_slots[g], p), begin + column,
                  begin + std::min(width, column + LONG_COLUMNS)}, first, last);
        });
    }
  }

  // Calls work(part) for the columns of a segment between two places in its part of B.
  template <typename F>
  void parts(int64_t g, int64_t begin, int64_t end, F work) {
    int64_t slot = s.seg_slots[g], column = 0;
    for (int64_t p = 0; p < m.num_slices; ++p) {
      int64_t rank = m.rank(slot, p), width = m.ranges[p + 1] - m.ranges[p];
      if (!rank) continue;
      auto cut = [&](int64_t place) {
        if (place >= rank * width) return width;
        return std::max(place, (int64_t)0) / rank / STEP_COLUMNS * STEP_COLUMNS;
      };
      Part part{g, slot, rank, column, m.ranges[p] + cut(begin), m.ranges[p] + cut(end)};
      if (part.begin < part.end) work(part);
      begin -= rank * width;
      end -= rank * width;
      column += padded(rank);
    }
  }

  int64_t size(int64_t g) const {
    int64_t sum = 0;
    for (int64_t p = 0; p < m.num_slices; ++p)
      sum += m.rank(s.seg_slots[g], p) * (m.ranges[p + 1] - m.ranges[p]);
    return sum;
  }

  // Segments of one block share B out among the threads, in the order of memory.
  void few() {
    int64_t total = 0, place = 0;
    for (int64_t g = 0; g < s.num_segments; ++g)
      if (is_few(s, g)) total += size(g);
    Share own(total);
    for (int64_t g = 0; g < s.num_segments && place < own.end; ++g) {
      if (!is_few(s, g)) continue;
      int64_t own_size = size(g);
      if (own.begin < place + own_size) {
        shapes.set(s.count(g));
        parts(g, own.begin - place, own.end - place, [&](const Part& part) { few(part); });
      }
      place += own_size;
    }
  }
};

inline void expand(const Module& m, const Step& s, const Plan& plan, bf16* y, int64_t y_stride) {
  static thread_local Scratch packed, sums;
  Expand pass{m, s, plan, y, y_stride, {}, packed, sums};
  pass.few();
  pass.many();
}

#else

inline bool is_available() { return false; }
inline void shrink(const Module&, const Step&, Plan&, const bf16*, int64_t) {}
inline void expand(const Module&, const Step&, const Plan&, bf16*, int64_t) {}

#endif

}  // namespace lora::tiles
