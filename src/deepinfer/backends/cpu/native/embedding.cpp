// Embedding and output head.

#include <algorithm>

#include "embedding.h"
#include "gemm.h"
#include "ops.h"
#include "scratch.h"
#include "streams.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t CHUNK = 64;  // tokens

struct NormedScratch;

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

EXPORT int64_t embed(const int64_t* tokens, int64_t count, const uint16_t* table, int64_t vocabulary, int64_t hidden,
                     int64_t num_streams, float* streams, float* pre) {
    for (int64_t t = 0; t < count; ++t, streams += num_streams * hidden, pre += num_streams) {
        if (tokens[t] < 0 || tokens[t] >= vocabulary) return 1;
        widen_bf16(table + tokens[t] * hidden, hidden, streams);
        for (int64_t i = 1; i < num_streams; ++i) std::copy_n(streams, hidden, streams + i * hidden);
        for (int64_t i = 0; i < num_streams; ++i) pre[i] = i == 0 ? 1.0f : 0.0f;
    }
    return 0;
}

EXPORT void head(const Head* head, const float* streams, const float* pre, int64_t tokens, int64_t num_streams,
                 float* out) {
    const int64_t hidden = head->matrix.columns;
    float* normed = scratch<NormedScratch>(std::min(tokens, CHUNK) * hidden);
    for (int64_t start = 0; start < tokens; start += CHUNK) {
        const int64_t count = std::min(CHUNK, tokens - start);
        for (int64_t t = 0; t < count; ++t) {
            float* to = normed + t * hidden;
            collapse(streams + (start + t) * num_streams * hidden, pre + (start + t) * num_streams, num_streams, hidden,
                     to);
            rms_norm(to, head->norm, head->eps, hidden, to);
        }
        gemm(normed, count, hidden, head->matrix, out + start * head->matrix.rows, head->matrix.rows);
    }
}
