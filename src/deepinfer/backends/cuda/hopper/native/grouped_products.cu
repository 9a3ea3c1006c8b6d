// Products of few bf16 tokens with a matrix of each group of their columns: out = x @ matrix^T, of each group.
//
// Matrices are e4m3 with a power of two for each tile of 32 x 32, and widened in registers: exactly, so results have the
// bits of bf16 matrices. One thread brings rows, ahead of the kernel that makes the tokens; four warps bring tokens, 16 bytes at
// a time. A block takes 64 rows and up to 64 tokens. Columns are summed in their order by the matrix unit.

#include "products.cuh"

constexpr int TOKENS = 64, CHUNK = 8192 + 32;  // codes of 64 rows and 128 columns, factors of their 2 x 4 tiles
constexpr int STAGES = 200 * 1024 / (TOKENS * STEP * 2 + CHUNK);

struct Shared {
    u8 tokens[STAGES][2][TOKENS * STEP];  // of each half of a step's columns
    u8 matrix[STAGES][CHUNK];
    u8 out[TOKENS * OUT_STRIDE];
    float factors[TOKENS];
    u64 full[STAGES], empty[STAGES];
};

// Steps in the order in which they pass the stages.
struct Turn {
    int stage = 0, parity = 0;

    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ inline void bring_rows(Shared &own, const Arguments &given, int rows) {
    const u8 *matrix = given.matrix + rows * given.steps * CHUNK;
    Turn turn;
    for (int step = 0; step < given.steps; ++step, turn.advance()) {
        u32 full = shared(own.full + turn.stage);
        wait(shared(own.empty + turn.stage), turn.parity ^ 1);
        expect(full, CHUNK);
        copy(shared(own.matrix[turn.stage]), matrix + step * CHUNK, CHUNK, full);
    }
}

// Tokens of the columns that the rows' group has; behind the last token, that one.
__device__ inline void bring_tokens(Shared &own, const Arguments &given, const Tile &tile) {
    int thread = threadIdx.x % GROUP, piece = thread % 16, count = padded(tile.count);
    i64 width = given.steps * STEP, group = tile.rows * ROWS / (given.num_rows / given.num_experts);
    const u16 *x = (const u16 *)given.x + group * width + piece * 8;
    Turn turn;
    for (int step = 0; step < given.steps; ++step, turn.advance(), x += STEP) {
        wait(shared(own.empty + turn.stage), turn.parity ^ 1);
        for (int token = thread / 16; token < count; token += GROUP / 16) {
            const u16 *from = x + (tile.first + min(token, tile.count - 1)) * given.num_experts * width;
            u32 to = shared(own.tokens[turn.stage][piece / 8]) + token * 128 + ((piece ^ token) & 7) * 16;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared(own.full + turn.stage)) : "memory");
    }
}

typedef u32 Wide[8][4];  // left operands of 64 rows and 8 times 16 columns

__device__ inline u32 times(u32 pair, u32 factors) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factors));
    return product;
}

// A step's left operand, when it is there. A code's bits lie in bf16 as those of 2^-120 times its number; the factor of
// its tile makes up for it.
__device__ inline void read(Shared &own, const Turn &turn, Wide &left) {
    u32 thread = threadIdx.x % GROUP, at = shared(own.matrix[turn.stage]);
    wait(shared(own.full + turn.stage), turn.parity);
    publish();  // tokens, which came without the copy engine
    Four factors = load(at + 8192 + thread / 64 * 16);
    u32 factor[4] = {factors.a, factors.b, factors.c, factors.d};
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // 32 columns
        Four codes = load(at + part * 2048 + thread * 16);
        u32 words[4] = {codes.a, codes.b, codes.c, codes.d};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 odd = words[i] >> 4 & 0x07F007F0 | words[i] & 0x80008000;
            u32 even = words[i] << 4 & 0x07F007F0 | words[i] << 8 & 0x80008000;
            left[part * 2 + i / 2][i % 2 * 2] = times(even, factor[part]);
            left[part * 2 + i / 2][i % 2 * 2 + 1] = times(odd, factor[part]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)  // widened here, and not where they are used
        asm volatile("" : "+r"(left[i][0]), "+r"(left[i][1]), "+r"(left[i][2]), "+r"(left[i][3]));
}

// ---- sums [64 rows, 2 * size tokens] += a [64, 16] tokens [tokens, 16]^T

#define ADD(shape, sums, left, right) \
    "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" sums "}, " left ", " right ", 1, 1, 1, 0;"

__device__ inline void multiply(float (&d)[8], const u32 (&a)[4], u64 b) {
    asm volatile(ADD("m64n16k16", SUMS8, "{%8,%9,%10,%11}", "%12")
                 : ACC8(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void multiply(float (&d)[16], const u32 (&a)[4], u64 b) {
    asm volatile(ADD("m64n32k16", SUMS16, "{%16,%17,%18,%19}", "%20")
                 : ACC8(d, 0), ACC8(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void multiply(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile(ADD("m64n64k16", SUMS32, "{%32,%33,%34,%35}", "%36")
                 : ACC32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <int SIZE> __device__ inline void start(Shared &own, int stage, const Wide &left, float (&sums)[SIZE]) {
    u64 right = matrix(shared(own.tokens[stage]), 16);
    products_begin();
#pragma unroll
    for (int i = 0; i < 8; ++i) multiply(sums, left[i], further(right, i / 4 * TOKENS * STEP + i % 4 * 32));
    products_commit();
}

// Two steps, of which the first one's left operand is read, and that of the step behind them.
template <bool IS_LAST, int SIZE>
__device__ inline void take_two(Shared &own, Turn &turn, Wide &left, float (&sums)[SIZE]) {
    Wide next;
    Turn first = turn;
    start(own, first.stage, left, sums);
    turn.advance();
    Turn second = turn;
    read(own, second, next);
    start(own, second.stage, next, sums);
    products_wait<1>();
    warp_arrive(shared(own.empty + first.stage));
    turn.advance();
    if (!IS_LAST) read(own, turn, left);
    products_wait();
    warp_arrive(shared(own.empty + second.stage));
}

template <int SIZE> __device__ inline void take(Shared &own, const Arguments &given, const Tile &tile) {
    float sums[SIZE] = {};
    Wide left;
    Turn turn;
    read(own, turn, left);
    for (int at = 2; at < given.steps; at += 2) take_two<false>(own, turn, left, sums);
    take_two<true>(own, turn, left, sums);
    send_out(given, tile, tile.rows * ROWS, {1.0f, 1.0f, 1.0f}, sums, own.out, own.factors);
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped(const Arguments given) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared &own = *(Shared *)memory;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(shared(own.full + stage), 1 + GROUP);
            init(shared(own.empty + stage), 4);
        }
        publish();
    }
    __syncthreads();
    int first = blockIdx.y * TOKENS;
    Tile tile = {0, first, min(TOKENS, (int)given.num_places - first), (int)blockIdx.x};
    if (threadIdx.x >= GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 2 * GROUP) bring_rows(own, given, tile.rows);
        if (threadIdx.x >= 2 * GROUP) return;
        begin();
        bring_tokens(own, given, tile);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
    begin();
    int tokens = padded(tile.count);
    if (tokens == 64) take<32>(own, given, tile);
    else if (tokens == 32) take<16>(own, given, tile);
    else take<8>(own, given, tile);
}
