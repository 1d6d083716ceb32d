// B v in bfloat16, added to a base product's sums before they are rounded.
//
// A tile of rows that belongs to one adapter takes it in the tile registers. In a tile of several
// each adapter gets the base's sums for itself, and only its own rows of the result count: what is
// not finite in one reaches no other.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora_columns.h"
#include "lora_pieces.h"
#include "product.h"

namespace lora::tiles {

// Whether each of a product's pairs of tiles lies in one slice.
inline bool can_add(const Module& m) {
  for (int64_t p = 1; p < m.num_slices; ++p)
    if (m.ranges[p] % STEP_COLUMNS) return false;
  return m.in_features % DEPTH == 0 && m.out_features % SIDE == 0;
}

#if HAS_TILES

// What becomes of the sums of one product, in one thread: see product::Rounding.
class Added {
 public:
  Added(const Module& m, const Step& s, const Plan& plan, const Pieces& pieces)
      : m_(m), s_(s), plan_(plan), pieces_(pieces), memory_(own_memory()) {}

  // Finds out which adapters come.
  void begin_rows(const product::Task&, int64_t begin, int64_t end) {
    std::vector<bool>& is_known = memory_.is_known;
    is_known.assign(s_.num_segments, false);
    memory_.rows_of_b.clear();
    int64_t widest = 0;
    for (const Piece* piece = pieces_.begin(begin); piece < pieces_.end(end - 1); ++piece) {
      int64_t g = piece->segment, slot = s_.seg_slots[g], most = 0;
      if (is_known[g]) continue;
      is_known[g] = true;
      for (int64_t p = 0; p < m_.num_slices; ++p) most = std::max(most, m_.rank(slot, p));
      widest = std::max(widest, most);
      for (int64_t r = 0; r < most; ++r) memory_.rows_of_b.push_back(b(slot, r, 0));
    }
    size_ = 2 * TILE * ceil_div(widest, SIDE);
    tiles_ = memory_.packed.reserve(NUM_KEPT * size_);
    for (Columns& columns : columns_) columns.segment = -1;
    out_tile_ = -1;
    num_fetched_ = ceil_div(memory_.rows_of_b.size(), ceil_div(end - begin, 2));
    for (int64_t i = 0; i < AHEAD; i += STEP_COLUMNS)
      for (const bf16* row : memory_.rows_of_b) _mm_prefetch((const char*)(row + i), _MM_HINT_T1);
  }

  void finish(const product::Task& t, product::Sums* sums, int64_t row_tile, int64_t count,
              int64_t out_tile, int64_t out_count) {
    begin_outputs(out_tile);
    fetch_ahead();
    const Piece *first = whole(t, row_tile), *second = nullptr;
    if (count == 2) second = whole(t, row_tile + 1);
    if (first && second && first->segment == second->segment) {
      add_pair(*first, *second, columns_of(first->segment));
    } else {
      if (first) add<false>(*first, columns_of(first->segment));
      if (second) add<true>(*second, columns_of(second->segment));
    }
    product::store_sums(sums);
    for (int64_t i = 0; i < count; ++i, sums += 2) {
      t.write_out(sums, row_tile + i, out_tile, out_count);
      if (!(i ? second : first)) finish_parts(t, sums, row_tile + i, out_count);
    }
  }

  // One tile of rows goes another way.
  void finish_few(const product::Task&, const product::Sums*, int64_t, int64_t) {}

 private:
  // Rows come adapter by adapter, so that two are in use at most: L1 is for the weights.
  static constexpr int64_t NUM_KEPT = 2;
  static constexpr int64_t AHEAD = 2 * STEP_COLUMNS;  // columns of B on their way to L2

  // Two tiles of outputs' columns of a segment's B, packed: 2 tiles for each 16 ranks.
  struct Columns {
    int64_t segment = -1, out_tile = -1;
    int64_t rank = 0, column = 0;  // of the slice, the latter in v
    const uint32_t* tiles = nullptr;
  };

  struct Memory {
    Scratch packed;
    std::vector<bool> is_known;
    std::vector<const bf16*> rows_of_b;  // of all segments and ranks
  };

  static Memory& own_memory() {
    static thread_local Memory memory;
    return memory;
  }

  const bf16* b(int64_t slot, int64_t rank, int64_t column) const {
    return (const bf16*)m_.b + (rank * m_.num_slots + slot) * m_.out_features + column;
  }

