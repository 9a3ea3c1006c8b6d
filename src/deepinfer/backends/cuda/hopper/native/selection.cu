// The best of some columns of a row of scores, ascending and exact, a row a block; see selection.py.
//
// A thread takes eight neighbouring columns at a time, or the entries of a block: two pieces of 16 bytes.
// A score becomes an integer that orders alike and stays in a register. The wanted one, of which `count` are no
// smaller, is found by counting the integers of a range in equal bins: the bin that holds it is the next range, after
// three times at most a single number. Which columns are chosen is a bitmap, a thread writes a byte of it at a time; its
// words are then written out in order.

#include "hopper.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, BINS = 4 * THREADS, BLOCK = 8;
constexpr u32 ALL = ~0u;

struct Arguments {
    const float *scores;
    const int *visible, *blocks;
    int *chosen;
    i64 score_stride, num_columns, num_blocks, unit, count, by_place, is_pinned;
};

// What the threads of a row share.
struct alignas(16) Row {
    u32 bins[BINS], totals[WARPS], highest[WARPS], lowest[WARPS], known[WARPS];
    u8 above_bits[BINS], equal_bits[BINS];  // a byte of eight columns: which exceed the wanted number, which equal it
    u32 bin, above, inside;
};

// float32 -> u32 that order alike, 0 for -inf and not a number; -0 counts as 0.
__device__ inline u32 ordered(float score) {
    int bits = __float_as_int(score + 0.0f);
    return score > __int_as_float(0xFF800000) ? bits ^ (bits >> 31 | 0x80000000) : 0;
}

// Sum of the values of all threads before this one.
__device__ inline u32 sum_before(u32 value, u32 *totals) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    return sum - value + __reduce_add_sync(ALL, lane < warp ? totals[lane % WARPS] : 0);
}

// Groups 512 i + thread of eight columns for i < GROUPS, or the entries of the blocks with these numbers.
template <int GROUPS, bool HAS_BLOCKS> __device__ inline void choose(const Arguments &given) {
    constexpr int PER = GROUPS * BLOCK;
    __shared__ Row row;
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, count = given.count;
    begin();
    int limit = (given.visible[blockIdx.x] + (int)given.unit - 1) / (int)given.unit;
    const float *scores = given.scores + blockIdx.x * given.score_stride;
    const int *blocks = given.blocks + blockIdx.x * given.num_blocks;
    int *chosen = given.chosen + (i64)blockIdx.x * count;
    auto first_of = [&](int group) {  // its first column, beyond all where there is no such group
        if (!HAS_BLOCKS) return group * BLOCK;
        int block = group < given.num_blocks ? blocks[group] : -1;
        return block < 0 ? limit : block * BLOCK;
    };
    u32 keys[PER], highest = 0, lowest = ALL, known = 0;
    int end = HAS_BLOCKS ? limit : min(limit, (int)given.num_columns);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        int group = i * THREADS + thread, first = first_of(group), newest = given.is_pinned ? limit - 1 - first : -1;
        const float *from = scores + (given.by_place ? group * BLOCK : first);
#pragma unroll
        for (int half = 0; half < BLOCK; half += 4) {
            float4 four = make_float4(0, 0, 0, 0);
            if (first + half < end) four = *(const float4 *)(from + half);
            float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float score = half + e == newest ? __int_as_float(0x7F800000) : values[e];
                keys[i * BLOCK + half + e] = first + half + e < end ? ordered(score) : 0;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < PER; ++i) {
        highest = max(highest, keys[i]);
        if (keys[i]) lowest = min(lowest, keys[i]), ++known;
    }
    row.highest[warp] = __reduce_max_sync(ALL, highest);
    row.lowest[warp] = __reduce_min_sync(ALL, lowest);
    row.known[warp] = __reduce_add_sync(ALL, known);
    __syncthreads();
    highest = __reduce_max_sync(ALL, row.highest[lane % WARPS]);
    lowest = __reduce_min_sync(ALL, row.lowest[lane % WARPS]);
    known = __reduce_add_sync(ALL, lane < WARPS ? row.known[lane % WARPS] : 0);
    u32 needed = min(known, (u32)count), wanted = needed, inside = known;  // wanted: of those from lowest to highest
    while (inside > wanted && lowest < highest) {
        int shift = max(0, 32 - __clz(highest - lowest) - 11);
        *(uint4 *)(row.bins + 4 * thread) = make_uint4(0, 0, 0, 0);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER; ++i)
            if (keys[i] - lowest <= highest - lowest) atomicAdd(row.bins + ((keys[i] - lowest) >> shift), 1);
        __syncthreads();
        int bin = BINS - 4 - 4 * thread;  // the highest come first
        uint4 four = *(const uint4 *)(row.bins + bin);
        u32 counts[4] = {four.w, four.z, four.y, four.x};
        u32 above = sum_before(four.x + four.y + four.z + four.w, row.totals);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (above < wanted && above + counts[i] >= wanted)
                row.bin = bin + 3 - i, row.above = above, row.inside = counts[i];
            above += counts[i];
        }
        __syncthreads();
        lowest += row.bin << shift;
        highest = min(highest, lowest + ((1u << shift) - 1));
        wanted -= row.above;
        inside = row.inside;
    }
    // Chosen: what exceeds `lowest`, and the first `spare` that equal it.
    u32 spare = inside > wanted ? wanted : ALL;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        u32 is_above = 0, is_equal = 0;
#pragma unroll
        for (int e = 0; e < BLOCK; ++e) {
            is_above |= (keys[i * BLOCK + e] > lowest) << e;
            is_equal |= (keys[i * BLOCK + e] == lowest) << e;
        }
        row.above_bits[i * THREADS + thread] = needed > 0 ? is_above : 0;
        row.equal_bits[i * THREADS + thread] = needed > 0 ? is_equal : 0;
    }
    __syncthreads();
    u32 is_above = 0, is_equal = 0;  // of 32 columns
    if (thread < PER * WARPS) {
        is_above = ((const u32 *)row.above_bits)[thread];
        is_equal = ((const u32 *)row.equal_bits)[thread];
    }
    u32 before = sum_before(__popc(is_above) + (__popc(is_equal) << 16), row.totals), equal = before >> 16;
    u32 at = (before & 0xFFFF) + min(equal, spare);
    for (u32 bits = is_above | is_equal; bits; bits &= bits - 1) {
        int bit = __ffs(bits) - 1;
        if (is_equal >> bit & 1 && equal++ >= spare) continue;
        chosen[at++] = first_of(thread * 4 + bit / BLOCK) + bit % BLOCK;
    }
    for (int i = needed + thread; i < count; i += THREADS) chosen[i] = -1;
}

#define KERNEL(name, groups, has_blocks, blocks) \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(const Arguments given) { \
        choose<groups, has_blocks>(given); \
    }

KERNEL(choose_many, 4, false, 2)  // of up to 16,384 columns
KERNEL(choose_many_of_blocks, 4, true, 2)
KERNEL(choose_few, 1, false, 3)  // of up to 4,096
KERNEL(choose_few_of_blocks, 1, true, 3)
