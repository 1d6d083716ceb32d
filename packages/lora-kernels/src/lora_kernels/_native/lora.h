// The LoRA part of a (packed) linear module, float32 or bfloat16.
//
// Two passes with a barrier between them: v = A x for every entry and rank, then y += B v. The
// order of every sum depends on the module's widths and ranks alone, so that a row's result does
// not depend on its neighbours. bfloat16 goes through AMX tiles where there are any.

#pragma once

#include <type_traits>

#include "lora_expand.h"
#include "lora_rows.h"
#include "lora_shrink.h"

namespace lora {

// The first pass, by all threads of a team; `plan` was made by one of them before. A barrier must
// follow.
template <typename T>
void shrink(const Module& m, const Step& s, Plan& plan, const T* x, int64_t x_stride) {
  if constexpr (std::is_same_v<T, bf16>)
    if (tiles::is_available()) return tiles::shrink(m, s, plan, x, x_stride);
  rows::shrink(m, s, plan, x, x_stride);
}

// The second pass, by all threads of a team. A barrier must follow.
template <typename T>
void expand(const Module& m, const Step& s, const Plan& plan, T* y, int64_t y_stride) {
  if constexpr (std::is_same_v<T, bf16>)
    if (tiles::is_available()) return tiles::expand(m, s, plan, y, y_stride);
  rows::expand(m, s, plan, y, y_stride);
}

}  // namespace lora
