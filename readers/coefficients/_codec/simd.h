/* Vectors of 16 int16 or 8 int32, and the few operations that C's vector extensions lack.
 *
 * Written three times: AVX2 (with or without pdep), SSE of x86-64-v2, NEON. The rest is portable C. Nothing is aligned.
 * An including file defines VARIANT_AVX2 and VARIANT_PDEP; VARIANT_PLAIN selects scalar loops for everything. */
#ifndef SIMD_H
#define SIMD_H
#include "codec.h"
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))
#define SHUFFLE __builtin_shufflevector
#define VECTOR(item, name, bytes) typedef item name __attribute__((vector_size(bytes)))
VECTOR(u8, u8x8, 8);
VECTOR(u8, u8x16, 16);
VECTOR(u8, u8x32, 32);
VECTOR(i16, i16x8, 16);
VECTOR(i16, i16x16, 32);
VECTOR(u16, u16x16, 32);
VECTOR(i32, i32x8, 32);
VECTOR(u32, u32x8, 32);
VECTOR(i64, i64x4, 32);
VECTOR(float, f32x8, 32);

#define ACCESS(kind, name)                                                                                             \
    INLINE kind load_##name(const void *at) { kind v; memcpy(&v, at, sizeof v); return v; }                            \
    INLINE void store_##name(void *at, kind v) { memcpy(at, &v, sizeof v); }
ACCESS(i16, i16) ACCESS(u16, u16) ACCESS(u32, u32) ACCESS(u64, u64)
ACCESS(u8x8, u8x8) ACCESS(u8x16, u8x16) ACCESS(u8x32, u8x32) ACCESS(i16x16, i16x16) ACCESS(f32x8, f32x8)
ACCESS(i32x8, i32x8)

INLINE u64 big_endian(const u8 *at) {
    u64 v = load_u64(at);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}
