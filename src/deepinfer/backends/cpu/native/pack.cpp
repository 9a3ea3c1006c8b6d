// Checkpoint matrices brought into panels, straight from where the checkpoint is mapped.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "export.h"
#include "gemm.h"
#include "threads.h"

namespace deepinfer {
namespace {

// Rows that lie one behind the other: bf16 or float32 numbers, e4m3 codes, or bytes with two e2m1 codes, the even column
// in the low nibble. scales [rows / scale_rows, blocks], null for numbers.
struct Part {
    const uint8_t *values, *scales;
    int64_t rows, scale_rows;
};

// The rows of a panel; null past the last one.
struct Lines {
    const uint8_t* values[PANEL];
    const uint8_t* scales[PANEL];
};

int64_t num_blocks(int64_t columns) { return (columns + BLOCK - 1) / BLOCK; }

int64_t row_bytes(int64_t format, int64_t columns) {
    return format == F32 ? columns * 4 : format == BF16 ? columns * 2 : format == E4M3 ? columns : columns / 2;
}

Lines lines_of(const Part* parts, int64_t count, int64_t format, int64_t columns, int64_t panel) {
    Lines lines{};
    int64_t first = 0;
    for (const Part* part = parts; part < parts + count; first += part++->rows)
        for (int64_t r = 0; r < PANEL; ++r) {
            const int64_t row = panel * PANEL + r - first;
            if (row < 0 || row >= part->rows) continue;
            lines.values[r] = part->values + row * row_bytes(format, columns);
            if (part->scales) lines.scales[r] = part->scales + row / part->scale_rows * num_blocks(columns);
        }
    return lines;
}

// The numbers of 256 codes: e4m3, or two e2m1 codes of which the low one counts.
struct Numbers {
    float of[256];

