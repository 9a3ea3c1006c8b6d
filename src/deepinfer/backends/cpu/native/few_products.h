// Products of one or two rows with matrices that are packed for tiles: the sums of tiles.h, in the same order, by vectors.

#pragma once

#include "bf16.h"
#include "decode.h"
#include "tiles.h"

namespace deepinfer {

constexpr int64_t FEW_ROWS = 2;

// The numbers of a block of 32 columns of a panel, four pairs of columns at a time.
struct TiledBf16Block {
    const uint8_t* from;

    TiledBf16Block(const uint8_t* panel, const uint8_t*, int64_t block) : from(panel + block * TILE_BYTES) {}
    void get(int i, Pairs (&pairs)[4]) const {
        for (int j = 0; j < 4; ++j) pairs[j] = load_pairs(from + (4 * i + j) * 64);
    }
};

// Numbers in the table are 2 ** 125 times the codes' and are brought to their scale by what is taken off their
// exponents; zero stays zero, since a difference ends there.
struct TiledE2m1Block {
    alignas(64) static constexpr uint16_t numbers[32] = {
        0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
        0, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40,
        0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
        0, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40};
    const uint8_t* from;
#if defined(__AVX512BW__)
    __m512i less;

    TiledE2m1Block(const uint8_t* panel, const uint8_t* exponents, int64_t block) : from(panel + block * 256) {
        const __m512i scales = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(exponents + block * PANEL)));
        const __m512i steps = _mm512_sub_epi32(_mm512_set1_epi32(252), scales);
        less = _mm512_or_si512(_mm512_slli_epi32(steps, 7), _mm512_slli_epi32(steps, 23));
    }
    void get(int i, Pairs (&pairs)[4]) const {
        const __m512i table = _mm512_load_si512(numbers);
        __m512i words = _mm512_loadu_si512(from + i * 64);
        __builtin_prefetch(from + i * 64 + AHEAD_BYTES);
        for (int j = 0; j < 4; ++j, words = _mm512_srli_epi16(words, 4))
            pairs[j].part[0] = (VecInt)_mm512_subs_epu16(_mm512_permutexvar_epi16(words, table), less);
    }
#else
    const uint8_t* scales;

    TiledE2m1Block(const uint8_t* panel, const uint8_t* exponents, int64_t block)
        : from(panel + block * 256), scales(exponents + block * PANEL) {}
    void get(int i, Pairs (&pairs)[4]) const {
        for (int j = 0; j < 4; ++j)
            for (int row = 0; row < PANEL; ++row) {
                uint32_t both = 0;
                for (int odd = 0; odd < 2; ++odd) {
                    const int code = from[i * 64 + row * 4 + odd * 2 + j / 2] >> j % 2 * 4 & 15;
                    const int less = (252 - scales[row]) << 7;
                    both |= static_cast<uint32_t>(numbers[code] > less ? numbers[code] - less : 0) << odd * 16;
                }
                pairs[j].part[row / LANES][row % LANES] = static_cast<int32_t>(both);
            }
    }
#endif
};

// While it lives, numbers below 2 ** -126 count as zero, as in tiles.
class FlushTiny {
public:
    FlushTiny(const FlushTiny&) = delete;
    FlushTiny& operator=(const FlushTiny&) = delete;
#if defined(__SSE2__)
    FlushTiny() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
    ~FlushTiny() { __builtin_ia32_ldmxcsr(before_); }

private:
    unsigned before_;
#else
    FlushTiny() = default;
#endif
};

// 32 numbers as the floats of their bf16 parts, `distance` apart; they are taken off.
inline void split_few(Vec (&left)[SPLIT_VECS], int64_t parts, int64_t distance, float* to) {
    for (int64_t part = 0; part < parts; ++part)
        for (int i = 0; i < SPLIT_VECS; ++i) store(to + part * distance + i * LANES, bits(take_part(left[i])));
}

// total[r] += x of B blocks [B][S parts][R rows][32] * the blocks.
template <int R, int S, int B, class Block>
inline void add_few(const float* x, const uint8_t* panel, const uint8_t* exponents, int64_t block, Line (&total)[R]) {
    Line sums[B][S][R][2] = {};
    for (int i = 0; i < 4; ++i)
        for (int b = 0; b < B; ++b) {
            Pairs pairs[4];
            Block(panel, exponents, block + b).get(i, pairs);
            for (int j = 0; j < 4; ++j) {
                Line lines[2];
                split(pairs[j], int32_t(0xffff0000), lines[0], lines[1]);
                for (int s = 0; s < S; ++s)
                    for (int r = 0; r < R; ++r)
                        for (int odd = 0; odd < 2; ++odd) {
                            const Vec factor = splat(x[((b * S + s) * R + r) * BLOCK + 8 * i + 2 * j + odd]);
                            for (int v = 0; v < VECS; ++v)
                                sums[b][s][r][odd].part[v] =
                                    multiply_add(factor, lines[odd].part[v], sums[b][s][r][odd].part[v]);
                        }
            }
        }
    for (int b = 0; b < B; ++b)
        for (int s = 0; s < S; ++s)
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECS; ++v)
                    total[r].part[v] += sums[b][s][r][0].part[v] + sums[b][s][r][1].part[v];
}

template <int R, int S, class Block>
void few_panels(const float* x, const Matrix& matrix, float* out, int64_t stride, int64_t first, int64_t last) {
    constexpr int B = R * S == 1 ? 4 : R * S <= 3 ? 2 : 1;  // so that there are enough sums to keep multipliers busy
    const int64_t blocks = (matrix.columns + BLOCK - 1) / BLOCK, bytes = panel_bytes(matrix.format, matrix.columns);
    for (int64_t number = first; number < last; ++number) {
        const uint8_t* panel = static_cast<const uint8_t*>(matrix.values) + number * bytes;
        const uint8_t* exponents = matrix.exponents + number * blocks * PANEL;
        Line total[R] = {};
        int64_t block = 0;
        for (; block + B <= blocks; block += B)
            add_few<R, S, B, Block>(x + block * S * R * BLOCK, panel, exponents, block, total);
        for (; block < blocks; ++block)
            add_few<R, S, 1, Block>(x + block * S * R * BLOCK, panel, exponents, block, total);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < VECS; ++v) {
                const int64_t column = number * PANEL + v * LANES;
                if (column < matrix.rows) store(out + r * stride + column, total[r].part[v], matrix.rows - column);
            }
    }
}

// x [blocks][parts][rows][32], 1 or 2 rows and 1 or 3 parts.
inline void few_products(const float* x, int64_t rows, int64_t parts, const Matrix& matrix, float* out, int64_t stride,
                         int64_t first, int64_t last) {
    const FlushTiny flush;
    const auto run = [&](auto r, auto s) {
        if (matrix.format == TILED_E2M1) few_panels<r, s, TiledE2m1Block>(x, matrix, out, stride, first, last);
        else few_panels<r, s, TiledBf16Block>(x, matrix, out, stride, first, last);
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> two;
    constexpr std::integral_constant<int, PARTS> all;
    if (rows == 1) parts == 1 ? run(one, one) : run(one, all);
    else parts == 1 ? run(two, one) : run(two, all);
}

}  // namespace deepinfer
