// The indexer: which compressed entries each token attends to.
//
// Keys stay packed: sixteen of them, their bytes transposed, are a panel of a matrix in e2m1, so scores are a
// product of the queries with it. A key's score rests on the query and the key alone.

#include "batch.h"
#include "cache_formats.h"
#include "export.h"
#include "gemm.h"
#include "rope.h"
#include "scratch.h"
#include "threads.h"
#include "top.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t TILE_TOKENS = 32;         // tokens of a row that are scored together
constexpr int64_t TILE_SCORES = 1 << 20;    // scores that are held at a time
constexpr int64_t CHUNK_KEYS = 8 * PANEL;   // keys that are transposed at a time

struct Indexer {
    Matrix wq_b, weights_proj;  // [heads * dim, q_rank], [heads, hidden]
    const float* frequencies;
    int64_t heads, dim, pairs, top_k, ratio, keeps_candidates, candidate_blocks, candidate_size;
};

struct Step {
    const Indexer& indexer;
    const Batch& batch;
    const Cache& pages;
    const float *q, *weights;   // [tokens, heads, dim], [tokens, heads]; null when nothing is scored
    const int32_t* candidates;  // [tokens, num_candidates] or null
    int64_t num_candidates;
    int32_t *entries, *kept;    // [tokens, num_entries], [tokens, num_kept], all -1 so far
    int64_t num_entries, num_kept;
    int64_t most_visible;

    int64_t num_visible(int64_t position) const { return std::min((position + 1) / indexer.ratio, most_visible); }
};

struct QueryBuffer;
struct WeightBuffer;
struct KeyPanels;
struct HeadScores;
struct ScoreBuffer;
struct OrderBuffer;
struct ListBuffer;
struct ChosenBuffer;
struct BlockBuffer;

// 16 rows of `width` bytes (a multiple of 16) -> byte columns [width][16].
void transpose_bytes(const uint8_t* const* rows, int64_t width, uint8_t* out) {
    for (int64_t i = 0; i < width; i += 16) {
#if defined(__SSE2__)
        __m128i a[16], b[16];
        for (int r = 0; r < 16; ++r) a[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + i));
        for (int round = 0; round < 4; ++round) {  // each interleaves the first half of the rows with the second
            for (int r = 0; r < 8; ++r) {
                b[2 * r] = _mm_unpacklo_epi8(a[r], a[r + 8]);
                b[2 * r + 1] = _mm_unpackhi_epi8(a[r], a[r + 8]);
            }
            std::copy(b, b + 16, a);
        }
        for (int r = 0; r < 16; ++r) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (i + r) * 16), a[r]);
#else
        for (int64_t column = i; column < i + 16; ++column)
            for (int r = 0; r < 16; ++r) out[column * 16 + r] = rows[r][column];
#endif
    }
}

// Panels of `count` <= CHUNK_KEYS packed keys, null = zeros; the matrix lives until the next call of this thread.
Matrix panels_of(const uint8_t* const* keys, int64_t count, int64_t dim) {
    static const uint8_t zeros[4096] = {};
    const int64_t half = dim / 2, blocks = dim / 32, num_panels = (count + PANEL - 1) / PANEL;
    uint8_t* values = scratch<KeyPanels, uint8_t>(CHUNK_KEYS * index_bytes(dim));
    uint8_t* exponents = values + CHUNK_KEYS * half;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const uint8_t* rows[PANEL];
        for (int64_t i = 0; i < PANEL; ++i) {
            const int64_t key = panel * PANEL + i;
            rows[i] = key < count && keys[key] ? keys[key] : zeros;
            for (int64_t block = 0; block < blocks; ++block) {
                const uint8_t power = rows[i][half + block];  // the decoder gives twice an e2m1 number
                exponents[(panel * blocks + block) * PANEL + i] = static_cast<uint8_t>(power - (power > 0));
            }
        }
        transpose_bytes(rows, half, values + panel * half * PANEL);
    }
    return {values, exponents, count, dim, E2M1};
}

// scores[t][k] of `tokens` tokens from number `first` on and `count` keys, `stride` numbers between tokens.
void score_chunk(const Step& step, int64_t first, int64_t tokens, const uint8_t* const* keys, int64_t count,
                 float* scores, int64_t stride) {
    const int64_t heads = step.indexer.heads, dim = step.indexer.dim;
    const Matrix matrix = panels_of(keys, count, dim);
    float* products = scratch<HeadScores>(tokens * heads * CHUNK_KEYS);
    gemm_panels(step.q + first * heads * dim, tokens * heads, dim, matrix, products, CHUNK_KEYS, 0,
                num_panels(matrix));
    for (int64_t t = 0; t < tokens; ++t) {
        const float* weights = step.weights + (first + t) * heads;
        for (int64_t k = 0; k < count; k += LANES) {
            Vec total{};
            for (int64_t head = 0; head < heads; ++head) {
                const Vec product = load(products + (t * heads + head) * CHUNK_KEYS + k);
                total += select(product < 0.0f, Vec{}, product) * weights[head];
            }
            store(scores + t * stride + k, total);
        }
    }
}

// Scores of a tile's tokens against entries 0 .. count - 1 of their row; `stride` is count in whole vectors.
void score_all(const Step& step, const Tile& tile, int64_t count, float* scores, int64_t stride) {
    const uint8_t* keys[CHUNK_KEYS];
    for (int64_t start = 0; start < count; start += CHUNK_KEYS) {
        const int64_t size = std::min(CHUNK_KEYS, count - start);
        for (int64_t k = 0; k < size; ++k)
            keys[k] = find_entry(step.batch, step.pages, tile.row, static_cast<int32_t>(start + k));
        score_chunk(step, tile.first, tile.last - tile.first, keys, size, scores + start, stride);
    }
}

