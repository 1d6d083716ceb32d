// Packing a weight, and its product alone: see product.h.

#include "product_largest.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <vector>

using product::DEPTH, product::TILE, product::TILE_SIZE;

// Asks the system for the tile registers; 0 where there are none.
extern "C" int product_is_available() {
#if HAS_TILES
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 0;
#endif
}

// Asks for huge pages; a system without them keeps its own, and nothing is lost but time.
extern "C" void product_advise(void* address, int64_t num_bytes) {
  madvise(address, num_bytes, MADV_HUGEPAGE);
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

// The rows of x; where they end in a part of a tile, that part is filled up with zeros, in `rest`.
static product::Input input_of(const bf16* x, int64_t stride, int64_t num_rows, int64_t num_in,
                               std::vector<bf16>& rest) {
  int64_t left = num_rows > TILE ? num_rows % TILE : 0;
  if (left) {
    rest.assign(TILE * num_in, bf16{0});
    for (int64_t row = 0; row < left; ++row)
      memcpy(rest.data() + row * num_in, x + (num_rows - left + row) * stride,
             num_in * sizeof(bf16));
  }
  return {x, stride, num_rows, left ? rest.data() : nullptr};
}

static thread_local std::vector<bf16> last_rows;

// y [T, O] = x [T, I] W^T + bias; bias is float32 or null. Strides are in numbers.
extern "C" void product_run(const bf16* packed, const bf16* x, int64_t x_stride, bf16* y,
                            int64_t y_stride, int64_t num_rows, int64_t num_out, int64_t num_in,
                            const float* bias) {
  product::Packed weight{packed, bias, num_out, num_in};
  product::Input input = input_of(x, x_stride, num_rows, num_in, last_rows);
#pragma omp parallel
  product::run(weight, input, y, y_stride);
}

// The first place of each row's largest y, `places` [T]; 0 where a row has none, or has a NaN.
extern "C" int product_largest(const bf16* packed, const bf16* x, int64_t x_stride,
                               int64_t num_rows, int64_t num_out, int64_t num_in,
                               const float* bias, int64_t* places) {
#if HAS_TILES
  product::Packed weight{packed, bias, num_out, num_in};
  product::Input input = input_of(x, x_stride, num_rows, num_in, last_rows);
  std::vector<product::Largest> best(num_rows);
  bool are_finite = true;
#pragma omp parallel
  {
    product::Choosing own(num_rows);
    product::run(weight, input, nullptr, 0, own);
#pragma omp critical
    {
      are_finite &= own.are_numbers();
      for (int64_t t = 0; t < num_rows; ++t)
        if (best[t].is_less(own.rows[t])) best[t] = own.rows[t];
    }
  }
  for (int64_t t = 0; t < num_rows; ++t) {
    places[t] = best[t].place;
    are_finite &= ordered::is_finite(best[t].order);
  }
  return are_finite;
#else
  return 0;
#endif
}
