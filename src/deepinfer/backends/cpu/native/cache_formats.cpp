#include "cache_formats.h"

#include "bf16.h"
#include "export.h"
#include "scratch.h"
#include "vector.h"

namespace deepinfer {
namespace {

constexpr int LATENT_BLOCK = 16;
constexpr int SCALE_BLOCK = 32;

float from_bits(int32_t value) {
    float result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

int32_t to_bits(float value) {
    int32_t result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

// Numbers of all 256 codes.
struct Tables {
    float e4m3[256];
    float power[256];
    uint16_t latents[256][16], keys[256][16];  // e2m1 numbers times e4m3 scales and times powers, as bf16 numbers

    Tables() {
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
            e4m3[code] = (code & 127) == 127 ? NAN : code & 128 ? -size : size;
            power[code] = code == 255 ? NAN : std::ldexp(1.0f, code - 127);
            for (int i = 0; i < 16; ++i) {
                const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6}, number = i & 8 ? -sizes[i & 7] : sizes[i];
                latents[code][i] = static_cast<uint16_t>(static_cast<uint32_t>(to_bits(number * e4m3[code])) >> 16);
                keys[code][i] = static_cast<uint16_t>(static_cast<uint32_t>(to_bits(number * power[code])) >> 16);
            }
        }
    }
};

const Tables tables;

struct WideRow;

// Bits of the largest magnitude; NaN counts as more than infinity.
int32_t peak_bits(const float* x, int count) {
    VecInt most{};
    for (int i = 0; i < count; i += LANES) most = maximum(most, bits(load(x + i)) & 0x7fffffff);
    return spread_largest(most)[0];
}

int32_t at_least(int32_t peak, float floor) { return peak < to_bits(floor) ? to_bits(floor) : peak; }

// Exponent byte of the smallest power of two that is at least x, for normal x > 0; 255 for inf and NaN.
int32_t exponent_byte(float x) {
    const int32_t exponent = (static_cast<int32_t>(static_cast<uint32_t>(to_bits(x)) - 1) >> 23) + 1;
    return exponent > 255 ? 255 : exponent;
}

// 1 / 2 ** (exponent - 127), 0 for 255.
float inverse_power(int32_t exponent) { return exponent == 255 ? 0.0f : from_bits((254 - exponent) << 23); }

// Nearest e4m3 codes, ties to the even one, of numbers up to 448 in size; 127 and 255 for NaN.
VecInt e4m3_codes(Vec x) {
    const VecInt all = bits(x), size = all & 0x7fffffff;
    const Vec magic = splat(16384.0f);  // the unit of its last place is the smallest e4m3 number
    const VecInt subnormal = bits(bits(size) + magic) - bits(magic);
    const VecInt normal = (size + (size >> 20 & 1) + (0x7ffff - (120 << 23))) >> 20;
    const VecInt code = (size < (121 << 23)) ? subnormal : (size > 0x7f800000) ? splat_int(127) : normal;
    return code | (all >> 24 & 128);
}

// Nearest e2m1 codes, ties to the even one.
VecInt e2m1_codes(Vec x) {
    const float bounds[7] = {0.25f, 0x1.7ffffep-1f, 1.25f, 0x1.bffffep0f, 2.5f, 0x1.bffffep1f, 5.0f};
    const Vec size = absolute(x);
    VecInt code = splat_int(7);
    for (float bound : bounds) code += size <= splat(bound);  // a comparison that holds is -1
    return code | (bits(x) >> 28 & 8);
}

uint8_t e4m3_code(float x) { return static_cast<uint8_t>(e4m3_codes(splat(x))[0]); }

void store_nibbles(const int32_t* codes, int count, uint8_t* bytes) {
    for (int i = 0; i < count / 2; ++i) bytes[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

void store_codes(int32_t* to, VecInt codes) { std::memcpy(to, &codes, sizeof codes); }

#if defined(__AVX2__)
const __m128i TWICE_E2M1 = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);

// Twice the numbers of the low or the high nibbles of 16 bytes.
__m128i twice_low(__m128i codes) { return _mm_shuffle_epi8(TWICE_E2M1, _mm_and_si128(codes, _mm_set1_epi8(15))); }
__m128i twice_high(__m128i codes) { return twice_low(_mm_srli_epi16(codes, 4)); }

// x[i] = numbers[i] * factors[i / 8]
void scale_numbers(__m128i numbers, __m256 low_factors, __m256 high_factors, float* x) {
    const __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers));
    const __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(numbers, 8)));
    _mm256_storeu_ps(x, _mm256_mul_ps(low, low_factors));
    _mm256_storeu_ps(x + 8, _mm256_mul_ps(high, high_factors));
}

