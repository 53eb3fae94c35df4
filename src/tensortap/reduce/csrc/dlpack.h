/* Tensors by DLPack's C exchange API: a framework says where a tensor lies without a Python call, a reference or a wait.
 * The structures are DLPack's, version 1, as far as they are used here. The caller makes sure that the object is exactly
 * one of the framework's own tensor types; what has no plain memory on the host is left to Python. */

enum { DL_INT, DL_UINT, DL_FLOAT, DL_BFLOAT = 4, DL_COMPLEX, DL_BOOL, DL_E4M3FN = 10, DL_E4M3FNUZ, DL_E5M2, DL_E5M2FNUZ };
#define DL_CPU 1
#define NOT_PLAIN (-2)

typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *older;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, DLTensor *out);
    void *current_stream;
} DLExchange;

static int (*tensor_from_object)(void *object, DLTensor *out);

static PyObject *py_use_exchange(PyObject *module, PyObject *capsule)
{
    (void)module;
    const DLExchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!api)
        return NULL;
    if (api->major != 1)
        Py_RETURN_FALSE;
    tensor_from_object = api->tensor_from_object;
    return PyBool_FromLong(tensor_from_object != NULL);
}

static int dl_dtype(const DLTensor *t)
{
    const int bits = t->bits;
    if (t->lanes != 1)
        return -1;
    switch (t->code) {
    case DL_FLOAT: return bits == 32 ? F32 : bits == 64 ? F64 : bits == 16 ? F16 : -1;
    case DL_BFLOAT: return bits == 16 ? BF16 : -1;
    case DL_INT: return bits == 64 ? I64 : bits == 32 ? I32 : bits == 16 ? I16 : bits == 8 ? I8 : -1;
    case DL_UINT: return bits == 8 ? U8 : bits == 16 ? U16 : bits == 32 ? U32 : bits == 64 ? U64 : -1;
    case DL_BOOL: return bits == 8 ? BOOL : -1;
    case DL_COMPLEX: return bits == 64 ? C64 : bits == 128 ? C128 : -1;
    case DL_E4M3FN: return F8E4M3;
    case DL_E5M2: return F8E5M2;
    case DL_E4M3FNUZ: return F8E4M3Z;
    case DL_E5M2FNUZ: return F8E5M2Z;
    }
    return -1;
}

/* One dense run on the host, with elements. Left to Python are single elements, which may be lazily negated, and complex
 * numbers, which may be lazily conjugated. */
static int dl_plan(const DLTensor *t, Plan *p, int64_t *dims)
{
    int64_t step = 1;
    const int dtype = dl_dtype(t);
    if (t->device_type != DL_CPU || dtype < 0 || dtype == C64 || dtype == C128)
        return -1;
    if (t->ndim < 1 || t->ndim > MAX_DIMS || t->shape[t->ndim - 1] == 1)
        return -1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] < 1 || (t->strides && t->shape[i] != 1 && t->strides[i] != step))
            return -1;
        dims[i] = t->shape[i];
        step *= t->shape[i];
    }
    p->base = (const char *)t->data + t->byte_offset;
    p->dtype = dtype;
    p->ndim = 1;
    p->scale = 1;
    p->logical = NULL;
    p->dims[0] = p->numel = step;
    p->strides[0] = item_size[dtype];
    check_alignment(p);
    return t->data ? 0 : -1;
}

static PyObject *py_record_tensor(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Plan p;
    Target target;
    DLTensor tensor;
    int64_t dims[MAX_DIMS];
    (void)module;
    if (expect("record_tensor(layout_address, key, probes, want, recomputed, tensor)", count, 6))
        return NULL;
    if (read_target(args, &target))
        return NULL;
    if (!tensor_from_object)
        return PyLong_FromLong(NOT_PLAIN);
    if (tensor_from_object(args[5], &tensor)) { /* sparse, quantised, nested, wrapped by vmap */
        PyErr_Clear();
        return PyLong_FromLong(NOT_PLAIN);
    }
    if (dl_plan(&tensor, &p, dims))
        return PyLong_FromLong(NOT_PLAIN);
    p.histogram = target.want & 1 ? TRACKED : NONE;
    return record_plan(&target, &p, dims, tensor.ndim);
}
