/* Everything that touches elements, for one instruction set. Included by kernel.c once per level with
 *   LEVEL   a suffix for names     VBYTES  the width of a vector
 * Results are the same bit for bit at every level: the lanes, their order and every rounding are fixed by the
 * algorithm, and the level only decides how many lanes one instruction takes.
 */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define L(name) JOIN(name, LEVEL)

typedef float L(vfloat) __attribute__((vector_size(VBYTES), aligned(4), may_alias));
typedef float L(vhalf) __attribute__((vector_size(VBYTES / 2), aligned(4), may_alias));
typedef double L(vdouble) __attribute__((vector_size(VBYTES), aligned(8), may_alias));
typedef uint32_t L(vu32) __attribute__((vector_size(VBYTES), aligned(4), may_alias));
typedef uint64_t L(vu64) __attribute__((vector_size(VBYTES), aligned(8), may_alias));

/* Zeros are counted by masks where there are some, and elsewhere in the lanes of a vector. */
#ifndef ZERO_MASK_F32
static int64_t L(all_u32)(L(vu32) counts)
{
    int64_t all = 0;
    for (int l = 0; l < VBYTES / 4; l++)
        all += counts[l];
    return all;
}

static int64_t L(all_u64)(L(vu64) counts)
{
    int64_t all = 0;
    for (int l = 0; l < VBYTES / 8; l++)
        all += (int64_t)counts[l];
    return all;
}
#endif

/* ---- the pass, for float and for double ---- */
#define REAL float
#define BITS uint32_t
#define VREAL L(vfloat)
#define VBITS L(vu32)
#define LOAD(p) WIDE(p)
#define T(name) JOIN(L(name), f32)
#define VMIN VMIN_F32
#define VMAX VMAX_F32
#ifdef ZERO_MASK_F32
#define ZEROS int64_t
#define ADD_ZEROS(zeros, x) ((zeros) += __builtin_popcount((unsigned)ZERO_MASK_F32(x)))
#define ALL_ZEROS(zeros) (zeros)
#else
#define ZEROS VBITS
#define ADD_ZEROS(zeros, x) ((zeros) -= (VBITS)((x) == 0))
#define ALL_ZEROS L(all_u32)
#endif
#include "pass.h"

#define REAL double
#define BITS uint64_t
#define VREAL L(vdouble)
#define VBITS L(vu64)
#define LOAD(p) (*(const L(vdouble) *)(p))
#define T(name) JOIN(L(name), f64)
#define VMIN VMIN_F64
#define VMAX VMAX_F64
#ifdef ZERO_MASK_F64
#define ZEROS int64_t
#define ADD_ZEROS(zeros, x) ((zeros) += __builtin_popcount((unsigned)ZERO_MASK_F64(x)))
#define ALL_ZEROS(zeros) (zeros)
#else
#define ZEROS VBITS
#define ADD_ZEROS(zeros, x) ((zeros) -= (VBITS)((x) == 0))
#define ALL_ZEROS L(all_u64)
#endif
#include "pass.h"

/* ---- other types, converted exactly (64-bit integers: to the nearest double) ---- */

static inline float L(half)(uint16_t h)
{
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, exponent = bits & 0x0f800000;
    float f;
    bits += 112u << 23;
    bits += exponent == 0x0f800000 ? 112u << 23 : 0;
    /* A subnormal half gets an implicit one that is then subtracted: no float subnormal, no assist. */
    const uint32_t extra = exponent == 0 ? 1u << 23 : 0;
    bits += extra;
    memcpy(&f, &bits, 4);
    f -= exponent == 0 ? 0x1p-14f : 0.0f;
    memcpy(&bits, &f, 4);
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}

