// Products with matrices that are packed for tiles.

#pragma once

#include "gemm.h"

namespace deepinfer {

inline bool is_tiled(const Matrix& matrix) { return matrix.format >= TILED_BF16; }

// As `gemm_all` and `gemm_panels`.
void tiled_gemm_all(const Product* products, int64_t count);
void tiled_gemm_panels(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out,
                       int64_t out_stride, int64_t first, int64_t last);

}  // namespace deepinfer
