/* Several tensors in one call: the parameters of a step. Each is read as record_tensor reads one (dlpack.h). Recording
 * stops at the first that is not plain or has no room, and Python records that one as it records single tensors. */

typedef struct {
    int64_t key, probes, want, row;
} Entry;

/* Record one tensor; 1 when it has its row, 0 when it is left to Python, -1 with an error set. */
static int record_entry(int64_t *header, PyObject *tensor, Entry *entry)
{
    Plan p;
    DLTensor view;
    int64_t dims[MAX_DIMS];
    const Target target = {
        .header = header, .key = entry->key, .probes = (uint64_t)entry->probes, .want = (int)entry->want, .recomputed = 0,
        .begin = begun(0),
    };
    if (entry->key < 0 || !tensor_from_object)
        return 0;
    if (tensor_from_object(tensor, &view)) {
        PyErr_Clear();
        return 0;
    }
    if (dl_plan(&view, &p, dims))
        return 0;
    p.histogram = target.want & 1 ? TRACKED : NONE;
    PyObject *row = record_plan(&target, &p, dims, view.ndim);
    if (!row)
        return -1;
    entry->row = PyLong_AsLongLong(row);
    Py_DECREF(row);
    return entry->row >= 0;
}

static PyObject *py_record_many(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("record_many(layout_address, entries_address, tensors, first)", count, 4))
        return NULL;
    int64_t *header = PyLong_AsVoidPtr(args[0]);
    Entry *entries = PyLong_AsVoidPtr(args[1]);
    const Py_ssize_t size = PyTuple_Size(args[2]), first = PyLong_AsSsize_t(args[3]);
    if (PyErr_Occurred())
        return NULL;
    if (!header || !entries || first < 0) {
        PyErr_SetString(PyExc_ValueError, "an address is 0, or first is negative");
        return NULL;
    }
    Py_ssize_t i = first;
    for (int done = 1; i < size && done; i += done) {
        done = record_entry(header, PyTuple_GetItem(args[2], i), &entries[i]);
        if (done < 0)
            return NULL;
    }
    return PyLong_FromSsize_t(i);
}

/* The L2 norm of one tensor, as its row would have it, in a new reference: None where Python has to compute it. */
static PyObject *norm_of(PyObject *tensor)
{
    Plan p;
    DLTensor view;
    Result result;
    int64_t dims[MAX_DIMS];
    if (!tensor_from_object)
        Py_RETURN_NONE;
    if (tensor_from_object(tensor, &view)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (dl_plan(&view, &p, dims))
        Py_RETURN_NONE;
    p.histogram = NONE;
    p.hash = NULL;
    if (reduce_plan(&p, &result))
        return NULL;
    give_workspace(result.w);
    return PyFloat_FromDouble(result.row.l2);
}

static PyObject *py_norms(PyObject *module, PyObject *tensors)
{
    (void)module;
    if (!PyTuple_CheckExact(tensors)) {
        PyErr_SetString(PyExc_TypeError, "norms(tensors) takes a tuple");
        return NULL;
    }
    const Py_ssize_t size = PyTuple_Size(tensors);
    PyObject *norms = PyList_New(size);
    for (Py_ssize_t i = 0; norms && i < size; i++) {
        PyObject *norm = norm_of(PyTuple_GetItem(tensors, i));
        if (!norm)
            Py_CLEAR(norms);
        else
            PyList_SetItem(norms, i, norm);
    }
    return norms;
}
