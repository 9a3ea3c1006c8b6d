// Entering a half layer at the released sizes, 4 streams of 5,120 columns and 24 mixes, in one pass over the streams.
//
// `mix` takes one part of the columns of every stream, for the product with fn and the collapse of the streams need the
// same ones. A block keeps its part of fn in shared memory and goes through tokens, some for each warp. A thread
// multiplies 8 columns that lie side by side, so the 16 bytes of a token come in the form in which the matrix unit takes
// them; each thread copies its own to a ring, steps ahead, and waits for nobody. `finish` adds the parts in order, norms
// the collapse and does the Sinkhorn rounds. The order of a token's sums does not depend on the number of tokens.
//
// fn is the sum of two bf16 matrices, in fragments of m16n8k16: of 8 rows each, the high part's first and second, the
// low part's, and the third of both (`packed_fn` in hyper.py).

#include "hopper.cuh"

constexpr int STREAMS = 4, HIDDEN = 5120, WIDTH = STREAMS * HIDDEN, MIXES = (2 + STREAMS) * STREAMS, SUMS = MIXES + 1;
constexpr int COLUMNS = 32, STRETCHES = 5, PARTS = HIDDEN / (STRETCHES * COLUMNS);  // of a step; of a part, in steps
constexpr int STEPS = STRETCHES * STREAMS, WARPS = 4, LINE = 512;                   // bytes: 16 of each lane
constexpr int FN_LINES = 6, FN_BYTES = STEPS * FN_LINES * LINE, RING_LINES = 20;    // of a warp
constexpr int FINISH_WARPS = 4, PIECES = HIDDEN / 8 / (32 * FINISH_WARPS);
constexpr u32 ALL = ~0u;

struct Arguments {
    const u16 *streams;
    const float *pre;
    const u16 *fn;
    const float *gain, *base, *norm;
    float *sums;  // [tokens, PARTS, SUMS]: of the products, and of the squares of the streams
    u16 *x;
    float *new_pre, *post, *comb;
    i64 num_tokens, num_rounds;
    double eps, mix_eps, norm_eps;
};

__device__ inline void copy_line(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than LEFT groups of this thread's copies are on their way.
template <int LEFT> __device__ inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// 16 rows of fn times 8 tokens, 16 columns.
__device__ inline void multiply(float *sum, Four fn, u32 x, u32 next_x) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(fn.a), "r"(fn.b), "r"(fn.c), "r"(fn.d), "r"(x), "r"(next_x));
}

__device__ inline float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline void add_squares(float &square, const u32 *pairs) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        square = fmaf(low_half(pairs[i]), low_half(pairs[i]), square);
        square = fmaf(high_half(pairs[i]), high_half(pairs[i]), square);
    }
}

__device__ inline void add_share(float *total, const u32 *pairs, float share) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        total[2 * i] = fmaf(share, low_half(pairs[i]), total[2 * i]);
        total[2 * i + 1] = fmaf(share, high_half(pairs[i]), total[2 * i + 1]);
    }
}

