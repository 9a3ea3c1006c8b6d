// The indexer: which compressed entries each token attends to.
//
// Selection among scores (index_scores.h), of all visible entries or of those in the candidate blocks.

#include "batch.h"
#include "cache_formats.h"
#include "gemm.h"
#include "index_scores.h"
#include "ops.h"
#include "rope.h"
#include "scratch.h"
#include "threads.h"
#include "tiles.h"
#include "top.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t TILE_TOKENS = 32;         // tokens of a row that are scored together
constexpr int64_t TILE_SCORES = 1 << 20;    // scores that are held at a time

struct Step {
    const Indexer& indexer;
    const Batch& batch;
    const Cache& pages;
    IndexQueries queries;       // unset when nothing is scored
    const int32_t* candidates;  // [tokens, num_candidates] or null
    int64_t num_candidates;
    int32_t *entries, *kept;    // [tokens, num_entries], [tokens, num_kept], all -1 so far
    int64_t num_entries, num_kept;
    int64_t most_visible;

    int64_t num_visible(int64_t position) const { return std::min((position + 1) / indexer.ratio, most_visible); }
};

struct QueryBuffer;
struct TileQueryBuffer;
struct WeightBuffer;
struct PackedQuery;
struct ScoreBuffer;
struct OrderBuffer;
struct ListBuffer;
struct ListScores;
struct ChosenBuffer;
struct BlockBuffer;

// Scores of a tile's tokens against entries 0 .. count - 1 of their row; `stride` is count in whole panels.
void score_all(const Step& step, const Tile& tile, int64_t count, float* scores, int64_t stride) {
    const uint8_t* keys[CHUNK_KEYS];
    for (int64_t start = 0; start < count; start += CHUNK_KEYS) {
        const int64_t size = std::min(CHUNK_KEYS, count - start);
        find_entries(step.batch, step.pages, tile.row, start, size, keys);
        score_keys(step.queries, tile.first, tile.last - tile.first, keys, size, scores + start, stride);
    }
}

void score_list(const Step& step, int64_t row, int64_t token, const int32_t* list, int64_t count, float* scores) {
    const uint8_t* keys[CHUNK_KEYS];
    for (int64_t start = 0; start < count; start += CHUNK_KEYS) {
        const int64_t size = std::min(CHUNK_KEYS, count - start);
        for (int64_t k = 0; k < size; ++k) keys[k] = find_entry(step.batch, step.pages, row, list[start + k]);
        score_keys(step.queries, token, 1, keys, size, scores + start, 0);
    }
}

const int32_t* orders_of(const float* scores, int64_t count) {
    int32_t* orders = scratch<OrderBuffer, int32_t>(count);
    for (int64_t i = 0; i < count; ++i) orders[i] = order_of(scores[i]);
    return orders;
}

// Entries of the candidate blocks below `visible`, ascending; returns how many.
int64_t candidate_entries(const Step& step, int64_t token, int64_t visible, int32_t* list) {
    const int64_t size = step.indexer.candidate_size;
    int64_t count = 0, last = -1;
    for (int64_t i = 0; i < step.num_candidates; ++i) {
        const int64_t block = step.candidates[token * step.num_candidates + i];
        if (block <= last) continue;  // none, or not ascending
        last = block;
        for (int64_t entry = block * size; entry < std::min((block + 1) * size, visible); ++entry)
            list[count++] = static_cast<int32_t>(entry);
    }
    return count;
}

// The list and the lowest other entries, `count` in all, ascending.
void fill_list(const int32_t* list, int64_t size, int64_t count, int32_t* out) {
    int64_t others = count - size, next = 0, found = 0;
    for (int64_t i = 0; i < size; ++i) {
        for (; next < list[i] && others > 0; ++next, --others) out[found++] = static_cast<int32_t>(next);
        out[found++] = list[i];
        next = list[i] + 1;
    }
    for (; others > 0; ++next, --others) out[found++] = static_cast<int32_t>(next);
}

void select_among_candidates(const Step& step, int64_t row, int64_t token, int64_t visible, int64_t count,
                             const float* all, int32_t* out) {
    const int64_t room = std::min(step.num_candidates * step.indexer.candidate_size, visible);
    int32_t* list = scratch<ListBuffer, int32_t>(room + count + 1);
    int32_t* best = list + room;
    const int64_t size = candidate_entries(step, token, visible, list);
    if (size <= count) return fill_list(list, size, count, out);
    float* scores = scratch<ListScores>(size + PANEL_ROWS);
    if (all)
        for (int64_t i = 0; i < size; ++i) scores[i] = all[list[i]];
    else score_list(step, row, token, list, size, scores);
    top_indices(orders_of(scores, size), size, count, best);
    for (int64_t i = 0; i < count; ++i) out[i] = list[best[i]];
}

// The best blocks by their best entry, the newest always among them.
void keep_blocks(const Step& step, const int32_t* orders, int64_t visible, int32_t* out) {
    const int64_t size = step.indexer.candidate_size, blocks = (visible + size - 1) / size;
    int32_t* best = scratch<BlockBuffer, int32_t>(blocks);
    for (int64_t block = 0; block < blocks; ++block)
        best[block] = *std::max_element(orders + block * size, orders + std::min((block + 1) * size, visible));
    best[blocks - 1] = INT32_MAX;
    int32_t* chosen = scratch<ChosenBuffer, int32_t>(step.num_kept + 1);
    top_indices(best, blocks, step.num_kept, chosen);
    std::copy(chosen, chosen + step.num_kept, out);
}

void count_up(int64_t count, int32_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(i);
}

