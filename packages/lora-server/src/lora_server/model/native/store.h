// Keys and values in blocks of tokens: storing them, and finding them again.
//
// Letters: T tokens, K key heads, D head width.

#pragma once

#include <cstring>
#include <vector>

#include "simd.h"

namespace attention {

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

// Memory that begins at a cache line and keeps its size from call to call.
template <typename T>
class Buffer {
 public:
  T* of(int64_t size) {
    lines_.resize(std::max<size_t>(lines_.size(), ceil_div(size * sizeof(T), sizeof(Line))));
    return (T*)lines_.data();
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

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
