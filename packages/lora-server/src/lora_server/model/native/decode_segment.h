// Up to SEGMENT keys and values of one sequence, for decode.h: scores, weights, sums of values.
//
// Letters: D head width.

#pragma once

#include "exponential.h"
#include "store.h"
#include "combine.h"

namespace attention {

constexpr int64_t SEGMENT = 64;       // keys whose weights are relative to one largest logit
constexpr int64_t RUN = 8 * SEGMENT;  // keys that one thread takes at least
constexpr int64_t VALUES = 2 * LANES;  // numbers of a value taken at a time

// sum += the products of 32 numbers of both sides, or of 16, lane by lane.
template <bool IS_HALF>
__m512 add_products(const float* a, const float* b, __m512 sum) {
  sum = _mm512_fmadd_ps(load(a), load(b), sum);
  return IS_HALF ? sum : _mm512_fmadd_ps(load(a + LANES), load(b + LANES), sum);
}

template <bool IS_HALF>
__m512i load_bits(const bf16* p) {
  if constexpr (IS_HALF) return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_loadu_si512(p);
}

template <bool IS_HALF>
__m512 add_products(const bf16* a, const bf16* b, __m512 sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)load_bits<IS_HALF>(a), (__m512bh)load_bits<IS_HALF>(b));
}

// Loads 32 or 16 numbers as two registers: the first and the second half of float32 numbers, the
// even and the odd ones of bfloat16, which takes fewer instructions. `store_values` is the
// opposite.
template <bool IS_HALF>
void load_values(const float* p, __m512* parts) {
  parts[0] = load(p);
  parts[1] = IS_HALF ? _mm512_setzero_ps() : load(p + LANES);
}

template <bool IS_HALF>
void load_values(const bf16* p, __m512* parts) {
  __m512i both = load_bits<IS_HALF>(p);
  parts[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  parts[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000)));
}

inline void store_values(float* p, __m512 low, __m512 high, int64_t count) {
  store(p, low);
  store(p + LANES, high, count > LANES ? 0xffff : 0);
}

