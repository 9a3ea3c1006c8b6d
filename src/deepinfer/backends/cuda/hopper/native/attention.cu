// Attention of one token's 64 heads, each of 512 columns, over its window and its selected entries, read as packed.
//
// Tiles of 64 keys pass through three kinds of warp groups: one widens packed rows to bf16 in shared memory, one
// multiplies them with the queries and keeps the online softmax (Milakov and Gimelshein, arXiv:1805.02867), two sum the
// same rows by their shares, 256 columns each. Two tiles are in flight. A block takes one item after another, each 64
// heads of a token, and begins with the next while it ends one. A token's result does not rest on the batch.

#include "attention_keys.cuh"

constexpr float SCALE = 65536.0f, LOG2_E = 1.4426950408889634f;  // keys are kept divided by SCALE

// ---- matrix instructions

#define SCORES                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31}"

// scores [64, 64] = or += queries [64, 16] keys [64, 16]^T, queries from registers or from shared memory
__device__ inline void score_product(float (&d)[32], const Four &a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SCORES ", {%32,%33,%34,%35}, %36, adds, 1, 1, 0;\n}"
        : ACC32(d, 0)
        : "r"(a.a), "r"(a.b), "r"(a.c), "r"(a.d), "l"(b), "r"(int(adds)));
}
__device__ inline void score_product(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SCORES ", %32, %33, 1, 1, 1, 0, 0;"
                 : ACC32(d, 0)
                 : "l"(a), "l"(b));
}

// sums [64, 128] = or += shares [64, 16] keys [16, 128]
__device__ inline void value_product(float *d, u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
        "%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, adds, 1, 1, 0, 1;\n}"
        : ACC32(d, 0), ACC32(d, 32)
        : "l"(a), "l"(b), "r"(int(adds)));
}

__device__ inline float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- scores and shares. A thread has rows `row` and `row` + 8 of the 64 heads.

// A stretch of an item's queries, 256 columns: pieces of eight, of either row in turn.
__device__ inline void fetch_queries(const Arguments &a, Four (&pieces)[16], int item, int row, int lane, int from) {
    const u16 *q = a.q + (long(item) * HEADS + row) * DIM + from + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 16; ++i) pieces[i] = fetch(q + i % 2 * 8 * DIM + i / 2 * 32);
}

// The last 256 columns of an item's queries go to shared memory; the first ones take their place.
__device__ inline void turn_over(const Arguments &a, Four (&pieces)[16], u32 shared, int item, int row, int lane) {
    const u16 *q = a.q + (long(item) * HEADS + row) * DIM + lane % 4 * 8;
    const u32 own = shared + QUERY_AT + row * 128 + row % 8 * 16 + lane % 4 * 4;
    group_meets();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const Four x = pairs_of(pieces[i]);
        const u32 words[4] = {x.a, x.b, x.c, x.d}, panel = i / 4 * PANEL + i % 2 * 1024;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            asm volatile("st.shared.b32 [%0], %1;" ::"r"((own ^ (i / 2 % 2 * 64 + j * 16)) + panel), "r"(words[j])
                         : "memory");
        pieces[i] = fetch(q + i % 2 * 8 * DIM + i / 2 * 32);
    }
    publish();
    group_meets();
}

// Scores of keys that the token does not see become none.
__device__ inline void hide(float (&score)[32], u32 seen, int column) {
    const Four x = load(seen), y = load(seen + 16);
    if ((x.a & x.b & x.c & x.d & y.a & y.b & y.c & y.d) == ~0u) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 keys;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(keys) : "r"(seen + 4 * i));
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (!(keys >> (4 * (column + j % 2)) & 1)) score[4 * i + j] = -__int_as_float(0x7F800000);
    }
}

// The highest of a row's scores in a thread.
__device__ inline float highest(const float *score) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fmaxf(score[4 * i], score[4 * i + 1]);
#pragma unroll
    for (int half = 4; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x[i] = fmaxf(x[i], x[i + half]);
    return x[0];
}

