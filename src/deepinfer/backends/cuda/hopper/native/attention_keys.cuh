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
    const Arguments &a;
    const u32 shared, to;  // to: this lane's bytes of the first slot
    const int warp, row, part;
    u32 number;            // of slots filled so far
    u64 first, second;     // places of rows `row` and `row` + 32 of the next tile

    __device__ Supply(const Arguments &a, u32 shared, int warp, int lane)
        : a(a), shared(shared), to(shared + SLOTS_AT + warp * 2 * SLOT + lane / 4 * PITCH + lane % 4 * 16), warp(warp),
          row(lane / 4), part(lane % 4), number(0) {}

    // This lane's places of an item.
    __device__ const u64 *places_of(int item) const {
        return a.places + token_of(a, within(a, item)) * a.num_tiles * KEYS + warp * 8 + row;
    }

    __device__ void read_places(const u64 *from) {
        asm volatile("ld.global.b64 %0, [%1];" : "=l"(first) : "l"(from));
        asm volatile("ld.global.b64 %0, [%1];" : "=l"(second) : "l"(from + 32));
    }

    // Notes which keys of a tile, the next one, the token sees.
    __device__ void note_seen(u32 tile) {
        const u32 x = __ballot_sync(~0u, !(first & UNSEEN)), y = __ballot_sync(~0u, !(second & UNSEEN));
        if (row + part) return;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(seen(shared, tile) + warp * 4), "r"(x) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(seen(shared, tile) + warp * 4 + 16), "r"(y) : "memory");
    }

    // How far from the first slot the one filled last is, and the one that is filled next.
    __device__ u32 filled() const { return (number + 1) % 2 * SLOT; }
    __device__ u32 next_slot() { return to + number++ % 2 * SLOT; }

    __device__ const u8 *window_row(u64 place) const {
        return (place & IN_ROWS ? a.rows : a.ring) + (place & ~u64(UNSEEN | IN_ROWS));
    }

    // Eight window rows of a half of a tile.
    __device__ void ask_window(u64 place) {
        const u32 slot = next_slot();
        const u8 *from = window_row(place) + part * 16;
#pragma unroll
        for (int i = 0; i < 8; ++i) copy_piece(slot + 64 * i, from + 64 * i);
        copy_piece_if(part == 0, slot + DIM, from + DIM);
        commit();
    }

    // The first half of an item's first tile, if there is such an item.
    __device__ void ask_item(u32 tile, int item) {
        if (item < int(a.items)) {
            note_seen(tile);
            ask_window(first);
        } else {
            ++number, commit();
        }
    }

    __device__ const u8 *entry(u64 place) const {
        return reinterpret_cast<const u8 *>(place & ~u64(UNSEEN)) + part * 16;
    }

    // Piece i of 16 entries, 0 .. 3.
    __device__ void ask_piece(u32 slot, const u8 *(&from)[2], int i, bool asks) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            copy_piece_if(asks, slot + half * ENTRY_ROW + 64 * i, from[half] + 64 * i);
            if (i == 3) copy_piece_if(asks && part < 2, slot + half * ENTRY_ROW + 256, from[half] + 256);
        }
    }

    __device__ void ask_entries(u32 tile) {
        note_seen(tile);
        const u32 slot = next_slot();
        const u8 *from[2] = {entry(first), entry(second)};
#pragma unroll
        for (int i = 0; i < 4; ++i) ask_piece(slot, from, i, true);
        commit();
    }

    __device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

    // Waits for all rows but those asked for last, or for those too.
    template <int LEFT>
    __device__ void wait_rows() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
        __syncwarp();
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

// Asks for 16 entries of the next tile meanwhile: all at once would keep what is widened waiting for them.
template <bool ASKS>
__device__ inline void widen_entries(u32 from, u32 scales_from, u32 to, Supply &supply, u32 slot, bool asks) {
    u32 scales[2];
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(scales[0]), "=r"(scales[1]) : "r"(scales_from));
    const u8 *rows[2] = {supply.entry(supply.first), supply.entry(supply.second)};
    Four x = load(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Four next;
        if (i < 3) next = load(from + 16 * (i + 1));
        if (ASKS) supply.ask_piece(slot, rows, i, asks);
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
    u32 tile = 0;  // so far
    int numbers = lane_tiles(a, blockIdx.x);
    supply.read_places(supply.places_of(blockIdx.x));
    supply.ask_item(0, blockIdx.x);
#pragma unroll 1
    for (int item = blockIdx.x; item < int(a.items); item += gridDim.x) {
        const int next = item + gridDim.x, window_tiles = __shfl_sync(~0u, numbers, 0);
        const int entry_tiles = __shfl_sync(~0u, numbers, 1) - window_tiles;
        const u64 *places = supply.places_of(item);
        numbers = lane_tiles(a, next);
#pragma unroll 1
        for (int left = window_tiles - 1; left >= 0; --left, ++tile) {
            const u32 buffer = tile & 1, to = keys + buffer * TILE;
#pragma unroll 1
            for (u32 half = 0; half < 2; ++half) {
                const u32 from = line + supply.filled();
                if (half == 0) {
                    supply.ask_window(supply.second);
                    places += left ? KEYS : KEYS * (int(a.window_tiles) - window_tiles + 1);
                    supply.read_places(left || entry_tiles ? places : supply.places_of(next));
                } else if (left == 0 && entry_tiles) {
                    supply.ask_entries(tile + 1);
                    places += KEYS;
                    supply.read_places(entry_tiles > 1 ? places : supply.places_of(next));
                } else {
                    supply.ask_item(tile + 1, left ? item : next);
                }
                supply.wait_rows<1>();
                if (tile >= 2) wait(used(shared, buffer, half), (tile / 2 - 1) & 1);
                widen_window(from + part * 128, from + DIM + part * 4, to + half * HALF);
                __syncwarp();
            }
            publish();
            warp_arrive(widened(shared, buffer));
        }
#pragma unroll 1
        for (int left = entry_tiles - 1; left >= 0; --left, ++tile) {
            const u32 buffer = tile & 1, to = keys + buffer * TILE, from = line + supply.filled();
            supply.wait_rows<0>();
            u32 slot = 0;
            if (left) supply.note_seen(tile + 1), slot = supply.next_slot();
            else supply.ask_item(tile + 1, next);
            if (tile >= 2) wait(used(shared, buffer, 0), (tile / 2 - 1) & 1);
            widen_entries<true>(from + part * 64, from + DIM / 2 + part * 8, to, supply, slot, left);
            if (left) {
                supply.commit();
                places += KEYS;
                supply.read_places(left > 1 ? places : supply.places_of(next));
            }
            if (tile >= 2) wait(used(shared, buffer, 1), (tile / 2 - 1) & 1);
            const u32 last = from + ENTRY_ROW;
            widen_entries<false>(last + part * 64, last + DIM / 2 + part * 8, to + HALF, supply, 0, false);
            publish();
            warp_arrive(widened(shared, buffer));
        }
    }
}