INLINE int bits_set(u64 v) { return __builtin_popcountll(v); }
INLINE i16x16 all_i16(int v) { return (i16x16){} + (i16)v; }
INLINE i32x8 all_i32(i32 v) { return (i32x8){} + v; }
INLINE i16x8 lower(i16x16 v) { return SHUFFLE(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE i16x8 upper(i16x16 v) { return SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
#define JOIN(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

#if defined(__x86_64__) && !defined(VARIANT_PLAIN)
#include <immintrin.h>
#define HAS_TABLES 1
INLINE u8x16 look_up(u8x16 table, u8x16 at) { return (u8x16)_mm_shuffle_epi8((__m128i)table, (__m128i)at); }
#if VARIANT_AVX2
INLINE i32x8 multiply_pairs(i16x16 a, i16x16 b) { return (i32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE i16x16 saturated(i32x8 a, i32x8 b) { return (i16x16)_mm256_packs_epi32((__m256i)a, (__m256i)b); }
INLINE u8x32 saturated_bytes(i16x16 a, i16x16 b) { return (u8x32)_mm256_packus_epi16((__m256i)a, (__m256i)b); }
INLINE i16x16 upper_half(i16x16 a, int b) { return (i16x16)_mm256_mulhi_epi16((__m256i)a, _mm256_set1_epi16((i16)b)); }
INLINE u8x32 look_up_2(u8x32 table, u8x32 at) { return (u8x32)_mm256_shuffle_epi8((__m256i)table, (__m256i)at); }
INLINE u32 sign_bits(u8x32 v) { return (u32)_mm256_movemask_epi8((__m256i)v); }
INLINE i16x16 widen(u8x16 v) { return (i16x16)_mm256_cvtepu8_epi16((__m128i)v); }
INLINE i16x16 swapped_middle(i16x16 v) { return (i16x16)_mm256_permute4x64_epi64((__m256i)v, 0xD8); }
INLINE u8x16 narrow(i16x16 v) {
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi16((__m256i)v, (__m256i)v), 0xD8);
    return (u8x16)_mm256_castsi256_si128(both);
}
INLINE f32x8 as_floats(u8x8 v) {
    u64 bits;
    memcpy(&bits, &v, 8);
    return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bits)));
}
#define UNPACK(kind, name, low, high)                                                                                  \
    INLINE kind low_##name(kind a, kind b) { return (kind)_mm256_##low((__m256i)a, (__m256i)b); }                      \
    INLINE kind high_##name(kind a, kind b) { return (kind)_mm256_##high((__m256i)a, (__m256i)b); }
#define HAS_UNPACK 1
#else
#define HALVES(kind, call, a, b)                                                                                       \
    union { kind v; __m128i half[2]; } r;                                                                              \
    __m128i x[2], y[2];                                                                                                \
    memcpy(x, &a, 32), memcpy(y, &b, 32);                                                                              \
    r.half[0] = call(x[0], y[0]), r.half[1] = call(x[1], y[1]);                                                        \
    return r.v
INLINE i32x8 multiply_pairs(i16x16 a, i16x16 b) { HALVES(i32x8, _mm_madd_epi16, a, b); }
INLINE i16x16 saturated(i32x8 a, i32x8 b) { HALVES(i16x16, _mm_packs_epi32, a, b); }
INLINE u8x32 saturated_bytes(i16x16 a, i16x16 b) { HALVES(u8x32, _mm_packus_epi16, a, b); }
INLINE i16x16 upper_half(i16x16 a, int f) { i16x16 b = all_i16(f); HALVES(i16x16, _mm_mulhi_epi16, a, b); }
INLINE u8x32 look_up_2(u8x32 a, u8x32 b) { HALVES(u8x32, _mm_shuffle_epi8, a, b); }
INLINE i16x16 widen(u8x16 v) {
    __m128i zero = _mm_setzero_si128(), half[2] = {_mm_unpacklo_epi8((__m128i)v, zero), _mm_unpackhi_epi8((__m128i)v, zero)};
    i16x16 r;
    memcpy(&r, half, 32);
    return r;
}
INLINE u8x16 narrow(i16x16 v) {
    __m128i x[2];
    memcpy(x, &v, 32);
    return (u8x16)_mm_packus_epi16(x[0], x[1]);
}
INLINE f32x8 as_floats(u8x8 v) {
    u64 bits;
    memcpy(&bits, &v, 8);
    __m128i zero = _mm_setzero_si128(), words = _mm_unpacklo_epi8(_mm_cvtsi64_si128((long long)bits), zero);
    __m128 r[2] = {_mm_cvtepi32_ps(_mm_unpacklo_epi16(words, zero)), _mm_cvtepi32_ps(_mm_unpackhi_epi16(words, zero))};
    f32x8 both;
    memcpy(&both, r, 32);
    return both;
}
INLINE i16x16 swapped_middle(i16x16 v) {
    __m128i x[2], y[2];
    i16x16 r;
    memcpy(x, &v, 32);
    y[0] = _mm_unpacklo_epi64(x[0], x[1]), y[1] = _mm_unpackhi_epi64(x[0], x[1]);
    memcpy(&r, y, 32);
    return r;
}
#define UNPACK(kind, name, low, high)                                                                                  \
    INLINE kind low_##name(kind a, kind b) { HALVES(kind, _mm_##low, a, b); }                                          \
    INLINE kind high_##name(kind a, kind b) { HALVES(kind, _mm_##high, a, b); }
#define HAS_UNPACK 1
INLINE u32 sign_bits(u8x32 v) {
    __m128i x[2];
    memcpy(x, &v, 32);
    return (u32)_mm_movemask_epi8(x[0]) | (u32)_mm_movemask_epi8(x[1]) << 16;
}
#endif
#elif defined(__aarch64__) && !defined(VARIANT_PLAIN)
#include <arm_neon.h>
#define HAS_TABLES 1
INLINE u8x16 look_up(u8x16 table, u8x16 at) { return (u8x16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)at); }
#define BOTH(kind, part, a, b, expression)                                                                             \
    kind r;                                                                                                            \
    part x[2], y[2], z[2];                                                                                             \
    memcpy(x, &a, 32), memcpy(y, &b, 32);                                                                              \
    for (int k = 0; k < 2; k++) z[k] = (part)(expression);                                                             \
    memcpy(&r, z, 32);                                                                                                 \
    return r
