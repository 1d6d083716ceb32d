// The largest number of each row, and whether all of it are numbers.

#pragma once

#include "ordered.h"

namespace rows {

struct Largest {
  int64_t place;   // of the first one, where the row is finite
  bool is_finite;  // no number is NaN, and the largest is not infinite
};

template <typename T>
Largest find_largest_value(const T* x, int64_t width) {
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

// Numbers between two looks at what is the largest so far, and numbers asked for ahead.
constexpr int64_t BLOCK = 64 * ordered::SIZE, AHEAD = 1024;

// bfloat16 by its bits, 32 at once; `width` is a multiple of that. Rows side by side: memory that is
// in no near cache answers several streams of requests sooner than one. 64 rows of 49152 took a
// sixth less time by fours.
template <int ROWS>
bool find_largest_bits(const bf16* x, int64_t stride, int64_t width, int64_t* places) {
  __m512i sizes = _mm512_setzero_si512();
  int16_t best[ROWS];
  int64_t block[ROWS] = {};  // the first one with the best number
  std::fill_n(best, ROWS, INT16_MIN);
  for (int64_t begin = 0; begin < width; begin += BLOCK) {
    __m512i most[ROWS];
    for (__m512i& row : most) row = _mm512_set1_epi16(INT16_MIN);
    for (int64_t i = begin; i < std::min(begin + BLOCK, width); i += ordered::SIZE)
      for (int r = 0; r < ROWS; ++r) {
        const bf16* here = x + r * stride + i;
        prefetch<1>(here + AHEAD);
        __m512i bits = _mm512_loadu_si512(here);
        sizes = ordered::larger_sizes(sizes, bits);
        most[r] = _mm512_max_epi16(most[r], ordered::from_bits(bits));
      }
    for (int r = 0; r < ROWS; ++r) {
      int16_t found = ordered::largest(most[r]);
      if (found > best[r]) best[r] = found, block[r] = begin;
    }
  }
  bool are_finite = ordered::are_numbers(sizes);
  for (int r = 0; r < ROWS; ++r) are_finite &= ordered::is_finite(best[r]);
  for (int r = 0; r < ROWS && are_finite; ++r)
    for (int64_t i = block[r];; i += ordered::SIZE) {
      __m512i order = ordered::from_bits(_mm512_loadu_si512(x + r * stride + i));
      if (!_mm512_cmpeq_epi16_mask(order, _mm512_set1_epi16(best[r]))) continue;
      places[r] = i + ordered::first_place(order, best[r]);
      break;
    }
  return are_finite;
}

// Writes the first place of each row's largest number; false where a row has none, or has a NaN.
template <typename T>
bool find_largest(const T* x, int64_t stride, int64_t num_rows, int64_t width, int64_t* places) {
  bool are_finite = true;
  int64_t t = 0;
  if constexpr (std::is_same_v<T, bf16>)
    if (width % ordered::SIZE == 0) {
      for (; t + 4 <= num_rows; t += 4)
        are_finite &= find_largest_bits<4>(x + t * stride, stride, width, places + t);
      for (; t < num_rows; ++t)
        are_finite &= find_largest_bits<1>(x + t * stride, stride, width, places + t);
    }
  for (; t < num_rows; ++t) {
    Largest found = find_largest_value(x + t * stride, width);
    places[t] = found.place;
    are_finite &= found.is_finite;
  }
  return are_finite;
}

}  // namespace rows
