// Tiles: 16 rows of 64 bytes that are multiplied as bf16 numbers with float32 sums: by the processor's matrix unit
// (AMX), by vectors of bf16 pairs (AVX512-BF16), or by plain code with the matrix unit's order of sums. Intel 64 and
// IA-32 Architectures Software Developer's Manual, TDPBF16PS and VDPBF16PS. Numbers below 2 ** -126 count as zero.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace deepinfer {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 1024;
constexpr int PAIRS = 16;        // of bf16 numbers in a row
constexpr int NUM_SUM_TILES = 4;  // tiles 0-3 take sums, 4 and 5 rows of the left side, 6 and 7 columns of the right

// Whether tiles form products whose left side is the sum of this many bf16 numbers. The matrix unit forms all, vectors
// of bf16 pairs those of one number: three of theirs are no faster than one of float32 vectors. Tests decide otherwise.
bool uses_tiles(int64_t parts);

// f(0), f(1), .. f(N - 1), each number known to the compiler.
template <class F, int... I>
inline void each_of(const F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}

template <int N, class F>
inline void each(const F& f) {
    each_of(f, std::make_integer_sequence<int, N>{});
}

#if defined(__AMX_BF16__)

// While it lives, this thread has tiles; those of sums and of the left side have `rows` rows.
class TileUse {
public:
    explicit TileUse(int rows) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } setting;
        for (int i = 0; i < 6; ++i) setting.rows[i] = static_cast<uint8_t>(rows);
        asm volatile("ldtilecfg %0" : : "m"(setting) : "memory");
    }
    ~TileUse() { asm volatile("tilerelease" : : : "memory"); }
    TileUse(const TileUse&) = delete;
    TileUse& operator=(const TileUse&) = delete;
};

template <int T>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

template <int T>
inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}

// sums[m][n] += left[m] . right[.][n], the right side with the pairs of a column in each row.
template <int Sums, int Left, int Right>
inline void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Left), "i"(Right));
}

#else

// Sums lie here; left and right sides are read where they were when they were loaded.
struct MemoryTiles {
    struct Side {
        const uint8_t* from;
        int64_t stride;
    };
    alignas(64) float sums[NUM_SUM_TILES][TILE_ROWS][PAIRS];
    Side sides[4];
    int rows;
};
inline thread_local MemoryTiles memory_tiles;

class TileUse {
public:
    explicit TileUse(int rows) { memory_tiles.rows = rows; }
    TileUse(const TileUse&) = delete;
    TileUse& operator=(const TileUse&) = delete;
};

template <int T>
inline void tile_zero() {
    std::memset(memory_tiles.sums[T], 0, memory_tiles.rows * 64);
}

template <int T>
inline void tile_load(const void* from, int64_t stride) {
    if constexpr (T < NUM_SUM_TILES) {
        for (int row = 0; row < memory_tiles.rows; ++row)
            std::memcpy(memory_tiles.sums[T][row], static_cast<const uint8_t*>(from) + row * stride, 64);
    } else {
        memory_tiles.sides[T - NUM_SUM_TILES] = {static_cast<const uint8_t*>(from), stride};
    }
}

template <int T>
inline void tile_store(void* to, int64_t stride) {
    for (int row = 0; row < memory_tiles.rows; ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, memory_tiles.sums[T][row], 64);
}

// sums [rows][16] += left [rows][32] times right.
void multiply_tiles(MemoryTiles::Side left, MemoryTiles::Side right, int rows, float* sums);

template <int Sums, int Left, int Right>
inline void tile_multiply() {
    const auto& sides = memory_tiles.sides;
    multiply_tiles(sides[Left - NUM_SUM_TILES], sides[Right - NUM_SUM_TILES], memory_tiles.rows,
                   memory_tiles.sums[Sums][0]);
}

#endif

}  // namespace deepinfer
