// Index scores of packed keys at the released sizes: 32 heads of 128 columns, rows of 64 bytes of e2m1 and 4 exponents.
//
// A group of four warps multiplies 64 keys by the queries of some tokens at a time. Packed keys come to shared memory
// by bulk copies, some tiles ahead. A thread takes the 32 codes of one stretch of two keys and widens them exactly to
// bf16 in registers, where the matrix unit reads them; keys are divided by UNIT, for which the heads' weights make up.
// Queries stay in shared memory, their columns in the order in which the codes come: of the eight pairs of columns of
// step s, pair 4 p + t holds codes i and i + 4, where i = 2 (s % 2) + p, of word s / 2 of stretch t. A sum over heads
// has one order, whatever the batch.

#include "hopper.cuh"

constexpr int HEADS = 32, DIM = 128, TOKENS = 4;  // tokens of one row that are scored together
constexpr int KEYS = 64, ROW_BYTES = 68, TILE_BYTES = KEYS * ROW_BYTES;
constexpr int BLOCK = 8;  // entries whose best score is kept, and entries of a candidate block
constexpr float UNIT = 18446744073709551616.0f;  // 2 ** 64: with keys so much smaller, a factor stays a bf16
constexpr int STAGES = 3, MAX_TILES = 128, MAX_BLOCKS = 256;  // tiles, or candidate blocks, that one program scores

__device__ inline u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline float lowest() { return __int_as_float(0xFF800000); }

// Tiles of packed keys on their way to shared memory, in turn.
struct Ring {
    alignas(128) u8 keys[STAGES][TILE_BYTES];
    u64 arrived[STAGES];

    // Makes the barrier of a tile wait for it.
    __device__ void expect(int tile) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(arrived + tile % STAGES)),
                     "r"(TILE_BYTES) : "memory");
    }

    // Starts a copy of `bytes` to place `at` of a tile; all are multiples of 16.
    __device__ void copy(int tile, int at, const void *from, u32 bytes) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(shared(keys[tile % STAGES] + at)), "l"(from), "r"(bytes),
                     "r"(shared(arrived + tile % STAGES)) : "memory");
    }
};

// Where an entry's packed key lies in the pages; a block outside them counts as the null block.
template <class Arguments>
__device__ inline i64 place_of(int entry, const int *row_table, const Arguments &given) {
    int per_block = given.per_block, column = entry / per_block;
    int block = column < given.table_columns ? row_table[column] : 0;
    block = block >= 0 && block < given.num_blocks ? block : 0;
    return block * given.page_stride + entry % per_block * ROW_BYTES;
}

// Queries of the first `known` of LINES lines, zero behind them, swizzled in panels of 64 columns.
template <int LINES> __device__ inline void load_queries(u8 *queries, const u16 *q, int known) {
    for (int at = threadIdx.x; at < LINES * 16; at += GROUP) {
        int line = at / 16, piece = at % 16, stretch = piece / 4, word = piece % 4;
        Four v = {0, 0, 0, 0};
        if (line < known) v = fetch(q + line * DIM + piece * 8);
        u32 pairs[4] = {__byte_perm(v.a, v.c, 0x5410), __byte_perm(v.a, v.c, 0x7632),
                        __byte_perm(v.b, v.d, 0x5410), __byte_perm(v.b, v.d, 0x7632)};  // columns 0 4, 1 5, 2 6, 3 7
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            int sixteen = 4 * word + pair, panel = sixteen / 8 * (LINES * 128);
            *(u32 *)(queries + panel + line * 128 + (sixteen % 8 ^ line % 8) * 16 + stretch * 4) = pairs[pair];
        }
    }
}

// ---- keys

// The codes of a thread's stretch of two keys, eight lines apart, and what brings them to their size.
struct Packed {
    u32 words[2][4], factors[2];
};

// Two bf16 of 2 ** (byte - 127) * 2 ** 126 / UNIT, NaN for 255.
__device__ inline u32 factor_of(u32 byte) { return (byte == 255 ? 0x7FC0 : min(byte + 62, 255u) << 7) * 0x10001; }

