/* The two passes over one block, for one element type. Included by _kernel_body.h with
 *   REAL        float or double            BITS   the unsigned integer of the same size
 *   VREAL       the level's vector of REAL  VBITS  the same vector as integers
 *   LANES       32 floats or 16 doubles: 128 bytes whatever the vector's width, so that every level adds in one order
 *   RUN         additions a lane makes in REAL before it is flushed into a double
 *   FOLD(p)     one vector of doubles of the 16 lanes that are flushed, from the LANES at p
 *   T(name)     name with the level and type appended
 *   VMIN, VMAX, VZEROS  smaller, larger, and the number of zeros of vectors
 * and undefines them again.
 */

#define WIDTH ((int)(sizeof(VREAL) / sizeof(REAL)))
#define VECTORS (LANES / WIDTH)
#define FLUSHED ((int)(16 * sizeof(double) / sizeof(VREAL)))
#define EXPONENT ((BITS)(sizeof(REAL) == 4 ? 0x7f800000ull : 0x7ff0000000000000ull))
#define SIGN ((BITS)1 << (8 * sizeof(REAL) - 1))

typedef struct {
    REAL sum, min, max;
    int64_t zeros;
} T(First);

typedef struct {
    REAL d[LANES], q[LANES], a[LANES];
} T(Lanes);

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

/* Adds `steps` rows of LANES elements into lanes that start at zero. Groups of vectors keep the accumulators in
 * registers where there are few of them; the lanes, and so the result, do not depend on it. Pass two reads from the
 * first cache, so it has time to fetch what lies `ahead` bytes further on for the next block's pass one. */
static inline __attribute__((always_inline)) void T(add_run)(
    const REAL *x, int steps, REAL shift, T(Lanes) *lanes, ptrdiff_t ahead)
{
    const VBITS magnitude = (VBITS){0} + (BITS)~SIGN;
    const VREAL centre = (VREAL){0} + shift;
#pragma GCC unroll 4
    for (int g = 0; g < VECTORS; g += GROUP) {
        VREAL d_sum[GROUP], q_sum[GROUP], a_sum[GROUP];
#pragma GCC unroll 8
        for (int v = 0; v < GROUP; v++)
            d_sum[v] = q_sum[v] = a_sum[v] = (VREAL){0};
        for (int i = 0; i < steps; i++) {
            for (int line = 0; line < GROUP * (int)sizeof(VREAL); line += 64)
                __builtin_prefetch((const char *)(x + (size_t)i * LANES + g * WIDTH) + ahead + line);
#pragma GCC unroll 8
            for (int v = 0; v < GROUP; v++) {
                const VREAL value = *(const VREAL *)(x + (size_t)i * LANES + (g + v) * WIDTH);
                const VREAL d = value - centre;
                d_sum[v] += d;
                q_sum[v] += d * d;
                a_sum[v] += (VREAL)((VBITS)value & magnitude);
            }
        }
        memcpy(lanes->d + g * WIDTH, d_sum, sizeof d_sum);
        memcpy(lanes->q + g * WIDTH, q_sum, sizeof q_sum);
        memcpy(lanes->a + g * WIDTH, a_sum, sizeof a_sum);
    }
}

static __attribute__((noinline)) void T(add_last_run)(const REAL *x, int n, REAL shift, T(Lanes) *lanes)
{
    T(add_run)(x, n / LANES, shift, lanes, 0);
    x += n / LANES * LANES;
    for (int l = 0; l < n % LANES; l++) {
        const REAL d = x[l] - shift;
        lanes->d[l] += d;
        lanes->q[l] += d * d;
        lanes->a[l] += x[l] < 0 ? -x[l] : x[l];
    }
}

static inline __attribute__((always_inline)) void T(flush)(L(vdouble) *sum, const REAL *lanes)
{
#pragma GCC unroll 8
    for (int v = 0; v < FLUSHED; v++)
        sum[v] += FOLD(lanes + v * (16 / FLUSHED));
}

static Second T(pass_two)(const REAL *x, int n, REAL shift, ptrdiff_t ahead)
{
    T(Lanes) lanes;
    union {
        L(vdouble) vector[3][FLUSHED];
        double lane[3][16];
    } sum = {{{{0}}}};
    for (; n > 0; x += RUN * LANES, n -= RUN * LANES) {
        if (n >= RUN * LANES)
            T(add_run)(x, RUN, shift, &lanes, ahead);
        else
            T(add_last_run)(x, n, shift, &lanes);
        T(flush)(sum.vector[0], lanes.d);
        T(flush)(sum.vector[1], lanes.q);
        T(flush)(sum.vector[2], lanes.a);
    }
    return (Second){fold_lanes(sum.lane[0]), fold_lanes(sum.lane[1]), fold_lanes(sum.lane[2])};
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

/* Mean and squared deviations around a shift near the mean. When the shift turns out to be farther from the mean than
 * the values are spread (a large mean, a small spread), a second round around the mean just found removes the bias. */
static void T(centre)(const REAL *x, int n, T(First) first, Moments *m, ptrdiff_t ahead)
{
    REAL shift = first.sum / (REAL)n;
    for (int round = 0; round < 2; round++) {
        shift = shift < first.min ? first.min : shift > first.max ? first.max : shift;
        const Second second = T(pass_two)(x, n, shift, ahead);
        const double offset = second.d / n;
        const double bias = second.d * offset;
        m->mean = (double)shift + offset;
        m->m2 = second.q - bias;
        m->l1 = second.a;
        if (!(bias > 0.5 * second.q))
            break;
        shift = (REAL)m->mean;
    }
    if (!(m->m2 > 0))
        m->m2 = 0;
}

#undef WIDTH
#undef VECTORS
#undef FLUSHED
#undef EXPONENT
#undef SIGN
#undef REAL
#undef BITS
#undef VREAL
#undef VBITS
#undef LANES
#undef RUN
#undef FOLD
#undef T
#undef VMIN
#undef VMAX
#undef VZEROS
