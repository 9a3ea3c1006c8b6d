// Into the attention (low-rank query, rotated query, packed window rows) and out of it.

#include <algorithm>

#include "cache_formats.h"
#include "gemm.h"
#include "ops.h"
#include "rope.h"
#include "scratch.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t GRAIN = 2;      // tokens a thread takes at least
constexpr int64_t CHUNK = 256;    // tokens between whose products nothing else happens

struct DownScratch;
struct LowScratch;
struct ProductScratch;

// Norm, rotation and packing of one wkv product [dim], which is changed.
void pack_row(const Attention& attention, float* kv, const Turn& turn, uint8_t* packed) {
    rms_norm(kv, attention.kv_norm, attention.kv_eps, attention.dim, kv);
    rotate(kv, attention.dim, turn);
    pack_window(kv, attention.dim, packed);
}

void inputs(const Attention& attention, const float* x, int64_t stride, const int32_t* positions, int64_t tokens,
            float* low_rank, float* q, uint8_t* window_rows) {
    const int64_t dim = attention.dim, rank = attention.wq_b.columns, width = attention.down.rows;
    float* down = scratch<DownScratch>(std::min(tokens, CHUNK) * width);
    gemm(x, tokens, stride, attention.down, down, width);
    parallel(tokens, GRAIN, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t)
            rms_norm(down + t * width, attention.q_norm, attention.q_eps, rank, low_rank + t * rank);
    });
    gemm(low_rank, tokens, rank, attention.wq_b, q, attention.wq_b.rows);
    parallel(tokens, GRAIN, [&](int64_t first, int64_t last) {
        Turn turn;
        for (int64_t t = first; t < last; ++t) {
            set_turn(turn, positions[t], attention.frequencies, attention.num_pairs);
            pack_row(attention, down + t * width + rank, turn, window_rows + t * window_bytes(dim));
            for (int64_t head = 0; head < attention.num_heads; ++head)
                rotate(q + t * attention.wq_b.rows + head * dim, dim, turn);
        }
    });
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

EXPORT void attention_inputs(const Attention* attention, const float* x, int64_t stride, const int32_t* positions,
                             int64_t tokens, float* low_rank, float* q, uint8_t* window_rows) {
    const int64_t dim = attention->dim;
    for (int64_t t = 0; t < tokens; t += CHUNK)
        inputs(*attention, x + t * stride, stride, positions + t, std::min(CHUNK, tokens - t),
               low_rank + t * attention->wq_b.columns, q + t * attention->wq_b.rows,
               window_rows + t * window_bytes(dim));
}

// The window rows of `attention_inputs` alone.
EXPORT void main_rows(const Attention* attention, const float* x, int64_t stride, const int32_t* positions,
                      int64_t tokens, uint8_t* window_rows) {
    const int64_t rank = attention->wq_b.columns, width = attention->down.rows, row_bytes = window_bytes(attention->dim);
    for (int64_t start = 0; start < tokens; start += CHUNK) {
        const int64_t count = std::min(CHUNK, tokens - start);
        float* down = scratch<DownScratch>(count * width);
        gemm(x + start * stride, count, stride, attention->down, down, width);
        parallel(count, GRAIN, [&](int64_t first, int64_t last) {
            Turn turn;
            for (int64_t t = first; t < last; ++t) {
                set_turn(turn, positions[start + t], attention->frequencies, attention->num_pairs);
                pack_row(*attention, down + t * width + rank, turn, window_rows + (start + t) * row_bytes);
            }
        });
    }
}

EXPORT void project_out(const Attention* attention, const float* attended, int64_t tokens, float* out) {
    const int64_t groups = attention->num_groups, width = attention->num_heads * attention->dim;
    const int64_t rank = attention->wo_a[0].rows, low_width = groups * rank;
    float* low = scratch<LowScratch>(std::min(tokens, CHUNK) * low_width);
    Product* products = scratch<ProductScratch, Product>(groups);
    for (int64_t t = 0; t < tokens; t += CHUNK) {
        const int64_t count = std::min(CHUNK, tokens - t);
        for (int64_t g = 0; g < groups; ++g)
            products[g] = {attended + t * width + g * (width / groups), count, width, &attention->wo_a[g],
                           low + g * rank, low_width};
        gemm_all(products, groups);
        gemm(low, count, low_width, attention->wo_b, out + t * attention->wo_b.rows, attention->wo_b.rows);
    }
}