// Cosine and sine of an angle. Large ones, which would take thousands of cycles, lose whole quarters of a turn before.
__device__ inline float2 turn_of(float angle) {
    const double quarters = angle > 105615.0f ? rint(angle * 0.63661977236758134308) : 0.0;
    const float rest = float(fma(-quarters, 6.1232339957367660e-17, fma(-quarters, 1.5707963267948966, double(angle))));
    const float x = cosf(rest), y = sinf(rest);
    const int quarter = int(quarters);
    const float2 turn = quarter & 1 ? float2{-y, x} : float2{x, y};
    return quarter & 2 ? float2{-turn.x, -turn.y} : turn;
}

// How a pair of columns is turned back in the results of an item. One table for each of four items: shares are at most
// two tiles ahead of sums, which is two items where an item has one tile, and sums write the item before then.
__device__ inline void store_turn(u32 shared, u32 items, int pair, float2 turn) {
    const u32 at = shared + TURNS_AT + (items % 4 * MAX_TURNS + pair) * 8;
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(turn.x), "f"(turn.y) : "memory");
}

__device__ inline void share(const Arguments &a, u32 shared, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2, turns = int(a.rope) / 2;
    const float scale = SCALE * LOG2_E * 0.04419417382415922f;  // 512^-0.5
    u32 tile = 0, items = 0;                                    // so far
    int num_tiles = tiles_of(a, blockIdx.x);
    Four pieces[16];
    fetch_queries(a, pieces, blockIdx.x, row, lane, DIM / 2);
    turn_over(a, pieces, shared, blockIdx.x, row, lane);
#pragma unroll 1
    for (int item = blockIdx.x; item < int(a.items); item += gridDim.x, ++items) {
        const int token = token_of(a, item), head = item % int(a.groups) * HEADS + row;
        const int next = within(a, item + gridDim.x), next_tiles = tiles_of(a, next);
        if (thread == 0) prefetch(a.q + long(next) * HEADS * DIM, HEADS * DIM * 2);
        const float angle = thread < turns ? float(a.positions[token]) * a.frequencies[thread] : 0.0f;
        const float sinks[2] = {a.sink[head] * LOG2_E, a.sink[head + 8] * LOG2_E};
#pragma unroll
        for (int i = 0; i < 16; i += 2) {  // in pairs of 16 columns, as the matrix unit wants them
            const Four x = pairs_of(pieces[i]), y = pairs_of(pieces[i + 1]);
            pieces[i] = {x.a, y.a, x.b, y.b}, pieces[i + 1] = {x.c, y.c, x.d, y.d};
        }
        float score[32], peak[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (int left = num_tiles - 1; left >= 0; --left, ++tile) {
            const u32 buffer = tile & 1, keys = shared + KEYS_AT + buffer * TILE;
            wait(widened(shared, buffer), tile / 2 & 1);
            products_begin();
#pragma unroll
            for (int step = 0; step < 16; ++step)
                score_product(score, pieces[step], matrix(keys + step / 4 * PANEL + step % 4 * 32, 16), step > 0);
#pragma unroll
            for (int step = 0; step < 16; ++step) {
                const u32 at = step / 4 * PANEL + step % 4 * 32;
                score_product(score, matrix(shared + QUERY_AT + at, 16), matrix(keys + 4 * PANEL + at, 16));
            }
            products_commit();
            if (left == num_tiles - 1 && thread < turns) store_turn(shared, items, thread, turn_of(angle));
            products_wait();
            if (left == 0) fetch_queries(a, pieces, next, row, lane, DIM / 2);
            hide(score, seen(shared, tile), column);
            float best[2] = {highest(score), highest(score + 2)};
#pragma unroll
            for (int far = 1; far < 4; far *= 2)
                for (float &x : best) x = fmaxf(x, __shfl_xor_sync(~0u, x, far));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float last = peak[half];
                peak[half] = fmaxf(last, best[half] * scale);
                const float decay = power_of_2(last - peak[half]);
                const u32 line = shared + SHARES_AT + buffer * SHARES + (row + 8 * half) * 128;
                const u32 own = line + row % 8 * 16 + lane % 4 * 4;
                float sums[2] = {0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float first = power_of_2(score[4 * j + 2 * half] * scale - peak[half]);
                    const float second = power_of_2(score[4 * j + 2 * half + 1] * scale - peak[half]);
                    sums[0] += first, sums[1] += second;
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(own ^ (16 * j)), "r"(two_bf16(first, second))
                                 : "memory");
                }
                total[half] = total[half] * decay + (sums[0] + sums[1]);
                const u32 at = shared + buffer * 4 * HEADS + 4 * (row + 8 * half);
                if (lane % 4 == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(at + DECAYS_AT), "f"(decay) : "memory");
                if (left == 0) {
                    float sum = total[half] + __shfl_xor_sync(~0u, total[half], 1);
                    sum += __shfl_xor_sync(~0u, sum, 2);
                    sum += power_of_2(sinks[half] - peak[half]);
                    if (lane % 4 == 0)
                        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at + TOTALS_AT), "f"(SCALE / sum) : "memory");
                }
            }
            publish();
            warp_arrive(shared_out(shared, buffer));
        }
        turn_over(a, pieces, shared, next, row, lane);
        num_tiles = next_tiles;
    }
}

