// Attention of one token's 64 heads, each of 512 columns, over its window and its selected entries, read as packed.
//
// Tiles of 64 keys pass through three kinds of warp groups: one widens packed rows to bf16 in shared memory, one
// multiplies them with the queries and keeps the online softmax (Milakov and Gimelshein, arXiv:1805.02867), two sum the
// same rows by their shares, 256 columns each. Two tiles are in flight. A token's result does not rest on the batch.
//
// Inside every eight columns keys and queries are in the order 0 4 1 5 2 6 3 7, which two shifts of a word of FP4
// codes give; results are put back in order when they are written. Keys are kept times 2^-16, so that the factor
// that makes a bf16 of bits shifted into place stays a bf16 whatever a row's scale.

#include "hopper.cuh"

constexpr int DIM = 512, HEADS = 64, KEYS = 64, MAX_KEYS = 2048;
constexpr int THREADS = 4 * GROUP;
constexpr int WINDOW_ROW = DIM / 32 * 33, ENTRY_ROW = DIM / 16 * 9;
constexpr u32 PANEL = 8192, TILE = 65536, SHARES = 8192;  // bytes: 64 rows of 64 columns; of all columns; of 64 keys
constexpr u32 QUERY_AT = 0, KEYS_AT = TILE, SHARES_AT = KEYS_AT + 2 * TILE, PLACES_AT = SHARES_AT + 2 * SHARES;
constexpr u32 SEEN_AT = PLACES_AT + 8 * MAX_KEYS, DECAYS_AT = SEEN_AT + MAX_KEYS / 8;
constexpr u32 TOTALS_AT = DECAYS_AT + 2 * 4 * HEADS, BARRIERS_AT = TOTALS_AT + 4 * HEADS;
constexpr float UNIT = 65536.0f, LOG2_E = 1.4426950408889634f;

struct Arguments {
    const u16 *q;       // [tokens, heads, 512] bf16
    const float *sink;  // [heads]
    u16 *out;           // [tokens, heads, 512] bf16
    const float *frequencies;
    const u8 *rows, *ring, *pages;
    const int *entries, *positions, *token_rows, *row_offsets, *row_starts, *row_slots, *window_starts, *table;
    long ring_length, ring_stride, num_slots, page_stride, num_blocks, per_block, table_columns, num_entries;
    long heads, window, span, window_tile, num_keys, rope;
};

// scores [64, 64] = or += queries [64, 16] keys [64, 16]^T
__device__ inline void score_product(float (&d)[32], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31}, %32, %33, adds, 1, 1, 0, 0;\n}"
        : ACC32(d, 0)
        : "l"(a), "l"(b), "r"(int(adds)));
}

// sums [64, 128] += shares [64, 16] keys [16, 128]
__device__ inline void value_product(float *d, u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
        "%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 1;"
        : ACC32(d, 0), ACC32(d, 32)
        : "l"(a), "l"(b));
}

// Barriers of a buffer: its keys are there; their shares are there; both were used.
__device__ inline u32 widened(u32 shared, u32 buffer) { return shared + BARRIERS_AT + 8 * buffer; }
__device__ inline u32 shared_out(u32 shared, u32 buffer) { return shared + BARRIERS_AT + 16 + 8 * buffer; }
__device__ inline u32 used(u32 shared, u32 buffer) { return shared + BARRIERS_AT + 32 + 8 * buffer; }

// ---- bits

__device__ inline u32 times(u32 x, u32 y) {  // two bf16 each; exact where a bf16 holds the product
    u32 z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ inline float low_half(u32 x) { return __uint_as_float(x << 16); }
__device__ inline float high_half(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }
__device__ inline u32 halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }       // low halves of both
__device__ inline u32 high_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }  // high halves of both

