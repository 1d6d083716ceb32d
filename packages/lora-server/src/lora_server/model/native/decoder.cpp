// Decoder layers of Llama's form in bfloat16, and whole models of them, in one call each: see
// decoder_layer.h.
//
// Letters: T rows, S rows whose states are wanted, V vocabulary, D hidden width, W head width.

#include "decoder_layer.h"

using decoder::Buffer, decoder::Call, decoder::Layer, decoder::Scratch, decoder::Step;

namespace {

// What a model has around its layers; filled by forward.py in this order.
struct Model {
  const bf16* embedding;  // [V, D]
  const bf16* norm;       // [D]
  int64_t vocabulary, hidden, width;
  float epsilon;
};

// What a call is about; filled by forward.py in this order.
struct Tokens {
  const int64_t* token_ids;    // [T]
  const bf16* embedded;        // [T, D] in the place of the table's rows, or null
  const int64_t* positions;    // [T]
  const bf16 *cosine, *sine;   // [positions, W]
  const int64_t* kept;         // [S] rows
  int64_t num_kept;
};

// By all threads of a team, each for the rows that it will begin with.
void gather(const Model& m, const Tokens& given, int64_t num_rows, bf16* hidden, bf16* cosine,
            bf16* sine) {
  constexpr int64_t AHEAD = 4;  // rows; each is somewhere else in the table
  Share own = decoder::own_rows(num_rows);
  auto source = [&](int64_t t) {
    if (given.embedded) return given.embedded + t * m.hidden;
    return m.embedding + given.token_ids[t] * m.hidden;
  };
  auto copy = [](bf16* to, const bf16* from, int64_t size) {
    memcpy(to, from, size * sizeof(bf16));
  };
  for (int64_t t = own.begin; t < own.end; ++t) {
    if (t + AHEAD < own.end)
      for (int64_t i = 0; i < m.hidden; i += 32)
        _mm_prefetch((const char*)(source(t + AHEAD) + i), _MM_HINT_T0);
    int64_t angle = given.positions[t] * m.width;
    copy(hidden + t * m.hidden, source(t), m.hidden);
    copy(cosine + t * m.width, given.cosine + angle, m.width);
    copy(sine + t * m.width, given.sine + angle, m.width);
  }
}

// All layers, by all threads of a team; `out` may be `in`.
void run_layers(const Layer* layers, int64_t count, const Step& step, Scratch& scratch,
                const bf16* in, bf16* out) {
  for (int64_t i = 0; i < count; ++i) {
    const Layer& layer = layers[i];
    scratch.plan(layer, step, i);
    Call{layer, step, scratch}.run(i ? out : in, out);
  }
}

}  // namespace

// out [T, D] = the layers, one after the other, of in [T, D]; rows contiguous.
extern "C" void decoder_layers(const Layer* layers, int64_t count, const Step* step,
                               const bf16* in, bf16* out) {
  static thread_local Scratch own_scratch;
  Scratch& scratch = own_scratch;  // the caller's, for all threads of the region
  scratch.begin(layers, count, *step);
#pragma omp parallel
  run_layers(layers, count, *step, scratch, in, out);
}

// out [S, D] = the last norm of what the layers make of the tokens. The step's own rotary
// embeddings are not read. Returns 1 where a token is none of the vocabulary: nothing is done then.
extern "C" int decoder_model(const Model* model, const Layer* layers, int64_t count,
                             const Step* step, const Tokens* tokens, bf16* out) {
  static thread_local Scratch own_scratch;
  static thread_local Buffer own_hidden, own_cosine, own_sine;
  int64_t num_rows = step->num_rows, size = model->hidden;
  for (int64_t t = 0; t < num_rows && !tokens->embedded; ++t)
    if ((uint64_t)tokens->token_ids[t] >= (uint64_t)model->vocabulary) return 1;
  Scratch& scratch = own_scratch;
  scratch.begin(layers, count, *step);
  own_hidden.reserve(num_rows * size);
  own_cosine.reserve(num_rows * model->width);
  own_sine.reserve(num_rows * model->width);
  bf16 *hidden = own_hidden.data(), *cosine = own_cosine.data(), *sine = own_sine.data();
  Step own = *step;
  own.cosine = cosine;
  own.sine = sine;
#pragma omp parallel
  {
    gather(*model, *tokens, num_rows, hidden, cosine, sine);
    run_layers(layers, count, own, scratch, hidden, hidden);
#pragma omp barrier
#pragma omp for
    for (int64_t i = 0; i < tokens->num_kept; ++i)
      rows::normalise(hidden + tokens->kept[i] * size, model->norm, model->epsilon,
                      out + i * size, size);
  }
  return 0;
}
