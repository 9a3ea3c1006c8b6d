// Products as in `products.cu`, of so few tokens that a step of 128 columns waits more than it works.
//
// A block has one group, or four of which each takes 64 rows of the tile, and up to 64 tokens. While the products of a
// step run, the next e2m1 codes come to registers; e4m3 ones are read where they lie. Of one group, products of two
// steps queue. Rows are on their way before the kernel that makes the tokens has ended; where tokens lie, one before
// that kernel wrote.

#include "products.cuh"

constexpr int TOKENS = 64;

// Steps in the order in which they pass the stages.
struct Turn {
    int stage, parity;
};

template <class FORMAT, int OF> struct Shared {
    typedef FORMAT Format;
    static constexpr int GROUPS = OF, STAGES = 176 * 1024 / (TOKENS * STEP + GROUPS * Format::CHUNK);

    u8 tokens[STAGES][TOKENS * STEP];
    u8 matrix[STAGES][GROUPS][Format::CHUNK];
    u8 out[GROUPS][TOKENS * OUT_STRIDE];
    float factors[GROUPS][TOKENS];
    u64 full[STAGES], empty[STAGES];
    Tiles tiles;

    __device__ void advance(Turn &turn) const {
        if (++turn.stage == STAGES) turn = {0, turn.parity ^ 1};
    }
};

// ---- steps on their way to shared memory

// Every second step of a block's tiles, one after the other: rows by one warp, which need not wait for the kernel
// before, and tokens by another.
template <bool ROWS_NOT_TOKENS, class Own>
__device__ inline void bring(Own &own, const Arguments &given, int stretches, int tiles, int odd) {
    constexpr int CHUNK = Own::Format::CHUNK, SIDE_BY_SIDE = Own::GROUPS > 1 ? 2 : 1;
    int stage = odd, parity = 1;
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        Tile tile = own.tiles.find(given, number, stretches, TOKENS);
        int bytes = padded(tile.count) * STEP;
        const u8 *matrix = chunks_of<CHUNK>(given, tile.expert, tile.rows * Own::GROUPS);
        const u8 *x = given.x + (i64)tile.first * STEP;
        for (int step = odd; step < given.steps; step += 2) {
            u32 full = shared(own.full + stage);
            wait(shared(own.empty + stage), parity);
            if (ROWS_NOT_TOKENS) {
                expect(full, bytes + Own::GROUPS * CHUNK);
#pragma unroll
                for (int group = 0; group < Own::GROUPS; group += 2)
                    copy(shared(own.matrix[stage][group]), matrix + (group * given.steps + step * 2) * CHUNK,
                         SIDE_BY_SIDE * CHUNK, full);
            } else copy(shared(own.tokens[stage]), x + step * given.place_stride * STEP, bytes, full);
            if ((stage += 2) >= Own::STAGES) stage -= Own::STAGES, parity ^= 1;
        }
    }
}

// ---- left operands: e2m1 widened in registers, e4m3 where it lies

__device__ inline void multiply(float (&d)[8], u64 a, u64 b, bool adds) {
    asm volatile(MULTIPLY("m64n16k32", SUMS8, "%8", "%9", "%10") : ACC8(d, 0) : "l"(a), "l"(b), "r"((int)adds));
}

__device__ inline void multiply(float (&d)[16], u64 a, u64 b, bool adds) {
    asm volatile(MULTIPLY("m64n32k32", SUMS16, "%16", "%17", "%18")
                 : ACC8(d, 0), ACC8(d, 8) : "l"(a), "l"(b), "r"((int)adds));
}

__device__ inline void multiply(float (&d)[32], u64 a, u64 b, bool adds) {
    asm volatile(MULTIPLY("m64n64k32", SUMS32, "%32", "%33", "%34") : ACC32(d, 0) : "l"(a), "l"(b), "r"((int)adds));
}

template <class FORMAT> struct Operand;

template <> struct Operand<E2m1> {
    Left left;

    __device__ void read(const u8 *chunk) { ::read<E2m1>(chunk, left); }
    template <int SIZE> __device__ void start(u32 tokens, float (&part)[SIZE]) const { ::start(tokens, left, part); }
};

template <> struct Operand<E4m3> {
    u32 at;

    __device__ void read(const u8 *chunk) { at = shared(chunk); }

    template <int SIZE> __device__ void start(u32 tokens, float (&part)[SIZE]) const {
        u64 rows = at >> 4 | u64(E4m3::SIXTEEN >> 4) << 16 | u64(128 >> 4) << 32, right = matrix(tokens, 16);
        products_begin();
#pragma unroll
        for (int columns = 0; columns < 4; ++columns)
            multiply(part, further(rows, columns * 2 * E4m3::SIXTEEN), further(right, columns * 32), columns > 0);
        products_commit();
    }
};

