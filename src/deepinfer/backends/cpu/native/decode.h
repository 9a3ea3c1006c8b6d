// Packed weights as floats: each source turns a few columns of a panel, 16 weights a column, into lines.

#pragma once

#include "gemm.h"
#include "vector.h"

namespace deepinfer {

constexpr int VECS = PANEL / LANES;  // vectors in a line of 16
constexpr int AHEAD_BYTES = 4096;     // how far weights are asked for before their turn; halves the time of one row

struct Line {
    Vec part[VECS];
};

inline Line zero_line() {
    Line line;
    for (int v = 0; v < VECS; ++v) line.part[v] = Vec{};
    return line;
}

inline Line splat_line(float value) {
    Line line;
    for (int v = 0; v < VECS; ++v) line.part[v] = splat(value);
    return line;
}

inline Line load_line(const float* from) {
    Line line;
    for (int v = 0; v < VECS; ++v) line.part[v] = load(from + v * LANES);
    return line;
}

inline void store_line(float* to, const Line& line) {
    for (int v = 0; v < VECS; ++v) store(to + v * LANES, line.part[v]);
}

// Powers of two of 16 exponent bytes.
inline Line scale_line(const uint8_t* exponents) {
    Line line;
    for (int v = 0; v < VECS; ++v) {
#if defined(__AVX512F__)
        const VecInt wide = (VecInt)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)exponents));
#elif defined(__AVX2__)
        const VecInt wide = (VecInt)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(exponents + v * LANES)));
#else
        VecInt wide{};
        for (int i = 0; i < LANES; ++i) wide[i] = exponents[v * LANES + i];
#endif
        line.part[v] = bits(wide << 23);
    }
    return line;
}

// 16 lanes of two bf16 numbers each: those of the even column in the low halves.
struct Pairs {
    VecInt part[VECS];
};

inline Pairs load_pairs(const uint8_t* from) {
    Pairs pairs;
    __builtin_prefetch(from + AHEAD_BYTES);
    for (int v = 0; v < VECS; ++v) pairs.part[v] = load_ints(from + v * sizeof(VecInt));
    return pairs;
}

// The numbers in the low and in the high halves; `mask` keeps a number's bits in the high half of a lane.
inline void split(const Pairs& pairs, int32_t mask, Line& low, Line& high) {
    for (int v = 0; v < VECS; ++v) {
        const VecInt moved = pairs.part[v] << 16;
        low.part[v] = bits(mask == int32_t(0xffff0000) ? moved : moved & mask);
        high.part[v] = bits(pairs.part[v] & mask);
    }
}

// What every source tells: COLUMNS lines come out of one `get`; they are UNIT times the weights, and whoever
// multiplies them with x directly gives x * FACTOR, so that no product is too small to keep its precision. That
// holds for products of x and a weight from 1e-21 and for x up to 1e19.

struct FloatSource {
    static constexpr int COLUMNS = 1;
    static constexpr float UNIT = 1.0f, FACTOR = 1.0f;
    const float* values;
    void get(int64_t column, Line* lines) const { lines[0] = load_line(values + column * PANEL); }
};

struct Bf16Source {
    static constexpr int COLUMNS = 2;
    static constexpr float UNIT = 1.0f, FACTOR = 1.0f;
    const uint8_t* values;
    void get(int64_t column, Line* lines) const {
        split(load_pairs(values + column * PANEL * 2), int32_t(0xffff0000), lines[0], lines[1]);
    }
};

// The bits s eeee mmm moved to the places of a float's sign, low exponent and high mantissa bits: 2 ** -120 of the
// number, subnormal numbers too.
struct E4m3Source {
    static constexpr int COLUMNS = 4;
    static constexpr float UNIT = 0x1p-120f, FACTOR = 0x1p64f;
    const uint8_t* values;
    void get(int64_t column, Line* lines) const {
        const Pairs all = load_pairs(values + column * PANEL);
        Pairs even, odd;  // columns 0, 2 and 1, 3
        for (int v = 0; v < VECS; ++v) {
            const VecShort codes = (VecShort)all.part[v];
            even.part[v] = (VecInt)((codes << 8) >> 4);
            odd.part[v] = (VecInt)(codes >> 4);
        }
        split(even, int32_t(0x87f00000), lines[0], lines[2]);
        split(odd, int32_t(0x87f00000), lines[1], lines[3]);
    }
};

struct E2m1Source {
    static constexpr int COLUMNS = 4;
    static constexpr float UNIT = 1.0f, FACTOR = 1.0f;
    const uint8_t* values;
    void get(int64_t column, Line* lines) const {
        const uint8_t* from = values + column * PANEL / 2;
        __builtin_prefetch(from + AHEAD_BYTES);
#if defined(__AVX2__)
        const __m256i codes = _mm256_loadu_si256((const __m256i*)from), nibble = _mm256_set1_epi8(15);
        pair_up(_mm256_and_si256(codes, nibble), lines);
        pair_up(_mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble), lines + 2);
#else
        static constexpr float numbers[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
        for (int i = 0; i < PANEL; ++i) {
            const int place = (i & 3) + (i & 4 ? 8 : 0) + (i & 8 ? 4 : 0);
            for (int c = 0; c < COLUMNS; ++c) {
                const int code = from[2 * place + c % 2] >> 4 * (c / 2) & 15;
                lines[c].part[i / LANES][i % LANES] = numbers[code];
            }
        }
#endif
    }

#if defined(__AVX2__)
    // Two columns of codes: looked up as the high and the low bytes of bf16 numbers.
    static void pair_up(__m256i codes, Line* lines) {
        const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -0x80, -0x41, -0x41, -0x41, -0x40, -0x40, -0x40, -0x40));
        const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40, 0, 0, -0x80, -0x40, 0, 0x40, -0x80, -0x40));
        const __m256i highs = _mm256_shuffle_epi8(high, codes), lows = _mm256_shuffle_epi8(low, codes);
        const __m256i first = _mm256_unpacklo_epi8(lows, highs), second = _mm256_unpackhi_epi8(lows, highs);
        Pairs pairs;
#if defined(__AVX512F__)
        pairs.part[0] = (VecInt)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
#else
        pairs.part[0] = (VecInt)first;
        pairs.part[1] = (VecInt)second;
#endif
        split(pairs, int32_t(0xffff0000), lines[0], lines[1]);
    }
#endif
};

}  // namespace deepinfer
