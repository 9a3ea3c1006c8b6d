#include "gemm.h"

#include <algorithm>

#include "decode.h"
#include "export.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int TILE_ROWS = 6 * (LANES / 8);  // rows of x whose sums fill the registers
constexpr int64_t CHUNK = 256;              // columns that are decoded at a time, 16 KiB
constexpr int64_t CACHED_BYTES = 192 << 10;  // of x that stay near while the panels go by
constexpr int DIRECT_ROWS = 2;              // up to here weights are decoded straight into the products

// total[r] += x[r] * panel over `columns` columns, block after block.
template <int R, class Source>
inline void accumulate(const float* x, int64_t stride, int64_t columns, Source source, const uint8_t* exponents,
                       Line (&total)[R]) {
    for (int64_t start = 0; start < columns; start += BLOCK) {
        const int64_t end = std::min<int64_t>(start + BLOCK, columns);
        Line part[R] = {};
#pragma GCC unroll 4
        for (int64_t column = start; column < end; column += Source::COUNT) {
            for (int i = 0; i < Source::COUNT; ++i) {
                const Line weights = source.get(column, i);
                for (int r = 0; r < R; ++r) {
                    const float factor = x[r * stride + column + i];
                    for (int v = 0; v < VECS; ++v) part[r].part[v] += factor * weights.part[v];
                }
            }
        }
        if (exponents) {
            const Line scale = scale_line(exponents + start / BLOCK * PANEL);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECS; ++v) total[r].part[v] += part[r].part[v] * scale.part[v];
        } else {
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < VECS; ++v) total[r].part[v] += part[r].part[v];
        }
    }
}

void store_some(float* to, const Line& line, int64_t count) {
    if (count >= PANEL) return store_line(to, line);
    float all[PANEL];
    store_line(all, line);
    std::copy(all, all + count, to);
}

Line load_some(const float* from, int64_t count) {
    if (count >= PANEL) return load_line(from);
    float all[PANEL] = {};
    std::copy(from, from + count, all);
    return load_line(all);
}

// Where a panel lies, and how far its columns are apart.
struct Panel {
    const uint8_t* values;
    const uint8_t* exponents;
    int64_t count;  // rows of the matrix in it, 16 but for the last
};

int64_t panel_bytes(const Matrix& matrix) {
    const int64_t padded = (matrix.columns + BLOCK - 1) / BLOCK * BLOCK;
    switch (matrix.format) {
        case F32: return matrix.columns * PANEL * 4;
        case BF16: return matrix.columns * PANEL * 2;
        case E4M3: return padded * PANEL;
        default: return padded / 2 * PANEL;
    }
}

Panel panel_at(const Matrix& matrix, int64_t number) {
    const int64_t blocks = (matrix.columns + BLOCK - 1) / BLOCK;
    return {static_cast<const uint8_t*>(matrix.values) + number * panel_bytes(matrix),
            matrix.exponents ? matrix.exponents + number * blocks * PANEL : nullptr,
            std::min<int64_t>(PANEL, matrix.rows - number * PANEL)};
}

template <class Source, class Value>
Source source_of(const Panel& panel) {
    return Source{reinterpret_cast<const Value*>(panel.values)};
}

template <int R, class Source>
void direct_tile(const float* x, int64_t stride, const Matrix& matrix, const Panel& panel, Source source, float* out,
                 int64_t out_stride) {
    Line total[R] = {};
    accumulate<R>(x, stride, matrix.columns, source, panel.exponents, total);
    for (int r = 0; r < R; ++r) store_some(out + r * out_stride, total[r], panel.count);
}

template <class Source>
void direct(const float* x, int64_t rows, int64_t stride, const Matrix& matrix, const Panel& panel, Source source,
            float* out, int64_t out_stride) {
    if (rows == 1) return direct_tile<1>(x, stride, matrix, panel, source, out, out_stride);
    direct_tile<2>(x, stride, matrix, panel, source, out, out_stride);
}

template <class Source>
void decode(Source source, int64_t start, int64_t columns, float* to) {
    for (int64_t column = 0; column < columns; column += Source::COUNT)
        for (int i = 0; i < Source::COUNT; ++i)
            store_line(to + (column + i) * PANEL, source.get(start + column, i));
}

