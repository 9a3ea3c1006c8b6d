// Sixteen packed weights at a time as floats, in the units that `gemm.h` names.

#pragma once

#include "gemm.h"
#include "vector.h"

namespace deepinfer {

constexpr int VECS = PANEL / LANES;  // vectors in a line of 16

struct Line {
    Vec part[VECS];
};

inline Line load_line(const float* from) {
    Line line;
    for (int v = 0; v < VECS; ++v) line.part[v] = load(from + v * LANES);
    return line;
}

inline void store_line(float* to, const Line& line) {
    for (int v = 0; v < VECS; ++v) store(to + v * LANES, line.part[v]);
}

inline Line scale_line(const uint8_t* exponents) {
    Line line;
    for (int v = 0; v < VECS; ++v) {
        VecInt powers{};
#if defined(__AVX512F__)
        powers = (VecInt)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents)));
#elif defined(__AVX2__)
        powers = (VecInt)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents + v * LANES)));
#else
        for (int i = 0; i < LANES; ++i) powers[i] = exponents[v * LANES + i];
#endif
        line.part[v] = bits(powers << 23);
    }
    return line;
}

// Values of a panel from `columns` of one format; COUNT lines come out of one `get`.
struct FloatSource {
    static constexpr int COUNT = 1;
    const float* values;
    Line get(int64_t column, int) const { return load_line(values + column * PANEL); }
};

struct Bf16Source {
    static constexpr int COUNT = 1;
    const uint16_t* values;
    Line get(int64_t column, int) const {
        const uint16_t* from = values + column * PANEL;
        Line line;
        for (int v = 0; v < VECS; ++v) {
            VecInt wide{};
#if defined(__AVX512F__)
            wide = (VecInt)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
            wide = (VecInt)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + v * LANES)));
#else
            for (int i = 0; i < LANES; ++i) wide[i] = from[v * LANES + i];
#endif
            line.part[v] = bits(wide << 16);
        }
        return line;
    }
};

// s eeee mmm moved into a half float, whose exponent has a bias 8 greater: 1/256 of the number.
struct E4m3Source {
    static constexpr int COUNT = 1;
    const uint8_t* values;
    Line get(int64_t column, int) const {
        const uint8_t* from = values + column * PANEL;
        Line line;
#if defined(__AVX2__)
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbf80)));
#if defined(__AVX512F__)
        line.part[0] = (Vec)_mm512_cvtph_ps(half);
#else
        line.part[0] = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
        line.part[1] = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#endif
#else
        for (int i = 0; i < PANEL; ++i) {
            const int code = from[i], exponent = code >> 3 & 15, mantissa = code & 7;
            const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 18) : std::ldexp(float(mantissa), -17);
            line.part[i / LANES][i % LANES] = code & 128 ? -size : size;
        }
#endif
        return line;
    }
};

struct E2m1Source {
    static constexpr int COUNT = 2;
    const uint8_t* values;
    Line get(int64_t column, int which) const {
        const uint8_t* from = values + column / 2 * PANEL;
        Line line;
#if defined(__AVX2__)
        const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        if (which) codes = _mm_srli_epi16(codes, 4);
        const __m128i numbers = _mm_shuffle_epi8(twice, _mm_and_si128(codes, _mm_set1_epi8(15)));
#if defined(__AVX512F__)
        line.part[0] = (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers));
#else
        line.part[0] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers));
        line.part[1] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(numbers, numbers)));
#endif
#else
        static constexpr float twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
        for (int i = 0; i < PANEL; ++i) line.part[i / LANES][i % LANES] = twice[from[i] >> 4 * which & 15];
#endif
        return line;
    }
};

}  // namespace deepinfer
