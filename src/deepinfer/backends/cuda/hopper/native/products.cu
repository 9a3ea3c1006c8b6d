// Products of tokens with a matrix, or with the matrix of the expert that each token chose: out = x @ matrix^T.
//
// One warp brings rows and tokens to shared memory by bulk copies, 128 columns at a time and some steps ahead, across
// tiles. A block has two groups and tiles of 128 tokens, and a cluster of two blocks shares them, each bringing half to
// both. `few_products.cu` has another form for few tokens.

#include "products.cuh"

constexpr int GROUPS = 2, CLUSTER = 2, TOKENS = 128;

// Steps in the order in which they pass the stages.
struct Turn {
    int stage, parity;
};

template <class FORMAT> struct Shared {
    typedef FORMAT Format;
    static constexpr int STAGES = 180 * 1024 / (TOKENS * STEP + GROUPS * Format::CHUNK);

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

template <class Own> __device__ inline void set_up(Own &own, const Arguments &given) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < own.STAGES; ++stage) {
            init(shared(own.full + stage), 1);
            init(shared(own.empty + stage), GROUPS * 4 * CLUSTER);
        }
        publish();
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    begin();
    if (threadIdx.x < 32) own.tiles.count(given, TOKENS);
    meet();
}

// The tile of this number, and this block's rows of it.
template <class Own> __device__ inline Tile find(const Own &own, const Arguments &given, int number, int stretches) {
    Tile tile = own.tiles.find(given, number, stretches, TOKENS);
    tile.rows = tile.rows * CLUSTER + rank_in_cluster();
    return tile;
}

template <class Own> __device__ inline void bring(Own &own, const Arguments &given, const Tile &tile, Turn &turn) {
    constexpr int CHUNK = Own::Format::CHUNK, BYTES = GROUPS * CHUNK;
    int tokens = padded(tile.count) * STEP, share = tokens / CLUSTER, skipped = rank_in_cluster() * share;
    const u8 *matrix = chunks_of<CHUNK>(given, tile.expert, tile.rows * GROUPS);
    const u8 *x = given.x + (i64)tile.first * STEP + skipped;
    for (int step = 0; step < given.steps; ++step, own.advance(turn)) {
        u32 full = shared(own.full + turn.stage);
        wait(shared(own.empty + turn.stage), turn.parity ^ 1);
        expect(full, tokens + BYTES);
        copy(shared(own.matrix[turn.stage]), matrix, BYTES, full);
        copy_to_all<CLUSTER>(shared(own.tokens[turn.stage]) + skipped, x, share, full);
        matrix += 2 * CHUNK;
        x += given.place_stride * STEP;
    }
}

// A step's left operand of a group's rows.
template <class Own> __device__ inline void read(Own &own, const Turn &turn, Left &left) {
    wait(shared(own.full + turn.stage), turn.parity);
    read<typename Own::Format>(own.matrix[turn.stage][threadIdx.x / GROUP], left);
}

// Tells those who bring tiles that a stage may be filled again.
template <class Own> __device__ inline void leave(Own &own, const Turn &turn) {
    cluster_arrive<CLUSTER>(shared(own.empty + turn.stage));
}

// A step's products, and the next step's left operand.
template <bool IS_LAST, class Own, int SIZE>
__device__ inline void step(
    Own &own, Turn &turn, const Left &left, Left &next, float (&part)[SIZE],
    float (&sums)[SIZE]) {
    Turn after = turn;
    own.advance(after);
    start(shared(own.tokens[turn.stage]), left, part);
    if (!IS_LAST) read(own, after, next);
    products_wait();
    leave(own, turn);
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sums[i] += part[i];
    turn = after;
}

// A group's rows of a tile.
template <int SIZE, class Own>
__device__ inline void take(Own &own, const Arguments &given, const Tile &tile, Turn &turn) {
    int group = threadIdx.x / GROUP, row = (tile.rows * GROUPS + group) * ROWS;
    Scales scales = scales_of(given, tile, row);
    float part[SIZE] = {}, sums[SIZE] = {};
    Left a, b;
    read(own, turn, a);
    for (int at = 2; at < given.steps; at += 2) {
        step<false>(own, turn, a, b, part, sums);
        step<false>(own, turn, b, a, part, sums);
    }
    step<false>(own, turn, a, b, part, sums);
    step<true>(own, turn, b, a, part, sums);
    send_out(given, tile, row, scales, sums, own.out[group], own.factors[group]);
}

template <class Own> __device__ inline void products(const Arguments &given) {
    extern __shared__ __align__(1024) u8 memory[];
    Own &own = *(Own *)memory;
    set_up(own, given);
    constexpr int TILE = GROUPS * CLUSTER * ROWS;
    int stretches = (given.num_rows + TILE - 1) / TILE;
    int tiles = own.tiles.total * stretches;
    int first = blockIdx.x / CLUSTER, apart = gridDim.x / CLUSTER;
    Turn turn = {0, 0};
    if (threadIdx.x >= GROUPS * GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == GROUPS * GROUP)
            for (int number = first; number < tiles; number += apart)
                bring(own, given, find(own, given, number, stretches), turn);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        for (int number = first; number < tiles; number += apart) {
            Tile tile = find(own, given, number, stretches);
            int tokens = padded(tile.count);
            if (tokens == 128) take<64>(own, given, tile, turn);
            else if (tokens == 64) take<32>(own, given, tile, turn);
            else if (tokens == 32) take<16>(own, given, tile, turn);
            else take<8>(own, given, tile, turn);
        }
        stores_wait();
    }
    meet();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(3 * GROUP, 1) many_e4m3(const Arguments given) {
    products<Shared<E4m3>>(given);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(3 * GROUP, 1) many_e2m1(const Arguments given) {
    products<Shared<E2m1>>(given);
}

struct Widening {
    const u8 *from;
    u8 *to;
};

// One chunk: what `E2m1::read` gives each thread goes where `E4m3::read` finds it.
extern "C" __global__ void __launch_bounds__(GROUP) widen(const Widening given) {
    __shared__ __align__(16) u8 chunk[E2m1::CHUNK];
    begin();
    const u8 *from = given.from + (i64)blockIdx.x * E2m1::CHUNK;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8 *to = given.to + (i64)blockIdx.x * E4m3::CHUNK + warp * 256 + lane * 4;
    for (int at = threadIdx.x * 16; at < E2m1::CHUNK; at += GROUP * 16) store(shared(chunk + at), fetch(from + at));
    __syncthreads();
    Left left;
    E2m1::read(shared(chunk), left);
#pragma unroll
    for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *(u32 *)(to + (part * 2 + i / 2) * E4m3::SIXTEEN + i % 2 * 128) = left[part][i];
}
