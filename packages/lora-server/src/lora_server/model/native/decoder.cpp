// Decoder layers of Llama's form in bfloat16, in one call: see decoder_layer.h.

#include "decoder_layer.h"

using decoder::Call, decoder::Layer, decoder::Scratch, decoder::Step;

// out [T, D] = the layers, one after the other, of in [T, D]; rows contiguous.
extern "C" void decoder_layers(const Layer* layers, int64_t count, const Step* step,
                               const bf16* in, bf16* out) {
  static thread_local Scratch own_scratch;
  Scratch& scratch = own_scratch;  // the caller's, for all threads of the region
  for (int64_t i = 0; i < count; ++i) scratch.reserve(layers[i], step->num_rows);
#pragma omp parallel
  for (int64_t i = 0; i < count; ++i) {
    const Layer& layer = layers[i];
#pragma omp single
    for (int p = 0; p < 4; ++p)
      if (layer.slots[p]) scratch.plans[p].make(*layer.slots[p], *step->routing);
    Call{layer, *step, scratch}.run(i ? out : in, out);
  }
}
