// Scores of the indexer's keys.

#pragma once

#include "cache_formats.h"
#include "ops.h"

namespace deepinfer {

constexpr int64_t CHUNK_KEYS = 8 * PANEL_ROWS;  // keys that are unpacked at a time

struct IndexQueries {
    const Indexer& indexer;
    const float *q, *weights;  // [tokens, heads, dim], [tokens, heads]
    const uint16_t* tile_q;    // q as bf16 numbers if tiles are used, with room for 16 rows more; else null
};

// scores[t][k] of `tokens` tokens from number `first` on and up to CHUNK_KEYS keys, in whole panels; null keys count as
// zeros.
void score_keys(const IndexQueries& queries, int64_t first, int64_t tokens, const uint8_t* const* keys, int64_t count,
                float* scores, int64_t stride);

}  // namespace deepinfer
