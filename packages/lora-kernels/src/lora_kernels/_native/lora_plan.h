// What the LoRA kernels are called with, and how a step's work lies in blocks.
//
// Letters: R max rank, P slices, N slots, I in, O out (all slices), E entries, G segments.

#pragma once

#include <vector>

#include "simd.h"

namespace lora {

// What does not change between steps; filled by linear.py in this order.
struct Module {
  const void* a;          // [R, P, N, I]
  const void* b;          // [R, N, O]
  const int32_t* ranks;   // [N, P + 1]: true ranks; the last column is not used here
  const int64_t* ranges;  // [P + 1]: bounds of the slices in O
  int64_t num_slices, num_slots, in_features, out_features;

  int64_t rank(int64_t slot, int64_t p) const { return ranks[slot * (num_slices + 1) + p]; }
};

// The routing of a step; filled by linear.py in this order.
struct Step {
  const int64_t* token_idx;   // [E]
  const float* scales;        // [E], or null when all are 1
  const int64_t* seg_indptr;  // [G + 1]
  const int64_t* seg_slots;   // [G]
  int64_t num_segments;

  int64_t count(int64_t g) const { return seg_indptr[g + 1] - seg_indptr[g]; }
};

constexpr int TOKENS = 6;    // tokens of a block of the first pass with AVX-512
constexpr int RANKS = 4;     // ranks of a block of the first pass
constexpr int ROWS = 4;      // tokens of a block of the second pass
constexpr int COLUMNS = 64;  // output columns of a block of the second pass

// How many numbers of v a slice has in each entry: a whole register, so that tiles need no rest.
inline int64_t padded(int64_t rank) { return ceil_div(rank, LANES) * LANES; }

// Where each segment's v lies, and the blocks of both passes with AVX-512, segment by segment.
struct Plan {
  std::vector<int64_t> width, first, shrink, expand;
  std::vector<float> numbers;
  float* v;  // [E, width of the segment]; a number is a float32, or two bfloat16 (lora_tiles.h)

  // Whether a plan for one module is one for the other.
  static bool is_same(const Module& m, const Module& other, const Step& s) {
    if (m.num_slices != other.num_slices) return false;
    for (int64_t p = 0; p < m.num_slices; ++p) {
      if (m.ranges[p + 1] != other.ranges[p + 1]) return false;
      for (int64_t g = 0; g < s.num_segments; ++g)
        if (m.rank(s.seg_slots[g], p) != other.rank(s.seg_slots[g], p)) return false;
    }
    return true;
  }

  void make(const Module& m, const Step& s) {
    int64_t size = 0, most = 0;
    for (auto* list : {&width, &first}) list->assign(s.num_segments, 0);
    for (auto* list : {&shrink, &expand}) list->assign(s.num_segments + 1, 0);
    for (int64_t g = 0; g < s.num_segments; ++g) {
      int64_t rank_blocks = 0, column_blocks = 0;
      for (int64_t p = 0; p < m.num_slices; ++p) {
        int64_t rank = m.rank(s.seg_slots[g], p);
        width[g] += padded(rank);
        rank_blocks += ceil_div(rank, RANKS);
        if (rank) column_blocks += ceil_div(m.ranges[p + 1] - m.ranges[p], COLUMNS);
      }
      first[g] = size;
      most = std::max(most, width[g]);
      size += s.count(g) * width[g];
      shrink[g + 1] = shrink[g] + rank_blocks * ceil_div(s.count(g), TOKENS);
      expand[g + 1] = expand[g] + column_blocks * ceil_div(s.count(g), ROWS);
    }
    // Tiles are read whole, with what lies before and behind a segment's entries.
    size += 2 * LANES * most + LANES;
    if ((int64_t)numbers.size() < size) numbers.resize(size);
    v = (float*)(((uintptr_t)numbers.data() + 63) / 64 * 64) + LANES * most;
  }
};

}  // namespace lora
