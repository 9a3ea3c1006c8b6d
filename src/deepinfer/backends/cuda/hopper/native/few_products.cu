// Products as in `products.cu`, of so few tokens and rows that their tiles would leave most of the device idle.
//
// A block takes 64 rows of a tile and up to 64 tokens, of which each of two blocks brings half to both. It goes two steps
// at a time: a unit. Two groups take units in turn, so the products of one run while the other's codes come to registers.
// Sums go from group to group through shared memory, and each adds its own parts when its turn comes: in the order of the
// steps, as everywhere. Rows are on their way before the kernel that makes the tokens has ended; where tokens lie, one
// before that kernel wrote.

#include "products.cuh"

constexpr int GROUPS = 2, CLUSTER = 2, TOKENS = 64, BRINGERS = 4, THREADS = GROUPS * GROUP + BRINGERS * 32;

template <class FORMAT> struct Shared {
    typedef FORMAT Format;
    static constexpr int UNITS = 172 * 1024 / (2 * (TOKENS * STEP + Format::CHUNK));

    u8 tokens[UNITS][2][TOKENS * STEP];
    u8 matrix[UNITS][2][Format::CHUNK];
    float4 sums[TOKENS / 8][GROUP];  // of a thread's rows and tokens, whatever its group
    u8 out[GROUPS][TOKENS * OUT_STRIDE];
    float factors[GROUPS][TOKENS];
    u64 full[UNITS], empty[UNITS];
    Tiles tiles;
};

// The tile of this number, and this block's rows of it.
template <class Own> __device__ inline Tile find(const Own &own, const Arguments &given, int number, int stretches) {
    Tile tile = own.tiles.find(given, number, stretches, TOKENS);
    tile.rows = tile.rows * CLUSTER + rank_in_cluster();
    return tile;
}

// ---- units on their way to shared memory

// The units of a block's tiles, one after the other.
struct Walk {
    int number, left = 0, bytes;  // next tile; units of this one that are left; of a step's tokens
    const u8 *matrix, *x;

    __device__ explicit Walk(int number) : number(number) {}

    // Comes to the next unit; false after the last.
    template <class Own> __device__ bool next(const Own &own, const Arguments &given, int stretches, int tiles) {
        constexpr int CHUNK = Own::Format::CHUNK;
        if (left > 0) {
            --left, matrix += 4 * CHUNK, x += 2 * given.place_stride * STEP;
            return true;
        }
        if (number >= tiles) return false;
        Tile tile = find(own, given, number, stretches);
        number += gridDim.x / CLUSTER, left = given.steps / 2 - 1, bytes = padded(tile.count) * STEP;
        matrix = chunks_of<CHUNK>(given, tile.expert, tile.rows), x = given.x + (i64)tile.first * STEP;
        return true;
    }
};

// Copies of a unit are two of rows, then two of tokens; each warp that brings takes every BRINGERS-th.
template <class Own> __device__ inline void bring_rows(Own &own, const Walk &walk, int place, int warp) {
    constexpr int CHUNK = Own::Format::CHUNK;
    u32 full = shared(own.full + place);
    if (warp == 0) expect(full, 2 * (walk.bytes + CHUNK));
#pragma unroll 1
    for (int step = warp; step < 2; step += BRINGERS)
        copy(shared(own.matrix[place][step]), walk.matrix + step * 2 * CHUNK, CHUNK, full);
}

template <class Own>
__device__ inline void bring(Own &own, const Arguments &given, int stretches, int tiles, int warp) {
    Walk early(blockIdx.x / CLUSTER), walk(blockIdx.x / CLUSTER);
    int ahead = 0;
    while (ahead < Own::UNITS && early.next(own, given, stretches, tiles)) bring_rows(own, early, ahead++, warp);
    begin();
    for (int unit = 0; walk.next(own, given, stretches, tiles); ++unit) {
        int place = unit % Own::UNITS;
        if (unit >= ahead) {
            wait(shared(own.empty + place), unit / Own::UNITS & 1 ^ 1);
            bring_rows(own, walk, place, warp);
        }
        int share = walk.bytes / CLUSTER, skipped = rank_in_cluster() * share;
#pragma unroll 1
        for (int step = (warp + 2) % BRINGERS; step < 2; step += BRINGERS) {
            const u8 *x = walk.x + step * given.place_stride * STEP + skipped;
            copy_to_all<CLUSTER>(shared(own.tokens[place][step]) + skipped, x, share, shared(own.full + place));
        }
    }
}

