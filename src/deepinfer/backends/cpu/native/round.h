// Rounding of activations to e4m3 with one power of two per 32, as `round_fp8` of ops/reference/quant.py.

#pragma once

#include "vector.h"

namespace deepinfer {

constexpr int ROUND_VECS = 32 / LANES;  // vectors of a block that shares a power of two

// Nearest e4m3 numbers, ties to even, of numbers up to 448 in size; what is rounded to 0 is not negative.
inline Vec nearest_e4m3(Vec x) {
    const VecInt power = maximum(bits(x) & 0x7f800000, splat_int(121 << 23));  // below are subnormal numbers
    // The unit of its last place is an eighth of the power. Unsigned, since NaN passes here too.
    const Vec magic = bits((VecInt)((VecUnsigned)power + ((20u << 23) + (1u << 22))));
    return (x + magic) - magic;
}

// 32 numbers. A block with NaN or infinity becomes NaN.
inline void round_block(const float* x, Vec (&rounded)[ROUND_VECS]) {
    VecInt most = splat_int(0x38d1b717);  // 1e-4, the floor of a peak
    for (int i = 0; i < ROUND_VECS; ++i) {
        rounded[i] = load(x + i * LANES);
        most = maximum(most, bits(rounded[i]) & 0x7fffffff);  // orders like the size, NaN above all
    }
    most = spread_largest(most);
    const VecInt quotient = bits(bits(most) * (1.0f / 448.0f));
    const VecInt power = (((quotient - 1) >> 23) + 1) << 23;  // the smallest power of two at or above it
    const VecInt is_finite = most < 0x7f800000;
    const Vec scale = select(is_finite, bits(power), splat(NAN));
    const Vec inverse = bits(((254 << 23) - (power & is_finite)) & is_finite);
    for (int i = 0; i < ROUND_VECS; ++i) rounded[i] = nearest_e4m3(rounded[i] * inverse) * scale;
}

// x [count], a multiple of 32, to `rounded`, which may be x.
inline void round_fp8(const float* x, int64_t count, float* rounded) {
    for (int64_t start = 0; start < count; start += 32) {
        Vec block[ROUND_VECS];
        round_block(x + start, block);
        for (int i = 0; i < ROUND_VECS; ++i) store(rounded + start + i * LANES, block[i]);
    }
}

}  // namespace deepinfer
