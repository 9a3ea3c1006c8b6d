// Rotary embedding of adjacent pairs at the end of a vector.

#pragma once

#include <cmath>
#include <cstdint>

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
    turn.pairs = pairs;
    for (int64_t i = 0; i < pairs; ++i) {
        const float angle = static_cast<float>(position) * frequencies[i];
        const double x = angle;
        const double magic = 6755399441055744.0;  // 1.5 * 2 ** 52: its sum with a number rounds that to an integer
        const double shifted = x * 0.63661977236758134308 + magic;
        const double quarter = shifted - magic;
        const double r = (x - quarter * 1.57079632679489655800) - quarter * 6.12323399573676603587e-17;
        const double r2 = r * r;  // Taylor series, good to 2e-9 up to pi / 4
        const double s = r + r * r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880))));
        const double c = 1.0 + r2 * (-1.0 / 2 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 - r2 / 3628800))));
        const int64_t n = static_cast<int64_t>(static_cast<int32_t>(quarter));
        const double cosine = n & 1 ? s : c, sine = n & 1 ? c : s;
        turn.cos[i] = static_cast<float>((n + 1) & 2 ? -cosine : cosine);
        turn.sin[i] = static_cast<float>(n & 2 ? -sine : sine);
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
