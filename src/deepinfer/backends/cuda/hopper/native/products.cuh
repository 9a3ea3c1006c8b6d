// What both kernels of products share: arguments, formats of matrices, tiles, matrix instructions, results on their way out.
//
// Tokens are e4m3, matrices e4m3 or packed e2m1, both in the order of `products.py`. A group of four warps takes 64 rows
// of a tile: their codes come to registers, are widened to e4m3 there and are the left operand; tokens, the right one,
// stay in shared memory. The matrix unit sums 128 columns in its narrow accumulator, from zero; then its sums are added
// to those before. So a result has one order of sums, whatever the tile.

#pragma once

#include "hopper.cuh"

constexpr int ROWS = 64, STEP = 128;  // rows of a group, columns of a step
constexpr int NEAR = 8;  // tiles of tokens that share a stretch of rows while it is in the cache
constexpr int MAX_EXPERTS = 512;
constexpr int OUT_STRIDE = ROWS * 2 + 16, PIECE = 64;  // bytes of a token's results on their way out; tokens at a time

struct Arguments {
    const u8 *x;  // [steps, places, 128], lines of 128 bytes in swizzled order
    const float *x_scale;
    const u8 *matrix;  // [experts, rows / 256, 2, steps, 2, chunk]
    const float *scale;  // [experts, padded rows]
    u16 *out;  // [places, num_rows]
    const int *begins, *ends;  // [experts] places of their tokens; null: the first of as many places for each
    i64 num_experts, num_places, place_stride, num_rows, steps;  // num_places: of an expert, if null; steps: even
};

__device__ inline i64 padded_rows(const Arguments &given) { return (given.num_rows + 255) / 256 * 256; }

// ---- left operands of 64 rows and 128 columns: of each 32 columns the four registers that the matrix unit wants of a thread

typedef u32 Left[4][4];

// Of each 16 columns the rows one after the other, 16 bytes each: so the matrix unit can also read them where they lie.
struct E4m3 {
    static constexpr int CHUNK = 8192, SIXTEEN = 1024;  // bytes; of 16 columns
    static constexpr bool WIDENS = false;

    static __device__ inline void read(u32 at, Left &left) {
        u32 thread = threadIdx.x % GROUP, lane = at + thread / 32 * 256 + thread % 16 * 16 + thread % 32 / 16 * SIXTEEN;
#pragma unroll
        for (int part = 0; part < 4; ++part)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(left[part][0]), "=r"(left[part][1]), "=r"(left[part][2]), "=r"(left[part][3])
                         : "r"(lane + part * 2 * SIXTEEN));
    }
};

struct E2m1 {
    static constexpr int CHUNK = 4096 + 256;  // codes, then a byte for each 32 columns of a row: 8 times an exponent
    static constexpr bool WIDENS = true;

    // Eight codes -> eight e4m3, looked up among eight magnitudes that are moved up by the exponent, but zero.
    static __device__ inline void widen(u32 word, u32 shift, u32 &first, u32 &second) {
        u32 low = 0x14100800 + shift * 0x01010100, high = 0x24201C18 + shift * 0x01010101, sizes = word & 0x77777777;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(first) : "r"(low), "r"(high), "r"(sizes));  // __byte_perm masks again
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(second) : "r"(low), "r"(high), "r"(sizes >> 16));
        first |= word & 0x80808080, second |= word << 4 & 0x80808080;
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

// ---- tiles

struct Tile {
    int expert, first, count, rows;  // first: place; rows: which stretch of them
};

// Where the places of each expert begin and end, and its tiles among those of all.
struct Tiles {
    int begins[MAX_EXPERTS], ends[MAX_EXPERTS], tile_ends[MAX_EXPERTS];
    int total;  // at a place of its own: so the compiler knows it equal in all threads, and what loops over tiles count too

    // By the first warp; tiles of this many tokens. Not from the first cache, which may be older than the kernel before.
    __device__ void count(const Arguments &given, int tokens) {
        int before = 0, apart = (int)given.place_stride / (int)given.num_experts;
        for (int start = 0; start < given.num_experts; start += 32) {
            int expert = start + threadIdx.x, begin = 0, end = 0;
            if (expert < given.num_experts) {
                begin = given.begins ? __ldcg(given.begins + expert) : expert * apart;
                end = given.begins ? __ldcg(given.ends + expert) : begin + (int)given.num_places;
            }
            int number = (end - begin + tokens - 1) / tokens;
            for (int far = 1; far < 32; far *= 2) {
                int other = __shfl_up_sync(~0u, number, far);
                if (threadIdx.x >= far) number += other;
            }
            if (expert < given.num_experts)
                begins[expert] = begin, ends[expert] = end, tile_ends[expert] = before + number;
            before += __shfl_sync(~0u, number, 31);
        }
        if (threadIdx.x == 0) total = before;
    }

