/* Merging histograms when they are read: each row has a slice of counts that begins at a bucket of its own, and is added
 * to the dense histogram of its group. NumPy needs three arrays of the size of all counts for that. */

typedef struct {
    const int64_t *group, *first, *ends, *counts; /* the group of a row, or -1; its first bucket; where its counts lie */
    int64_t rows, size;                           /* how many rows, and how many counts in all */
} Slices;

static void add_histograms(int64_t *dense, int64_t groups, int64_t buckets, const Slices *from)
{
    for (int64_t row = 0; row < from->rows; row++) {
        const int64_t group = from->group[row], begin = from->ends[row], end = from->ends[row + 1];
        const int64_t first = from->first[row], length = end - begin;
        if (group < 0 || group >= groups || begin < 0 || length < 0 || end > from->size)
            continue;
        if (first < 0 || first > buckets || length > buckets - first)
            continue;
        int64_t *out = dense + group * buckets + first;
        const int64_t *counts = from->counts + begin;
        for (int64_t i = 0; i < length; i++)
            out[i] = (int64_t)((uint64_t)out[i] + (uint64_t)counts[i]); /* counts of a damaged file may overflow */
    }
}

static PyObject *py_add_histograms(PyObject *module, PyObject *args)
{
    unsigned long long dense, group, first, ends, counts;
    long long groups, buckets, rows, size;
    (void)module;
    if (!PyArg_ParseTuple(args, "KLLKKKLKL", &dense, &groups, &buckets, &group, &first, &ends, &rows, &counts, &size))
        return NULL;
    const Slices from = {
        .group = (const int64_t *)(uintptr_t)group, .first = (const int64_t *)(uintptr_t)first,
        .ends = (const int64_t *)(uintptr_t)ends, .counts = (const int64_t *)(uintptr_t)counts, .rows = rows, .size = size,
    };
    Py_BEGIN_ALLOW_THREADS
    add_histograms((int64_t *)(uintptr_t)dense, groups, buckets, &from);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