// ---- sums of values, 256 columns a group

// Two columns that a turn goes over, as they were before it.
__device__ inline u32 turned_back(u32 pair, float cosine, float sine) {
    const float first = low_half(pair), second = high_half(pair);
    return two_bf16(first * cosine + second * sine, second * cosine - first * sine);
}

// The larger size of two bf16 each, with some sign.
__device__ inline u32 larger(u32 x, u32 y) {
    u32 z;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// Exponent byte of the smallest scale on which e4m3 holds a size, as in `quant.py`; 255 for infinity.
__device__ inline u32 exponent_of(float size) {
    return min(((__float_as_uint(fmaxf(size, 1e-4f) * 0.002232142857142857f) - 1) >> 23) + 1, 255u);
}

__device__ inline u32 two_e4m3(u32 pair) {
    u16 z;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(z) : "f"(high_half(pair)), "f"(low_half(pair)));
    return z;
}

// Results of an item, which a warp has of two groups of eight heads: rounded to bf16, turned back, then rounded to e4m3
// on the scale of the largest of a group, of which the other part of the columns is another warp's. A thread has pieces
// of eight columns, of rows `row` and `row` + 8. At most the last four stretches turn.
__device__ inline void write_sums(const Arguments &a, u32 shared, const float (&sums)[128], const float (&factors)[2],
                                  int item, u32 items, int part, int warp, int lane) {
    const u32 turns = shared + TURNS_AT + items % 4 * 8 * MAX_TURNS;
    Four y[8][2];
    u32 largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int first = part * 256 + lane % 4 * 8 + i * 32 - (DIM - int(a.rope));  // of the columns that turn
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float *x = sums + 16 * i + 2 * half, factor = factors[half];
            Four &z = y[i][half];
            z = {two_bf16(x[0] * factor, x[4] * factor), two_bf16(x[8] * factor, x[12] * factor),
                 two_bf16(x[1] * factor, x[5] * factor), two_bf16(x[9] * factor, x[13] * factor)};
            if (i >= 8 - 2 * MAX_TURNS / 32 && first >= 0) {
                const Four s = load(turns + first * 4), t = load(turns + first * 4 + 16);
                z = {turned_back(z.a, __uint_as_float(s.a), __uint_as_float(s.b)),
                     turned_back(z.b, __uint_as_float(s.c), __uint_as_float(s.d)),
                     turned_back(z.c, __uint_as_float(t.a), __uint_as_float(t.b)),
                     turned_back(z.d, __uint_as_float(t.c), __uint_as_float(t.d))};
            }
            largest[half] = larger(largest[half], larger(larger(z.a, z.b), larger(z.c, z.d)));
        }
    }
    // Two places, in turn: a warp is at most one item ahead of the other.
    const u32 at = shared + LARGEST_AT + items % 2 * 64 + warp * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        largest[half] = __reduce_max_sync(~0u, max(largest[half] & 0x7FFF, largest[half] >> 16 & 0x7FFF));
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + part * 32 + half * 4), "r"(largest[half]) : "memory");
    }
    warps_meet(warp);
    // Lines of 128 columns of a token; a head has four of them, 32 columns of a line are a thread's stretch.
    const u32 token = token_of(a, item), size = u32(a.size), lines = u32(a.groups) * (HEADS / GROUP_HEADS) * size;
    const u32 place = ((item - token * u32(a.groups)) * (HEADS / GROUP_HEADS) + warp * 2) * size + token;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 other;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(other) : "r"(at + (part ^ 1) * 32 + half * 4));
        const u32 exponent = exponent_of(__uint_as_float(max(largest[half], other) << 16));
        const u32 factor = (254 - min(exponent, 253u)) * 0x00800080u;
        if (part + lane == 0) a.scale[place + half * size] = __uint_as_float(exponent << 23);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Four &z = y[i][half];
            const u32 line = (lane / 4 * 4 + part * 2 + i / 4) * lines + place + half * size;
            const u64 to = u64(a.codes) + u64(line) * 128 + ((lane % 4 / 2 ^ token % 8) * 16 + lane % 2 * 8);
            asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(to ^ i % 4 * 32),
                         "r"(halves(two_e4m3(times(z.a, factor)), two_e4m3(times(z.b, factor)))),
                         "r"(halves(two_e4m3(times(z.c, factor)), two_e4m3(times(z.d, factor))))
                         : "memory");
        }
    }
}

