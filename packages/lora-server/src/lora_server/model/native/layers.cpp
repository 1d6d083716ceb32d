// Parts of a decoder layer, and the choice of the largest logit, on CPUs with AVX-512, one call each:
// see attention.h, rows.h and largest.h.
//
// Letters: T rows, H heads, D head width, F width.

#include "attention.h"
#include "largest.h"
#include "rows.h"

namespace {
constexpr int64_t SMALL = 1 << 14;  // numbers below which a second thread costs more than it saves
}

#define EXPORT(NAME, T)                                                                           \
  extern "C" void decode_##NAME(const attention::Decode* d, const T* query, T* out,               \
                                const T* data, float scaling) {                                   \
    _Pragma("omp parallel") attention::decode(*d, query, out, data, scaling);                     \
  }                                                                                               \
  extern "C" void prefill_##NAME(const attention::PrefillShape* p,                                \
                                 const attention::Prefill* chunks, int64_t num_chunks,            \
                                 const T* query, T* out, const T* data, float scaling) {          \
    _Pragma("omp parallel")                                                                       \
        attention::prefill(*p, chunks, num_chunks, query, out, data, scaling);                    \
  }                                                                                               \
  extern "C" void write_##NAME(const attention::Write* w, const T* key, const T* value,           \
                               T* data) {                                                         \
    int64_t size = w->num_tokens * w->num_heads * w->width;                                       \
    _Pragma("omp parallel if (size > SMALL / 2)") attention::write(*w, key, value, data);         \
  }                                                                                               \
  extern "C" void rms_norm_##NAME(const T* x, int64_t stride, const T* weight, float epsilon,     \
                                  T* y, int64_t num_rows, int64_t width) {                        \
    _Pragma("omp parallel for if (num_rows * width > SMALL)") for (int64_t t = 0; t < num_rows;   \
                                                                   ++t)                           \
        rows::normalise(x + t * stride, weight, epsilon, y + t * width, width);                   \
  }                                                                                               \
  extern "C" void silu_multiply_##NAME(const T* gate, int64_t gate_row, const T* up,              \
                                       int64_t up_row, T* y, int64_t num_rows, int64_t width) {   \
    _Pragma("omp parallel for if (num_rows * width > SMALL)") for (int64_t t = 0; t < num_rows;   \
                                                                   ++t)                           \
        rows::silu_multiply(gate + t * gate_row, up + t * up_row, y + t * width, width);          \
  }                                                                                               \
  extern "C" void rotate_##NAME(const T* x, int64_t row, int64_t head, const T* cosine,           \
                                const T* sine, T* y, int64_t num_rows, int64_t num_heads,         \
                                int64_t width) {                                                  \
    _Pragma("omp parallel for if (num_rows * num_heads * width > SMALL)") for (int64_t t = 0;     \
                                                                               t < num_rows; ++t) \
        for (int64_t h = 0; h < num_heads; ++h)                                                   \
            rows::rotate(x + t * row + h * head, cosine + t * width, sine + t * width,            \
                         y + (t * num_heads + h) * width, width);                                 \
  }                                                                                               \
  extern "C" int find_largest_##NAME(const T* x, int64_t stride, int64_t num_rows, int64_t width, \
                                     int64_t* places) {                                           \
    /* one thread: to wake another one takes longer than it would save */                         \
    return rows::find_largest(x, stride, num_rows, width, places);                                \
  }

EXPORT(float, float)
EXPORT(bf16, bf16)