__device__ inline float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Bytes from a tile's start to 16 bytes of a row: `piece` 0 .. 63 counts eight columns each.
__device__ inline u32 place_of(int row, int piece) {
    return u32(piece / 8) * PANEL + u32(row) * 128 + u32((piece % 8) ^ (row % 8)) * 16;
}

// ---- widening

// Eight FP4 codes, times 2^-126 and a factor.
__device__ inline Four widened_word(u32 x, u32 factor) {
    constexpr u32 SIZE = 0x01C001C0u, SIGN = 0x80008000u;
    return {times((x << 6 & SIZE) | (x << 12 & SIGN), factor), times((x << 2 & SIZE) | (x << 8 & SIGN), factor),
            times((x >> 2 & SIZE) | (x << 4 & SIGN), factor), times((x >> 6 & SIZE) | (x & SIGN), factor)};
}

// bf16 factors of two e4m3 scales, times 2^110.
__device__ inline u32 factors_of(u32 scales) {
    constexpr u32 RAISE = 0x79007900u;  // 2^115, twice
    u32 bits = (scales & 0x7F) << 4 | (scales & 0x7F00) << 12;
    return times(times(bits, RAISE), RAISE);
}

// Four e4m3 codes of each of two words, code i of both in one register, times 2^-120 and a factor of 2^104.
__device__ inline Four widened_codes(u32 x, u32 y, u32 factor) {
    constexpr u32 SIZE = 0x07F007F0u, SIGN = 0x80008000u, RAISE = 0x71807180u;  // 2^100
    u32 wide[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 pair = __byte_perm(x, y, i | i << 4 | (4 + i) << 8 | (4 + i) << 12);
        wide[i] = times(times((pair << 4 & SIZE) | (pair << 8 & SIGN), RAISE), factor);
    }
    return {wide[0], wide[1], wide[2], wide[3]};
}

// ---- what a token sees

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

__device__ inline const u8 *entry_place(const Arguments &a, int token, int row, int number) {
    const int per_block = int(a.per_block);
    const int entry = number < a.num_entries ? a.entries[token * a.num_entries + number] : -1;
    if (entry < 0 || entry / per_block >= a.table_columns) return nullptr;
    const int block = a.table[row * a.table_columns + entry / per_block];
    if (block < 0 || block >= a.num_blocks) return nullptr;
    return a.pages + block * a.page_stride + entry % per_block * ENTRY_ROW;
}

// ---- the roles

// Notes where a key lies and, a warp at a time, which of them a token sees. Where there is no key, a row of `others` is
// read instead: whatever it holds is finite, and its share is none.
__device__ inline void note_place(u8 *memory, int key, const u8 *place, const u8 *others) {
    const u32 seen = __ballot_sync(~0u, place != nullptr);
    if (!place) place = others;
    reinterpret_cast<const u8 **>(memory + PLACES_AT)[key] = place;
    if (key % 32 == 0) reinterpret_cast<u32 *>(memory + SEEN_AT)[key / 32] = seen;
}

__device__ inline void load_queries(const Arguments &a, u32 shared, int thread) {
    const u16 *q = a.q + (blockIdx.x * a.heads + long(blockIdx.y) * HEADS) * DIM;
#pragma unroll 8
    for (int piece = thread; piece < HEADS * DIM / 8; piece += GROUP) {
        Four x = fetch(q + piece * 8);
        x = {halves(x.a, x.c), high_halves(x.a, x.c), halves(x.b, x.d), high_halves(x.b, x.d)};
        store(shared + QUERY_AT + place_of(piece / 64, piece % 64), x);
    }
    publish();
    asm volatile("bar.sync 4, 128;" ::: "memory");
}

__device__ inline void find_window(const Arguments &a, u8 *memory, int thread) {
    const int token = blockIdx.x, row = a.token_rows[token];
    for (int key = thread; key < a.window_tile; key += GROUP)
        note_place(memory, key, window_place(a, token, row, key), a.rows);
    asm volatile("bar.sync 3, 128;" ::: "memory");
}

