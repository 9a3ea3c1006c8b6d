// The best of many scores, exactly: equal scores go to the lower index.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scratch.h"

namespace deepinfer {

// A whole number that orders like the score; -0 counts as 0.
inline uint32_t order_of(float score) {
    const float plain = score + 0.0f;
    int32_t all;
    std::memcpy(&all, &plain, sizeof all);
    return static_cast<uint32_t>(all ^ (all >> 31 & 0x7fffffff)) ^ 0x80000000u;
}

struct TopRemaining;

// The `wanted`-th largest of n keys, 1 <= wanted <= n, and how many keys that equal it are among those.
// Digit by digit from the top: a histogram says in which digit it lies, and only keys with that digit go on.
struct Threshold {
    uint32_t key;
    int64_t ties;
};

inline Threshold find_threshold(const uint32_t* keys, int64_t n, int64_t wanted) {
    constexpr int DIGIT_BITS[3] = {11, 11, 10};
    uint32_t* remaining = scratch<TopRemaining, uint32_t>(n);
    Threshold result{0, wanted};
    int shift = 32;
    for (const int width : DIGIT_BITS) {
        shift -= width;
        const uint32_t mask = (1u << width) - 1;
        int32_t counts[1 << 11] = {};
        for (int64_t i = 0; i < n; ++i) ++counts[keys[i] >> shift & mask];
        uint32_t digit = mask;
        for (; counts[digit] < result.ties; --digit) result.ties -= counts[digit];
        result.key |= digit << shift;
        if (shift == 0) break;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t key = keys[i];
            remaining[kept] = key;
            kept += (key >> shift & mask) == digit;
        }
        keys = remaining;
        n = kept;
    }
    return result;
}

// Indices of the `count` <= n best keys into `out`, ascending; `out` has room for one more.
inline void top_indices(const uint32_t* keys, int64_t n, int64_t count, int32_t* out) {
    if (count <= 0) return;
    Threshold threshold = find_threshold(keys, n, count);
    int64_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        const bool is_tie = keys[i] == threshold.key && threshold.ties > 0;
        threshold.ties -= is_tie;
        out[found] = static_cast<int32_t>(i);
        found += keys[i] > threshold.key || is_tie;
    }
}

}  // namespace deepinfer
