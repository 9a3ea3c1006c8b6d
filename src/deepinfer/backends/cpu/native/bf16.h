// Float32 numbers as sums of bf16 numbers, and words of two of them.

#pragma once

#include "vector.h"

namespace deepinfer {

constexpr int64_t PARTS = 3;  // bf16 numbers that a float32 number is the sum of

typedef int16_t VecHalf __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

constexpr int SPLIT_VECS = 32 / LANES;  // vectors of numbers that are split at a time

// The next of the bf16 numbers that `left` is the sum of, as the upper half of each lane; it is taken off.
inline VecInt take_part(Vec& left) {
    const VecInt upper = bits(left) & splat_int(int32_t(0xffff0000));
    left = left - bits(upper);
    return upper;
}

#if defined(__AVX512BF16__)
// sums + words' numbers times the two at `x`: those of the upper halves first, each product and sum rounded once.
inline Vec add_pairs(VecInt words, const void* x, Vec sums) {
    int32_t pair;
    std::memcpy(&pair, x, 4);
    return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)words, (__m512bh)splat_int(pair));
}
#endif

inline VecInt lower_from_upper(VecInt words) { return (VecInt)((VecUnsigned)words >> 16); }

// The upper halves of 32 lanes.
inline void store_upper(const VecInt (&words)[SPLIT_VECS], uint16_t* to) {
#if defined(__AVX512BW__)
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i both = _mm512_packus_epi32((__m512i)lower_from_upper(words[0]), (__m512i)lower_from_upper(words[1]));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, both));
#else
    for (int i = 0; i < SPLIT_VECS; ++i)
        *reinterpret_cast<VecHalf*>(to + i * LANES) = __builtin_convertvector(words[i] >> 16, VecHalf);
#endif
}

// The nearest bf16 numbers, ties to even, as the upper half of each lane.
inline VecInt nearest_bf16(Vec x) {
    const VecInt all = bits(x), up = all + 0x7fff + (all >> 16 & 1);
    return select_int(x != x, all, up) & splat_int(int32_t(0xffff0000));
}

// 32 numbers as the nearest bf16 numbers.
inline void round_bf16(const Vec (&x)[SPLIT_VECS], uint16_t* to) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]));
#else
    VecInt words[SPLIT_VECS];
    for (int i = 0; i < SPLIT_VECS; ++i) words[i] = nearest_bf16(x[i]);
    store_upper(words, to);
#endif
}

// 32 numbers as `parts` rows of bf16 numbers, `distance` apart, largest first; they are taken off.
inline void split_block(Vec (&left)[SPLIT_VECS], int64_t parts, int64_t distance, uint16_t* to) {
    for (int64_t part = 0; part < parts; ++part) {
        VecInt words[SPLIT_VECS];
        for (int i = 0; i < SPLIT_VECS; ++i) words[i] = take_part(left[i]);
        store_upper(words, to + part * distance);
    }
}

// The same for `count` numbers, a multiple of 32.
inline void split_bf16(const float* x, int64_t count, int64_t parts, int64_t distance, uint16_t* to) {
    for (int64_t start = 0; start < count; start += 32) {
        Vec left[SPLIT_VECS];
        for (int i = 0; i < SPLIT_VECS; ++i) left[i] = load(x + start + i * LANES);
        split_block(left, parts, distance, to + start);
    }
}

// Words with a number of the first row in the low half and one of the second in the high half; `count` is a multiple
// of 32.
inline void pair_rows(const uint16_t* first, const uint16_t* second, int64_t count, uint16_t* to) {
#if defined(__AVX512BW__)
    const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t i = 0; i < count; i += 32) {
        const __m512i a = _mm512_loadu_si512(first + i), b = _mm512_loadu_si512(second + i);
        const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);  // 4 of each 8
        _mm512_storeu_si512(to + 2 * i, _mm512_permutex2var_epi64(low, lower, high));
        _mm512_storeu_si512(to + 2 * i + 32, _mm512_permutex2var_epi64(low, upper, high));
    }
#else
    for (int64_t i = 0; i < count; ++i) to[2 * i] = first[i], to[2 * i + 1] = second[i];
#endif
}

// 16 rows of 16 words, `stride` bytes apart, turned over; `from` and `to` are apart, `to` is aligned to 64 bytes.
inline void transpose_words(const void* from, void* to, int64_t stride = 64) {
    const auto* rows = static_cast<const uint8_t*>(from);
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        const __m512i even = _mm512_loadu_si512(rows + i * stride), odd = _mm512_loadu_si512(rows + (i + 1) * stride);
        a[i] = _mm512_unpacklo_epi32(even, odd);
        a[i + 1] = _mm512_unpackhi_epi32(even, odd);
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
            std::memcpy(static_cast<uint8_t*>(to) + (j * 16 + i) * 4, rows + i * stride + j * 4, 4);
#endif
}

}  // namespace deepinfer