static inline float L(brain)(uint16_t h)
{
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline double L(magnitude64)(const float *z)
{
    const double re = z[0], im = z[1], r = sqrt(re * re + im * im);
    return (fabs(re) > DBL_MAX) | (fabs(im) > DBL_MAX) ? INFINITY : r;
}

/* Scaled by a power of two where the squares would leave the range of double. */
static inline double L(magnitude128)(const double *z)
{
    const double re = fabs(z[0]), im = fabs(z[1]), most = re > im ? re : im;
    const double up = most > 0x1p500 ? 0x1p-600 : most < 0x1p-400 ? 0x1p600 : 1;
    const double down = most > 0x1p500 ? 0x1p600 : most < 0x1p-400 ? 0x1p-600 : 1;
    const double a = re * up, b = im * up, r = sqrt(a * a + b * b) * down;
    return (re > DBL_MAX) | (im > DBL_MAX) ? INFINITY : r;
}

#define CONVERT(type, expression)            \
    {                                        \
        const type *s = source;              \
        for (int i = 0; i < n; i++)          \
            out[i] = (expression);           \
        return out;                          \
    }

static const float *L(as_float)(Workspace *w, int dtype, const void *source, int n)
{
    float *restrict out = (float *)w->converted;
    switch (dtype) {
    case F16:
#ifdef HALF_STEP
    {
        const uint16_t *s = source;
        int i = 0;
        for (; i + HALF_STEP <= n; i += HALF_STEP)
            HALVES(out + i, s + i);
        for (; i < n; i++)
            out[i] = L(half)(s[i]);
        return out;
    }
#else
        CONVERT(uint16_t, L(half)(s[i]))
#endif
    case BF16: CONVERT(uint16_t, L(brain)(s[i]))
    case F8E4M3: CONVERT(uint8_t, fp8[0][s[i]])
    case F8E5M2: CONVERT(uint8_t, fp8[1][s[i]])
    case F8E4M3Z: CONVERT(uint8_t, fp8[2][s[i]])
    case F8E5M2Z: CONVERT(uint8_t, fp8[3][s[i]])
    case I8: CONVERT(int8_t, (float)s[i])
    case I16: CONVERT(int16_t, (float)s[i])
    case U8: CONVERT(uint8_t, (float)s[i])
    case U16: CONVERT(uint16_t, (float)s[i])
    case BOOL: CONVERT(uint8_t, s[i] ? 1.0f : 0.0f)
    }
    return source;
}

static const double *L(as_double)(Workspace *w, int dtype, const void *source, int n)
{
    double *restrict out = w->converted;
    switch (dtype) {
    case I32: CONVERT(int32_t, (double)s[i])
    case I64: CONVERT(int64_t, (double)s[i])
    case U32: CONVERT(uint32_t, (double)s[i])
    case U64: CONVERT(uint64_t, (double)s[i])
    case C64: CONVERT(float, L(magnitude64)(s + 2 * (size_t)i))
    case C128: CONVERT(double, L(magnitude128)(s + 2 * (size_t)i))
    }
    return source;
}
#undef CONVERT

/* ---- histogram ---- */

/* The bits of a double cut (never rounded) to a float, so that a value has one bucket whatever type carries it. */
static inline uint32_t L(cut)(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    const uint64_t a = bits & 0x7fffffffffffffffull;
    const uint32_t sign = (uint32_t)(bits >> 63) << 31;
    if (a >= 0x47f0000000000000ull) /* 2^128 and above */
        return sign | (a >= 0x7ff0000000000000ull ? 0x7f800000u : 0x7f7fffffu);
    if (a >= 0x3810000000000000ull) /* 2^-126 and above */
        return sign | (uint32_t)((a >> 29) - (896ull << 23));
    if (a == 0)
        return sign;
    const int exponent = (int)(a >> 52), shift = 29 + 897 - exponent;
    const uint64_t mantissa = (a & 0xfffffffffffffull) | 0x10000000000000ull;
    const uint32_t cut = shift < 64 ? (uint32_t)(mantissa >> shift) : 0;
    return sign | (cut ? cut : 1); /* below the smallest float: still no zero */
}

/* Most blocks hold only zeros and normal floats, which take no branch and so fill vectors. */
static void L(cut_block)(const double *restrict x, int n, uint32_t *restrict out)
{
    uint64_t odd = 0;
    for (int i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, x + i, 8);
        const uint64_t a = bits & 0x7fffffffffffffffull, above = a - 0x3810000000000000ull;
        const uint32_t cut = (uint32_t)((a >> 29) - (896ull << 23));
        out[i] = (uint32_t)(bits >> 63) << 31 | (a ? cut : 0);
        odd |= a && above >= 0x47f0000000000000ull - 0x3810000000000000ull;
    }
    for (int i = 0; odd && i < n; i++)
        out[i] = L(cut)(x[i]);
}

