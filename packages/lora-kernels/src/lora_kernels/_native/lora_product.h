// y = x W^T + bias + B A x in bfloat16: a base product and its LoRA part, with one rounding.
//
// The order of every sum depends on the module's widths and ranks alone, whatever the rows are.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora.h"
#include "lora_added.h"
#include "lora_kept.h"
#include "lora_shrink_rows.h"

namespace lora {

// Whether no thread needs anything of another one's, neither here nor of x.
inline bool is_apart(const Module& m, int64_t num_rows) {
  return product::is_by_rows(num_rows) && tiles::is_available() && tiles::can_add(m);
}

// By all threads of a team; `plan` and `pieces` were made by one of them before. A barrier must
// follow.
//
// kept: [T, O] and 16 more, for MAX_KEPT_ROWS at most.
inline void run(const product::Packed& p, const product::Input& x, bf16* y, int64_t y_stride,
                const Module& m, const Step& s, Plan& plan, const Pieces& pieces, float* kept) {
#if HAS_TILES
  if (tiles::is_available() && tiles::can_add(m)) {
    tiles::Added added{m, s, plan, pieces};
    if (tiles::is_kept(pieces, x.num_rows)) {
      product::run(p, x, y, y_stride, tiles::Keeping{kept, tiles::is_all(m, s, x.num_rows)});
      tiles::shrink(m, s, plan, x.rows, x.stride);
#pragma omp barrier
      tiles::expand(m, s, plan, y, y_stride, {kept, p.bias});
      return;
    }
    if (product::is_by_rows(x.num_rows)) {
      Share own = product::own_tiles(x.num_rows);
      tiles::shrink_rows(m, s, plan, pieces, x, own.begin, own.end);
    } else {
      tiles::shrink(m, s, plan, x.rows, x.stride);
#pragma omp barrier
    }
    product::run(p, x, y, y_stride, added);
    return;
  }
#endif
  // With two roundings.
  product::run(p, x, y, y_stride);
  shrink(m, s, plan, x.rows, x.stride);
#pragma omp barrier
  expand(m, s, plan, y, y_stride);
}

}  // namespace lora
