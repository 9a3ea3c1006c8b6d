// Rows of the caches: packed from floats byte for byte as the reference packs them, and unpacked again.
//
//     window row      D bytes e4m3, then D / 32 powers of two, one per 32
//     compressed row  D / 2 bytes of two e2m1 codes, then D / 16 e4m3 scales, one per 16
//     index row       d / 2 bytes of two e2m1 codes, then d / 32 powers of two, one per 32
//
// The low nibble is the even column. A power byte e stands for 2 ** (e - 127), 255 for NaN. Widths are multiples
// of 32. See ops/reference/quant.py for the rules of rounding.

#pragma once

#include <cstdint>

namespace deepinfer {

constexpr int64_t window_bytes(int64_t dim) { return dim / 32 * 33; }
constexpr int64_t compressed_bytes(int64_t dim) { return dim / 16 * 9; }
constexpr int64_t index_bytes(int64_t dim) { return dim / 32 * 17; }

void pack_window(const float* x, int64_t dim, uint8_t* row);
void pack_compressed(const float* x, int64_t dim, uint8_t* row);
void pack_index(const float* x, int64_t dim, uint8_t* row);

void unpack_window(const uint8_t* row, int64_t dim, float* x);
void unpack_compressed(const uint8_t* row, int64_t dim, float* x);
void unpack_index(const uint8_t* row, int64_t dim, float* x);

// The same as bf16 numbers, which hold them exactly.
void unpack_window(const uint8_t* row, int64_t dim, uint16_t* x);
void unpack_compressed(const uint8_t* row, int64_t dim, uint16_t* x);
void unpack_index(const uint8_t* row, int64_t dim, uint16_t* x);

// PANEL_ROWS index rows side by side: panel [dim][PANEL_ROWS].
constexpr int64_t PANEL_ROWS = 16;
void unpack_index_panel(const uint8_t* const* rows, int64_t dim, float* panel);

}  // namespace deepinfer
