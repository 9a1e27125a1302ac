/* The loops of codec.py, which says what the streams are: for elements of 1, 2, 4 and 8 bytes, which may be unaligned.
   SSE2 compares 64 elements of two bytes at a time where it is there; the compiler does what it can for the others. */
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef uint8_t u8;
typedef uint64_t u64;

#define GENERIC_COMPARE(T, NAME)                                                            \
    static inline u64 NAME(const T *a, const T *b) {                                        \
        u8 ne[64];                                                                          \
        u64 mask = 0;                                                                       \
        for (int j = 0; j < 64; j++) ne[j] = a[j] != b[j];                                  \
        for (int j = 0; j < 8; j++) {                                                       \
            u64 x;                                                                          \
            memcpy(&x, ne + 8 * j, 8);                                                      \
            mask |= ((x * 0x0102040810204080ull) >> 56) << (8 * j);                         \
        }                                                                                   \
        return mask;                                                                        \
    }

#define KERNEL(T, S, COMPARE)                                                               \
    static inline T zigzag_##T(T step) { return (T)((T)(step << 1) ^ (T)((S)step >> (8 * sizeof(T) - 1))); } \
    static inline T unzigzag_##T(T z) { return (T)((z >> 1) ^ (T) - (T)(z & 1)); }          \
    /* bitmap: gaps is ceil(n / 8) bytes; else n + n / 255 + 1. steps: n / 2 + 1 bytes; large: n elements. */ \
    void difference_##T(const T *a, const T *b, long n, int bitmap, u8 *gaps, u8 *steps, T *large, long *sizes) { \
        u8 *g = gaps, *s = steps;                                                           \
        T *x = large;                                                                       \
        long next = 0;                                                                      \
        unsigned half = 0, is_second = 0;                                                   \
        for (long i = 0; i < n; i += 64) {                                                  \
            u64 mask = 0;                                                                   \
            if (i + 64 <= n) mask = COMPARE(a + i, b + i);                                  \
            else for (long j = i; j < n; j++) mask |= (u64)(a[j] != b[j]) << (j - i);       \
            if (bitmap) for (long j = i; j < n && j < i + 64; j += 8) *g++ = (u8)(mask >> (j - i)); \
            while (mask) {                                                                  \
                long at = i + __builtin_ctzll(mask);                                        \
                mask &= mask - 1;                                                           \
                if (!bitmap) {                                                              \
                    long gap = at - next;                                                   \
                    next = at + 1;                                                          \
                    while (gap >= 255) { *g++ = 255; gap -= 255; }                          \
                    *g++ = (u8)gap;                                                         \
                }                                                                           \
                T z = zigzag_##T((T)(b[at] - a[at]));                                       \
                unsigned small = z < 15 ? (unsigned)z : 15;                                 \
                if (small == 15) *x++ = z;                                                  \
                half |= small << 4 * is_second;                                             \
                *s = (u8)half;                                                              \
                s += is_second;                                                             \
                half &= is_second - 1;                                                      \
                is_second ^= 1;                                                             \
            }                                                                               \
        }                                                                                   \
        sizes[0] = g - gaps; sizes[1] = s - steps + is_second; sizes[2] = x - large;        \
    }                                                                                       \
    static inline int step_##T(T *c, u8 small, const T **x, const T *end) {                 \
        T z = small;                                                                        \
        if (small == 15) { if (*x == end) return -1; z = *(*x)++; }                         \
        *c = (T)(*c + unzigzag_##T(z));                                                     \
        return 0;                                                                           \
    }                                                                                       \
    /* 0, or -1 for streams that cannot be of n elements: then the target is mixed, and nothing beside it is. */ \
    int apply_##T(T *c, long n, int bitmap, const u8 *gaps, long gn, const u8 *steps, long sn, const T *large, long xn) { \
        const u8 *g = gaps, *ge = gaps + gn;                                                \
        const T *x = large, *xe = large + xn;                                               \
        long k = 0;                                                                         \
        if (bitmap) {                                                                       \
            if (gn != (n + 7) / 8) return -1;                                               \
            for (long i = 0; i < gn; i++) {                                                 \
                unsigned mask = gaps[i];                                                    \
                while (mask) {                                                              \
                    long at = 8 * i + __builtin_ctz(mask);                                  \
                    mask &= mask - 1;                                                       \
                    if (at >= n || k >= 2 * sn || step_##T(c + at, NIBBLE(steps, k), &x, xe)) return -1; \
                    k++;                                                                    \
                }                                                                           \
            }                                                                               \
        } else for (long at = -1; g < ge; k++) {                                            \
            u8 gap;                                                                         \
            do { if (g == ge) return -1; gap = *g++; at += gap; } while (gap == 255);       \
            if (++at >= n || k >= 2 * sn || step_##T(c + at, NIBBLE(steps, k), &x, xe)) return -1; \
        }                                                                                   \
        return sn == (k + 1) / 2 && (k % 2 == 0 || NIBBLE(steps, k) == 0) && x == xe ? 0 : -1; \
    }

/* A step takes four bits. */
#define NIBBLE(steps, k) ((u8)((steps)[(k) / 2] >> 4 * ((k) % 2) & 15))

typedef uint8_t __attribute__((may_alias)) b1;
typedef uint16_t __attribute__((aligned(1), may_alias)) b2;
typedef uint32_t __attribute__((aligned(1), may_alias)) b4;
typedef uint64_t __attribute__((aligned(1), may_alias)) b8;

GENERIC_COMPARE(b1, compare_b1)
GENERIC_COMPARE(b4, compare_b4)
GENERIC_COMPARE(b8, compare_b8)
#ifdef __SSE2__
static inline u64 compare_b2(const b2 *a, const b2 *b) {
    u64 mask = 0;
    for (int q = 0; q < 4; q++, a += 16, b += 16) {
        __m128i low = _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)a), _mm_loadu_si128((const __m128i *)b));
        __m128i high = _mm_cmpeq_epi16(_mm_loadu_si128((const __m128i *)(a + 8)), _mm_loadu_si128((const __m128i *)(b + 8)));
        mask |= (u64)(uint16_t)~_mm_movemask_epi8(_mm_packs_epi16(low, high)) << (16 * q);
    }
    return mask;
}
#else
GENERIC_COMPARE(b2, compare_b2)
#endif

KERNEL(b1, int8_t, compare_b1)
KERNEL(b2, int16_t, compare_b2)
KERNEL(b4, int32_t, compare_b4)
KERNEL(b8, int64_t, compare_b8)
