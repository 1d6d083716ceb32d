// Sums and maxima over the lanes of sixteen registers at once.

#pragma once

#include "simd.h"

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
