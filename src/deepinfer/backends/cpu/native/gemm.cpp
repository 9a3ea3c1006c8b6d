#include "gemm.h"

#include <algorithm>

#include "decode.h"
#include "export.h"
#include "round.h"
#include "scratch.h"
#include "threads.h"
#include "tile_products.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int FIT_ROWS = 12 / VECS;         // rows of x whose sums fill the registers
constexpr int DIRECT_TILE = 5;               // rows beside whose sums there is room for weights being decoded
constexpr int64_t DIRECT_ROWS = 10;          // up to here each tile decodes the weights for itself
constexpr int64_t CHUNK = 256;               // columns that are decoded at a time, 16 KiB
constexpr int64_t CACHED_BYTES = 192 << 10;  // of x that stay near while the panels go by
constexpr int64_t ROUND_GRAIN = 16;          // rows of x that a thread rounds at least

struct XScratch;
struct RoundedScratch;
struct ReadyScratch;

// Rows of x, dense up to `columns`, a whole number of blocks.
struct Rows {
    const float* from;
    int64_t count, stride, columns;
};

// total[r] += x[r] * panel over B blocks of 32 columns, whose sums are formed side by side.
template <int R, int B, class Source>
inline void add_blocks(const float* x, int64_t stride, int64_t start, Source source, const uint8_t* exponents,
                       float unit, Line (&total)[R]) {
    Line part[B][R] = {};
    for (int64_t column = start; column < start + BLOCK; column += Source::COLUMNS) {
        for (int b = 0; b < B; ++b) {
            Line weights[Source::COLUMNS];
            source.get(column + b * BLOCK, weights);
            for (int c = 0; c < Source::COLUMNS; ++c) {
                for (int r = 0; r < R; ++r) {
                    const Vec factor = splat(x[r * stride + column + b * BLOCK + c]);
                    for (int v = 0; v < VECS; ++v)
                        part[b][r].part[v] = multiply_add(factor, weights[c].part[v], part[b][r].part[v]);
                }
            }
        }
    }
    for (int b = 0; b < B; ++b) {
        Line scale;
        for (int v = 0; v < VECS; ++v) scale.part[v] = splat(1.0f);
        if (exponents) scale = scale_line(exponents + (start / BLOCK + b) * PANEL);
        for (int v = 0; v < VECS; ++v) {
            const Vec factor = scale.part[v] * unit;
            for (int r = 0; r < R; ++r) total[r].part[v] = multiply_add(part[b][r].part[v], factor, total[r].part[v]);
        }
    }
}

// total[r] += x[r] * panel over `columns` columns.
template <int R, class Source>
inline void add_columns(const float* x, int64_t stride, int64_t columns, Source source, const uint8_t* exponents,
                        float unit, Line (&total)[R]) {
    constexpr int B = R <= 2 ? 2 : 1;  // one row or two alone have too few sums to keep the multipliers busy
    int64_t start = 0;
    for (; start + B * BLOCK <= columns; start += B * BLOCK)
        add_blocks<R, B>(x, stride, start, source, exponents, unit, total);
    for (; start < columns; start += BLOCK) add_blocks<R, 1>(x, stride, start, source, exponents, unit, total);
}

Line load_some(const float* from, int64_t count) {
    if (count >= PANEL) return load_line(from);
    float all[PANEL] = {};
    std::copy(from, from + count, all);
    return load_line(all);
}

void store_some(float* to, const Line& line, int64_t count) {
    if (count >= PANEL) return store_line(to, line);
    float all[PANEL];
    store_line(all, line);
    std::copy(all, all + count, to);
}

// Where a panel's results go: `count` columns of out.
struct Target {
    float* out;
    int64_t stride, count;
};

// Not inlined: the compiler's use of registers then does not depend on what stands around it.
template <int R, class Source>
__attribute__((noinline)) void tile(const float* x, int64_t stride, int64_t columns, Source source,
                                    const uint8_t* exponents, float unit, Target to, bool is_first) {
    Line total[R];
    for (int r = 0; r < R; ++r) total[r] = is_first ? zero_line() : load_some(to.out + r * to.stride, to.count);
    add_columns<R>(x, stride, columns, source, exponents, unit, total);
    for (int r = 0; r < R; ++r) store_some(to.out + r * to.stride, total[r], to.count);
}

