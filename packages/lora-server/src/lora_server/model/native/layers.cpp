// Parts of a decoder layer on CPUs with AVX-512, float32 or bfloat16: paged keys and values,
// attention of one token a sequence, and what transformers' layers do in many small operators.
//
// Where transformers rounds to bfloat16 between two operators, so do these. No row's result
// depends on another row.
//
// Letters: T rows, B sequences, H heads, K key heads, D head width, F width.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || \
    !defined(__AVX512BF16__)
#error "these kernels need AVX-512 with F, BW, VL and BF16"
#endif

namespace {

struct bf16 {
  uint16_t bits;
};

constexpr int LANES = 16;
constexpr int HEADS = 4;          // query heads of a block, which share a pass over keys
constexpr int64_t SMALL = 1 << 14;  // numbers below which a second thread costs more than it saves

__mmask16 first(int64_t n) { return n >= LANES ? 0xffff : (__mmask16)((1u << n) - 1); }

__m512 load(const float* p, __mmask16 mask = 0xffff) { return _mm512_maskz_loadu_ps(mask, p); }

__m512 load(const bf16* p, __mmask16 mask = 0xffff) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

void store(float* p, __m512 value, __mmask16 mask = 0xffff) {
  _mm512_mask_storeu_ps(p, mask, value);
}

void store(bf16* p, __m512 value, __mmask16 mask = 0xffff) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(value));
}

// What is left of a value once it has been stored as a T.
template <typename T>
__m512 rounded(__m512 value);

template <>
__m512 rounded<float>(__m512 value) {
  return value;
}

template <>
__m512 rounded<bf16>(__m512 value) {
  __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// e^x, relative error below 2e-7; 0 far below the range, infinity above it.
__m512 exponential(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  __m512 bounded = _mm512_max_ps(x, _mm512_set1_ps(-126.0f * 0.6931472f));
  __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(bounded, log2e), 8);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), bounded);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);  // Cephes' expf
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                       5.0000001201e-1f})
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(factor));
  sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
  __m512 value = _mm512_scalef_ps(sum, whole);
  // Comparisons that are false for NaN, which passes through.
  __mmask16 is_tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(value, is_tiny, _mm512_setzero_ps());
}

// Fills `keys` with the places of one key head's keys from `begin` to `end`, in a store
// [blocks, block size, 2, K, D]; its value lies K * D numbers behind each.
template <typename T>
void find_keys(const T* data, const int64_t* blocks, int64_t block_size, int64_t num_heads,
               int64_t width, int64_t head, int64_t begin, int64_t end, const T** keys) {
  int64_t token = 2 * num_heads * width;
  for (int64_t position = begin; position < end;) {
    int64_t offset = position % block_size;
    int64_t stop = std::min(end, position + block_size - offset);
    const T* key = data + (blocks[position / block_size] * block_size + offset) * token +
                   head * width;
    for (; position < stop; ++position, key += token) *keys++ = key;
  }
}

// sum += the products of `count` numbers at both places, lane by lane; count is a multiple of 16.
__m512 add_products(const float* a, const float* b, int64_t count, __m512 sum) {
  for (int64_t i = 0; i < count; i += LANES) sum = _mm512_fmadd_ps(load(a + i), load(b + i), sum);
  return sum;
}

__m512 add_products(const bf16* a, const bf16* b, int64_t count, __m512 sum) {
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    __mmask32 mask = count - i >= 2 * LANES ? 0xffffffff : 0xffff;
    __m512bh left = (__m512bh)_mm512_maskz_loadu_epi16(mask, a + i);
    sum = _mm512_dpbf16_ps(sum, left, (__m512bh)_mm512_maskz_loadu_epi16(mask, b + i));
  }
  return sum;
}

