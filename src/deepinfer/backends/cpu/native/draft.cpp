// The draft head around its blocks.

#include <algorithm>

#include "gemm.h"
#include "ops.h"
#include "scratch.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t GRAIN = 16;  // tokens a thread takes at least

struct InputScratch;

// `markov_embed` [vocabulary, rank] bf16.
struct Draft {
    Matrix main_proj, markov_head, confidence;  // [hidden, taps * hidden], [vocabulary, rank], [1, hidden + rank]
    const float* main_norm;                     // [hidden]
    const uint16_t* markov_embed;
    float main_eps;
};

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

// taps [tokens, taps * hidden] -> norm(main_proj taps) [tokens, hidden].
EXPORT void draft_main(const Draft* draft, const float* taps, int64_t tokens, float* out) {
    const Matrix& matrix = draft->main_proj;
    gemm(taps, tokens, matrix.columns, matrix, out, matrix.rows);
    parallel(tokens, GRAIN, [=](int64_t first, int64_t last) {
        for (float* row = out + first * matrix.rows; row < out + last * matrix.rows; row += matrix.rows)
            rms_norm(row, draft->main_norm, draft->main_eps, matrix.rows, row);
    });
}

// logits [rows, vocabulary] and x [rows, hidden] with strides, previous [rows] -> logits with the Markov term
// [rows, vocabulary] and confidence [rows]. Returns 0, or 1 when a token does not exist.
EXPORT int64_t draft_next(const Draft* draft, const float* logits, int64_t logits_stride, const float* x,
                          int64_t x_stride, const int64_t* previous, int64_t rows, float* out, float* confidence) {
    const int64_t vocabulary = draft->markov_head.rows, rank = draft->markov_head.columns;
    const int64_t width = draft->confidence.columns, hidden = width - rank;
    float* inputs = scratch<InputScratch>(rows * width);  // x and the previous token's embedding, side by side
    for (int64_t r = 0; r < rows; ++r) {
        if (previous[r] < 0 || previous[r] >= vocabulary) return 1;
        float* to = std::copy_n(x + r * x_stride, hidden, inputs + r * width);
        widen_bf16(draft->markov_embed + previous[r] * rank, rank, to);
    }
    gemm(inputs, rows, width, draft->confidence, confidence, 1);
    gemm(inputs + hidden, rows, width, draft->markov_head, out, vocabulary);
    for (int64_t r = 0; r < rows; ++r) {
        float* to = out + r * vocabulary;
        for (int64_t i = 0; i < vocabulary; i += LANES) {
            const int64_t left = vocabulary - i;
            store(to + i, load(to + i, left) + load(logits + r * logits_stride + i, left), left);
        }
    }
    return 0;
}
