// From tokens into the residual streams.

#pragma once

#include <cstdint>

#include "export.h"

// table [vocabulary, hidden] bf16 -> streams [tokens, num_streams, hidden], all equal, and pre [tokens, num_streams],
// stream 0 alone. Returns 0, or 1 when a token has no row.
EXPORT int64_t embed(const int64_t* tokens, int64_t count, const uint16_t* table, int64_t vocabulary, int64_t hidden,
                     int64_t num_streams, float* streams, float* pre);
