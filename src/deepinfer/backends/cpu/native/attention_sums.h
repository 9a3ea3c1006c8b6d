// What a token has gathered from some of its keys.

#pragma once

#include <algorithm>

#include "vector.h"

namespace deepinfer {

// peak and total [heads], result [heads, dim]; heads are padded.
struct Sums {
    float *peak, *total, *result;

    static int64_t size(int64_t heads, int64_t dim) { return heads * (dim + 2); }

    Sums(float* memory, int64_t heads) : peak(memory), total(peak + heads), result(total + heads) {}

    // `sink` [num_heads] is null for none. The first keys that are folded in begin the result.
    void begin(int64_t heads, int64_t num_heads, const float* sink) const {
        for (int64_t head = 0; head < heads; ++head) {
            const float first = sink ? (head < num_heads ? sink[head] : 0.0f) : -INFINITY;
            peak[head] = std::max(first, -1e30f);
            total[head] = first > -1e30f ? 1.0f : 0.0f;
        }
    }

    // The result without any key.
    void clear(int64_t heads, int64_t dim) const { std::fill(result, result + heads * dim, 0.0f); }
};

// Scores of `count` keys, shares [count, heads], become shares against the new peak; results so far are worth `decay`
// [heads] of what they were.
inline void update_shares(const Sums& sums, int64_t heads, int64_t count, float* shares, float* decay) {
    for (int64_t head = 0; head < heads; head += LANES) {
        Vec peak = load(sums.peak + head);
        const Vec before = peak;
        for (int64_t k = 0; k < count; ++k) peak = maximum(peak, load(shares + k * heads + head));
        const Vec factor = exponential(before - peak);
        Vec total = load(sums.total + head) * factor;
        for (int64_t k = 0; k < count; ++k) {
            const Vec share = exponential(load(shares + k * heads + head) - peak);
            store(shares + k * heads + head, share);
            total += share;
        }
        store(sums.peak + head, peak);
        store(decay + head, factor);
        store(sums.total + head, total);
    }
}

}  // namespace deepinfer
