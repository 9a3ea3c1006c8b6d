// Attention over the window and the selected compressed entries of each token.
//
// Heads lie side by side in the lanes of a vector wherever sums run over a key or over keys, so each head has its
// own sums in one order: along the width for a score, from the first key to the last for a result. The window, which
// starts with the sink, and the compressed entries are two parts with sums of their own. Keys are taken a block at a
// time, counted from the token's first, with a running peak per head. What a token gives depends on its own keys only.
// Sums are formed by float32 vectors or by bf16 tiles.

#include <algorithm>

#include "attention_sums.h"
#include "batch.h"
#include "bf16.h"
#include "cache_formats.h"
#include "ops.h"
#include "rope.h"
#include "scratch.h"
#include "threads.h"
#include "tile_attention.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int64_t TILE_TOKENS = 32;  // tokens of a row that share their unpacked window at most
constexpr int64_t SPLIT_TOKENS = 3;  // up to here the parts of a token are spread over the threads
constexpr int64_t BLOCK_KEYS = 36;  // a multiple of KEYS
constexpr int KEYS = 12;             // keys whose scores fill the registers
constexpr int HEADS = 4;             // heads and
constexpr int VECS = 2;              // vectors of their results that fill the registers

struct Layer {
    const float *sink, *frequencies;  // [heads], [pairs]
    int64_t heads, dim, window, pairs;
    int64_t padded;  // heads in whole vectors or tiles
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(dim)); }
};

struct WindowMemory;
struct EntryMemory;
struct PartSums;
struct SplitSums;

struct Step {
    const Batch& batch;
    const Cache& ring;
    const Cache* pages;
    const uint8_t* window_rows;
    const float* q;
    const int32_t* entries;
    int64_t num_entries;
    float* out;
};

// Keys row by row, with room for KEYS more.
struct WideKeys {
    float* rows;
    int64_t dim;

    static int64_t size(int64_t count, int64_t dim) { return (count + KEYS) * dim; }
    WideKeys(float* memory, int64_t, int64_t key_dim) : rows(memory), dim(key_dim) {}
    template <class Unpack>
    void fill(int64_t first, int64_t last, const Unpack& unpack) const {
        for (int64_t k = first; k < last; ++k) unpack(k, rows + k * dim);
    }
};

// One token's query [dim, padded heads], scaled, and what a block of keys needs; a thread's own memory.
struct Query {
    float *q, *decay, *shares;

    Query(const float* query, const Layer& layer) {
        const int64_t heads = layer.padded;
        const float scale = layer.scale();
        q = scratch<Query>(heads * (layer.dim + 1 + BLOCK_KEYS));
        decay = q + heads * layer.dim;
        shares = decay + heads;
        std::fill(q, q + heads * layer.dim, 0.0f);
        for (int64_t head = 0; head < layer.heads; ++head)
            for (int64_t i = 0; i < layer.dim; ++i) q[i * heads + head] = query[head * layer.dim + i] * scale;
    }
};

#if defined(__AVX512F__)
// `score_keys` for up to eight heads, which half of a vector holds.
void score_half(const Query& query, const Layer& layer, const float* keys, float* shares) {
    const int64_t dim = layer.dim;
    __m256 sums[KEYS] = {};
    for (int64_t i = 0; i < dim; ++i) {
        const __m256 factors = _mm256_loadu_ps(query.q + i * LANES);
        for (int k = 0; k < KEYS; ++k) sums[k] = _mm256_fmadd_ps(_mm256_set1_ps(keys[k * dim + i]), factors, sums[k]);
    }
    for (int k = 0; k < KEYS; ++k) store(shares + k * LANES, (Vec)_mm512_zextps256_ps512(sums[k]));
}
#endif

// shares[k][head] = q . keys[k] for KEYS keys.
void score_keys(const Query& query, const Layer& layer, const float* keys, float* shares) {
    const int64_t heads = layer.padded, dim = layer.dim;
#if defined(__AVX512F__)
    if (layer.heads <= LANES / 2) return score_half(query, layer, keys, shares);
#endif
    for (int64_t head = 0; head < heads; head += LANES) {
        Vec sums[KEYS] = {};
        const float* q = query.q + head;
        for (int64_t i = 0; i < dim; ++i) {
            const Vec factors = load(q + i * heads);
            for (int k = 0; k < KEYS; ++k) sums[k] = multiply_add(splat(keys[k * dim + i]), factors, sums[k]);
        }
        for (int k = 0; k < KEYS; ++k) store(shares + k * heads + head, sums[k]);
    }
}

