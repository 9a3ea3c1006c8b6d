// Rounding of activations to e4m3 with one power of two per 32, as `round_fp8` of ops/reference/quant.py.

#pragma once

#include "vector.h"

namespace deepinfer {

// Nearest e4m3 numbers, ties to even, of numbers up to 448 in size.
inline Vec nearest_e4m3(Vec x) {
    const VecInt all = bits(x), size = all & 0x7fffffff;
    const Vec magic = splat(16384.0f);  // the unit of its last place is the smallest e4m3 number
    const VecInt subnormal = bits((bits(size) + magic) - magic);
    const VecInt normal = (size + (size >> 20 & 1) + 0x7ffff) & ~0xfffff;  // 3 bits behind the leading one stay
    return bits(select_int(size < (121 << 23), subnormal, normal) | (all & INT32_MIN));
}

// x [count], a multiple of 32, to `rounded`, which may be x. A block with NaN or infinity becomes NaN.
inline void round_fp8(const float* x, int64_t count, float* rounded) {
    constexpr int SIZE = 32 / LANES;
    for (int64_t start = 0; start < count; start += 32) {
        Vec part[SIZE];
        VecInt most{};
        for (int i = 0; i < SIZE; ++i) {
            part[i] = load(x + start + i * LANES);
            const VecInt size = bits(part[i]) & 0x7fffffff;  // orders like the size, NaN above all
            most = select_int(size > most, size, most);
        }
        int32_t lanes[LANES], peak_bits = 0x38d1b717;  // 1e-4, the floor of a peak
        std::memcpy(lanes, &most, sizeof lanes);
        for (int32_t lane : lanes) peak_bits = lane > peak_bits ? lane : peak_bits;
        float peak;
        std::memcpy(&peak, &peak_bits, sizeof peak);
        const float quotient = peak * (1.0f / 448.0f);
        int32_t quotient_bits;
        std::memcpy(&quotient_bits, &quotient, sizeof quotient);
        const int32_t exponent = ((quotient_bits - 1) >> 23) + 1;  // of the smallest power of two at or above it
        const bool is_finite = peak_bits < 0x7f800000;  // else the scale is NaN, and its inverse anything
        const Vec scale = is_finite ? bits(splat_int(exponent << 23)) : splat(NAN);
        const Vec inverse = bits(splat_int(is_finite ? (254 - exponent) << 23 : 0)), limit = splat(448.0f);
        for (int i = 0; i < SIZE; ++i) {
            const Vec scaled = minimum(maximum(part[i] * inverse, -limit), limit);
            store(rounded + start + i * LANES, nearest_e4m3(scaled) * scale);
        }
    }
}

}  // namespace deepinfer