__device__ inline Packed read_keys(const u8 *tile) {
    int lane = threadIdx.x % 32, stretch = lane % 4;
    Packed packed;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u8 *row = tile + (threadIdx.x / 32 * 16 + lane / 4 + 8 * half) * ROW_BYTES;
#pragma unroll
        for (int word = 0; word < 4; ++word) packed.words[half][word] = *(const u32 *)(row + stretch * 16 + word * 4);
        packed.factors[half] = factor_of(row[DIM / 2 + stretch]);
    }
    return packed;
}

__device__ inline u32 product(u32 a, u32 b) {
    u32 c;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Codes I and I + 4 of a word as two bf16, divided by UNIT. Their three low bits, placed where the exponent of a bf16
// ends, are the value times 2 ** -126; an exact product brings it to its size.
template <int I> __device__ inline u32 widened(u32 word, u32 factor) {
    u32 size = I < 2 ? word << (6 - 4 * I) : word >> (4 * I - 6), sign = word << (12 - 4 * I);
    return product((size & 0x01C001C0) | (sign & 0x80008000), factor);
}

template <int STEP> __device__ inline void widen_step(u32 (&a)[4], const Packed &packed) {
    constexpr int first = STEP % 2 * 2;
    a[0] = widened<first>(packed.words[0][STEP / 2], packed.factors[0]);
    a[1] = widened<first>(packed.words[1][STEP / 2], packed.factors[1]);
    a[2] = widened<first + 1>(packed.words[0][STEP / 2], packed.factors[0]);
    a[3] = widened<first + 1>(packed.words[1][STEP / 2], packed.factors[1]);
}

// ---- products [64 keys, 32 or 128 lines] = or += keys [64, 16] queries [lines, 16]^T

__device__ inline void multiply(float (&d)[16], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, adds, 1, 1, 0;\n}"
        : ACC8(d, 0), ACC8(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

__device__ inline void multiply(float (&d)[64], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
        "%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, adds, 1, 1, 0;\n}"
        : ACC32(d, 0), ACC32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

template <int LINES, int STEP>
__device__ inline void step(float (&d)[LINES / 2], u32 (&a)[4], const Packed &packed, u32 low) {
    widen_step<STEP>(a, packed);
    products_begin();
    u32 at = low + (STEP / 4 * (LINES * 128) + STEP % 4 * 32) / 16;
    multiply(d, a, u64(at) | u64(0x40000040) << 32, STEP > 0);
}

// Starts the products of a tile: d[4 i + 2 half + e] is that of the thread's key `half` and line
// 8 i + 2 (thread % 4) + e.
// low: low half of the descriptor of the queries.
template <int LINES>
__device__ inline void start_products(float (&d)[LINES / 2], const Packed &packed, u32 low) {
    u32 a[8][4];
    step<LINES, 0>(d, a[0], packed, low), step<LINES, 1>(d, a[1], packed, low);
    step<LINES, 2>(d, a[2], packed, low), step<LINES, 3>(d, a[3], packed, low);
    step<LINES, 4>(d, a[4], packed, low), step<LINES, 5>(d, a[5], packed, low);
    step<LINES, 6>(d, a[6], packed, low), step<LINES, 7>(d, a[7], packed, low);
}

// The thread's eight heads of a token: sum of weight * relu(product); weights are halved, for d + |d| is 2 relu(d).
__device__ inline float head_sum(const float *d, const float *halves) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) total = fmaf(d[4 * i + e] + fabsf(d[4 * i + e]), halves[2 * i + e], total);
    return total;
}

// Head of the place among a thread's eight weights.
__device__ inline int head_at(int place, int thread) { return place / 2 * 8 + thread * 2 + place % 2; }

struct KeyArguments {
    const u16 *q;          // [tokens, 32, 128] bf16
    const float *weights;  // [tokens, 32]
    const u8 *pages;
    const int *table, *tile_rows, *tile_firsts, *tile_lasts, *visible;
    float *scores, *peaks;  // of tokens part_first .. part_last - 1
    i64 score_stride, peak_stride, page_stride, num_blocks, per_block, table_columns, part_first, part_last, num_tiles;
};

// Some tokens of one row against some tiles of its entries: scores, and the best of each block that a token sees.
extern "C" __global__ void __launch_bounds__(GROUP, 4) score_keys(const KeyArguments given) {
    __shared__ alignas(1024) u8 queries[TOKENS * HEADS * DIM * 2];
    __shared__ Ring ring;
    __shared__ i64 places[MAX_TILES];
    __shared__ alignas(16) float halves[4][TOKENS * 8 + 4];  // by thread of four; the four behind spread the banks
    int thread = threadIdx.x, lane = thread % 32;
    begin();
    int first = max(given.tile_firsts[blockIdx.x], (int)given.part_first);
    int last = min(given.tile_lasts[blockIdx.x], (int)given.part_last);
    if (first >= last) return;
    int begin = blockIdx.y * (int)given.num_tiles * KEYS, limit = given.visible[last - 1];
    if (begin >= limit) return;
    int num_tiles = min((int)given.num_tiles, (limit - begin + KEYS - 1) / KEYS);
    const int *row_table = given.table + given.tile_rows[blockIdx.x] * given.table_columns;
    if (thread < num_tiles) places[thread] = place_of(begin + thread * KEYS, row_table, given);
    if (thread < STAGES) init(shared(ring.arrived + thread), 1);
    load_queries<TOKENS * HEADS>(queries, given.q + (i64)first * (HEADS * DIM), (last - first) * HEADS);
    int part = thread / 32, place = thread % 32, token = first + place / 8;
    float weight = token < last ? given.weights[(i64)token * HEADS + head_at(place % 8, part)] : 0.0f;
    halves[part][place] = weight * (0.5f * UNIT);
    publish();
    __syncthreads();
    auto fetch_tile = [&](int tile) {
        ring.expect(tile);
        ring.copy(tile, 0, given.pages + places[tile], TILE_BYTES);
    };
    if (thread == 0)
        for (int tile = 0; tile < min(STAGES, num_tiles); ++tile) fetch_tile(tile);
    // After the sums, thread t of four has the scores of token t.
    int mine = first + lane % 4, mine_limit = mine < last ? given.visible[mine] : 0;
    bool is_odd = lane & 1, is_high = lane & 2, is_second = lane & 4;
    int entry = begin + thread / 32 * 16 + lane / 4, left = mine_limit - entry;
    float *scores = given.scores + (mine - given.part_first) * given.score_stride + entry;
    float *peaks = given.peaks + (mine - given.part_first) * given.peak_stride + (begin / 16 + thread / 32) * 2;
    u32 low = u32(matrix(shared(queries), 16));
    for (int tile = 0, stage = 0, parity = 0; tile < num_tiles; ++tile) {
        wait(shared(ring.arrived + stage), parity);
        Packed packed = read_keys(ring.keys[stage]);
        __syncthreads();
        if (++stage == STAGES) stage = 0, parity ^= 1;
        float d[TOKENS * HEADS / 2], sums[2][TOKENS];
        start_products<TOKENS * HEADS>(d, packed, low);
        if (thread == 0 && tile + STAGES < num_tiles) fetch_tile(tile + STAGES);
        products_end();
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            float shares[8];
            *(float4 *)shares = *(const float4 *)&halves[lane % 4][8 * i];
            *(float4 *)(shares + 4) = *(const float4 *)&halves[lane % 4][8 * i + 4];
            sums[0][i] = head_sum(d + 16 * i, shares), sums[1][i] = head_sum(d + 16 * i + 2, shares);
        }
        float both[2], peak[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float *sum = sums[half];
            float even = is_high ? sum[2] : sum[0], odd = is_high ? sum[3] : sum[1];
            even += __shfl_xor_sync(~0u, is_high ? sum[0] : sum[2], 2);
            odd += __shfl_xor_sync(~0u, is_high ? sum[1] : sum[3], 2);
            both[half] = (is_odd ? odd : even) + __shfl_xor_sync(~0u, is_odd ? even : odd, 1);
            peak[half] = 8 * half < left ? both[half] : lowest();
        }
        if (0 < left) scores[0] = both[0];
        if (8 < left) scores[8] = both[1];
        float best = fmaxf(is_second ? peak[1] : peak[0], __shfl_xor_sync(~0u, is_second ? peak[0] : peak[1], 4));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
        if (lane < 8 && 8 * is_second < left + lane / 4) peaks[is_second] = best;
        scores += KEYS, peaks += KEYS / BLOCK, left -= KEYS;
    }
}

