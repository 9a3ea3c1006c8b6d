// Products with checkpoint matrices that stay in their packed formats.
//
// A matrix [rows, columns] lies in panels of 16 rows; rows and columns are padded with zeros to whole panels and
// whole blocks of 32 columns. A panel, column group after column group:
//
//     F32   [column][16] floats
//     BF16  [column / 2][16][2]
//     E4M3  [column / 4][16][4] bytes
//     E2M1  [column / 4][32] bytes: rows 0-3, 8-11, 4-7, 12-15 with two bytes each, which hold columns 0 and 1
//           of the group in their low nibbles, 2 and 3 in their high nibbles
//     TILED_BF16  as BF16
//     TILED_E2M1  [block of 32 columns][4][16][2] words, each with one column of its row: 4 i, 4 i + 1, .. of the even
//           or of the odd columns of the block, from the lowest nibble to the highest
//     TILED_E4M3  [column / 4][row / 4][column / 2 % 2][4][2] bytes, never minus zero
//
// exponents [panel][block][16] bytes: the ue8m0 scale of each row and block, 2 ** (e - 127). 0 stands for 0 and
// 255 for infinity, where the format says 2 ** -127 and NaN.
//
// The tiled formats are for bf16 tiles (tile_products.cpp), the others for float32 vectors. What `stays_packed` refuses is
// TILED_BF16, with the scales multiplied in.
//
// The order of every sum is fixed: within blocks of 32 columns from the first to the last, then block after
// block. It is the same for one row of x and for many, so a row's result does not depend on the others.

#pragma once

#include <cstdint>

namespace deepinfer {

constexpr int PANEL = 16;
constexpr int BLOCK = 32;

enum Format : int64_t { F32 = 0, BF16 = 1, E4M3 = 2, E2M1 = 3, TILED_BF16 = 4, TILED_E2M1 = 5, TILED_E4M3 = 6 };

// What becomes of x first: nothing, e4m3 with a power of two per 32 columns, which are whole blocks then, or bf16, for
// tiled matrices alone.
enum Rounding : int64_t { UNROUNDED = 0, TO_FP8 = 1, TO_BF16 = 2 };

struct Matrix {
    const void* values;
    const uint8_t* exponents;  // of E4M3, E2M1, TILED_E2M1 and TILED_E4M3
    int64_t rows, columns, format;
    int64_t rounds;  // how x is rounded
};

// out[i][j] = sum over c of x[i][c] * matrix[j][c], for i < num_rows; strides in floats.
struct Product {
    const float* x;
    int64_t num_rows, stride;
    const Matrix* matrix;
    float* out;
    int64_t out_stride;
    bool is_rounded = false;  // x is rounded already, if the matrix wants it
    const int32_t* places = nullptr;  // of x's rows; null where one follows the other. For tiled matrices alone
};

// Products with matrices of one size, all tiled or none. A thread takes the same rows of every matrix each time.
void gemm_all(const Product* products, int64_t count);
void gemm(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out, int64_t out_stride);

// The same on the calling thread alone, for callers that split their own work; x as it is, panels first .. last - 1.
void gemm_panels(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out,
                 int64_t out_stride, int64_t first, int64_t last);

// Panels that a thread takes at a time: its whole share where there is so little work that each further piece costs
// more than it evens out.
int64_t panel_grain(const Product* products, int64_t count);

inline int64_t panel_bytes(int64_t format, int64_t columns) {
    constexpr int64_t half_bytes[] = {8, 4, 2, 1, 4, 1, 2};
    return (columns + BLOCK - 1) / BLOCK * BLOCK * PANEL * half_bytes[format] / 2;
}

inline int64_t num_panels(const Matrix& matrix) { return (matrix.rows + PANEL - 1) / PANEL; }

}  // namespace deepinfer
