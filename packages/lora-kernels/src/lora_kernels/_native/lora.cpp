// The LoRA part of a linear module, alone: see lora.h.

#include "lora.h"

namespace {

template <typename T>
void apply(const lora::Module& m, const lora::Step& s, const T* x, int64_t x_stride, T* y,
           int64_t y_stride) {
  static thread_local lora::Plan own_plan;
  lora::Plan& plan = own_plan;  // the caller's, for all threads of the region
  plan.make(m, s);
#pragma omp parallel
  {
    lora::shrink(m, s, plan, x, x_stride);
#pragma omp barrier
    lora::expand(m, s, plan, y, y_stride);
  }
}

}  // namespace

// Strides are in numbers. No entry may share its token with another one.
extern "C" void lora_apply_float(const lora::Module* m, const lora::Step* s, const float* x,
                                 int64_t x_stride, float* y, int64_t y_stride) {
  apply(*m, *s, x, x_stride, y, y_stride);
}

extern "C" void lora_apply_bf16(const lora::Module* m, const lora::Step* s, const bf16* x,
                                int64_t x_stride, bf16* y, int64_t y_stride) {
  apply(*m, *s, x, x_stride, y, y_stride);
}
