// v = A x in bfloat16 with tiles: tokens times ranks, A packed as a product wants its right side.
//
// Letters: as in lora_plan.h.

#pragma once

#include <cstring>

#include "lora_tiles.h"

namespace lora::tiles {

#if HAS_TILES

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
    for (int r = 0; r < SIDE; ++r, row += a.stride) {
      rows[r] = _mm512_setzero_si512();
      if (r < a.begin || r >= a.end) continue;
      rows[r] = _mm512_maskz_loadu_epi16(mask, row);
      fetch(row);
    }
  }
  transpose(rows);
  for (int i = 0; i < SIDE; ++i) _mm512_store_si512(out + i * SIDE, rows[i]);
}

// A token's sums, scaled and split for the second pass; zeros where `used` is not set.
inline __m512i split(const float* sums, __mmask16 used, const float* scale) {
  __m512 sum = _mm512_maskz_loadu_ps(used, sums);
  if (scale) sum = _mm512_maskz_mul_ps(used, sum, _mm512_set1_ps(*scale));
  __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(sum));
  __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(high, 16));
  constexpr int NAN_OR_INFINITE = 0x99;
  __mmask16 is_finite = ~_mm512_fpclass_ps_mask(value, NAN_OR_INFINITE);
  __m512 rest = _mm512_maskz_sub_ps(is_finite, sum, value);
  __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(rest));
  return _mm512_or_si512(high, _mm512_slli_epi32(low, 16));
}

// The tile of ranks from `rank`.
inline Ranks ranks_of(const Module& m, const Step& s, int64_t g, int64_t p, int64_t rank) {
  int64_t slot = s.seg_slots[g], stride = m.num_slices * m.num_slots * m.in_features;
  const bf16* a = (const bf16*)m.a + (p * m.num_slots + slot) * m.in_features;
  return {a + rank * stride, stride, 0, std::min(SIDE, m.rank(slot, p) - rank)};
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

  // Puts a block's sums into v.
  void write(const float* sums, int64_t g, int64_t block, int64_t column, const Ranks& a,
             bool is_end) {
    int64_t entry = block * SIDE, count = std::min(SIDE, s.count(g) - entry);
    __mmask16 used = first(a.end) & ~first(a.begin);
    __mmask16 written = is_end ? ~first(a.begin) : used;  // with the zeros behind the last rank
    float* v = plan.v + plan.first[g] + entry * plan.width[g] + column;
    const float* scales = s.scales ? s.scales + s.seg_indptr[g] + entry : nullptr;
    for (int64_t t = 0; t < count; ++t)
      _mm512_mask_storeu_epi32(v + t * plan.width[g], written,
                               split(sums + t * SIDE, used, scales ? scales + t : nullptr));
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
          Ranks a = ranks_of(m, s, g, p, rank);
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
          blocks(ranks_of(m, s, g, p, rank), g, begin, end, column);
    });
  }
};

inline void shrink(const Module& m, const Step& s, Plan& plan, const bf16* x, int64_t x_stride) {
  static thread_local Scratch packed, gathered;
  Shrink pass{m, s, plan, x, x_stride, {}, packed, gathered};
  pass.few();
  pass.many();
}

#else

inline void shrink(const Module&, const Step&, Plan&, const bf16*, int64_t) {}

#endif

}  // namespace lora::tiles
