// Products with checkpoint matrices that stay in their packed formats.
//
// A matrix [rows, columns] lies in panels of 16 rows, the last one padded with zeros; a panel holds for each
// column the 16 values below one another. e4m3 and e2m1 panels are padded with zeros to whole blocks of 32
// columns, and each row has a power of two per block:
//
//     F32, BF16  [panel][column][16]
//     E4M3       [panel][column][16] bytes
//     E2M1       [panel][column / 2][16] bytes, the even column in the low nibble
//     exponents  [panel][block][16] bytes: 0 stands for 0, e for 2 ** (e - 127) once the value in units of the
//                decoder (1/256 of an e4m3 number, twice an e2m1 number) is multiplied by it
//
// The order of every sum is fixed: in blocks of 32 columns from the first to the last, then block after block.
// It is the same for one row of x and for many, so a row's result does not depend on the others.

#pragma once

#include <cstdint>

namespace deepinfer {

constexpr int PANEL = 16;
constexpr int BLOCK = 32;

enum Format : int64_t { F32 = 0, BF16 = 1, E4M3 = 2, E2M1 = 3 };

struct Matrix {
    const void* values;
    const uint8_t* exponents;  // null for F32 and BF16
    int64_t rows, columns, format;
};

// out[i][j] = sum over c of x[i][c] * matrix[j][c], for i < num_rows; strides in floats.
void gemm(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out, int64_t out_stride);

// The same on the calling thread alone, for callers that split their own work; panels first .. last - 1 only.
void gemm_panels(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out,
                 int64_t out_stride, int64_t first, int64_t last);

inline int64_t num_panels(const Matrix& matrix) { return (matrix.rows + PANEL - 1) / PANEL; }

}  // namespace deepinfer