  void begin_outputs(int64_t out_tile) {
    if (out_tile == out_tile_) return;
    out_tile_ = out_tile;
    next_fetched_ = 0;
    while (out_tile * SIDE < m_.ranges[slice_]) --slice_;
    while (out_tile * SIDE >= m_.ranges[slice_ + 1]) ++slice_;
  }

  // Each pair of row tiles fetches some rows of what the next outputs need of B.
  void fetch_ahead() {
    const auto& rows = memory_.rows_of_b;
    int64_t end = std::min<int64_t>(next_fetched_ + num_fetched_, rows.size());
    for (; next_fetched_ < end; ++next_fetched_)
      _mm_prefetch((const char*)(rows[next_fetched_] + out_tile_ * SIDE + AHEAD), _MM_HINT_T1);
  }

  // The piece that is all of a tile's rows.
  const Piece* whole(const product::Task& t, int64_t tile) const {
    const Piece* piece = pieces_.begin(tile);
    bool is_whole = piece < pieces_.end(tile) && piece->count == t.rows_of(tile);
    return is_whole ? piece : nullptr;
  }

  const Columns& columns_of(int64_t g) {
    for (const Columns& columns : columns_)
      if (columns.segment == g && columns.out_tile == out_tile_) return columns;
    next_ = (next_ + 1) % NUM_KEPT;
    uint32_t* tiles = tiles_ + next_ * size_;
    int64_t slot = s_.seg_slots[g], rank = m_.rank(slot, slice_), column = out_tile_ * SIDE;
    for (int64_t r = 0; r < rank; r += SIDE)
      pack_columns<false>(b(slot, r, column), m_.num_slots * m_.out_features,
                          std::min(SIDE, rank - r), m_.ranges[slice_ + 1] - column,
                          tiles + r / SIDE * 2 * TILE);
    return columns_[next_] = {g, out_tile_, rank, first_of(m_, slot, slice_), tiles};
  }

  // Where v would begin, did all of the tile's rows belong to the piece's segment. The other rows
  // of the result are not used.
  const float* v(const Piece& piece, const Columns& columns) const {
    int64_t entry = piece.entry - piece.row, g = piece.segment;
    return plan_.v + plan_.first[g] + entry * plan_.width[g] + columns.column;
  }

  int64_t v_stride(const Piece& piece) const {
    return plan_.width[piece.segment] * (int64_t)sizeof(float);
  }

  // Adds to the sums of the first or the second tile of rows.
  template <bool IS_SECOND>
  void add(const Piece& piece, const Columns& columns) const {
    const uint32_t* b = columns.tiles;
    const float* from = v(piece, columns);
    for (int64_t r = 0; r < columns.rank; r += SIDE, b += 2 * TILE) {
      _tile_stream_loadd(4, from + r, v_stride(piece));
      _tile_loadd(6, b, 64);
      _tile_loadd(7, b + TILE, 64);
      if constexpr (IS_SECOND) {
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
  }

  // Adds to both, which belong to one segment.
  void add_pair(const Piece& first, const Piece& second, const Columns& columns) const {
    const uint32_t* b = columns.tiles;
    const float *from = v(first, columns), *from2 = v(second, columns);
    for (int64_t r = 0; r < columns.rank; r += SIDE, b += 2 * TILE) {
      _tile_stream_loadd(4, from + r, v_stride(first));
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + TILE, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(5, from2 + r, v_stride(second));
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }

  // The rows with an adapter of a tile that does not belong to one alone.
  void finish_parts(const product::Task& t, const product::Sums* sums, int64_t row_tile,
                    int64_t out_count) {
    alignas(64) product::Sums own[2];
    for (const Piece* piece = pieces_.begin(row_tile); piece < pieces_.end(row_tile); ++piece) {
      const Columns& columns = columns_of(piece->segment);
      if (!columns.rank) continue;
      _tile_loadd(0, sums[0], 64);
      _tile_loadd(1, sums[1], 64);
      add<false>(*piece, columns);
      _tile_stored(0, own[0], 64);
      _tile_stored(1, own[1], 64);
      t.write_rows(own, row_tile, piece->row, piece->count, out_tile_, out_count);
    }
  }

  const Module& m_;
  const Step& s_;
  const Plan& plan_;
  const Pieces& pieces_;
  Memory& memory_;
  uint32_t* tiles_ = nullptr;
  Columns columns_[NUM_KEPT];
  int64_t size_ = 0, next_ = 0;  // of a place for columns, the last one taken
  int64_t num_fetched_ = 0, next_fetched_ = 0;
  int64_t out_tile_ = -1, slice_ = 0;
};

#endif

}  // namespace lora::tiles
