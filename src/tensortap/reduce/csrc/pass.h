/* The two passes over one block, for one element type. Included by body.h with
 *   REAL        float or double            BITS   the unsigned integer of the same size
 *   VREAL       the level's vector of REAL  VBITS  the same vector as integers
 *   LANES       of pass one: 32 floats or 16 doubles, whatever the vector's width, so that every level adds in one order
 *   LOAD(p)     one vector of doubles from the elements at p
 *   T(name)     name with the level and type appended
 *   VMIN, VMAX, VZEROS  smaller, larger, and the number of zeros of vectors
 * and undefines them again.
 */

#define WIDTH ((int)(sizeof(VREAL) / sizeof(REAL)))
#define VECTORS (LANES / WIDTH)
#define EXPONENT ((BITS)(sizeof(REAL) == 4 ? 0x7f800000ull : 0x7ff0000000000000ull))
#define SIGN ((BITS)1 << (8 * sizeof(REAL) - 1))

typedef struct {
    REAL sum, min, max;
    int64_t zeros;
} T(First);

/* A sum that is not finite tells of a non-finite element or of an overflow; both are looked into by the caller. */
static T(First) T(pass_one)(const REAL *x, int n)
{
    REAL sums[LANES], lows[LANES], highs[LANES];
    const int steps = n / LANES, tail = n % LANES;
    int64_t zeros = 0;
    VREAL sum[VECTORS], low[VECTORS], high[VECTORS];

    for (int v = 0; v < VECTORS; v++) {
        sum[v] = (VREAL){0};
        low[v] = high[v] = (VREAL){0} + x[0];
    }
    for (int i = 0; i < steps; i++) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const VREAL value = *(const VREAL *)(x + (size_t)i * LANES + v * WIDTH);
            sum[v] += value;
            low[v] = VMIN(low[v], value);
            high[v] = VMAX(high[v], value);
            zeros += VZEROS(value);
        }
    }
    memcpy(sums, sum, sizeof sums);
    memcpy(lows, low, sizeof lows);
    memcpy(highs, high, sizeof highs);
    x += (size_t)steps * LANES;
    for (int l = 0; l < tail; l++) {
        sums[l] += x[l];
        lows[l] = x[l] < lows[l] ? x[l] : lows[l];
        highs[l] = x[l] > highs[l] ? x[l] : highs[l];
        zeros += x[l] == 0;
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) {
            sums[l] += sums[l + half];
            lows[l] = lows[l + half] < lows[l] ? lows[l + half] : lows[l];
            highs[l] = highs[l + half] > highs[l] ? highs[l + half] : highs[l];
        }
    return (T(First)){sums[0], lows[0], highs[0], zeros};
}

/* Sums of deviations from a shift, in double whatever the type of the elements: 16 lanes, added in storage order, so that
 * every level adds in one order. Groups of vectors keep the sums in registers where there are few of them. Pass two reads
 * from the first cache, so it has time to fetch what lies `ahead` bytes further on for the next block's pass one. */
static Second T(pass_two)(const REAL *x, int n, double shift, ptrdiff_t ahead)
{
    typedef L(vdouble) V;
    enum { EACH = sizeof(V) / sizeof(double), GROUP = 2 };
    union {
        V vector[SUMS][16 / EACH];
        double lane[SUMS][16];
    } sum = {{{{0}}}};
    const L(vu64) magnitude = (L(vu64)){0} + 0x7fffffffffffffffull;
    const V centre = (V){0} + shift;
    const int steps = n / 16;
#pragma GCC unroll 4
    for (int g = 0; g < 16 / EACH; g += GROUP) {
        V sums[SUMS][GROUP] = {{{0}}};
        for (int i = 0; i < steps; i++) {
            const REAL *at = x + (size_t)i * 16 + g * EACH;
            __builtin_prefetch((const char *)at + ahead);
#pragma GCC unroll 2
            for (int v = 0; v < GROUP; v++) {
                const V value = LOAD(at + v * EACH), d = value - centre;
                ADD_SUMS(sums, v, d, (V)((L(vu64))value & magnitude))
            }
        }
        for (int k = 0; k < SUMS; k++)
            memcpy(&sum.vector[k][g], sums[k], sizeof sums[k]);
    }
    x += (size_t)steps * 16;
    for (int l = 0; l < n % 16; l++) {
        const double d = (double)x[l] - shift;
        ADD_SUMS(sum.lane, l, d, fabs((double)x[l]))
    }
    return FOLD_SUMS(sum.lane);
}

/* Keeps the finite elements, in order, and counts the others. */
static int T(compact)(const REAL *x, int n, REAL *out, Moments *m)
{
    int kept = 0;
    int32_t nan = 0, posinf = 0, neginf = 0;
    for (int i = 0; i < n; i++) {
        BITS bits;
        memcpy(&bits, x + i, sizeof bits);
        nan += (bits & ~SIGN) > EXPONENT;
        posinf += bits == EXPONENT;
        neginf += bits == (EXPONENT | SIGN);
    }
    for (int i = 0; i < n; i++) {
        BITS bits;
        memcpy(&bits, x + i, sizeof bits);
        out[kept] = x[i];
        kept += (bits & EXPONENT) != EXPONENT;
    }
    m->nan = nan;
    m->posinf = posinf;
    m->neginf = neginf;
    return kept;
}

/* Moments around a shift near the mean. When the shift turns out to be farther from the mean than the values are spread
 * (a large mean, a small spread), a second round around the mean just found removes the bias. */
static void T(centre)(const REAL *x, int n, T(First) first, Moments *m, ptrdiff_t ahead)
{
    double shift = (double)first.sum / n;
    if (!isfinite(shift))
        shift = 0.5 * (double)first.min + 0.5 * (double)first.max;
    for (int round = 0; round < 2; round++) {
        shift = shift < first.min ? first.min : shift > first.max ? first.max : shift;
        if (!shifted_moments(T(pass_two)(x, n, shift, ahead), n, shift, m))
            break;
        shift = m->mean;
    }
}

#undef WIDTH
#undef VECTORS
#undef EXPONENT
#undef SIGN
#undef REAL
#undef BITS
#undef VREAL
#undef VBITS
#undef LANES
#undef LOAD
#undef T
#undef VMIN
#undef VMAX
#undef VZEROS
