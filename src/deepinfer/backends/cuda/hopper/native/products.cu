// Products of tokens with a matrix, or with the matrix of the expert that each token chose: out = x @ matrix^T.
//
// Tokens are e4m3, matrices e4m3 or packed e2m1, both in the order of `products.py`. One warp brings rows and tokens to
// shared memory by bulk copies, 128 columns at a time and some steps ahead, across tiles. A group of four warps takes 64
// rows of a tile: their codes come to registers, are widened to e4m3 there and are the left operand; tokens, the right
// one, stay in shared memory. The matrix unit sums 128 columns in its narrow accumulator, from zero; then its sums are
// added to those before. So a result has one order of sums, whatever the tile.
//
// Two forms: for many tokens a block has two groups and tiles of 128 tokens, and a cluster of two blocks shares them, each
// bringing half to both. For few tokens a block has one group, and two share a multiprocessor.

#include "hopper.cuh"

constexpr int ROWS = 64, STEP = 128;  // rows of a group, columns of a step
constexpr int NEAR = 8;  // tiles of tokens that share a stretch of rows while it is in the cache
constexpr int MAX_EXPERTS = 512;
constexpr int OUT_STRIDE = ROWS * 2 + 16;  // bytes of a token's results on their way out

struct Arguments {
    const u8 *x;  // [steps, places, 128], lines of 128 bytes in swizzled order
    const float *x_scale;
    const u8 *matrix;  // [experts, rows / 256, 2, steps, 2, chunk]
    const float *scale;  // [experts, padded rows]
    u16 *out;  // [places, num_rows]
    const int *begins, *ends;  // [experts] places of their tokens; null: all places are one expert's
    i64 num_experts, num_places, place_stride, num_rows, steps;  // steps: even
};

__device__ inline u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ inline i64 padded_rows(const Arguments &given) { return (given.num_rows + 255) / 256 * 256; }

// ---- left operands of 64 rows and 128 columns: of each 32 columns the four registers that the matrix unit wants of a thread

typedef u32 Left[4][4];

struct E4m3 {
    static constexpr int CHUNK = 8192;  // bytes

    static __device__ inline void read(u32 at, Left &left) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            Four v = load(at + part * 2048 + threadIdx.x % GROUP * 16);
            left[part][0] = v.a, left[part][1] = v.b, left[part][2] = v.c, left[part][3] = v.d;
        }
    }
};

struct E2m1 {
    static constexpr int CHUNK = 4096 + 256;  // codes, then a byte for each 32 columns of a row: 8 times an exponent

    // Eight codes -> eight e4m3, looked up among eight magnitudes that are moved up by the exponent, but zero.
    static __device__ inline void widen(u32 word, u32 shift, u32 &first, u32 &second) {
        u32 low = 0x14100800 + shift * 0x01010100, high = 0x24201C18 + shift * 0x01010101, sizes = word & 0x77777777;
        first = __byte_perm(low, high, sizes) | (word & 0x80808080);
        second = __byte_perm(low, high, sizes >> 16) | (word << 4 & 0x80808080);
    }

    static __device__ inline void read(u32 at, Left &left) {
        u32 thread = threadIdx.x % GROUP, shifts[2];
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                     : "=r"(shifts[0]), "=r"(shifts[1]) : "r"(at + 4096 + thread / 4 * 8));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Four v = load(at + half * 2048 + thread * 16);
            u32 words[4] = {v.a, v.b, v.c, v.d};
#pragma unroll
            for (int part = half * 2; part < half * 2 + 2; ++part)
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    widen(words[part % 2 * 2 + row], __byte_perm(shifts[row], 0, 0x4440 + part), left[part][row],
                          left[part][row + 2]);
                }
        }
    }
};

// ---- tiles, and their way to shared memory

struct Tile {
    int expert, first, count, rows;  // first: place; rows: which 64 or 128 of them
};

// Steps in the order in which they pass the stages.
struct Turn {
    int stage, parity;
};

