// Index scores of packed keys at the released sizes: 32 heads of 128 columns, rows of 64 bytes of e2m1 and 4 exponents.
//
// A group of four warps multiplies 64 keys by the queries of some tokens at a time, both e4m3. Packed keys come to
// shared memory by bulk copies, those of candidates in pieces of 16 bytes, some tiles ahead. A thread takes the 32 codes of one stretch of two keys and looks them
// up in registers, where the matrix unit reads them; they are on the largest of their key's scales, by which its scores
// are multiplied. Queries stay in shared memory, their columns in the order in which the codes come: of step s, word
// 4 half + t holds codes 4 half .. 4 half + 3 of word s of stretch t.
//
// The matrix unit sums in half precision. Products of codes are small integers times their scales, so sums are exact
// while scales are near each other and a sum is below 512 of the largest; else it keeps 11 bits. (The released model
// rounds it to bf16, 8 bits.) It also sums over heads, in float32: what is positive of the products times weights, each
// in two halves. A token's sums have one order, whatever the batch, and nothing of another token is in them.

#include "hopper.cuh"

constexpr int HEADS = 32, DIM = 128, TOKENS = 4;  // tokens of one row that are scored together
constexpr int KEYS = 64, ROW_BYTES = 68, TILE_BYTES = KEYS * ROW_BYTES;
constexpr int BLOCK = 8;  // entries whose best score is kept, and entries of a candidate block
constexpr int UP = 4;  // octaves by which keys grow as e4m3; queries shrink by one, so that no sum reaches 2 ** 16
constexpr int FAR = 9;  // octaves below a key's largest scale; groups with smaller ones count as zero
constexpr int STAGES = 3, MAX_TILES = 128, MAX_BLOCKS = 256;  // tiles, or candidate blocks, that one program scores

__device__ inline float lowest() { return __int_as_float(0xFF800000); }

__device__ inline float power(int exponent) { return __int_as_float(max(1, min(exponent + 127, 254)) << 23); }

// Where an entry's packed key lies in the pages; a block outside them counts as the null block.
template <class Arguments>
__device__ inline i64 place_of(int entry, const int *row_table, const Arguments &given) {
    int per_block = given.per_block, column = entry / per_block;
    int block = column < given.table_columns ? row_table[column] : 0;
    block = block >= 0 && block < given.num_blocks ? block : 0;
    return block * given.page_stride + entry % per_block * ROW_BYTES;
}

// Queries of the first `known` of LINES lines, zero behind them, swizzled.
template <int LINES> __device__ inline void load_queries(u8 *queries, const u8 *q, int known) {
    for (int at = threadIdx.x; at < LINES * 8; at += GROUP) {
        int line = at / 8, piece = at % 8;
        Four v = {0, 0, 0, 0};
        if (line < known) v = fetch(q + at * 16);
        u32 words[4] = {v.a, v.b, v.c, v.d};
        u8 *to = queries + line * DIM + piece / 2 * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) *(u32 *)(to + (piece % 2 * 4 + i ^ line % 8) * 16) = words[i];
    }
}

// ---- keys

// Tiles of packed keys on their way to shared memory, in turn.
struct Ring {
    alignas(128) u8 keys[STAGES][TILE_BYTES];
    u64 arrived[STAGES];
};

// The codes of a thread's stretch of two keys, eight lines apart, the e4m3 of the eight sizes, and the keys' scales.
struct Packed {
    u32 words[2][4], low[2], high[2], mask[2];
    float scales[2];
};