// Several keys a thread at once: each takes three reads, one after the other.
__device__ inline void find_entries(const Arguments &a, u8 *memory, int thread) {
    constexpr int AT_ONCE = 2, STEP = 2 * GROUP;
    const int token = blockIdx.x, row = a.token_rows[token], first = int(a.window_tile);
    if (first == a.num_keys) return;
    for (int key = first + thread; key < a.num_keys; key += AT_ONCE * STEP) {
        const u8 *places[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) places[i] = entry_place(a, token, row, key + i * STEP - first);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (key + i * STEP < a.num_keys) note_place(memory, key + i * STEP, places[i], a.pages);
    }
    asm volatile("bar.arrive 2, 384;" ::: "memory");
}

// A thread widens two keys of a tile, `row` and `row` + 8, of each four of 16 stretches of 32 columns: every fourth, from
// `quarter` on. Eight neighbouring lanes hold eight keys, so their stores meet all banks.

// 16 columns of a window row as they are packed.
struct PackedWindow {
    Four codes;
    u32 exponent;
};

__device__ inline PackedWindow packed_window(const u8 *from, int chunk) {
    u32 exponent;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(exponent) : "l"(from + DIM + chunk / 2));
    return {fetch(from + 16 * chunk), exponent};
}

// 32 columns of an entry as they are packed.
struct Packed {
    Four codes;
    u32 scales;  // two e4m3
};

__device__ inline Packed packed(const u8 *from, int chunk) {
    u16 scales;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(scales) : "l"(from + DIM / 2 + 2 * chunk));
    return {fetch(from + 16 * chunk), scales};
}

__device__ inline void widen(const Arguments &a, u32 shared, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 8, quarter = lane / 8;
    const int num_tiles = a.num_keys / KEYS, window_tiles = a.window_tile / KEYS;
    const auto place = [&](int tile, int second) {
        u64 at;
        const int key = tile * KEYS + row + 8 * second;
        asm volatile("ld.shared.b64 %0, [%1];" : "=l"(at) : "r"(shared + PLACES_AT + 8 * key));
        return reinterpret_cast<const u8 *>(at);
    };
    const auto begin = [&](int tile) {
        if (tile >= 2) wait(used(shared, tile & 1), (tile / 2 - 1) & 1);
        return shared + KEYS_AT + (tile & 1) * TILE;
    };
    const auto end = [&](int tile) {
        publish();
        warp_arrive(widened(shared, tile & 1));
    };
#pragma unroll 1
    for (int tile = 0; tile < window_tiles; ++tile) {
        PackedWindow parts[2][8];
#pragma unroll
        for (int i = 0; i < 16; ++i) parts[i / 8][i % 8] = packed_window(place(tile, i / 8), 4 * (i % 8) + quarter);
        const u32 keys = begin(tile) + row * 128 + u32((2 * quarter) ^ (row % 8)) * 16;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int second = 0; second < 2; ++second) {
                const PackedWindow &part = parts[second][i];
                const u32 factor = min(part.exponent + 4, 254u) * 0x00800080u, at = keys + second * 1024 + i * PANEL;
                store(at, widened_codes(part.codes.a, part.codes.b, factor));
                store(at ^ 16, widened_codes(part.codes.c, part.codes.d, factor));
            }
        }
        end(tile);
    }
    if (window_tiles == num_tiles) return;
    asm volatile("bar.sync 2, 384;" ::: "memory");
    const u32 own = quarter / 2 * PANEL + row * 128 + u32((quarter % 2 * 4) ^ (row % 8)) * 16;
    Packed parts[8], ahead[8];  // of this tile, and of the next, which are on their way while this one is widened
    const auto look_ahead = [&](int tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) ahead[i] = packed(place(tile, i % 2), i / 2 * 4 + quarter);
    };
    look_ahead(window_tiles);
