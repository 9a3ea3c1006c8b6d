// Float32 numbers as sums of bf16 numbers, and words of two of them.

#pragma once

#include "vector.h"

namespace deepinfer {

constexpr int64_t PARTS = 3;  // bf16 numbers that a float32 number is the sum of

typedef int16_t VecHalf __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

inline VecHalf load_halves(const uint16_t* from) { return *reinterpret_cast<const VecHalf*>(from); }

// The next of the bf16 numbers that `left` is the sum of, as the upper half of each lane; it is taken off.
inline VecInt take_part(Vec& left) {
    const VecInt upper = bits(left) & splat_int(int32_t(0xffff0000));
    left = left - bits(upper);
    return upper;
}

// `count` numbers, whole vectors, as `parts` rows of bf16 numbers, `distance` apart, largest first.
inline void split_bf16(const float* x, int64_t count, int64_t parts, int64_t distance, uint16_t* to) {
    for (int64_t i = 0; i < count; i += LANES) {
        Vec left = load(x + i);
        for (int64_t part = 0; part < parts; ++part)
            *reinterpret_cast<VecHalf*>(to + part * distance + i) = __builtin_convertvector(take_part(left) >> 16, VecHalf);
    }
}

// Words with a number of the first row in the low half and one of the second in the high half.
inline void pair_rows(const uint16_t* first, const uint16_t* second, int64_t count, uint16_t* to) {
    for (int64_t i = 0; i < count; i += LANES) {
        const VecInt low = __builtin_convertvector(load_halves(first + i), VecInt) & splat_int(0xffff);
        const VecInt high = __builtin_convertvector(load_halves(second + i), VecInt) << 16;
        store(reinterpret_cast<float*>(to + 2 * i), bits(low | high));
    }
}

// [16][16] words turned over; `from` and `to` are apart and aligned to 64 bytes.
inline void transpose_words(const void* from, void* to) {
#if defined(__AVX512F__)
    const auto* rows = static_cast<const __m512i*>(from);
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {  // b[i + c]: column 4 l + c of rows i .. i + 3 in quarter l
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
        }
    auto* out = static_cast<__m512i*>(to);
    for (int c = 0; c < 4; ++c) {
        const __m512i low = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd), high2 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        out[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        out[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
        out[4 + c] = _mm512_shuffle_i32x4(low2, high2, 0x88);
        out[12 + c] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
    }
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j)
            std::memcpy(static_cast<uint8_t*>(to) + (j * 16 + i) * 4, static_cast<const uint8_t*>(from) + (i * 16 + j) * 4, 4);
#endif
}

}  // namespace deepinfer