// result[h] = result[h] * decay[h] + sum over keys of shares[k][h] * keys[k], on VECS * LANES of its numbers, for H heads.
template <int H>
void add_values(const Query& query, int64_t heads, int64_t dim, int64_t head, const float* keys, int64_t count,
                float* result) {
    Vec sums[H][VECS];
    for (int h = 0; h < H; ++h)
        for (int v = 0; v < VECS; ++v) sums[h][v] = load(result + h * dim + v * LANES) * query.decay[head + h];
    const float* shares = query.shares + head;
    for (int64_t k = 0; k < count; ++k, shares += heads, keys += dim)
        for (int v = 0; v < VECS; ++v) {
            const Vec values = load(keys + v * LANES);
            for (int h = 0; h < H; ++h) sums[h][v] = multiply_add(splat(shares[h]), values, sums[h][v]);
        }
    for (int h = 0; h < H; ++h)
        for (int v = 0; v < VECS; ++v) store(result + h * dim + v * LANES, sums[h][v]);
}

// Fold in `count` <= BLOCK_KEYS keys; up to KEYS - 1 rows behind them may be read and are ignored.
void fold_block(const Query& query, const Sums& sums, const Layer& layer, const float* keys, int64_t count) {
    const int64_t heads = layer.padded, dim = layer.dim;
    for (int64_t k = 0; k < count; k += KEYS) score_keys(query, layer, keys + k * dim, query.shares + k * heads);
    update_shares(sums, heads, count, query.shares, query.decay);
    int64_t head = 0;
    for (; head + HEADS <= layer.heads; head += HEADS)
        for (int64_t i = 0; i < dim; i += VECS * LANES)
            add_values<HEADS>(query, heads, dim, head, keys + i, count, sums.result + head * dim + i);
    for (; head < layer.heads; ++head)
        for (int64_t i = 0; i < dim; i += VECS * LANES)
            add_values<1>(query, heads, dim, head, keys + i, count, sums.result + head * dim + i);
}

// The two ways to form sums of one token: what they keep of keys and query, and how they fold a block of keys in.
struct ByVectors {
    struct Use {
        explicit Use(int64_t) {}
    };
    using Keys = WideKeys;
    using Number = float;
    static constexpr int64_t MOST_KEYS = BLOCK_KEYS, GROUP = 1;
    const Layer& layer;
    const Query query;

    ByVectors(const float* q, const Layer& one) : layer(one), query(q, one) {}
    void fold(const Sums& sums, const Keys& keys, int64_t first, int64_t count, bool is_first) const {
        if (is_first) sums.clear(layer.padded, layer.dim);
        fold_block(query, sums, layer, keys.rows + first * keys.dim, count);
    }
};

struct ByTiles {
    struct Use : TileUse {
        explicit Use(int64_t heads) : TileUse(tile_heads(heads)) {}
    };
    using Keys = TileKeys;
    using Number = uint16_t;
    static constexpr int64_t MOST_KEYS = TILE_KEYS, GROUP = KEY_GROUP;
    const Layer& layer;
    const TileQuery query;

    ByTiles(const float* q, const Layer& one) : layer(one), query(q, one.heads, one.padded, one.dim, one.scale()) {}
    void fold(const Sums& sums, const Keys& keys, int64_t first, int64_t count, bool is_first) const {
        fold_tiles(query, sums, keys, first, count, is_first);
    }
};

// Memory of `count` keys.
template <class Way, class Tag>
typename Way::Keys make_keys(int64_t count, int64_t dim) {
    using Keys = typename Way::Keys;
    return Keys(scratch<Tag, typename Way::Number>(Keys::size(count, dim)), count, dim);
}

template <class Way>
void fold_keys(const Way& way, const Sums& sums, const typename Way::Keys& keys, int64_t first, int64_t count) {
    if (count <= 0) sums.clear(way.layer.padded, way.layer.dim);
    for (int64_t k = 0; k < count; k += Way::MOST_KEYS)
        way.fold(sums, keys, first + k, std::min(Way::MOST_KEYS, count - k), k == 0);
}

