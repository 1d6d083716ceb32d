// y += B v in bfloat16 with tiles: tokens times columns, every number of B with both halves of v.
//
// Letters: as in lora_plan.h.

#pragma once

#include <cstring>

#include "lora_columns.h"

namespace lora::tiles {

#if HAS_TILES

// y += sums over the columns of a mask.
inline void add_columns(bf16* y, const float* sums, __mmask32 mask) {
  __m512i row = _mm512_maskz_loadu_epi16(mask, y);
  __m512 left = widened(_mm512_castsi512_si256(row));
  __m512 right = widened(_mm512_extracti64x4_epi64(row, 1));
  left = _mm512_add_ps(left, load(sums));
  right = _mm512_add_ps(right, load(sums + LANES));
  _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

// A block's tokens.
struct Places {
  int64_t tokens[SIDE];
  bf16* rows[SIDE];  // in y
  int64_t count;
};

// A base product's own sums for few rows, to be finished: [T, O], and [O] or null.
struct Kept {
  const float *sums, *bias;
};

// The same for a block, at the columns from `column` that lie before `end`.
inline void add_rows(const Places& y, int64_t column, int64_t end, const float* sums,
                     int64_t stride = STEP_COLUMNS) {
  __mmask32 mask = mask_of(end - column);
  for (int64_t t = 0; t < y.count; ++t)
    add_columns(y.rows[t] + column, sums + t * stride, mask);
}

// One pass of one thread.
struct Expand {
  const Module& m;
  const Step& s;
  const Plan& plan;
  bf16* y;
  int64_t y_stride;
  Kept kept;
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
    for (int64_t t = 0; t < places.count; ++t) {
      places.tokens[t] = tokens[t];
      places.rows[t] = y + tokens[t] * y_stride;
    }
  }

  void pack(const Part& part, int64_t rank, int64_t column, uint32_t* out) const {
    pack_columns(b(part, rank) + column, m.num_slots * m.out_features,
                 std::min(SIDE, part.rank - rank), part.end - column, out);
  }

  // Few tokens: along 16 ranks of B for many columns, then along the next 16.
  void few(const Part& part) {
    int64_t count = std::min(SIDE, s.count(part.g));
    int64_t most = std::max(MAX_SUMS / count / STEP_COLUMNS, (int64_t)1) * STEP_COLUMNS;
    for (int64_t begin = part.begin; begin < part.end; begin += most)
      for (int64_t block = 0; block * SIDE < s.count(part.g); ++block)
        few(part, block, begin, std::min(most, part.end - begin));
  }

  // Some columns for one block.
  void few(const Part& part, int64_t block, int64_t begin, int64_t columns) {
    Places places;
    find_rows(part, block, places);
    shapes.set(places.count);
    float* sums = (float*)sums_of_few.reserve(std::max(MAX_SUMS, SIDE * STEP_COLUMNS));
    uint32_t* tiles = packed.reserve(4 * TILE);
    int64_t width = ceil_div(columns, STEP_COLUMNS) * STEP_COLUMNS;
    int64_t stride = width * (int64_t)sizeof(float);
    if (kept.sums) take(places, begin, width, sums);
    for (int64_t rank = 0; rank < part.rank; rank += SIDE) {
      _tile_loadd(6, v(part, block, rank), v_stride(part));
      for (int64_t i = 0; i <= width; i += STEP_COLUMNS) {
        if (i < width) pack(part, rank, begin + i, tiles + i / STEP_COLUMNS % 2 * 2 * TILE);
        if (!i) continue;
        int64_t used = i - STEP_COLUMNS;
        const uint32_t* tile = tiles + used / STEP_COLUMNS % 2 * 2 * TILE;
        if (rank || kept.sums) {
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
      if (kept.sums)
        finish_rows(places, begin + i, part.end, sums + i, width);
      else
        add_rows(places, begin + i, part.end, sums + i, width);
  }

  void take(const Places& places, int64_t begin, int64_t width, float* sums) const {
    for (int64_t t = 0; t < places.count; ++t)
      memcpy(sums + t * width, kept.sums + places.tokens[t] * m.out_features + begin,
             width * sizeof(float));
  }

  // y = sums + bias at the columns from `column` that lie before `end`.
  void finish_rows(const Places& places, int64_t column, int64_t end, const float* sums,
                   int64_t stride) const {
    __mmask32 mask = mask_of(end - column);
    __m512 left = _mm512_setzero_ps(), right = left;
    if (kept.bias) {
      left = load(kept.bias + column, (__mmask16)mask);
      right = load(kept.bias + column + LANES, (__mmask16)(mask >> LANES));
    }
    for (int64_t t = 0; t < places.count; ++t, sums += stride) {
      __m512 low = _mm512_add_ps(load(sums), left), high = _mm512_add_ps(load(sums + LANES), right);
      _mm512_mask_storeu_epi16(places.rows[t] + column, mask,
                               (__m512i)_mm512_cvtne2ps_pbh(high, low));
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
    // The sums of one place are added while those of the next are computed.
    Places places[2];
    const Places* waiting = nullptr;
    int64_t waiting_column = 0;
    bool is_odd = false;
    for (int64_t block = first; block < last; ++block) {
      Places& own = places[block % 2];
      find_rows(part, block, own);
      for (int64_t i = 0; i < steps; ++i, is_odd = !is_odd) {
        sum_block(part, block, block == total - 1, tiles + i * size, sums[is_odd]);
        if (waiting) add_rows(*waiting, waiting_column, part.end, sums[!is_odd]);
        waiting = &own;
        waiting_column = part.begin + i * STEP_COLUMNS;
      }
    }
    add_rows(*waiting, waiting_column, part.end, sums[!is_odd]);
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

  bool shares_b(int64_t g) const { return kept.sums ? s.count(g) > 0 : is_few(s, g); }

  // Segments of one block, or all where sums are kept, share B out among the threads, in the order
  // of memory.
  void few() {
    int64_t total = 0, place = 0;
    for (int64_t g = 0; g < s.num_segments; ++g)
      if (shares_b(g)) total += size(g);
    Share own(total);
    for (int64_t g = 0; g < s.num_segments && place < own.end; ++g) {
      if (!shares_b(g)) continue;
      int64_t own_size = size(g);
      if (own.begin < place + own_size)
        parts(g, own.begin - place, own.end - place, [&](const Part& part) { few(part); });
      place += own_size;
    }
  }
};

inline void expand(const Module& m, const Step& s, const Plan& plan, bf16* y, int64_t y_stride,
                   Kept kept = {}) {
  static thread_local Scratch packed, sums;
  Expand pass{m, s, plan, y, y_stride, kept, {}, packed, sums};
  pass.few();
  if (!kept.sums) pass.many();
}

#else

struct Kept {
  const float *sums, *bias;
};

inline void expand(const Module&, const Step&, const Plan&, bf16*, int64_t, Kept = {}) {}

#endif

}  // namespace lora::tiles
