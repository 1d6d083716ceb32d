// Sixteen registers of sixteen 32-bit numbers at once.

#pragma once

#include "simd.h"

// rows[i][j] -> rows[j][i]
inline void transpose(__m512i* rows) {
  __m512i pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
      fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
  // Now fours[4 a + j] holds columns j, 4 + j, 8 + j, 12 + j of rows 4 a to 4 a + 3.
  for (int j = 0; j < 4; ++j) {
    __m512i low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
    __m512i high = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    __m512i low2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    __m512i high2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    rows[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    rows[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
}

// Lane i of the result is `combine` over all lanes of rows[i]; the order is fixed.
template <typename F>
__m512 combine_each(const __m512* rows, F combine) {
  __m512 halves[8], fours[4];
  auto join = [&](__m512 a, __m512 b) {  // lanes 2k of a and b interleaved with lanes 2k + 1
    return combine(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  auto join_pairs = [&](__m512 a, __m512 b) {
    __m512d left = _mm512_castps_pd(a), right = _mm512_castps_pd(b);
    return combine(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                   _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  };
  for (int i = 0; i < 8; ++i) halves[i] = join(rows[2 * i], rows[2 * i + 1]);
  // Every 128 bits of fours[i] hold rows 4 i to 4 i + 3.
  for (int i = 0; i < 4; ++i) fours[i] = join_pairs(halves[2 * i], halves[2 * i + 1]);
  auto join_quarters = [&](__m512 a, __m512 b) {
    return combine(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  __m512 low = join_quarters(fours[0], fours[1]), high = join_quarters(fours[2], fours[3]);
  return join_quarters(low, high);
}
