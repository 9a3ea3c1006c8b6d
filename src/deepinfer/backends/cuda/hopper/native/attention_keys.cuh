// Keys of the attention kernel: their way into shared memory as packed, and there widened to bf16.
//
// Each of four warps brings and widens eight rows of either half of a tile, so warps wait for nobody but the products.
// It has two slots: rows are copied into one, 16 entries or eight window rows, while those in the other are widened.
// Their places are read into registers another tile ahead. Rows go on from one item to the next.

#pragma once

#include "attention.cuh"

// ---- bits. Keys are kept times 2^-16: what makes a bf16 of bits shifted into place then stays one whatever the scale.

__device__ inline u32 times(u32 x, u32 y) {  // two bf16 each; exact where a bf16 holds the product
    u32 z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// Pairs i and i + 1 of eight FP4 codes: i = 0, or 2 with the word shifted by 8. Times 2^-126 and a factor.
// A product puts a code's sign and its size into place at once.
__device__ inline u32 even_pair(u32 x, u32 factor) {
    return times((x & 0x000F000Fu) * (1u << 12 | 1u << 6) & 0x81C081C0u, factor);
}
__device__ inline u32 odd_pair(u32 x, u32 factor) {
    return times((x & 0x00F000F0u) * (1u << 8 | 1u << 2) & 0x81C081C0u, factor);
}

// bf16 factors of two e4m3 scales, times 2^110. `bits`: a scale from bit 4 of either half on.
__device__ inline u32 factors_of(u32 bits) {
    constexpr u32 RAISE = 0x79007900u;  // 2^115, twice
    return times(times(bits, RAISE), RAISE);
}

// Code i of each of two words of four e4m3 codes, times 2^-120 and a factor of 2^104.
__device__ inline u32 code_pair(u32 x, u32 y, int i, u32 factor) {
    constexpr u32 SIZE = 0x07F007F0u, SIGN = 0x80008000u, RAISE = 0x71807180u;  // 2^100
    const u32 pair = __byte_perm(x, y, i | i << 4 | (4 + i) << 8 | (4 + i) << 12);
    return times(times((pair << 4 & SIZE) | (pair & SIGN), RAISE), factor);
}

// ---- packed rows on their way

__device__ inline void copy_piece(u32 to, const u8 *from) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline void copy_piece_if(bool copies, u32 to, const u8 *from) {
    asm volatile("{\n.reg .pred copies;\nsetp.ne.b32 copies, %2, 0;\n"
                 "@copies cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to), "l"(from), "r"(int(copies)) : "memory");
}

// A slot has eight lines, each of one window row, or of entries `row` and `row` + 32. Eight lines meet all banks. A lane
// brings 16 bytes of every 64 of line lane / 4.
struct Supply {
    enum Kind { NONE, WINDOW, ENTRIES };

    const Arguments &a;
    const u32 shared, to;         // to: this lane's bytes of the first slot
    const int warp, row, part;
    u32 number;                   // of slots filled so far
    Kind asked, next;             // of the tile whose rows were asked for last; of that whose places are known
    u64 first, second;            // places of rows `row` and `row` + 32 of the next tile
    int item, tile_of_item;       // the tile after that
    int2 tiles, later_tiles;      // of its item, and of the item after that
    const u64 *places;            // of its item

    __device__ Supply(const Arguments &a, u32 shared, int warp, int lane)
        : a(a), shared(shared), to(shared + SLOTS_AT + warp * 2 * SLOT + lane / 4 * PITCH + lane % 4 * 16), warp(warp),
          row(lane / 4), part(lane % 4), number(0), item(blockIdx.x), tile_of_item(0) {
        tiles = tiles_of(a, item);
        begin_item();
        read_places();
    }

    __device__ void begin_item() {
        places = a.places + token_of(a, item) * a.num_tiles * KEYS + warp * 8 + row;
        later_tiles = tiles_of(a, item + gridDim.x);
    }

    __device__ void read_places() {
        next = item >= int(a.items) ? NONE : tile_of_item < tiles.x ? WINDOW : ENTRIES;
        if (next == NONE) return;
        const u64 *from = places + (next == WINDOW ? tile_of_item : tile_of_item - tiles.x + int(a.window_tiles)) * KEYS;
        asm volatile("ld.global.b64 %0, [%1];" : "=l"(first) : "l"(from));
        asm volatile("ld.global.b64 %0, [%1];" : "=l"(second) : "l"(from + 32));
        if (++tile_of_item < tiles.y) return;
        tile_of_item = 0, item += gridDim.x, tiles = later_tiles;
        if (item < int(a.items)) begin_item();
    }

    // A lane's first bytes of a row in `others`, or among those of the step's tokens.
    __device__ const u8 *piece(u64 place, const u8 *others) const {
        return (place & IN_ROWS ? a.rows : others) + (place & ~u64(UNSEEN | IN_ROWS)) + part * 16;
    }

    // Notes which keys of a tile, the next one, the token sees.
    __device__ void note_seen(u32 tile) {
        const u32 x = __ballot_sync(~0u, !(first & UNSEEN)), y = __ballot_sync(~0u, !(second & UNSEEN));
        if (row + part) return;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(seen(shared, tile) + warp * 4), "r"(x) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(seen(shared, tile) + warp * 4 + 16), "r"(y) : "memory");
    }

    __device__ u32 next_slot() { return to + number++ % 2 * SLOT; }

    // The next tile: eight window rows of its first half, or 16 entries.
    __device__ void ask(u32 tile) {
        asked = next;
        if (next == WINDOW) {
            note_seen(tile);
            ask_window(first);
        } else if (next == ENTRIES) {
            note_seen(tile);
            ask_entries();
        } else {
            ++number, commit();
        }
    }

    // Eight window rows of the other half of a tile.
    __device__ void ask_rest() {
        ask_window(second);
        read_places();
    }

    __device__ void ask_window(u64 place) {
        const u32 slot = next_slot();
        const u8 *from = piece(place, a.ring);
#pragma unroll
        for (int i = 0; i < 8; ++i) copy_piece(slot + 64 * i, from + 64 * i);
        copy_piece_if(part == 0, slot + DIM, from + DIM);
        commit();
    }

    __device__ void ask_entries() {
        const u32 slot = next_slot();
        const u8 *from[2] = {piece(first, a.pages), piece(second, a.pages)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 there = slot + half * ENTRY_ROW;
#pragma unroll
            for (int i = 0; i < 4; ++i) copy_piece(there + 64 * i, from[half] + 64 * i);
            copy_piece_if(part < 2, there + 256, from[half] + 256);
        }
        commit();
        read_places();
    }

    __device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

    // Waits for all rows but those last asked for; how far from the first slot they are.
    __device__ u32 ready() const {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        return number % 2 * SLOT;
    }
};

// ---- widening. A lane takes a quarter of the columns of row lane % 8: eight lanes that load or store at once meet all
// banks. `from`: where its first stretch is packed; `to`: where piece 0 of its first stretch goes, of which others are
// panels away, or have bits 4 to 6 changed.

// Stretches are loaded while those before are widened.
__device__ inline void widen_window(u32 from, u32 scales_from, u32 to) {
    u32 scales;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(scales_from));
    Four x = load(from), y = load(from + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Four next_x, next_y;
        if (i < 3) next_x = load(from + 32 * (i + 1)), next_y = load(from + 32 * (i + 1) + 16);
        const u32 factor = min((scales >> (8 * i) & 0xFF) + 4, 254u) * 0x00800080u;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            store((to ^ (64 * (i % 2) + 16 * j)) + i / 2 * PANEL,
                  {code_pair(x.a, x.b, j, factor), code_pair(x.c, x.d, j, factor), code_pair(y.a, y.b, j, factor),
                   code_pair(y.c, y.d, j, factor)});
        x = next_x, y = next_y;
    }
}