// One key head's part for NH of its query heads. scores holds NH rows of `span` numbers.
template <typename T, int NH>
void attend(const T* const* keys, int64_t count, int64_t width, int64_t value_offset,
            const T* const* query, T* const* out, float scaling, float* scores, int64_t span) {
  constexpr int VECTORS = 4, AHEAD = 8;
  for (int64_t i = 0; i < count; ++i) {
    if (i + AHEAD < count)
      for (int64_t v = 0; v < width; v += 64 / (int64_t)sizeof(T)) {
        _mm_prefetch((const char*)(keys[i + AHEAD] + v), _MM_HINT_T0);
        _mm_prefetch((const char*)(keys[i + AHEAD] + value_offset + v), _MM_HINT_T1);
      }
    for (int h = 0; h < NH; ++h)
      scores[h * span + i] =
          _mm512_reduce_add_ps(add_products(query[h], keys[i], width, _mm512_setzero_ps())) *
          scaling;
  }
  float total[NH];
  for (int h = 0; h < NH; ++h) {
    float* row = scores + h * span;
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
      __mmask16 mask = first(count - i);
      most = _mm512_mask_max_ps(most, mask, most, load(row + i, mask));
    }
    __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t i = 0; i < count; i += LANES) {
      __mmask16 mask = first(count - i);
      __m512 weight = exponential(_mm512_sub_ps(load(row + i, mask), top));
      _mm512_mask_storeu_ps(row + i, mask, weight);
      sum = _mm512_mask_add_ps(sum, mask, sum, weight);
    }
    total[h] = _mm512_reduce_add_ps(sum);
  }
  for (int64_t first = 0; first < width; first += VECTORS * LANES) {
    int vectors = (int)std::min<int64_t>(VECTORS, (width - first) / LANES);
    __m512 sums[NH][VECTORS];
    for (int h = 0; h < NH; ++h)
      for (int v = 0; v < VECTORS; ++v) sums[h][v] = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; ++i) {
      const T* value = keys[i] + value_offset + first;
      __m512 weights[NH];
      for (int h = 0; h < NH; ++h) weights[h] = _mm512_set1_ps(scores[h * span + i]);
      for (int v = 0; v < VECTORS; ++v) {
        if (v >= vectors) break;
        __m512 part = load(value + v * LANES);
        for (int h = 0; h < NH; ++h) sums[h][v] = _mm512_fmadd_ps(part, weights[h], sums[h][v]);
      }
    }
    for (int h = 0; h < NH; ++h)
      for (int v = 0; v < vectors; ++v)
        store(out[h] + first + v * LANES, _mm512_div_ps(sums[h][v], _mm512_set1_ps(total[h])));
  }
}

// Arguments of `decode`; filled by attention.py in this order.
struct Decode {
  int64_t num_sequences, num_heads, num_kv_heads, width, block_size, blocks_per_sequence;
  int64_t query_row, query_head, out_row, out_head;  // strides in numbers
  const int64_t* blocks;     // [B, blocks_per_sequence]
  const int64_t* positions;  // [B]: of the token, the last one it may look at
  const int64_t* rows;       // [B]: of the query and the result; null is 0, 1, ...
  int64_t window;            // keys that it may look back at, itself included; 0 is all
};

template <typename T>
void decode(const Decode& d, const T* query, T* out, const T* data, float scaling) {
  int64_t groups = d.num_heads / d.num_kv_heads, longest = 0;
  for (int64_t b = 0; b < d.num_sequences; ++b) longest = std::max(longest, d.positions[b] + 1);
  int64_t span = (longest + LANES - 1) / LANES * LANES;
  // A sequence's key heads lie side by side in memory: one thread takes them all, unless there
  // are too few sequences for all threads.
  int64_t share = d.num_sequences >= 4 * omp_get_max_threads() ? d.num_kv_heads : 1;
#pragma omp parallel
  {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<const T*> keys;
    if ((int64_t)scores.size() < HEADS * span) scores.resize(HEADS * span);
    if ((int64_t)keys.size() < span) keys.resize(span);
#pragma omp for schedule(dynamic, share)
    for (int64_t unit = 0; unit < d.num_sequences * d.num_kv_heads; ++unit) {
      int64_t b = unit / d.num_kv_heads, kv_head = unit % d.num_kv_heads;
      int64_t row = d.rows ? d.rows[b] : b, end = d.positions[b] + 1;
      int64_t begin = d.window ? std::max<int64_t>(end - d.window, 0) : 0;
      find_keys(data, d.blocks + b * d.blocks_per_sequence, d.block_size, d.num_kv_heads, d.width,
                kv_head, begin, end, keys.data());
      int64_t offset = d.num_kv_heads * d.width;
      for (int64_t g = 0; g < groups; g += HEADS) {
        const T* queries[HEADS];
        T* outs[HEADS];
        int count = (int)std::min<int64_t>(HEADS, groups - g);
        for (int h = 0; h < count; ++h) {
          int64_t head = kv_head * groups + g + h;
          queries[h] = query + row * d.query_row + head * d.query_head;
          outs[h] = out + row * d.out_row + head * d.out_head;
        }
        auto run = [&](auto function) {
          function(keys.data(), end - begin, d.width, offset, queries, outs, scaling,
                   scores.data(), span);
        };
        switch (count) {
          case 1: run(attend<T, 1>); break;
          case 2: run(attend<T, 2>); break;
          case 3: run(attend<T, 3>); break;
          default: run(attend<T, HEADS>);
        }
      }
    }
  }
}

// Arguments of `write`; filled by attention.py in this order.
struct Write {
  int64_t num_tokens, num_heads, width;
  int64_t key_row, key_head, value_row, value_head;  // strides in numbers
  const int64_t* slots;                              // [T]: places in the store
};