// TILES: of 8 tokens, that a warp takes at a time.
template <int TILES> __device__ inline void mix(const Arguments &given) {
    constexpr int STAGES = RING_LINES / TILES, TOKENS = 8 * TILES;
    extern __shared__ __align__(16) u8 memory[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, part = blockIdx.x;
    u32 fn = (u32)__cvta_generic_to_shared(memory) + lane * 16, ring = fn + FN_BYTES + warp * RING_LINES * LINE;
    int num_tokens = (int)given.num_tokens, column = part * STRETCHES * COLUMNS + lane % 4 * 8;
    int stride = gridDim.y * WARPS * TOKENS, first = (blockIdx.y * WARPS + warp) * TOKENS + row;

    const u8 *own_fn = (const u8 *)given.fn + (i64)part * FN_BYTES + lane * 16;
    for (int line = warp; line < STEPS * FN_LINES; line += WARPS) copy_line(fn + line * LINE, own_fn + line * LINE);
    copies_end();
    begin();
    // The next step to copy: of which tokens, which stretch and stream, to which place of the ring.
    int next_token = first, next_step = 0, next_place = 0;
    const u16 *next_line = given.streams + (i64)first * WIDTH + column;
    auto take = [&]() {
        u32 at = ring + next_place * (TILES * LINE);
        const u16 *x = next_line + (next_step / STREAMS * COLUMNS + next_step % STREAMS * HIDDEN);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            if (next_token + 8 * i < num_tokens) copy_line(at + i * LINE, x + 8 * i * WIDTH);
        copies_end();
        next_place = next_place + 1 == STAGES ? 0 : next_place + 1;
        if (++next_step == STEPS) next_step = 0, next_token += stride, next_line += (i64)stride * WIDTH;
    };
#pragma unroll 1
    for (int step = 0; step < STAGES; ++step) take();
    copies_wait<STAGES>();
    __syncthreads();

    int place = 0;
#pragma unroll 1
    for (int token = first; token - row < num_tokens; token += stride) {
        float sums[TILES][2][4] = {}, squares[TILES] = {}, shares[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            float4 share = ((const float4 *)given.pre)[min(token + 8 * i, num_tokens - 1)];
            shares[i][0] = share.x, shares[i][1] = share.y, shares[i][2] = share.z, shares[i][3] = share.w;
        }
#pragma unroll 1
        for (int stretch = 0; stretch < STRETCHES; ++stretch) {
            float collapsed[TILES][8] = {};
#pragma unroll
            for (int stream = 0; stream < STREAMS; ++stream) {
                u32 at = fn + (stretch * STREAMS + stream) * (FN_LINES * LINE);
                Four matrix[FN_LINES];
#pragma unroll
                for (int i = 0; i < FN_LINES; ++i) matrix[i] = load(at + i * LINE);
                copies_wait<STAGES - 1>();
#pragma unroll
                for (int i = 0; i < TILES; ++i) {
                    Four x = load(ring + (place * TILES + i) * LINE);
                    multiply(sums[i][0], matrix[0], x.a, x.b);
                    multiply(sums[i][1], matrix[2], x.a, x.b);
                    multiply(sums[i][0], matrix[1], x.a, x.b);
                    multiply(sums[i][1], matrix[5], x.c, x.d);
                    multiply(sums[i][0], matrix[3], x.c, x.d);
                    multiply(sums[i][0], matrix[4], x.c, x.d);
                    u32 pairs[4] = {x.a, x.b, x.c, x.d};
                    add_share(collapsed[i], pairs, shares[i][stream]);
                    add_squares(squares[i], pairs);
                }
                place = place + 1 == STAGES ? 0 : place + 1;
                take();
            }
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                if (token + 8 * i >= num_tokens) continue;
                float *c = collapsed[i];
                uint4 x = {two_bf16(c[0], c[1]), two_bf16(c[2], c[3]), two_bf16(c[4], c[5]), two_bf16(c[6], c[7])};
                *(uint4 *)(given.x + (i64)(token + 8 * i) * HIDDEN + column + stretch * COLUMNS) = x;
            }
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {  // of mixes row, 8 + row and 16 + row for two tokens
            squares[i] += __shfl_xor_sync(ALL, squares[i], 1);
            squares[i] += __shfl_xor_sync(ALL, squares[i], 2);
            i64 lines = (i64)(token - row + 8 * i) * PARTS + part;
            if (lane % 4 == 0 && token + 8 * i < num_tokens) given.sums[(lines + row * PARTS) * SUMS + MIXES] = squares[i];
#pragma unroll
            for (int other = 0; other < 2; ++other) {
                int which = lane % 4 * 2 + other;
                if (token - row + 8 * i + which >= num_tokens) continue;
                float *line = given.sums + (lines + which * PARTS) * SUMS + row;
                line[0] = sums[i][0][other];
                line[8] = sums[i][0][2 + other];
                line[16] = sums[i][1][other] + sums[i][1][2 + other];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) mix_8(const Arguments given) { mix<1>(given); }
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) mix_16(const Arguments given) { mix<2>(given); }

// The mixes of a token by one warp: each of its lanes has one sum.
__device__ inline void finish_mixes(const Arguments &given, i64 token, int lane) {
    __shared__ float mixes[32];
    const float *parts = given.sums + token * PARTS * SUMS + min(lane, MIXES);
    float values[PARTS], total = 0, eps = (float)given.eps;
    float gain = given.gain[min(lane, MIXES - 1)], base = given.base[min(lane, MIXES - 1)];
    begin();
#pragma unroll
    for (int i = 0; i < PARTS; ++i) values[i] = parts[i * SUMS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) total += values[i];
    float scale = rsqrtf(__shfl_sync(ALL, total, MIXES) * (1.0f / WIDTH) + (float)given.mix_eps);
    float mix = fmaf(total * scale, gain, base), gate = inverse(1.0f + __expf(-mix));
    mixes[lane] = mix;
    if (lane < STREAMS) given.new_pre[token * STREAMS + lane] = gate + eps;
    else if (lane < 2 * STREAMS) given.post[token * STREAMS + lane - STREAMS] = 2 * gate;
    __syncwarp();
    if (lane != 0) return;
    float m[STREAMS][STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS; ++i) {
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) m[i][j] = mixes[(2 + i) * STREAMS + j];
        float peak = fmaxf(fmaxf(m[i][0], m[i][1]), fmaxf(m[i][2], m[i][3]));
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) m[i][j] = __expf(m[i][j] - peak);
        float share = inverse((m[i][0] + m[i][1]) + (m[i][2] + m[i][3]));
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) m[i][j] = fmaf(m[i][j], share, eps);
    }
#pragma unroll 1
    for (int round = 0; round < given.num_rounds; ++round) {
        if (round > 0) {
#pragma unroll
            for (int i = 0; i < STREAMS; ++i) {
                float share = inverse((m[i][0] + m[i][1]) + (m[i][2] + (m[i][3] + eps)));
#pragma unroll
                for (int j = 0; j < STREAMS; ++j) m[i][j] *= share;
            }
        }
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) {
            float share = inverse((m[0][j] + m[1][j]) + (m[2][j] + (m[3][j] + eps)));
#pragma unroll
            for (int i = 0; i < STREAMS; ++i) m[i][j] *= share;
        }
    }
