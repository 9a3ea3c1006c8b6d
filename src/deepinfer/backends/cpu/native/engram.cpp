// Engram: the gated update of the streams from table rows.

#include <algorithm>
#include <cmath>

#include "cache_formats.h"
#include "gemm.h"
#include "ops.h"
#include "scratch.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t GRAIN = 2;    // tokens a thread takes at least
constexpr int64_t WIDEN_GRAIN = 16;
constexpr int64_t CHUNK = 128;  // tokens whose memory is kept at a time

struct ByteScratch;
struct RowScratch;
struct MemoryScratch;

// Table row [head_dim] as floats; `bytes` takes its values and scales side by side, as in a window row.
void widen(const Engram& engram, int64_t row, uint8_t* bytes, float* out) {
    const int64_t dim = engram.head_dim, blocks = dim / BLOCK;
    std::copy_n(engram.values + row * dim, dim, bytes);
    std::copy_n(engram.scales + row * blocks, blocks, bytes + dim);
    unpack_window(bytes, dim, out);
}

// sigmoid(signed sqrt(<norm(stream), norm(key)>, weighted, / sqrt(hidden)))
float gate(const Engram& engram, const float* stream, const float* key, const float* weight, int64_t hidden) {
    Vec total{};
    for (int64_t h = 0; h < hidden; h += LANES) {
        const int64_t left = hidden - h;
        total += load(stream + h, left) * load(weight + h, left) * load(key + h, left);
    }
    const float size = static_cast<float>(hidden);
    const float stream_scale = 1.0f / std::sqrt(dot(stream, stream, hidden) / size + engram.eps);
    const float key_scale = 1.0f / std::sqrt(dot(key, key, hidden) / size + engram.eps);
    const float product = sum(total) * (stream_scale * key_scale) / std::sqrt(size);
    const float root = std::sqrt(std::fabs(product) < 1e-6f ? 1e-6f : std::fabs(product));
    return 1.0f / (1.0f + std::exp(-std::copysign(root, product)));
}

void update(const Engram& engram, const float* streams, const float* memory, bool is_image, int64_t hidden,
            float* out) {
    const float* value = memory + engram.num_streams * hidden;
    for (int64_t s = 0; s < engram.num_streams; ++s) {
        const float* stream = streams + s * hidden;
        const float* key = memory + s * hidden;
        const float factor = is_image ? 0.0f : gate(engram, stream, key, engram.weight + s * hidden, hidden);
        for (int64_t h = 0; h < hidden; h += LANES) {
            const int64_t left = hidden - h;
            store(out + s * hidden + h, load(stream + h, left) + load(value + h, left) * factor, left);
        }
    }
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

// rows [tokens, columns]; is_image [tokens] may be null. Returns 0, or 1 when a row does not exist.
EXPORT int64_t engram(const Engram* engram, const float* streams, const int64_t* rows, int64_t columns,
                      const uint8_t* is_image, int64_t tokens, float* out) {
    const int64_t width = engram->wkv.columns, memory_width = engram->wkv.rows, dim = engram->head_dim;
    const int64_t hidden = memory_width / (engram->num_streams + 1), size = engram->num_streams * hidden;
    for (int64_t i = 0; i < tokens * columns; ++i)
        if (rows[i] < 0 || rows[i] >= engram->table_rows) return 1;
    float* wide = scratch<RowScratch>(std::min(tokens, CHUNK) * width);
    float* memory = scratch<MemoryScratch>(std::min(tokens, CHUNK) * memory_width);
    for (int64_t start = 0; start < tokens; start += CHUNK) {
        const int64_t count = std::min(CHUNK, tokens - start);
        parallel(count, WIDEN_GRAIN, [=](int64_t first, int64_t last) {
            uint8_t* bytes = scratch<ByteScratch, uint8_t>(window_bytes(dim));
            for (int64_t i = first * columns; i < last * columns; ++i)
                widen(*engram, rows[start * columns + i], bytes, wide + i * dim);
        });
        gemm(wide, count, width, engram->wkv, memory, memory_width);
        parallel(count, GRAIN, [=](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const int64_t t = start + i;
                update(*engram, streams + t * size, memory + i * memory_width, is_image && is_image[t], hidden,
                       out + t * size);
            }
        });
    }
    return 0;
}
