// Keys are unpacked sixteen at a time, side by side in the lanes, so a key's score rests on the query and the key
// alone: a sum along the width for each head, then one over the heads. The sums along the width are formed by float32
// vectors or by bf16 tiles, in which queries and keys are exact.

#include "index_scores.h"

#include <algorithm>

#include "bf16.h"
#include "scratch.h"
#include "tiles.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t MAX_DIM = 4096;
constexpr int VECS = PANEL_ROWS / LANES;
constexpr int HEADS = 8 / VECS;  // heads whose sums fill the registers

struct KeyTiles;
struct KeyRows;
struct KeyPanels;

// sums[h] = products of H heads' queries [H, dim] with the keys of a panel [dim][PANEL_ROWS].
template <int H>
void panel_products(const float* q, int64_t dim, const float* panel, Vec (&sums)[H][VECS]) {
    for (int64_t i = 0; i < dim; ++i)
        for (int v = 0; v < VECS; ++v) {
            const Vec keys = load(panel + i * PANEL_ROWS + v * LANES);
            for (int h = 0; h < H; ++h) sums[h][v] = multiply_add(splat(q[h * dim + i]), keys, sums[h][v]);
        }
}

// scores[k] = sum over heads of weight * relu(q . key) for the keys of a panel, head after head.
void score_panel(const Indexer& indexer, const float* q, const float* weights, const float* panel, float* scores) {
    Vec total[VECS] = {};
    const auto add = [&](const Vec* products, float weight) {
        for (int v = 0; v < VECS; ++v) total[v] += select(products[v] < 0.0f, Vec{}, products[v]) * weight;
    };
    int64_t head = 0;
    for (; head + HEADS <= indexer.heads; head += HEADS) {
        Vec sums[HEADS][VECS] = {};
        panel_products<HEADS>(q + head * indexer.dim, indexer.dim, panel, sums);
        for (int h = 0; h < HEADS; ++h) add(sums[h], weights[head + h]);
    }
    for (; head < indexer.heads; ++head) {
        Vec sums[1][VECS] = {};
        panel_products<1>(q + head * indexer.dim, indexer.dim, panel, sums);
        add(sums[0], weights[head]);
    }
    for (int v = 0; v < VECS; ++v) store(scores + v * LANES, total[v]);
}

// 16 keys as tiles, a key in each column: [dim / 32] tiles.
void unpack_index_tiles(const uint8_t* const* rows, int64_t dim, uint16_t* tiles) {
    uint16_t* keys = scratch<KeyRows, uint16_t>(PANEL_ROWS * dim);
    for (int64_t r = 0; r < PANEL_ROWS; ++r) unpack_index(rows[r], dim, keys + r * dim);
    for (int64_t start = 0; start < dim; start += BLOCK)
        transpose_words(keys + start, tiles + start * PANEL_ROWS, dim * 2);
}

// sums[row][k] of 16 rows of queries, CHUNK_KEYS apart, and the keys of N tiles; keys [tiles][dim / 32] tiles.
template <int N>
void tile_sums(const uint16_t* q, const uint16_t* keys, int64_t dim, float* sums) {
    each<N>([](auto n) { tile_zero<n>(); });
    for (int64_t start = 0; start < dim; start += BLOCK) {
        tile_load<4>(q + start, dim * 2);
        each<N>([&](auto n) {
            tile_load<6 + n % 2>(keys + (n * dim + start) * TILE_ROWS, 64);
            tile_multiply<n, 4, 6 + n % 2>();
        });
    }
    each<N>([&](auto n) { tile_store<n>(sums + n * TILE_ROWS, CHUNK_KEYS * 4); });
}

// `score_panel` for all tokens, by tiles: sixteen rows of queries at a time, whose heads are added one after the other.
void score_tiles(const IndexQueries& queries, int64_t first, int64_t tokens, const uint16_t* keys, int64_t count,
                 float* scores, int64_t stride) {
    const int64_t heads = queries.indexer.heads, dim = queries.indexer.dim;
    alignas(64) float sums[TILE_ROWS * CHUNK_KEYS];
    const TileUse use(TILE_ROWS);
    for (int64_t begin = 0; begin < tokens * heads; begin += TILE_ROWS) {
        const uint16_t* q = queries.tile_q + (first * heads + begin) * dim;
        for (int64_t start = 0; start < count; start += 2 * PANEL_ROWS) {
            if (start + PANEL_ROWS < count) tile_sums<2>(q, keys + start * dim, dim, sums + start);
            else tile_sums<1>(q, keys + start * dim, dim, sums + start);
        }
        const int64_t end = std::min(begin + TILE_ROWS, tokens * heads);
        for (int64_t row = begin; row < end;) {
            const int64_t token = row / heads, last = std::min((token + 1) * heads, end);
            float* to = scores + token * stride;
            for (int64_t k = 0; k < count; k += LANES) {
                Vec total = row % heads ? load(to + k) : Vec{};
                for (int64_t r = row; r < last; ++r) {
                    const Vec own = maximum(Vec{}, load(sums + (r - begin) * CHUNK_KEYS + k));
                    total += own * queries.weights[first * heads + r];
                }
                store(to + k, total);
            }
            row = last;
        }
    }
}

}  // namespace

void score_keys(const IndexQueries& queries, int64_t first, int64_t tokens, const uint8_t* const* keys, int64_t count,
                float* scores, int64_t stride) {
    static const uint8_t zeros[index_bytes(MAX_DIM)] = {};
    const int64_t heads = queries.indexer.heads, dim = queries.indexer.dim;
    float* panels = queries.tile_q ? nullptr : scratch<KeyPanels>(CHUNK_KEYS * dim);
    uint16_t* tiles = queries.tile_q ? scratch<KeyTiles, uint16_t>(CHUNK_KEYS * dim) : nullptr;
    for (int64_t start = 0; start < count; start += PANEL_ROWS) {
        const uint8_t* rows[PANEL_ROWS];
        for (int64_t i = 0; i < PANEL_ROWS; ++i) {
            const uint8_t* key = start + i < count ? keys[start + i] : nullptr;
            rows[i] = key ? key : zeros;
        }
        if (tiles) unpack_index_tiles(rows, dim, tiles + start * dim);
        else unpack_index_panel(rows, dim, panels + start * dim);
    }
    if (tiles) return score_tiles(queries, first, tokens, tiles, count, scores, stride);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t start = 0; start < count; start += PANEL_ROWS)
            score_panel(queries.indexer, queries.q + (first + t) * heads * dim, queries.weights + (first + t) * heads,
                        panels + start * dim, scores + t * stride + start);
}

}  // namespace deepinfer
