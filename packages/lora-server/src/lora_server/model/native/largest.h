// The largest number of a row, and whether all of it are numbers.

#pragma once

#include "simd.h"

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

inline Largest find_largest(const float* x, int64_t width) { return find_largest_value(x, width); }

// bfloat16 by its bits, 32 at once: those of positive numbers have the order of their values, and
// those of negative ones have it once all but the sign are turned over.
struct Bits {
  static constexpr int64_t SIZE = 32, BLOCK = 64 * SIZE;
  static constexpr int64_t AHEAD = 32 << 10;  // numbers; with 8 << 10 a tenth slower
  static constexpr int16_t INFINITE = 0x7f80;

  static __m512i ordered(__m512i bits) {
    constexpr int XOR_AND = 0x78;  // a ^ (b & c)
    __m512i sign = _mm512_srai_epi16(bits, 15);
    return _mm512_ternarylogic_epi32(bits, sign, _mm512_set1_epi16(0x7fff), XOR_AND);
  }

  static int16_t largest(__m512i numbers) {
    alignas(64) int16_t all[SIZE];
    _mm512_store_si512(all, numbers);
    return *std::max_element(all, all + SIZE);
  }
};

inline Largest find_largest(const bf16* x, int64_t width) {
  if (width % Bits::SIZE) return find_largest_value(x, width);
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i sizes = _mm512_setzero_si512();
  int16_t best = INT16_MIN;
  int64_t block = 0;  // the first one with the best number
  for (int64_t begin = 0; begin < width; begin += Bits::BLOCK) {
    __m512i most = _mm512_set1_epi16(INT16_MIN);
    for (int64_t i = begin; i < std::min(begin + Bits::BLOCK, width); i += Bits::SIZE) {
      prefetch<2>(x + i + Bits::AHEAD);
      __m512i bits = _mm512_loadu_si512(x + i);
      sizes = _mm512_max_epi16(sizes, _mm512_and_si512(bits, magnitude));
      most = _mm512_max_epi16(most, Bits::ordered(bits));
    }
    int16_t found = Bits::largest(most);
    if (found > best) best = found, block = begin;
  }
  // 0 and -0 are equal, but not their bits.
  if (best == 0 || best == -1) return find_largest_value(x, width);
  bool is_number = Bits::largest(sizes) <= Bits::INFINITE;
  bool is_finite = is_number && best < Bits::INFINITE && best > (int16_t)~Bits::INFINITE;
  if (!is_finite) return {0, false};
  for (int64_t i = block;; i += Bits::SIZE) {
    __m512i order = Bits::ordered(_mm512_loadu_si512(x + i));
    __mmask32 are_equal = _mm512_cmpeq_epi16_mask(order, _mm512_set1_epi16(best));
    if (are_equal) return {i + __builtin_ctz(are_equal), true};
  }
}

}  // namespace rows