struct CandidateArguments {
    const u16 *q;
    const float *weights;
    const u8 *pages;
    const int *table, *token_rows, *visible, *candidates;
    float *scores;
    i64 score_stride, page_stride, num_blocks, per_block, table_columns, num_candidates, part_first, num_tiles;
};

// One token against some tiles of the entries of its candidate blocks; scores of what it does not see are not written.
extern "C" __global__ void __launch_bounds__(GROUP, 6) score_candidates(const CandidateArguments given) {
    __shared__ alignas(1024) u8 queries[HEADS * DIM * 2];
    __shared__ Ring ring;
    __shared__ i64 places[MAX_BLOCKS];
    __shared__ int seen[MAX_BLOCKS];
    int thread = threadIdx.x, lane = thread % 32;
    begin();
    int token = given.part_first + blockIdx.x, limit = given.visible[token], num_candidates = given.num_candidates;
    int begin = blockIdx.y * (int)given.num_tiles * 8;  // of candidate blocks, eight to a tile
    int num_tiles = min((int)given.num_tiles, (num_candidates - begin + 7) / 8);
    const int *row_table = given.table + given.token_rows[token] * given.table_columns;
    const int *candidates = given.candidates + (i64)blockIdx.x * num_candidates;
    for (int i = thread; i < num_tiles * 8; i += GROUP) {
        int candidate = begin + i < num_candidates ? candidates[begin + i] : -1;
        seen[i] = candidate < 0 ? 0 : limit - candidate * BLOCK;
        places[i] = place_of(max(candidate, 0) * BLOCK, row_table, given);
    }
    if (thread < STAGES) init(shared(ring.arrived + thread), 1);
    load_queries<HEADS>(queries, given.q + (i64)token * (HEADS * DIM), HEADS);
    publish();
    __syncthreads();
    auto fetch_tile = [&](int tile) {  // by eight threads
        if (thread == 0) ring.expect(tile);
        ring.copy(tile, thread * (BLOCK * ROW_BYTES), given.pages + places[tile * 8 + thread], BLOCK * ROW_BYTES);
    };
    if (thread < 8)
        for (int tile = 0; tile < min(STAGES, num_tiles); ++tile) fetch_tile(tile);
    float halves[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) halves[i] = given.weights[(i64)token * HEADS + head_at(i, lane % 4)] * (0.5f * UNIT);
    float *scores = given.scores + blockIdx.x * given.score_stride;
    u32 low = u32(matrix(shared(queries), 16));
    for (int tile = 0, stage = 0, parity = 0; tile < num_tiles; ++tile) {
        wait(shared(ring.arrived + stage), parity);
        Packed packed = read_keys(ring.keys[stage]);
        __syncthreads();
        if (++stage == STAGES) stage = 0, parity ^= 1;
        float d[HEADS / 2], sums[2];
        start_products<HEADS>(d, packed, low);
        if (thread < 8 && tile + STAGES < num_tiles) fetch_tile(tile + STAGES);
        products_end();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = head_sum(d + 2 * half, halves);
            sum += __shfl_xor_sync(~0u, sum, 2);
            sums[half] = sum + __shfl_xor_sync(~0u, sum, 1);
        }
        int block = tile * 8 + thread / 32 * 2 + lane % 4;  // of threads 0 and 1 of four
        if (lane % 4 < 2 && lane / 4 < seen[block])
            scores[(begin + block) * BLOCK + lane / 4] = lane % 4 ? sums[1] : sums[0];
    }
}
