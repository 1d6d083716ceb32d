// y = x W^T + bias in bfloat16 with AMX tiles, for a weight that was packed once.
//
// A tile of the weight is 16 outputs by 32 inputs and lies in 1 KiB of its own, so that a product
// with few rows reads the weight once, front to back. Sums are in float32, in an order that
// depends on the inputs' width alone.
//
// Letters: T rows, I in, O out. I is a multiple of 32, O of 16.

#pragma once

#include "product_task.h"

namespace product {

// From this many pairs of row tiles a thread, threads share rows instead of outputs: each reads
// all weights, but no thread touches another one's rows of x and y.
constexpr int64_t MIN_OWN_PAIRS = 4;

// Whether the threads of a team share this many rows.
inline bool is_by_rows(int64_t num_rows) {
  return ceil_div(num_rows, 2 * TILE) >= MIN_OWN_PAIRS * omp_get_num_threads();
}

// This thread's tiles of rows then.
inline Share own_tiles(int64_t num_rows) { return Share(ceil_div(num_rows, TILE)); }

#if HAS_TILES

// Steps after which sums are put aside for the next rows: two tiles of outputs that wide, 36 KiB,
// stay in an L1 of 48.
constexpr int64_t MAX_STEPS = 18;
// Rows that are multiplied by all weights in turn: their inputs stay in an L2 of 2 MiB.
constexpr int64_t BLOCK_BYTES = 800 << 10, MAX_PAIRS = 16;

// One tile of rows at most: bound by reading the weight, which several tiles of outputs at once
// do from as many places.
template <int OUT_TILES, typename E>
inline void multiply_few(const Task& t, int64_t out_tile, E& epilogue) {
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
  store_sums(sums);
  epilogue.finish_few(t, sums, out_tile, std::min(OUT_TILES, 2));
  if (OUT_TILES == 4) epilogue.finish_few(t, sums + 2, out_tile + 2, 2);
}

template <typename E>
inline void run_few(const Task& t, E& epilogue) {
  configure(t.x.num_rows);
  Share share(ceil_div(t.out_tiles, 2));
  int64_t tile = 2 * share.begin, end = std::min(2 * share.end, t.out_tiles);
  for (; tile + 4 <= end; tile += 4) multiply_few<4>(t, tile, epilogue);
  for (; tile + 2 <= end; tile += 2) multiply_few<2>(t, tile, epilogue);
  if (tile < end) multiply_few<1>(t, tile, epilogue);
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
template <int NUM, typename E>
inline void multiply_block(const Task& t, int64_t out_tile, int64_t begin, int64_t end,
                           Ahead ahead, E& epilogue) {
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
      if (k + chunk < t.depth)
        store_sums(sums);
      else
        epilogue.finish(t, sums, tile, count, out_tile, out_count);
    }
  }
}

// Rows in tiles `begin` to `end`, outputs in pairs of tiles `first` to `last`.
template <typename E>
inline void run_block(const Task& t, int64_t begin, int64_t end, int64_t first, int64_t last,
                      E& epilogue) {
  int64_t pairs = ceil_div(end - begin, 2);
  for (int64_t pair = first; pair < last; ++pair) {
    int64_t tile = 2 * pair;
    Ahead ahead{t.weight(tile + 2), pairs * t.depth * LINE};
    if (pair + 1 == last)
      multiply_block<0>(t, tile, begin, end, ahead, epilogue);
    else if (pairs <= 1)
      multiply_block<32>(t, tile, begin, end, ahead, epilogue);
    else if (pairs <= 2)
      multiply_block<16>(t, tile, begin, end, ahead, epilogue);
    else if (pairs <= 4)
      multiply_block<8>(t, tile, begin, end, ahead, epilogue);
    else if (pairs <= 8)
      multiply_block<4>(t, tile, begin, end, ahead, epilogue);
    else
      multiply_block<2>(t, tile, begin, end, ahead, epilogue);
  }
}

template <typename E>
inline void run_many(const Task& t, E& epilogue) {
  configure();
  int64_t out_pairs = ceil_div(t.out_tiles, 2);
  bool is_by_rows = product::is_by_rows(t.x.num_rows);
  Share share = is_by_rows ? own_tiles(t.x.num_rows) : Share(out_pairs);
  int64_t begin = is_by_rows ? share.begin : 0, end = is_by_rows ? share.end : t.row_tiles;
  int64_t first = is_by_rows ? 0 : share.begin, last = is_by_rows ? out_pairs : share.end;
  int64_t pair_bytes = 2 * TILE * t.p.num_in * sizeof(bf16);
  int64_t most = std::clamp<int64_t>(BLOCK_BYTES / pair_bytes, 1, MAX_PAIRS);
  int64_t pairs = ceil_div(end - begin, 2);
  int64_t size = pairs ? 2 * ceil_div(pairs, ceil_div(pairs, most)) : 1;
  for (int64_t tile = begin; tile < end; tile += size) {
    int64_t last_tile = std::min(tile + size, end);
    epilogue.begin_rows(t, tile, last_tile);
    run_block(t, tile, last_tile, first, last, epilogue);
  }
}

// The product, by all threads of a team. A barrier must follow.
template <typename E>
inline void run(const Packed& p, const Input& x, bf16* y, int64_t y_stride, E&& epilogue) {
  Task task{p, x, y, y_stride, p.num_in / DEPTH, ceil_div(x.num_rows, TILE), p.num_out / TILE};
  if (task.row_tiles == 0) return;
  if (task.row_tiles == 1)
    run_few(task, epilogue);
  else
    run_many(task, epilogue);
  _tile_release();
}

inline void run(const Packed& p, const Input& x, bf16* y, int64_t y_stride) {
  run(p, x, y, y_stride, Rounding{});
}

#else

inline void run(const Packed&, const Input&, bf16*, int64_t) {}

#endif

}  // namespace product