    // The tile of this number of tokens and a stretch of rows; NEAR of tokens take the same rows one after the other.
    __device__ Tile find(const Arguments &given, int number, int stretches, int tokens) const {
        int band = number / (NEAR * stretches), inside = number - band * NEAR * stretches;
        int width = min(NEAR, total - band * NEAR);
        int place = band * NEAR + inside % width, expert = 0;
        while (tile_ends[expert] <= place) ++expert;
        int before = expert ? tile_ends[expert - 1] : 0, first = begins[expert] + (place - before) * tokens;
        return {expert, first, min(tokens, ends[expert] - first), inside / width};
    }
};

__device__ inline int padded(int count) { return count > 128 ? 256 : count > 64 ? 128 : count > 32 ? 64 : count > 16 ? 32 : 16; }

// Chunks of 64 rows of an expert, the first of all steps; those of the next steps are two chunks apart.
template <int CHUNK> __device__ inline const u8 *chunks_of(const Arguments &given, int expert, int rows) {
    i64 group = expert * padded_rows(given) / ROWS + rows;
    return given.matrix + group / 2 * given.steps * 2 * CHUNK + group % 2 * CHUNK;
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

// The matrix that lies some bytes behind this one: one addition, where describing it anew takes the uniform unit four.
__device__ inline u64 further(u64 matrix, u32 bytes) {
    return (matrix & 0xFFFFFFFF00000000) | (u32)((u32)matrix + (bytes >> 4));
}

// Starts the products of a step's tokens, in shared memory, with a left operand; `part` gets their sums.
template <int SIZE> __device__ inline void start(u32 tokens, const Left &left, float (&part)[SIZE]) {
    u64 right = matrix(tokens, 16);
    products_begin();
#pragma unroll
    for (int columns = 0; columns < 4; ++columns) multiply(part, left[columns], further(right, columns * 32), columns > 0);
    products_commit();
}

template <class FORMAT> __device__ inline void read(const u8 *chunk, Left &left) {
    FORMAT::read(shared(chunk), left);
#pragma unroll
    for (int part = 0; part < 4; ++part)  // widened here, and not where they are used
        asm volatile("" : "+r"(left[part][0]), "+r"(left[part][1]), "+r"(left[part][2]), "+r"(left[part][3]));
}

// ---- results

__device__ inline void meet_group() { asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / GROUP + 1) : "memory"); }

// Scales of a thread's two rows, and of the token that it sends out.
struct Scales {
    float low, high, token;
};

__device__ inline const float *scale_of(const Arguments &given, const Tile &tile, int row) {
    return given.scale + tile.expert * padded_rows(given) + row;
}

__device__ inline Scales scales_of(const Arguments &given, const Tile &tile, int row) {
    int thread = threadIdx.x % GROUP;
    const float *scale = scale_of(given, tile, row) + thread / 32 * 16 + thread % 32 / 4;
    return {scale[0], scale[8], thread < tile.count ? given.x_scale[tile.first + thread] : 0.0f};
}

// Sums of a group's 64 rows, scaled, to bf16, turned in shared memory a piece at a time, and stored in lines of 128 bytes.
template <int SIZE>
__device__ inline void send_out(
    const Arguments &given, const Tile &tile, int row, const Scales &scales, const float (&sums)[SIZE], u8 *lines,
    float *factors) {
    constexpr int COUNT = SIZE < PIECE / 2 ? SIZE : PIECE / 2;  // sums of a piece
    int thread = threadIdx.x % GROUP, lane = thread % 32, warp = thread / 32, column = row + thread % 8 * 8;
    int count = column < given.num_rows ? tile.count - thread / 8 : 0;
    u32 out = shared(lines);
    u16 *to = given.out + (tile.first + thread / 8) * given.num_rows + column;
    if (thread < 2 * SIZE) factors[thread] = scales.token;
#pragma unroll
    for (int from = 0; from < SIZE; from += COUNT) {
        meet_group();
#pragma unroll
        for (int i = 0; i < COUNT / 4; i += 2) {
            u32 two[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float2 factor = *(const float2 *)(factors + from * 2 + (i + j) * 8 + lane % 4 * 2);
                const float *v = sums + from + (i + j) * 4;
                two[j * 2] = two_bf16(v[0] * scales.low * factor.x, v[1] * scales.low * factor.y);
                two[j * 2 + 1] = two_bf16(v[2] * scales.high * factor.x, v[3] * scales.high * factor.y);
            }
            u32 at = out + (i * 8 + lane / 16 * 8 + lane % 8) * OUT_STRIDE + warp * 32 + lane / 8 % 2 * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                         ::"r"(at), "r"(two[0]), "r"(two[1]), "r"(two[2]), "r"(two[3]) : "memory");
        }
        meet_group();
#pragma unroll
        for (int i = 0; i < COUNT / 8; ++i, to += 16 * given.num_rows) {
            Four piece = load(out + (i * 16 + thread / 8) * OUT_STRIDE + thread % 8 * 16);
            if (from * 2 + i * 16 < count) put(to, piece);
        }
    }
}
