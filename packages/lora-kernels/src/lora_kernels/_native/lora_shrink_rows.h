// v = A x in bfloat16 for whole tiles of rows: a product over a segment's A, packed by the thread
// whose rows they are. Nothing is shared, so that no thread waits for another one.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora_pieces.h"
#include "lora_shrink.h"
#include "product.h"

namespace lora::tiles {

#if HAS_TILES

// What becomes of the sums of one segment: see product::Rounding.
struct Values {
  const Step& s;
  const Plan& plan;
  const Pieces& pieces;
  int64_t g = 0;
  std::vector<__mmask16> used = {};  // ranks of each tile of A

  void finish(const product::Task& t, product::Sums* sums, int64_t row_tile, int64_t count,
              int64_t rank_tile, int64_t rank_count) {
    product::store_sums(sums);
    for (int64_t i = 0; i < count; ++i)
      for (const Piece* piece = pieces.begin(row_tile + i); piece < pieces.end(row_tile + i);
           ++piece)
        if (piece->segment == g)
          for (int64_t j = 0; j < rank_count; ++j)
            write(*piece, sums[2 * i + j] + piece->row * SIDE, rank_tile + j);
  }

  void write(const Piece& piece, const float* sums, int64_t rank_tile) const {
    float* v = plan.v + plan.first[g] + piece.entry * plan.width[g] + rank_tile * SIDE;
    const float* scales = s.scales ? s.scales + s.seg_indptr[g] + piece.entry : nullptr;
    for (int64_t t = 0; t < piece.count; ++t)
      _mm512_storeu_si512(v + t * plan.width[g],
                          split(sums + t * SIDE, used[rank_tile], scales ? scales + t : nullptr));
  }
};

// Row tiles `begin` to `end`, by one thread. Inputs are a multiple of 32.
inline void shrink_rows(const Module& m, const Step& s, const Plan& plan, const Pieces& pieces,
                        const product::Input& x, int64_t begin, int64_t end) {
  static thread_local Scratch packed;
  if (begin == end) return;
  product::configure();
  Values values{s, plan, pieces};
  int64_t depth = m.in_features / DEPTH;
  const Piece *piece = pieces.begin(begin), *last = pieces.end(end - 1);
  while (piece < last) {
    int64_t g = values.g = piece->segment, first_tile = piece->tile, last_tile = first_tile;
    for (; piece < last && piece->segment == g; ++piece) last_tile = piece->tile;
    uint32_t* tile = packed.reserve(plan.width[g] / SIDE * depth * TILE);
    product::Packed a{(const bf16*)tile, nullptr, plan.width[g], m.in_features};
    values.used.clear();
    for (int64_t p = 0; p < m.num_slices; ++p)
      for (int64_t rank = 0; rank < m.rank(s.seg_slots[g], p); rank += SIDE) {
        Ranks ranks = ranks_of(m, s, g, p, rank);
        values.used.push_back(first(ranks.end));
        for (int64_t k = 0; k < depth; ++k, tile += TILE)
          pack_ranks(ranks, k * DEPTH, m.in_features, tile);
      }
    product::Task task{a, x, nullptr, 0, depth, ceil_div(x.num_rows, SIDE), a.num_out / SIDE};
    constexpr int64_t MOST = 2 * product::MAX_PAIRS;
    for (int64_t t = first_tile; t <= last_tile; t += MOST)
      for (int64_t rank_tile = 0; rank_tile < task.out_tiles; rank_tile += 2)
        product::multiply_block<0>(task, rank_tile, t, std::min(t + MOST, last_tile + 1), {},
                                   values);
  }
}

#endif

}  // namespace lora::tiles