// Byte columns of 16 rows: four times the first half of the rows is interleaved with the second.
void transpose_bytes(__m128i (&rows)[16]) {
    for (int round = 0; round < 4; ++round) {
        __m128i mixed[16];
        for (int r = 0; r < 8; ++r) {
            mixed[2 * r] = _mm_unpacklo_epi8(rows[r], rows[r + 8]);
            mixed[2 * r + 1] = _mm_unpackhi_epi8(rows[r], rows[r + 8]);
        }
        for (int r = 0; r < 16; ++r) rows[r] = mixed[r];
    }
}
#else
constexpr float TWICE_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#endif

// 16 bytes of two e2m1 codes each: 32 numbers, each half of them with its own scale.
void unpack_nibbles(const uint8_t* bytes, float low_scale, float high_scale, float* x) {
    const float halves[2] = {low_scale * 0.5f, high_scale * 0.5f};
#if defined(__AVX2__)
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    const __m128i even = twice_low(codes), odd = twice_high(codes);
    const __m256 low = _mm256_set1_ps(halves[0]), high = _mm256_set1_ps(halves[1]);
    scale_numbers(_mm_unpacklo_epi8(even, odd), low, low, x);
    scale_numbers(_mm_unpackhi_epi8(even, odd), high, high, x + 16);
#else
    for (int i = 0; i < 32; ++i) x[i] = TWICE_E2M1[bytes[i / 2] >> i % 2 * 4 & 15] * halves[i / 16];
#endif
}

// 16 bytes of two e2m1 codes each: 32 bf16 numbers, from the tables of both halves' scales.
void look_up_nibbles(const uint8_t* bytes, const uint16_t* low, const uint16_t* high, uint16_t* x) {
#if defined(__AVX512BW__)
    const __m512i places = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i table = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)low)),
                                             _mm256_loadu_si256((const __m256i*)high), 1);
    const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
    const __m512i codes = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12)), _mm512_set1_epi16(15));
    _mm512_storeu_si512(x, _mm512_permutexvar_epi16(_mm512_or_si512(codes, places), table));
#else
    for (int i = 0; i < 32; ++i) x[i] = (i < 16 ? low : high)[bytes[i / 2] >> i % 2 * 4 & 15];
#endif
}

}  // namespace

void pack_window(const float* x, int64_t dim, uint8_t* row) {
    for (int64_t block = 0; block < dim / SCALE_BLOCK; ++block) {
        const float* from = x + block * SCALE_BLOCK;
        const float peak = from_bits(at_least(peak_bits(from, SCALE_BLOCK), 1e-4f));
        const int32_t exponent = exponent_byte(peak * (1.0f / 448.0f));
        const Vec factor = splat(inverse_power(exponent)), limit = splat(448.0f);
        int32_t codes[SCALE_BLOCK];
        for (int i = 0; i < SCALE_BLOCK; i += LANES) {
            const Vec scaled = load(from + i) * factor;
            const Vec below = select(scaled > limit, limit, scaled);
            store_codes(codes + i, e4m3_codes(select(below < -limit, -limit, below)));
        }
        for (int i = 0; i < SCALE_BLOCK; ++i) row[block * SCALE_BLOCK + i] = static_cast<uint8_t>(codes[i]);
        row[dim + block] = static_cast<uint8_t>(exponent);
    }
}

void pack_compressed(const float* x, int64_t dim, uint8_t* row) {
    for (int64_t block = 0; block < dim / LATENT_BLOCK; ++block) {
        const float* from = x + block * LATENT_BLOCK;
        const float scale = from_bits(at_least(peak_bits(from, LATENT_BLOCK), 6.0f / 512.0f)) / 6.0f;
        const uint8_t code = e4m3_code(scale > 448.0f ? 448.0f : scale);
        int32_t codes[LATENT_BLOCK];
        for (int i = 0; i < LATENT_BLOCK; i += LANES)
            store_codes(codes + i, e2m1_codes(load(from + i) / splat(tables.e4m3[code])));
        store_nibbles(codes, LATENT_BLOCK, row + block * LATENT_BLOCK / 2);
        row[dim / 2 + block] = code;
    }
}

void pack_index(const float* x, int64_t dim, uint8_t* row) {
    for (int64_t block = 0; block < dim / SCALE_BLOCK; ++block) {
        const float* from = x + block * SCALE_BLOCK;
        const float peak = from_bits(at_least(peak_bits(from, SCALE_BLOCK), 0x1.8p-124f));  // 6 * 2 ** -126
        const int32_t exponent = exponent_byte(peak * (1.0f / 6.0f));
        const Vec factor = splat(inverse_power(exponent));
        int32_t codes[SCALE_BLOCK];
        for (int i = 0; i < SCALE_BLOCK; i += LANES) store_codes(codes + i, e2m1_codes(load(from + i) * factor));
        store_nibbles(codes, SCALE_BLOCK, row + block * SCALE_BLOCK / 2);
        row[dim / 2 + block] = static_cast<uint8_t>(exponent);
    }
}

