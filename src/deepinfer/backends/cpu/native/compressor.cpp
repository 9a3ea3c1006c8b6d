// Compressed vectors and index keys of a KV source.

#include <vector>

#include "batch.h"
#include "cache_formats.h"
#include "gemm.h"
#include "ops.h"
#include "rings.h"
#include "rope.h"
#include "scratch.h"
#include "threads.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t TILE_GROUPS = 32;

struct Caches {
    const Cache *state, *pages, *index_pages;
};

// A group that the step completes: the token that ends it, and where its entry lies in its block.
struct Group {
    int64_t token, row, position, block, place;
};

struct ProjectedRows;
struct GroupVectors;
struct GroupMembers;

std::vector<Group> groups_of(const Batch& batch, const Compressor& compressor, const Cache& pages) {
    std::vector<Group> groups;
    for (int64_t row = 0; row < batch.num_rows; ++row) {
        const int64_t begin = batch.row_offsets[row], end = batch.row_offsets[row + 1];
        for (int64_t token = begin; token < end; ++token) {
            const int64_t position = batch.row_starts[row] + token - begin;
            const int64_t column = position / batch.block_tokens;
            if ((position + 1) % compressor.ratio || column >= batch.table_columns) continue;
            const int64_t block = batch.block_table[row * batch.table_columns + column];
            if (block <= 0 || !pages.has(block)) continue;  // block 0 is padding
            groups.push_back({token, row, position, block, position / compressor.ratio % pages.entries});
        }
    }
    return groups;
}

// Mean of the members' keys weighted by the softmax of their scores, channel by channel; a member is [key, score].
void pool(const float* const* members, int64_t count, int64_t dim, float* out) {
    for (int64_t i = 0; i < dim; i += LANES) {
        Vec peak = load(members[0] + dim + i);
        for (int64_t m = 1; m < count; ++m) peak = maximum(peak, load(members[m] + dim + i));
        Vec total{}, value{};
        for (int64_t m = 0; m < count; ++m) {
            const Vec share = exponential(load(members[m] + dim + i) - peak);
            total += share;
            value += load(members[m] + i) * share;
        }
        store(out + i, value / total);
    }
}

void pool_group(const Batch& batch, const Compressor& compressor, const Cache& state, const float* rows,
                const Group& group, float* out) {
    const int64_t width = 2 * compressor.dim, slot = state.slot(batch.row_slots[group.row]);
    const float** members = scratch<GroupMembers, const float*>(compressor.ratio);
    for (int64_t m = 0; m < compressor.ratio; ++m) {
        const int64_t back = compressor.ratio - 1 - m, position = group.position - back;
        members[m] = position >= batch.row_starts[group.row]
            ? rows + (group.token - back) * width
            : reinterpret_cast<const float*>(state.at(slot, position % state.entries));
    }
    pool(members, compressor.ratio, compressor.dim, out);
}

void write_groups(const Batch& batch, const Compressor& compressor, const Caches& caches, const float* rows,
                  const Group* groups, int64_t count) {
    const int64_t dim = compressor.dim, index_dim = compressor.index_dim;
    float* latents = scratch<GroupVectors>(count * (dim + index_dim));
    float* keys = latents + count * dim;
    for (int64_t g = 0; g < count; ++g) {
        float* latent = latents + g * dim;
        const float* pooled = latent;
        if (compressor.ratio == 1) pooled = rows + groups[g].token * dim;
        else pool_group(batch, compressor, *caches.state, rows, groups[g], latent);
        rms_norm(pooled, compressor.norm, compressor.norm_eps, dim, latent);
    }
    gemm_panels(latents, count, dim, compressor.index_wk, keys, index_dim, 0, num_panels(compressor.index_wk));
    for (int64_t g = 0; g < count; ++g) {
        const Group& group = groups[g];
        float *latent = latents + g * dim, *key = keys + g * index_dim;
        Turn turn;
        set_turn(turn, static_cast<int32_t>(group.position + 1 - compressor.ratio), compressor.frequencies,
                 compressor.pairs);
        rms_norm(key, compressor.index_norm, compressor.index_eps, index_dim, key);
        rotate(latent, dim, turn);
        rotate(key, index_dim, turn);
        pack_compressed(latent, dim, caches.pages->at(group.block, group.place));
        pack_index(key, index_dim, caches.index_pages->at(group.block, group.place));
    }
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

// x [tokens, hidden], `stride` numbers apart; state [slots, length, 2, dim] float32, null at ratio 1.
EXPORT void compress(const Compressor* compressor, const float* x, int64_t stride, const Batch* batch,
                     const Cache* state, const Cache* pages, const Cache* index_pages) {
    const int64_t width = compressor->rows.rows;
    float* rows = scratch<ProjectedRows>(batch->num_tokens * width);
    gemm(x, batch->num_tokens, stride, compressor->rows, rows, width);
    const Caches caches{state, pages, index_pages};
    const auto groups = groups_of(*batch, *compressor, *pages);
    parallel(static_cast<int64_t>(groups.size()), TILE_GROUPS, [&](int64_t begin, int64_t end) {
        for (int64_t first = begin; first < end; first += TILE_GROUPS)
            write_groups(*batch, *compressor, caches, rows, &groups[first], std::min(TILE_GROUPS, end - first));
    });
    if (state) store_ring(*batch, rows, *state);
}