template <class FORMAT, int SIZE, int CLUSTER_SIZE> struct Shared {
    typedef FORMAT Format;
    static constexpr int GROUPS = SIZE, CLUSTER = CLUSTER_SIZE, TOKENS = GROUPS * 64;
    static constexpr int STAGE_BYTES = TOKENS * STEP + GROUPS * Format::CHUNK;
    static constexpr int STAGES = (GROUPS == 1 ? 96 : 180) * 1024 / STAGE_BYTES;

    u8 tokens[STAGES][TOKENS * STEP];
    u8 matrix[STAGES][GROUPS * Format::CHUNK];
    u8 out[GROUPS][TOKENS * OUT_STRIDE];
    float factors[GROUPS][TOKENS];
    u64 full[STAGES], empty[STAGES];
    int begins[MAX_EXPERTS], ends[MAX_EXPERTS], tile_ends[MAX_EXPERTS];

    __device__ void advance(Turn &turn) const {
        if (++turn.stage == STAGES) turn = {0, turn.parity ^ 1};
    }
};

template <class Own> __device__ inline void set_up(Own &own, const Arguments &given) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < own.STAGES; ++stage) {
            init(shared(own.full + stage), 1);
            init(shared(own.empty + stage), Own::GROUPS * 4 * Own::CLUSTER);
        }
        publish();
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < 32) {
        int total = 0;
        for (int start = 0; start < given.num_experts; start += 32) {
            int expert = start + threadIdx.x, begin = 0, end = 0;
            if (expert < given.num_experts) {
                begin = given.begins ? given.begins[expert] : 0;
                end = given.begins ? given.ends[expert] : (int)given.num_places;
            }
            int tiles = (end - begin + Own::TOKENS - 1) / Own::TOKENS;
            for (int far = 1; far < 32; far *= 2) {
                int other = __shfl_up_sync(~0u, tiles, far);
                if (threadIdx.x >= far) tiles += other;
            }
            if (expert < given.num_experts)
                own.begins[expert] = begin, own.ends[expert] = end, own.tile_ends[expert] = total + tiles;
            total += __shfl_sync(~0u, tiles, 31);
        }
    }
    if (Own::CLUSTER > 1) meet();
    else __syncthreads();
}

// The tile of this number; NEAR tiles of tokens take the same rows one after the other.
template <class Own> __device__ inline Tile find(const Own &own, const Arguments &given, int number, int row_tiles) {
    int total = own.tile_ends[given.num_experts - 1], band = number / (NEAR * row_tiles);
    int inside = number - band * NEAR * row_tiles, width = min(NEAR, total - band * NEAR);
    int place = band * NEAR + inside % width, expert = 0;
    while (own.tile_ends[expert] <= place) ++expert;
    int before = expert ? own.tile_ends[expert - 1] : 0, first = own.begins[expert] + (place - before) * Own::TOKENS;
    int rows = inside / width * Own::CLUSTER + (Own::CLUSTER > 1 ? rank_in_cluster() : 0);
    return {expert, first, min(Own::TOKENS, own.ends[expert] - first), rows};
}

__device__ inline int padded(int count) { return count > 64 ? 128 : count > 32 ? 64 : count > 16 ? 32 : 16; }

template <class Own> __device__ inline void bring(Own &own, const Arguments &given, const Tile &tile, Turn &turn) {
    constexpr int CHUNK = Own::Format::CHUNK, BYTES = Own::GROUPS * CHUNK;
    int tokens = padded(tile.count) * STEP, share = tokens / Own::CLUSTER, skipped = rank_in_cluster() * share;
    i64 group = (i64)tile.expert * padded_rows(given) / ROWS + tile.rows * Own::GROUPS;  // of 64 rows, the first
    const u8 *matrix = given.matrix + group / 2 * given.steps * 2 * CHUNK + group % 2 * CHUNK;
    const u8 *x = given.x + (i64)tile.first * STEP + skipped;
    for (int step = 0; step < given.steps; ++step, own.advance(turn)) {
        u32 full = shared(own.full + turn.stage);
        wait(shared(own.empty + turn.stage), turn.parity ^ 1);
        expect(full, tokens + BYTES);
        copy(shared(own.matrix[turn.stage]), matrix, BYTES, full);
        if (Own::CLUSTER > 1) copy_to_pair(shared(own.tokens[turn.stage]) + skipped, x, share, full);
        else copy(shared(own.tokens[turn.stage]), x, tokens, full);
        matrix += 2 * CHUNK;
        x += given.place_stride * STEP;
    }
}

