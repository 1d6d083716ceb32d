// y = x W^T + bias in bfloat16 with AMX tiles, for a weight that was packed once.
//
// A tile of the weight is 16 outputs by 32 inputs and lies in 1 KiB of its own, so that a product
// with few rows reads the weight once, front to back. Sums are in float32, in an order that
// depends on the inputs' width alone.
//
// Letters: T rows, I in, O out. I is a multiple of 32, O of 16.

#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

namespace product {

constexpr int64_t TILE = 16, DEPTH = 32, TILE_SIZE = TILE * DEPTH;

// A linear module: [O / 16][I / 32][16 pairs of inputs][16 outputs][2], and [O] or null.
struct Packed {
  const bf16* weight;
  const float* bias;
  int64_t num_out, num_in;
};

// x [T, I]. The last tile's rows beyond T are read as well, and change nothing: they are `rest`,
// that tile alone, where it is not null, else what lies behind the last row.
struct Input {
  const bf16* rows;
  int64_t stride;  // in numbers
  int64_t num_rows;
  const bf16* rest;  // [16, I]
};

#if HAS_TILES

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void configure() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = 16, config.row_bytes[tile] = 64;
  _tile_loadconfig(&config);
}

struct Rows {
  const bf16* first;
  int64_t stride;  // in bytes, as tile loads want it
};

// Two tiles of outputs for one or two tiles of rows.
inline void multiply(const bf16* w0, const bf16* w1, const Rows& x0, const Rows* x1,
                     int64_t depth, float (*sums)[TILE * TILE]) {
  _tile_zero(0);
  _tile_zero(1);
  if (x1 == nullptr) {
    for (int64_t k = 0; k < depth; ++k) {
      _tile_loadd(4, x0.first + k * DEPTH, x0.stride);
      _tile_loadd(6, w0 + k * TILE_SIZE, 64);
      _tile_loadd(7, w1 + k * TILE_SIZE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
  } else {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; ++k) {
      _tile_loadd(4, x0.first + k * DEPTH, x0.stride);
      _tile_loadd(5, x1->first + k * DEPTH, x1->stride);
      _tile_loadd(6, w0 + k * TILE_SIZE, 64);
      _tile_loadd(7, w1 + k * TILE_SIZE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
}

inline void write(const float* sums, int64_t count, const float* bias, bf16* y, int64_t stride) {
  __m512 added = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  for (int64_t row = 0; row < count; ++row)
    store(y + row * stride, _mm512_add_ps(_mm512_loadu_ps(sums + row * TILE), added));
}

// The product, by all threads of a team. A barrier must follow.
inline void run(const Packed& p, const Input& x, bf16* y, int64_t y_stride) {
  configure();
  alignas(64) float sums[4][TILE * TILE];
  int64_t depth = p.num_in / DEPTH, out_tiles = p.num_out / TILE;
  int64_t row_tiles = ceil_div(x.num_rows, TILE);
  auto rows_of = [&](int64_t tile) -> Rows {
    if (x.rest && tile == row_tiles - 1) return {x.rest, p.num_in * (int64_t)sizeof(bf16)};
    return {x.rows + tile * TILE * x.stride, x.stride * (int64_t)sizeof(bf16)};
  };
  Share share(ceil_div(out_tiles, 2));
  for (int64_t pair = share.begin; pair < share.end; ++pair) {
    bool is_pair = 2 * pair + 1 < out_tiles;
    const bf16* w0 = p.weight + 2 * pair * depth * TILE_SIZE;
    const bf16* w1 = is_pair ? w0 + depth * TILE_SIZE : w0;
    for (int64_t tile = 0; tile < row_tiles; tile += 2) {
      int64_t count = std::min<int64_t>(2, row_tiles - tile);
      Rows x0 = rows_of(tile), x1 = rows_of(std::min(tile + 1, row_tiles - 1));
      multiply(w0, w1, x0, count == 2 ? &x1 : nullptr, depth, sums);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < (is_pair ? 2 : 1); ++j) {
          int64_t row = (tile + i) * TILE, column = (2 * pair + j) * TILE;
          write(sums[2 * i + j], std::min(TILE, x.num_rows - row),
                p.bias ? p.bias + column : nullptr, y + row * y_stride + column, y_stride);
        }
    }
  }
  _tile_release();
}

#else

inline void run(const Packed&, const Input&, bf16*, int64_t) {}

#endif

}  // namespace product
