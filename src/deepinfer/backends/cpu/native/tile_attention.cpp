#include "tile_attention.h"

#include "bf16.h"
#include "decode.h"
#include "scratch.h"

namespace deepinfer {
namespace {

constexpr int64_t WIDTH = 32;              // numbers in a row of a tile
constexpr int64_t TILE_NUMBERS = 16 * WIDTH;

struct QueryRows;
struct ShareScratch;
struct DecayScratch;
struct LastPairs;
struct ShareTiles;

// shares[k][head] of 16 heads for N tiles of 16 keys; T tiles hold the parts of a query.
template <int T, int N>
void score_tiles(const uint16_t* query, const uint16_t* keys, int64_t dim, float* shares, int64_t heads) {
    each<N>([](auto t) { tile_zero<t>(); });
    for (int64_t start = 0; start < dim; start += WIDTH, query += T * TILE_NUMBERS) {
        each<T>([&](auto part) { tile_load<5 + part>(query + part * TILE_NUMBERS, 64); });
        each<N>([&](auto t) {
            tile_load<4>(keys + t * 16 * dim + start, dim * 2);
            each<T>([&](auto part) { tile_multiply<decltype(t)::value, 4, 5 + part>(); });
        });
    }
    each<N>([&](auto t) { tile_store<t>(shares + t * 16 * heads, heads * 4); });
}

template <int T, int N>
void score_some(int64_t count, const uint16_t* query, const uint16_t* keys, int64_t dim, float* shares, int64_t heads) {
    if constexpr (N > 1) {
        if (count < N) return score_some<T, N - 1>(count, query, keys, dim, shares, heads);
    }
    score_tiles<T, N>(query, keys, dim, shares, heads);
}

// The lower or the upper halves of two lines of 16 lanes, one behind the other.
Line lower_halves(const Line& a, const Line& b) {
#if defined(__AVX512F__)
    return {(Vec)_mm512_shuffle_f32x4((__m512)a.part[0], (__m512)b.part[0], 0x44)};
#else
    return {a.part[0], b.part[0]};
#endif
}

Line upper_halves(const Line& a, const Line& b) {
#if defined(__AVX512F__)
    return {(Vec)_mm512_shuffle_f32x4((__m512)a.part[0], (__m512)b.part[0], 0xee)};
#else
    return {a.part[1], b.part[1]};
#endif
}

// `update_shares` for heads that lie twice: scores [count, 16] become shares [count / 2, 16], of two keys in each line.
void update_twice(const Sums& sums, int64_t count, float* shares, float* decay) {
    const Line before = load_line(sums.peak), none = splat_line(-INFINITY);
    Line peak = before, total = load_line(sums.total);
    for (int64_t k = 0; k < count; k += 2) {
        const Line first = load_line(shares + k * TILE_HEADS);
        const Line second = k + 1 < count ? load_line(shares + (k + 1) * TILE_HEADS) : none;
        const Line low = lower_halves(first, second), high = upper_halves(first, second);
        Line score;
        for (int v = 0; v < VECS; ++v) {
            score.part[v] = low.part[v] + high.part[v];
            peak.part[v] = maximum(peak.part[v], score.part[v]);
        }
        store_line(shares + k / 2 * TILE_HEADS, score);
    }
    const Line low = lower_halves(peak, peak), high = upper_halves(peak, peak);
    Line factor;
    for (int v = 0; v < VECS; ++v) {
        peak.part[v] = maximum(low.part[v], high.part[v]);
        factor.part[v] = exponential(before.part[v] - peak.part[v]);
        total.part[v] = total.part[v] * factor.part[v];
    }
    for (int64_t line = 0; line < (count + 1) / 2; ++line)
        for (int v = 0; v < VECS; ++v) {
            float* share = shares + line * TILE_HEADS + v * LANES;
            const Vec value = exponential(load(share) - peak.part[v]);
            store(share, value);
            total.part[v] += value;
        }
    store_line(sums.peak, peak);
    store_line(decay, factor);
    store_line(sums.total, total);
}

// Shares of up to 32 keys and 16 heads as tiles of their parts, a head in each row.
void make_share_tiles(const float* shares, int64_t heads, int64_t count, uint16_t* tiles) {
    alignas(64) int32_t words[PARTS][PAIRS][TILE_HEADS];
    for (int64_t pair = 0; pair < PAIRS; ++pair)
        for (int64_t head = 0; head < TILE_HEADS; head += LANES) {
            Vec even = 2 * pair < count ? load(shares + 2 * pair * heads + head) : Vec{};
            Vec odd = 2 * pair + 1 < count ? load(shares + (2 * pair + 1) * heads + head) : Vec{};
            for (int64_t part = 0; part < PARTS; ++part)
                store(reinterpret_cast<float*>(&words[part][pair][head]),
                      bits(lower_from_upper(take_part(even)) | take_part(odd)));
        }
    for (int part = 0; part < PARTS; ++part) transpose_words(words[part], tiles + part * TILE_NUMBERS);
}

// The same for heads that lie twice, from shares of `update_twice`: two tiles.
void make_twice_tiles(const float* shares, int64_t count, uint16_t* tiles) {
    alignas(64) float words[2][PAIRS][TILE_HEADS];
    for (int64_t pair = 0; pair < PAIRS; ++pair) {
        Line left = 2 * pair < count ? load_line(shares + pair * TILE_HEADS) : zero_line(), parts[PARTS + 1];
        for (int part = 0; part < PARTS; ++part)
            for (int v = 0; v < VECS; ++v) parts[part].part[v] = bits(take_part(left.part[v]));
        parts[PARTS] = zero_line();
        for (int tile = 0; tile < 2; ++tile) {
            const Line even = lower_halves(parts[2 * tile], parts[2 * tile + 1]);
            const Line odd = upper_halves(parts[2 * tile], parts[2 * tile + 1]);
            for (int v = 0; v < VECS; ++v)
                store(&words[tile][pair][v * LANES], bits(lower_from_upper(bits(even.part[v])) | bits(odd.part[v])));
        }
    }
    for (int tile = 0; tile < 2; ++tile) transpose_words(words[tile], tiles + tile * TILE_NUMBERS);
}

// Where the pairs of keys of a tile of 32 lie: `stride` numbers apart.
struct PairRows {
    const uint16_t* first;
    int64_t stride;
};

// result[16 heads][N * 16 numbers] += shares of `blocks` times 32 keys * keys
template <int T, int N>
void add_tiles(const uint16_t* shares, const PairRows* pairs, int64_t blocks, float* result, int64_t dim,
               bool is_first) {
    if (is_first) each<N>([&](auto n) { tile_zero<n>(); });
    else each<N>([&](auto n) { tile_load<n>(result + n * 16, dim * 4); });
    for (int64_t block = 0; block < blocks; ++block, shares += T * TILE_NUMBERS) {
        each<T>([&](auto part) { tile_load<4 + part>(shares + part * TILE_NUMBERS, 64); });
        each<N>([&](auto n) {
            tile_load<7>(pairs[block].first + n * 32, pairs[block].stride * 2);
            each<T>([&](auto part) { tile_multiply<decltype(n)::value, 4 + part, 7>(); });
        });
    }
    each<N>([&](auto n) { tile_store<n>(result + n * 16, dim * 4); });
}

// The pairs of keys of each tile of 32; those of the last one are made anew, with zeros behind the last key.
int64_t find_pairs(const TileKeys& keys, int64_t first, int64_t count, PairRows* found) {
    const int64_t dim = keys.dim, whole = count / WIDTH;
    for (int64_t block = 0; block < whole; ++block)
        found[block] = {keys.pairs + (first + block * WIDTH) / keys.step * 2 * dim, 2 / keys.step * 2 * dim};
    const int64_t left = count - whole * WIDTH;
    if (!left) return whole;
    uint16_t* last = scratch<LastPairs, uint16_t>((PAIRS * 2 + 1) * dim);
    uint16_t* zeros = last + PAIRS * 2 * dim;
    std::fill(last, zeros + dim, uint16_t{0});
    for (int64_t k = 0; k < left; k += 2) {
        const uint16_t* row = keys.rows + (first + whole * WIDTH + k) * dim;
        pair_rows(row, k + 1 < left ? row + dim : zeros, dim, last + k * dim);
    }
    found[whole] = {last, 2 * dim};
    return whole + 1;
}

// Fold in keys by queries and shares of T tiles for 16 heads each.
template <int T>
void fold(const TileQuery& query, const Sums& sums, const TileKeys& keys, int64_t first, int64_t count,
          bool is_first) {
    const int64_t heads = query.heads, dim = query.dim;
    float* shares = scratch<ShareScratch>((TILE_KEYS + 16) * heads);
    float* decay = scratch<DecayScratch>(heads);
    uint16_t* tiles = scratch<ShareTiles, uint16_t>(TILE_KEYS / WIDTH * T * TILE_NUMBERS);
    PairRows pairs[TILE_KEYS / WIDTH], here[TILE_KEYS / WIDTH];
    for (int64_t group = 0; group < heads; group += TILE_HEADS)
        for (int64_t k = 0; k < count; k += NUM_SUM_TILES * 16)
            score_some<T, NUM_SUM_TILES>((count - k + 15) / 16, query.tiles + group / TILE_HEADS * (dim / WIDTH) * T * TILE_NUMBERS,
                                         keys.rows + (first + k) * dim, dim, shares + k * heads + group, heads);
    if constexpr (T < PARTS) update_twice(sums, count, shares, decay);
    else update_shares(sums, heads, count, shares, decay);
    const int64_t blocks = find_pairs(keys, first, count, pairs);
    for (int64_t group = 0; group < heads; group += TILE_HEADS) {
        for (int64_t block = 0; block < blocks; ++block) {
            uint16_t* to = tiles + block * T * TILE_NUMBERS;
            const int64_t left = count - block * WIDTH;
            if constexpr (T < PARTS) make_twice_tiles(shares + block * PAIRS * TILE_HEADS, left, to);
            else make_share_tiles(shares + block * WIDTH * heads + group, heads, left, to);
        }
        float* result = sums.result + group * dim;
        for (int64_t head = 0; head < TILE_HEADS && !is_first; ++head)
            for (int64_t i = 0; i < dim; i += LANES)
                store(result + head * dim + i, load(result + head * dim + i) * decay[group + head]);
        for (int64_t i = 0; i < dim; i += 64) {
            for (int64_t block = 0; block < blocks; ++block) here[block] = {pairs[block].first + 2 * i, pairs[block].stride};
            if (i + 64 <= dim) add_tiles<T, 4>(tiles, here, blocks, result + i, dim, is_first);
            else add_tiles<T, 2>(tiles, here, blocks, result + i, dim, is_first);
        }
    }
}

}  // namespace

void TileKeys::pair(int64_t count) const {
    uint16_t* to = pairs;
    for (int64_t k = 0; k + 1 < count; k += step, to += 2 * dim) pair_rows(row(k), row(k + 1), dim, to);
}

TileQuery::TileQuery(const float* query, int64_t num_heads, int64_t padded_heads, int64_t key_dim, float scale)
    : tiles(scratch<TileQuery, uint16_t>(padded_heads * key_dim * PARTS)), heads(padded_heads), dim(key_dim),
      is_twice(lies_twice(num_heads)) {
    constexpr int64_t HALF = TILE_HEADS / 2 * WIDTH;
    uint16_t* rows = scratch<QueryRows, uint16_t>(PARTS * TILE_NUMBERS);
    const int64_t num_tiles = is_twice ? 2 : PARTS;
    // Where parts lie one behind the other: tiles, or halves of tiles.
    const int64_t distance = is_twice ? HALF : TILE_NUMBERS, group_heads = is_twice ? TILE_HEADS / 2 : TILE_HEADS;
    if (is_twice) std::fill(rows + PARTS * HALF, rows + (PARTS + 1) * HALF, uint16_t{0});
    uint16_t* to = tiles;
    for (int64_t group = 0; group < heads; group += TILE_HEADS)
        for (int64_t start = 0; start < dim; start += WIDTH, to += num_tiles * TILE_NUMBERS) {
            for (int64_t i = 0; i < group_heads; ++i) {
                float scaled[WIDTH] = {};
                if (group + i < num_heads)
                    for (int64_t d = 0; d < WIDTH; d += LANES)
                        store(scaled + d, load(query + (group + i) * dim + start + d) * scale);
                split_bf16(scaled, WIDTH, PARTS, distance, rows + i * WIDTH);
            }
            for (int64_t tile = 0; tile < num_tiles; ++tile)
                transpose_words(rows + tile * TILE_NUMBERS, to + tile * TILE_NUMBERS);
        }
}

void fold_tiles(const TileQuery& query, const Sums& sums, const TileKeys& keys, int64_t first, int64_t count,
                bool is_first) {
    if (query.is_twice) fold<2>(query, sums, keys, first, count, is_first);
    else fold<PARTS>(query, sums, keys, first, count, is_first);
}

}  // namespace deepinfer
