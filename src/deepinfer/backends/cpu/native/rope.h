// Rotary embedding of adjacent pairs at the end of a vector.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace deepinfer {

constexpr int64_t MAX_PAIRS = 256;

// Cosine and sine of one position's angle for each number of each pair; the sine of its first one is negated.
struct Turn {
    float cos[2 * MAX_PAIRS], sin[2 * MAX_PAIRS];
    int64_t pairs;
};

// Both numbers of each pair of lanes in the other's place.
inline Vec swap_pairs(Vec x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_permute_ps((__m512)x, 0xb1);
#elif defined(__AVX2__)
    return (Vec)_mm256_permute_ps((__m256)x, 0xb1);
#else
    Vec swapped;
    for (int i = 0; i < LANES; ++i) swapped[i] = x[i ^ 1];
    return swapped;
#endif
}

// frequencies [pairs] in radians per position. The angle is rounded to float, as in the reference; what follows
// works in double, so that it is as good at position 1,000,000 as at 0.
inline void set_turn(Turn& turn, int32_t position, const float* frequencies, int64_t pairs) {
    typedef double Doubles __attribute__((vector_size(LANES * 4)));
    typedef int64_t Longs __attribute__((vector_size(LANES * 4)));
    constexpr int WIDTH = LANES / 2;
    typedef float Floats __attribute__((vector_size(WIDTH * 4)));
    static_assert(MAX_PAIRS % WIDTH == 0);
    turn.pairs = pairs;
    for (int64_t i = 0; i < pairs; i += WIDTH) {
        Floats angle{};
        std::memcpy(&angle, frequencies + i, std::min<int64_t>(WIDTH, pairs - i) * 4);
        angle *= static_cast<float>(position);
        const Doubles x = __builtin_convertvector(angle, Doubles);
        const Doubles magic = Doubles{} + 6755399441055744.0;  // 1.5 * 2 ** 52: a sum with it is rounded to an integer
        const Doubles shifted = x * 0.63661977236758134308 + magic;
        const Doubles quarter = shifted - magic;
        const Doubles r = (x - quarter * 1.57079632679489655800) - quarter * 6.12323399573676603587e-17;
        const Doubles r2 = r * r;  // Taylor series, good to 2e-9 up to pi / 4
        const Doubles s = r + r * r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880))));
        const Doubles c =
            1.0 + r2 * (-1.0 / 2 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 - r2 / 3628800))));
        const Longs n = (Longs)shifted;  // its last bits are those of the integer
        const Doubles cosine = (n & 1) != 0 ? s : c, sine = (n & 1) != 0 ? c : s;
        const Floats turned_cosine = __builtin_convertvector(((n + 1) & 2) != 0 ? -cosine : cosine, Floats);
        const Floats turned_sine = __builtin_convertvector((n & 2) != 0 ? -sine : sine, Floats);
        for (int j = 0; j < WIDTH; ++j) {
            turn.cos[2 * (i + j)] = turn.cos[2 * (i + j) + 1] = turned_cosine[j];
            turn.sin[2 * (i + j)] = -turned_sine[j], turn.sin[2 * (i + j) + 1] = turned_sine[j];
        }
    }
}

// Rotate the last 2 * pairs numbers of x [dim] in place; backwards undoes it.
inline void rotate(float* x, int64_t dim, const Turn& turn, bool backwards = false) {
    const int64_t count = 2 * turn.pairs;
    float* tail = x + dim - count;
    for (int64_t i = 0; i < count; i += LANES) {
        const Vec own = load(tail + i, count - i), other = swap_pairs(own) * load(turn.sin + i);
        const Vec turned = own * load(turn.cos + i);
        store(tail + i, backwards ? turned - other : turned + other, count - i);
    }
}

}  // namespace deepinfer