__device__ inline void sum_values(const Arguments &a, u32 shared, int thread, int part) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    u32 tile = 0, items = 0;  // so far
    int num_tiles = tiles_of(a, blockIdx.x);
    for (int item = blockIdx.x; item < int(a.items); item += gridDim.x, ++items) {
        const int next_tiles = tiles_of(a, item + gridDim.x);
        float sums[128] = {}, factors[2];  // zero: else the compiler keeps those of the item before, and spills
#pragma unroll 1
        for (int i = 0; i < num_tiles; ++i, ++tile) {
            const u32 buffer = tile & 1, keys = shared + KEYS_AT + buffer * TILE + part * 4 * PANEL;
            wait(shared_out(shared, buffer), tile / 2 & 1);
            const u32 at = shared + buffer * 4 * HEADS + 4 * row;
            float decays[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(decays[half]) : "r"(at + DECAYS_AT + 32 * half));
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(factors[half]) : "r"(at + TOTALS_AT + 32 * half));
            }
            if (i > 0 && __any_sync(~0u, decays[0] != 1.0f || decays[1] != 1.0f)) {
#pragma unroll
                for (int j = 0; j < 128; ++j) sums[j] *= decays[j / 2 % 2];
            }
            products_begin();
#pragma unroll
            for (int step = 0; step < KEYS / 16; ++step) {
                const u64 shares = matrix(shared + SHARES_AT + buffer * SHARES + step * 32, 16);
                const bool adds = i > 0 || step > 0;
                value_product(sums, shares, matrix(keys + step * 2048, PANEL), adds);
                value_product(sums + 64, shares, matrix(keys + 2 * PANEL + step * 2048, PANEL), adds);
                if (step % 2) products_commit();
            }
            products_wait<1>();
            warp_arrive(used(shared, buffer, 0));
            products_wait();
            warp_arrive(used(shared, buffer, 1));
        }
        write_sums(a, shared, sums, factors, item, items, part, thread / 32, lane);
        num_tiles = next_tiles;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 shared = u32(__cvta_generic_to_shared(memory));
    const int thread = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        for (int buffer = 0; buffer < 2; ++buffer) {
            init(widened(shared, buffer), GROUP / 32);
            init(shared_out(shared, buffer), GROUP / 32);
            for (int half = 0; half < 2; ++half) init(used(shared, buffer, half), 2 * GROUP / 32);
        }
    }
    begin();
    __syncthreads();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 128;");
        share(a, shared, thread);
    } else if (group < 3) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        sum_values(a, shared, thread, group - 1);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        widen(a, shared, thread);
    }
}