template <class Way>
void fold_entries(const Way& way, const Sums& sums, const Step& step, int64_t row, const int32_t* entries, int64_t dim) {
    const auto keys = make_keys<Way, EntryMemory>(Way::MOST_KEYS, dim);
    const uint8_t* packed[Way::MOST_KEYS];
    int64_t taken = 0;
    bool is_first = true;
    while (step.pages && taken < step.num_entries) {
        int64_t count = 0;
        for (; taken < step.num_entries && count < Way::MOST_KEYS; ++taken) {
            packed[count] = find_entry(step.batch, *step.pages, row, entries[taken]);
            if (!packed[count]) continue;
            __builtin_prefetch(packed[count]);
            __builtin_prefetch(packed[count++] + step.pages->bytes - 1);
        }
        keys.fill(0, count, [&](int64_t k, auto* row) { unpack_compressed(packed[k], dim, row); });
        if (count) way.fold(sums, keys, 0, count, is_first), is_first = false;
    }
    if (is_first) sums.clear(way.layer.padded, dim);
}

// What the results of both parts are worth, in the place of their totals.
void weigh(const Sums& window, const Sums& entries, const Layer& layer) {
    for (int64_t head = 0; head < layer.heads; head += LANES) {
        const Vec peak = maximum(load(window.peak + head), load(entries.peak + head));
        const Vec a = exponential(load(window.peak + head) - peak), b = exponential(load(entries.peak + head) - peak);
        const Vec share = 1.0f / (load(window.total + head) * a + load(entries.total + head) * b);
        store(window.total + head, a * share);
        store(entries.total + head, b * share);
    }
}

// Both parts of a token brought together.
void finish(const Sums& window, const Sums& entries, const Layer& layer, int64_t position, float* out) {
    const int64_t dim = layer.dim;
    Turn turn;
    set_turn(turn, static_cast<int32_t>(position), layer.frequencies, layer.pairs);
    weigh(window, entries, layer);
    for (int64_t head = 0; head < layer.heads; ++head, out += dim) {
        const float *from = window.result + head * dim, *other = entries.result + head * dim;
        const float a = window.total[head], b = entries.total[head];
        for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(from + i) * a + load(other + i) * b);
        rotate(out, dim, turn, true);
    }
}

// The window of some of a row's tokens: positions first .. last, counted from `base`.
struct Window {
    int64_t first, last, base;

    int64_t size() const { return std::max<int64_t>(last - base + 1, 0); }
};

// Keys of a window, from the row's ring before the row's start, else from this step.
template <class Keys>
void unpack_window_keys(const Layer& layer, const Step& step, int64_t row, const Window& window, const Keys& keys) {
    const Batch& batch = step.batch;
    const int64_t start = batch.row_starts[row], bytes = window_bytes(layer.dim);
    keys.fill(window.first - window.base, window.last + 1 - window.base, [&](int64_t number, auto* to) {
        const int64_t position = window.base + number, ahead = position - start;
        const uint8_t* packed = ahead < 0
            ? step.ring.at(step.ring.slot(batch.row_slots[row]), position % step.ring.entries)
            : step.window_rows + (batch.row_offsets[row] + ahead) * bytes;
        unpack_window(packed, layer.dim, to);
    });
}

// The first position in the window of a token.
int64_t oldest_key(const Layer& layer, const Step& step, int64_t row, int64_t position) {
    const Batch& batch = step.batch;
    const int64_t last = batch.is_block ? int64_t{batch.row_starts[row]} - 1 : position;
    return std::max({last - layer.window + 1, int64_t{batch.window_starts[row]}, int64_t{0}});
}

// The last position in the window of a token.
int64_t newest_key(const Step& step, int64_t row, int64_t position) {
    const Batch& batch = step.batch;
    if (!batch.is_block) return position;
    return int64_t{batch.row_starts[row]} + batch.row_offsets[row + 1] - batch.row_offsets[row] - 1;
}

void start(const Sums& sums, const Layer& layer, const float* sink) {
    sums.begin(layer.padded, layer.heads, sink);
}

Sums part_of(float* memory, const Layer& layer, int64_t number) {
    return Sums(memory + number * Sums::size(layer.padded, layer.dim), layer.padded);
}

// The window that a tile's tokens share.
template <class Way>
Window window_of(const Layer& layer, const Step& step, const Tile& tile) {
    const int64_t oldest = oldest_key(layer, step, tile.row, tile.position);
    const int64_t newest = newest_key(step, tile.row, tile.position + tile.last - tile.first - 1);
    return {oldest, newest, oldest / Way::GROUP * Way::GROUP};
}

