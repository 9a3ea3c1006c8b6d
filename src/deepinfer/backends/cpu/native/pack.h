// Cached rows in the bytes of `ops/reference/quant.py`.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace deepinfer {

inline uint32_t bits_of(float x) {
    uint32_t result;
    std::memcpy(&result, &x, 4);
    return result;
}

inline float float_of(uint32_t bits) {
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// Exponent byte of the smallest power of two that is at least x, for normal x > 0; 255 for infinity and NaN.
inline int32_t power_above(float x) {
    return std::min(((static_cast<int32_t>(bits_of(x)) - 1) >> 23) + 1, 255);
}

// 2 ** (exponent - 127), for exponents 1 .. 254; infinity for 255.
inline float power_of(int32_t exponent) { return float_of(static_cast<uint32_t>(exponent) << 23); }

// The nearest e4m3 number, ties to even, for |x| <= 448 or NaN.
inline uint8_t e4m3_of(float x) {
    const uint32_t all = bits_of(x), sign = all >> 24 & 0x80, size = all & 0x7fffffff;
    if (size > 0x7f800000) return static_cast<uint8_t>(sign | 0x7f);
    if (size < 0x3c800000) {  // below 2 ** -6: multiples of 2 ** -9, rounded by adding 2 ** 14
        const uint32_t steps = bits_of(float_of(size) + 16384.0f) - bits_of(16384.0f);
        return static_cast<uint8_t>(sign | steps);
    }
    const uint32_t rounded = size + 0x7ffff + (size >> 20 & 1);
    return static_cast<uint8_t>(sign | ((rounded >> 20) - (120 << 3)));
}

// x [dim] -> dim e4m3 bytes, then one ue8m0 byte per 32.
inline void pack_window(const float* x, int64_t dim, uint8_t* row) {
    for (int64_t start = 0; start < dim; start += 32) {
        float peak = 1e-4f;
        bool is_nan = false;
        for (int64_t i = start; i < start + 32; ++i) {
            peak = std::max(peak, std::fabs(x[i]));
            is_nan |= x[i] != x[i];
        }
        const int32_t exponent = is_nan ? 255 : power_above(peak * static_cast<float>(1.0 / 448.0));
        const float scale = power_of(exponent);
        for (int64_t i = start; i < start + 32; ++i) {
            const float scaled = x[i] / scale;
            row[i] = e4m3_of(scaled != scaled ? scaled : std::min(std::max(scaled, -448.0f), 448.0f));
        }
        row[dim + start / 32] = static_cast<uint8_t>(exponent);
    }
}

}  // namespace deepinfer
