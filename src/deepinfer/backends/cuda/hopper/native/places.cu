// Where the packed rows of the keys of each token lie, its window first, then its selected entries, and how many tiles
// of 64 of either hold a key that it sees. A block a token. Layers whose tokens see the same entries share the places.

#include "hopper.cuh"

constexpr int KEYS = 64, DIM = 512, WINDOW_ROW = DIM / 32 * 33, ENTRY_ROW = DIM / 16 * 9;
constexpr u64 UNSEEN = 1, IN_ROWS = 2;  // added to a place, a multiple of 16

struct Arguments {
    // [tokens, num_keys] bytes from the start of the ring or of the step's rows on; addresses of entries. A key that is
    // not to be seen lies at the token's own row or in a page of its own, whatever it holds is finite: one place for
    // those of all tokens would be read by all blocks at once, one after the other.
    u64 *places;
    int2 *tiles;  // [tokens] tiles of the window up to its last key, at least one; these and those of entries
    const u8 *pages;
    const int *entries, *positions, *token_rows, *row_offsets, *row_starts, *row_slots, *window_starts, *table;
    long ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block, table_columns, num_entries;
    long window, span, window_tile, num_keys;
};

__device__ inline u64 window_place(const Arguments &a, int token, int row, int key, u64 unseen) {
    const int start = a.row_starts[row], first_token = a.row_offsets[row], window = int(a.window);
    int last = a.positions[token], newest = last;
    if (a.span > a.window) {  // a block of drafts sees the window before its start, and itself
        last = start - 1;
        newest = last + a.row_offsets[row + 1] - first_token;
    }
    const int place = max(max(last - (window - 1), a.window_starts[row]), 0) + key;
    if (key >= a.span || place > newest) return unseen;
    if (place >= start) return u64(first_token + place - start) * WINDOW_ROW | IN_ROWS;
    int slot = a.row_slots[row];
    if (slot < 0 || slot >= a.num_slots) slot = 0;
    return slot * a.ring_stride + place % int(a.ring_length) * WINDOW_ROW;
}

__device__ inline u64 entry_place(const Arguments &a, int row, int entry, u64 unseen) {
    const int per_block = int(a.per_block);
    if (entry < 0 || entry / per_block >= a.table_columns) return unseen;
    const int block = a.table[row * a.table_columns + entry / per_block];
    if (block < 0 || block >= a.num_blocks) return unseen;
    return u64(a.pages) + block * a.page_stride + entry % per_block * ENTRY_ROW;
}

extern "C" __global__ void __launch_bounds__(GROUP) find_places(const __grid_constant__ Arguments a) {
    constexpr int AT_ONCE = 4;  // entries of a thread, each of which takes two reads, one after the other
    __shared__ int ends[2];     // of what is seen of window and entries, in tiles
    const int token = blockIdx.x, thread = threadIdx.x, num_places = int(a.num_keys - a.window_tile);
    if (thread == 0) ends[0] = 1, ends[1] = 0;
    begin();
    __syncthreads();
    const int row = a.token_rows[token];
    const u64 unseen = u64(token) * WINDOW_ROW | IN_ROWS | UNSEEN;
    const u64 unseen_entry = u64(a.pages) + token % a.num_blocks * a.page_stride | UNSEEN;
    u64 *to = a.places + token * a.num_keys;
    int entries[AT_ONCE], window_end = 0, entries_end = 0;
    const auto read = [&](int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int number = first + i * GROUP;
            entries[i] = number < a.num_entries ? a.entries[token * a.num_entries + number] : -1;
        }
    };
    read(thread);
    for (int key = thread; key < a.window_tile; key += GROUP) {
        const u64 place = window_place(a, token, row, key, unseen);
        to[key] = place;
        if (place != unseen) window_end = key / KEYS + 1;
    }
    to += a.window_tile;
    for (int first = thread; first < num_places; first += AT_ONCE * GROUP) {
        u64 places[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) places[i] = entry_place(a, row, entries[i], unseen_entry);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int number = first + i * GROUP;
            if (places[i] != unseen_entry) entries_end = number / KEYS + 1;
            if (number < num_places) to[number] = places[i];
        }
        read(first + AT_ONCE * GROUP);
    }
    window_end = __reduce_max_sync(~0u, window_end), entries_end = __reduce_max_sync(~0u, entries_end);
    if (thread % 32 == 0) atomicMax(&ends[0], window_end), atomicMax(&ends[1], entries_end);
    __syncthreads();
    if (thread == 0) a.tiles[token] = {ends[0], ends[0] + ends[1]};
}
