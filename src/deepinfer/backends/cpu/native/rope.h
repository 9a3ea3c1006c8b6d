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
        const double r2 = r * r;
        const double s = r + r * r2 * (-1.6666666666666602e-1 + r2 * (8.3333333332648597e-3 + r2 * (-1.9841269823935698e-4 + r2 * (2.7557249735166130e-6 - r2 * 2.4763320490490980e-8))));
        const double c = 1.0 + r2 * (-0.5 + r2 * (4.1666666666618084e-2 + r2 * (-1.3888888883888630e-3 + r2 * (2.4801583884577380e-5 - r2 * 2.7546948208455470e-7))));
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
