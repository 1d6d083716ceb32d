// Paged keys and values on CPUs with AVX-512, float32 or bfloat16: storing them, and attention of
// sequences that bring one token each. No row's result depends on another row.
//
// Letters: T tokens, B sequences, H heads, K key heads, D head width.

#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "exponential.h"

namespace attention {

constexpr int HEADS = 4;  // query heads of a block, which share a pass over keys

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
inline __m512 add_products(const float* a, const float* b, int64_t count, __m512 sum) {
  for (int64_t i = 0; i < count; i += LANES) sum = _mm512_fmadd_ps(load(a + i), load(b + i), sum);
  return sum;
}

inline __m512 add_products(const bf16* a, const bf16* b, int64_t count, __m512 sum) {
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

// By all threads of a team; ends with a barrier.
template <typename T>
void decode(const Decode& d, const T* query, T* out, const T* data, float scaling) {
  int64_t groups = d.num_heads / d.num_kv_heads, longest = 0;
  for (int64_t b = 0; b < d.num_sequences; ++b) longest = std::max(longest, d.positions[b] + 1);
  int64_t span = (longest + LANES - 1) / LANES * LANES;
  // A sequence's key heads lie side by side in memory: one thread takes them all, unless there
  // are too few sequences for all threads.
  int64_t share = d.num_sequences >= 4 * omp_get_num_threads() ? d.num_kv_heads : 1;
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

// Consecutive tokens of one sequence; filled by attention.py in this order.
struct Prefill {
  int64_t start, num_tokens;  // rows of the step
  int64_t context;            // tokens of the sequence before
  const int64_t* blocks;      // those that hold the context and the chunk
};

// What all chunks of a call share; filled by attention.py in this order.
struct PrefillShape {
  int64_t num_heads, num_kv_heads, width, block_size;
  int64_t query_row, query_head, out_row, out_head;  // strides in numbers
  int64_t window;  // keys that a token may look back at, itself included; 0 is all
};

// Attention of chunks whose keys and values have been stored before. By all threads of a team;
// ends with a barrier.
template <typename T>
void prefill(const PrefillShape& p, const Prefill* chunks, int64_t num_chunks, const T* query,
             T* out, const T* data, float scaling) {
  int64_t groups = p.num_heads / p.num_kv_heads, longest = 0, total = 0;
  for (int64_t c = 0; c < num_chunks; ++c) {
    longest = std::max(longest, chunks[c].context + chunks[c].num_tokens);
    total += chunks[c].num_tokens;
  }
  int64_t span = (longest + LANES - 1) / LANES * LANES, offset = p.num_kv_heads * p.width;
  static thread_local std::vector<float> scores;
  static thread_local std::vector<const T*> keys;
  if ((int64_t)scores.size() < span) scores.resize(span);
  if ((int64_t)keys.size() < span) keys.resize(span);
#pragma omp for schedule(dynamic)
  for (int64_t unit = 0; unit < total * p.num_kv_heads; ++unit) {
    int64_t row = unit / p.num_kv_heads, kv_head = unit % p.num_kv_heads, c = 0;
    for (; row >= chunks[c].num_tokens; ++c) row -= chunks[c].num_tokens;
    int64_t end = chunks[c].context + row + 1;
    int64_t begin = p.window ? std::max<int64_t>(end - p.window, 0) : 0;
    row += chunks[c].start;
    find_keys(data, chunks[c].blocks, p.block_size, p.num_kv_heads, p.width, kv_head, begin, end,
              keys.data());
    for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; ++head) {
      const T* queries = query + row * p.query_row + head * p.query_head;
      T* outs = out + row * p.out_row + head * p.out_head;
      attend<T, 1>(keys.data(), end - begin, p.width, offset, &queries, &outs, scaling,
                   scores.data(), span);
    }
  }
}

// Arguments of `write`; filled by attention.py in this order.
struct Write {
  int64_t num_tokens, num_heads, width;
  int64_t key_row, key_head, value_row, value_head;  // strides in numbers
  const int64_t* slots;                              // [T]: places in the store
};

// By all threads of a team; ends with a barrier.
template <typename T>
void write(const Write& w, const T* key, const T* value, T* data) {
  int64_t token = 2 * w.num_heads * w.width;
#pragma omp for
  for (int64_t t = 0; t < w.num_tokens; ++t)
    for (int64_t h = 0; h < w.num_heads; ++h) {
      T* place = data + w.slots[t] * token + h * w.width;
      memcpy(place, key + t * w.key_row + h * w.key_head, w.width * sizeof(T));
      memcpy(place + w.num_heads * w.width, value + t * w.value_row + h * w.value_head,
             w.width * sizeof(T));
    }
}

}  // namespace attention