__device__ inline u32 larger_halves(u32 a, u32 b) {
    u32 c;
    asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ inline u32 word_at(u32 at) {
    u32 word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
}

// Where the first of the thread's two rows lies in a tile.
__device__ inline u32 own_row() { return (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * ROW_BYTES; }

__device__ inline Packed read_keys(u32 row) {
    int stretch = threadIdx.x % 4;
    Packed packed;
    u32 exponents[2];
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8 * ROW_BYTES) {
#pragma unroll
        for (int word = 0; word < 4; ++word) packed.words[half][word] = word_at(row + stretch * 16 + word * 4);
        exponents[half] = word_at(row + DIM / 2);
    }
    // Each half holds bytes of one key; its high byte decides.
    u32 a = __byte_perm(exponents[0], exponents[1], 0x5410), b = __byte_perm(exponents[0], exponents[1], 0x7632);
    u32 largest = larger_halves(larger_halves(a, a << 8), larger_halves(b, b << 8));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 top = __byte_perm(largest, 0, half ? 0x4443 : 0x4441);
        u32 below = top - __byte_perm(exponents[half], 0, 0x4440 + stretch);
        packed.low[half] = 0x5C585000 - below * 0x08080800;  // 0, 0.5, 1, 1.5 times 2 ** (UP - below)
        packed.high[half] = 0x6C686460 - below * 0x08080808;  // 2, 3, 4, 6
        packed.mask[half] = below > FAR ? 0 : 0x77777777;
        float scale = __int_as_float(top << 23);
        packed.scales[half] = fmaf(scale, 0.0f, scale);  // 255: not a number
    }
    return packed;
}

// Keys as the matrix unit wants them of a thread, by steps of 32 columns.
typedef u32 Left[4][4];

// The bytes that the four lower digits of `digits` name; __byte_perm would cut the others off first.
__device__ inline u32 chosen_bytes(u32 low, u32 high, u32 digits) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(digits));
    return bytes;
}

// Eight codes -> two times four e4m3.
__device__ inline void widen(u32 word, u32 low, u32 high, u32 mask, u32 &first, u32 &second) {
    u32 sizes = word & mask, even = word << 4;  // `even` has the signs of codes 0, 2, 4, 6 where `word` has the others'
    first = chosen_bytes(low, high, sizes) | (__byte_perm(word, even, 0x1504) & 0x80808080);
    second = chosen_bytes(low, high, sizes >> 16) | (__byte_perm(word, even, 0x3726) & 0x80808080);
}

__device__ inline void widen_keys(Left &left, const Packed &packed) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            widen(packed.words[half][step], packed.low[half], packed.high[half], packed.mask[half], left[step][half],
                  left[step][half + 2]);
}

// ---- products [64 keys, 32 or 128 lines] = or += keys [64, 32] queries [lines, 32]^T, halves in pairs

#define PAIRS8(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
    "+r"(d[i + 6]), "+r"(d[i + 7])

__device__ inline void multiply(u32 (&d)[8], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f16.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, adds, 1, 1;\n}"
        : PAIRS8(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

__device__ inline void multiply(u32 (&d)[32], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f16.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31}, {%32,%33,%34,%35}, %36, adds, 1, 1;\n}"
        : PAIRS8(d, 0), PAIRS8(d, 8), PAIRS8(d, 16), PAIRS8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

// Starts products of a tile: d[2 i + half] are those of the thread's key `half` and lines 8 i + 2 (thread % 4) + 0, 1.
// low: low half of the descriptor of the queries.
template <int SIZE> __device__ inline void start_products(u32 (&d)[SIZE], const Left &left, u32 low) {
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) multiply(d, left[step], u64(low + step * 2) | u64(0x40000040) << 32, step > 0);
    products_commit();
}

// ---- sums over heads

// A thread's part of the weights of up to four tokens, a matrix [32 heads, 8]: columns 2 i and 2 i + 1 are token i's
// rounded to halves and what that left, both times a power of two of the token.
struct Weights {
    u32 pairs[4];
    float unit;  // what brings sums of token thread % 4 to their size
};

__device__ inline u32 two_halves(float low, float high) {
    u32 z;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(high), "f"(low));
    return z;
}

__device__ inline u32 positive_halves(u32 x) {
    u32 z;
    asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(0x3C003C00), "r"(0x80008000));
    return z;
}

