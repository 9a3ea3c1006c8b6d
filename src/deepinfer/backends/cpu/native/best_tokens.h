// The likeliest token of each row of logits.

#pragma once

#include <cstdint>

#include "export.h"

// logits [rows, vocabulary] -> ids of the largest, the lower of equal ones, and whether the row holds neither NaN nor
// positive infinity and a finite number; else id 0.
EXPORT void best_tokens(const float* logits, int64_t rows, int64_t vocabulary, int64_t* token_ids, uint8_t* is_finite);