inline void store_values(bf16* p, __m512 even, __m512 odd, int64_t count) {
  __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
  __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
  _mm512_mask_storeu_epi16(p, count >= VALUES ? 0xffffffff : 0xffff,
                           _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Turns a head's scores into weights 2^(factor * score - top); writes top and their total.
inline void weigh(float* scores, int64_t count, float factor, float* top_and_total) {
  __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  __m512 scale = _mm512_set1_ps(factor);
  for (int64_t k = 0; k < count; k += LANES) {
    __m512 score = _mm512_mul_ps(load(scores + k), scale);
    most = _mm512_mask_max_ps(most, first(count - k), most, score);
    store(scores + k, score);
  }
  float top = _mm512_reduce_max_ps(most);
  for (int64_t k = 0; k < count; k += LANES) {
    __mmask16 mask = first(count - k);
    __m512 weight = power_of_two<false>(_mm512_sub_ps(load(scores + k), _mm512_set1_ps(top)));
    store(scores + k, weight);
    sum = _mm512_mask_add_ps(sum, mask, sum, weight);
  }
  top_and_total[0] = top;
  top_and_total[1] = _mm512_reduce_add_ps(sum);
}

// Calls `run` with the number of heads as a constant, block by block.
template <int MOST, typename F>
void in_blocks(int64_t count, F run) {
  for (int64_t i = 0; i < count; i += MOST) switch (std::min<int64_t>(MOST, count - i)) {
      case 1: run(i, std::integral_constant<int, 1>()); break;
      case 2: run(i, std::integral_constant<int, 2>()); break;
      case 3: run(i, std::integral_constant<int, 3>()); break;
      default: run(i, std::integral_constant<int, MOST>());
    }
}

// The keys that a thread will take, in their order, and how far the memory has been asked for them
// and their values. That goes on evenly beside the arithmetic, across the ends of runs, so that
// neither waits for the other. To the second level: the first one's few places for lines on their
// way would hold up other loads.
template <typename T>
struct Stream {
  const T* const* keys;
  int64_t count;
  int64_t key_size, offset;  // numbers of a key, all heads; from a key to its value
  int64_t next = 0;

  static constexpr int64_t AHEAD = SEGMENT;

  void fetch_to(int64_t end) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (end = std::min(end, count); next < end; ++next)
      for (const T* part : {keys[next], keys[next] + offset})
        for (int64_t d = 0; d < key_size; d += LINE) prefetch<2>(part + d);
  }
};

template <typename T>
struct Segment {
  const T* const* keys;  // [count], and as many valid ones as fill up a register
  int64_t count;
  int64_t width;
  int64_t num_kv_heads, groups;  // key heads that are taken; query heads of each
  int64_t offset;                // from a key to its value
  Stream<T>& stream;
  int64_t place;  // of the first key in the stream

  static constexpr int HEADS = 4;  // query heads that share a pass over keys or values

  // Asks for the keys that are wanted a segment later. `part` is what has been done with the keys,
  // in halves of them: their scores, the sums of their values.
  void fetch(int64_t part) const { stream.fetch_to(place + stream.AHEAD + part / 2); }

  // scores[head][k] = query of the head . key k; rows of SEGMENT numbers.
  void score(const T* query, int64_t query_head, float* scores) const {
    for (int64_t k = 0; k < count; k += LANES) {
      fetch(k + LANES);
      for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head)
        in_blocks<HEADS>(groups, [&](int64_t g, auto heads) {
          int64_t head = kv_head * groups + g;
          score_block<heads>(k, kv_head * width, query + head * query_head, query_head,
                             scores + head * SEGMENT + k);
        });
    }
  }

  // sums[head] = the weighted sum of values.
  void sum_values(const float* weights, float* sums, int64_t stride) const {
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      fetch(count + (kv_head + 1) * count / num_kv_heads);
      in_blocks<HEADS>(groups, [&](int64_t g, auto heads) {
        int64_t head = kv_head * groups + g, value = offset + kv_head * width;
        auto run = [&](int64_t d, auto function) {
          (this->*function)(value + d, weights + head * SEGMENT, sums + head * stride + d, stride);
        };
        int64_t d = 0;
        for (; d + 2 * VALUES <= width; d += 2 * VALUES)
          run(d, &Segment::template sum_block<heads, 2, false>);
        if (width - d >= VALUES) {
          run(d, &Segment::template sum_block<heads, 1, false>);
          d += VALUES;
        }
        if (d < width) run(d, &Segment::template sum_block<heads, 1, true>);
      });
    }
  }

 private:
  template <int NH>
  void score_block(int64_t first, int64_t place, const T* query, int64_t query_head,
                   float* scores) const {
    constexpr int BLOCK = 8;
    __m512 sums[NH][LANES];
    for (int64_t k = 0; k < LANES; k += BLOCK) {
      __m512 part[NH][BLOCK];
      for (auto& row : part)
        for (auto& sum : row) sum = _mm512_setzero_ps();
      const T* const* own = keys + first + k;
      int64_t d = 0;
      for (; d + VALUES <= width; d += VALUES)
        for (int i = 0; i < BLOCK; ++i)
          for (int h = 0; h < NH; ++h)
            part[h][i] = add_products<false>(query + h * query_head + d, own[i] + place + d,
                                             part[h][i]);
      if (d < width)
        for (int i = 0; i < BLOCK; ++i)
          for (int h = 0; h < NH; ++h)
            part[h][i] = add_products<true>(query + h * query_head + d, own[i] + place + d,
                                            part[h][i]);
      for (int h = 0; h < NH; ++h)
        for (int i = 0; i < BLOCK; ++i) sums[h][k + i] = part[h][i];
    }
    for (int h = 0; h < NH; ++h)
      store(scores + h * SEGMENT, combine_each(sums[h], [](__m512 a, __m512 b) {
              return _mm512_add_ps(a, b);
            }));
  }

  template <int NH, int STEPS, bool IS_HALF>
  void sum_block(int64_t place, const float* weights, float* out, int64_t stride) const {
    __m512 sums[NH][2 * STEPS];
    for (auto& row : sums)
      for (auto& sum : row) sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; ++k) {
      const T* value = keys[k] + place;
      __m512 parts[2 * STEPS];
      for (int s = 0; s < STEPS; ++s) load_values<IS_HALF>(value + s * VALUES, parts + 2 * s);
      for (int h = 0; h < NH; ++h) {
        __m512 weight = _mm512_set1_ps(weights[h * SEGMENT + k]);
        for (int s = 0; s < 2 * STEPS; ++s)
          sums[h][s] = _mm512_fmadd_ps(parts[s], weight, sums[h][s]);
      }
    }
    for (int h = 0; h < NH; ++h)
      for (int s = 0; s < 2 * STEPS; ++s) store(out + h * stride + s * LANES, sums[h][s]);
  }
};

}  // namespace attention
