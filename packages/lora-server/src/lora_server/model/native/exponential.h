// e^x and 2^x for a register of float32 numbers.

#pragma once

#include "simd.h"

// e^x, relative error below 2e-7; 0 far below the range, infinity above it.
inline __m512 exponential(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  // The maximum's second operand is the one that passes through where either is NaN.
  __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-126.0f * 0.6931472f), x);
  __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(bounded, log2e), 8);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), bounded);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);  // Cephes' expf
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  __m512 value = _mm512_scalef_ps(sum, whole);
  // Comparisons that are false for NaN, which passes through.
  __mmask16 is_tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(value, is_tiny, _mm512_setzero_ps());
}

// 2^x, 0 for -infinity. The relative error is below 2e-7; below 1e-4 where the result will be
// rounded to bfloat16, which takes 2e-3.
template <bool WILL_BE_ROUNDED>
inline __m512 power_of_two(__m512 x) {
  constexpr int DOWN = 1;
  __m512 rest = _mm512_reduce_ps(x, DOWN), sum;  // in [0, 1); scalef takes the other part of x
  auto add = [&](float factor) { sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor)); };
  if constexpr (WILL_BE_ROUNDED) {  // minimax polynomials of the relative error, exact for 0
    sum = _mm512_set1_ps(0.07706705118f);
    for (float factor : {0.2276449812f, 0.6951167887f, 1.0f}) add(factor);
  } else {
    sum = _mm512_set1_ps(2.16129164e-4f);
    for (float factor : {1.246784607e-3f, 9.675451604e-3f, 5.54852806e-2f, 0.2402293056f,
                         0.6931470444f, 1.0f})
      add(factor);
  }
  return _mm512_scalef_ps(sum, x);
}
