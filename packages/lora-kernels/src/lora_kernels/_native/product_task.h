// A product in bfloat16 with AMX tiles: its parts, and what becomes of the sums.
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

// x [T, I]. Where T is over 16, the last tile's rows beyond T are read as well, and change
// nothing: they are `rest`, that tile alone, where it is not null, else what lies behind the last
// row.
struct Input {
  const bf16* rows;
  int64_t stride;  // in numbers
  int64_t num_rows;
  const bf16* rest;  // [16, I]
};

#if HAS_TILES

using Bytes = const char*;

constexpr int64_t LINE = 64, TILE_BYTES = TILE_SIZE * sizeof(bf16), ROW_BYTES = DEPTH * sizeof(bf16);

using Sums = float[TILE * TILE];

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums and 4 x, with `num_rows` rows; 5 to 7 weights, or 5 x as well.
inline void configure(int64_t num_rows = TILE) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile)
    config.rows[tile] = tile <= 4 ? num_rows : 16, config.row_bytes[tile] = 64;
  _tile_loadconfig(&config);
}

// Rows of a tile: sums + bias, rounded.
inline void write(const Sums* sums, int64_t begin, int64_t count, const float* bias, bf16* y,
                  int64_t stride) {
  __m512 added = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  for (int64_t row = 0; row < count; ++row)
    store(y + row * stride, _mm512_add_ps(_mm512_load_ps(sums[0] + (begin + row) * TILE), added));
}

// Two tiles side by side: whole lines of y.
inline void write_pair(const Sums* sums, int64_t begin, int64_t count, const float* bias, bf16* y,
                       int64_t stride) {
  __m512 left = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  __m512 right = bias ? _mm512_loadu_ps(bias + TILE) : _mm512_setzero_ps();
  for (int64_t row = 0; row < count; ++row) {
    __m512 low = _mm512_add_ps(_mm512_load_ps(sums[0] + (begin + row) * TILE), left);
    __m512 high = _mm512_add_ps(_mm512_load_ps(sums[1] + (begin + row) * TILE), right);
    _mm512_storeu_si512(y + row * stride, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

inline void store_sums(Sums* sums) {
  _tile_stored(0, sums[0], LINE);
  _tile_stored(1, sums[1], LINE);
  _tile_stored(2, sums[2], LINE);
  _tile_stored(3, sums[3], LINE);
}

// A product, and what follows from its sizes.
struct Task {
  const Packed& p;
  const Input& x;
  bf16* y;
  int64_t y_stride, depth, row_tiles, out_tiles;

  Bytes weight(int64_t out_tile) const {
    return (Bytes)p.weight + out_tile * depth * TILE_BYTES;
  }

  // Rows of a tile that there are.
  int64_t rows_of(int64_t row_tile) const { return std::min(TILE, x.num_rows - row_tile * TILE); }

  // The sums of some rows of a tile and `count` tiles of outputs (1 or 2).
  void write_rows(const Sums* sums, int64_t row_tile, int64_t begin, int64_t rows,
                  int64_t out_tile, int64_t count) const {
    int64_t column = out_tile * TILE;
    const float* bias = p.bias ? p.bias + column : nullptr;
    bf16* to = y + (row_tile * TILE + begin) * y_stride + column;
    if (count == 2)
      write_pair(sums, begin, rows, bias, to, y_stride);
    else
      write(sums, begin, rows, bias, to, y_stride);
  }

  void write_out(const Sums* sums, int64_t row_tile, int64_t out_tile, int64_t count) const {
    write_rows(sums, row_tile, 0, rows_of(row_tile), out_tile, count);
  }
};

// What becomes of finished sums: they are rounded. Others (lora_added.h) add something before.
struct Rounding {
  // Row tiles `begin` to `end` come next, for all outputs of this thread.
  void begin_rows(const Task&, int64_t, int64_t) {}

  // The sums of `count` tiles of rows (1 or 2) lie in the tiles 0 to 3, two for each; 4 to 7 are
  // free. `sums` has room for them.
  void finish(const Task& t, Sums* sums, int64_t row_tile, int64_t count, int64_t out_tile,
              int64_t out_count) {
    store_sums(sums);
    for (int64_t i = 0; i < count; ++i)
      t.write_out(sums + 2 * i, row_tile + i, out_tile, out_count);
  }

  // The same where there is one tile of rows; its sums have been stored.
  void finish_few(const Task& t, const Sums* sums, int64_t out_tile, int64_t out_count) {
    t.write_out(sums, 0, out_tile, out_count);
  }
};

#endif

}  // namespace product
