// AMX tiles for attention: whether there are any.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "product.h"

namespace attention {

using product::DEPTH, product::TILE, product::TILE_SIZE;

// Whether there are tile registers. The system must be asked for them once in a process.
inline bool has_tiles() {
#if HAS_TILES
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl(2)
  static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return granted;
#else
  return false;
#endif
}

}  // namespace attention
