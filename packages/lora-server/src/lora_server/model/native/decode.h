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

// A run of keys of one sequence, for some of its key heads.
struct Unit {
  int64_t b, index;        // the sequence; the run in all of them
  int64_t begin, end;      // keys
  int64_t first_head, num_heads;  // key heads
  bool is_whole;           // the sequence's only run
};

// Attends for one unit, whose keys are in the stream from `place`; `rows` holds a Partial for each
// of its query heads.
template <typename T>
void attend(const Decode& d, const Unit& unit, const T* query, float scaling, Stream<T>& stream,
            int64_t place, float* rows) {
  static thread_local Buffer<float> score_buffer, next_buffer;
  int64_t groups = d.num_heads / d.num_kv_heads, size = Partial::row_size(d.width);
  int64_t num_heads = unit.num_heads * groups;
  float* scores = score_buffer.of(num_heads * SEGMENT);
  float* next = next_buffer.of(num_heads * size);
  query += d.row(unit.b) * d.query_row + unit.first_head * groups * d.query_head;
  Scorer<T> scorer(d, query, unit.num_heads);
  int64_t end = place + unit.end - unit.begin;
  for (int64_t segment = place; segment < end; segment += SEGMENT) {
    int64_t count = std::min(SEGMENT, end - segment);
    Segment<T> part{stream.keys + segment, count,         d.width, unit.num_heads,
                    groups,                stream.offset, stream,  segment};
    scorer.score(part, scores);
    float* to = segment == place ? rows : next;
    for (int64_t head = 0; head < num_heads; ++head)
      weigh(scores + head * SEGMENT, count, scaling * (float)M_LOG2E, to + head * size);
    part.sum_values(scores, to + LANES, size);
    if (segment == place) continue;
    for (int64_t head = 0; head < num_heads; ++head)
      Partial{rows + head * size, size}.add({next + head * size, size});
  }
}

// What falls to this thread of all runs, `shares` units each: about as many keys as to the others.
inline void find_units(const Decode& d, int64_t heads, std::vector<Unit>& units) {
  int64_t shares = d.num_kv_heads / heads, total = 0, before = 0, index = 0;
  for (int64_t b = 0; b < d.num_sequences; ++b) total += (d.end(b) - d.begin(b)) * shares;
  Share own(total);
  units.clear();
  for (int64_t b = 0; b < d.num_sequences; ++b) {
    int64_t num_runs = d.num_runs(b);
    for (int64_t run = 0; run < num_runs; ++run, ++index) {
      int64_t begin = d.begin(b) + run * RUN, end = std::min(begin + RUN, d.end(b));
      for (int64_t share = 0; share < shares; ++share, before += end - begin) {
        int64_t middle = before + (end - begin) / 2;
        if (middle >= own.begin && middle < own.end)
          units.push_back({b, index, begin, end, share * heads, heads, num_runs == 1});
      }
    }
  }
}

// By all threads of a team; ends with a barrier.
template <typename T>
void decode(const Decode& d, const T* query, T* out, const T* data, float scaling) {
  static thread_local std::vector<Unit> units;
  static thread_local std::vector<const T*> keys;
  static thread_local Buffer<float> own_buffer, shared_buffer;
  int64_t groups = d.num_heads / d.num_kv_heads, size = Partial::row_size(d.width), num_runs = 0;
  for (int64_t b = 0; b < d.num_sequences; ++b) num_runs += d.num_runs(b);
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
  find_units(d, heads, units);
  int64_t count = 0, place = 0;
  for (const Unit& unit : units) count += unit.end - unit.begin;
  keys.resize(count + LANES);
  for (const Unit& unit : units) {
    find_keys(data, d.blocks + unit.b * d.blocks_per_sequence, d.block_size, d.num_kv_heads,
              d.width, unit.first_head, unit.begin, unit.end, keys.data() + place);
    place += unit.end - unit.begin;
  }
  if (count) std::fill_n(keys.data() + count, LANES, keys[count - 1]);  // fills up a register
  Stream<T> stream{keys.data(), count, heads * d.width, d.num_kv_heads * d.width};
  stream.fetch_to(stream.AHEAD);
#if HAS_TILES
  if (uses_tiles<T>(d)) product::configure();
#endif
  place = 0;
  for (const Unit& unit : units) {
    float* rows = unit.is_whole
                      ? own_buffer.of(d.num_heads * size)
                      : shared + (unit.index * d.num_heads + unit.first_head * groups) * size;
    attend(d, unit, query, scaling, stream, place, rows);
    place += unit.end - unit.begin;
    for (int64_t head = 0; unit.is_whole && head < heads * groups; ++head)
      finish(unit.b, unit.first_head * groups + head, rows + head * size);
  }
#if HAS_TILES
  if (uses_tiles<T>(d)) _tile_release();
#endif
#pragma omp barrier
  if (!is_split) return;
#pragma omp for
  for (int64_t unit = 0; unit < d.num_sequences * d.num_heads; ++unit) {
    int64_t b = unit / d.num_heads, head = unit % d.num_heads, first = 0;
    for (int64_t other = 0; other < b; ++other) first += d.num_runs(other);
    if (d.num_runs(b) == 1) continue;
    float* row = shared + (first * d.num_heads + head) * size;
    for (int64_t run = first + 1; run < first + d.num_runs(b); ++run)
      Partial{row, size}.add({shared + (run * d.num_heads + head) * size, size});
    finish(b, head, row);
  }
}

}  // namespace attention
