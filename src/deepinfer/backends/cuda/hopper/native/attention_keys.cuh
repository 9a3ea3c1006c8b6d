// Keys of the attention kernel: their way into shared memory as packed, and there widened to bf16.
//
// Each of four warps brings and widens the same four rows of every 16 of a tile, so warps wait for nobody but the
// products. A warp asks for a unit of packed rows, eight entries or four window rows, and widens it UNITS units later;
// with it come the places of keys three tiles further on. Units go on from one item to the next.

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

// bf16 factors of two e4m3 scales, times 2^110.
__device__ inline u32 factors_of(u32 scales) {
    constexpr u32 RAISE = 0x79007900u;  // 2^115, twice
    const u32 bits = (scales & 0x7F) << 4 | (scales & 0x7F00) << 12;
    return times(times(bits, RAISE), RAISE);
}

// Code i of each of two words of four e4m3 codes, times 2^-120 and a factor of 2^104.
__device__ inline u32 code_pair(u32 x, u32 y, int i, u32 factor) {
    constexpr u32 SIZE = 0x07F007F0u, SIGN = 0x80008000u, RAISE = 0x71807180u;  // 2^100
    const u32 pair = __byte_perm(x, y, i | i << 4 | (4 + i) << 8 | (4 + i) << 12);
    return times(times((pair << 4 & SIZE) | (pair & SIGN), RAISE), factor);
}

// ---- packed rows on their way

__device__ inline void copy_piece(u32 to, const void *from) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Units in the order of a block's items: four of queries (four rows, their last 256 columns), then those of keys.
struct Supply {
    const Arguments &a;
    const u32 shared, places;   // places: four tiles, 16 keys each
    const int warp, lane;
    int item, entry;            // the next unit to be asked for: its item, and number, 0 at the item's first entries
    u32 tile;                   // of the unit, of all so far
    int place_item, next_tile;  // whose places are asked for next
    const u64 *next_places;     // two keys a lane

    __device__ Supply(const Arguments &a, u32 shared, int warp, int lane)
        : a(a), shared(shared), places(shared + PLACES_AT + warp * 512), warp(warp), lane(lane), item(blockIdx.x),
          entry(-int(a.first_entry)), tile(0), place_item(blockIdx.x), next_tile(0) {
        next_item();
        for (u32 i = 0; i < 3; ++i) ask_places(i);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }

    __device__ void next_item() {
        const int token = int(a.groups) == 1 ? place_item : place_item / int(a.groups);
        next_places = a.places + token * a.num_tiles * KEYS + warp * 4 + lane / 2 * 16 + lane % 2 * 2;
    }

    __device__ void ask_places(u32 tile) {
        if (place_item >= int(a.items)) return;
        if (lane < 8) copy_piece(places + tile % 4 * 128 + lane * 16, next_places);
        next_places += KEYS;
        if (++next_tile < int(a.num_tiles)) return;
        next_tile = 0, place_item += gridDim.x;
        next_item();
    }

    // A new tile: notes which keys the token sees, and asks for places.
    __device__ void begin_tile() {
        u32 place;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(place) : "r"(places + tile % 4 * 128 + lane % 16 * 8));
        const u32 seen = __ballot_sync(~0u, (place & 1) == 0), to = shared + SEEN_AT + tile % 8 * 8 + warp * 2;
        if (lane == 0) asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(u16(seen)) : "memory");
        ask_places(tile + 3);
    }

    __device__ const u8 *place(int key) const {
        u64 at;
        asm volatile("ld.shared.b64 %0, [%1];" : "=l"(at) : "r"(places + tile % 4 * 128 + key * 8));
        return reinterpret_cast<const u8 *>(at & ~1ull);
    }

    // Asks for the next unit; after the last, UNITS times for nothing, before `entry` would come to entries again.
    // `to`: bytes of this warp that are free.
    __device__ void ask(u32 to) {
        if (entry >= 0) ask_entries(to);
        else if (item < int(a.items)) ask_rows(to);
        if (++entry == int(a.entry_units)) entry = -int(a.first_entry), item += gridDim.x;
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ void ask_entries(u32 to) {
        const int row = lane / 4, part = lane % 4, second = entry & 1;
        if (!second) begin_tile();
        const u8 *from = place(second * 8 + row) + part * 16;
        to += row * ENTRY_ROW + part * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_piece(to + 64 * i, from + 64 * i);
        if (part < 2) copy_piece(to + 256, from + 256);
        tile += second;
    }

    // Of queries or of a window.
    __device__ void ask_rows(u32 to) {
        const int row = lane / 8, part = lane % 8, unit = entry + int(a.first_entry);
        const u8 *from;
        to += row * WINDOW_ROW + part * 16;
        if (unit < 4) {
            const long head = long(item) * HEADS + unit * 16 + warp * 4 + row;
            from = reinterpret_cast<const u8 *>(a.q + head * DIM + DIM / 2);
            for (int i = 0; i < 2; ++i) prefetch(from - 512 + part * 32 + 256 * i);
        } else {
            if (unit % 4 == 0) begin_tile();
            from = place(unit % 4 * 4 + row);
            if (part == 0) copy_piece(to + DIM, from + DIM);
            tile += unit % 4 == 3;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_piece(to + 128 * i, from + part * 16 + 128 * i);
    }
};

// ---- widening. Of eight lanes that store at once, four have other rows, and two have other halves of 128 bytes, so
// that they meet all banks. `own`: bytes from 16 rows of a matrix to the first 16 bytes of an even or odd stretch of
// this lane's; the stretch's others are there with bits 4 and 5 changed.

struct Packed {
    Four x[4];
    u32 scales[4];
};

__device__ inline Packed load_query(u32 from) {
    Packed packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.x[i] = pairs_of(load(from + 16 * i));
    return packed;
}

__device__ inline void store_query(const Packed &packed, u32 to) {
    const Four *x = packed.x;
    store(to, {x[0].a, x[1].a, x[2].a, x[3].a});
    store(to ^ 16, {x[0].b, x[1].b, x[2].b, x[3].b});
    store(to ^ 32, {x[0].c, x[1].c, x[2].c, x[3].c});
    store(to ^ 48, {x[0].d, x[1].d, x[2].d, x[3].d});
}

// Two stretches of a window row, eight apart.
__device__ inline Packed load_window(u32 row, int stretch) {
    Packed packed;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 at = row + (stretch + 8 * i) * 32;
        packed.x[2 * i] = load(at), packed.x[2 * i + 1] = load(at + 16);
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(packed.scales[i]) : "r"(row + DIM + stretch + 8 * i));
    }
    return packed;
}

