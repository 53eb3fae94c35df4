/* The pass over one block, for one element type. Included by body.h with
 *   REAL        float or double            BITS   the unsigned integer of the same size
 *   VREAL       the level's vector of REAL  VBITS  the same vector as integers
 *   LOAD(p)     one vector of doubles from the elements at p
 *   T(name)     name with the level and type appended
 *   VMIN, VMAX  smaller and larger of vectors
 *   ZEROS, ADD_ZEROS, ALL_ZEROS  what counts the zeros of vectors, how it counts one vector, and their number
 * and undefines them again.
 */

#define EXPONENT ((BITS)(sizeof(REAL) == 4 ? 0x7f800000ull : 0x7ff0000000000000ull))
#define SIGN ((BITS)1 << (8 * sizeof(REAL) - 1))

typedef struct {
    Sums sums;
    REAL min, max;
    int64_t zeros;
} T(Block);

static inline __attribute__((always_inline)) REAL T(least)(VREAL values)
{
    enum { WIDTH = sizeof(VREAL) / sizeof(REAL) };
    REAL lanes[WIDTH];
    memcpy(lanes, &values, sizeof lanes);
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int l = 0; l < half; l++)
            lanes[l] = lanes[l + half] < lanes[l] ? lanes[l + half] : lanes[l];
    return lanes[0];
}

/* One read: sums of powers of deviations from a pivot, in double whatever the type of the elements, minimum, maximum and
 * zeros. Element i is added in lane i % 8, in order, so that every level adds in one order; a step takes two vectors of
 * doubles. Where these are fewer than the lanes, the block is swept over once for each half of them: sums stay in
 * registers. A sum of deviations that is not finite tells of an element that is not, or of an overflow. */
static inline __attribute__((always_inline)) T(Block) T(pass)(const REAL *x, int n, double pivot, int shifted)
{
    typedef L(vdouble) V;
    enum {
        EACH = sizeof(V) / sizeof(double),
        STEP = 2 * EACH,
        STRIDE = STEP > SUM_LANES ? STEP : SUM_LANES,
        KEPT = EACH < SUM_LANES ? 2 : 1, /* vectors of each sum */
        WIDTH = sizeof(VREAL) / sizeof(REAL)
    };
    union {
        V vector[SUMS][SUM_LANES / EACH];
        double lane[SUMS][SUM_LANES];
    } sum;
    const L(vu64) magnitude = (L(vu64)){0} + 0x7fffffffffffffffull;
    const V centre = (V){0} + pivot;
    const int steps = n / STRIDE;
    VREAL low = (VREAL){0} + x[0], high = low;
    ZEROS zeros = {0};
    T(Block) block;

#pragma GCC unroll 4
    for (int sweep = 0; sweep < STRIDE / STEP; sweep++) {
        V sums[SUMS][KEPT];
#pragma GCC unroll 16
        for (int k = 0; k < SUMS * KEPT; k++)
            sums[k / KEPT][k % KEPT] = (V){0};
        const REAL *at = x + sweep * STEP;
        for (int i = 0; i < steps; i++, at += STRIDE) {
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                if (v * EACH % WIDTH == 0) {
                    const VREAL value = *(const VREAL *)(at + v * EACH);
                    low = VMIN(low, value);
                    high = VMAX(high, value);
                    ADD_ZEROS(zeros, value);
                }
                const V value = LOAD(at + v * EACH);
                V d = value;
                if (shifted)
                    d -= centre;
                ADD_SUMS(sums, v % KEPT, d, (V)((L(vu64))value & magnitude))
            }
        }
#pragma GCC unroll 16
        for (int k = 0; k < SUMS * KEPT; k++)
            sum.vector[k / KEPT][sweep * KEPT + k % KEPT] = sums[k / KEPT][k % KEPT];
    }
    block.zeros = ALL_ZEROS(zeros);
    block.min = T(least)(low);
    block.max = -T(least)(-high);
    for (int i = steps * STRIDE; i < n; i++) {
        const double value = x[i], d = shifted ? value - pivot : value;
        ADD_SUMS(sum.lane, (unsigned)i % SUM_LANES, d, fabs(value))
        block.min = x[i] < block.min ? x[i] : block.min;
        block.max = x[i] > block.max ? x[i] : block.max;
        block.zeros += x[i] == 0;
    }
    block.sums = FOLD_SUMS(sum.lane);
    return block;
}

static T(Block) T(pass_raw)(const REAL *x, int n) { return T(pass)(x, n, 0, 0); }
static T(Block) T(pass_around)(const REAL *x, int n, double pivot) { return T(pass)(x, n, pivot, 1); }

/* Zero, or where the first elements of a chunk say that its mean is far from zero, their mean. */
static double T(choose_pivot)(const REAL *x, int n)
{
    typedef L(vdouble) V;
    enum { EACH = sizeof(V) / sizeof(double), VECTORS = SUM_LANES / EACH };
    union {
        V vector[2][VECTORS];
        double lane[2][SUM_LANES];
    } sum = {{{{0}}}};
    if (n < SAMPLE)
        return 0;
    for (int i = 0; i < SAMPLE; i += SUM_LANES)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const V value = LOAD(x + i + v * EACH);
            sum.vector[0][v] += value;
            sum.vector[1][v] += value * value;
        }
    const double total = fold_lanes(sum.lane[0]), squares = fold_lanes(sum.lane[1]);
    return total * total > 0.5 * SAMPLE * squares ? total / SAMPLE : 0;
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
    m->nan += nan;
    m->posinf += posinf;
    m->neginf += neginf;
    return kept;
}

static T(Block) T(read_block)(const REAL *x, int n, double pivot)
{
    return pivot != 0 ? T(pass_around)(x, n, pivot) : T(pass_raw)(x, n);
}

/* Adds one block to its chunk: its sums, or where the chunk's pivot is farther from the block's mean than its values are
 * spread, its own moments, by a second read around the mean that the first one found. */
static void T(add_block)(Workspace *w, const REAL *x, int n, Chunk *chunk)
{
    if (chunk->pivot == UNKNOWN)
        chunk->pivot = T(choose_pivot)(x, n);
    T(Block) block = T(read_block)(x, n, chunk->pivot);
    if (!isfinite(block.sums.d)) {
        REAL *finite = (REAL *)w->finite;
        n = T(compact)(x, n, finite, &chunk->apart);
        if (n == 0)
            return;
        x = finite;
        block = T(read_block)(x, n, chunk->pivot);
    }
    Moments m = {.n = n, .zeros = block.zeros, .min = block.min, .max = block.max};
    if (block.min == block.max && block.min != 0) {
        m.mean = block.min;
        m.l1 = n * fabs((double)block.min);
    } else if (is_far(&block.sums, n)) {
        const double low = block.min, high = block.max, mean = chunk->pivot + block.sums.d / n;
        const double pivot = mean < low ? low : mean > high ? high : mean;
        block = T(pass_around)(x, n, pivot);
        central_moments(&block.sums, n, pivot, &m);
    } else {
        add_sums(chunk, &m, &block.sums);
        return;
    }
    merge(&chunk->apart, &m);
}

#undef EXPONENT
#undef SIGN
#undef REAL
#undef BITS
#undef VREAL
#undef VBITS
#undef LOAD
#undef T
#undef VMIN
#undef VMAX
#undef ZEROS
#undef ADD_ZEROS
#undef ALL_ZEROS
