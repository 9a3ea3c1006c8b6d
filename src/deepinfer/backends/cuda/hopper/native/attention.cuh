// What the parts of the attention kernel agree on: arguments, shared memory, barriers, and the order of columns.
//
// A stretch of 32 columns is four pieces of eight. Bits shifted into place give columns i and i + 4 of a piece at once;
// so shared memory holds, for i = 0 .. 3, 16 bytes with that pair of each piece. In the matrix unit's registers a
// thread then has all eight columns of one piece: it reads queries and writes results as they lie in global memory.

#pragma once

#include "hopper.cuh"

constexpr int DIM = 512, HEADS = 64, KEYS = 64, MAX_TURNS = 64;
constexpr int GROUP_HEADS = 8;  // whose results share a scale and a product
constexpr int THREADS = 4 * GROUP;
constexpr u64 UNSEEN = 1, IN_ROWS = 2;  // in places
constexpr int WINDOW_ROW = DIM / 32 * 33, ENTRY_ROW = DIM / 16 * 9;
constexpr u32 PITCH = 2 * ENTRY_ROW + 16, SLOT = 8 * PITCH;  // bytes of packed rows, of a warp's eight lines of them
constexpr u32 PANEL = 8192, TILE = 65536, SHARES = 8192;  // bytes: 64 rows of 64 columns; of all columns; of 64 keys
constexpr u32 HALF = PANEL / 2;                           // 32 rows
constexpr u32 KEYS_AT = 0, QUERY_AT = 2 * TILE, SHARES_AT = QUERY_AT + TILE / 2, SLOTS_AT = SHARES_AT + 2 * SHARES;
constexpr u32 TURNS_AT = SLOTS_AT + 4 * 2 * SLOT, DECAYS_AT = TURNS_AT + 4 * 8 * MAX_TURNS;
constexpr u32 TOTALS_AT = DECAYS_AT + 2 * 4 * HEADS;
constexpr u32 SEEN_AT = TOTALS_AT + 2 * 4 * HEADS, BARRIERS_AT = SEEN_AT + 8 * 32;
constexpr u32 LARGEST_AT = BARRIERS_AT + 8 * 8, BYTES = LARGEST_AT + 2 * 2 * 4 * HEADS / GROUP_HEADS;

struct Arguments {
    const u16 *q;              // [tokens, heads, 512] bf16
    const float *sink;         // [heads]
    u8 *codes;                 // [32 steps, groups of 8 heads, size, 128] e4m3 panels, see panels.py
    float *scale;              // [groups of 8 heads, size]
    const float *frequencies;  // [rope / 2]
    const u8 *rows, *ring;     // packed window rows: of the step's tokens, of those before
    const u64 *places;         // [tokens, tiles, 64] where the rows of keys lie, see places.cu
    const int2 *tiles;         // [tokens] tiles to read: of the window, at least one, and of all keys
    const int *positions;      // [tokens]
    long groups, items, rope;  // groups of 64 heads; those of all tokens; columns that turn, the last ones
    long num_tiles, window_tiles;  // that a token has places for; those of its window, which come first
    long size;                     // places of tokens in a group of 8 heads, a multiple of 8
};

// An item, or the last one; its token; the tiles of its keys that are read.
__device__ inline int within(const Arguments &a, int item) { return min(item, int(a.items) - 1); }
__device__ inline int token_of(const Arguments &a, int item) {
    return int(a.groups) == 1 ? item : item / int(a.groups);
}
__device__ inline int tiles_of(const Arguments &a, int item) { return a.tiles[token_of(a, within(a, item))].y; }
// Those of the window in even lanes and of all keys in odd ones: what is the same in all lanes is waited for at once.
__device__ inline int lane_tiles(const Arguments &a, int item) {
    int tiles;
    asm volatile("ld.global.b32 %0, [%1];"
                 : "=r"(tiles) : "l"(&a.tiles[token_of(a, within(a, item))].x + threadIdx.x % 2));
    return tiles;
}

// For each eight keys of a tile, a word: four bits of ones a key that the token sees.
__device__ inline u32 seen(u32 shared, u32 tile) { return shared + SEEN_AT + tile % 8 * 32; }
// Barriers of a buffer: its keys are there; their shares are there; a half of its keys was used.
__device__ inline u32 widened(u32 shared, u32 buffer) { return shared + BARRIERS_AT + 8 * buffer; }
__device__ inline u32 shared_out(u32 shared, u32 buffer) { return shared + BARRIERS_AT + 16 + 8 * buffer; }
__device__ inline u32 used(u32 shared, u32 buffer, u32 half) {
    return shared + BARRIERS_AT + 32 + 16 * buffer + 8 * half;
}

// Waits for the threads of the group that keeps the queries.
__device__ inline void group_meets() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
// Waits for the other warp that sums values of the same heads.
__device__ inline void warps_meet(int warp) { asm volatile("bar.sync %0, 64;" ::"r"(2 + warp) : "memory"); }

// Asks the second cache for bytes of global memory.
__device__ inline void prefetch(const void *from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ inline u32 halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }       // low halves of both
__device__ inline u32 high_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }  // high halves of both

// A piece of eight bf16: columns i and i + 4 of it in one register, i = 0 .. 3.
__device__ inline Four pairs_of(Four x) {
    return {halves(x.a, x.c), high_halves(x.a, x.c), halves(x.b, x.d), high_halves(x.b, x.d)};
}
