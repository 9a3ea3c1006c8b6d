#include "tile_attention.h"

#include "bf16.h"

namespace deepinfer {
namespace {

constexpr int64_t WIDTH = 32;                      // numbers in a row of a tile
constexpr int64_t SPAN = TILE_KEYS + WIDTH;        // numbers in a row of scores and shares at most

struct ScoreScratch;
struct ShareScratch;
struct DecayScratch;

// Rows of bf16 numbers, `stride` apart.
struct Left {
    const uint16_t* first;
    int64_t stride;
};

// Tiles of sixteen columns of pairs: where the next pair and the next tile lie.
struct Right {
    const uint16_t* first;
    int64_t pair_stride, tile_stride;
};

struct Out {
    float* first;
    int64_t stride;
};

#if defined(__AVX512BF16__)

// out = left * right over `pairs` pairs for H rows and V tiles, or out += it.
template <int H, int V>
void multiply_some(const Left& left, const Right& right, int64_t pairs, const Out& out, bool adds) {
    Vec sums[H][V];
    for (int h = 0; h < H; ++h)
        for (int v = 0; v < V; ++v) sums[h][v] = adds ? load(out.first + h * out.stride + v * 16) : Vec{};
    const uint16_t *words = left.first, *columns = right.first;
    for (int64_t pair = 0; pair < pairs; ++pair, words += 2, columns += right.pair_stride) {
        VecInt numbers[V];
        for (int v = 0; v < V; ++v) numbers[v] = load_ints(columns + v * right.tile_stride);
        for (int h = 0; h < H; ++h)
            for (int v = 0; v < V; ++v) sums[h][v] = add_pairs(numbers[v], words + h * left.stride, sums[h][v]);
    }
    for (int h = 0; h < H; ++h)
        for (int v = 0; v < V; ++v) store(out.first + h * out.stride + v * 16, sums[h][v]);
}

// For any number of rows, at most H at a time, and V tiles.
template <int V, int H = 8>
void multiply_tiles(Left left, const Right& right, int64_t pairs, Out out, int64_t rows, bool adds) {
    for (; rows >= H; rows -= H, left.first += H * left.stride, out.first += H * out.stride)
        multiply_some<H, V>(left, right, pairs, out, adds);
    if constexpr (H > 1) multiply_tiles<V, H / 2>(left, right, pairs, out, rows, adds);
}

constexpr int MAX_TILES = 3;           // side by side
constexpr int64_t VALUE_GROUP = 2;  // keys that are taken whole for results

#else

// The same by tiles, for all rows that they have; rows of the left side go on to a multiple of 16 pairs.
template <int N>
void multiply_tiles(const Left& left, const Right& right, int64_t pairs, const Out& out, int64_t, bool adds) {
    if (adds) each<N>([&](auto n) { tile_load<n>(out.first + n * 16, out.stride * 4); });
    else each<N>([](auto n) { tile_zero<n>(); });
    for (int64_t pair = 0; pair < pairs; pair += PAIRS) {
        tile_load<4>(left.first + 2 * pair, left.stride * 2);
        each<N>([&](auto n) {
            tile_load<6 + n % 2>(right.first + pair * right.pair_stride + n * right.tile_stride, right.pair_stride * 2);
            tile_multiply<n, 4, 6 + n % 2>();
        });
    }
    each<N>([&](auto n) { tile_store<n>(out.first + n * 16, out.stride * 4); });
}

constexpr int MAX_TILES = NUM_SUM_TILES;
constexpr int64_t VALUE_GROUP = KEY_GROUP;

#endif

template <int N = MAX_TILES>
void multiply(const Left& left, Right right, int64_t pairs, Out out, int64_t rows, int64_t tiles, bool adds) {
    for (; tiles >= N; tiles -= N, right.first += N * right.tile_stride, out.first += N * 16)
        multiply_tiles<N>(left, right, pairs, out, rows, adds);
    if constexpr (N > 1) multiply<N - 1>(left, right, pairs, out, rows, tiles, adds);
}

// Products [heads, SPAN] of a span of keys, `count` of them from `first` on, become shares against the new peak, zero for
// the others; results so far are worth `decay` [padded heads] of what they were.
void make_shares(const TileQuery& query, const Sums& sums, float* scores, int64_t first, int64_t count, uint16_t* shares,
                 float* decay) {
    const int64_t span = (first + count + WIDTH - 1) / WIDTH * WIDTH;
    float limits[SPAN], before[TILE_HEADS] = {};
    std::fill(limits, limits + first, -INFINITY);
    std::fill(limits + first, limits + first + count, INFINITY);
    std::fill(limits + first + count, limits + span, -INFINITY);
    const Vec scale = splat(query.scale);
    for (int64_t head = 0; head < query.heads; ++head) {
        float* row = scores + head * SPAN;
        Vec peak = splat(sums.peak[head]);
        for (int64_t k = 0; k < span; k += LANES) {
            const Vec score = minimum(load(row + k) * scale, load(limits + k));
            store(row + k, score);
            peak = maximum(peak, score);
        }
        before[head % TILE_HEADS] = sums.peak[head];
        sums.peak[head] = largest(peak);
        if (head % TILE_HEADS == TILE_HEADS - 1 || head == query.heads - 1)
            for (int64_t start = head / TILE_HEADS * TILE_HEADS, i = 0; i < TILE_HEADS; i += LANES)
                store(decay + start + i, exponential(load(before + i) - load(sums.peak + start + i)));
    }
    for (int64_t head = 0; head < query.heads; ++head) {
        const float* row = scores + head * SPAN;
        Vec total{}, share[SPLIT_VECS];
        const Vec peak = splat(sums.peak[head]);
        for (int64_t k = 0; k < span; k += WIDTH) {
            for (int i = 0; i < SPLIT_VECS; ++i) {
                share[i] = exponential(load(row + k + i * LANES) - peak);
                total += share[i];
            }
            round_bf16(share, shares + head * SPAN + k);
        }
        sums.total[head] = sums.total[head] * decay[head] + sum(total);
    }
}

}  // namespace

void TileKeys::add(int64_t first, const uint16_t* rows) const {
    for (int64_t start = 0; start < dim; start += WIDTH)
        transpose_words(rows + start, columns + first * dim + start * 16, dim * 2);
    for (int64_t k = 0; k < 16; k += 2) pair_rows(rows + k * dim, rows + (k + 1) * dim, dim, pairs + (first + k) * dim);
}

TileQuery::TileQuery(const float* query, int64_t num_heads, int64_t padded, int64_t key_dim, float by)
    : rows(scratch<TileQuery, uint16_t>(padded * key_dim)), heads(num_heads), padded_heads(padded), dim(key_dim),
      scale(by) {
    for (int64_t start = 0; start < heads * dim; start += WIDTH) {
        Vec numbers[SPLIT_VECS];
        for (int i = 0; i < SPLIT_VECS; ++i) numbers[i] = load(query + start + i * LANES);
        round_bf16(numbers, rows + start);
    }
    if (heads > TILE_HEADS) std::fill(rows + heads * dim, rows + padded * dim, uint16_t{0});
}

void fold_tiles(const TileQuery& query, const Sums& sums, const TileKeys& keys, int64_t first, int64_t count,
                bool is_first) {
    const int64_t dim = query.dim, heads = query.heads, start = first / KEY_GROUP * KEY_GROUP;
    float* scores = scratch<ScoreScratch>(query.padded_heads * SPAN);
    uint16_t* shares = scratch<ShareScratch, uint16_t>(query.padded_heads * SPAN);
    float* decay = scratch<DecayScratch>(query.padded_heads);
    const int64_t tiles = (first + count - start + 15) / 16;  // of scores
    for (int64_t head = 0; head < heads; head += TILE_HEADS)
        multiply({query.rows + head * dim, dim}, {keys.columns + start * dim, WIDTH, 16 * dim}, dim / 2,
                 {scores + head * SPAN, SPAN}, std::min(heads - head, TILE_HEADS), tiles, false);
    make_shares(query, sums, scores, first - start, count, shares, decay);
    for (int64_t head = 0; head < heads && !is_first; ++head)
        for (int64_t i = head * dim; i < (head + 1) * dim; i += LANES)
            store(sums.result + i, load(sums.result + i) * decay[head]);
    const int64_t begin = first / VALUE_GROUP * VALUE_GROUP, pairs = (first + count - begin + 1) / 2;
    for (int64_t head = 0; head < heads; head += TILE_HEADS)
        multiply({shares + head * SPAN + begin - start, SPAN}, {keys.pairs + begin * dim, 2 * dim, WIDTH}, pairs,
                 {sums.result + head * dim, dim}, std::min(heads - head, TILE_HEADS), dim / 16, !is_first);
}

}  // namespace deepinfer
