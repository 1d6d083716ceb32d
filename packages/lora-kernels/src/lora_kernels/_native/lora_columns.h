// B's columns, packed as the right side of a product with v.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora_tiles.h"

namespace lora::tiles {

#if HAS_TILES

// Those of 32 columns that there are.
inline __mmask32 mask_of(int64_t columns) {
  return columns >= STEP_COLUMNS ? 0xffffffff : (__mmask32)((1ull << columns) - 1);
}

// 32 columns of up to 16 ranks, as two tiles [rank][column][2] with every number twice. What
// follows in memory can be fetched.
template <bool IS_FETCHED = true>
inline void pack_columns(const bf16* b, int64_t stride, int64_t ranks, int64_t columns,
                         uint32_t* out) {
  __mmask32 mask = mask_of(columns);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i left = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x00010001));
  const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(0x00100010));
  int r = 0;
  for (; r < ranks; ++r, b += stride) {
    __m512i row = _mm512_maskz_loadu_epi16(mask, b);
    if (IS_FETCHED) fetch(b);
    _mm512_store_si512(out + r * SIDE, _mm512_permutexvar_epi16(left, row));
    _mm512_store_si512(out + TILE + r * SIDE, _mm512_permutexvar_epi16(right, row));
  }
  for (; r < SIDE; ++r) {
    _mm512_store_si512(out + r * SIDE, _mm512_setzero_si512());
    _mm512_store_si512(out + TILE + r * SIDE, _mm512_setzero_si512());
  }
}

#endif

}  // namespace lora::tiles
