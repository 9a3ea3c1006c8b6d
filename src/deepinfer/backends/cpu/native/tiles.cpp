#include "tiles.h"

#include <cmath>

#include "export.h"

namespace deepinfer {
namespace {

#if defined(__AMX_BF16__)
bool wants_tiles = true;
#else
bool wants_tiles = false;

// Numbers too small for a full mantissa count as zero.
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

float widened(const uint8_t* bf16) {
    uint16_t half;
    std::memcpy(&half, bf16, 2);
    const uint32_t wide = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return flushed(value);
}
#endif

}  // namespace

bool uses_tiles() { return wants_tiles; }

#if !defined(__AMX_BF16__)
void multiply_tile_row(const uint8_t* left, const uint8_t* right, uint8_t* sums) {
    float parts[2][16] = {}, totals[16];
    for (int pair = 0; pair < PAIRS; ++pair)
        for (int odd = 0; odd < 2; ++odd) {
            const float factor = widened(left + pair * 4 + odd * 2);
            for (int n = 0; n < 16; ++n)
                parts[odd][n] = flushed(parts[odd][n] + factor * widened(right + pair * 64 + n * 4 + odd * 2));
        }
    std::memcpy(totals, sums, 64);
    for (int n = 0; n < 16; ++n) totals[n] = flushed(totals[n] + flushed(parts[0][n] + parts[1][n]));
    std::memcpy(sums, totals, 64);
}
#endif

}  // namespace deepinfer

EXPORT int64_t uses_tiles() { return deepinfer::uses_tiles(); }
EXPORT void set_uses_tiles(int64_t wanted) { deepinfer::wants_tiles = wanted; }