#pragma unroll 1
    for (int tile = window_tiles; tile < num_tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) parts[i] = ahead[i];
        look_ahead(min(tile + 1, num_tiles - 1));
        const u32 keys = begin(tile) + own;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 factors = factors_of(parts[i].scales), at = keys + i % 2 * 1024 + i / 2 * 2 * PANEL;
            const u32 first = halves(factors, factors), last = high_halves(factors, factors);
            store(at, widened_word(parts[i].codes.a, first));
            store(at ^ 16, widened_word(parts[i].codes.b, first));
            store(at ^ 32, widened_word(parts[i].codes.c, last));
            store(at ^ 48, widened_word(parts[i].codes.d, last));
        }
        end(tile);
    }
}

__device__ inline void share(const Arguments &a, u32 shared, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
    const int num_tiles = a.num_keys / KEYS;
    const float scale = UNIT * LOG2_E * 0.04419417382415922f;  // 512^-0.5
    float peak[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};
    for (int tile = 0; tile < num_tiles; ++tile) {
        const u32 buffer = tile & 1, keys = shared + KEYS_AT + buffer * TILE;
        wait(widened(shared, buffer), tile / 2 & 1);
        float score[32];
        products_begin();
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
            u32 at = step / 4 * PANEL + step % 4 * 32;
            score_product(score, matrix(shared + QUERY_AT + at, 16), matrix(keys + at, 16), step > 0);
        }
        products_end();
        u32 seen[2];
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(seen[0]), "=r"(seen[1]) : "r"(shared + SEEN_AT + 8 * tile));
        if ((seen[0] & seen[1]) != 0xFFFFFFFFu) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                u32 key = i / 4 * 8 + column + (i & 1);
                if (!(seen[i / 16] >> (key % 32) & 1)) score[i] = -__int_as_float(0x7F800000);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows `row` and `row` + 8
            float best = score[2 * half];
#pragma unroll
            for (int i = 0; i < 16; ++i) best = fmaxf(best, score[i / 2 * 4 + 2 * half + (i & 1)]);
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(peak[half], fmaxf(best, __shfl_xor_sync(~0u, best, 2)) * scale);
            float decay = power_of_2(peak[half] - best), sum = 0.0f;
            const u32 line = shared + SHARES_AT + buffer * SHARES + (row + 8 * half) * 128;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float first = power_of_2(score[4 * j + 2 * half] * scale - best);
                float second = power_of_2(score[4 * j + 2 * half + 1] * scale - best);
                sum += first + second;
                u32 at = line + u32(j ^ (row % 8)) * 16 + lane % 4 * 4;
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(two_bf16(first, second)) : "memory");
            }
            total[half] = total[half] * decay + sum;
            peak[half] = best;
            if (lane % 4 == 0) {
                u32 at = shared + DECAYS_AT + buffer * 4 * HEADS + 4 * (row + 8 * half);
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(decay) : "memory");
            }
        }
        publish();
        warp_arrive(shared_out(shared, buffer));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = total[half] + __shfl_xor_sync(~0u, total[half], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        sum += power_of_2(a.sink[blockIdx.y * HEADS + row + 8 * half] * LOG2_E - peak[half]);
        u32 at = shared + TOTALS_AT + 4 * (row + 8 * half);
        if (lane % 4 == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(UNIT / sum) : "memory");
    }
    asm volatile("bar.sync 1, 384;" ::: "memory");
}

// A pair of columns turned back by an angle.
__device__ inline u32 turned_back(u32 pair, float cosine, float sine) {
    const float first = low_half(pair), second = high_half(pair);
    return two_bf16(first * cosine + second * sine, second * cosine - first * sine);
}