// `tile` for a number of rows up to MAX that is known at run time only.
template <int MAX, class Source>
void tile_of(int64_t rows, const float* x, int64_t stride, int64_t columns, Source source, const uint8_t* exponents,
             float unit, Target to, bool is_first) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return tile_of<MAX - 1>(rows, x, stride, columns, source, exponents, unit, to, is_first);
    }
    tile<MAX>(x, stride, columns, source, exponents, unit, to, is_first);
}

// All of `x` in tiles of about the same size, at most MAX rows each.
template <int MAX, class Source>
void tiles(const Rows& x, Source source, const uint8_t* exponents, float unit, Target to, bool is_first) {
    const int64_t count = (x.count + MAX - 1) / MAX;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = i * x.count / count, end = (i + 1) * x.count / count;
        tile_of<MAX>(end - row, x.from + row * x.stride, x.stride, x.columns, source, exponents, unit,
                     {to.out + row * to.stride, to.stride, to.count}, is_first);
    }
}

struct Panel {
    const uint8_t* values;
    const uint8_t* exponents;
};

Panel panel_at(const Matrix& matrix, int64_t number, int64_t columns) {
    return {static_cast<const uint8_t*>(matrix.values) + number * panel_bytes(matrix.format, columns),
            matrix.exponents ? matrix.exponents + number * (columns / BLOCK) * PANEL : nullptr};
}

// Columns of a panel as floats with their scales. Those are powers of two, so a block's sum has the same bits as when it
// is scaled as a whole (with scales from 2 ** -110 up).
template <class Source>
void decode(Source source, const uint8_t* exponents, int64_t start, int64_t columns, float* to) {
    for (int64_t block = 0; block < columns; block += BLOCK) {
        Line scale;
        for (int v = 0; v < VECS; ++v) scale.part[v] = splat(1.0f);
        if (exponents) scale = scale_line(exponents + (start + block) / BLOCK * PANEL);
        for (int64_t column = block; column < block + BLOCK; column += Source::COLUMNS) {
            Line lines[Source::COLUMNS];
            source.get(start + column, lines);
            for (int c = 0; c < Source::COLUMNS; ++c) {
                for (int v = 0; v < VECS; ++v) lines[c].part[v] = lines[c].part[v] * (1.0f / Source::UNIT) * scale.part[v];
                store_line(to + (column + c) * PANEL, lines[c]);
            }
        }
    }
}

// A panel times many rows: columns are decoded a chunk at a time, and each chunk meets all rows.
template <class Source>
void panel_of_many(const Rows& x, const Panel& panel, Source source, Target to) {
    alignas(64) float decoded[CHUNK * PANEL];
    for (int64_t start = 0; start < x.columns; start += CHUNK) {
        const int64_t columns = std::min(CHUNK, x.columns - start);
        decode(source, panel.exponents, start, columns, decoded);
        tiles<FIT_ROWS>({x.from + start, x.count, x.stride, columns}, FloatSource{decoded}, nullptr, 1.0f, to,
                         start == 0);
    }
}

// x, or a copy that is padded with zeros to whole blocks and multiplied by `factor`.
Rows whole_blocks(const float* x, int64_t count, int64_t stride, int64_t columns, float factor) {
    const int64_t padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
    if (padded == columns && factor == 1.0f) return {x, count, stride, columns};
    float* copy = scratch<XScratch>(count * padded);
    for (int64_t row = 0; row < count; ++row) {
        float* to = copy + row * padded;
        for (int64_t c = 0; c < columns; c += LANES)
            store(to + c, load(x + row * stride + c, columns - c) * factor, columns - c);
        std::fill(to + columns, to + padded, 0.0f);
    }
    return {copy, count, padded, padded};
}

