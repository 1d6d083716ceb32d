// A decoder layer of Llama's form in bfloat16: norms, the four (packed) projections with their LoRA
// parts, rotary embeddings, paged attention, the gated MLP, both residuals.
//
// One team of threads walks through them, with a barrier where a phase needs all of the one before.
// With many rows each thread keeps to its own, and that is before and after attention only.
// Numbers are rounded where transformers rounds them. No row's result depends on another row's,
// attention apart.
//
// Letters: T rows, D hidden width, H heads, K key heads, W head width, F inner width.

#pragma once

#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "lora_product.h"
#include "rows.h"

namespace decoder {

// A layer; filled by decoder.py in this order.
struct Layer {
  product::Packed projections[4];  // qkv, attention's output, gate and up, down
  const lora::Module* slots[4];    // theirs; null where the step's adapters add nothing
  bf16* store;                     // [blocks, block size, 2, K, W]
  const bf16 *input_norm, *inner_norm;  // [D]
  const bf16 *query_norm, *key_norm;    // [W], or null
  int64_t num_heads, num_key_heads, width, block_size, window;
  float input_epsilon, inner_epsilon, query_epsilon, key_epsilon, scaling;
};

// Sequences that bring one token each, as attention::Decode has them.
struct Group {
  int64_t num_sequences, blocks_per_sequence;
  const int64_t *blocks, *positions, *rows;
};

// A step, the same for all layers; filled by decoder.py in this order.
struct Step {
  int64_t num_rows;
  const bf16 *cosine, *sine;   // [T, W]
  const int64_t* token_slots;  // [T]: places in the store
  const Group* groups;
  int64_t num_groups;
  const attention::Prefill* chunks;
  int64_t num_chunks;
  const lora::Step* routing;
};

// Memory that begins with a cache line: a tile's row is one line long, and would lie in two.
class Buffer {
 public:
  ~Buffer() { free(data_); }
  bf16* data() const { return data_; }

  void reserve(int64_t size) {
    if (size <= size_) return;
    free(data_);
    size_ = ceil_div(size, LINE) * LINE;
    data_ = (bf16*)aligned_alloc(LINE, size_ * sizeof(bf16));
  }

 private:
  static constexpr int64_t LINE = 64;
  bf16* data_ = nullptr;
  int64_t size_ = 0;
};

// What passes from phase to phase; rows are filled up to whole tiles.
struct Scratch {
  Buffer normed, projected, attended, added, gated, inner;
  Buffer kept;  // sums of few rows, in float32
  lora::Plan plans[4];
  lora::Pieces pieces;

  std::vector<bool> is_planned;  // by layer: as the one before

  // What one thread does before a team runs layers.
  void begin(const Layer* layers, int64_t count, const Step& s) {
    is_planned.assign(count, true);
    for (int64_t i = 0; i < count; ++i) {
      reserve(layers[i], s.num_rows);
      for (int p = 0; p < 4; ++p) {
        const lora::Module *own = layers[i].slots[p], *last = i ? layers[i - 1].slots[p] : nullptr;
        if (own && !(last && lora::Plan::is_same(*own, *last, *s.routing))) is_planned[i] = false;
      }
    }
    if (s.routing) pieces.make(*s.routing, s.num_rows);
  }

  void reserve(const Layer& l, int64_t num_rows) {
    int64_t rows = ceil_div(num_rows, product::TILE) * product::TILE, widest = 0;
    for (const product::Packed& p : l.projections) widest = std::max(widest, p.num_out);
    normed.reserve(rows * l.projections[0].num_in);
    projected.reserve(rows * l.projections[0].num_out);
    attended.reserve(rows * l.projections[1].num_in);
    added.reserve(rows * l.projections[1].num_out);
    gated.reserve(rows * l.projections[2].num_out);
    inner.reserve(rows * l.projections[3].num_in);
    kept.reserve(2 * (std::min(rows, lora::tiles::MAX_KEPT_ROWS) * widest + product::TILE));
  }

  // By all threads of a team, before a layer.
  void plan(const Layer& l, const Step& s, int64_t index) {
    if (is_planned[index]) return;
#pragma omp barrier
#pragma omp single
    for (int p = 0; p < 4; ++p)
      if (l.slots[p]) plans[p].make(*l.slots[p], *s.routing);
  }
};

// The rows that this thread begins and ends a layer with: whole tiles, where products share rows.
inline Share own_rows(int64_t num_rows) {
  if (!product::is_by_rows(num_rows)) return Share(num_rows);
  Share own = product::own_tiles(num_rows);
  own.begin *= product::TILE;
  own.end = std::min(own.end * product::TILE, num_rows);
  return own;
}

struct Call {
  const Layer& l;
  const Step& s;
  Scratch& w;

