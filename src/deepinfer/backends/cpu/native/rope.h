// Rotary embedding of adjacent pairs at the end of a vector.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace deepinfer {

constexpr int64_t MAX_PAIRS = 256;

// Cosine and sine of one position's angle for each pair.
struct Turn {
    float cos[MAX_PAIRS], sin[MAX_PAIRS];
    int64_t pairs;
};

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
        std::memcpy(turn.cos + i, &turned_cosine, sizeof turned_cosine);
        std::memcpy(turn.sin + i, &turned_sine, sizeof turned_sine);
    }
}

// Rotate the last 2 * pairs numbers of x [dim] in place; backwards undoes it.
inline void rotate(float* x, int64_t dim, const Turn& turn, bool backwards = false) {
    float* tail = x + dim - 2 * turn.pairs;
    const float sign = backwards ? -1.0f : 1.0f;
    for (int64_t i = 0; i < turn.pairs; ++i) {
        const float even = tail[2 * i], odd = tail[2 * i + 1], sine = sign * turn.sin[i];
        tail[2 * i] = even * turn.cos[i] - odd * sine;
        tail[2 * i + 1] = even * sine + odd * turn.cos[i];
    }
}

}  // namespace deepinfer