    explicit Numbers(int64_t format) {
        static constexpr float sizes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        for (int code = 0; code < 256; ++code) {
            const int mantissa = code & 7, exponent = code >> 3 & 15;
            float size = sizes[mantissa];
            if (format == E4M3) size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
            if (format == E4M3 && (code & 127) == 127) size = NAN;
            of[code] = code & (format == E4M3 ? 128 : 8) ? -size : size;
        }
    }
};

// Elements of T, G columns of a row side by side.
template <class T, int G>
void interleave(const Lines& lines, int64_t columns, T* to) {
    for (int64_t r = 0; r < PANEL; ++r) {
        if (!lines.values[r]) continue;
        for (int64_t c = 0; c < columns; ++c)
            std::memcpy(to + (c / G * PANEL + r) * G + c % G, lines.values[r] + c * sizeof(T), sizeof(T));
    }
}

void widen(const Lines& lines, int64_t format, int64_t columns, uint16_t* to) {
    const Numbers numbers(format);
    for (int64_t r = 0; r < PANEL; ++r)
        for (int64_t c = 0; lines.values[r] && c < columns; ++c) {
            const int exponent = lines.scales[r][c / BLOCK];
            const float scale = exponent == 255 ? NAN : std::ldexp(1.0f, exponent - 127);
            const int code = format == E4M3 ? lines.values[r][c] : lines.values[r][c / 2] >> c % 2 * 4;
            const float value = numbers.of[code] * scale;
            uint32_t all;
            std::memcpy(&all, &value, 4);
            to[(c / 2 * PANEL + r) * 2 + c % 2] = static_cast<uint16_t>(all >> 16);
        }
}

// Bytes 2 i and 2 i + 1 of a row, four columns, as those that hold columns 0 and 2, and 1 and 3.
void pack_e2m1(const Lines& lines, int64_t columns, uint8_t* to) {
    for (int64_t r = 0; r < PANEL; ++r) {
        const int64_t place = (r & 3) + (r & 4 ? 8 : 0) + (r & 8 ? 4 : 0);
        const uint8_t* from = lines.values[r];
        for (int64_t i = 0; from && i < columns / 2; ++i) {
            uint8_t* pair = to + i / 2 * 2 * PANEL + 2 * place;
            pair[0] |= static_cast<uint8_t>(i % 2 ? from[i] << 4 : from[i] & 15);
            pair[1] |= static_cast<uint8_t>(i % 2 ? from[i] & 0xf0 : from[i] >> 4);
        }
    }
}

// Byte i of a row holds columns 2 i and 2 i + 1, which become nibble i % 4 of two words.
void tile_e2m1(const Lines& lines, int64_t columns, uint8_t* to) {
    for (int64_t r = 0; r < PANEL; ++r) {
        const uint8_t* from = lines.values[r];
        for (int64_t i = 0; from && i < columns / 2; ++i) {
            uint8_t* words = to + (i / 4 * PANEL + r) * 4 + i % 4 / 2;
            words[0] |= static_cast<uint8_t>(i % 2 ? from[i] << 4 : from[i] & 15);
            words[2] |= static_cast<uint8_t>(i % 2 ? from[i] & 0xf0 : from[i] >> 4);
        }
    }
}

// Pairs of columns of four rows side by side.
void tile_e4m3(const Lines& lines, int64_t columns, uint8_t* to) {
    for (int64_t r = 0; r < PANEL; ++r)
        for (int64_t c = 0; lines.values[r] && c < columns; ++c)
            to[c / 4 * 4 * PANEL + r / 4 * 16 + c / 2 % 2 * 8 + r % 4 * 2 + c % 2] =
                lines.values[r][c] == 128 ? uint8_t{0} : lines.values[r][c];
}

void pack_panel(const Lines& lines, int64_t from, int64_t columns, int64_t to, uint8_t* values, uint8_t* exponents) {
    if (to == F32) interleave<float, 1>(lines, columns, reinterpret_cast<float*>(values));
    else if (to == E4M3) interleave<uint8_t, 4>(lines, columns, values);
    else if (to == E2M1) pack_e2m1(lines, columns, values);
    else if (to == TILED_E2M1) tile_e2m1(lines, columns, values);
    else if (to == TILED_E4M3) tile_e4m3(lines, columns, values);
    else if (from == BF16) interleave<uint16_t, 2>(lines, columns, reinterpret_cast<uint16_t*>(values));
    else widen(lines, from, columns, reinterpret_cast<uint16_t*>(values));
    for (int64_t r = 0; exponents && r < PANEL; ++r)
        for (int64_t block = 0; lines.scales[r] && block < num_blocks(columns); ++block)
            exponents[block * PANEL + r] = lines.scales[r][block];
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

// Whether codes of this format, none of them NaN, with these scales stay packed for tiles: bf16 holds their numbers. E4m3
// codes are widened at each use only where a tile product takes much longer than that.
EXPORT int64_t stays_packed(int64_t format, const uint8_t* scales, int64_t count) {
    const auto within = [=](int least, int most) {
        return std::all_of(scales, scales + count, [=](int scale) { return scale >= least && scale <= most; });
    };
    if (format == E2M1) return within(1, 252);
#if defined(__AVX512BF16__)
    return within(10, 246);
#else
    return 0;
#endif
}

// Stacked parts of format `from` into `to`, whose values and exponents are all zero so far.
EXPORT void pack(const Part* parts, int64_t count, int64_t from, const Matrix* to) {
    const int64_t blocks = num_blocks(to->columns);
    const int64_t value_bytes = panel_bytes(to->format, to->columns);
    auto* values = static_cast<uint8_t*>(const_cast<void*>(to->values));
    auto* exponents = const_cast<uint8_t*>(to->exponents);
    parallel(num_panels(*to), 1, [=](int64_t first, int64_t last) {
        for (int64_t panel = first; panel < last; ++panel)
            pack_panel(lines_of(parts, count, from, to->columns, panel), from, to->columns, to->format,
                       values + panel * value_bytes, exponents ? exponents + panel * blocks * PANEL : nullptr);
    });
}