template <typename T>
void write(const Write& w, const T* key, const T* value, T* data) {
  int64_t token = 2 * w.num_heads * w.width;
#pragma omp parallel for if (w.num_tokens * token > SMALL)
  for (int64_t t = 0; t < w.num_tokens; ++t)
    for (int64_t h = 0; h < w.num_heads; ++h) {
      T* place = data + w.slots[t] * token + h * w.width;
      memcpy(place, key + t * w.key_row + h * w.key_head, w.width * sizeof(T));
      memcpy(place + w.num_heads * w.width, value + t * w.value_row + h * w.value_head,
             w.width * sizeof(T));
    }
}

// y = weight * round(x / sqrt(mean(x^2) + epsilon))
template <typename T>
void rms_norm(const T* x, int64_t stride, const T* weight, float epsilon, T* y, int64_t num_rows,
              int64_t width) {
#pragma omp parallel for if (num_rows * width > SMALL)
  for (int64_t t = 0; t < num_rows; ++t) {
    const T* row = x + t * stride;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
      __m512 part = load(row + i, first(width - i));
      sum = _mm512_fmadd_ps(part, part, sum);
    }
    float scale = 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / (float)width + epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
      __mmask16 mask = first(width - i);
      __m512 part = rounded<T>(_mm512_mul_ps(load(row + i, mask), _mm512_set1_ps(scale)));
      store(y + t * width + i, _mm512_mul_ps(part, load(weight + i, mask)), mask);
    }
  }
}

// y = round(silu(gate)) * up
template <typename T>
void silu_multiply(const T* gate, int64_t gate_row, const T* up, int64_t up_row, T* y,
                   int64_t num_rows, int64_t width) {
#pragma omp parallel for if (num_rows * width > SMALL)
  for (int64_t t = 0; t < num_rows; ++t)
    for (int64_t i = 0; i < width; i += LANES) {
      __mmask16 mask = first(width - i);
      __m512 x = load(gate + t * gate_row + i, mask);
      __m512 below = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
      __m512 silu = _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), below));
      __m512 product = _mm512_mul_ps(rounded<T>(silu), load(up + t * up_row + i, mask));
      store(y + t * width + i, product, mask);
    }
}

// y = round(x * cos) + round(rotate_half(x) * sin), head by head; cos and sin [T, D].
template <typename T>
void rotate(const T* x, int64_t row, int64_t head, const T* cosine, const T* sine, T* y,
            int64_t num_rows, int64_t num_heads, int64_t width) {
  int64_t half = width / 2;
#pragma omp parallel for if (num_rows * num_heads * width > SMALL)
  for (int64_t t = 0; t < num_rows; ++t)
    for (int64_t h = 0; h < num_heads; ++h) {
      const T* from = x + t * row + h * head;
      T* to = y + (t * num_heads + h) * width;
      for (int64_t i = 0; i < half; i += LANES) {
        __mmask16 mask = first(half - i);
        __m512 low = load(from + i, mask), high = load(from + half + i, mask);
        const T *c = cosine + t * width + i, *s = sine + t * width + i;
        __m512 turned = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), high), load(s, mask));
        __m512 kept = _mm512_mul_ps(low, load(c, mask));
        store(to + i, _mm512_add_ps(rounded<T>(kept), rounded<T>(turned)), mask);
        turned = _mm512_mul_ps(low, load(s + half, mask));
        kept = _mm512_mul_ps(high, load(c + half, mask));
        store(to + half + i, _mm512_add_ps(rounded<T>(kept), rounded<T>(turned)), mask);
      }
    }
}

}  // namespace

#define EXPORT(NAME, T)                                                                           \
  extern "C" void decode_##NAME(const Decode* d, const T* query, T* out, const T* data,           \
                                float scaling) {                                                  \
    decode(*d, query, out, data, scaling);                                                        \
  }                                                                                               \
  extern "C" void write_##NAME(const Write* w, const T* key, const T* value, T* data) {           \
    write(*w, key, value, data);                                                                  \
  }                                                                                               \
  extern "C" void rms_norm_##NAME(const T* x, int64_t stride, const T* weight, float epsilon,     \
                                  T* y, int64_t num_rows, int64_t width) {                        \
    rms_norm(x, stride, weight, epsilon, y, num_rows, width);                                     \
  }                                                                                               \
  extern "C" void silu_multiply_##NAME(const T* gate, int64_t gate_row, const T* up,              \
                                       int64_t up_row, T* y, int64_t num_rows, int64_t width) {   \
    silu_multiply(gate, gate_row, up, up_row, y, num_rows, width);                                \
  }                                                                                               \
  extern "C" void rotate_##NAME(const T* x, int64_t row, int64_t head, const T* cosine,           \
                                const T* sine, T* y, int64_t num_rows, int64_t num_heads,         \
                                int64_t width) {                                                  \
    rotate(x, row, head, cosine, sine, y, num_rows, num_heads, width);                            \
  }

EXPORT(float, float)
EXPORT(bf16, bf16)