// ---- products [64 rows, 2 * size tokens] = or += a [64, 32] tokens [tokens, 32]^T

#define MULTIPLY(shape, sums, left, right, flag) \
    "{\n.reg .pred adds;\nsetp.ne.b32 adds, " flag ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32.e4m3.e4m3 {" sums \
    "}, " left ", " right ", adds, 1, 1;\n}"
#define SUMS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SUMS16 SUMS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS32 SUMS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS64 SUMS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55," \
    "%56,%57,%58,%59,%60,%61,%62,%63"

__device__ inline void multiply(float (&d)[8], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(MULTIPLY("m64n16k32", SUMS8, "{%8,%9,%10,%11}", "%12", "%13")
                 : ACC8(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

__device__ inline void multiply(float (&d)[16], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(MULTIPLY("m64n32k32", SUMS16, "{%16,%17,%18,%19}", "%20", "%21")
                 : ACC8(d, 0), ACC8(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

__device__ inline void multiply(float (&d)[32], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(MULTIPLY("m64n64k32", SUMS32, "{%32,%33,%34,%35}", "%36", "%37")
                 : ACC32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

__device__ inline void multiply(float (&d)[64], const u32 (&a)[4], u64 b, bool adds) {
    asm volatile(MULTIPLY("m64n128k32", SUMS64, "{%64,%65,%66,%67}", "%68", "%69")
                 : ACC32(d, 0), ACC32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

// A step's left operand of a group's rows.
template <class Own> __device__ inline void read(Own &own, const Turn &turn, Left &left) {
    wait(shared(own.full + turn.stage), turn.parity);
    Own::Format::read(shared(own.matrix[turn.stage] + threadIdx.x / GROUP * Own::Format::CHUNK), left);
#pragma unroll
    for (int part = 0; part < 4; ++part)  // widened here, and not where they are used
        asm volatile("" : "+r"(left[part][0]), "+r"(left[part][1]), "+r"(left[part][2]), "+r"(left[part][3]));
}

// Tells who brings tiles that a stage may be filled again.
template <class Own> __device__ inline void leave(Own &own, const Turn &turn) {
    u32 empty = shared(own.empty + turn.stage);
    __syncwarp();
    if (threadIdx.x % 32 < Own::CLUSTER) {
        if (Own::CLUSTER > 1) arrive_at(empty, threadIdx.x % 32);
        else arrive(empty);
    }
}

// A step's products, and the next step's left operand.
template <bool IS_LAST, class Own, int SIZE>
__device__ inline void step(
    Own &own, Turn &turn, const Left &left, Left &next, float (&part)[SIZE],
    float (&sums)[SIZE]) {
    Turn after = turn;
    own.advance(after);
    u32 tokens = shared(own.tokens[turn.stage]);
    products_begin();
#pragma unroll
    for (int columns = 0; columns < 4; ++columns)
        multiply(part, left[columns], matrix(tokens + columns * 32, 16), columns > 0);
    products_commit();
    if (!IS_LAST) read(own, after, next);
    products_wait();
    leave(own, turn);
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sums[i] += part[i];
    turn = after;
}

__device__ inline void meet_group() { asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / GROUP + 1) : "memory"); }

// A group's rows of a tile: sums of all steps, scaled, to bf16, turned in shared memory and sent out.
template <int SIZE, class Own>
__device__ inline void take(Own &own, const Arguments &given, const Tile &tile, Turn &turn) {
    int group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP, lane = thread % 32, warp = thread / 32;
    int row = (tile.rows * Own::GROUPS + group) * ROWS;
    const float *scale = given.scale + (i64)tile.expert * padded_rows(given) + row + warp * 16 + lane / 4;
    float low = scale[0], high = scale[8], factor = thread < tile.count ? given.x_scale[tile.first + thread] : 0.0f;
    float part[SIZE] = {}, sums[SIZE] = {};
    Left a, b;
    read(own, turn, a);
    for (int at = 2; at < given.steps; at += 2) {
        step<false>(own, turn, a, b, part, sums);
        step<false>(own, turn, b, a, part, sums);
    }
    step<false>(own, turn, a, b, part, sums);
    step<true>(own, turn, b, a, part, sums);
    u32 out = shared(own.out[group]);
    stores_read();
    if (thread < Own::TOKENS) own.factors[group][thread] = factor;
    meet_group();
#pragma unroll
    for (int i = 0; i < SIZE / 4; i += 2) {
        u32 two[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float2 factors = *(const float2 *)(own.factors[group] + (i + j) * 8 + lane % 4 * 2);
            const float *v = sums + (i + j) * 4;
            two[j * 2] = two_bf16(v[0] * low * factors.x, v[1] * low * factors.y);
            two[j * 2 + 1] = two_bf16(v[2] * high * factors.x, v[3] * high * factors.y);
        }
        u32 at = out + (i * 8 + lane / 16 * 8 + lane % 8) * OUT_STRIDE + warp * 32 + lane / 8 % 2 * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                     ::"r"(at), "r"(two[0]), "r"(two[1]), "r"(two[2]), "r"(two[3]) : "memory");
    }
    publish();
    meet_group();
    int bytes = min(ROWS, (int)given.num_rows - row) * 2;
    if (thread < tile.count && bytes > 0)
        send(given.out + (tile.first + thread) * given.num_rows + row, out + thread * OUT_STRIDE, bytes);
    stores_commit();
}

template <class Own> __device__ inline void products(const Arguments &given) {
    extern __shared__ __align__(1024) u8 memory[];
    Own &own = *(Own *)memory;
    set_up(own, given);
    constexpr int GROUPS = Own::GROUPS, TILE = GROUPS * Own::CLUSTER * ROWS;
    int row_tiles = (given.num_rows + TILE - 1) / TILE, tiles = own.tile_ends[given.num_experts - 1] * row_tiles;
    int first = blockIdx.x / Own::CLUSTER, apart = gridDim.x / Own::CLUSTER;
    Turn turn = {0, 0};
    if (threadIdx.x >= GROUPS * GROUP) {
        if (GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == GROUPS * GROUP)
            for (int number = first; number < tiles; number += apart)
                bring(own, given, find(own, given, number, row_tiles), turn);
    } else {
        if (GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        for (int number = first; number < tiles; number += apart) {
            Tile tile = find(own, given, number, row_tiles);
            int tokens = padded(tile.count);
            if (GROUPS > 1 && tokens == 128) take<64>(own, given, tile, turn);
            else if (tokens == 64) take<32>(own, given, tile, turn);
            else if (tokens == 32) take<16>(own, given, tile, turn);
            else take<8>(own, given, tile, turn);
        }
        stores_wait();
    }
    if (Own::CLUSTER > 1) meet();
}

struct Widening {
    const u8 *from;
    u8 *to;
};

// One chunk: what `E2m1::read` gives each thread goes where `E4m3::read` finds it.
extern "C" __global__ void __launch_bounds__(GROUP) widen(const Widening given) {
    __shared__ __align__(16) u8 chunk[E2m1::CHUNK];
    const u8 *from = given.from + (i64)blockIdx.x * E2m1::CHUNK;
    u8 *to = given.to + (i64)blockIdx.x * E4m3::CHUNK + threadIdx.x * 16;
    for (int at = threadIdx.x * 16; at < E2m1::CHUNK; at += GROUP * 16) store(shared(chunk + at), fetch(from + at));
    __syncthreads();
    Left left;
    E2m1::read(shared(chunk), left);
#pragma unroll
    for (int part = 0; part < 4; ++part)
        *(Four *)(to + part * 2048) = {left[part][0], left[part][1], left[part][2], left[part][3]};
}

constexpr int MANY = 3 * GROUP, FEW = GROUP + 32;

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(MANY, 1) many_e4m3(const Arguments given) {
    products<Shared<E4m3, 2, 2>>(given);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(MANY, 1) many_e2m1(const Arguments given) {
    products<Shared<E2m1, 2, 2>>(given);
}

extern "C" __global__ void __launch_bounds__(FEW, 2) few_e4m3(const Arguments given) {
    products<Shared<E4m3, 1, 1>>(given);
}

extern "C" __global__ void __launch_bounds__(FEW, 2) few_e2m1(const Arguments given) {
    products<Shared<E2m1, 1, 1>>(given);
}
