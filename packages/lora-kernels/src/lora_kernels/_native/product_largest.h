// The largest output of each row of a product, without writing the outputs: a greedy choice among a
// vocabulary wants nothing else of them.

#pragma once

#include "product.h"

#include <algorithm>
#include <vector>

namespace product {

// The first place of a row's largest output, rounded to bfloat16. Places are compared last.
struct Largest {
  int16_t order = INT16_MIN;  // of the numbers' bits, see `ordered`
  int64_t place = 0;

  bool is_less(const Largest& other) const {
    return order < other.order || (order == other.order && place > other.place);
  }
};

#if HAS_TILES

// What becomes of the sums: a thread keeps the largest of those it sees. Outputs come in their
// order.
class Choosing {
 public:
  explicit Choosing(int64_t num_rows) : rows(num_rows) {}

  std::vector<Largest> rows;

  // Whether no output was NaN.
  bool are_numbers() const { return largest(sizes) <= INFINITE; }

  static bool is_finite(const Largest& row) {
    return row.order < INFINITE && row.order > (int16_t)~INFINITE;
  }

  void begin_rows(const Task&, int64_t, int64_t) {}

  void finish(const Task& t, Sums* sums, int64_t row_tile, int64_t count, int64_t out_tile,
              int64_t out_count) {
    store_sums(sums);
    for (int64_t i = 0; i < count; ++i) look(t, sums + 2 * i, row_tile + i, out_tile, out_count);
  }

  void finish_few(const Task& t, const Sums* sums, int64_t out_tile, int64_t out_count) {
    look(t, sums, 0, out_tile, out_count);
  }

 private:
  static constexpr int64_t SIZE = 32;
  static constexpr int16_t INFINITE = 0x7f80;

  __m512i sizes = _mm512_setzero_si512();

  // Bits of bfloat16 -> integers in the order of the numbers; 0 and -0 are equal.
  static __m512i ordered(__m512i bits) {
    constexpr int XOR_AND = 0x78;  // a ^ (b & c)
    const __m512i rest = _mm512_set1_epi16(0x7fff), negative_zero = _mm512_set1_epi16(-1);
    __m512i sign = _mm512_srai_epi16(bits, 15);
    __m512i order = _mm512_ternarylogic_epi32(bits, sign, rest, XOR_AND);
    return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(order, negative_zero), order);
  }

  static int16_t largest(__m512i numbers) {
    alignas(LINE) int16_t all[SIZE];
    _mm512_store_si512(all, numbers);
    return *std::max_element(all, all + SIZE);
  }

  // One tile of rows and one or two tiles of outputs.
  void look(const Task& t, const Sums* sums, int64_t row_tile, int64_t out_tile,
            int64_t out_count) {
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
    const __m512i size = _mm512_set1_epi16(0x7fff);
    int64_t column = out_tile * TILE;
    const float* bias = t.p.bias ? t.p.bias + column : nullptr;
    __m512 left = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    __m512 right = bias && out_count == 2 ? _mm512_loadu_ps(bias + TILE) : _mm512_setzero_ps();
    for (int64_t i = 0; i < t.rows_of(row_tile); ++i) {
      Largest& row = rows[row_tile * TILE + i];
      __m512 low = _mm512_add_ps(_mm512_load_ps(sums[0] + i * TILE), left);
      __m512 high = lowest;
      if (out_count == 2) high = _mm512_add_ps(_mm512_load_ps(sums[1] + i * TILE), right);
      __m512i bits = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      sizes = _mm512_max_epi16(sizes, _mm512_and_si512(bits, size));
      __m512i order = ordered(bits);
      if (!_mm512_cmpgt_epi16_mask(order, _mm512_set1_epi16(row.order))) continue;
      row.order = largest(order);
      __mmask32 are_equal = _mm512_cmpeq_epi16_mask(order, _mm512_set1_epi16(row.order));
      row.place = column + __builtin_ctz(are_equal);
    }
  }
};

#endif

}  // namespace product