__device__ inline void sum_values(const Arguments &a, u32 shared, int thread, int part) {
    const int lane = thread % 32, warp = thread / 32, row = warp * 16 + lane / 4, num_tiles = a.num_keys / KEYS;
    float sums[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
    for (int tile = 0; tile < num_tiles; ++tile) {
        const u32 buffer = tile & 1, keys = shared + KEYS_AT + buffer * TILE + part * 4 * PANEL;
        wait(shared_out(shared, buffer), tile / 2 & 1);
        float upper, lower;
        u32 at = shared + DECAYS_AT + buffer * 4 * HEADS + 4 * row;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(upper) : "r"(at));
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(lower) : "r"(at + 32));
        if (__any_sync(~0u, upper != 1.0f || lower != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; ++i) sums[i] *= i & 2 ? lower : upper;
        }
        products_begin();
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            const u64 shares = matrix(shared + SHARES_AT + buffer * SHARES + step * 32, 16);
            value_product(sums, shares, matrix(keys + step * 2048, PANEL));
            value_product(sums + 64, shares, matrix(keys + 2 * PANEL + step * 2048, PANEL));
        }
        products_end();
        warp_arrive(used(shared, buffer));
    }
    asm volatile("bar.sync 1, 384;" ::: "memory");
    float upper, lower;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(upper) : "r"(shared + TOTALS_AT + 4 * row));
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(lower) : "r"(shared + TOTALS_AT + 4 * row + 32));
    const u32 stage = shared + QUERY_AT + part * TILE / 2;  // [64 heads, 256 columns], pieces swizzled by the row
    const int stored = warp * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
        u32 at = stage + stored * 512 + u32((j + lane / 16) ^ (stored % 8)) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
                     "r"(two_bf16(sums[4 * j] * upper, sums[4 * j + 1] * upper)),
                     "r"(two_bf16(sums[4 * j + 2] * lower, sums[4 * j + 3] * lower)),
                     "r"(two_bf16(sums[4 * j + 4] * upper, sums[4 * j + 5] * upper)),
                     "r"(two_bf16(sums[4 * j + 6] * lower, sums[4 * j + 7] * lower))
                     : "memory");
    }
    __syncwarp();
    const long token = blockIdx.x;
    const int first = part * 256 + lane * 8 - (DIM - int(a.rope));  // of the columns that turn
    float cosines[4], sines[4];
    if (first >= 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float angle = float(a.positions[token]) * a.frequencies[first / 2 + i];
            cosines[i] = cosf(angle), sines[i] = sinf(angle);
        }
    }
    u16 *to = a.out + ((token * a.heads + blockIdx.y * HEADS + warp * 16) * DIM + part * 256 + lane * 8);
#pragma unroll 4
    for (int i = 0; i < 16; ++i, to += DIM) {
        Four x = load(stage + (warp * 16 + i) * 512 + u32(lane ^ (i % 8)) * 16);
        x = {halves(x.a, x.b), halves(x.c, x.d), high_halves(x.a, x.b), high_halves(x.c, x.d)};
        if (first >= 0) {
            x = {turned_back(x.a, cosines[0], sines[0]), turned_back(x.b, cosines[1], sines[1]),
                 turned_back(x.c, cosines[2], sines[2]), turned_back(x.d, cosines[3], sines[3])};
        }
        *reinterpret_cast<uint4 *>(to) = make_uint4(x.a, x.b, x.c, x.d);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = u32(__cvta_generic_to_shared(memory));
    const int thread = threadIdx.x, group = thread / GROUP;
    if (thread == 0) {
        for (int buffer = 0; buffer < 2; ++buffer) {
            init(widened(shared, buffer), GROUP / 32);
            init(shared_out(shared, buffer), GROUP / 32);
            init(used(shared, buffer), 2 * GROUP / 32);
        }
    }
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        load_queries(a, shared, thread);
        share(a, shared, thread);
    } else if (group < 3) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        find_entries(a, memory, thread - GROUP);
        sum_values(a, shared, thread % GROUP, group - 1);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        find_window(a, memory, thread - 3 * GROUP);
        widen(a, shared, thread - 3 * GROUP);
    }
}
