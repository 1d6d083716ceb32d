// y = x W^T + bias in bfloat16 with AMX tiles, for a weight that was packed once.
//
// A tile of the weight is 16 outputs by 32 inputs and lies in 1 KiB of its own, so that a product
// with few rows reads the weight once, front to back. Sums are in float32, in an order that
// depends on the inputs' width alone.
//
// Letters: T rows, I in, O out. I is a multiple of 32, O of 16.

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

namespace {
using bf16 = uint16_t;
constexpr int64_t TILE = 16, DEPTH = 32, TILE_SIZE = TILE * DEPTH;
}  // namespace

// Asks the system for the tile registers; 0 where there are none.
extern "C" int product_is_available() {
#if HAS_TILES
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 0;
#endif
}

// weight [O, I] -> packed [O / 16][I / 32][16 pairs of inputs][16 outputs][2]
extern "C" void product_pack(const bf16* weight, int64_t stride, int64_t num_out, int64_t num_in,
                             bf16* packed) {
  int64_t depth = num_in / DEPTH;
#pragma omp parallel for
  for (int64_t o = 0; o < num_out / TILE; ++o)
    for (int64_t k = 0; k < depth; ++k) {
      bf16* tile = packed + (o * depth + k) * TILE_SIZE;
      for (int64_t pair = 0; pair < TILE; ++pair)
        for (int64_t n = 0; n < TILE; ++n)
          memcpy(tile + (pair * TILE + n) * 2,
                 weight + (o * TILE + n) * stride + k * DEPTH + pair * 2, 2 * sizeof(bf16));
    }
}

#if HAS_TILES

namespace {

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.rows[tile] = 16, config.row_bytes[tile] = 64;
  _tile_loadconfig(&config);
}

struct Rows {
  const bf16* first;
  int64_t stride;  // in bytes, as tile loads want it
};

// Two tiles of outputs for one or two tiles of rows.
void multiply(const bf16* w0, const bf16* w1, const Rows& x0, const Rows* x1, int64_t depth,
              float (*sums)[TILE * TILE]) {
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

void write(const float* sums, int64_t count, const float* bias, bf16* y, int64_t stride) {
  __m512 added = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  for (int64_t row = 0; row < count; ++row) {
    __m512 value = _mm512_add_ps(_mm512_loadu_ps(sums + row * TILE), added);
    _mm256_storeu_si256((__m256i*)(y + row * stride), (__m256i)_mm512_cvtneps_pbh(value));
  }
}

}  // namespace

// y [T, O] = x [T, I] W^T + bias; bias is float32 or null. Strides are in numbers.
extern "C" void product_run(const bf16* packed, const bf16* x, int64_t x_stride, bf16* y,
                            int64_t y_stride, int64_t num_rows, int64_t num_out, int64_t num_in,
                            const float* bias) {
  static thread_local std::vector<bf16> own_rest;
  std::vector<bf16>& rest = own_rest;  // the last rows, filled up with zeros to a tile
  int64_t depth = num_in / DEPTH, out_tiles = num_out / TILE;
  int64_t row_tiles = (num_rows + TILE - 1) / TILE, left = num_rows % TILE;
  if (left) {
    rest.assign(TILE * num_in, 0);
    for (int64_t row = 0; row < left; ++row)
      memcpy(rest.data() + row * num_in, x + ((row_tiles - 1) * TILE + row) * x_stride,
             num_in * sizeof(bf16));
  }
  auto rows_of = [&](int64_t tile) -> Rows {
    if (left && tile == row_tiles - 1) return {rest.data(), num_in * (int64_t)sizeof(bf16)};
    return {x + tile * TILE * x_stride, x_stride * (int64_t)sizeof(bf16)};
  };
#pragma omp parallel
  {
    configure();
    alignas(64) float sums[4][TILE * TILE];
    int64_t pairs = (out_tiles + 1) / 2, threads = omp_get_num_threads();
    int64_t own = omp_get_thread_num(), end = pairs * (own + 1) / threads;
    for (int64_t pair = pairs * own / threads; pair < end; ++pair) {
      bool is_pair = 2 * pair + 1 < out_tiles;
      const bf16* w0 = packed + 2 * pair * depth * TILE_SIZE;
      const bf16* w1 = is_pair ? w0 + depth * TILE_SIZE : w0;
      for (int64_t tile = 0; tile < row_tiles; tile += 2) {
        int64_t count = std::min<int64_t>(2, row_tiles - tile);
        Rows x0 = rows_of(tile), x1 = rows_of(std::min(tile + 1, row_tiles - 1));
        multiply(w0, w1, x0, count == 2 ? &x1 : nullptr, depth, sums);
        for (int64_t i = 0; i < count; ++i)
          for (int64_t j = 0; j < (is_pair ? 2 : 1); ++j) {
            int64_t row = (tile + i) * TILE, column = (2 * pair + j) * TILE;
            write(sums[2 * i + j], std::min(TILE, num_rows - row), bias ? bias + column : nullptr,
                  y + row * y_stride + column, y_stride);
          }
      }
    }
    _tile_release();
  }
}

#else

extern "C" void product_run(const bf16*, const bf16*, int64_t, bf16*, int64_t, int64_t, int64_t,
                            int64_t, const float*) {}

#endif