template <class Source, class Value = uint8_t>
void panels(const float* x, int64_t count, int64_t stride, const Matrix& matrix, float* out, int64_t out_stride,
            int64_t first, int64_t last) {
    const bool is_wide = Source::COLUMNS == 1, is_direct = is_wide || count <= DIRECT_ROWS;
    const Rows rows = whole_blocks(x, count, stride, matrix.columns, is_direct ? Source::FACTOR : 1.0f);
    for (int64_t number = first; number < last; ++number) {
        const Panel panel = panel_at(matrix, number, rows.columns);
        const Source source{reinterpret_cast<const Value*>(panel.values)};
        const Target to{out + number * PANEL, out_stride, std::min<int64_t>(PANEL, matrix.rows - number * PANEL)};
        const float unit = 1.0f / (Source::UNIT * Source::FACTOR);
        if (is_wide) tiles<FIT_ROWS>(rows, source, nullptr, 1.0f, to, true);
        else if (is_direct) tiles<DIRECT_TILE>(rows, source, panel.exponents, unit, to, true);
        else panel_of_many(rows, panel, source, to);
    }
}

}  // namespace

int64_t panel_grain(const Product* products, int64_t count) {
    int64_t num_rows = 0;
    for (int64_t i = 0; i < count; ++i) num_rows += products[i].num_rows;
    if (!count || num_rows > DIRECT_ROWS) return 1;
    return std::max<int64_t>((num_panels(*products->matrix) + num_threads() - 1) / num_threads(), 1);
}

void gemm_panels(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out,
                 int64_t out_stride, int64_t first, int64_t last) {
    if (is_tiled(matrix)) return tiled_gemm_panels(x, num_rows, stride, matrix, out, out_stride, first, last);
    const int64_t cached = CACHED_BYTES / 4 / std::max<int64_t>(1, matrix.columns);
    const int64_t step = std::max<int64_t>(FIT_ROWS, cached / FIT_ROWS * FIT_ROWS);
    for (int64_t row = 0; row < num_rows; row += step) {
        const int64_t count = std::min(step, num_rows - row);
        const float* from = x + row * stride;
        float* to = out + row * out_stride;
        switch (matrix.format) {
            case F32: panels<FloatSource, float>(from, count, stride, matrix, to, out_stride, first, last); break;
            case BF16: panels<Bf16Source>(from, count, stride, matrix, to, out_stride, first, last); break;
            case E4M3: panels<E4m3Source>(from, count, stride, matrix, to, out_stride, first, last); break;
            default: panels<E2m1Source>(from, count, stride, matrix, to, out_stride, first, last); break;
        }
    }
}

void gemm_all(const Product* products, int64_t count) {
    if (count && is_tiled(*products->matrix)) return tiled_gemm_all(products, count);
    const auto rounds = [](const Product& one) { return one.matrix->rounds && !one.is_rounded; };
    Product* ready = scratch<ReadyScratch, Product>(count);
    int64_t num_rounded = 0;
    for (int64_t i = 0; i < count; ++i)
        if (rounds(products[i])) num_rounded += products[i].num_rows * products[i].matrix->columns;
    float* rounded = scratch<RoundedScratch>(num_rounded);
    for (int64_t i = 0; i < count; ++i) {
        const Product& from = products[i];
        ready[i] = from;
        if (!rounds(from)) continue;
        const int64_t columns = from.matrix->columns;
        parallel(from.num_rows, ROUND_GRAIN, [=](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; ++row)
                round_fp8(from.x + row * from.stride, columns, rounded + row * columns);
        });
        ready[i].x = rounded, ready[i].stride = columns;
        rounded += from.num_rows * columns;
    }
    parallel(count ? num_panels(*products->matrix) : 0, panel_grain(products, count), [=](int64_t first, int64_t last) {
        for (const Product* one = ready; one < ready + count; ++one)
            gemm_panels(one->x, one->num_rows, one->stride, *one->matrix, one->out, one->out_stride, first, last);
    });
}

void gemm(const float* x, int64_t num_rows, int64_t stride, const Matrix& matrix, float* out, int64_t out_stride) {
    const Product product{x, num_rows, stride, &matrix, out, out_stride};
    gemm_all(&product, 1);
}

}  // namespace deepinfer

EXPORT void multiply(const float* x, int64_t num_rows, int64_t stride, const deepinfer::Matrix* matrix, float* out) {
    deepinfer::gemm(x, num_rows, stride, *matrix, out, matrix->rows);
}