// ---- products

// A step's left operand of a group's rows, when it is there.
template <class Own> __device__ inline void read(Own &own, const Turn &turn, Operand<typename Own::Format> &rows) {
    wait(shared(own.full + turn.stage), turn.parity);
    rows.read(own.matrix[turn.stage][Own::GROUPS > 1 ? threadIdx.x / GROUP : 0]);
}

// Adds a step's sums, and tells those who bring steps that its stage may be filled again.
template <class Own, int SIZE>
__device__ inline void add(Own &own, int stage, const float (&part)[SIZE], float (&sums)[SIZE]) {
    warp_arrive(shared(own.empty + stage));
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sums[i] += part[i];
}

// Two steps of which the first one's left operand is read, and that of the step behind them. Where a block has one
// group, the products of both are under way at once.
template <bool IS_LAST, int SIZE, class Own>
__device__ inline void take_two(Own &own, Turn &turn, Operand<typename Own::Format> (&rows)[2], float (&sums)[SIZE]) {
    constexpr bool BOTH = Own::GROUPS == 1;
    float part[1 + BOTH][SIZE];
    int stage = turn.stage;
    rows[0].start(shared(own.tokens[stage]), part[0]);
    own.advance(turn);
    read(own, turn, rows[1]);
    if (!BOTH) products_wait(), add(own, stage, part[0], sums);
    rows[1].start(shared(own.tokens[turn.stage]), part[BOTH]);
    if (BOTH) products_wait<1>(), add(own, stage, part[0], sums);
    stage = turn.stage;
    own.advance(turn);
    if (!IS_LAST) read(own, turn, rows[0]);
    products_wait();
    add(own, stage, part[BOTH], sums);
}

// A group's rows of a tile.
template <int SIZE, class Own>
__device__ inline void take(Own &own, const Arguments &given, const Tile &tile, Turn &turn) {
    int group = threadIdx.x / GROUP, row = (tile.rows * Own::GROUPS + group) * ROWS;
    Scales scales = scales_of(given, tile, row);
    float sums[SIZE] = {};
    Operand<typename Own::Format> rows[2];
    read(own, turn, rows[0]);
    for (int at = 2; at < given.steps; at += 2) take_two<false>(own, turn, rows, sums);
    take_two<true>(own, turn, rows, sums);
    send_out(given, tile, row, scales, sums, own.out[group], own.factors[group]);
}

template <class Own> __device__ inline void products(const Arguments &given) {
    extern __shared__ __align__(1024) u8 memory[];
    Own &own = *(Own *)memory;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < own.STAGES; ++stage) {
            init(shared(own.full + stage), 1);
            init(shared(own.empty + stage), Own::GROUPS * 4);
        }
        publish();
    }
    if (threadIdx.x < 32) own.tiles.count(given, TOKENS);
    __syncthreads();
    constexpr int TILE = Own::GROUPS * ROWS;
    int stretches = (given.num_rows + TILE - 1) / TILE, tiles = own.tiles.total * stretches;
    if (threadIdx.x >= Own::GROUPS * GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        int warp = threadIdx.x / 32 % 4;
        if (threadIdx.x % 32 > 0) return;
        if (warp > 1) begin();
        if (warp > 1) bring<false>(own, given, stretches, tiles, warp - 2);
        else bring<true>(own, given, stretches, tiles, warp);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Own::GROUPS > 1 ? 112 : 192));
    begin();
    Turn turn = {0, 0};
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        Tile tile = own.tiles.find(given, number, stretches, TOKENS);
        int tokens = padded(tile.count);
        if (tokens == 64) take<32>(own, given, tile, turn);
        else if (tokens == 32) take<16>(own, given, tile, turn);
        else take<8>(own, given, tile, turn);
    }
}

#define KERNEL(name, format, groups) \
    extern "C" __global__ void __launch_bounds__(groups * GROUP + GROUP, 1) name(const Arguments given) { \
        products<Shared<format, groups>>(given); \
    }

KERNEL(few_e4m3, E4m3, 4)
KERNEL(few_e2m1, E2m1, 4)
KERNEL(fewest_e4m3, E4m3, 1)
KERNEL(fewest_e2m1, E2m1, 1)
