// y += B v in bfloat16 with tiles: tokens times columns, every number of B with both halves of v.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora_tiles.h"

namespace lora::tiles {

#if HAS_TILES

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

inline void expand(const Module&, const Step&, const Plan&, bf16*, int64_t) {}

#endif

}  // namespace lora::tiles