// A stretch of an entry. `bits`: its two scales, from bit 4 of either half on.
__device__ inline void widen_stretch(Four x, u32 bits, u32 to) {
    const u32 factors = factors_of(bits), first = halves(factors, factors), last = high_halves(factors, factors);
    const Four y = {x.a >> 8, x.b >> 8, x.c >> 8, x.d >> 8};
    store(to, {even_pair(x.a, first), even_pair(x.b, first), even_pair(x.c, last), even_pair(x.d, last)});
    store(to ^ 16, {odd_pair(x.a, first), odd_pair(x.b, first), odd_pair(x.c, last), odd_pair(x.d, last)});
    store(to ^ 32, {even_pair(y.a, first), even_pair(y.b, first), even_pair(y.c, last), even_pair(y.d, last)});
    store(to ^ 48, {odd_pair(y.a, first), odd_pair(y.b, first), odd_pair(y.c, last), odd_pair(y.d, last)});
}

__device__ inline void widen_entries(u32 from, u32 scales_from, u32 to) {
    u32 scales[2];
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(scales[0]), "=r"(scales[1]) : "r"(scales_from));
    Four x = load(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Four next;
        if (i < 3) next = load(from + 16 * (i + 1));
        const u32 two = scales[i / 2];
        const u32 bits = i % 2 ? (two >> 12 & 0x7F0) | (two >> 4 & 0x07F00000)
                               : (two & 0x7F) << 4 | (two & 0x7F00) << 12;
        widen_stretch(x, bits, (to ^ (64 * (i % 2))) + i / 2 * PANEL);
        x = next;
    }
}

__device__ inline void widen(const Arguments &a, u32 shared, int thread) {
    const int warp = thread / 32, row = thread % 8, part = thread % 32 / 8;
    // In the other half of a tile, columns are swizzled alike.
    const u32 keys = shared + KEYS_AT + part * 2 * PANEL + (warp * 8 + row) * 128 + row * 16;
    const u32 line = shared + SLOTS_AT + warp * 2 * SLOT + row * PITCH;
    Supply supply(a, shared, warp, thread % 32);
    supply.ask(0);
#pragma unroll 1
    for (u32 tile = 0; supply.asked != Supply::NONE; ++tile) {
        const u32 buffer = tile & 1, to = keys + buffer * TILE;
        if (supply.asked == Supply::WINDOW) {
#pragma unroll 1
            for (u32 half = 0; half < 2; ++half) {
                if (half == 0) supply.ask_rest();
                else supply.ask(tile + 1);
                const u32 from = line + supply.ready();
                if (tile >= 2) wait(used(shared, buffer, half), (tile / 2 - 1) & 1);
                widen_window(from + part * 128, from + DIM + part * 4, to + half * HALF);
                __syncwarp();
            }
        } else {
            supply.ask(tile + 1);
            u32 from = line + supply.ready();
#pragma unroll 1
            for (u32 half = 0; half < 2; ++half, from += ENTRY_ROW) {
                if (tile >= 2) wait(used(shared, buffer, half), (tile / 2 - 1) & 1);
                widen_entries(from + part * 64, from + DIM / 2 + part * 8, to + half * HALF);
            }
        }
        publish();
        warp_arrive(widened(shared, buffer));
    }
}
