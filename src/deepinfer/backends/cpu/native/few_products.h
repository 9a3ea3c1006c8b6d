// Products of few rows with matrices that are packed for tiles: the sums of tiles.h, in the same order, by vectors. Codes
// are widened in registers.

#pragma once

#include "bf16.h"
#include "tiled_blocks.h"

namespace deepinfer {

// Rows of x that are few, their numbers, and a row's sums over 32 columns of a panel, two of which are added at a time.
#if defined(__AVX512BF16__)
constexpr int FEW_ROWS = 16;
using FewNumber = uint16_t;  // of x, bf16

struct FewColumns {
    Pairs pairs;
    explicit FewColumns(const Pairs& from) : pairs(from) {}
};

struct FewSums {
    Vec all{};
    void add(const FewColumns& columns, const FewNumber* x) { all = add_pairs(columns.pairs.part[0], x, all); }
    Vec total(int) const { return all; }
};

// 32 numbers as their bf16 parts, `distance` apart; they are taken off.
inline void split_few(Vec (&left)[SPLIT_VECS], int64_t parts, int64_t distance, FewNumber* to) {
    split_block(left, parts, distance, to);
}
#else
constexpr int FEW_ROWS = 2;
using FewNumber = float;

struct FewColumns {
    Line of[2];  // even and odd
    explicit FewColumns(const Pairs& from) { split(from, int32_t(0xffff0000), of[0], of[1]); }
};

struct FewSums {
    Line of[2] = {};
    void add(const FewColumns& columns, const FewNumber* x) {
        for (int odd = 0; odd < 2; ++odd)
            for (int v = 0; v < VECS; ++v)
                of[odd].part[v] = multiply_add(splat(x[odd]), columns.of[odd].part[v], of[odd].part[v]);
    }
    Vec total(int v) const { return of[0].part[v] + of[1].part[v]; }
};

inline void split_few(Vec (&left)[SPLIT_VECS], int64_t parts, int64_t distance, FewNumber* to) {
    for (int64_t part = 0; part < parts; ++part)
        for (int i = 0; i < SPLIT_VECS; ++i) store(to + part * distance + i * LANES, bits(take_part(left[i])));
}
#endif

// While it lives, numbers below 2 ** -126 count as zero, as in the matrix unit.
class FlushTiny {
public:
    FlushTiny(const FlushTiny&) = delete;
    FlushTiny& operator=(const FlushTiny&) = delete;
#if defined(__SSE2__) && !defined(__AVX512BF16__)
    FlushTiny() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before_ | 0x8040); }
    ~FlushTiny() { __builtin_ia32_ldmxcsr(before_); }

private:
    unsigned before_;
#else
    FlushTiny() = default;
#endif
};

// total[r] += x of B blocks [B][S parts][R rows][32] * the blocks.
template <int R, int S, int B, class Block>
inline void add_few(const FewNumber* x, const uint8_t* panel, const uint8_t* exponents, int64_t block, Line (&total)[R]) {
    FewSums sums[B][S][R];
    for (int i = 0; i < 4; ++i)
        for (int b = 0; b < B; ++b) {
            Pairs pairs[4];
            Block(panel, exponents, block + b).get(i, pairs);
            for (int j = 0; j < 4; ++j) {
                const FewColumns columns(pairs[j]);
                for (int s = 0; s < S; ++s)
                    for (int r = 0; r < R; ++r)
                        sums[b][s][r].add(columns, x + ((b * S + s) * R + r) * BLOCK + 8 * i + 2 * j);
            }
        }
    for (int b = 0; b < B; ++b)
        for (int s = 0; s < S; ++s)
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECS; ++v) total[r].part[v] += sums[b][s][r].total(v);
}

template <int R, int S, class Block>
void few_panels(const FewNumber* x, const Matrix& matrix, float* out, int64_t stride, int64_t first, int64_t last) {
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

// x [blocks][parts][rows][32], up to R rows and 1 or 3 parts.
template <int R = FEW_ROWS>
void few_products(const FewNumber* x, int64_t rows, int64_t parts, const Matrix& matrix, float* out, int64_t stride,
                         int64_t first, int64_t last) {
    if constexpr (R > 1) {
        if (rows < R) return few_products<R - 1>(x, rows, parts, matrix, out, stride, first, last);
    }
    const FlushTiny flush;
    const auto run = [&](auto s) {
        with_block(matrix.format, [&](auto source) {
            few_panels<R, s, typename decltype(source)::Block>(x, matrix, out, stride, first, last);
        });
    };
    if (parts == 1) run(std::integral_constant<int, 1>());
    else run(std::integral_constant<int, PARTS>());
}

}  // namespace deepinfer
