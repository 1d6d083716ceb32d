// The largest output of each row of a product, without writing the outputs: a greedy choice among a
// vocabulary wants nothing else of them.

#pragma once

#include "ordered.h"
#include "product.h"

#include <vector>

namespace product {

// The first place of a row's largest output, rounded to bfloat16. Places are compared last.
struct Largest {
  int16_t order = INT16_MIN;  // see ordered.h
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
  bool are_numbers() const { return ordered::are_numbers(sizes); }

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
  __m512i sizes = _mm512_setzero_si512();

  // One tile of rows and one or two tiles of outputs.
  void look(const Task& t, const Sums* sums, int64_t row_tile, int64_t out_tile,
            int64_t out_count) {
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
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
      sizes = ordered::larger_sizes(sizes, bits);
      __m512i order = ordered::from_bits(bits);
      if (!_mm512_cmpgt_epi16_mask(order, _mm512_set1_epi16(row.order))) continue;
      row.order = ordered::largest(order);
      row.place = column + ordered::first_place(order, row.order);
    }
  }
};

#endif

}  // namespace product