void unpack_window(const uint8_t* row, int64_t dim, float* x) {
    for (int64_t block = 0; block < dim / SCALE_BLOCK; ++block) {
        const float scale = tables.power[row[dim + block]];
#if defined(__AVX2__)
        const __m256 factor = _mm256_set1_ps(scale * 256.0f);  // a half float of an e4m3 code's bits is 1/256 of it
        for (int64_t i = block * SCALE_BLOCK; i < (block + 1) * SCALE_BLOCK; i += 16) {
            const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + i)));
            const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbf80)));
            const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
            _mm256_storeu_ps(x + i, _mm256_mul_ps(low, factor));
            _mm256_storeu_ps(x + i + 8, _mm256_mul_ps(high, factor));
        }
#else
        for (int64_t i = block * SCALE_BLOCK; i < (block + 1) * SCALE_BLOCK; ++i) x[i] = tables.e4m3[row[i]] * scale;
#endif
    }
}

void unpack_compressed(const uint8_t* row, int64_t dim, float* x) {
    const uint8_t* scales = row + dim / 2;
    for (int64_t i = 0; i < dim; i += 32, scales += 2)
        unpack_nibbles(row + i / 2, tables.e4m3[scales[0]], tables.e4m3[scales[1]], x + i);
}

void unpack_window(const uint8_t* row, int64_t dim, uint16_t* x) {
    float* wide = scratch<WideRow>(dim);
    unpack_window(row, dim, wide);
    split_bf16(wide, dim, 1, 0, x);
}

void unpack_compressed(const uint8_t* row, int64_t dim, uint16_t* x) {
    const uint8_t* scales = row + dim / 2;
    for (int64_t i = 0; i < dim; i += 32, scales += 2)
        look_up_nibbles(row + i / 2, tables.latents[scales[0]], tables.latents[scales[1]], x + i);
}

void unpack_index(const uint8_t* row, int64_t dim, float* x) {
    const uint8_t* scales = row + dim / 2;
    for (int64_t i = 0; i < dim; i += 32, ++scales)
        unpack_nibbles(row + i / 2, tables.power[*scales], tables.power[*scales], x + i);
}

void unpack_index(const uint8_t* row, int64_t dim, uint16_t* x) {
    for (int64_t block = 0; block < dim / SCALE_BLOCK; ++block) {
        const uint16_t* table = tables.keys[row[dim / 2 + block]];
        look_up_nibbles(row + block * SCALE_BLOCK / 2, table, table, x + block * SCALE_BLOCK);
    }
}

void unpack_index_panel(const uint8_t* const* rows, int64_t dim, float* panel) {
    for (int64_t block = 0; block < dim / SCALE_BLOCK; ++block) {
        float halves[PANEL_ROWS];
        for (int64_t r = 0; r < PANEL_ROWS; ++r) halves[r] = tables.power[rows[r][dim / 2 + block]] * 0.5f;
#if defined(__AVX2__)
        __m128i codes[PANEL_ROWS];
        for (int64_t r = 0; r < PANEL_ROWS; ++r)
            codes[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + block * SCALE_BLOCK / 2));
        transpose_bytes(codes);
        const __m256 low = _mm256_loadu_ps(halves), high = _mm256_loadu_ps(halves + 8);
        for (int64_t i = 0; i < SCALE_BLOCK / 2; ++i, panel += 2 * PANEL_ROWS) {
            scale_numbers(twice_low(codes[i]), low, high, panel);
            scale_numbers(twice_high(codes[i]), low, high, panel + PANEL_ROWS);
        }
#else
        for (int64_t i = 0; i < SCALE_BLOCK; ++i, panel += PANEL_ROWS)
            for (int64_t r = 0; r < PANEL_ROWS; ++r)
                panel[r] = TWICE_E2M1[rows[r][(block * SCALE_BLOCK + i) / 2] >> i % 2 * 4 & 15] * halves[r];
#endif
    }
}

}  // namespace deepinfer

namespace {

struct Format {
    int64_t (*bytes)(int64_t dim);
    void (*pack)(const float* x, int64_t dim, uint8_t* row);
    void (*unpack)(const uint8_t* row, int64_t dim, float* x);
};

const Format formats[] = {
    {deepinfer::window_bytes, deepinfer::pack_window, deepinfer::unpack_window},
    {deepinfer::compressed_bytes, deepinfer::pack_compressed, deepinfer::unpack_compressed},
    {deepinfer::index_bytes, deepinfer::pack_index, deepinfer::unpack_index},
};

}  // namespace

// x [count, dim] <-> rows [count, bytes] of format 0 (window), 1 (compressed) or 2 (index).
EXPORT void pack_rows(const float* x, int64_t count, int64_t dim, int64_t format, uint8_t* rows) {
    for (int64_t i = 0; i < count; ++i) formats[format].pack(x + i * dim, dim, rows + i * formats[format].bytes(dim));
}

EXPORT void unpack_rows(const uint8_t* rows, int64_t count, int64_t dim, int64_t format, float* x) {
    for (int64_t i = 0; i < count; ++i) formats[format].unpack(rows + i * formats[format].bytes(dim), dim, x + i * dim);
}
