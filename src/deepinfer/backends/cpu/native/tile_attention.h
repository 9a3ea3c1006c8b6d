// Scores and results of attention by bf16 tiles. Keys are exact in bf16; queries and shares are three bf16 numbers each.
//
// Sixteen heads fill a tile, and each of the three parts is a tile of its own. Up to eight heads lie there twice: the
// largest parts in the first half of a tile and the next ones in the second, the smallest in a tile whose second half is
// zero. Scores are the sums of both halves; results stay apart until the last key is in. Shares of two keys lie in the
// two halves of 16 lanes, so totals are those of the even and of the odd keys until the last one is in.

#pragma once

#include "attention_sums.h"
#include "cache_formats.h"
#include "tiles.h"

namespace deepinfer {

constexpr int64_t TILE_HEADS = 16;   // heads side by side
constexpr int64_t TILE_KEYS = 128;   // keys that are folded in at a time, whole tiles of 32

// Keys row by row, and `step` apart pairs of a row and the next with the numbers of both side by side.
struct TileKeys {
    uint16_t *rows, *pairs;  // [count + 16, dim], [count / step, dim, 2]
    int64_t dim, step;

    // uint16_t that `count` keys take.
    static int64_t size(int64_t count, int64_t dim, int64_t step) {
        return (count + 16) * dim + (count + step) / step * 2 * dim;
    }

    TileKeys(uint16_t* memory, int64_t count, int64_t key_dim, int64_t pair_step)
        : rows(memory), pairs(memory + (count + 16) * key_dim), dim(key_dim), step(pair_step) {}

    uint16_t* row(int64_t number) const { return rows + number * dim; }
    void pair(int64_t count) const;  // once the first `count` rows are there
};

inline bool lies_twice(int64_t num_heads) { return num_heads <= TILE_HEADS / 2; }

// One token's query for padded heads, scaled; a thread's own memory.
struct TileQuery {
    uint16_t* tiles;  // [heads / 16][dim / 32][2 or 3] tiles, a head in each column
    int64_t heads, dim;
    bool is_twice;

    TileQuery(const float* query, int64_t num_heads, int64_t padded_heads, int64_t key_dim, float scale);
};

// Fold in keys first .. first + count - 1; `first` is a multiple of the keys' step. A TileUse of 16 rows is alive. The
// first keys of `sums` begin its result.
void fold_tiles(const TileQuery& query, const Sums& sums, const TileKeys& keys, int64_t first, int64_t count,
                bool is_first);

}  // namespace deepinfer
