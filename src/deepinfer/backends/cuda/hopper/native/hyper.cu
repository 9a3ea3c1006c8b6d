// Entering a half layer at the released sizes, 4 streams of 5,120 columns and 24 mixes, in one pass over the streams; the
// half before may be left in the same pass.
//
// `enter` takes one part of the columns of every stream, for the product with fn and the collapse of the streams need the
// same ones; `leave_and_enter` makes these streams first. A block keeps its part of fn in shared memory and goes through
// tokens, eight at a time for each warp. A thread multiplies 8 columns that lie side by side, so the 16 bytes of a token
// come in the form in which the matrix unit takes them; each thread copies its own to a ring, a unit ahead, and waits for
// nobody. A unit is 64 columns: whole lines of memory. `finish` adds the parts in order, norms the collapse and does the
// Sinkhorn rounds. The order of a token's sums does not depend on the number of tokens.
//
// fn is the sum of two bf16 matrices, in fragments of m16n8k16: of 8 rows each, the high part's first and second, the
// low part's, and the third of both (`packed_fn` in hyper.py).

#include "hopper.cuh"

constexpr int STREAMS = 4, HIDDEN = 5120, WIDTH = STREAMS * HIDDEN, MIXES = (2 + STREAMS) * STREAMS, SUMS = MIXES + 1;
constexpr int COLUMNS = 32, HALVES = 2, UNITS = 2;  // columns of a step; steps of a unit; units of a part
constexpr int PART = COLUMNS * HALVES * UNITS, PARTS = HIDDEN / PART, WARPS = 6, STAGES = 2;
constexpr int LINE = 512, FN_LINES = 6, FN_BYTES = UNITS * HALVES * STREAMS * FN_LINES * LINE;  // 16 bytes of each lane
constexpr int UNIT_BYTES = (STREAMS + 1) * HALVES * LINE;
constexpr int FINISH_WARPS = 4, PIECES = HIDDEN / 8 / (32 * FINISH_WARPS);
constexpr u32 ALL = ~0u;

struct Arguments {
    const u16 *streams;
    const float *pre;
    const u16 *output;  // this and the next two: of the half that is left
    const float *old_post, *old_comb;
    u16 *left;  // streams that it leaves
    const u16 *fn;
    const float *gain, *base, *norm;
    float *sums;  // [tokens, PARTS, SUMS]: of the products, and of the squares of the streams
    u16 *x;
    float *new_pre, *post, *comb;
    i64 num_tokens, num_rounds;
    double eps, mix_eps, norm_eps;
};

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

// A warp's next unit of eight tokens, for which it has copied all before.
struct Next {
    int token, unit, stage;
};

// Starts a thread's copies of the next unit: its token's streams and, if that is to be spread, the output.
template <bool LEAVES>
__device__ inline void take(const Arguments &given, Next &next, u32 ring, int column, int stride) {
    if (next.token < (int)given.num_tokens) {
        u32 to = ring + next.stage * UNIT_BYTES;
        int from = column + next.unit * (HALVES * COLUMNS);
        const u16 *streams = given.streams + (i64)next.token * WIDTH + from;
        const u16 *output = given.output + (i64)next.token * HIDDEN + from;
#pragma unroll
        for (int input = 0; input < STREAMS + LEAVES; ++input)
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
                copy_line(to + (input * HALVES + half) * LINE,
                          (input < STREAMS ? streams + input * HIDDEN : output) + half * COLUMNS);
    }
    copies_end();
    if (++next.stage == STAGES) next.stage = 0;
    if (++next.unit == UNITS) next.unit = 0, next.token += stride;
}

// streams[j] = post[j] * output + sum over i of comb[i][j] * streams[i], in the order of `leave_kernel` in hyper.py.
__device__ inline void spread(u32 (&streams)[STREAMS][4], const u32 (&output)[4], const float *post, const float *comb) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        float low[STREAMS], high[STREAMS];
#pragma unroll
        for (int i = 0; i < STREAMS; ++i) low[i] = low_half(streams[i][pair]), high[i] = high_half(streams[i][pair]);
#pragma unroll
        for (int j = 0; j < STREAMS; ++j) {
            float a = fmaf(post[j], low_half(output[pair]), comb[j] * low[0]);
            float b = fmaf(post[j], high_half(output[pair]), comb[j] * high[0]);
#pragma unroll
            for (int i = 1; i < STREAMS; ++i)
                a = fmaf(comb[i * STREAMS + j], low[i], a), b = fmaf(comb[i * STREAMS + j], high[i], b);
            streams[j][pair] = two_bf16(a, b);
        }
    }
}

