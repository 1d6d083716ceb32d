// Attention of prompt chunks over keys and values that have been stored before.
//
// Keys are taken in blocks that begin at multiples of a fixed size, and what a row may not see
// has a weight of exactly 0: so a row's bits depend on its own position, keys and window, not on
// where chunks are cut, on other rows, or on threads. A block's tiles or registers are the
// business of prefill_tiles.h and prefill_lanes.h.
//
// Letters: H heads, K key heads, D head width.

#pragma once

#include <cmath>

#include "exponential.h"
#include "prefill_lanes.h"
#include "prefill_tiles.h"

namespace attention {

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

// The softmax of 16 rows over the keys up to now. Logits are in powers of two.
struct Running {
  __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
};

// What 16 consecutive rows see of a block: the first one's keys from `low` to `high`, each next
// one's a place further. Without a window all see from the block's first key on.
struct Visible {
  int64_t low, high;
  bool has_window;

  // Whether all rows see all 16 keys from k on.
  bool is_all(int64_t k) const {
    return k + LANES <= high && (!has_window || k >= low + LANES - 1);
  }
  __mmask16 of(int64_t row, int64_t k) const {
    __mmask16 up_to = bits(high + row - k);
    return has_window ? up_to & ~bits(low + row - k) : up_to;
  }

