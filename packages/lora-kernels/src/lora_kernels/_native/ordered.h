// Numbers of bfloat16 as integers in their order, 32 at once.

#pragma once

#include "simd.h"

#include <algorithm>

namespace ordered {

constexpr int64_t SIZE = 32;
constexpr int16_t INFINITE = 0x7f80;  // also the largest of the bits without the sign, but for NaN

// Bits -> integers: those of positive numbers have the order of their values, and those of negative
// ones have it once all but the sign are turned over. 0 and -0 are equal.
inline __m512i from_bits(__m512i bits) {
  constexpr int XOR_AND = 0x78;  // a ^ (b & c)
  const __m512i rest = _mm512_set1_epi16(0x7fff), negative_zero = _mm512_set1_epi16(-1);
  __m512i sign = _mm512_srai_epi16(bits, 15);
  __m512i order = _mm512_ternarylogic_epi32(bits, sign, rest, XOR_AND);
  return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(order, negative_zero), order);
}

// The sizes of numbers, which grow with the running largest `sizes`.
inline __m512i larger_sizes(__m512i sizes, __m512i bits) {
  return _mm512_max_epi16(sizes, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
}

inline int16_t largest(__m512i numbers) {
  alignas(64) int16_t all[SIZE];
  _mm512_store_si512(all, numbers);
  return *std::max_element(all, all + SIZE);
}

// Whether none of the numbers whose `larger_sizes` these are was NaN.
inline bool are_numbers(__m512i sizes) { return largest(sizes) <= INFINITE; }

inline bool is_finite(int16_t order) { return order < INFINITE && order > (int16_t)~INFINITE; }

// Where a number stands first among 32 that have it.
inline int64_t first_place(__m512i order, int16_t number) {
  return __builtin_ctz(_mm512_cmpeq_epi16_mask(order, _mm512_set1_epi16(number)));
}

}  // namespace ordered
