// Products of tokens with a matrix, or with the matrix of the expert that each token chose: out = x @ matrix^T.
//
// One warp brings rows and tokens to shared memory by bulk copies, 128 columns at a time and some steps ahead, across
// tiles. A block has two groups and tiles of 128 tokens, and a cluster of two blocks shares them, each bringing half to
// both. `few_products.cu` has another form for few tokens.

#include "products.cuh"

constexpr int GROUPS = 2, CLUSTER = 2, TOKENS = 128;
constexpr int TURNS = 1, SIGNAL = 2, SPLITS = 1;

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
    u64 full[STAGES], empty[STAGES];
    Tile tile[STAGES];  // whose first step lies in this stage
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

// Tiles taken by `apart` clusters in waves; those of the last wave are cut by tokens where more clusters can share them.
struct Waves {
    int whole, parts, tiles;  // tiles before the last wave; parts of one of it; tiles and parts in all

    __device__ Waves(int number, int apart) {
        int last = number % apart;
        parts = SPLITS && last * 4 <= apart ? 4 : SPLITS && last * 2 <= apart ? 2 : 1;
        whole = number - last, tiles = whole + last * parts;
    }
};

// The tile or part of this number, and this block's rows of it.
template <class Own>
__device__ inline Tile find(const Own &own, const Arguments &given, const Waves &waves, int number, int stretches) {
    int inside = max(0, number - waves.whole), tokens = TOKENS / waves.parts, skipped = inside % waves.parts * tokens;
    Tile tile = own.tiles.find(given, number - inside + inside / waves.parts, stretches, TOKENS);
    if (number >= waves.whole) tile.first += skipped, tile.count = min(tokens, tile.count - skipped);
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
        if (step == 0) own.tile[turn.stage] = tile;
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

// ---- groups in turn: the products of one begin when half of the other's are done. Named barriers 1 to GROUPS are those
// of `meet_group`.

__device__ inline void take_turn(int group) {
    if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(GROUPS + 1 + group) : "memory");
}

__device__ inline void pass_turn(int group) {
    if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(GROUPS + 1 + (group ^ 1)) : "memory");
}

template <class Own, int SIZE>
__device__ inline void begin_step(Own &own, const Turn &turn, const Left &left, float (&part)[SIZE]) {
    u32 tokens = shared(own.tokens[turn.stage]);
    take_turn(threadIdx.x / GROUP);
    products_begin();
#pragma unroll
    for (int columns = 0; columns < 4; ++columns) {
        multiply(part, left[columns], matrix(tokens + columns * 32, 16), columns > 0);
        if (columns == SIGNAL - 1 || columns == 3) products_commit();
    }
    if (TURNS) products_wait<1>();
    pass_turn(threadIdx.x / GROUP);
}

// Adds the products of the step under way, and leaves its stage.
template <bool IS_FIRST, class Own, int SIZE>
__device__ inline void end_step(Own &own, Turn &turn, float (&part)[SIZE], float (&sums)[SIZE]) {
    products_wait();
    cluster_arrive<CLUSTER>(shared(own.empty + turn.stage));
#pragma unroll
    for (int i = 0; i < SIZE; ++i) sums[i] = (IS_FIRST ? 0.0f : sums[i]) + part[i];
    own.advance(turn);
}

// A step's products, and the next step's left operand.
template <class Own, int SIZE>
__device__ inline void step(
    Own &own, Turn &turn, const Left &left, Left &next, float (&part)[SIZE], float (&sums)[SIZE]) {
    Turn after = turn;
    own.advance(after);
    begin_step(own, turn, left, part);
    read(own, after, next);
    end_step<false>(own, turn, part, sums);
}

// A group's rows of tiles of one size, until one of another size comes. A tile's results go out during the first
// products of the next.
template <int SIZE, class Own>
__device__ inline void take(Own &own, const Arguments &given, int tiles, int &number, Turn &turn) {
    int group = threadIdx.x / GROUP;
    float part[SIZE] = {}, sums[SIZE] = {};
    Left a, b;
    Tile tile = own.tile[turn.stage], done = {0, 0, 0, 0};
    Scales<SIZE> scales;
    read(own, turn, a);
    for (bool goes_on = true; goes_on;) {
        Turn after = turn;
        own.advance(after);
        begin_step(own, turn, a, part);
        if (done.count) send_out(given, done, (done.rows * GROUPS + group) * ROWS, scales, sums, own.out[group]);
        read(own, after, b);
        end_step<true>(own, turn, part, sums);
        for (int at = 2; at < given.steps; at += 2) {
            step(own, turn, b, a, part, sums);
            step(own, turn, a, b, part, sums);
        }
        after = turn;
        own.advance(after);
        begin_step(own, turn, b, part);
        done = tile;
        scales = scales_of<SIZE>(given, done, (done.rows * GROUPS + group) * ROWS);
        number += gridDim.x / CLUSTER;
        goes_on = number < tiles;
        if (goes_on) {
            read(own, after, a);
            tile = own.tile[after.stage];
            goes_on = padded(tile.count) == SIZE * 2;
        }
        end_step<false>(own, turn, part, sums);
    }
    send_out(given, done, (done.rows * GROUPS + group) * ROWS, scales, sums, own.out[group]);
}

template <class Own> __device__ inline void products(const Arguments &given) {
    extern __shared__ __align__(1024) u8 memory[];
    Own &own = *(Own *)memory;
    set_up(own, given);
    constexpr int TILE = GROUPS * CLUSTER * ROWS;
    int stretches = (given.num_rows + TILE - 1) / TILE;
    int number = blockIdx.x / CLUSTER, apart = gridDim.x / CLUSTER;
    Waves waves(own.tiles.total * stretches, apart);
    Turn turn = {0, 0};
    if (threadIdx.x >= GROUPS * GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == GROUPS * GROUP)
            for (; number < waves.tiles; number += apart)
                bring(own, given, find(own, given, waves, number, stretches), turn);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int group = threadIdx.x / GROUP;
        if (group == 1) pass_turn(group);
        while (number < waves.tiles) {
            wait(shared(own.full + turn.stage), turn.parity);
            int tokens = padded(own.tile[turn.stage].count);
            if (tokens == 128) take<64>(own, given, waves.tiles, number, turn);
            else if (tokens == 64) take<32>(own, given, waves.tiles, number, turn);
            else if (tokens == 32) take<16>(own, given, waves.tiles, number, turn);
            else take<8>(own, given, waves.tiles, number, turn);
        }
        if (group == 0) take_turn(group);
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
    u8 *to = given.to + (i64)blockIdx.x * E4m3::CHUNK + threadIdx.x * 16;
    for (int at = threadIdx.x * 16; at < E2m1::CHUNK; at += GROUP * 16) store(shared(chunk + at), fetch(from + at));
    __syncthreads();
    Left left;
    E2m1::read(shared(chunk), left);
#pragma unroll
    for (int part = 0; part < 4; ++part)
        *(Four *)(to + part * 2048) = {left[part][0], left[part][1], left[part][2], left[part][3]};
}
