// A block of keys and values as float32 registers, for prefill.h: any dtype, widths that are
// multiples of 16.
//
// Letters: D head width.

#pragma once

#include "store.h"
#include "combine.h"

namespace attention {

template <typename T>
class Lanes {
 public:
  using Number = T;
  using Weight = float;
  static constexpr int64_t KEYS = 128;  // of a block
  static constexpr int64_t STEP = 32;   // keys are taken in steps of so many
  static constexpr int64_t ROWS = 32;   // queries at a time

  explicit Lanes(int64_t width) : width_(width) {}

  // Packs keys[from] to keys[to] of a block as [KEYS / 16][D][16]; others, up to whole steps,
  // become zeros.
  void pack_keys(const T* const* keys, int64_t from, int64_t to) {
    float* packed = keys_.of(KEYS * width_);
    for (int64_t k = from / STEP * STEP; k < ceil_div(to, STEP) * STEP; k += LANES)
      for (int64_t d = 0; d < width_; d += LANES) {
        __m512i rows[LANES];
        for (int64_t i = 0; i < LANES; ++i)
          rows[i] = k + i < from || k + i >= to ? _mm512_setzero_si512()
                                                : _mm512_castps_si512(load(keys[k + i] + d));
        transpose(rows);
        for (int64_t i = 0; i < LANES; ++i)
          _mm512_store_si512(packed + k * width_ + (d + i) * LANES, rows[i]);
      }
  }

  // Packs the values, `offset` behind the keys, of the steps that hold `from` to `to`, as
  // [KEYS][D] with zeros outside [low, high); returns whether all are finite.
  bool pack_values(const T* const* keys, int64_t offset, int64_t from, int64_t to, int64_t low,
                   int64_t high) {
    float* packed = values_.of(KEYS * width_);
    __mmask16 is_odd = 0;
    for (int64_t k = from / STEP * STEP; k < ceil_div(to, STEP) * STEP; ++k)
      for (int64_t d = 0; d < width_; d += LANES) {
        bool is_outside = k < low || k >= high;
        __m512 value = is_outside ? _mm512_setzero_ps() : load(keys[k] + offset + d);
        constexpr int NAN_OR_INFINITY = 0x99;
        is_odd |= _mm512_fpclass_ps_mask(value, NAN_OR_INFINITY);
        store(packed + k * width_ + d, value);
      }
    return is_odd == 0;
  }

  // Takes up to ROWS queries.
  void take_queries(const T* query, int64_t stride, int64_t count) {
    num_rows_ = ceil_div(count, BLOCK) * BLOCK;
    float* copy = queries_.of(ROWS * width_);
    for (int64_t i = 0; i < num_rows_; ++i)
      for (int64_t d = 0; d < width_; d += LANES)
        store(copy + i * width_ + d,
              i < count ? load(query + i * stride + d) : _mm512_setzero_ps());
  }

  // scores[i][k] = query i . key k from key `from` to `to`, multiples of STEP.
  void score(int64_t from, int64_t to, float* scores, int64_t stride) {
    for (int64_t k = from; k < to; k += 2 * LANES) {
      const float* left = keys_.of(0) + k * width_;
      const float* right = left + LANES * width_;
      for (int64_t row = 0; row < num_rows_; row += BLOCK) {
        const float* query = queries_.of(0) + row * width_;
        __m512 sums[BLOCK][2];
        for (auto& pair : sums) pair[0] = pair[1] = _mm512_setzero_ps();
        for (int64_t d = 0; d < width_; ++d) {
          __m512 first = load(left + d * LANES), second = load(right + d * LANES);
          for (int i = 0; i < BLOCK; ++i) {
            __m512 factor = _mm512_set1_ps(query[i * width_ + d]);
            sums[i][0] = _mm512_fmadd_ps(first, factor, sums[i][0]);
            sums[i][1] = _mm512_fmadd_ps(second, factor, sums[i][1]);
          }
        }
        for (int i = 0; i < BLOCK; ++i)
          for (int j = 0; j < 2; ++j)
            store(scores + (row + i) * stride + k + j * LANES, sums[i][j]);
      }
    }
  }

  // out[i] (+)= sum over k of weights[i][k] * value k.
  void accumulate(const float* weights, int64_t stride, int64_t from, int64_t to, float* out,
                  bool adds) {
    for (int64_t row = 0; row < num_rows_; row += BLOCK)
      for (int64_t d = 0; d < width_; d += 2 * LANES) {
        auto run = d + LANES < width_ ? &Lanes::add_columns<2> : &Lanes::add_columns<1>;
        (this->*run)(weights + row * stride, stride, from, to, d, out + row * width_ + d, adds);
      }
  }

 private:
  static constexpr int BLOCK = 8;  // queries whose sums are in registers at once

  template <int VECTORS>
  void add_columns(const float* weights, int64_t stride, int64_t from, int64_t to, int64_t column,
                   float* out, bool adds) {
    __m512 sums[BLOCK][VECTORS];
    for (int i = 0; i < BLOCK; ++i)
      for (int v = 0; v < VECTORS; ++v)
        sums[i][v] = adds ? load(out + i * width_ + v * LANES) : _mm512_setzero_ps();
    for (int64_t k = from; k < to; ++k) {
      const float* value = values_.of(0) + k * width_ + column;
      __m512 part[VECTORS];
      for (int v = 0; v < VECTORS; ++v) part[v] = load(value + v * LANES);
      for (int i = 0; i < BLOCK; ++i) {
        __m512 weight = _mm512_set1_ps(weights[i * stride + k]);
        for (int v = 0; v < VECTORS; ++v)
          sums[i][v] = _mm512_fmadd_ps(part[v], weight, sums[i][v]);
      }
    }
    for (int i = 0; i < BLOCK; ++i)
      for (int v = 0; v < VECTORS; ++v) store(out + i * width_ + v * LANES, sums[i][v]);
  }

  int64_t width_, num_rows_ = 0;
  static inline thread_local Buffer<float> keys_, values_, queries_;
};

}  // namespace attention
