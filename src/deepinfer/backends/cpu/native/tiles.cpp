#include "tiles.h"

#include "bf16.h"
#include "export.h"
#include "vector.h"

namespace deepinfer {
namespace {

#if defined(__AMX_BF16__)
int64_t most_parts = PARTS;
#elif defined(__AVX512BF16__)
int64_t most_parts = 1;
#else
int64_t most_parts = 0;
#endif

#if defined(__AMX_BF16__)
#elif defined(__AVX512BF16__)

// The sums of R rows over the right side's 32 numbers begin at zero, then join those of before.
template <int R>
void multiply_rows(MemoryTiles::Side left, MemoryTiles::Side right, int rows, float* sums) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<R - 1>(left, right, rows, sums);
    }
    Vec added[R] = {};
#pragma GCC unroll 16
    for (int pair = 0; pair < PAIRS; ++pair) {
        const VecInt columns = load_ints(right.from + pair * right.stride);
#pragma GCC unroll 16
        for (int row = 0; row < R; ++row)
            added[row] = add_pairs(columns, left.from + row * left.stride + pair * 4, added[row]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row) store(sums + row * PAIRS, load(sums + row * PAIRS) + added[row]);
}

#else

// Numbers too small for a full mantissa count as zero.
Vec flushed(Vec x) { return select(absolute(x) < 0x1p-126f, Vec{}, x); }

// The upper or the lower half of each lane.
Vec upper_half(VecInt words) { return flushed(bits(words & splat_int(int32_t(0xffff0000)))); }
Vec lower_half(VecInt words) { return flushed(bits(words << 16)); }

// Even and odd numbers apart, then together.
template <int R>
void multiply_rows(MemoryTiles::Side left, MemoryTiles::Side right, int rows, float* sums) {
    for (int start = 0; start < PAIRS; start += LANES) {
        Vec even[PAIRS], odd[PAIRS];
        for (int pair = 0; pair < PAIRS; ++pair) {
            const VecInt words = load_ints(right.from + pair * right.stride + start * 4);
            even[pair] = lower_half(words), odd[pair] = upper_half(words);
        }
        for (int row = 0; row < rows; ++row) {
            Vec parts[2] = {};
            for (int pair = 0; pair < PAIRS; ++pair) {
                int32_t word;
                std::memcpy(&word, left.from + row * left.stride + pair * 4, 4);
                parts[0] = flushed(parts[0] + lower_half(splat_int(word)) * even[pair]);
                parts[1] = flushed(parts[1] + upper_half(splat_int(word)) * odd[pair]);
            }
            float* to = sums + row * PAIRS + start;
            store(to, flushed(load(to) + flushed(parts[0] + parts[1])));
        }
    }
}
#endif

}  // namespace

bool uses_tiles(int64_t parts) { return parts <= most_parts; }

#if !defined(__AMX_BF16__)
void multiply_tiles(MemoryTiles::Side left, MemoryTiles::Side right, int rows, float* sums) {
    multiply_rows<TILE_ROWS>(left, right, rows, sums);
}
#endif

}  // namespace deepinfer

EXPORT int64_t tile_parts() { return deepinfer::most_parts; }
EXPORT void set_tile_parts(int64_t most) { deepinfer::most_parts = most; }
