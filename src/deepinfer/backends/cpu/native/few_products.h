// Products of few rows, with bf16 pairs of any number, and matrices that are packed for tiles: the sums of tiles.h, in
// the same order, by vectors. Codes are widened in registers.

#pragma once

#include <algorithm>

#include "bf16.h"
#include "tiled_blocks.h"

namespace deepinfer {

// Rows of x that are few, their numbers, and a row's sums over 32 columns of a panel, two of which are added at a time.
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;  // instructions that multiply them, for any number of rows
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
#else
constexpr bool HAS_PAIRS = false;
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
#endif

[[maybe_unused]] constexpr int PAIR_ROWS = 12;  // whose sums of a panel and of a block of it fill the registers

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

inline void store_some(float* to, const Line& line, int64_t count) {
    float all[PANEL];
    store_line(all, line);
    std::copy_n(all, count, to);
}

// out[r] = x of [blocks][S parts][R rows][32] times a panel, of which `columns` count.
template <int R, int S, class Block>
void few_panel(const FewNumber* x, const uint8_t* panel, const uint8_t* exponents, int64_t blocks, float* out,
               int64_t stride, int64_t columns) {
    constexpr int B = R * S == 1 ? 4 : R * S <= 3 ? 2 : 1;  // so that there are enough sums to keep multipliers busy
    Line total[R];
#pragma GCC unroll 16  // as below: sums stay in registers
    for (int r = 0; r < R; ++r) total[r] = zero_line();
    int64_t block = 0;
    if constexpr (B > 1)
        for (; block + B <= blocks; block += B)
            add_few<R, S, B, Block>(x + block * S * R * BLOCK, panel, exponents, block, total);
    for (; block < blocks; ++block) add_few<R, S, 1, Block>(x + block * S * R * BLOCK, panel, exponents, block, total);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        if (columns >= PANEL) store_line(out + r * stride, total[r]);
        else store_some(out + r * stride, total[r], columns);
    }
}

template <int R, int S, class Block>
void few_panels(const FewNumber* x, const Matrix& matrix, float* out, int64_t stride, int64_t first, int64_t last) {
    const int64_t blocks = (matrix.columns + BLOCK - 1) / BLOCK, bytes = panel_bytes(matrix.format, matrix.columns);
    const auto* values = static_cast<const uint8_t*>(matrix.values);
    for (int64_t number = first; number < last; ++number)
        few_panel<R, S, Block>(x, values + number * bytes, matrix.exponents + number * blocks * PANEL, blocks,
                               out + number * PANEL, stride, matrix.rows - number * PANEL);
}

// A block of a panel that was widened a moment ago.
struct NearBlock {
    const uint8_t* from;

    NearBlock(const uint8_t* panel, const uint8_t*, int64_t block) : from(panel + block * TILE_BYTES) {}
    void get(int i, Pairs (&pairs)[4]) const {
        for (int j = 0; j < 4; ++j)
            for (int v = 0; v < VECS; ++v) pairs[j].part[v] = load_ints(from + (4 * i + j) * 64 + v * sizeof(VecInt));
    }
};

// Up to R rows, x [blocks][parts][rows][32], times a panel of bf16 numbers.
template <int R>
void few_rows(const FewNumber* x, int64_t rows, int64_t parts, const uint8_t* panel, int64_t blocks, float* out,
              int64_t stride, int64_t columns) {
    if constexpr (R > 1) {
        if (rows < R) return few_rows<R - 1>(x, rows, parts, panel, blocks, out, stride, columns);
    }
    if (parts == 1) few_panel<R, 1, NearBlock>(x, panel, nullptr, blocks, out, stride, columns);
    else few_panel<R, PARTS, NearBlock>(x, panel, nullptr, blocks, out, stride, columns);
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
