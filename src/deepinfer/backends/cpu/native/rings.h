// Writing a step's values into the rings of their slots.

#pragma once

#include "batch.h"

namespace deepinfer {

// Write each row's last `ring.entries` values [tokens, ring.bytes] at position % ring.entries; slot 0 is left alone.
void store_ring(const Batch& batch, const void* values, const Cache& ring);

}  // namespace deepinfer
