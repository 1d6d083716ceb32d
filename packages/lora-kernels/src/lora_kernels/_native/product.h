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

// Steps after which sums are put aside for the next rows: two tiles of outputs that wide, 36 KiB,
// stay in an L1 of 48.
constexpr int64_t MAX_STEPS = 18;
// Rows that are multiplied by all weights in turn: their inputs stay in an L2 of 2 MiB.
constexpr int64_t BLOCK_BYTES = 800 << 10, MAX_PAIRS = 16;
// From this many pairs of row tiles a thread, threads share rows instead of outputs: each reads
// all weights, but no thread touches another one's rows of x and y.
constexpr int64_t MIN_OWN_PAIRS = 4;

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

inline void write(const Sums& sums, int64_t count, const float* bias, bf16* y, int64_t stride) {
  __m512 added = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  for (int64_t row = 0; row < count; ++row)
    store(y + row * stride, _mm512_add_ps(_mm512_load_ps(sums + row * TILE), added));
}

// Two tiles side by side: whole lines of y.
inline void write_pair(const Sums* sums, int64_t count, const float* bias, bf16* y,
                       int64_t stride) {
  __m512 left = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  __m512 right = bias ? _mm512_loadu_ps(bias + TILE) : _mm512_setzero_ps();
  for (int64_t row = 0; row < count; ++row) {
    __m512 low = _mm512_add_ps(_mm512_load_ps(sums[0] + row * TILE), left);
    __m512 high = _mm512_add_ps(_mm512_load_ps(sums[1] + row * TILE), right);
    _mm512_storeu_si512(y + row * stride, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
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

  // The sums of a tile of rows and `count` tiles of outputs (1 or 2).
  void write_out(const Sums* sums, int64_t row_tile, int64_t out_tile, int64_t count) const {
    int64_t row = row_tile * TILE, column = out_tile * TILE;
    int64_t rows = std::min(TILE, x.num_rows - row);
    const float* bias = p.bias ? p.bias + column : nullptr;
    bf16* to = y + row * y_stride + column;
    if (count == 2)
      write_pair(sums, rows, bias, to, y_stride);
    else
      write(sums[0], rows, bias, to, y_stride);
  }
};

// One tile of rows at most: bound by reading the weight, which several tiles of outputs at once
// do from as many places.
template <int OUT_TILES>
inline void multiply_few(const Task& t, int64_t out_tile) {
  alignas(LINE) Sums sums[4];
  Bytes x = (Bytes)t.x.rows, w = t.weight(out_tile);
  int64_t stride = t.x.stride * sizeof(bf16), gap = t.depth * TILE_BYTES;
  auto fetch = [](Bytes tile) {  // a step ahead
    for (int64_t line = 0; line < TILE; ++line)
      _mm_prefetch(tile + TILE_BYTES + line * LINE, _MM_HINT_T0);
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < t.depth; ++k, x += ROW_BYTES, w += TILE_BYTES) {
    _tile_loadd(4, x, stride);
    _tile_loadd(5, w, LINE);
    _tile_dpbf16ps(0, 4, 5);
    fetch(w);
    if (OUT_TILES >= 2) {
      _tile_loadd(6, w + gap, LINE);
      _tile_dpbf16ps(1, 4, 6);
      fetch(w + gap);
    }
    if (OUT_TILES == 4) {
      _tile_loadd(7, w + 2 * gap, LINE);
      _tile_dpbf16ps(2, 4, 7);
      fetch(w + 2 * gap);
      _tile_loadd(5, w + 3 * gap, LINE);
      _tile_dpbf16ps(3, 4, 5);
      fetch(w + 3 * gap);
    }
  }
  _tile_stored(0, sums[0], LINE);
  _tile_stored(1, sums[1], LINE);
  _tile_stored(2, sums[2], LINE);
  _tile_stored(3, sums[3], LINE);
  t.write_out(sums, 0, out_tile, std::min(OUT_TILES, 2));
  if (OUT_TILES == 4) t.write_out(sums + 2, 0, out_tile + 2, 2);
}

inline void run_few(const Task& t) {
  configure(t.x.num_rows);
  Share share(ceil_div(t.out_tiles, 2));
  int64_t tile = 2 * share.begin, end = std::min(2 * share.end, t.out_tiles);
  for (; tile + 4 <= end; tile += 4) multiply_few<4>(t, tile);
  for (; tile + 2 <= end; tile += 2) multiply_few<2>(t, tile);
  if (tile < end) multiply_few<1>(t, tile);
}

struct Rows {
  Bytes first;
  int64_t stride;  // in bytes, as tile loads want it
};

// The weights of the next tiles of outputs, brought into L2 beside the products. `NUM` lines a
// step come from as many places: the processor's own prefetcher runs ahead in each page it sees
// asked for, which one place alone is too slow to make use of.
struct Ahead {
  Bytes next;
  int64_t gap;

  template <int BEGIN, int END>
  void fetch() const {
    for (int64_t i = BEGIN; i < END; ++i) _mm_prefetch(next + i * gap, _MM_HINT_T1);
  }
};

// Adds to the sums in tiles 0 to 3: two tiles of outputs for one or two tiles of rows. Loads of x
// leave L1 to the weights, which all rows of a block have in common.
template <bool IS_PAIR, int NUM>
inline void multiply(Bytes w0, Bytes w1, Rows x0, Rows x1, int64_t steps, Ahead& ahead) {
  for (int64_t k = 0; k < steps; ++k) {
    _tile_stream_loadd(4, x0.first + k * ROW_BYTES, x0.stride);
    _tile_loadd(6, w0 + k * TILE_BYTES, LINE);
    _tile_dpbf16ps(0, 4, 6);
    ahead.fetch<0, NUM / 2>();
    _tile_loadd(7, w1 + k * TILE_BYTES, LINE);
    _tile_dpbf16ps(1, 4, 7);
    if (IS_PAIR) {
      _tile_stream_loadd(5, x1.first + k * ROW_BYTES, x1.stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    ahead.fetch<NUM / 2, NUM>();
    ahead.next += LINE;
    if (IS_PAIR) _tile_dpbf16ps(3, 5, 7);
  }
}

// Two tiles of outputs for a block of rows, tiles `begin` to `end`.
template <int NUM>
inline void multiply_block(const Task& t, int64_t out_tile, int64_t begin, int64_t end,
                           Ahead ahead) {
  alignas(LINE) Sums parts[MAX_PAIRS][4];
  int64_t out_count = std::min<int64_t>(2, t.out_tiles - out_tile);
  Bytes w0 = t.weight(out_tile), w1 = t.weight(out_tile + out_count - 1);
  auto rows_of = [&](int64_t tile, int64_t k) -> Rows {
    if (t.x.rest && tile == t.row_tiles - 1)
      return {(Bytes)(t.x.rest + k * DEPTH), t.p.num_in * (int64_t)sizeof(bf16)};
    return {(Bytes)(t.x.rows + tile * TILE * t.x.stride + k * DEPTH),
            t.x.stride * (int64_t)sizeof(bf16)};
  };
  bool is_split = end - begin > 2;
  int64_t chunk = is_split ? ceil_div(t.depth, ceil_div(t.depth, MAX_STEPS)) : t.depth;
  for (int64_t k = 0; k < t.depth; k += chunk) {
    int64_t steps = std::min(chunk, t.depth - k);
    for (int64_t tile = begin; tile < end; tile += 2) {
      int64_t count = std::min<int64_t>(2, end - tile);
      Sums* sums = parts[chunk < t.depth ? (tile - begin) / 2 : 0];
      Rows x0 = rows_of(tile, k), x1 = rows_of(tile + count - 1, k);
      if (k == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_stream_loadd(0, sums[0], LINE);
        _tile_stream_loadd(1, sums[1], LINE);
        _tile_stream_loadd(2, sums[2], LINE);
        _tile_stream_loadd(3, sums[3], LINE);
      }
      Bytes v0 = w0 + k * TILE_BYTES, v1 = w1 + k * TILE_BYTES;
      if (count == 2)
        multiply<true, NUM>(v0, v1, x0, x1, steps, ahead);
      else
        multiply<false, NUM>(v0, v1, x0, x1, steps, ahead);
      _tile_stored(0, sums[0], LINE);
      _tile_stored(1, sums[1], LINE);
      _tile_stored(2, sums[2], LINE);
      _tile_stored(3, sums[3], LINE);
      if (k + chunk < t.depth) continue;
      for (int64_t i = 0; i < count; ++i)
        t.write_out(sums + 2 * i, tile + i, out_tile, out_count);
    }
  }
}

// Rows in tiles `begin` to `end`, outputs in pairs of tiles `first` to `last`.
inline void run_block(const Task& t, int64_t begin, int64_t end, int64_t first, int64_t last) {
  int64_t pairs = ceil_div(end - begin, 2);
  for (int64_t pair = first; pair < last; ++pair) {
    int64_t tile = 2 * pair;
    Ahead ahead{t.weight(tile + 2), pairs * t.depth * LINE};
    if (pair + 1 == last)
      multiply_block<0>(t, tile, begin, end, ahead);
    else if (pairs <= 1)
      multiply_block<32>(t, tile, begin, end, ahead);
    else if (pairs <= 2)
      multiply_block<16>(t, tile, begin, end, ahead);
    else if (pairs <= 4)
      multiply_block<8>(t, tile, begin, end, ahead);
    else if (pairs <= 8)
      multiply_block<4>(t, tile, begin, end, ahead);
    else
      multiply_block<2>(t, tile, begin, end, ahead);
  }
}

inline void run_many(const Task& t) {
  configure();
  int64_t row_pairs = ceil_div(t.row_tiles, 2), out_pairs = ceil_div(t.out_tiles, 2);
  bool is_by_rows = row_pairs >= MIN_OWN_PAIRS * omp_get_num_threads();
  Share share(is_by_rows ? t.row_tiles : out_pairs);
  int64_t begin = is_by_rows ? share.begin : 0, end = is_by_rows ? share.end : t.row_tiles;
  int64_t first = is_by_rows ? 0 : share.begin, last = is_by_rows ? out_pairs : share.end;
  int64_t pair_bytes = 2 * TILE * t.p.num_in * sizeof(bf16);
  int64_t most = std::clamp<int64_t>(BLOCK_BYTES / pair_bytes, 1, MAX_PAIRS);
  int64_t pairs = ceil_div(end - begin, 2);
  int64_t size = pairs ? 2 * ceil_div(pairs, ceil_div(pairs, most)) : 1;
  for (int64_t tile = begin; tile < end; tile += size)
    run_block(t, tile, std::min(tile + size, end), first, last);
}

// The product, by all threads of a team. A barrier must follow.
inline void run(const Packed& p, const Input& x, bf16* y, int64_t y_stride) {
  Task task{p, x, y, y_stride, p.num_in / DEPTH, ceil_div(x.num_rows, TILE), p.num_out / TILE};
  if (task.row_tiles == 0) return;
  if (task.row_tiles == 1)
    run_few(task);
  else
    run_many(task);
  _tile_release();
}

#else

inline void run(const Packed&, const Input&, bf16*, int64_t) {}

#endif

}  // namespace product