__device__ inline float half_rounded(float x) {
    float z;
    asm("{\n.reg .b16 h;\ncvt.rn.f16.f32 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(z) : "f"(x));
    return z;
}

// weights: [known, 32]; the last one's stand in all columns behind.
__device__ inline Weights read_weights(const float *weights, int known) {
    int lane = threadIdx.x % 32, token = min(lane / 8, known - 1);
    float values[8], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = weights[token * HEADS + i / 2 * 8 + lane % 4 * 2 + i % 2];
        largest = fmaxf(largest, fabsf(values[i]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    int exponent = (__float_as_int(largest) >> 23) - 127, up = 14 - exponent;
    Weights found;
    found.unit = __shfl_sync(~0u, power(-up - UP), lane % 4 * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float first = values[2 * i] * power(up), second = values[2 * i + 1] * power(up);
        if (lane / 4 % 2) first -= half_rounded(first), second -= half_rounded(second);
        found.pairs[i] = two_halves(first, second);
    }
    return found;
}

// d[2 half + e] += sum over 16 heads of relu(products) weights, of the thread's key `half`, column 2 (thread % 4) + e.
__device__ inline void add_heads(float (&d)[4], const u32 *products, u32 first, u32 second) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = positive_halves(products[i]);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(first), "r"(second));
}

// Of the thread's two keys, the sums over the 32 heads from `products` on, with the weights of token thread % 4.
__device__ inline void head_sums(float (&sums)[2], const u32 *products, const Weights &weights) {
    float d[4] = {};
    add_heads(d, products, weights.pairs[0], weights.pairs[1]);
    add_heads(d, products + 4, weights.pairs[2], weights.pairs[3]);
    sums[0] = d[0] + d[1], sums[1] = d[2] + d[3];
}

// ---- kernels

// Which tile of the ring comes next.
struct Turn {
    int stage, parity;
};

// The thread's part of the next tile of keys. When it returns all have read theirs, and the place may be filled again.
__device__ inline Packed next_keys(Ring &ring, Turn &turn) {
    wait(shared(ring.arrived + turn.stage), turn.parity);
    Packed packed = read_keys(shared(ring.keys[turn.stage]) + own_row());
    __syncthreads();
    if (++turn.stage == STAGES) turn = {0, turn.parity ^ 1};
    return packed;
}

struct KeyArguments {
    const u8 *q;           // [tokens, 32, 128] e4m3
    const float *weights;  // [tokens, 32]
    const u8 *pages;
    const int *table, *tile_rows, *tile_firsts, *tile_lasts, *visible;
    float *scores, *peaks;  // of tokens part_first .. part_last - 1
    i64 score_stride, peak_stride, page_stride, num_blocks, per_block, table_columns, part_first, part_last, num_tiles;
};

// Some tokens of one row against some tiles of its entries: scores, and the best of each block that a token sees.
extern "C" __global__ void __launch_bounds__(GROUP, 6) score_keys(const KeyArguments given) {
    __shared__ alignas(1024) u8 queries[TOKENS * HEADS * DIM];
    __shared__ Ring ring;
    __shared__ i64 places[MAX_TILES];
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
    Weights weights = read_weights(given.weights + (i64)first * HEADS, last - first);
    publish();
    __syncthreads();
    auto fetch_tile = [&](int tile) {
        u32 arrived = shared(ring.arrived + tile % STAGES);
        expect(arrived, TILE_BYTES);
        copy(shared(ring.keys[tile % STAGES]), given.pages + places[tile], TILE_BYTES, arrived);
    };
    if (thread == 0)
        for (int tile = 0; tile < min(STAGES, num_tiles); ++tile) fetch_tile(tile);
    // Thread t of four has the scores of token t.
    int mine = first + lane % 4, mine_limit = mine < last ? given.visible[mine] : 0;
    bool is_odd = lane & 1, is_high = lane & 2, is_second = lane & 4;
    int entry = begin + thread / 32 * 16 + lane / 4, left = mine_limit - entry;
    float *scores = given.scores + (mine - given.part_first) * given.score_stride + entry;
    float *peaks = given.peaks + (mine - given.part_first) * given.peak_stride + (begin / 16 + thread / 32) * 2;
    u32 low = u32(matrix(shared(queries), 16));
    Turn turn = {0, 0};
    for (int tile = 0; tile < num_tiles; ++tile) {
        Packed packed = next_keys(ring, turn);
        u32 products[TOKENS * HEADS / 4];
        float sums[TOKENS][2];
        Left keys;
        widen_keys(keys, packed);
        start_products(products, keys, low);
        if (thread == 0 && tile + STAGES < num_tiles) fetch_tile(tile + STAGES);
        products_wait();
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) head_sums(sums[i], products + 8 * i, weights);
        float both[2], peak[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float even = is_high ? sums[2][half] : sums[0][half], odd = is_high ? sums[3][half] : sums[1][half];
            both[half] = (is_odd ? odd : even) * (packed.scales[half] * weights.unit);
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
    const u8 *q;
    const float *weights;
    const u8 *pages;
    const int *table, *token_rows, *visible, *candidates;
    float *scores;
    i64 score_stride, page_stride, num_blocks, per_block, table_columns, num_candidates, part_first, num_tiles;
};

__device__ inline const u8 *address_at(u32 at) {
    const u8 *address;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(address) : "r"(at));
    return address;
}

// A thread's pieces of 16 bytes of a tile of eight blocks.
struct Pieces {
    static constexpr int OF_BLOCK = BLOCK * ROW_BYTES / 16, OF_TILE = TILE_BYTES / 16;
    static constexpr int ROUNDS = (OF_TILE + GROUP - 1) / GROUP;

    u32 block[ROUNDS], offset[ROUNDS];  // where a block's address stands among those of the tile, and the piece in it

    __device__ Pieces() {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            int piece = i * GROUP + threadIdx.x;
            block[i] = piece / OF_BLOCK * 8, offset[i] = piece % OF_BLOCK * 16;
        }
    }

    // Starts their copies; to: where the first goes. blocks: addresses of the tile's, in shared memory.
    __device__ void copy(u32 to, u32 blocks) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            if ((i + 1) * GROUP <= OF_TILE || i * GROUP + threadIdx.x < OF_TILE)
                copy_line(to + i * GROUP * 16, address_at(blocks + block[i]) + offset[i]);
    }
};