__device__ inline void widen_window(const Packed &packed, u32 to) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 factor = min(packed.scales[i] + 4, 254u) * 0x00800080u;
        const Four x = packed.x[2 * i], y = packed.x[2 * i + 1];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            store((to ^ (16 * j)) + i * 4 * PANEL, {code_pair(x.a, x.b, j, factor), code_pair(x.c, x.d, j, factor),
                                                    code_pair(y.a, y.b, j, factor), code_pair(y.c, y.d, j, factor)});
        }
    }
}

// Four stretches of an entry, four apart.
__device__ inline Packed load_entry(u32 row, int stretch) {
    Packed packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u16 two;
        packed.x[i] = load(row + (stretch + 4 * i) * 16);
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(two) : "r"(row + DIM / 2 + (stretch + 4 * i) * 2));
        packed.scales[i] = two;
    }
    return packed;
}

__device__ inline void widen_entry(const Packed &packed, u32 to) {
#pragma unroll
    for (int i = 0; i < 4; ++i, to += 2 * PANEL) {
        const u32 factors = factors_of(packed.scales[i]);
        const u32 first = halves(factors, factors), last = high_halves(factors, factors);
        const Four x = packed.x[i], y = {x.a >> 8, x.b >> 8, x.c >> 8, x.d >> 8};
        store(to, {even_pair(x.a, first), even_pair(x.b, first), even_pair(x.c, last), even_pair(x.d, last)});
        store(to ^ 16, {odd_pair(x.a, first), odd_pair(x.b, first), odd_pair(x.c, last), odd_pair(x.d, last)});
        store(to ^ 32, {even_pair(y.a, first), even_pair(y.b, first), even_pair(y.c, last), even_pair(y.d, last)});
        store(to ^ 48, {odd_pair(y.a, first), odd_pair(y.b, first), odd_pair(y.c, last), odd_pair(y.d, last)});
    }
}

__device__ inline void widen(const Arguments &a, u32 shared, int thread) {
    const int warp = thread / 32, row = thread % 4, half = thread / 4 % 2, other = thread % 32 / 8;
    const int line = warp * 4 + row, own = line * 128 + ((4 * half) ^ (line % 8)) * 16;
    const u32 units = shared + UNITS_AT + warp * UNITS * UNIT;
    const int first_entry = int(a.first_entry), num_units = first_entry + int(a.entry_units);
    Supply supply(a, shared, warp, thread % 32);
#pragma unroll 1
    for (int i = 0; i < UNITS; ++i) supply.ask(units + i * UNIT);
    u32 slot = 0, tile = 0, part = 0, items = 0;  // part: of a tile's four times 16 keys; tiles and items so far
#pragma unroll 1
    for (int item = blockIdx.x; item < int(a.items); item += gridDim.x, ++items) {
#pragma unroll 1
        for (int unit = 0; unit < num_units; ++unit) {
            asm volatile("cp.async.wait_group %0;" ::"n"(UNITS - 1) : "memory");
            __syncwarp();
            const u32 at = units + slot * UNIT, from = at + row * WINDOW_ROW;
            const bool is_query = unit < 4, is_entry = unit >= first_entry;
            Packed packed;
            if (is_entry) packed = load_entry(at + (other % 2 * 4 + row) * ENTRY_ROW, other / 2 * 2 + half);
            else if (is_query) packed = load_query(from + (2 * other + half) * 64);
            else packed = load_window(from, 2 * other + half);
            __syncwarp();
            supply.ask(at);
            if (++slot == UNITS) slot = 0;
            if (is_query) {
                if (unit == 0 && items) wait(queries_used(shared), (items - 1) & 1);
                store_query(packed, shared + QUERY_AT + other * PANEL + unit * 2048 + own);
                if (unit < 3) continue;
                publish();
                warp_arrive(queries_there(shared));
                continue;
            }
            const u32 buffer = tile & 1, keys = shared + KEYS_AT + buffer * TILE + part * 2048 + own;
            if (tile >= 2 && part % 2 == 0) wait(used(shared, buffer, part / 2), (tile / 2 - 1) & 1);
            if (is_entry) widen_entry(packed, keys + other % 2 * 2048 + other / 2 * PANEL);
            else widen_window(packed, keys + other * PANEL);
            part += is_entry ? 2 : 1;
            if (part < 4) continue;
            publish();
            warp_arrive(widened(shared, buffer));
            part = 0, ++tile;
        }
    }
}
