// The largest number of a row, and whether all of it are numbers.

#pragma once

#include "simd.h"

namespace rows {

struct Largest {
  int64_t place;   // of the first one, where the row is finite
  bool is_finite;  // no number is NaN, and the largest is not infinite
};

template <typename T>
Largest find_largest(const T* x, int64_t width) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512 best = lowest;
  __m512i places = lanes, here = lanes;
  __mmask16 is_nan = 0;
  auto look = [&](__m512 value) {
    __mmask16 is_larger = _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ);
    is_nan |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    best = _mm512_mask_mov_ps(best, is_larger, value);
    places = _mm512_mask_mov_epi32(places, is_larger, here);
    here = _mm512_add_epi32(here, _mm512_set1_epi32(LANES));
  };
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) look(load(x + i));
  if (i < width) {
    __mmask16 mask = first(width - i);
    look(_mm512_mask_mov_ps(lowest, mask, load(x + i, mask)));
  }
  float largest = _mm512_reduce_max_ps(best);
  __mmask16 are_equal = _mm512_cmp_ps_mask(best, _mm512_set1_ps(largest), _CMP_EQ_OQ);
  bool is_finite = !is_nan && largest - largest == 0;
  return {is_finite ? _mm512_mask_reduce_min_epi32(are_equal, places) : 0, is_finite};
}

}  // namespace rows