template <int R>
void chunk_tile(const float* x, int64_t stride, int64_t columns, const float* values, const uint8_t* exponents,
                float* out, int64_t out_stride, int64_t count, bool is_first) {
    Line total[R] = {};
    if (!is_first)
        for (int r = 0; r < R; ++r) total[r] = load_some(out + r * out_stride, count);
    accumulate<R>(x, stride, columns, FloatSource{values}, exponents, total);
    for (int r = 0; r < R; ++r) store_some(out + r * out_stride, total[r], count);
}

template <int R>
void chunk_tiles(const float* x, int64_t rows, int64_t stride, int64_t columns, const float* values,
                 const uint8_t* exponents, float* out, int64_t out_stride, int64_t count, bool is_first) {
    for (; rows >= R; rows -= R, x += R * stride, out += R * out_stride)
        chunk_tile<R>(x, stride, columns, values, exponents, out, out_stride, count, is_first);
    if constexpr (R > 1) {
        if (rows)
            chunk_tiles<R / 2>(x, rows, stride, columns, values, exponents, out, out_stride, count, is_first);
    }
}

// A panel times a few hundred rows: columns are decoded a chunk at a time, and each chunk meets all rows.
void panel_rows(const float* x, int64_t rows, int64_t stride, const Matrix& matrix, const Panel& panel, float* out,
                int64_t out_stride) {
    alignas(64) float decoded[CHUNK * PANEL];
    for (int64_t start = 0; start < matrix.columns; start += CHUNK) {
        const int64_t columns = std::min(CHUNK, matrix.columns - start);
        const float* values = decoded;
        switch (matrix.format) {
            case F32: values = reinterpret_cast<const float*>(panel.values) + start * PANEL; break;
            case BF16: decode(source_of<Bf16Source, uint16_t>(panel), start, columns, decoded); break;
            case E4M3: decode(source_of<E4m3Source, uint8_t>(panel), start, columns, decoded); break;
            default: decode(source_of<E2m1Source, uint8_t>(panel), start, columns, decoded); break;
        }
        const uint8_t* exponents = panel.exponents ? panel.exponents + start / BLOCK * PANEL : nullptr;
        chunk_tiles<TILE_ROWS>(x + start, rows, stride, columns, values, exponents, out, out_stride, panel.count,
                               start == 0);
    }
}

}  // namespace

void gemm_panels(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out,
                 int64_t out_stride, int64_t first, int64_t last) {
    const int64_t cached = CACHED_BYTES / 4 / std::max<int64_t>(1, matrix.columns);
    const int64_t step = std::max<int64_t>(TILE_ROWS, cached / TILE_ROWS * TILE_ROWS);
    for (int64_t row = 0; row < num_rows; row += step) {
        const int64_t rows = std::min(step, num_rows - row);
        const float* from = x + row * stride;
        for (int64_t number = first; number < last; ++number) {
            const Panel panel = panel_at(matrix, number);
            float* to = out + row * out_stride + number * PANEL;
            if (rows > DIRECT_ROWS) {
                panel_rows(from, rows, stride, matrix, panel, to, out_stride);
                continue;
            }
            switch (matrix.format) {
                case F32: direct(from, rows, stride, matrix, panel, source_of<FloatSource, float>(panel), to, out_stride); break;
                case BF16: direct(from, rows, stride, matrix, panel, source_of<Bf16Source, uint16_t>(panel), to, out_stride); break;
                case E4M3: direct(from, rows, stride, matrix, panel, source_of<E4m3Source, uint8_t>(panel), to, out_stride); break;
                default: direct(from, rows, stride, matrix, panel, source_of<E2m1Source, uint8_t>(panel), to, out_stride); break;
            }
        }
    }
}

void gemm(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out, int64_t out_stride) {
    parallel(num_panels(matrix), 1, [&](int64_t first, int64_t last) {
        gemm_panels(x, num_rows, stride, matrix, out, out_stride, first, last);
    });
}

}  // namespace deepinfer

EXPORT void multiply(const float* x, int64_t num_rows, int64_t stride,
                                                                const deepinfer::Matrix* matrix, float* out) {
    deepinfer::gemm(x, num_rows, stride, *matrix, out, matrix->rows);
}
