// LoRA's two passes with AVX-512, float32 or bfloat16: blocks of few tokens, for every type and
// processor that lora_tiles.h is not for.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora_plan.h"

namespace lora::rows {

// How many numbers one register holds, and sum += a * b over them.
template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int count = 16;
  using Register = __m512;
  static Register load_all(const float* p) { return _mm512_loadu_ps(p); }
  static Register load_some(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
  }
  static __m512 add(__m512 sum, Register a, Register b) { return _mm512_fmadd_ps(a, b, sum); }
};

template <>
struct Lanes<bf16> {
  static constexpr int count = 32;
  using Register = __m512bh;
  static Register load_all(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Register load_some(const bf16* p, int64_t n) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
  }
  static __m512 add(__m512 sum, Register a, Register b) { return _mm512_dpbf16_ps(sum, a, b); }
};

// out[t][r] = a[r] . x[t] over n numbers.
template <typename T, int NR, int NT>
void dots(const T* const* a, const T* const* x, int64_t n, float* const* out) {
  using L = Lanes<T>;
  __m512 sums[NR][NT];
  for (int r = 0; r < NR; ++r)
    for (int t = 0; t < NT; ++t) sums[r][t] = _mm512_setzero_ps();
  typename L::Register rows[NR];
  int64_t i = 0;
  for (; i + L::count <= n; i += L::count) {
    for (int r = 0; r < NR; ++r) rows[r] = L::load_all(a[r] + i);
    for (int t = 0; t < NT; ++t) {
      typename L::Register token = L::load_all(x[t] + i);
      for (int r = 0; r < NR; ++r) sums[r][t] = L::add(sums[r][t], rows[r], token);
    }
  }
  if (i < n) {
    for (int r = 0; r < NR; ++r) rows[r] = L::load_some(a[r] + i, n - i);
    for (int t = 0; t < NT; ++t) {
      typename L::Register token = L::load_some(x[t] + i, n - i);
      for (int r = 0; r < NR; ++r) sums[r][t] = L::add(sums[r][t], rows[r], token);
    }
  }
  for (int r = 0; r < NR; ++r)
    for (int t = 0; t < NT; ++t) out[t][r] = _mm512_reduce_add_ps(sums[r][t]);
}

template <typename T, int NR>
void dots_of_tokens(int nt, const T* const* a, const T* const* x, int64_t n, float* const* out) {
  switch (nt) {
    case 1: return dots<T, NR, 1>(a, x, n, out);
    case 2: return dots<T, NR, 2>(a, x, n, out);
    case 3: return dots<T, NR, 3>(a, x, n, out);
    case 4: return dots<T, NR, 4>(a, x, n, out);
    case 5: return dots<T, NR, 5>(a, x, n, out);
    default: return dots<T, NR, TOKENS>(a, x, n, out);
  }
}

template <typename T>
void dots_of(int nr, int nt, const T* const* a, const T* const* x, int64_t n, float* const* out) {
  switch (nr) {
    case 1: return dots_of_tokens<T, 1>(nt, a, x, n, out);
    case 2: return dots_of_tokens<T, 2>(nt, a, x, n, out);
    case 3: return dots_of_tokens<T, 3>(nt, a, x, n, out);
    default: return dots_of_tokens<T, RANKS>(nt, a, x, n, out);
  }
}

// y[t] += sum_r v[t][r] * b[r] over at most COLUMNS columns; one rounding.
template <typename T, int NT>
void add_columns(const T* b, int64_t stride, int rank, const float* const* v, T* const* y,
                 int64_t columns) {
  constexpr int VECTORS = COLUMNS / LANES;
  __m512 sums[NT][VECTORS];
  __mmask16 mask[VECTORS];
  for (int k = 0; k < VECTORS; ++k) {
    int64_t left = std::clamp<int64_t>(columns - LANES * k, 0, LANES);
    mask[k] = (__mmask16)((1u << left) - 1);
  }
  for (int t = 0; t < NT; ++t)
    for (int k = 0; k < VECTORS; ++k) sums[t][k] = _mm512_setzero_ps();
  for (int r = 0; r < rank; ++r, b += stride) {
    __m512 row[VECTORS];
    for (int k = 0; k < VECTORS; ++k) row[k] = load(b + LANES * k, mask[k]);
    for (int t = 0; t < NT; ++t) {
      __m512 factor = _mm512_set1_ps(v[t][r]);
      for (int k = 0; k < VECTORS; ++k) sums[t][k] = _mm512_fmadd_ps(factor, row[k], sums[t][k]);
    }
  }
  for (int t = 0; t < NT; ++t)
    for (int k = 0; k < VECTORS; ++k) {
      __m512 sum = _mm512_add_ps(load(y[t] + LANES * k, mask[k]), sums[t][k]);
      store(y[t] + LANES * k, sum, mask[k]);
    }
}