// Both parts of every token of a tile, which share its unpacked window.
template <class Way>
void attend_tile(const Layer& layer, const Step& step, const Tile& tile) {
    const int64_t dim = layer.dim;
    const Window shared = window_of<Way>(layer, step, tile);
    const auto keys = make_keys<Way, WindowMemory>(shared.size(), dim);
    float* memory = scratch<PartSums>(2 * Sums::size(layer.padded, dim));
    const Sums window = part_of(memory, layer, 0), entries = part_of(memory, layer, 1);
    unpack_window_keys(layer, step, tile.row, shared, keys);
    [[maybe_unused]] const typename Way::Use use(layer.heads);
    for (int64_t number = tile.first; number < tile.last; ++number) {
        const int64_t position = tile.position + number - tile.first;
        const int64_t begin = oldest_key(layer, step, tile.row, position);
        const int64_t end = newest_key(step, tile.row, position);
        const Way way(step.q + number * layer.heads * dim, layer);
        start(window, layer, layer.sink);
        fold_keys(way, window, keys, begin - shared.base, end - begin + 1);
        start(entries, layer, nullptr);
        fold_entries(way, entries, step, tile.row, step.entries + number * step.num_entries, dim);
        finish(window, entries, layer, position, step.out + number * layer.heads * dim);
    }
}

// Tiles of one token each, whose parts are worked on side by side.
template <class Way>
void attend_split(const Layer& layer, const Step& step, const Tile* tiles, int64_t count) {
    const int64_t dim = layer.dim;
    float* memory = scratch<SplitSums>(2 * count * Sums::size(layer.padded, dim));
    parallel(2 * count, 1, [=](int64_t first, int64_t last) {
        [[maybe_unused]] const typename Way::Use use(layer.heads);
        for (int64_t i = first; i < last; ++i) {
            const Tile& tile = tiles[i / 2];
            const Sums sums = part_of(memory, layer, i);
            const Way way(step.q + tile.first * layer.heads * dim, layer);
            start(sums, layer, i % 2 ? nullptr : layer.sink);
            if (i % 2 == 0) {
                const Window window = window_of<Way>(layer, step, tile);
                const auto keys = make_keys<Way, WindowMemory>(window.size(), dim);
                unpack_window_keys(layer, step, tile.row, window, keys);
                fold_keys(way, sums, keys, window.first - window.base, window.last - window.first + 1);
            } else {
                fold_entries(way, sums, step, tile.row, step.entries + tile.first * step.num_entries, dim);
            }
        }
    });
    for (int64_t i = 0; i < count; ++i)
        finish(part_of(memory, layer, 2 * i), part_of(memory, layer, 2 * i + 1), layer, tiles[i].position,
               step.out + tiles[i].first * layer.heads * dim);
}

template <class Way>
void attend_by(const Layer& layer, const Step& step) {
    const Batch& batch = step.batch;
    if (batch.num_tokens <= SPLIT_TOKENS) {
        const auto tiles = tiles_of(batch, 1);
        return attend_split<Way>(layer, step, tiles.data(), static_cast<int64_t>(tiles.size()));
    }
    const int64_t share = (batch.num_tokens + num_threads() - 1) / num_threads();  // a row alone is for all threads
    const auto tiles = tiles_of(batch, std::min(TILE_TOKENS, share));
    parallel(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) attend_tile<Way>(layer, step, tiles[i]);
    });
}

}  // namespace
}  // namespace deepinfer

using namespace deepinfer;

EXPORT void attend(const Batch* batch, const float* q, const uint8_t* window_rows, const Cache* ring,
                   const Cache* pages, const int32_t* entries, int64_t num_entries, const float* sink,
                   const float* frequencies, int64_t heads, int64_t dim, int64_t window, int64_t pairs, float* out) {
    const bool by_tiles = uses_tiles(1);
    const int64_t together = by_tiles ? TILE_HEADS : LANES;
    const Layer layer{sink, frequencies, heads, dim, window, pairs, (heads + together - 1) / together * together};
    const Step step{*batch, *ring, pages, window_rows, q, entries, num_entries, out};
    if (by_tiles) attend_by<ByTiles>(layer, step);
    else attend_by<ByVectors>(layer, step);
}