void score_list(const Step& step, int64_t row, int64_t token, const int32_t* list, int64_t count, float* scores) {
    const uint8_t* keys[CHUNK_KEYS];
    for (int64_t start = 0; start < count; start += CHUNK_KEYS) {
        const int64_t size = std::min(CHUNK_KEYS, count - start);
        for (int64_t k = 0; k < size; ++k) keys[k] = find_entry(step.batch, step.pages, row, list[start + k]);
        score_chunk(step, token, 1, keys, size, scores + start, 0);
    }
}

const uint32_t* orders_of(const float* scores, int64_t count) {
    uint32_t* orders = scratch<OrderBuffer, uint32_t>(count);
    for (int64_t i = 0; i < count; ++i) orders[i] = order_of(scores[i]);
    return orders;
}

// Entries of the candidate blocks below `visible`, ascending; returns how many.
int64_t candidate_entries(const Step& step, int64_t token, int64_t visible, int32_t* list) {
    const int64_t size = step.indexer.candidate_size;
    int64_t count = 0;
    for (int64_t i = 0; i < step.num_candidates; ++i) {
        const int64_t block = step.candidates[token * step.num_candidates + i];
        if (block < 0) continue;
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
                             int32_t* out) {
    const int64_t room = std::min(step.num_candidates * step.indexer.candidate_size, visible);
    int32_t* list = scratch<ListBuffer, int32_t>(room + count + 1);
    int32_t* best = list + room;
    const int64_t size = candidate_entries(step, token, visible, list);
    if (size <= count) return fill_list(list, size, count, out);
    float* scores = scratch<ScoreBuffer>(size + LANES);
    score_list(step, row, token, list, size, scores);
    top_indices(orders_of(scores, size), size, count, best);
    for (int64_t i = 0; i < count; ++i) out[i] = list[best[i]];
}

// The best blocks by their best entry, the newest always among them.
void keep_blocks(const Step& step, const uint32_t* orders, int64_t visible, int32_t* out) {
    const int64_t size = step.indexer.candidate_size, blocks = (visible + size - 1) / size;
    uint32_t* best = scratch<BlockBuffer, uint32_t>(blocks);
    for (int64_t block = 0; block < blocks; ++block)
        best[block] = *std::max_element(orders + block * size, orders + std::min((block + 1) * size, visible));
    best[blocks - 1] = UINT32_MAX;
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
    const uint32_t* orders = visible > count || takes_blocks ? orders_of(scores, visible) : nullptr;
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

void select_tile(const Step& step, const Tile& tile) {
    const bool uses_candidates = step.candidates && !step.indexer.keeps_candidates;
    const int64_t most = step.num_visible(tile.position + tile.last - tile.first - 1);
    const int64_t stride = (most + LANES - 1) / LANES * LANES;
    float* scores = nullptr;
    if (!uses_candidates && needs_scores(step.indexer, most)) {
        scores = scratch<ScoreBuffer>((tile.last - tile.first) * stride);
        score_all(step, tile, most, scores, stride);
    }
    for (int64_t token = tile.first; token < tile.last; ++token) {
        const int64_t visible = step.num_visible(tile.position + token - tile.first);
        const int64_t count = std::min(step.indexer.top_k, visible);
        if (uses_candidates && visible > count)
            select_among_candidates(step, tile.row, token, visible, count, step.entries + token * step.num_entries);
        else select_from(step, token, visible, scores ? scores + (token - tile.first) * stride : nullptr);
    }
}

// Rotated and rounded queries, and head weights.
void prepare_queries(const Indexer& indexer, const Batch& batch, const float* x, int64_t stride, const float* low_rank,
                     float* q, float* weights) {
    const int64_t heads = indexer.heads, dim = indexer.dim, tokens = batch.num_tokens;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim * heads));
    gemm(low_rank, tokens, indexer.wq_b.columns, indexer.wq_b, q, heads * dim);
    gemm(x, tokens, stride, indexer.weights_proj, weights, heads);
    parallel(tokens, TILE_TOKENS, [&](int64_t first, int64_t last) {
        uint8_t* packed = scratch<KeyPanels, uint8_t>(index_bytes(dim));
        for (int64_t token = first; token < last; ++token) {
            Turn turn;
            set_turn(turn, batch.positions[token], indexer.frequencies, indexer.pairs);
            for (int64_t head = 0; head < heads; ++head) {
                float* one = q + (token * heads + head) * dim;
                rotate(one, dim, turn);
                pack_index(one, dim, packed);
                unpack_index(packed, dim, one);
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
    std::fill(entries, entries + tokens * num_entries, -1);
    std::fill(kept, kept + tokens * num_kept, -1);
    if (needs_scores(*indexer, most)) {
        q = scratch<QueryBuffer>(tokens * indexer->heads * indexer->dim);
        weights = scratch<WeightBuffer>(tokens * indexer->heads);
        prepare_queries(*indexer, *batch, x, stride, low_rank, q, weights);
    }
    const Step step{*indexer, *batch, *pages, q,           weights,  candidates, num_candidates,
                    entries,  kept,   num_entries, num_kept, most};
    const int64_t size = std::clamp<int64_t>(TILE_SCORES / std::max<int64_t>(most, 1), 1, TILE_TOKENS);
    const auto tiles = tiles_of(*batch, size);
    parallel(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) select_tile(step, tiles[i]);
    });
}
