// Which entries of a step lie in which tile of rows.
//
// Letters: as in lora_plan.h.

#pragma once

#include "lora_plan.h"

namespace lora {

// Entries that follow each other, with tokens that do so too and lie in one tile of 16 rows.
struct Piece {
  int64_t tile, row;  // of the first one's token
  int64_t segment, entry;  // of the first one, in its segment
  int64_t count;
};

// All pieces, tile by tile.
struct Pieces {
  std::vector<Piece> all;
  std::vector<int64_t> first;  // [tiles + 1]

  void make(const Step& s, int64_t num_rows) {
    found_.clear();
    first.assign(ceil_div(num_rows, LANES) + 1, 0);
    for (int64_t g = 0; g < s.num_segments; ++g) {
      const int64_t* tokens = s.token_idx + s.seg_indptr[g];
      for (int64_t i = 0, count = s.count(g); i < count;) {
        int64_t token = tokens[i], tile = token / LANES, begin = i++;
        while (i < count && tokens[i] == token + i - begin && tokens[i] / LANES == tile) ++i;
        found_.push_back({tile, token % LANES, g, begin, i - begin});
        ++first[tile + 1];
      }
    }
    for (size_t tile = 1; tile < first.size(); ++tile) first[tile] += first[tile - 1];
    all.resize(found_.size());
    next_.assign(first.begin(), first.end());
    for (const Piece& piece : found_) all[next_[piece.tile]++] = piece;
  }

  const Piece* begin(int64_t tile) const { return all.data() + first[tile]; }
  const Piece* end(int64_t tile) const { return all.data() + first[tile + 1]; }

 private:
  std::vector<Piece> found_;
  std::vector<int64_t> next_;
};

}  // namespace lora
