// Prepared weights as Python lays them out, and the ops that one step of a layer is made of.

#pragma once

#include <cstdint>

#include "batch.h"
#include "export.h"
#include "gemm.h"

namespace deepinfer {

struct Hyper {
    Matrix fn;                 // [(2 + m) * m, m * hidden]
    const float *gain, *base;  // [(2 + m) * m]
    const float* norm;         // [hidden]
    int64_t num_streams, hidden, num_iterations;
    float eps, mix_eps, norm_eps;  // of the shares, of the mix's rms, of the input norm
};

struct Attention {
    Matrix down;           // wq_a above wkv, [q_rank + dim, hidden]
    Matrix wq_b;           // [heads * dim, q_rank]
    const Matrix* wo_a;    // [groups] of [out_rank, heads * dim / groups]
    Matrix wo_b;           // [hidden, groups * out_rank]
    const float *q_norm, *kv_norm, *sink, *frequencies;  // [q_rank], [dim], [heads], [pairs]
    int64_t num_groups, num_heads, dim, num_pairs, window;
    float q_eps, kv_eps;
};

struct Compressor {
    Matrix rows, index_wk;  // [dim or 2 * dim, hidden]: keys, above ratio 1 scores below them; [index_dim, dim]
    const float *norm, *index_norm, *frequencies;
    int64_t ratio, dim, index_dim, pairs;
    float norm_eps, index_eps;
};

struct Indexer {
    Matrix wq_b, weights_proj;  // [heads * dim, q_rank], [heads, hidden]
    const float* frequencies;
    int64_t heads, dim, pairs, top_k, ratio, keeps_candidates, candidate_blocks, candidate_size;
};

enum Scoring : int64_t { SQRT_SOFTPLUS = 0, SOFTMAX = 1, SIGMOID = 2 };

struct Router {
    Matrix matrix;                   // [experts, hidden]
    const float *bias, *bias_image;  // [experts]
    int64_t num_active, scoring, normalize;
    float scaling, temperature;
};

struct Experts {
    const Matrix *gate_up, *down;  // [experts] of [2 * inner, hidden] and [hidden, inner]
    int64_t num_experts;
    float limit;
};

struct Engram {
    Matrix wkv;             // [(streams + 1) * hidden, columns * head_dim]
    const uint8_t* values;  // [table rows, head_dim] e4m3
    const uint8_t* scales;  // [table rows, head_dim / 32] powers of two
    const float* weight;    // [streams, hidden], the product of both norm weights
    int64_t table_rows, head_dim, num_streams;
    float eps;
};

struct Head {
    Matrix matrix;      // [vocabulary, hidden]
    const float* norm;  // [hidden]
    float eps;
};

// `experts` and `shared_expert` one after the other.
int64_t all_experts(const Experts& experts, const Experts& shared, const float* x, int64_t stride,
                    const int32_t* chosen, const float* share, int64_t tokens, int64_t k, float* out);

}  // namespace deepinfer

// The ops themselves; shapes as in ops/table.py, `stride` is the distance of x's rows in numbers.

EXPORT void hyper_enter(const deepinfer::Hyper* hyper, const float* streams, const float* pre, int64_t tokens,
                        float* x, float* next_pre, float* post, float* comb);
EXPORT void hyper_leave(const float* streams, const float* output, const float* post, const float* comb,
                        int64_t tokens, int64_t num_streams, int64_t hidden, float* out);
EXPORT void tap(const float* streams, int64_t tokens, int64_t num_streams, int64_t hidden, float* out, int64_t stride);
EXPORT void attention_inputs(const deepinfer::Attention* attention, const float* x, int64_t stride,
                             const int32_t* positions, int64_t tokens, float* low_rank, float* q,
                             uint8_t* window_rows);
EXPORT void attend(const deepinfer::Batch* batch, const float* q, const uint8_t* window_rows,
                   const deepinfer::Cache* ring, const deepinfer::Cache* pages, const int32_t* entries,
                   int64_t num_entries, const float* sink, const float* frequencies, int64_t heads, int64_t dim,
                   int64_t window, int64_t pairs, float* out);
EXPORT void project_out(const deepinfer::Attention* attention, const float* attended, int64_t tokens, float* out);
EXPORT void compress(const deepinfer::Compressor* compressor, const float* x, int64_t stride,
                     const deepinfer::Batch* batch, const deepinfer::Cache* state, const deepinfer::Cache* pages,
                     const deepinfer::Cache* index_pages);
EXPORT void select_entries(const deepinfer::Indexer* indexer, const float* x, int64_t stride, const float* low_rank,
                           const deepinfer::Batch* batch, const deepinfer::Cache* pages, const int32_t* candidates,
                           int64_t num_candidates, int64_t max_position, int32_t* entries, int64_t num_entries,
                           int32_t* kept, int64_t num_kept);
EXPORT void route(const deepinfer::Router* router, const float* x, int64_t stride, const uint8_t* is_image,
                  int64_t tokens, int32_t* chosen, float* share);
EXPORT int64_t experts(const deepinfer::Experts* experts, const float* x, int64_t stride, const int32_t* chosen,
                       const float* share, int64_t tokens, int64_t k, float* out);
EXPORT void shared_expert(const deepinfer::Experts* expert, const float* x, int64_t stride, const float* routed,
                          int64_t tokens, float* out);
EXPORT int64_t engram(const deepinfer::Engram* engram, const float* streams, const int64_t* rows, int64_t columns,
                      const uint8_t* is_image, int64_t tokens, float* out);
EXPORT void head(const deepinfer::Head* head, const float* streams, const float* pre, int64_t tokens,
                 int64_t num_streams, float* out);
