// Attention of sequences that bring one token each.
//
// A sequence's keys are taken in segments of a fixed size, all heads of a segment together, so
// that memory is read front to back; runs of segments are what threads share out. Segments and
// runs are joined in their order: a row's bits depend on its own query, keys and window, not on
// other rows or on threads.
//
// Letters: B sequences, H heads, K key heads, D head width.

#pragma once

#include <cmath>

#include "decode_segment.h"
#include "decode_tiles.h"

namespace attention {

// Arguments of `decode`; filled by attention.py in this order.
struct Decode {
  int64_t num_sequences, num_heads, num_kv_heads, width, block_size, blocks_per_sequence;
  int64_t query_row, query_head, out_row, out_head;  // strides in numbers
  const int64_t* blocks;     // [B, blocks_per_sequence]
  const int64_t* positions;  // [B]: of the token, the last one it may look at
  const int64_t* rows;       // [B]: of the query and the result; null is 0, 1, ...
  int64_t window;            // keys that it may look back at, itself included; 0 is all

  int64_t row(int64_t b) const { return rows ? rows[b] : b; }
  int64_t end(int64_t b) const { return positions[b] + 1; }
  int64_t begin(int64_t b) const { return window ? std::max<int64_t>(end(b) - window, 0) : 0; }
  int64_t num_runs(int64_t b) const { return ceil_div(end(b) - begin(b), RUN); }
};

// The softmax of one head over the keys up to now: its largest logit, in powers of two, the sum
// of weights, and the weighted sum of values. Lies in memory as one row of floats.
struct Partial {
  float* row;  // [2 + D up to whole VALUES]
  int64_t size;

  static int64_t row_size(int64_t width) { return LANES + ceil_div(width, VALUES) * VALUES; }
  float& top() const { return row[0]; }
  float& total() const { return row[1]; }
  float* sums() const { return row + LANES; }

  // Joins what came after.
  void add(const Partial& next) const {
    float most = std::max(top(), next.top());
    float kept = weight(top() - most), added = weight(next.top() - most);
    for (int64_t d = LANES; d < size; d += LANES) {
      __m512 part = _mm512_mul_ps(load(row + d), _mm512_set1_ps(kept));
      part = _mm512_fmadd_ps(load(next.row + d), _mm512_set1_ps(added), part);
      ::store(row + d, part);
    }
    total() = total() * kept + next.total() * added;
    top() = most;
  }

  template <typename T>
  void finish(T* out, int64_t width) const {
    __m512 share = _mm512_set1_ps(1.0f / total());
    for (int64_t d = 0; d < width; d += VALUES)
      store_values(out + d, _mm512_mul_ps(load(sums() + d), share),
                   _mm512_mul_ps(load(sums() + d + LANES), share), width - d);
  }

 private:
  static float weight(float difference) { return difference == 0.0f ? 1.0f : exp2f(difference); }
};

template <typename T>
bool uses_tiles(const Decode& d) {
  return sizeof(T) == sizeof(bf16) && d.width % DEPTH == 0 &&
         d.num_heads / d.num_kv_heads <= TILE && has_tiles();
}

template <typename T>
class Scorer {
 public:
  Scorer(const Decode& d, const T* query, int64_t num_kv_heads)
      : query_(query), query_head_(d.query_head), has_tiles_(uses_tiles<T>(d)) {
#if HAS_TILES
    if constexpr (sizeof(T) == sizeof(bf16))
      if (has_tiles_)
        tiles_.take(query, d.query_head, num_kv_heads, d.num_heads / d.num_kv_heads, d.width);
#endif
  }

  void score(const Segment<T>& segment, float* scores) const {
#if HAS_TILES
    if constexpr (sizeof(T) == sizeof(bf16))
      if (has_tiles_) return tiles_.score(segment, scores);
#endif
    segment.score(query_, query_head_, scores);
  }

