// A base product's sums in float32, kept for B v to be added: for few rows of many adapters, where
// B is read along its rows, which a product's order of outputs would not allow.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora_expand.h"
#include "lora_pieces.h"
#include "product.h"

namespace lora::tiles {

constexpr int64_t MAX_KEPT_ROWS = 128;  // so that sums stay in L2

// Whether a step's rows go this way: a tile has them of more adapters than two.
inline bool is_kept(const Pieces& pieces, int64_t num_rows) {
  int64_t tiles = ceil_div(num_rows, SIDE);
  return tiles == 1 || (num_rows <= MAX_KEPT_ROWS && (int64_t)pieces.all.size() > 2 * tiles);
}

#if HAS_TILES

// Whether B v is added to all of a step's rows, in all slices.
inline bool is_all(const Module& m, const Step& s, int64_t num_rows) {
  int64_t num_entries = s.seg_indptr[s.num_segments];
  for (int64_t g = 0; g < s.num_segments; ++g)
    for (int64_t p = 0; p < m.num_slices; ++p)
      if (!m.rank(s.seg_slots[g], p)) return false;
  return num_entries == num_rows;
}

// See product::Rounding.
struct Keeping {
  float* kept;  // [T, O]
  bool is_all;  // else y is written as well, for rows that nothing is added to

  void begin_rows(const product::Task&, int64_t, int64_t) {}

  void finish(const product::Task& t, product::Sums* sums, int64_t row_tile, int64_t count,
              int64_t out_tile, int64_t out_count) {
    product::store_sums(sums);
    for (int64_t i = 0; i < count; ++i) keep(t, sums + 2 * i, row_tile + i, out_tile, out_count);
  }

  void finish_few(const product::Task& t, const product::Sums* sums, int64_t out_tile,
                  int64_t out_count) {
    keep(t, sums, 0, out_tile, out_count);
  }

  void keep(const product::Task& t, const product::Sums* sums, int64_t row_tile, int64_t out_tile,
            int64_t count) const {
    if (!is_all) t.write_out(sums, row_tile, out_tile, count);
    float* to = kept + row_tile * SIDE * t.p.num_out + out_tile * SIDE;
    for (int64_t row = 0; row < t.rows_of(row_tile); ++row, to += t.p.num_out)
      for (int64_t i = 0; i < count; ++i) store(to + i * SIDE, load(sums[i] + row * SIDE));
  }
};

#endif

}  // namespace lora::tiles
