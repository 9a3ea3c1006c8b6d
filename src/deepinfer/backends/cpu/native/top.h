// The best of many scores, exactly: equal scores go to the lower index.

#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace deepinfer {

// A whole number that orders like the score; -0 counts as 0.
inline int32_t order_of(float score) {
    const float plain = score + 0.0f;
    int32_t all;
    std::memcpy(&all, &plain, sizeof all);
    return all ^ (all >> 31 & 0x7fffffff);
}

inline int64_t count_from(const int32_t* keys, int64_t n, int32_t least) {
    VecInt found[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; ++j) found[j] -= load_ints(keys + i + j * LANES) >= least;  // one that holds is -1
    const VecInt all = (found[0] + found[1]) + (found[2] + found[3]);
    int64_t count = 0;
    for (int lane = 0; lane < LANES; ++lane) count += all[lane];
    for (; i < n; ++i) count += keys[i] >= least;
    return count;
}

// What the `wanted` best of n keys are: those above `key` and the first `ties` that equal it.
struct Threshold {
    int32_t key;
    int64_t ties;
};

// Bit by bit, the greatest number that at least `wanted` keys reach; 1 <= wanted <= n.
inline Threshold find_threshold(const int32_t* keys, int64_t n, int64_t wanted) {
    uint32_t key = 0x80000000u;  // the least int32, by its bits
    for (int bit = 31; bit >= 0; --bit) {
        const uint32_t trial = key + (1u << bit);
        const int64_t count = count_from(keys, n, static_cast<int32_t>(trial));
        if (count >= wanted) key = trial;
        if (count == wanted) return {static_cast<int32_t>(key), n};
    }
    const int32_t least = static_cast<int32_t>(key);
    return {least, wanted - (least == INT32_MAX ? 0 : count_from(keys, n, least + 1))};
}

// Indices of the `count` <= n best keys into `out`, ascending; `out` has room for one more.
inline void top_indices(const int32_t* keys, int64_t n, int64_t count, int32_t* out) {
    if (count <= 0) return;
    Threshold threshold = find_threshold(keys, n, count);
    int64_t found = 0, i = 0;
    for (; i < n && threshold.ties < n; ++i) {
        const bool is_tie = keys[i] == threshold.key && threshold.ties > 0;
        threshold.ties -= is_tie;
        out[found] = static_cast<int32_t>(i);
        found += keys[i] > threshold.key || is_tie;
    }
#if defined(__AVX512F__)
    __m512i places = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(i)),
                                      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (; i + LANES <= n && found + LANES <= count; i += LANES) {
        const __m512i least = _mm512_set1_epi32(threshold.key);
        const __mmask16 is_best = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + i), least);
        _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(is_best, places));
        found += __builtin_popcount(is_best);
        places = _mm512_add_epi32(places, _mm512_set1_epi32(LANES));
    }
#endif
    for (; i < n; ++i) {
        out[found] = static_cast<int32_t>(i);
        found += keys[i] >= threshold.key;
    }
}

}  // namespace deepinfer
