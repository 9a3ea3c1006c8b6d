// Products of tokens with a matrix, or with the matrix of the expert that each token chose: out = x @ matrix^T.
//
// One warp brings rows and tokens to shared memory by bulk copies, 128 columns at a time and some steps ahead, across
// tiles. A block has two groups and tiles of 128 tokens, and a cluster of two blocks shares them, each bringing half to
// both. `few_products.cu` has another form for few tokens.

#include "products.cuh"

constexpr int GROUPS = 2, CLUSTER = 2, TOKENS = 128, HALVES = 2;
constexpr int TURNS = 1, SPLITS = 1, LARGEST = 256;

// Steps in the order in which they pass the stages.
struct Turn {
    int stage, parity;
};

template <class FORMAT> struct Shared {
    typedef FORMAT Format;
    static constexpr int STAGES = 192 * 1024 / (HALVES * TOKENS * STEP + GROUPS * Format::CHUNK);

    u8 tokens[STAGES][HALVES * TOKENS * STEP];
    u8 matrix[STAGES][GROUPS][Format::CHUNK];
    u8 out[GROUPS][64 * OUT_STRIDE];
    float factors[GROUPS][TOKENS];
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
    if (threadIdx.x < 32) own.tiles.count(given, LARGEST);
    meet();
}

// Tiles taken by `apart` clusters in waves; those of the last wave are cut by tokens where more clusters can share them.
struct Waves {
    int whole, parts, tiles;  // tiles before the last wave; parts of one of it; tiles and parts in all

    __device__ Waves(int number, int apart) {
        int last = number % apart;
        parts = SPLITS && LARGEST == 256 && last * 8 <= apart ? 8 : SPLITS && last * 4 <= apart ? 4 : SPLITS && last * 2 <= apart ? 2 : 1;
        whole = number - last, tiles = whole + last * parts;
    }
};

// The tile or part of this number, and this block's rows of it.
template <class Own>
__device__ inline Tile find(const Own &own, const Arguments &given, const Waves &waves, int number, int stretches) {
    int inside = max(0, number - waves.whole), tokens = LARGEST / waves.parts, skipped = inside % waves.parts * tokens;
    Tile tile = own.tiles.find(given, number - inside + inside / waves.parts, stretches, LARGEST);
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

// ---- groups in turn: the products of one begin when the first of the other's are done. Named barriers 1 to GROUPS are
// those of `meet_group`.

__device__ inline void take_turn(int group) {
    if (TURNS) asm volatile("bar.sync %0, 256;" ::"r"(GROUPS + 1 + group) : "memory");
}

__device__ inline void pass_turn(int group) {
    if (TURNS) asm volatile("bar.arrive %0, 256;" ::"r"(GROUPS + 1 + (group ^ 1)) : "memory");
}

template <class Own, int SIZE>
__device__ inline void begin_part(Own &own, const Turn &turn, int half, const Left &left, float (&part)[SIZE]) {
    u32 tokens = shared(own.tokens[turn.stage]) + half * TOKENS * STEP;
    take_turn(threadIdx.x / GROUP);
    products_begin();
#pragma unroll
    for (int columns = 0; columns < 4; ++columns) {
        multiply(part, left[columns], matrix(tokens + columns * 32, 16), columns > 0);
        if (TURNS && columns == 0) products_commit();
    }
    products_commit();
    if (TURNS) products_wait<1>();
    pass_turn(threadIdx.x / GROUP);
}

// The tokens of a tile from this half on.
__device__ inline Tile half_of(const Tile &tile, int half) {
    return {tile.expert, tile.first + half * TOKENS, tile.count - half * TOKENS, tile.rows};
}

// A step's products, and the next step's left operand, if there is one. With all registers in use for sums that is read
// when the products are done.
template <bool IS_FIRST, int SIZE, int NUM, class Own>
__device__ inline void step(
    Own &own, const Arguments &given, Turn &turn, const Left &left, Left &next, bool reads, float (&part)[SIZE],
    float (&sums)[NUM][SIZE], const Tile &done, const Scales (&scales)[NUM]) {
    int group = threadIdx.x / GROUP;
    Turn now = turn;
    own.advance(turn);
#pragma unroll
    for (int half = 0; half < NUM; ++half) {
        begin_part(own, now, half, left, part);
        if (IS_FIRST && done.count > half * TOKENS) {
            send_out(given, half_of(done, half), (done.rows * GROUPS + group) * ROWS, scales[half], sums[half],
                     own.out[group], own.factors[group]);
        }
        if (NUM == 1 && reads) read(own, turn, next);
        products_wait();
        if (half == NUM - 1) cluster_arrive<CLUSTER>(shared(own.empty + now.stage));
#pragma unroll
        for (int i = 0; i < SIZE; ++i) sums[half][i] = (IS_FIRST ? 0.0f : sums[half][i]) + part[i];
    }
    if (NUM > 1 && reads) read(own, turn, next);
}

template <int SIZE, int NUM, class Own>
__device__ inline void take(Own &own, const Arguments &given, int tiles, int &number, Turn &turn) {
    int group = threadIdx.x / GROUP;
    float part[SIZE] = {}, sums[NUM][SIZE] = {};
    Left a, spare;
    Left &b = NUM == 1 ? spare : a;
    Tile tile = own.tile[turn.stage], done = {0, 0, 0, 0};
    Scales scales[NUM] = {};
    read(own, turn, a);
    for (bool goes_on = true; goes_on;) {
        step<true>(own, given, turn, a, b, true, part, sums, done, scales);
        for (int at = 2; at < given.steps; at += 2) {
            step<false>(own, given, turn, b, a, true, part, sums, done, scales);
            step<false>(own, given, turn, a, b, true, part, sums, done, scales);
        }
        done = tile;
#pragma unroll
        for (int half = 0; half < NUM; ++half)
            scales[half] = scales_of(given, half_of(done, half), (done.rows * GROUPS + group) * ROWS);
        number += gridDim.x / CLUSTER;
        goes_on = number < tiles;
        step<false>(own, given, turn, b, a, goes_on, part, sums, done, scales);
        if (goes_on) {
            tile = own.tile[turn.stage];
            goes_on = padded(tile.count) == 2 * SIZE * NUM;
        }
    }
#pragma unroll
    for (int half = 0; half < NUM; ++half)
        send_out(given, half_of(done, half), (done.rows * GROUPS + group) * ROWS, scales[half], sums[half],
                 own.out[group], own.factors[group]);
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
            if (tokens == 256) take<64, 2>(own, given, waves.tiles, number, turn);
            else if (tokens == 128) take<64, 1>(own, given, waves.tiles, number, turn);
            else if (tokens == 64) take<32, 1>(own, given, waves.tiles, number, turn);
            else if (tokens == 32) take<16, 1>(own, given, waves.tiles, number, turn);
            else take<8, 1>(own, given, waves.tiles, number, turn);
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
