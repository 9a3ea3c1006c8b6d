// Tiles: 16 rows of 64 bytes that are multiplied as bf16 numbers with float32 sums, by the processor's matrix unit
// (AMX) where the library is compiled for it, else by plain code with the same order of sums: Intel 64 and IA-32
// Architectures Software Developer's Manual, TDPBF16PS. Numbers below 2 ** -126 count as zero.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace deepinfer {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 1024;
constexpr int PAIRS = 16;        // of bf16 numbers in a row
constexpr int NUM_SUM_TILES = 4;  // tiles 0-3 take sums, 4 and 5 rows of the left side, 6 and 7 columns of the right

// Whether matrices are packed for tiles, and attention uses them: where the processor has them, unless a test decides.
bool uses_tiles();

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

struct PlainTiles {
    alignas(64) uint8_t bytes[8][TILE_BYTES];
    int rows;
};
inline thread_local PlainTiles plain_tiles;

class TileUse {
public:
    explicit TileUse(int rows) { plain_tiles.rows = rows; }
    TileUse(const TileUse&) = delete;
    TileUse& operator=(const TileUse&) = delete;
};

template <int T>
inline int num_tile_rows() {
    return T < 6 ? plain_tiles.rows : TILE_ROWS;
}

template <int T>
inline void tile_zero() {
    std::memset(plain_tiles.bytes[T], 0, TILE_BYTES);
}

template <int T>
inline void tile_load(const void* from, int64_t stride) {
    for (int row = 0; row < num_tile_rows<T>(); ++row)
        std::memcpy(plain_tiles.bytes[T] + row * 64, static_cast<const uint8_t*>(from) + row * stride, 64);
}

template <int T>
inline void tile_store(void* to, int64_t stride) {
    for (int row = 0; row < num_tile_rows<T>(); ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, plain_tiles.bytes[T] + row * 64, 64);
}

// sums [rows][16] += left [rows][32] times right: even and odd numbers apart, then together.
void multiply_plainly(const uint8_t* left, const uint8_t* right, int rows, uint8_t* sums);

template <int Sums, int Left, int Right>
inline void tile_multiply() {
    multiply_plainly(plain_tiles.bytes[Left], plain_tiles.bytes[Right], num_tile_rows<Sums>(), plain_tiles.bytes[Sums]);
}

#endif

}  // namespace deepinfer