void select_from(const Step& step, int64_t token, int64_t visible, const float* scores) {
    const Indexer& indexer = step.indexer;
    const int64_t count = std::min(indexer.top_k, visible);
    const bool takes_blocks =
        indexer.keeps_candidates && visible > indexer.candidate_blocks * indexer.candidate_size;
    int32_t* entries = step.entries + token * step.num_entries;
    const int32_t* orders = visible > count || takes_blocks ? orders_of(scores, visible) : nullptr;
    if (visible > count) {
        int32_t* chosen = scratch<ChosenBuffer, int32_t>(count + 1);
        top_indices(orders, visible, count, chosen);
        std::copy(chosen, chosen + count, entries);
    } else {
        count_up(count, entries);
    }
    if (!indexer.keeps_candidates) return;
    int32_t* kept = step.kept + token * step.num_kept;
    if (takes_blocks) keep_blocks(step, orders, visible, kept);
    else count_up((visible + indexer.candidate_size - 1) / indexer.candidate_size, kept);
}

bool needs_scores(const Indexer& indexer, int64_t visible) {
    return visible > indexer.top_k ||
           (indexer.keeps_candidates && visible > indexer.candidate_blocks * indexer.candidate_size);
}

// Whether it takes less time to score all `most` entries for the tokens of a tile together than each token's candidates.
bool is_dense(const Step& step, int64_t tokens, int64_t most) {
    const int64_t worth = step.queries.tile_q ? 8 : 2;  // keys scored together in the time of unpacking one for a token
    return most <= std::min(worth, tokens / 2) * step.num_candidates * step.indexer.candidate_size;
}

void select_tile(const Step& step, const Tile& tile) {
    const int64_t most = step.num_visible(tile.position + tile.last - tile.first - 1);
    const int64_t stride = (most + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
    const bool uses_candidates = step.candidates && !step.indexer.keeps_candidates;
    float* scores = nullptr;
    if (needs_scores(step.indexer, most) && (!uses_candidates || is_dense(step, tile.last - tile.first, most))) {
        scores = scratch<ScoreBuffer>((tile.last - tile.first) * stride);
        score_all(step, tile, most, scores, stride);
    }
    for (int64_t token = tile.first; token < tile.last; ++token) {
        const int64_t visible = step.num_visible(tile.position + token - tile.first);
        const int64_t count = std::min(step.indexer.top_k, visible);
        const float* own = scores ? scores + (token - tile.first) * stride : nullptr;
        if (uses_candidates && visible > count)
            select_among_candidates(step, tile.row, token, visible, count, own,
                                    step.entries + token * step.num_entries);
        else select_from(step, token, visible, own);
    }
}

// Rotated and rounded queries, and head weights.
void prepare_queries(const Indexer& indexer, const Batch& batch, const float* x, int64_t stride, const float* low_rank,
                     float* q, uint16_t* tile_q, float* weights) {
    const int64_t heads = indexer.heads, dim = indexer.dim, tokens = batch.num_tokens;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim * heads));
    gemm(low_rank, tokens, indexer.wq_b.columns, indexer.wq_b, q, heads * dim);
    gemm(x, tokens, stride, indexer.weights_proj, weights, heads);
    parallel(tokens, TILE_TOKENS, [&](int64_t first, int64_t last) {
        uint8_t* packed = scratch<PackedQuery, uint8_t>(index_bytes(dim));
        for (int64_t token = first; token < last; ++token) {
            Turn turn;
            set_turn(turn, batch.positions[token], indexer.frequencies, indexer.pairs);
            for (int64_t head = 0; head < heads; ++head) {
                float* one = q + (token * heads + head) * dim;
                rotate(one, dim, turn);
                pack_index(one, dim, packed);
                if (tile_q) unpack_index(packed, dim, tile_q + (token * heads + head) * dim);
                else unpack_index(packed, dim, one);
                weights[token * heads + head] *= scale;
            }
        }
    });
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

// x [tokens, hidden], `stride` numbers apart; low_rank [tokens, q_rank]; candidates [tokens, num_candidates] or null.
EXPORT void select_entries(const Indexer* indexer, const float* x, int64_t stride, const float* low_rank,
                           const Batch* batch, const Cache* pages, const int32_t* candidates, int64_t num_candidates,
                           int64_t max_position, int32_t* entries, int64_t num_entries, int32_t* kept,
                           int64_t num_kept) {
    const int64_t tokens = batch->num_tokens, most = (max_position + 1) / indexer->ratio;
    float *q = nullptr, *weights = nullptr;
    uint16_t* tile_q = nullptr;
    std::fill(entries, entries + tokens * num_entries, -1);
    std::fill(kept, kept + tokens * num_kept, -1);
    if (needs_scores(*indexer, most)) {
        q = scratch<QueryBuffer>(tokens * indexer->heads * indexer->dim);
        weights = scratch<WeightBuffer>(tokens * indexer->heads);
        const int64_t rows = tokens * indexer->heads + TILE_ROWS;
        if (uses_tiles(1)) tile_q = scratch<TileQueryBuffer, uint16_t>(rows * indexer->dim);
        prepare_queries(*indexer, *batch, x, stride, low_rank, q, tile_q, weights);
    }
    const Step step{*indexer,       *batch,  *pages, {*indexer, q, weights, tile_q}, candidates,
                    num_candidates, entries, kept,   num_entries, num_kept, most};
    const int64_t size = std::clamp<int64_t>(TILE_SCORES / std::max<int64_t>(most, 1), 1, TILE_TOKENS);
    const auto tiles = tiles_of(*batch, size);
    parallel(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) select_tile(step, tiles[i]);
    });
}