// One token against some tiles of the entries of its candidate blocks; scores of what it does not see are not written.
extern "C" __global__ void __launch_bounds__(GROUP, 9) score_candidates(const CandidateArguments given) {
    __shared__ alignas(1024) u8 queries[HEADS * DIM];
    __shared__ alignas(16) u8 keys[STAGES][TILE_BYTES];
    __shared__ const u8 *places[MAX_BLOCKS];
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
        places[i] = given.pages + place_of(max(candidate, 0) * BLOCK, row_table, given);
    }
    load_queries<HEADS>(queries, given.q + (i64)token * (HEADS * DIM), HEADS);
    Weights weights = read_weights(given.weights + (i64)token * HEADS, 1);
    publish();
    __syncthreads();
    Pieces pieces;
    u32 filled = shared(keys) + thread * 16, blocks = shared(places), row = shared(keys) + own_row();
    for (int tile = 0; tile < STAGES - 1; ++tile, filled += TILE_BYTES, blocks += 64) {
        if (tile < num_tiles) pieces.copy(filled, blocks);
        copies_end();
    }
    int block = thread / 32 * 2 + lane % 4;  // whose entry's score is this thread's, if it is 0 or 1 of four
    float *scores = given.scores + blockIdx.x * given.score_stride + (begin + block) * BLOCK + lane / 4;
    const int *own_seen = seen + block;
    u32 low = u32(matrix(shared(queries), 16));
    constexpr int BACK = -(STAGES - 1) * TILE_BYTES;
    int stage = 0;
    for (int tile = 0; tile < num_tiles; ++tile, scores += KEYS, own_seen += 8) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // all have copied this tile, and read the one before it, whose place is filled again
        if (tile + STAGES - 1 < num_tiles) pieces.copy(filled, blocks);
        copies_end();
        Packed packed = read_keys(row);
        filled += stage == 0 ? BACK : TILE_BYTES, row += stage == STAGES - 1 ? BACK : TILE_BYTES, blocks += 64;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        u32 products[HEADS / 4];
        float sums[2];
        Left left;
        widen_keys(left, packed);
        start_products(products, left, low);
        products_wait();
        head_sums(sums, products, weights);
        int half = lane % 4;
        if (half < 2 && lane / 4 < *own_seen)
            *scores = half ? sums[1] * (packed.scales[1] * weights.unit) : sums[0] * (packed.scales[0] * weights.unit);
    }
}
