// Paged keys and values on CPUs with AVX-512, float32 or bfloat16: storing them, attention of
// sequences that bring one token each, and of prompt chunks.

#pragma once

#include "decode.h"
#include "prefill.h"
#include "store.h"
