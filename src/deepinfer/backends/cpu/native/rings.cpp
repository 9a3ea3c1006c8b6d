#include "rings.h"

#include <algorithm>
#include <cstring>

#include "export.h"

namespace deepinfer {

void store_ring(const Batch& batch, const void* values, const Cache& ring) {
    for (int64_t row = 0; row < batch.num_rows; ++row) {
        const int64_t slot = ring.slot(batch.row_slots[row]);
        if (slot == 0) continue;
        const int64_t begin = batch.row_offsets[row], end = batch.row_offsets[row + 1];
        for (int64_t token = std::max(begin, end - ring.entries); token < end; ++token) {
            const int64_t place = (batch.row_starts[row] + token - begin) % ring.entries;
            std::memcpy(ring.at(slot, place), static_cast<const uint8_t*>(values) + token * ring.bytes, ring.bytes);
        }
    }
}

}  // namespace deepinfer

EXPORT void store_ring(const deepinfer::Batch* batch, const void* values, const deepinfer::Cache* ring) {
    deepinfer::store_ring(*batch, values, *ring);
}