#pragma unroll
    for (int i = 0; i < STREAMS; ++i)
        ((float4 *)given.comb)[token * STREAMS + i] = make_float4(m[i][0], m[i][1], m[i][2], m[i][3]);
}

// A token: four warps norm its collapse, one finishes its mixes.
extern "C" __global__ void __launch_bounds__(32 * (FINISH_WARPS + 1)) finish(const Arguments given) {
    __shared__ float squares[FINISH_WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 token = blockIdx.x;
    if (warp == FINISH_WARPS) return finish_mixes(given, token, lane);
    uint4 *x = (uint4 *)(given.x + token * HIDDEN) + threadIdx.x, pieces[PIECES];
    const float4 *norm = (const float4 *)given.norm + 2 * threadIdx.x;
    float4 weights[PIECES][2];
    float square = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
        weights[i][0] = norm[i * 64 * FINISH_WARPS], weights[i][1] = norm[i * 64 * FINISH_WARPS + 1];
    begin();
#pragma unroll
    for (int i = 0; i < PIECES; ++i) pieces[i] = x[i * 32 * FINISH_WARPS];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        u32 pairs[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
        add_squares(square, pairs);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(ALL, square, step);
    if (lane == 0) squares[warp] = square;
    asm volatile("bar.sync 1, %0;" ::"n"(32 * FINISH_WARPS) : "memory");
    square = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    float scale = rsqrtf(square * (1.0f / HIDDEN) + (float)given.norm_eps);
    auto normed = [&](u32 pair, float a, float b) {
        return two_bf16(a * (low_half(pair) * scale), b * (high_half(pair) * scale));
    };
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        float4 a = weights[i][0], b = weights[i][1];
        uint4 p = pieces[i];
        x[i * 32 * FINISH_WARPS] = {normed(p.x, a.x, a.y), normed(p.y, a.z, a.w), normed(p.z, b.x, b.y), normed(p.w, b.z, b.w)};
    }
}
