/* What an optimizer changes: small dense parameters are copied before its step in one call. After it one call subtracts the
 * copies, where they lie, and records the differences. Large tensors are left to the framework, which has threads for them. */

#define SMALL ((int64_t)1 << 18) /* elements */
#define ALIGNED 64

typedef struct {
    int64_t offset, numel, dtype, subtracted; /* offset -1: not copied here */
} Copy;

/* Whether a tensor is copied here; others, and what Python has replaced by None, are left to Python. */
static int is_small_dense(PyObject *tensor, DLTensor *view, Plan *p, int64_t *dims)
{
    if (tensor == Py_None || !tensor_from_object)
        return 0;
    if (tensor_from_object(tensor, view)) {
        PyErr_Clear();
        return 0;
    }
    return !dl_plan(view, p, dims) && (p->dtype == F32 || p->dtype == F64) && p->numel <= SMALL && p->aligned;
}

static PyObject *py_copy_tensors(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Plan p;
    DLTensor view;
    int64_t dims[MAX_DIMS], used = 0;
    (void)module;
    if (expect("copy_tensors(copies_address, buffer_address, buffer_size, tensors)", count, 4))
        return NULL;
    Copy *copies = PyLong_AsVoidPtr(args[0]);
    char *buffer = PyLong_AsVoidPtr(args[1]);
    const int64_t size = PyLong_AsLongLong(args[2]);
    const Py_ssize_t tensors = PyTuple_Size(args[3]);
    if (PyErr_Occurred())
        return NULL;
    for (Py_ssize_t i = 0; i < tensors; i++) {
        copies[i] = (Copy){.offset = -1};
        if (!is_small_dense(PyTuple_GetItem(args[3], i), &view, &p, dims))
            continue;
        const int64_t bytes = p.numel * item_size[p.dtype], end = used + (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
        copies[i] = (Copy){.offset = used, .numel = p.numel, .dtype = p.dtype};
        if (end <= size)
            memcpy(buffer + used, p.base, (size_t)bytes);
        used = end;
    }
    return PyLong_FromLongLong(used);
}

/* new - old in place of old, as the framework computes it: one rounding for each element. */
static void subtract(Plan *p, char *old)
{
    const int64_t numel = p->numel;
    if (p->dtype == F32) {
        const float *new = (const float *)p->base;
        for (int64_t i = 0; i < numel; i++)
            ((float *)old)[i] = new[i] - ((float *)old)[i];
    } else {
        const double *new = (const double *)p->base;
        for (int64_t i = 0; i < numel; i++)
            ((double *)old)[i] = new[i] - ((double *)old)[i];
    }
}

/* Record the change of one tensor; 1 when it has its row, 0 when it is left to Python, -1 with an error set. */
static int record_change(int64_t *header, PyObject *tensor, Entry *entry, Copy *copy, char *buffer, double *norm)
{
    Plan p;
    DLTensor view;
    Result result;
    int64_t dims[MAX_DIMS];
    const Target target = {
        .header = header, .key = entry->key, .probes = (uint64_t)entry->probes, .want = (int)entry->want, .recomputed = 0,
        .begin = begun(0),
    };
    if (entry->key < 0 || copy->offset < 0 || !is_small_dense(tensor, &view, &p, dims))
        return 0;
    if (p.numel != copy->numel || p.dtype != copy->dtype)
        return 0;
    char *old = buffer + copy->offset;
    if (!copy->subtracted) {
        Plan before = p;
        before.base = old;
        before.histogram = NONE;
        before.hash = NULL;
        if (reduce_plan(&before, &result))
            return -1;
        give_workspace(result.w);
        *norm = result.row.l2;
        subtract(&p, old);
        copy->subtracted = 1;
    }
    p.base = old;
    p.histogram = target.want & 1 ? TRACKED : NONE;
    entry->row = record_row(&target, &p, dims, view.ndim);
    return entry->row == NO_MEMORY ? -1 : entry->row >= 0; /* where there is no room the difference stays in the buffer */
}

static PyObject *py_record_changes(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("record_changes(layout_address, entries_address, copies_address, buffer_address, norms_address, tensors, "
               "first)", count, 7))
        return NULL;
    int64_t *header = PyLong_AsVoidPtr(args[0]);
    Entry *entries = PyLong_AsVoidPtr(args[1]);
    Copy *copies = PyLong_AsVoidPtr(args[2]);
    char *buffer = PyLong_AsVoidPtr(args[3]);
    double *norms = PyLong_AsVoidPtr(args[4]);
    const Py_ssize_t size = PyTuple_Size(args[5]), first = PyLong_AsSsize_t(args[6]);
    if (PyErr_Occurred())
        return NULL;
    if (!header || !entries || !copies || !norms || first < 0) {
        PyErr_SetString(PyExc_ValueError, "an address is 0, or first is negative");
        return NULL;
    }
    Py_ssize_t i = first;
    for (int done = 1; i < size && done; i += done) {
        done = record_change(header, PyTuple_GetItem(args[5], i), &entries[i], &copies[i], buffer, &norms[i]);
        if (done < 0)
            return NULL;
    }
    return PyLong_FromSsize_t(i);
}
