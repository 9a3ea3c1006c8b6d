#include "tiles.h"

#include "export.h"
#include "vector.h"

namespace deepinfer {
namespace {

#if defined(__AMX_BF16__)
bool wants_tiles = true;
#else
bool wants_tiles = false;

// Numbers too small for a full mantissa count as zero.
Vec flushed(Vec x) { return select(absolute(x) < 0x1p-126f, Vec{}, x); }

// The upper or the lower half of each lane.
Vec upper_half(VecInt words) { return flushed(bits(words & splat_int(int32_t(0xffff0000)))); }
Vec lower_half(VecInt words) { return flushed(bits(words << 16)); }
#endif

}  // namespace

bool uses_tiles() { return wants_tiles; }

#if !defined(__AMX_BF16__)
void multiply_plainly(const uint8_t* left, const uint8_t* right, int rows, uint8_t* sums) {
    for (int start = 0; start < 64; start += 4 * LANES) {
        Vec even[PAIRS], odd[PAIRS];
        for (int pair = 0; pair < PAIRS; ++pair) {
            const VecInt words = load_ints(right + pair * 64 + start);
            even[pair] = lower_half(words), odd[pair] = upper_half(words);
        }
        for (int row = 0; row < rows; ++row) {
            Vec parts[2] = {};
            for (int pair = 0; pair < PAIRS; ++pair) {
                int32_t word;
                std::memcpy(&word, left + row * 64 + pair * 4, 4);
                parts[0] = flushed(parts[0] + lower_half(splat_int(word)) * even[pair]);
                parts[1] = flushed(parts[1] + upper_half(splat_int(word)) * odd[pair]);
            }
            auto* to = reinterpret_cast<float*>(sums + row * 64 + start);
            store(to, flushed(load(to) + flushed(parts[0] + parts[1])));
        }
    }
}
#endif

}  // namespace deepinfer

EXPORT int64_t uses_tiles() { return deepinfer::uses_tiles(); }
EXPORT void set_uses_tiles(int64_t wanted) { deepinfer::wants_tiles = wanted; }
