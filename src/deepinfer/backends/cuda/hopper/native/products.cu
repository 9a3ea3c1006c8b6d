// Products of tokens with a matrix, or with the matrix of the expert that each token chose: out = x @ matrix^T.
//
// One warp brings rows and tokens to shared memory by bulk copies, 128 columns at a time and some steps ahead, across
// tiles. A block has two groups and tiles of up to 128 tokens, and a cluster of two blocks shares them, each bringing half
// to both. With more tokens a tile has 256, of which a group multiplies one half after the other: its rows come to
// registers once for both. `few_products.cu` has another form for few tokens.

#include "products.cuh"

constexpr int GROUPS = 2, CLUSTER = 2, TOKENS = 128;

// Steps in the order in which they pass the stages.
struct Turn {
    int stage, parity;
};

template <class FORMAT, int HALVES> struct Shared {
    typedef FORMAT Format;
    static constexpr int LARGEST = HALVES * TOKENS;  // tokens of a tile
    static constexpr int STAGES = 196 * 1024 / (LARGEST * STEP + GROUPS * Format::CHUNK);

    u8 tokens[STAGES][LARGEST * STEP];
    u8 matrix[STAGES][GROUPS][Format::CHUNK];
    u8 out[GROUPS][PIECE * OUT_STRIDE];
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
    if (threadIdx.x < 32) own.tiles.count(given, Own::LARGEST);
    meet();
}

// Tiles taken by `apart` clusters in waves; those of the last wave are cut by tokens where more clusters can share them.
struct Waves {
    int whole, parts, tiles;  // tiles before the last wave; parts of one of it; tiles and parts in all

    __device__ Waves(int number, int apart) {
        int last = number % apart;
        parts = last * 4 <= apart ? 4 : last * 2 <= apart ? 2 : 1;
        whole = number - last, tiles = whole + last * parts;
    }
};

// The tile or part of this number, and this block's rows of it.
template <class Own>
__device__ inline Tile find(const Own &own, const Arguments &given, const Waves &waves, int number, int stretches) {
    int inside = max(0, number - waves.whole), tokens = Own::LARGEST / waves.parts;
    int skipped = inside % waves.parts * tokens;
    Tile tile = own.tiles.find(given, number - inside + inside / waves.parts, stretches, Own::LARGEST);
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

// ---- groups in turn, where codes are widened: the products of one begin when the first of the other's are done, so one
// widens while the other multiplies. Named barriers 1 to GROUPS are those of `meet_group`.

template <class Own> __device__ inline void take_turn(int group) {
    if (Own::Format::WIDENS) asm volatile("bar.sync %0, 256;" ::"r"(GROUPS + 1 + group) : "memory");
}

template <class Own> __device__ inline void pass_turn(int group) {
    if (Own::Format::WIDENS) asm volatile("bar.arrive %0, 256;" ::"r"(GROUPS + 1 + (group ^ 1)) : "memory");
}

// Starts the products of a step with half of its tokens.
template <class Own, int SIZE>
__device__ inline void begin_step(Own &own, const Turn &turn, int half, const Left &left, float (&part)[SIZE]) {
    u32 tokens = shared(own.tokens[turn.stage]) + half * TOKENS * STEP;
    take_turn<Own>(threadIdx.x / GROUP);
    products_begin();
#pragma unroll
    for (int columns = 0; columns < 4; ++columns) {
        multiply(part, left[columns], matrix(tokens + columns * 32, 16), columns > 0);
        if (Own::Format::WIDENS && columns == 0) products_commit();
    }
    products_commit();
    if (Own::Format::WIDENS) products_wait<1>();
    pass_turn<Own>(threadIdx.x / GROUP);
}

__device__ inline int row_of(const Tile &tile) { return (tile.rows * GROUPS + threadIdx.x / GROUP) * ROWS; }

// The tokens of a tile from this half on.
__device__ inline Tile half_of(const Tile &tile, int half) {
    return {tile.expert, tile.first + half * TOKENS, tile.count - half * TOKENS, tile.rows};
}

// Results of half of a tile's tokens.
template <int SIZE> struct Results {
    float sums[SIZE];
    Scales scales;
};

// Of a tile whose sums are complete.
template <int NUM, int SIZE, class Own>
__device__ inline void send_half(
    Own &own, const Arguments &given, const Tile &done, int half, const Results<SIZE> (&results)[NUM]) {
    int group = threadIdx.x / GROUP;
    send_out(given, half_of(done, half), row_of(done), results[half].scales, results[half].sums, own.out[group],
             own.factors[group]);
}

// A step's products, and the next step's left operand, if it `reads` one: with two halves in the same registers, once the
// products are done. During the first ones of a tile the results of the tile before it go out.
template <bool IS_FIRST, int SIZE, int NUM, class Own>
__device__ inline void step(
    Own &own, const Arguments &given, Turn &turn, const Left &left, Left &next, bool reads, float (&part)[SIZE],
    Results<SIZE> (&results)[NUM], const Tile &done) {
    Turn now = turn;
    own.advance(turn);
#pragma unroll
    for (int half = 0; half < NUM; ++half) {
        begin_step(own, now, half, left, part);
        if (IS_FIRST && done.count > 0) send_half(own, given, done, half, results);
        if (NUM == 1 && reads) read(own, turn, next);
        products_wait();
        if (half == NUM - 1) cluster_arrive<CLUSTER>(shared(own.empty + now.stage));
        float (&sums)[SIZE] = results[half].sums;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) sums[i] = (IS_FIRST ? 0.0f : sums[i]) + part[i];
    }
    if (NUM > 1 && reads) read(own, turn, next);
}

