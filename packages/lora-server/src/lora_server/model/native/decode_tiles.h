// Scores of decoding queries with AMX tiles, for decode.h: bfloat16, widths that are multiples of
// 32, at most 16 query heads a key head.
//
// Letters: D head width.

#pragma once

#include "decode_segment.h"
#include "tiles.h"

namespace attention {

#if HAS_TILES

// The queries of one sequence. Key heads are taken in bundles whose query heads fill the columns
// of a tile; each has a tile of its own, so that no head's numbers reach another's.
class QueryTiles {
 public:
  void take(const bf16* query, int64_t query_head, int64_t num_kv_heads, int64_t groups,
            int64_t width) {
    groups_ = groups, depth_ = width / DEPTH, bundle_ = TILE / groups;
    packed_ = buffer_.of(num_kv_heads * depth_ * TILE_SIZE);
    memset(packed_, 0, num_kv_heads * depth_ * TILE_SIZE * sizeof(bf16));
    for (int64_t head = 0; head < num_kv_heads * groups; ++head) {
      int64_t kv_head = head / groups, column = head % (bundle_ * groups);
      bf16* tile = packed_ + kv_head * depth_ * TILE_SIZE + 2 * column;
      for (int64_t d = 0; d < width; d += 2)
        memcpy(tile + d * TILE, query + head * query_head + d, 2 * sizeof(bf16));
    }
  }

  // scores[head][k] = query of the head . key k; rows of SEGMENT numbers.
  void score(const Segment<bf16>& s, float* scores) const {
    int64_t row = s.num_kv_heads * s.width;
    bf16* copy = copy_buffer_.of(TILE * row);
    for (int64_t k = 0; k < s.count; k += TILE) {
      s.fetch(k + LANES);
      const bf16* first = s.keys[k];
      int64_t stride = s.keys[k + 1] - first;
      bool is_even = stride > 0;
      for (int64_t i = 2; i < TILE; ++i) is_even &= s.keys[k + i] - first == i * stride;
      if (!is_even) {  // keys of several blocks, or fewer than a tile's
        for (int64_t i = 0; i < TILE; ++i)
          memcpy(copy + i * row, s.keys[k + i], row * sizeof(bf16));
        first = copy, stride = row;
      }
      for (int64_t head = 0; head < s.num_kv_heads; head += bundle_)
        score_bundle(first, stride, head, std::min(bundle_, s.num_kv_heads - head), s.width,
                     scores + head * groups_ * SEGMENT + k);
    }
  }

 private:
  void score_bundle(const bf16* keys, int64_t stride, int64_t first_head, int64_t num_heads,
                    int64_t width, float* scores) const {
    alignas(64) float found[TILE][TILE * TILE];  // of each key head: [16 keys][16 columns]
    asm volatile("" ::: "memory");               // tile loads do not say that they read memory
    for (int64_t head = 0; head < num_heads; ++head) {
      const bf16* tile = packed_ + (first_head + head) * depth_ * TILE_SIZE;
      _tile_zero(0);
      for (int64_t k = 0; k < depth_; ++k) {
        _tile_loadd(1, keys + (first_head + head) * width + k * DEPTH, stride * sizeof(bf16));
        _tile_loadd(2, tile + k * TILE_SIZE, 64);
        _tile_dpbf16ps(0, 1, 2);
      }
      _tile_stored(0, found[head], 64);
    }
    __m512i rows[TILE];
    for (int64_t i = 0; i < TILE; ++i) {
      rows[i] = _mm512_load_si512(found[0] + i * TILE);
      for (int64_t head = 1; head < num_heads; ++head)
        rows[i] = _mm512_mask_load_epi32(rows[i], (__mmask16)(0xffff << head * groups_),
                                         found[head] + i * TILE);
    }
    transpose(rows);
    for (int64_t column = 0; column < num_heads * groups_; ++column)
      _mm512_storeu_si512(scores + column * SEGMENT, rows[column]);
  }

  int64_t groups_ = 1, depth_ = 0, bundle_ = 1;
  bf16* packed_ = nullptr;  // [K, D / 32][16 pairs of numbers][16 columns][2]
  static inline thread_local Buffer<bf16> buffer_, copy_buffer_;
};

#endif

}  // namespace attention
