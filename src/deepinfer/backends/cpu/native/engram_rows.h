// Rows of the engram tables that the n-grams ending at each token address.

#pragma once

#include "batch.h"
#include "export.h"

namespace deepinfer {

struct Ngrams {
    const int64_t *token_map, *multipliers, *primes, *first_rows;  // [vocab], [layers, span], [layers, span - 1, heads]
    int64_t vocab, pad, image_token, layers, span, heads;

    int64_t columns() const { return (span - 1) * heads; }
};

}  // namespace deepinfer

// out [layers, tokens, (span - 1) * heads]; 1 when a token is not in the vocabulary.
EXPORT int64_t ngram_rows(const deepinfer::Ngrams* ngrams, const int64_t* tokens, const deepinfer::Batch* batch,
                          const deepinfer::Cache* ring, int64_t* out);