template <typename T>
void shrink_block(const Module& m, const Step& s, Plan& plan, const T* x, int64_t x_stride,
                  int64_t g, int64_t block) {
  int64_t slot = s.seg_slots[g], begin = s.seg_indptr[g], count = s.seg_indptr[g + 1] - begin;
  const int32_t* ranks = m.ranks + slot * (m.num_slices + 1);
  int64_t token_blocks = ceil_div(count, TOKENS);
  int64_t rank_block = block / token_blocks, entry = block % token_blocks * TOKENS;
  int64_t p = 0, column = 0;
  for (; rank_block >= ceil_div(ranks[p], RANKS); ++p) {
    rank_block -= ceil_div(ranks[p], RANKS);
    column += padded(ranks[p]);
  }
  int nr = (int)std::min<int64_t>(RANKS, ranks[p] - rank_block * RANKS);
  int nt = (int)std::min<int64_t>(TOKENS, count - entry);
  const T* rows[RANKS];
  const T* tokens[TOKENS];
  float* out[TOKENS];
  const T* a = (const T*)m.a + (p * m.num_slots + slot) * m.in_features;
  int64_t rank_stride = m.num_slices * m.num_slots * m.in_features;
  for (int r = 0; r < nr; ++r) rows[r] = a + (rank_block * RANKS + r) * rank_stride;
  for (int t = 0; t < nt; ++t) {
    tokens[t] = x + s.token_idx[begin + entry + t] * x_stride;
    out[t] = plan.v + plan.first[g] + (entry + t) * plan.width[g] + column +
             rank_block * RANKS;
  }
  dots_of(nr, nt, rows, tokens, m.in_features, out);
  if (s.scales)
    for (int t = 0; t < nt; ++t)
      for (int r = 0; r < nr; ++r) out[t][r] *= s.scales[begin + entry + t];
}

template <typename T>
void expand_block(const Module& m, const Step& s, const Plan& plan, T* y, int64_t y_stride,
                  int64_t g, int64_t block) {
  int64_t slot = s.seg_slots[g], begin = s.seg_indptr[g], count = s.seg_indptr[g + 1] - begin;
  const int32_t* ranks = m.ranks + slot * (m.num_slices + 1);
  int64_t token_blocks = ceil_div(count, ROWS);
  int64_t column_block = block / token_blocks, entry = block % token_blocks * ROWS;
  int64_t p = 0, column = 0;
  for (;; ++p) {
    int64_t blocks = ranks[p] ? ceil_div(m.ranges[p + 1] - m.ranges[p], COLUMNS) : 0;
    if (column_block < blocks) break;
    column_block -= blocks;
    column += padded(ranks[p]);
  }
  int64_t begin_column = m.ranges[p] + column_block * COLUMNS;
  int64_t columns = std::min<int64_t>(COLUMNS, m.ranges[p + 1] - begin_column);
  int nt = (int)std::min<int64_t>(ROWS, count - entry);
  const float* v[ROWS];
  T* rows[ROWS];
  for (int t = 0; t < nt; ++t) {
    v[t] = plan.v + plan.first[g] + (entry + t) * plan.width[g] + column;
    rows[t] = y + s.token_idx[begin + entry + t] * y_stride + begin_column;
  }
  const T* b = (const T*)m.b + slot * m.out_features + begin_column;
  int64_t stride = m.num_slots * m.out_features;
  switch (nt) {
    case 1: return add_columns<T, 1>(b, stride, ranks[p], v, rows, columns);
    case 2: return add_columns<T, 2>(b, stride, ranks[p], v, rows, columns);
    case 3: return add_columns<T, 3>(b, stride, ranks[p], v, rows, columns);
    default: return add_columns<T, ROWS>(b, stride, ranks[p], v, rows, columns);
  }
}

// Calls work(segment, block) for this thread's share of the blocks.
template <typename F>
void share(const std::vector<int64_t>& bounds, F work) {
  auto [block, end] = Share(bounds.back());
  int64_t g = std::upper_bound(bounds.begin(), bounds.end(), block) - bounds.begin() - 1;
  for (; block < end; ++block) {
    while (block >= bounds[g + 1]) ++g;
    work(g, block - bounds[g]);
  }
}

// The first pass's share of this thread.
template <typename T>
void shrink(const Module& m, const Step& s, Plan& plan, const T* x, int64_t x_stride) {
  share(plan.shrink, [&](int64_t g, int64_t block) {
    shrink_block(m, s, plan, x, x_stride, g, block);
  });
}

// The second pass's share of this thread.
template <typename T>
void expand(const Module& m, const Step& s, const Plan& plan, T* y, int64_t y_stride) {
  share(plan.expand, [&](int64_t g, int64_t block) {
    expand_block(m, s, plan, y, y_stride, g, block);
  });
}

}  // namespace lora::rows