INLINE i32x8 multiply_pairs(i16x16 a, i16x16 b) {
    BOTH(i32x8, int16x8_t, a, b,
         vpaddq_s32(vmull_s16(vget_low_s16(x[k]), vget_low_s16(y[k])), vmull_high_s16(x[k], y[k])));
}
INLINE i16x16 saturated(i32x8 a, i32x8 b) {
    BOTH(i16x16, int32x4_t, a, b, vcombine_s16(vqmovn_s32(x[k]), vqmovn_s32(y[k])));
}
INLINE u8x32 saturated_bytes(i16x16 a, i16x16 b) {
    BOTH(u8x32, int16x8_t, a, b, vcombine_u8(vqmovun_s16(x[k]), vqmovun_s16(y[k])));
}
INLINE i16x16 upper_half(i16x16 a, int f) {
    i16x16 b = all_i16(f);
    BOTH(i16x16, int16x8_t, a, b,
         vcombine_s16(vshrn_n_s32(vmull_s16(vget_low_s16(x[k]), vget_low_s16(y[k])), 16),
                      vshrn_n_s32(vmull_high_s16(x[k], y[k]), 16)));
}
INLINE u8x32 look_up_2(u8x32 a, u8x32 b) { BOTH(u8x32, uint8x16_t, a, b, vqtbl1q_u8(x[k], y[k])); }
INLINE u32 sign_bits(u8x32 v) {
    const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t x[2];
    memcpy(x, &v, 32);
    for (int k = 0; k < 2; k++) x[k] = vandq_u8(vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(x[k]), 7)), weights);
    uint8x16_t sums = vpaddq_u8(x[0], x[1]);
    sums = vpaddq_u8(sums, sums);
    sums = vpaddq_u8(sums, sums);
    return vgetq_lane_u32(vreinterpretq_u32_u8(sums), 0);
}
#else
INLINE i16 clamp_i16(i32 v) { return (i16)(v < -32768 ? -32768 : v > 32767 ? 32767 : v); }
INLINE u8x16 look_up(u8x16 table, u8x16 at) {
    u8x16 r;
    for (int k = 0; k < 16; k++) r[k] = at[k] > 15 ? 0 : table[at[k]];
    return r;
}
INLINE u8x32 look_up_2(u8x32 table, u8x32 at) {
    u8x32 r;
    for (int k = 0; k < 32; k++) r[k] = at[k] > 15 ? 0 : table[(k & 16) + at[k]];
    return r;
}
INLINE i32x8 multiply_pairs(i16x16 a, i16x16 b) {
    i32x8 r;
    for (int k = 0; k < 8; k++) r[k] = (i32)((u32)(a[2 * k] * b[2 * k]) + (u32)(a[2 * k + 1] * b[2 * k + 1]));
    return r;
}
INLINE i16x16 saturated(i32x8 a, i32x8 b) {
    i16x16 r;
    for (int k = 0; k < 16; k++) r[k] = clamp_i16((k & 4) ? b[(k >> 3) * 4 + (k & 3)] : a[(k >> 3) * 4 + (k & 3)]);
    return r;
}
INLINE u8x32 saturated_bytes(i16x16 a, i16x16 b) {
    u8x32 r;
    for (int k = 0; k < 32; k++) {
        int v = (k & 8) ? b[(k >> 4) * 8 + (k & 7)] : a[(k >> 4) * 8 + (k & 7)];
        r[k] = (u8)(v < 0 ? 0 : v > 255 ? 255 : v);
    }
    return r;
}
INLINE i16x16 upper_half(i16x16 a, int f) {
    i16x16 r;
    for (int k = 0; k < 16; k++) r[k] = (i16)((a[k] * f) >> 16);
    return r;
}
INLINE u32 sign_bits(u8x32 v) {
    u32 r = 0;
    for (int k = 0; k < 32; k++) r |= (u32)(v[k] >> 7) << k;
    return r;
}
#endif

/* Interleaves lanes of two vectors, from the lower or the upper part of each half of 16 bytes. */
#ifdef HAS_UNPACK
UNPACK(u8x32, u8, unpacklo_epi8, unpackhi_epi8)
UNPACK(i16x16, i16, unpacklo_epi16, unpackhi_epi16)
UNPACK(i32x8, i32, unpacklo_epi32, unpackhi_epi32)
UNPACK(i64x4, i64, unpacklo_epi64, unpackhi_epi64)
#else
INLINE i16x16 widen(u8x16 v) { return __builtin_convertvector(v, i16x16); }
INLINE u8x16 narrow(i16x16 v) { return __builtin_convertvector(v, u8x16); }
INLINE f32x8 as_floats(u8x8 v) { return __builtin_convertvector(__builtin_convertvector(v, i32x8), f32x8); }
INLINE i16x16 swapped_middle(i16x16 v) { return SHUFFLE(v, v, 0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15); }
INLINE u8x32 low_u8(u8x32 a, u8x32 b) {
    return SHUFFLE(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52,
                   21, 53, 22, 54, 23, 55);
}
INLINE u8x32 high_u8(u8x32 a, u8x32 b) {
    return SHUFFLE(a, b, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 24, 56, 25, 57, 26, 58, 27, 59,
                   28, 60, 29, 61, 30, 62, 31, 63);
}
INLINE i16x16 low_i16(i16x16 a, i16x16 b) {
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
}
INLINE i16x16 high_i16(i16x16 a, i16x16 b) {
    return SHUFFLE(a, b, 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
}
INLINE i32x8 low_i32(i32x8 a, i32x8 b) { return SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
INLINE i32x8 high_i32(i32x8 a, i32x8 b) { return SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
INLINE i64x4 low_i64(i64x4 a, i64x4 b) { return SHUFFLE(a, b, 0, 4, 2, 6); }
INLINE i64x4 high_i64(i64x4 a, i64x4 b) { return SHUFFLE(a, b, 1, 5, 3, 7); }
#endif

#if VARIANT_PDEP
INLINE u64 spread_bits(u64 v, u64 mask) { return _pdep_u64(v, mask); }
INLINE u64 pack_bits(u64 v, u64 mask) { return _pext_u64(v, mask); }
#endif

/* A bit for each nonzero value of 32 int16. */
INLINE u32 not_zero_32(i16x16 a, i16x16 b) {
    /* bytes of all ones, in the order 0..7, 16..23, 8..15, 24..31 of two vectors, are reordered */
    u8x32 both = saturated_bytes((i16x16)(a != 0) & 255, (i16x16)(b != 0) & 255);
    return sign_bits((u8x32)swapped_middle((i16x16)both));
}
INLINE u64 not_zero_64(const i16x16 v[4]) {
    return (u64)not_zero_32(v[0], v[1]) | (u64)not_zero_32(v[2], v[3]) << 32;
}
#endif