  // Whether threads need nothing of each other's but in attention.
  bool is_apart() const {
    bool result = product::is_by_rows(s.num_rows);
    for (const lora::Module* m : l.slots) result &= !m || lora::is_apart(*m, s.num_rows);
    return result;
  }

  // A barrier where threads are not apart.
  static void meet(bool is_apart) {
    if (is_apart) return;
#pragma omp barrier
  }

  // y = x W^T + LoRA, by all threads; a barrier must follow.
  void project(int index, const bf16* x, bf16* y) const {
    const product::Packed& p = l.projections[index];
    product::Input input{x, p.num_in, s.num_rows, nullptr};
    if (const lora::Module* m = l.slots[index])
      lora::run(p, input, y, p.num_out, *m, *s.routing, w.plans[index], w.pieces,
                (float*)w.kept.data());
    else
      product::run(p, input, y, p.num_out);
  }

  // Norms and rotary embeddings of a row's queries and keys in place; then its keys and values
  // go to their place in the store.
  void place(int64_t row, bf16* qkv) const {
    const bf16 *c = s.cosine + row * l.width, *sn = s.sine + row * l.width;
    for (int64_t h = 0; h < l.num_heads + l.num_key_heads; ++h) {
      bf16* head = qkv + h * l.width;
      bool is_query = h < l.num_heads;
      const bf16* norm = is_query ? l.query_norm : l.key_norm;
      float epsilon = is_query ? l.query_epsilon : l.key_epsilon;
      if (norm) rows::normalise(head, norm, epsilon, head, l.width);
      rows::rotate(head, c, sn, head, l.width);
    }
    int64_t size = l.num_key_heads * l.width;
    memcpy(l.store + s.token_slots[row] * 2 * size, qkv + l.num_heads * l.width,
           2 * size * sizeof(bf16));
  }

  // All threads; ends with a barrier.
  void attend(const bf16* qkv, bf16* out) const {
    int64_t query_row = l.projections[0].num_out, out_row = l.projections[1].num_in;
    for (int64_t g = 0; g < s.num_groups; ++g) {
      const Group& group = s.groups[g];
      attention::Decode decode{group.num_sequences, l.num_heads,  l.num_key_heads,
                               l.width,             l.block_size, group.blocks_per_sequence,
                               query_row,           l.width,      out_row,
                               l.width,             group.blocks, group.positions,
                               group.rows,          l.window};
      attention::decode(decode, qkv, out, l.store, l.scaling);
    }
    if (!s.num_chunks) return;
    attention::PrefillShape shape{l.num_heads, l.num_key_heads, l.width, l.block_size, query_row,
                                  l.width,     out_row,         l.width, l.window};
    attention::prefill(shape, s.chunks, s.num_chunks, qkv, out, l.store, l.scaling);
  }

  // The layer, by all threads of a team. A row of `out`, which may be `in`, is finished by the
  // thread that will begin with it in the next layer.
  void run(const bf16* in, bf16* out) const {
    int64_t hidden = l.projections[0].num_in, num_inner = l.projections[3].num_in;
    bf16 *normed = w.normed.data(), *projected = w.projected.data(), *inner = w.inner.data();
    bf16 *attended = w.attended.data(), *added = w.added.data(), *gated = w.gated.data();
    Share own = own_rows(s.num_rows);
    bool apart = is_apart();
    for (int64_t t = own.begin; t < own.end; ++t)
      rows::normalise(in + t * hidden, l.input_norm, l.input_epsilon, normed + t * hidden, hidden);
    meet(apart);
    project(0, normed, projected);
    meet(apart);
    for (int64_t t = own.begin; t < own.end; ++t)
      place(t, projected + t * l.projections[0].num_out);
#pragma omp barrier
    attend(projected, attended);
    project(1, attended, added);
    meet(apart);
    for (int64_t t = own.begin; t < own.end; ++t) {
      bf16* row = out + t * hidden;
      if (in != out) memcpy(row, in + t * hidden, hidden * sizeof(bf16));
      rows::add(row, added + t * hidden, hidden);
      rows::normalise(row, l.inner_norm, l.inner_epsilon, normed + t * hidden, hidden);
    }
    meet(apart);
    project(2, normed, gated);
    meet(apart);
    for (int64_t t = own.begin; t < own.end; ++t) {
      const bf16* gate = gated + t * 2 * num_inner;
      rows::silu_multiply(gate, gate + num_inner, inner + t * num_inner, num_inner);
    }
    meet(apart);
    project(3, inner, added);
    meet(apart);
    for (int64_t t = own.begin; t < own.end; ++t)
      rows::add(out + t * hidden, added + t * hidden, hidden);
  }
};

}  // namespace decoder
