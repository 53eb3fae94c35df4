/* Statistics of every column of a matrix of vectors, and rounding to bfloat16. Included by body.h once per level.
 *
 * A column's values are added in the order of the rows, in double, whatever the level: columns lie beside each other in
 * the lanes of a vector, and no sum is ever split. columns.py does the same in NumPy, to the last bit.
 */

#define FINITE_F32(bits) (((bits) & 0x7f800000u) != 0x7f800000u)

static const float *L(row_part)(const Matrix *m, Workspace *w, int64_t row, int64_t from, int n)
{
    const size_t place = (size_t)(row * m->width + from);
    return L(as_float)(w, m->dtype, m->base + place * (size_t)item_size[m->dtype], n);
}

static void L(add_row)(ColumnTile *restrict t, const float *restrict x, int n)
{
    const uint32_t *restrict bits = (const uint32_t *)x;
    for (int j = 0; j < n; j++)
        t->sum[j] += FINITE_F32(bits[j]) ? x[j] : 0.0f;
    for (int j = 0; j < n; j++) {
        const int finite = FINITE_F32(bits[j]);
        t->finite[j] += finite;
        t->zero[j] += x[j] == 0.0f;
        t->positive[j] += x[j] > 0.0f;
        t->min[j] = finite & (x[j] < t->min[j]) ? x[j] : t->min[j];
        t->max[j] = finite & (x[j] > t->max[j]) ? x[j] : t->max[j];
    }
}

static void L(add_squares)(ColumnTile *restrict t, const float *restrict x, int n)
{
    const uint32_t *restrict bits = (const uint32_t *)x;
    for (int j = 0; j < n; j++) {
        const double away = FINITE_F32(bits[j]) ? x[j] - t->center[j] : 0.0f;
        t->squares[j] += away * away;
    }
}

static void L(reduce_columns)(const Matrix *m, Workspace *w, ColumnTile *t, int64_t from, int n)
{
    for (int64_t row = 0; row < m->rows; row++)
        L(add_row)(t, L(row_part)(m, w, row, from, n), n);
    for (int j = 0; j < n; j++) {
        t->sum[j] = t->finite[j] ? t->sum[j] / t->finite[j] : 0.0;
        t->center[j] = (float)t->sum[j];
    }
    for (int64_t row = 0; row < m->rows; row++)
        L(add_squares)(t, L(row_part)(m, w, row, from, n), n);
}

static void L(round_bfloat16)(uint16_t *restrict out, const uint32_t *restrict bits, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const uint32_t x = bits[i], up = x + 0x7fff + (x >> 16 & 1);
        out[i] = (uint16_t)((x & 0x7fffffff) > 0x7f800000 ? (x >> 31 << 15 | 0x7fc0) : up >> 16);
    }
}

#undef FINITE_F32