 private:
  static __mmask16 bits(int64_t n) {
    return (__mmask16)((1u << std::clamp<int64_t>(n, 0, LANES)) - 1);
  }
};

// Turns the scores of 16 rows from key `from` to `to` into weights 2^(factor * score - top), in
// place and exactly 0 for what is not visible; returns what earlier sums must be multiplied by.
template <typename Weight>
__m512 weigh(float* scores, int64_t stride, int64_t from, int64_t to, const Visible& visible,
             float factor, Running& running) {
  constexpr bool IS_ROUNDED = sizeof(Weight) == sizeof(bf16);
  // The rows' common keys lie between `begin` and `end`; branches are the same for all rows.
  int64_t begin = from, end = to;
  while (begin < to && !visible.is_all(begin)) begin += 2 * LANES;
  while (end > begin && !visible.is_all(end - LANES)) end -= 2 * LANES;
  __m512 rows[LANES];
  for (int row = 0; row < LANES; ++row) {
    const float* line = scores + row * stride;
    __m512 most = _mm512_set1_ps(-INFINITY);
    auto take = [&](int64_t k) {
      most = _mm512_mask_max_ps(most, visible.of(row, k), most, load(line + k));
    };
    for (int64_t k = from; k < begin; k += LANES) take(k);
    for (int64_t k = begin; k < end; k += LANES) most = _mm512_max_ps(most, load(line + k));
    for (int64_t k = end; k < to; k += LANES) take(k);
    rows[row] = most;
  }
  __m512 scale = _mm512_set1_ps(factor), before = running.top;
  __m512 most = combine_each(rows, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
  running.top = _mm512_max_ps(_mm512_mul_ps(most, scale), before);
  alignas(64) float tops[LANES];
  _mm512_store_ps(tops, running.top);
  for (int row = 0; row < LANES; ++row) {
    float* line = scores + row * stride;
    __m512 top = _mm512_set1_ps(tops[row]), sum = _mm512_setzero_ps();
    auto power = [&](int64_t k) {
      return power_of_two<IS_ROUNDED>(_mm512_fmsub_ps(load(line + k), scale, top));
    };
    auto masked = [&](int64_t k) { return _mm512_maskz_mov_ps(visible.of(row, k), power(k)); };
    auto put = [&](int64_t k, __m512 left, __m512 right) {
      if constexpr (IS_ROUNDED) {  // the total is that of the rounded weights
        __m512bh both = _mm512_cvtne2ps_pbh(right, left);
        _mm512_storeu_si512((bf16*)line + k, (__m512i)both);
        sum = _mm512_dpbf16_ps(sum, both, (__m512bh)_mm512_set1_epi16(0x3f80));
      } else {
        store(line + k, left);
        store(line + k + LANES, right);
        sum = _mm512_add_ps(_mm512_add_ps(sum, left), right);
      }
    };
    for (int64_t k = from; k < begin; k += 2 * LANES) put(k, masked(k), masked(k + LANES));
    for (int64_t k = begin; k < end; k += 2 * LANES) put(k, power(k), power(k + LANES));
    for (int64_t k = end; k < to; k += 2 * LANES) put(k, masked(k), masked(k + LANES));
    rows[row] = sum;
  }
  __m512 sums = combine_each(rows, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
  __m512 rest = power_of_two<false>(_mm512_sub_ps(before, running.top));
  __mmask16 is_same = _mm512_cmp_ps_mask(before, running.top, _CMP_EQ_OQ);
  rest = _mm512_mask_mov_ps(rest, is_same, _mm512_set1_ps(1.0f));
  running.total = _mm512_fmadd_ps(running.total, rest, sums);
  return rest;
}

// Consecutive rows of a chunk and the query heads of one key head.
template <typename Engine>
class Part {
  using T = typename Engine::Number;
  using Weight = typename Engine::Weight;
  static constexpr int64_t KEYS = Engine::KEYS, STEP = Engine::STEP, ROWS = Engine::ROWS;
  static constexpr int64_t NUM_RUNNING = ROWS / LANES;
  static constexpr int64_t SCORE_STRIDE = KEYS + LANES;
  static constexpr int64_t WEIGHT_STRIDE = SCORE_STRIDE * sizeof(float) / sizeof(Weight);

 public:
  Part(const PrefillShape& shape, const Prefill& chunk, int64_t kv_head, int64_t row,
       int64_t num_rows)
      : p_(shape), chunk_(chunk), kv_head_(kv_head), row_(row), num_rows_(num_rows),
        groups_(shape.num_heads / shape.num_kv_heads), engine_(shape.width) {}

  void attend(const T* query, T* out, const T* data, float scaling) {
    int64_t last = chunk_.context + row_ + num_rows_ - 1, begin = first_key(0);
    int64_t num_tiles = ceil_div(num_rows_, ROWS);
    sums_ = sum_buffer_.of((groups_ * num_tiles + 1) * ROWS * p_.width);
    running_ = running_buffer_.of(groups_ * num_tiles * NUM_RUNNING);
    keys_.resize(KEYS);
    int64_t offset = p_.num_kv_heads * p_.width;
    for (int64_t block = begin / KEYS * KEYS; block <= last; block += KEYS) {
      from_ = std::max<int64_t>(begin - block, 0), to_ = std::min(KEYS, last + 1 - block);
      find_keys(data, chunk_.blocks, p_.block_size, p_.num_kv_heads, p_.width, kv_head_,
                block + from_, block + to_, keys_.data() + from_);
      engine_.pack_keys(keys_.data(), from_, to_);
      is_finite_ = engine_.pack_values(keys_.data(), offset, from_, to_, from_, to_);
      for (int64_t g = 0; g < groups_; ++g)
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
          int64_t head = kv_head_ * groups_ + g, row = chunk_.start + row_ + tile * ROWS;
          add_block(block, g * num_tiles + tile, tile * ROWS,
                    query + row * p_.query_row + head * p_.query_head,
                    out + row * p_.out_row + head * p_.out_head, scaling * (float)M_LOG2E);
        }
    }
  }

 private:
  int64_t position(int64_t row) const { return chunk_.context + row_ + row; }
  int64_t first_key(int64_t row) const {
    return p_.window ? std::max<int64_t>(position(row) + 1 - p_.window, 0) : 0;
  }

  // What a block of keys adds to up to ROWS rows of one head.
  void add_block(int64_t block, int64_t tile, int64_t row, const T* query, T* out, float factor) {
    int64_t count = std::min(ROWS, num_rows_ - row);
    int64_t low = std::max<int64_t>(first_key(row) - block, 0);
    int64_t last = position(row + count - 1) - block;
    if (last < 0 || low >= to_) return;
    bool is_first = first_key(row) >= block, is_last = last < KEYS;
    int64_t from = low / STEP * STEP, to = ceil_div(std::min(to_, last + 1), STEP) * STEP;
    float* scores = score_buffer_.of(ROWS * SCORE_STRIDE);
    engine_.take_queries(query, p_.query_row, count);
    engine_.score(from, to, scores, SCORE_STRIDE);
    // Sums that are complete at once need no place of their own.
    float* sums = sums_ + (is_first && is_last ? 0 : (1 + tile) * ROWS * p_.width);
    Running* running = running_ + tile * NUM_RUNNING;
    if (is_first) std::fill_n(running, NUM_RUNNING, Running());
    for (int64_t i = 0; i < count; i += LANES) {
      int64_t end = position(row + i) + 1 - block;
      Visible visible{end - p_.window, end, p_.window != 0};
      __m512 rest = weigh<Weight>(scores + i * SCORE_STRIDE, SCORE_STRIDE, from, to, visible,
                                  factor, running[i / LANES]);
      if (!is_first) scale(sums + i * p_.width, rest);
    }
    const Weight* weights = (const Weight*)scores;
    if (is_finite_)
      engine_.accumulate(weights, WEIGHT_STRIDE, from, to, sums, !is_first);
    else
      accumulate_alone(block, row, count, weights, from, to, sums, !is_first);
    if (is_last) finish(sums, running, count, out);
  }

  // The same for values that are not all finite, of which 0 times is not 0: each row for itself,
  // with zeros in place of the values that it may not see.
  void accumulate_alone(int64_t block, int64_t row, int64_t count, const Weight* weights,
                        int64_t from, int64_t to, float* sums, bool adds) {
    int64_t offset = p_.num_kv_heads * p_.width;
    float* copy = copy_buffer_.of(ROWS * p_.width);
    for (int64_t i = 0; i < count; ++i) {
      int64_t begin = std::max<int64_t>(first_key(row + i) - block, 0);
      int64_t end = std::min(to_, position(row + i) + 1 - block);
      engine_.pack_values(keys_.data(), offset, from, to, begin, end);
      memcpy(copy, sums, ROWS * p_.width * sizeof(float));
      engine_.accumulate(weights, WEIGHT_STRIDE, from, to, copy, adds);
      memcpy(sums + i * p_.width, copy + i * p_.width, p_.width * sizeof(float));
    }
    engine_.pack_values(keys_.data(), offset, from_, to_, from_, to_);
  }

  void scale(float* sums, __m512 rest) {
    alignas(64) float factors[LANES];
    _mm512_store_ps(factors, rest);
    for (int64_t i = 0; i < LANES; ++i, sums += p_.width) {
      if (factors[i] == 1.0f) continue;
      for (int64_t d = 0; d < p_.width; d += LANES)
        store(sums + d, _mm512_mul_ps(load(sums + d), _mm512_set1_ps(factors[i])));
    }
  }

  void finish(const float* sums, const Running* running, int64_t count, T* out) {
    alignas(64) float shares[ROWS];
    for (int64_t i = 0; i < NUM_RUNNING; ++i)
      _mm512_store_ps(shares + i * LANES,
                      _mm512_div_ps(_mm512_set1_ps(1.0f), running[i].total));
    for (int64_t i = 0; i < count; ++i, sums += p_.width, out += p_.out_row)
      for (int64_t d = 0; d < p_.width; d += LANES)
        store(out + d, _mm512_mul_ps(load(sums + d), _mm512_set1_ps(shares[i])));
  }

  const PrefillShape& p_;
  const Prefill& chunk_;
  int64_t kv_head_, row_, num_rows_, groups_;
  Engine engine_;
  int64_t from_ = 0, to_ = 0;  // keys of the block that some row may see
  bool is_finite_ = true;
  float* sums_ = nullptr;       // [1 + query heads * tiles of rows, ROWS, D]
  Running* running_ = nullptr;  // [query heads * tiles of rows, NUM_RUNNING]
  static inline thread_local Buffer<float> sum_buffer_, score_buffer_, copy_buffer_;
  static inline thread_local Buffer<Running> running_buffer_;
  static inline thread_local std::vector<const T*> keys_;
};

template <typename Engine, typename T>
void prefill_with(const PrefillShape& p, const Prefill* chunks, int64_t num_chunks, const T* query,
                  T* out, const T* data, float scaling) {
  constexpr int64_t SUMS = 512, MOST = 128;
  auto parts = [&](int64_t rows) {
    int64_t total = 0;
    for (int64_t c = 0; c < num_chunks; ++c)
      total += ceil_div(chunks[c].num_tokens, rows) * p.num_kv_heads;
    return total;
  };
  // Many rows share the work of packing keys; few rows leave something for every thread.
  int64_t rows = MOST, groups = p.num_heads / p.num_kv_heads;
  while (rows > Engine::ROWS &&
         (rows * groups > SUMS || parts(rows) < 3 * omp_get_num_threads()))
    rows /= 2;
  int64_t total = parts(rows);
#pragma omp for schedule(dynamic)
  for (int64_t unit = 0; unit < total; ++unit) {
    int64_t kv_head = unit % p.num_kv_heads, index = unit / p.num_kv_heads;
    const Prefill* chunk = chunks;
    while (index >= ceil_div(chunk->num_tokens, rows)) index -= ceil_div(chunk++->num_tokens, rows);
    // The last rows see most: they come first, so that threads end at about the same time.
    int64_t row = (ceil_div(chunk->num_tokens, rows) - 1 - index) * rows;
    int64_t count = std::min(rows, chunk->num_tokens - row);
    Part<Engine>(p, *chunk, kv_head, row, count).attend(query, out, data, scaling);
  }
}

// By all threads of a team; ends with a barrier. Logits' factor is not negative.
template <typename T>
void prefill(const PrefillShape& p, const Prefill* chunks, int64_t num_chunks, const T* query,
             T* out, const T* data, float scaling) {
#if HAS_TILES
  if constexpr (sizeof(T) == sizeof(bf16))
    if (p.width % DEPTH == 0 && has_tiles())
      return prefill_with<Tiles>(p, chunks, num_chunks, query, out, data, scaling);
#endif
  prefill_with<Lanes<T>>(p, chunks, num_chunks, query, out, data, scaling);
}

}  // namespace attention