// A group's rows of tiles of NUM times up to 2 * SIZE tokens, until there comes one of another size.
template <int SIZE, int NUM, class Own>
__device__ inline void take(Own &own, const Arguments &given, int tiles, int &number, Turn &turn) {
    float part[SIZE] = {};
    Results<SIZE> results[NUM] = {};
    Left a, spare;
    Left &b = NUM == 1 ? spare : a;
    Tile tile = own.tile[turn.stage], done = {0, 0, 0, 0};
    read(own, turn, a);
    for (bool goes_on = true; goes_on;) {
        step<true>(own, given, turn, a, b, true, part, results, done);
        for (int at = 2; at < given.steps; at += 2) {
            step<false>(own, given, turn, b, a, true, part, results, done);
            step<false>(own, given, turn, a, b, true, part, results, done);
        }
        done = tile;
#pragma unroll
        for (int half = 0; half < NUM; ++half)
            results[half].scales = scales_of(given, half_of(done, half), row_of(done));
        number += gridDim.x / CLUSTER;
        goes_on = number < tiles;
        step<false>(own, given, turn, b, a, goes_on, part, results, done);
        if (goes_on) {
            tile = own.tile[turn.stage];
            goes_on = padded(tile.count) == 2 * SIZE * NUM;
        }
    }
#pragma unroll
    for (int half = 0; half < NUM; ++half) send_half(own, given, done, half, results);
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
        if (group == 1) pass_turn<Own>(group);
        while (number < waves.tiles) {
            wait(shared(own.full + turn.stage), turn.parity);
            int tokens = padded(own.tile[turn.stage].count);
            if (Own::LARGEST == 256 && tokens == 256) take<64, 2>(own, given, waves.tiles, number, turn);
            else if (tokens == 128) take<64, 1>(own, given, waves.tiles, number, turn);
            else if (tokens == 64) take<32, 1>(own, given, waves.tiles, number, turn);
            else if (tokens == 32) take<16, 1>(own, given, waves.tiles, number, turn);
            else take<8, 1>(own, given, waves.tiles, number, turn);
        }
        if (group == 0) take_turn<Own>(group);
    }
    meet();
}

#define KERNEL(name, format, halves) \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(3 * GROUP, 1) name( \
        const Arguments given) { \
        products<Shared<format, halves>>(given); \
    }

KERNEL(many_e4m3, E4m3, 1)
KERNEL(many_e2m1, E2m1, 1)
KERNEL(most_e4m3, E4m3, 2)
KERNEL(most_e2m1, E2m1, 2)

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
