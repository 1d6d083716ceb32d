// A block of keys and values as AMX tiles, for prefill.h: bfloat16, widths that are multiples of
// 32, sums in float32, weights of the second product in bfloat16.
//
// Letters: D head width.

#pragma once

#include "store.h"
#include "tiles.h"
#include "combine.h"

namespace attention {

#if HAS_TILES

// sums (+)= rows x [w0 w1] for one or two tiles of rows and two tiles of columns. Strides are in
// bytes, as tile loads want them.
template <bool IS_PAIR, bool ADDS>
void multiply(const bf16* rows, int64_t stride, const bf16* w0, const bf16* w1, int64_t depth,
              float* sums, int64_t sums_stride) {
  // Tile loads do not tell the compiler that they read memory.
  asm volatile("" ::: "memory");
  const bf16* rows1 = (const bf16*)((const char*)rows + TILE * stride);
  float* sums1 = (float*)((char*)sums + TILE * sums_stride);
  if constexpr (ADDS) {
    _tile_loadd(0, sums, sums_stride);
    _tile_loadd(1, sums + TILE, sums_stride);
    if constexpr (IS_PAIR) {
      _tile_loadd(2, sums1, sums_stride);
      _tile_loadd(3, sums1 + TILE, sums_stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (IS_PAIR) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    _tile_loadd(4, rows + k * DEPTH, stride);
    _tile_loadd(6, w0 + k * TILE_SIZE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + k * TILE_SIZE, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (IS_PAIR) {
      _tile_loadd(5, rows1 + k * DEPTH, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, sums_stride);
  _tile_stored(1, sums + TILE, sums_stride);
  if constexpr (IS_PAIR) {
    _tile_stored(2, sums1, sums_stride);
    _tile_stored(3, sums1 + TILE, sums_stride);
  }
}

class Tiles {
 public:
  using Number = bf16;
  using Weight = bf16;
  static constexpr int64_t KEYS = 128;       // of a block
  static constexpr int64_t STEP = DEPTH;     // keys are taken in steps of so many
  static constexpr int64_t ROWS = 2 * TILE;  // queries at a time

  explicit Tiles(int64_t width) : width_(width), depth_(width / DEPTH) { product::configure(); }
  ~Tiles() { _tile_release(); }

  // Packs keys[from] to keys[to] of a block; others, up to whole tiles, become zeros.
  void pack_keys(const bf16* const* keys, int64_t from, int64_t to) {
    bf16* packed = keys_.of(KEYS * width_);
    for (int64_t tile = from / STEP * 2; tile < ceil_div(to, STEP) * 2; ++tile)
      for (int64_t d = 0; d < depth_; ++d) {
        __m512i rows[TILE];
        for (int64_t i = 0; i < TILE; ++i) {
          int64_t k = tile * TILE + i;
          rows[i] = k < from || k >= to ? _mm512_setzero_si512()
                                        : _mm512_loadu_si512(keys[k] + d * DEPTH);
        }
        transpose(rows);
        bf16* place = packed + (tile * depth_ + d) * TILE_SIZE;
        for (int64_t i = 0; i < TILE; ++i) _mm512_store_si512(place + i * DEPTH, rows[i]);
      }
  }

  // Packs the values, `offset` behind the keys, of the steps that hold `from` to `to`, with zeros
  // outside [low, high); returns whether all are finite.
  bool pack_values(const bf16* const* keys, int64_t offset, int64_t from, int64_t to, int64_t low,
                   int64_t high) {
    bf16* packed = values_.of(KEYS * width_);
    const __m512i places = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9,
                                            40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33,
                                            1, 32, 0);
    const __m512i behind = _mm512_add_epi16(places, _mm512_set1_epi16(16));
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = from / STEP * STEP; k < ceil_div(to, STEP) * STEP; k += 2)
      for (int64_t d = 0; d < depth_; ++d) {
        auto value = [&](int64_t key) {
          return key < low || key >= high ? _mm512_setzero_si512()
                                          : _mm512_loadu_si512(keys[key] + offset + d * DEPTH);
        };
        __m512i even = value(k), odd = value(k + 1);
        most = _mm512_max_epu16(most, _mm512_and_si512(even, exponent));
        most = _mm512_max_epu16(most, _mm512_and_si512(odd, exponent));
        bf16* place = packed + (2 * d * (KEYS / STEP) + k / STEP) * TILE_SIZE + k % STEP * TILE;
        _mm512_store_si512(place, _mm512_permutex2var_epi16(even, places, odd));
        place += KEYS / STEP * TILE_SIZE;
        _mm512_store_si512(place, _mm512_permutex2var_epi16(even, behind, odd));
      }
    return _mm512_cmpeq_epu16_mask(most, exponent) == 0;
  }

  // Takes up to ROWS queries; only whole tiles can be read where they are.
  void take_queries(const bf16* query, int64_t stride, int64_t count) {
    is_pair_ = count > TILE;
    rows_ = query, stride_ = stride;
    if (count % TILE == 0) return;
    bf16* copy = queries_.of(ROWS * width_);
    for (int64_t i = 0; i < count; ++i)
      memcpy(copy + i * width_, query + i * stride, width_ * sizeof(bf16));
    memset(copy + count * width_, 0, (ROWS - count) * width_ * sizeof(bf16));
    rows_ = copy, stride_ = width_;
  }

  // scores[i][k] = query i . key k from key `from` to `to`, multiples of STEP.
  void score(int64_t from, int64_t to, float* scores, int64_t stride) {
    const bf16* packed = keys_.of(0);
    auto run = is_pair_ ? multiply<true, false> : multiply<false, false>;
    for (int64_t k = from; k < to; k += STEP) {
      const bf16* tile = packed + k / TILE * depth_ * TILE_SIZE;
      run(rows_, stride_ * sizeof(bf16), tile, tile + depth_ * TILE_SIZE, depth_, scores + k,
          stride * sizeof(float));
    }
  }

  // out[i] (+)= sum over k of weights[i][k] * value k.
  void accumulate(const bf16* weights, int64_t stride, int64_t from, int64_t to, float* out,
                  bool adds) {
    const bf16* packed = values_.of(0);
    auto run = is_pair_ ? (adds ? multiply<true, true> : multiply<true, false>)
                        : (adds ? multiply<false, true> : multiply<false, false>);
    for (int64_t d = 0; d < 2 * depth_; d += 2) {
      const bf16* tile = packed + (d * (KEYS / STEP) + from / STEP) * TILE_SIZE;
      run(weights + from, stride * sizeof(bf16), tile, tile + KEYS / STEP * TILE_SIZE,
          (to - from) / STEP, out + d * TILE, width_ * sizeof(float));
    }
  }

 private:
  int64_t width_, depth_, stride_ = 0;
  const bf16* rows_ = nullptr;
  bool is_pair_ = false;
  static inline thread_local Buffer<bf16> keys_, values_, queries_;
};

#endif

}  // namespace attention
