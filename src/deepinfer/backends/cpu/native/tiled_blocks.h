// Blocks of 32 columns of a panel that is packed for tiles, as pairs of bf16 numbers.

#pragma once

#include "decode.h"
#include "tiles.h"

namespace deepinfer {

// The numbers of a block of 32 columns of a panel, four pairs of columns at a time.
struct TiledBf16Block {
    const uint8_t* from;

    TiledBf16Block(const uint8_t* panel, const uint8_t*, int64_t block) : from(panel + block * TILE_BYTES) {}
    void get(int i, Pairs (&pairs)[4]) const {
        for (int j = 0; j < 4; ++j) pairs[j] = load_pairs(from + (4 * i + j) * 64);
    }
};

// Numbers in the table are 2 ** 125 times the codes' and are brought to their scale by what is taken off their
// exponents; zero stays zero, since a difference ends there.
struct TiledE2m1Block {
    alignas(64) static constexpr uint16_t numbers[32] = {
        0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
        0, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40,
        0, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40,
        0, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40};
    const uint8_t* from;
#if defined(__AVX512BW__)
    __m512i less;

    TiledE2m1Block(const uint8_t* panel, const uint8_t* exponents, int64_t block) : from(panel + block * 256) {
        const __m512i scales = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(exponents + block * PANEL)));
        const __m512i steps = _mm512_sub_epi32(_mm512_set1_epi32(252), scales);
        less = _mm512_or_si512(_mm512_slli_epi32(steps, 7), _mm512_slli_epi32(steps, 23));
    }
    void get(int i, Pairs (&pairs)[4]) const {
        const __m512i table = _mm512_load_si512(numbers);
        __m512i words = _mm512_loadu_si512(from + i * 64);
        __builtin_prefetch(from + i * 64 + AHEAD_BYTES);
        for (int j = 0; j < 4; ++j, words = _mm512_srli_epi16(words, 4))
            pairs[j].part[0] = (VecInt)_mm512_subs_epu16(_mm512_permutexvar_epi16(words, table), less);
    }
#else
    const uint8_t* scales;

    TiledE2m1Block(const uint8_t* panel, const uint8_t* exponents, int64_t block)
        : from(panel + block * 256), scales(exponents + block * PANEL) {}
    void get(int i, Pairs (&pairs)[4]) const {
        for (int j = 0; j < 4; ++j)
            for (int row = 0; row < PANEL; ++row) {
                uint32_t both = 0;
                for (int odd = 0; odd < 2; ++odd) {
                    const int code = from[i * 64 + row * 4 + odd * 2 + j / 2] >> j % 2 * 4 & 15;
                    const int less = (252 - scales[row]) << 7;
                    both |= static_cast<uint32_t>(numbers[code] > less ? numbers[code] - less : 0) << odd * 16;
                }
                pairs[j].part[row / LANES][row % LANES] = static_cast<int32_t>(both);
            }
    }
#endif
};

#if defined(__AVX512BF16__)
// The high and the low bytes of 2 ** 119 times the numbers of e4m3 codes without their signs.
struct E4m3Bytes {
    alignas(64) uint8_t high[128] = {}, low[128] = {};
    constexpr E4m3Bytes() {
        for (int code = 1; code < 128; ++code) {
            int number = (code << 4) + (239 << 7);
            if (code < 8) {
                const int shift = code < 2 ? 3 : code < 4 ? 2 : 1;  // brings a subnormal code's first bit to its place
                number = ((240 - shift) << 7) + ((code << shift & 7) << 4);
            }
            high[code] = static_cast<uint8_t>(number >> 8), low[code] = static_cast<uint8_t>(number);
        }
    }
};
inline constexpr E4m3Bytes e4m3_bytes;

// Numbers are looked up, given their signs and brought to their scale as those of e2m1 codes.
struct TiledE4m3Block {
    const uint8_t* from;
    __m512i less;

    TiledE4m3Block(const uint8_t* panel, const uint8_t* exponents, int64_t block) : from(panel + block * 512) {
        const __m512i scales = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(exponents + block * PANEL)));
        const __m512i steps = _mm512_sub_epi32(_mm512_set1_epi32(246), scales);
        less = _mm512_or_si512(_mm512_slli_epi32(steps, 7), _mm512_slli_epi32(steps, 23));
    }
    void get(int i, Pairs (&pairs)[4]) const {
        const auto look_up = [](const uint8_t* table, __m512i codes) {
            return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
        };
        for (int j = 0; j < 4; j += 2) {
            const uint8_t* at = from + (2 * i + j / 2) * 64;
            const __m512i codes = _mm512_loadu_si512(at), signs = _mm512_set1_epi8(-128);
            __builtin_prefetch(at + AHEAD_BYTES);
            const __m512i low = look_up(e4m3_bytes.low, codes);
            const __m512i size = look_up(e4m3_bytes.high, codes);
            const __m512i high = _mm512_ternarylogic_epi32(size, codes, signs, 0xf8);  // size | codes & signs
            pairs[j].part[0] = (VecInt)_mm512_subs_epu16(_mm512_unpacklo_epi8(low, high), less);
            pairs[j + 1].part[0] = (VecInt)_mm512_subs_epu16(_mm512_unpackhi_epi8(low, high), less);
        }
    }
};
#endif

template <class Source>
struct BlockOf {
    using Block = Source;
};

// f with the blocks of a tiled format.
template <class F>
inline void with_block(int64_t format, const F& f) {
#if defined(__AVX512BF16__)
    if (format == TILED_E4M3) return f(BlockOf<TiledE4m3Block>{});
#endif
    if (format == TILED_E2M1) return f(BlockOf<TiledE2m1Block>{});
    f(BlockOf<TiledBf16Block>{});
}

}  // namespace deepinfer