// ---- sums in turn. Named barriers 1 to GROUPS are those of `meet_group`.

__device__ inline void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(GROUPS + 1 + group) : "memory"); }

__device__ inline void pass_turn(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(GROUPS + 1 + (group + 1) % GROUPS) : "memory");
}

// A group's units of a tile, from `at` on; `before`: units of the block's tiles before it; goes_on: this is not the last.
template <int SIZE, class Own>
__device__ inline void take(Own &own, const Arguments &given, const Tile &tile, int at, int before, bool goes_on) {
    int group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP, units = given.steps / 2, row = tile.rows * ROWS;
    float first[SIZE] = {}, second[SIZE] = {};
    if (threadIdx.x < 2) prefetch(scale_of(given, tile, row) + threadIdx.x * 32);
    for (; at < units; at += GROUPS) {
        int unit = before + at, place = unit % Own::UNITS;
        bool is_last = at + 1 == units;
        Left left, next;
        wait(shared(own.full + place), unit / Own::UNITS & 1);
        read<typename Own::Format>(own.matrix[place][0], left);
        start(shared(own.tokens[place][0]), left, first);
        read<typename Own::Format>(own.matrix[place][1], next);
        start(shared(own.tokens[place][1]), next, second);
        products_wait();
        cluster_arrive<CLUSTER>(shared(own.empty + place));
        if (unit > 0) take_turn(group);
#pragma unroll
        for (int i = 0; i < SIZE; i += 4) {
            float4 sums = at > 0 ? own.sums[i / 4][thread] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            first[i] = sums.x + first[i] + second[i], first[i + 1] = sums.y + first[i + 1] + second[i + 1];
            first[i + 2] = sums.z + first[i + 2] + second[i + 2], first[i + 3] = sums.w + first[i + 3] + second[i + 3];
            if (!is_last) own.sums[i / 4][thread] = make_float4(first[i], first[i + 1], first[i + 2], first[i + 3]);
        }
        if (!is_last || goes_on) pass_turn(group);
        if (is_last) send_out(given, tile, row, scales_of(given, tile, row), first, own.out[group], own.factors[group]);
    }
}

template <class Own> __device__ inline void products(const Arguments &given) {
    extern __shared__ __align__(1024) u8 memory[];
    Own &own = *(Own *)memory;
    if (threadIdx.x == 0) {
        for (int place = 0; place < own.UNITS; ++place) {
            init(shared(own.full + place), 1);
            init(shared(own.empty + place), 4 * CLUSTER);
        }
        publish();
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < 32) own.tiles.count(given, TOKENS);
    meet();
    constexpr int TILE = CLUSTER * ROWS;
    int stretches = (given.num_rows + TILE - 1) / TILE, units = given.steps / 2, group = threadIdx.x / GROUP;
    int tiles = own.tiles.total * stretches, apart = gridDim.x / CLUSTER;
    if (group == GROUPS) {
        if (threadIdx.x % 32 == 0) bring(own, given, stretches, tiles, threadIdx.x / 32 - GROUPS * 4);
    } else {
        begin();
        int before = 0;
        for (int number = blockIdx.x / CLUSTER; number < tiles; number += apart, before += units) {
            Tile tile = find(own, given, number, stretches);
            int tokens = padded(tile.count), at = (group + (GROUPS - 1) * before) % GROUPS;
            bool goes_on = number + apart < tiles;
            if (tokens == 64) take<32>(own, given, tile, at, before, goes_on);
            else if (tokens == 32) take<16>(own, given, tile, at, before, goes_on);
            else take<8>(own, given, tile, at, before, goes_on);
        }
    }
    meet();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) few_e4m3(const Arguments given) {
    products<Shared<E4m3>>(given);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) few_e2m1(const Arguments given) {
    products<Shared<E2m1>>(given);
}
