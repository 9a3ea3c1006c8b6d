// Vectors of floats through compiler vector extensions: one source for AVX-512, AVX2 and everything else.
//
// A result must not depend on how many rows are worked on together, so every helper has one order of operations.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace deepinfer {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t VecInt __attribute__((vector_size(LANES * 4)));
typedef uint32_t VecUnsigned __attribute__((vector_size(LANES * 4)));
typedef int16_t VecShort __attribute__((vector_size(LANES * 4)));
typedef float LooseVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t LooseVecInt __attribute__((vector_size(LANES * 4), aligned(1), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<LooseVec*>(to) = value; }
inline VecInt load_ints(const void* from) { return *reinterpret_cast<const LooseVecInt*>(from); }
inline Vec splat(float value) { return value - Vec{}; }
inline Vec bits(VecInt value) { return reinterpret_cast<Vec>(value); }
inline VecInt bits(Vec value) { return reinterpret_cast<VecInt>(value); }
inline VecInt splat_int(int32_t value) { return value - VecInt{}; }

// a * b + c, rounded once where the processor can. The compiler is told (-ffp-contract=off) never to decide on its own:
// it would do so in one place and not in another, and a row's bits would depend on how many rows there are.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

inline VecInt select_int(VecInt mask, VecInt yes, VecInt no) { return mask ? yes : no; }
inline Vec select(VecInt mask, Vec yes, Vec no) { return mask ? yes : no; }

// a > b ? a : b, and a < b ? a : b.
inline Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

inline Vec minimum(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return select(a < b, a, b);
#endif
}

inline Vec at_most(Vec a, Vec limit) { return minimum(limit, a); }  // NaN stays NaN

inline VecInt maximum(VecInt a, VecInt b) {
#if defined(__AVX512F__)
    return (VecInt)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (VecInt)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return select_int(a > b, a, b);
#endif
}

// The largest lane in every lane.
inline VecInt spread_largest(VecInt value) {
#if defined(__AVX512F__)
    __m512i all = (__m512i)value;
    all = _mm512_max_epi32(all, _mm512_shuffle_i64x2(all, all, 0x4e));
    all = _mm512_max_epi32(all, _mm512_shuffle_i64x2(all, all, 0xb1));
    all = _mm512_max_epi32(all, _mm512_shuffle_epi32(all, (_MM_PERM_ENUM)0x4e));
    return (VecInt)_mm512_max_epi32(all, _mm512_shuffle_epi32(all, (_MM_PERM_ENUM)0xb1));
#elif defined(__AVX2__)
    __m256i all = (__m256i)value;
    all = _mm256_max_epi32(all, _mm256_permute2x128_si256(all, all, 1));
    all = _mm256_max_epi32(all, _mm256_shuffle_epi32(all, 0x4e));
    return (VecInt)_mm256_max_epi32(all, _mm256_shuffle_epi32(all, 0xb1));
#else
    int32_t most = value[0];
    for (int i = 1; i < LANES; ++i) most = value[i] > most ? value[i] : most;
    return splat_int(most);
#endif
}

inline Vec absolute(Vec a) { return bits(bits(a) & splat_int(0x7fffffff)); }

#if defined(__AVX2__)
// The lanes of both halves joined, those of that one's halves, and so on.
template <class Join>
inline float join_lanes(Vec value, const Join& join) {
#if defined(__AVX512F__)
    const __m512 all = (__m512)value;
    __m128 four = join(join(_mm512_extractf32x4_ps(all, 0), _mm512_extractf32x4_ps(all, 2)),
                       join(_mm512_extractf32x4_ps(all, 1), _mm512_extractf32x4_ps(all, 3)));
#else
    __m128 four = join(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
#endif
    four = join(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(join(four, _mm_movehdup_ps(four)));
}

inline float sum(Vec value) {
    return join_lanes(value, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}

inline float largest(Vec value) {
    return join_lanes(value, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
#else
// Sum of the lanes, halves first.
inline float sum(Vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

inline float largest(Vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
#endif

// e ** x within 2 units of the last place; 0 below -87.3, the largest finite power above 88.3, NaN for NaN.
inline Vec exponential(Vec x) {
    const Vec low = splat(-87.3f), high = splat(88.3f);
    const VecInt is_tiny = x < low;
#if defined(__AVX512F__)
    const Vec clamped = at_most(x, high);
#else
    const Vec clamped = minimum(select(is_tiny, low, x), high);
#endif
    const Vec magic = splat(12582912.0f);  // 1.5 * 2 ** 23: its sum with a number rounds the number to an integer
    const Vec shifted = multiply_add(clamped, splat(1.44269504f), magic);
    const Vec n = shifted - magic;
    const Vec r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), clamped));
    Vec p = multiply_add(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    const Vec value = multiply_add(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
    return select(is_tiny, Vec{}, (Vec)_mm512_scalef_ps((__m512)value, (__m512)n));
#else
    const Vec scaled = bits(bits(value) + (bits(shifted) << 23));
    return select(is_tiny, Vec{}, select(x != x, x, scaled));
#endif
}

// log(1 + x) for 0 <= x < 2 ** 127, within 3 units of the last place; NaN for NaN. The polynomial is that of the Cephes
// library's logf; what 1 + x was rounded by is brought in again.
inline Vec log_one_plus(Vec x) {
    const Vec whole = x + 1.0f;
    const VecInt offset = bits(whole) - 0x3f3504f3;  // of the square root of a half
    const Vec exponent = __builtin_convertvector(offset >> 23, Vec);
    const Vec f = bits((offset & 0x7fffff) + 0x3f3504f3) - 1.0f, f2 = f * f;
    const float terms[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                           -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    Vec p = splat(7.0376836292e-2f);
    for (float term : terms) p = multiply_add(p, f, splat(term));
    Vec low = p * f * f2 + (x - (whole - 1.0f)) / whole;
    low = multiply_add(exponent, splat(-2.12194440e-4f), low);
    low = multiply_add(f2, splat(-0.5f), low);
    return select(x != x, x, multiply_add(exponent, splat(0.693359375f), f + low));
}

inline float exponential(float x) { return exponential(splat(x))[0]; }
inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// The next LANES numbers, zeros past the last of `left`.
inline Vec load(const float* from, int64_t left) {
    if (left >= LANES) return load(from);
    float lanes[LANES] = {};
    std::memcpy(lanes, from, left * sizeof(float));
    return load(lanes);
}

inline void store(float* to, Vec value, int64_t left) {
    if (left >= LANES) return store(to, value);
    float lanes[LANES];
    store(lanes, value);
    std::memcpy(to, lanes, left * sizeof(float));
}

inline void widen_bf16(const uint16_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t wide = static_cast<uint32_t>(from[i]) << 16;
        std::memcpy(to + i, &wide, 4);
    }
}

// sum of a[i] * b[i]: 4 x LANES sums side by side, then pairwise.
inline float dot(const float* a, const float* b, int64_t count) {
    Vec total[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int j = 0; j < 4; ++j)
            total[j] = multiply_add(load(a + i + j * LANES), load(b + i + j * LANES), total[j]);
    for (; i < count; i += LANES) total[0] = multiply_add(load(a + i, count - i), load(b + i, count - i), total[0]);
    return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// out[i] = x[i] / sqrt(mean(x ** 2) + eps) * weight[i]
inline void rms_norm(const float* x, const float* weight, float eps, int64_t count, float* out) {
    const float scale = 1.0f / std::sqrt(dot(x, x, count) / static_cast<float>(count) + eps);
    for (int64_t i = 0; i < count; i += LANES)
        store(out + i, load(x + i, count - i) * scale * load(weight + i, count - i), count - i);
}

}  // namespace deepinfer
