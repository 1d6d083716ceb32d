// What all kernels share: bfloat16 numbers, and loads and stores of registers with AVX-512.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || \
    !defined(__AVX512BF16__)
#error "these kernels need AVX-512 with F, BW, VL and BF16"
#endif

struct bf16 {
  uint16_t bits;
};

constexpr int LANES = 16;  // float32 numbers of a register

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The mask of the first n lanes.
inline __mmask16 first(int64_t n) { return n >= LANES ? 0xffff : (__mmask16)((1u << n) - 1); }

inline __m512 widened(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const float* p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }

inline __m512 load(const bf16* p) { return widened(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 load(const bf16* p, __mmask16 mask) {
  return widened(_mm256_maskz_loadu_epi16(mask, p));
}

inline void store(float* p, __m512 value) { _mm512_storeu_ps(p, value); }
inline void store(float* p, __m512 value, __mmask16 mask) {
  _mm512_mask_storeu_ps(p, mask, value);
}

// Rounds to nearest.
inline void store(bf16* p, __m512 value) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(value));
}
inline void store(bf16* p, __m512 value, __mmask16 mask) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

// What is left of a value once it has been stored as a T.
template <typename T>
inline __m512 rounded(__m512 value);

template <>
inline __m512 rounded<float>(__m512 value) {
  return value;
}

template <>
inline __m512 rounded<bf16>(__m512 value) {
  return widened((__m256i)_mm512_cvtneps_pbh(value));
}

// Sixteen registers of sixteen 32-bit numbers: rows[i][j] -> rows[j][i]
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

// Asks the memory for a line, into the caches from that level on. Not `_mm_prefetch`: compilers take
// a function that does nothing else for one without effect, and leave its calls out.
template <int LEVEL>
inline void prefetch(const void* place) {
  if constexpr (LEVEL == 1)
    asm volatile("prefetcht0 (%0)" ::"r"(place));
  else
    asm volatile("prefetcht1 (%0)" ::"r"(place));
}

// The part of `total` pieces of work that falls to this thread of a team.
struct Share {
  int64_t begin, end;

  explicit Share(int64_t total) {
    int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
    begin = total * own / threads;
    end = total * (own + 1) / threads;
  }
};