 private:
  const T* query_;
  int64_t query_head_;
  bool has_tiles_;
#if HAS_TILES
  QueryTiles tiles_;
#endif
};

// Attends for key heads [first_head, last_head) of one run; `rows` holds a Partial for each of
// their query heads.
template <typename T>
void attend_run(const Decode& d, const T* query, const T* data, float scaling, int64_t b,
                int64_t run, int64_t first_head, int64_t last_head, float* rows) {
  static thread_local std::vector<const T*> keys;
  static thread_local Buffer<float> score_buffer, next_buffer;
  int64_t groups = d.num_heads / d.num_kv_heads, size = Partial::row_size(d.width);
  int64_t num_heads = (last_head - first_head) * groups, offset = d.num_kv_heads * d.width;
  float* scores = score_buffer.of(num_heads * SEGMENT);
  float* next = next_buffer.of(num_heads * size);
  int64_t begin = d.begin(b) + run * RUN, end = std::min(begin + RUN, d.end(b));
  query += d.row(b) * d.query_row + first_head * groups * d.query_head;
  Scorer<T> scorer(d, query, last_head - first_head);
  keys.resize(RUN + LANES);
  find_keys(data, d.blocks + b * d.blocks_per_sequence, d.block_size, d.num_kv_heads, d.width,
            first_head, begin, end, keys.data());
  std::fill_n(keys.data() + end - begin, LANES, keys[end - begin - 1]);  // fills up a register
  for (int64_t segment = begin; segment < end; segment += SEGMENT) {
    int64_t count = std::min(SEGMENT, end - segment);
    Segment<T> part{keys.data() + segment - begin, count, end - segment, d.width,
                    last_head - first_head, groups, offset};
    if (segment == begin) part.fetch(0, part.AHEAD);
    scorer.score(part, scores);
    float* place = segment == begin ? rows : next;
    for (int64_t head = 0; head < num_heads; ++head)
      weigh(scores + head * SEGMENT, count, scaling * (float)M_LOG2E, place + head * size);
    part.sum_values(scores, place + LANES, size);
    if (segment == begin) continue;
    for (int64_t head = 0; head < num_heads; ++head)
      Partial{rows + head * size, size}.add({next + head * size, size});
  }
}

// By all threads of a team; ends with a barrier.
template <typename T>
void decode(const Decode& d, const T* query, T* out, const T* data, float scaling) {
  static thread_local std::vector<int64_t> bounds;  // of each sequence's runs, in all
  static thread_local Buffer<float> own_buffer, shared_buffer;
  int64_t groups = d.num_heads / d.num_kv_heads, size = Partial::row_size(d.width);
  bounds.assign(1, 0);
  for (int64_t b = 0; b < d.num_sequences; ++b) bounds.push_back(bounds.back() + d.num_runs(b));
  int64_t num_runs = bounds.back();
  bool is_split = num_runs > d.num_sequences;
  float* shared = nullptr;  // [runs, H] partial results
  if (is_split) {
#pragma omp single copyprivate(shared)
    shared = shared_buffer.of(num_runs * d.num_heads * size);
  }
  auto finish = [&](int64_t b, int64_t head, float* row) {
    T* place = out + d.row(b) * d.out_row + head * d.out_head;
    Partial{row, size}.finish(place, d.width);
  };
  // A thread takes all key heads of a run, which lie side by side in memory, unless there are too
  // few runs for all threads.
  int64_t heads = num_runs >= 2 * omp_get_num_threads() ? d.num_kv_heads : 1;
  int64_t shares = ceil_div(d.num_kv_heads, heads);
#if HAS_TILES
  if (uses_tiles<T>(d)) product::configure();
#endif
#pragma omp for schedule(dynamic)
  for (int64_t unit = 0; unit < num_runs * shares; ++unit) {
    int64_t index = unit / shares, first_head = unit % shares * heads;
    int64_t b = std::upper_bound(bounds.begin(), bounds.end(), index) - bounds.begin() - 1;
    bool is_whole = bounds[b + 1] - bounds[b] == 1;
    float* rows = is_whole ? own_buffer.of(d.num_heads * size)
                           : shared + (index * d.num_heads + first_head * groups) * size;
    attend_run(d, query, data, scaling, b, index - bounds[b], first_head, first_head + heads,
               rows);
    if (is_whole)
      for (int64_t head = 0; head < heads * groups; ++head)
        finish(b, first_head * groups + head, rows + head * size);
  }
#if HAS_TILES
  if (uses_tiles<T>(d)) _tile_release();
#endif
  if (!is_split) return;
#pragma omp for
  for (int64_t unit = 0; unit < d.num_sequences * d.num_heads; ++unit) {
    int64_t b = unit / d.num_heads, head = unit % d.num_heads;
    if (bounds[b + 1] - bounds[b] == 1) continue;
    float* row = shared + (bounds[b] * d.num_heads + head) * size;
    for (int64_t run = bounds[b] + 1; run < bounds[b + 1]; ++run)
      Partial{row, size}.add({shared + (run * d.num_heads + head) * size, size});
    finish(b, head, row);
  }
}

}  // namespace attention
