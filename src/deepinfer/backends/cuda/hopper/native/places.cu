// What the attention of each token reads: where the packed rows of its keys lie, its window first, then its selected
// entries; how many tiles of 64 of either hold a key that it sees; how its results are turned back. A block a token.

#include "hopper.cuh"

constexpr int THREADS = GROUP + 64;  // the last 64 for turns
constexpr int KEYS = 64, DIM = 512, WINDOW_ROW = DIM / 32 * 33, ENTRY_ROW = DIM / 16 * 9;

struct Arguments {
    // [tokens, num_keys]; with one added, a row that is not to be seen: whatever it holds is finite. It is the token's
    // own, since one row for the unseen keys of all tokens would be read by all blocks at once, one after the other.
    u64 *places;
    int2 *tiles;               // [tokens] tiles of the window up to its last key, at least one; these and those of entries
    float2 *turns;             // [tokens, num_turns] cosines and sines
    const float *frequencies;  // [num_turns]
    const u8 *rows, *ring, *pages;
    const int *entries, *positions, *token_rows, *row_offsets, *row_starts, *row_slots, *window_starts, *table;
    long ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block, table_columns, num_entries;
    long window, span, window_tile, num_keys, num_turns;
};

__device__ inline const u8 *window_place(const Arguments &a, int token, int row, int key) {
    const int start = a.row_starts[row], first_token = a.row_offsets[row], window = int(a.window);
    int last = a.positions[token], newest = last;
    if (a.span > a.window) {  // a block of drafts sees the window before its start, and itself
        last = start - 1;
        newest = last + a.row_offsets[row + 1] - first_token;
    }
    const int place = max(max(last - (window - 1), a.window_starts[row]), 0) + key;
    if (key >= a.span || place > newest) return nullptr;
    if (place >= start) return a.rows + long(first_token + place - start) * WINDOW_ROW;
    int slot = a.row_slots[row];
    if (slot < 0 || slot >= a.num_slots) slot = 0;
    return a.ring + slot * a.ring_stride + place % int(a.ring_length) * WINDOW_ROW;
}

__device__ inline const u8 *entry_place(const Arguments &a, int row, int entry) {
    const int per_block = int(a.per_block);
    if (entry < 0 || entry / per_block >= a.table_columns) return nullptr;
    const int block = a.table[row * a.table_columns + entry / per_block];
    if (block < 0 || block >= a.num_blocks) return nullptr;
    return a.pages + block * a.page_stride + entry % per_block * ENTRY_ROW;
}

__device__ inline u64 address(const u8 *place, const u8 *other) { return place ? u64(place) : u64(other) | 1; }

extern "C" __global__ void __launch_bounds__(THREADS) find_places(const __grid_constant__ Arguments a) {
    constexpr int AT_ONCE = 4;  // entries of a thread, each of which takes two reads, one after the other
    __shared__ int ends[2];     // of what is seen of window and entries, in tiles
    const int token = blockIdx.x, thread = threadIdx.x;
    if (thread == 0) ends[0] = 1, ends[1] = 0;
    begin();
    __syncthreads();
    if (thread >= GROUP) {
        const int pair = thread - GROUP;
        const float angle = pair < a.num_turns ? float(a.positions[token]) * a.frequencies[pair] : 0.0f;
        if (pair < a.num_turns) a.turns[token * a.num_turns + pair] = {cosf(angle), sinf(angle)};
    } else {
        const int row = a.token_rows[token];
        u64 *to = a.places + token * a.num_keys;
        const u8 *own = a.rows + token * WINDOW_ROW;
        int entries[AT_ONCE];
        const auto read = [&](int first) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int number = first + i * GROUP;
                entries[i] = number < a.num_entries ? a.entries[token * a.num_entries + number] : -1;
            }
        };
        read(thread);
        int window_end = 0, entries_end = 0;
        for (int key = thread; key < a.window_tile; key += GROUP) {
            const u8 *place = window_place(a, token, row, key);
            if (place) window_end = key / KEYS + 1;
            to[key] = address(place, own);
        }
        for (int first = thread; first < a.num_keys - a.window_tile; first += AT_ONCE * GROUP) {
            const u8 *places[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) places[i] = entry_place(a, row, entries[i]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int number = first + i * GROUP;
                if (places[i]) entries_end = number / KEYS + 1;
                if (number < a.num_keys - a.window_tile) to[a.window_tile + number] = address(places[i], own);
            }
            read(first + AT_ONCE * GROUP);
        }
        window_end = __reduce_max_sync(~0u, window_end), entries_end = __reduce_max_sync(~0u, entries_end);
        if (thread % 32 == 0) atomicMax(&ends[0], window_end), atomicMax(&ends[1], entries_end);
    }
    __syncthreads();
    if (thread == 0) a.tiles[token] = {ends[0], ends[0] + ends[1]};
}