/* Buckets of non-finite values lie at and above BUCKETS by themselves; zeros are sent there too, each lane to a place
 * of its own so that runs of zeros do not wait for each other's increments. Small tensors keep track of the smallest
 * and the largest bucket, since looking through all of them would take longer than counting. */
static inline __attribute__((always_inline)) void L(find_buckets)(
    Workspace *w, const uint32_t *x, int n, uint32_t *index, int track)
{
    typedef L(vu32) V;
    enum { WIDTH = sizeof(V) / 4 };
    const V places = *(const V *)zero_places;
    V low = (V){0} + w->low, high = (V){0} + w->high;
    for (int i = 0; i < n; i += WIDTH) {
        const V bits = *(const V *)(x + i), j = ((bits >> 19) & 0xffe) | bits >> 31;
        const V zero = (V)((bits & 0x7fffffff) == 0);
        *(V *)(index + i) = (j & ~zero) | (places & zero);
        if (track) {
            low = VMIN_U32(low, j - 2);
            high = VMAX_U32(high, j);
        }
    }
    for (int l = 0; track && l < WIDTH; l++) {
        w->low = low[l] < w->low ? low[l] : w->low;
        w->high = high[l] > w->high ? high[l] : w->high;
    }
}

static inline __attribute__((always_inline)) void L(count)(Workspace *w, const uint32_t *i, const uint32_t *end)
{
    for (; i + 4 <= end; i += 4) {
        w->table[0][i[0]]++;
        w->table[1][i[1]]++;
        w->table[2][i[2]]++;
        w->table[3][i[3]]++;
    }
    for (; i < end; i++)
        w->table[0][*i]++;
}

static void L(count_buckets)(Workspace *w, const uint32_t *x, int n, int track)
{
    uint32_t index[PIECE], rest[16] = {0};
    const int even = n & ~15;
    for (int done = 0; done < even; done += PIECE) {
        const int m = even - done < PIECE ? even - done : PIECE;
        if (track)
            L(find_buckets)(w, x + done, m, index, 1);
        else
            L(find_buckets)(w, x + done, m, index, 0);
        L(count)(w, index, index + m);
    }
    if (n > even) {
        memcpy(rest, x + even, (size_t)(n - even) * sizeof *x);
        L(find_buckets)(w, rest, 16, index, 1);
        L(count)(w, index, index + (n - even));
    }
}

/* ---- a chunk ---- */

static void L(reduce_chunk)(const Plan *p, Workspace *w, int64_t begin, int64_t end, Moments *total)
{
    Chunk chunk = {.pivot = UNKNOWN, .together = EMPTY, .apart = EMPTY};
    uint64_t hash = 0;
    for (; begin < end; begin += BLOCK) {
        const int n = end - begin < BLOCK ? (int)(end - begin) : BLOCK;
        const size_t bytes = (size_t)n * (size_t)item_size[p->dtype];
        if (p->hash && p->logical)
            hash = p->hash(hash, fetch(p->logical, w, begin, n), bytes);
        const void *raw = fetch(p, w, begin, n);
        if (p->hash && !p->logical)
            hash = p->hash(hash, raw, bytes);
        if (is_single[p->dtype]) {
            const float *x = L(as_float)(w, p->dtype, raw, n);
            JOIN(L(add_block), f32)(w, x, n, &chunk);
            if (p->histogram)
                L(count_buckets)(w, (const uint32_t *)x, n, p->histogram == TRACKED);
        } else {
            const double *x = L(as_double)(w, p->dtype, raw, n);
            if (p->scale != 1) {
                for (int i = 0; i < n; i++)
                    w->converted[i] = x[i] * p->scale;
                x = w->converted;
            }
            JOIN(L(add_block), f64)(w, x, n, &chunk);
            if (p->histogram) {
                uint32_t *bits = (uint32_t *)w->wide;
                L(cut_block)(x, n, bits);
                L(count_buckets)(w, bits, n, p->histogram == TRACKED);
            }
        }
    }
    *total = chunk_moments(&chunk);
    total->hash = hash;
}

#include "columns.h"

#undef L
#undef JOIN
#undef JOIN_
#undef LEVEL
#undef VBYTES
#undef WIDE
#undef ZERO_MASK_F32
#undef ZERO_MASK_F64
#undef VMIN_F32
#undef VMAX_F32
#undef VMIN_U32
#undef VMAX_U32
#undef VMIN_F64
#undef VMAX_F64