__device__ inline void load_four(float *to, const float *from) {
    float4 four = *(const float4 *)from;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

template <bool LEAVES> __device__ inline void mix(const Arguments &given) {
    extern __shared__ __align__(16) u8 memory[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, part = blockIdx.x;
    u32 fn = shared(memory) + lane * 16, ring = fn + FN_BYTES + warp * STAGES * UNIT_BYTES;
    int num_tokens = (int)given.num_tokens, column = part * PART + lane % 4 * 8;
    int stride = gridDim.y * WARPS * 8, first = (blockIdx.y * WARPS + warp) * 8 + row;

    const u8 *own_fn = (const u8 *)given.fn + (i64)part * FN_BYTES + lane * 16;
    for (int at = warp * LINE; at < FN_BYTES; at += WARPS * LINE) copy_line(fn + at, own_fn + at);
    copies_end();
    begin();
    Next next = {first, 0, 0};
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) take<LEAVES>(given, next, ring, column, stride);
    copies_wait<STAGES>();
    __syncthreads();

    int stage = 0;
#pragma unroll 1
    for (int token = first; token - row < num_tokens; token += stride) {
        float high[4] = {}, low[4] = {}, third[4] = {}, square = 0, pre[STREAMS], post[STREAMS], comb[STREAMS * STREAMS];
        i64 known = min(token, num_tokens - 1);
        load_four(pre, given.pre + known * STREAMS);
        if (LEAVES) {
            load_four(post, given.old_post + known * STREAMS);
#pragma unroll
            for (int i = 0; i < STREAMS; ++i)
                load_four(comb + i * STREAMS, given.old_comb + (known * STREAMS + i) * STREAMS);
        }
#pragma unroll 1
        for (int unit = 0; unit < UNITS; ++unit) {
            copies_wait<STAGES - 1>();
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                u32 at = ring + stage * UNIT_BYTES + half * LINE;
                int to = column + (unit * HALVES + half) * COLUMNS;
                u32 streams[STREAMS][4], output[4];
#pragma unroll
                for (int i = 0; i < STREAMS + LEAVES; ++i) {
                    Four v = load(at + i * HALVES * LINE);
                    u32 *words = i < STREAMS ? streams[i] : output;
                    words[0] = v.a, words[1] = v.b, words[2] = v.c, words[3] = v.d;
                }
                if (LEAVES) {
                    spread(streams, output, post, comb);
#pragma unroll
                    for (int i = 0; i < STREAMS; ++i)
                        if (token < num_tokens)
                            *(uint4 *)(given.left + (i64)token * WIDTH + i * HIDDEN + to) =
                                make_uint4(streams[i][0], streams[i][1], streams[i][2], streams[i][3]);
                }
                float c[8] = {};
#pragma unroll
                for (int i = 0; i < STREAMS; ++i) {
                    u32 matrix_at = fn + ((unit * HALVES + half) * STREAMS + i) * (FN_LINES * LINE);
                    Four matrix[FN_LINES];
                    const u32 *x = streams[i];
#pragma unroll
                    for (int line = 0; line < FN_LINES; ++line) matrix[line] = load(matrix_at + line * LINE);
                    multiply(high, matrix[0], x[0], x[1]);
                    multiply(low, matrix[1], x[0], x[1]);
                    multiply(third, matrix[2], x[0], x[1]);
                    multiply(high, matrix[3], x[2], x[3]);
                    multiply(low, matrix[4], x[2], x[3]);
                    multiply(third, matrix[5], x[2], x[3]);
                    add_share(c, x, pre[i]);
                    add_squares(square, x);
                }
                if (token < num_tokens)
                    *(uint4 *)(given.x + (i64)token * HIDDEN + to) = make_uint4(
                        two_bf16(c[0], c[1]), two_bf16(c[2], c[3]), two_bf16(c[4], c[5]), two_bf16(c[6], c[7]));
                __syncwarp();
            }
            if (++stage == STAGES) stage = 0;
            take<LEAVES>(given, next, ring, column, stride);
        }
        square += __shfl_xor_sync(ALL, square, 1);
        square += __shfl_xor_sync(ALL, square, 2);
        i64 lines = (i64)(token - row) * PARTS + part;
        if (lane % 4 == 0 && token < num_tokens) given.sums[(lines + row * PARTS) * SUMS + MIXES] = square;
#pragma unroll
        for (int other = 0; other < 2; ++other) {  // of mixes row, 8 + row and 16 + row for two tokens
            int which = lane % 4 * 2 + other;
            if (token - row + which >= num_tokens) continue;
            float *line = given.sums + (lines + which * PARTS) * SUMS + row;
            line[0] = high[other] + low[other];
            line[8] = high[2 + other] + low[2 + other];
            line[16] = third[other] + third[2 + other];
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) enter(const Arguments given) { mix<false>(given); }
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) leave_and_enter(const Arguments given) { mix<true>(given); }

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
