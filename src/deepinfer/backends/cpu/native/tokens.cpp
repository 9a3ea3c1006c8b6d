// The token ring of each slot and the block table; all arrays are the host's.

#include <algorithm>

#include "batch.h"
#include "export.h"

using namespace deepinfer;

// out [count]: the tokens at these positions of their slots in a ring of int32.
EXPORT void read_tokens(const Cache* ring, const int32_t* slots, const int32_t* positions, int64_t count,
                        int64_t* out) {
    for (int64_t i = 0; i < count; ++i)
        out[i] = *reinterpret_cast<const int32_t*>(ring->at(ring->slot(slots[i]), positions[i] % ring->entries));
}

// Puts tokens [count] there.
EXPORT void write_tokens(const Cache* ring, const int32_t* slots, const int32_t* positions, int64_t count,
                         const int64_t* tokens) {
    for (int64_t i = 0; i < count; ++i)
        *reinterpret_cast<int32_t*>(ring->at(ring->slot(slots[i]), positions[i] % ring->entries)) =
            static_cast<int32_t>(tokens[i]);
}

// out [count, columns]: the first entries of these slots' lines, which are `stride` numbers apart.
EXPORT void read_table(const int32_t* table, int64_t stride, const int32_t* slots, int64_t count, int64_t columns,
                       int32_t* out) {
    for (int64_t i = 0; i < count; ++i) std::copy_n(table + slots[i] * stride, columns, out + i * columns);
}
