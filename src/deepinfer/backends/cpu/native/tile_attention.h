// Scores and results of attention by bf16 tiles. Keys are exact in bf16; queries and shares are rounded to it, each once
// and where the reference rounds them: the rotated query, and a share against the peak so far. Totals are those of the
// shares before.
//
// Heads are the rows of the left side, queries [heads, dim] and shares [heads, keys]. Right sides have two numbers that
// are multiplied with neighbours in a row side by side: those of one key for scores, sixteen keys in the lanes; those of
// two keys for results, sixteen numbers in the lanes.

#pragma once

#include <algorithm>

#include "attention_sums.h"
#include "scratch.h"
#include "tiles.h"

namespace deepinfer {

constexpr int64_t TILE_HEADS = 16;  // heads side by side at most
constexpr int64_t TILE_KEYS = 128;  // keys that are folded in at a time
#if defined(__AVX512BF16__)
constexpr int64_t KEY_GROUP = 16;  // keys that are taken whole, from multiples of it on
#else
constexpr int64_t KEY_GROUP = 32;
#endif

// `count` keys and zeros up to whole groups; a thread's own memory.
struct TileKeys {
    uint16_t *columns, *pairs;  // [count / 16][dim / 2][16][2], [count / 2][dim][2]
    int64_t dim;

    // uint16_t that `count` keys take.
    static int64_t size(int64_t count, int64_t dim) { return 2 * (count + KEY_GROUP) * dim; }

    TileKeys(uint16_t* memory, int64_t count, int64_t key_dim)
        : columns(memory), pairs(memory + (count + KEY_GROUP) / 16 * 16 * key_dim), dim(key_dim) {}

    // Keys first .. last - 1 by unpack(number, row).
    template <class Unpack>
    void fill(int64_t first, int64_t last, const Unpack& unpack) const {
        uint16_t* rows = scratch<TileKeys, uint16_t>(16 * dim);
        const int64_t end = (last + KEY_GROUP - 1) / KEY_GROUP * KEY_GROUP;
        for (int64_t start = first / KEY_GROUP * KEY_GROUP; start < end; start += 16) {
            for (int64_t k = start; k < start + 16; ++k) {
                uint16_t* row = rows + (k - start) * dim;
                if (k < first || k >= last) std::fill(row, row + dim, uint16_t{0});
                else unpack(k, row);
            }
            add(start, rows);
        }
    }

private:
    void add(int64_t first, const uint16_t* rows) const;  // sixteen of them
};

// One token's query [heads, dim]; a thread's own memory.
struct TileQuery {
    uint16_t* rows;  // [padded heads, dim]
    int64_t heads, padded_heads, dim;
    float scale;

    TileQuery(const float* query, int64_t num_heads, int64_t padded, int64_t key_dim, float by);
};

// Fold in keys first .. first + count - 1, at most TILE_KEYS. A TileUse of tile_heads(heads) rows is alive. The first
// keys of `sums` begin its result.
void fold_tiles(const TileQuery& query, const Sums& sums, const TileKeys& keys, int64_t first, int64_t count,
                bool is_first);

inline int tile_heads(int64_t heads) { return static_cast<int>(std::min(heads, TILE_HEADS)); }

}  // namespace deepinfer
