// Products as in `products.cu`, of so few tokens that a step of 128 columns waits more than it works.
//
// A block has one group, or four of which each takes 64 rows of the tile, and up to 64 tokens. Of a group two steps are
// under way: while the products of one run, the codes of the next come to registers and its products queue behind. Rows
// are on their way before the kernel that makes the tokens has ended; where tokens lie, one before that kernel wrote.

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

// Every second step of a block's tiles, one after the other: rows by one warp, which needs not wait for the kernel before,
// and tokens by another.
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

// ---- products

// A step's left operand of a group's rows, when it is there.
template <class Own> __device__ inline void read(Own &own, const Turn &turn, Left &left) {
    wait(shared(own.full + turn.stage), turn.parity);
    read<typename Own::Format>(own.matrix[turn.stage][threadIdx.x / GROUP], left);
}

// Adds a step's sums, and tells those who bring steps that its stage may be filled again.
template <class Own, int SIZE>
__device__ inline void add(Own &own, int stage, const float (&part)[SIZE], float (&sums)[SIZE]) {
    warp_arrive(shared(own.empty + stage));
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sums[i] += part[i];
}

// One step.
template <class Own, int SIZE> __device__ inline void take_one(Own &own, Turn &turn, float (&sums)[SIZE]) {
    float part[SIZE];
    Left left;
    read(own, turn, left);
    start(shared(own.tokens[turn.stage]), left, part);
    products_wait();
    add(own, turn.stage, part, sums);
    own.advance(turn);
}

// Two steps, of which the first one's left operand is read, and that of the step behind them.
template <bool IS_LAST, class Own, int SIZE>
__device__ inline void take_two(Own &own, Turn &turn, Left &left, float (&sums)[SIZE]) {
    float first[SIZE], second[SIZE];
    Left next;
    int stage = turn.stage;
    start(shared(own.tokens[stage]), left, first);
    own.advance(turn);
    read(own, turn, next);
    start(shared(own.tokens[turn.stage]), next, second);
    products_wait<1>();
    add(own, stage, first, sums);
    stage = turn.stage;
    own.advance(turn);
    if (!IS_LAST) read(own, turn, left);
    products_wait();
    add(own, stage, second, sums);
}

// A group's rows of a tile.
template <int SIZE, class Own>
__device__ inline void take(Own &own, const Arguments &given, const Tile &tile, Turn &turn) {
    int group = threadIdx.x / GROUP, row = (tile.rows * Own::GROUPS + group) * ROWS;
    Scales scales = scales_of(given, tile, row);
    float sums[SIZE] = {};
    if (Own::GROUPS > 1 && SIZE > 16) {  // other groups work while this one waits, and registers are few
        for (int at = 0; at < given.steps; ++at) take_one(own, turn, sums);
    } else {
        Left left;
        read(own, turn, left);
        for (int at = 2; at < given.steps; at += 2) take_two<false>(own, turn, left, sums);
        take_two<true>(own, turn, left, sums);
    }
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
    stores_wait();
}

#define KERNEL(name, format, groups) \
    extern "C" __global__ void __launch_bounds__(groups * GROUP + GROUP, 1) name(const Arguments given) { \
        products<Shared<format, groups>>(given); \
    }

KERNEL(few_e4m3, E4m3, 4)
KERNEL(few_e2m1, E2m1, 4)
KERNEL(fewest_e4m3, E4m3, 1)
KERNEL(fewest_e2m1, E2m1, 1)
