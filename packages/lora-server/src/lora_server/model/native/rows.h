// What transformers' layers do to single rows in many small operators: norms, gates, rotary
// embeddings. Where transformers rounds to bfloat16 between two operators, so do these.
//
// Letters: D width of a head, F width of a row.

#pragma once

#include <cmath>

#include "exponential.h"

namespace rows {

// Calls whole(i) for whole registers of `width` numbers, and part(i, mask) for what is left.
template <typename Whole, typename Part>
inline void each(int64_t width, Whole whole, Part part) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) whole(i);
  if (i < width) part(i, first(width - i));
}

// y = weight * round(x / sqrt(mean(x^2) + epsilon)) over F numbers; y may be x.
template <typename T>
void normalise(const T* x, const T* weight, float epsilon, T* y, int64_t width) {
  __m512 sum = _mm512_setzero_ps();
  auto add = [&](int64_t i, auto... mask) {
    __m512 part = load(x + i, mask...);
    sum = _mm512_fmadd_ps(part, part, sum);
  };
  each(width, add, add);
  __m512 scale = _mm512_set1_ps(
      1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / (float)width + epsilon));
  auto multiply = [&](int64_t i, auto... mask) {
    __m512 part = rounded<T>(_mm512_mul_ps(load(x + i, mask...), scale));
    store(y + i, _mm512_mul_ps(part, load(weight + i, mask...)), mask...);
  };
  each(width, multiply, multiply);
}

// y = round(silu(gate)) * up over F numbers.
template <typename T>
void silu_multiply(const T* gate, const T* up, T* y, int64_t width) {
  auto work = [&](int64_t i, auto... mask) {
    __m512 x = load(gate + i, mask...);
    __m512 below = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
    __m512 silu = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), below));
    store(y + i, _mm512_mul_ps(rounded<T>(silu), load(up + i, mask...)), mask...);
  };
  each(width, work, work);
}

// y = round(x * cos) + round(rotate_half(x) * sin) over D numbers; y may be x.
template <typename T>
void rotate(const T* x, const T* cosine, const T* sine, T* y, int64_t width) {
  int64_t half = width / 2;
  auto work = [&](int64_t i, auto... mask) {
    __m512 low = load(x + i, mask...), high = load(x + half + i, mask...);
    __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), high);
    __m512 kept = _mm512_mul_ps(low, load(cosine + i, mask...));
    __m512 turned = _mm512_mul_ps(minus, load(sine + i, mask...));
    __m512 kept_high = _mm512_mul_ps(high, load(cosine + half + i, mask...));
    __m512 turned_high = _mm512_mul_ps(low, load(sine + half + i, mask...));
    store(y + i, _mm512_add_ps(rounded<T>(kept), rounded<T>(turned)), mask...);
    store(y + half + i, _mm512_add_ps(rounded<T>(kept_high), rounded<T>(turned_high)), mask...);
  };
  each(half, work, work);
}

// x = round(x + y) over F numbers.
template <typename T>
void add(T* x, const T* y, int64_t width) {
  auto work = [&](int64_t i, auto... mask) {
    store(x + i, _mm512_add_ps(load(x + i, mask...), load(y + i, mask...)), mask...);
  };
  each(width, work, work);
}

}  // namespace rows
