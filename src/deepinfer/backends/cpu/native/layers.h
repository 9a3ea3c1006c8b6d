// A run of layers as one call.

#pragma once

#include "batch.h"
#include "export.h"

namespace deepinfer {

struct Layer;

// The step's tokens; ngram_rows [engram layers, tokens, columns], is_image [tokens] and taps [tokens, num_taps,
// hidden] may be null.
struct Inputs {
    const Batch* batch;
    int64_t max_position, num_columns;
    const int64_t* ngram_rows;
    const uint8_t* is_image;
    float* taps;
    int64_t num_taps;
};

// entries [tokens, num_entries] and candidates [tokens, num_candidates], null as long as nothing was selected.
struct Choice {
    int32_t* entries;
    int64_t num_entries;
    int32_t* candidates;
    int64_t num_candidates;
};

}  // namespace deepinfer

EXPORT int64_t run_layers(const deepinfer::Layer* layers, int64_t count, const deepinfer::Inputs* inputs,
                          const deepinfer::Choice* given, float* streams, float* pre, int32_t* entries,
                          int32_t* candidates);
