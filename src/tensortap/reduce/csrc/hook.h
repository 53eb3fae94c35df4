/* Hooks that PyTorch calls and that need no Python where nothing unusual holds: one plain tensor in a step that wants it.
 *
 * Reader: what all hooks of a tap share, and ask before they read: which step is open, and whether a compiler or a tracer
 *     is at work. It is made anew for each tap and has no state but the address of the step it saw last.
 * RecorderState, StepState: the base classes of the recorder and of its open steps, with what hooks ask of them.
 * NativeHook: the base class of the hooks in adapters/torch. Called, it records one tensor and returns None. Whatever it
 *     cannot decide (subclasses, other devices, kept elements, a full table, tracing, compiling) goes to the Python method
 *     that the class shows as its `__call__`, which does all of it again: nothing is half done by then. Of kept elements
 *     whole tensors are copied here: (row, probe, bytes, dtype, shape) in the list `whole` of the step's table. A hook
 *     behind a module that is told to `await_gradients` puts a hook on the node that made the output, in every call.
 *
 * Errors of the short way are dropped for the same reason: the long way meets them again and counts them. */

typedef struct {
    PyObject_HEAD
    PyObject *compiler, *tracing, *backward_task, *tensor, *parameter, *steps, *recorder, *mode_is_on, *grad_enabled,
        *compiler_callback;
    PyObject *step; /* the step seen last, and its table's header */
    int64_t *header;
    int enabled;
} Reader;

typedef struct {
    PyObject_HEAD
    unsigned long long armed, hist; /* probes as bits: those that may want the step, and those that take histograms */
    char closed;
} StepState;

typedef struct {
    PyObject_HEAD
    PyObject *current; /* the open step */
    char per_thread; /* some thread has a step of its own, so that this one is not everybody's */
} RecorderState;

typedef struct NativeHook {
    PyObject_HEAD
    Reader *reader;
    PyObject *python;
    int position; /* of what it records: 0 a node's gradients, 1 a module's arguments, 2 its output */
    int64_t key; /* -1 until the first tensor has made the point */
    uint64_t probes, keeping, whole;
    /* On a node: the step and number of the forward call, which of the node's outputs, and what only Python asks for. */
    PyObject *step, *place;
    long long call, index;
    /* Behind a module: the hook that is copied for the node of each output, and the probes that want its gradient. */
    struct NativeHook *for_node;
    uint64_t gradient_probes;
} NativeHook;

enum { RAISE = -2, LEAVE, NOTHING, RECORD }; /* an error of the user's choice, leave it to Python, nothing to do, record it */

static struct {
    PyObject *is_compiling, *current, *table, *whole, *bound, *calls, *requires_grad,
        *grad_fn, *output_nr, *register_prehook, *take_output, *await_gradient, *state, *generation, *bits, *recorder, *take_left;
} names;
static PyTypeObject *reader_type, *hook_type, *step_type, *recorder_type;

/* ---- the reader ---- */

static int unsigned_attribute(PyObject *object, PyObject *name, uint64_t *value)
{
    PyObject *number = PyObject_GetAttr(object, name);
    if (!number)
        return -1;
    *value = PyLong_AsUnsignedLongLongMask(number);
    Py_DECREF(number);
    return *value == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* NULL for what is not the recorder's step. */
static const StepState *step_state(PyObject *step)
{
    return PyType_IsSubtype(Py_TYPE(step), step_type) ? (const StepState *)step : NULL;
}

static int returns(PyObject *function, PyObject *expected)
{
    PyObject *result = PyObject_CallNoArgs(function);
    Py_XDECREF(result); /* True, False and None stay */
    return result == expected;
}

/* The step that what is seen now belongs to, as a new reference. */
static PyObject *open_step(const Reader *r)
{
    const RecorderState *recorder = (RecorderState *)r->recorder;
    if (recorder->per_thread || !recorder->current)
        return PyObject_CallMethodObjArgs(r->steps, names.current, NULL);
    return Py_NewRef(recorder->current);
}

/* The header of a step's table, which stays where it is as long as the step lives. */
static int64_t *header_of(Reader *r, PyObject *step)
{
    if (r->step == step)
        return r->header;
    PyObject *table = PyObject_GetAttr(step, names.table), *bound = table ? PyObject_GetAttr(table, names.bound) : NULL;
    int64_t *header = bound ? PyLong_AsVoidPtr(bound) : NULL;
    Py_XDECREF(bound);
    Py_XDECREF(table);
    if (header) {
        PyObject *before = r->step;
        r->step = Py_NewRef(step);
        r->header = header;
        Py_XDECREF(before);
    }
    return header;
}

static int is_compiling_nothing(const Reader *r)
{
    return r && r->enabled && PyDict_GetItemWithError(r->compiler, names.is_compiling) == Py_False;
}

/* Whether a hook may read tensors now, as far as that does not depend on the step. */
static int may_read(const Reader *r)
{
    return is_compiling_nothing(r) && tensor_from_object && returns(r->tracing, Py_False);
}

/* Whether a step wants a point, and what the row is to be. One probe may want the whole tensor. */
static int aim(Reader *r, const NativeHook *hook, PyObject *step, Target *t)
{
    const StepState *state = step_state(step);
    if (!state)
        return LEAVE;
    t->probes = state->armed & hook->probes;
    if (!t->probes)
        return NOTHING;
    const uint64_t keeping = t->probes & hook->keeping;
    if (keeping & ~hook->whole || keeping & (keeping - 1))
        return LEAVE;
    t->header = header_of(r, step);
    t->key = hook->key;
    t->want = (t->probes & state->hist) != 0;
    t->recomputed = 0;
    return t->header ? RECORD : LEAVE;
}

static int is_plain_type(const Reader *r, PyObject *tensor)
{
    const PyObject *type = (PyObject *)Py_TYPE(tensor);
    return type == r->tensor || type == r->parameter;
}

/* The elements of a dense run as a bytearray. A long copy does not hold the GIL. */
static PyObject *copied_elements(const Plan *p)
{
    const size_t size = (size_t)p->numel * (size_t)item_size[p->dtype];
    PyObject *copy = PyByteArray_FromStringAndSize(size < 1 << 16 ? p->base : NULL, (Py_ssize_t)size);
    if (copy && size >= 1 << 16) {
        char *to = PyByteArray_AsString(copy);
        Py_BEGIN_ALLOW_THREADS
        memcpy(to, p->base, size);
        Py_END_ALLOW_THREADS
    }
    return copy;
}

static PyObject *tuple_of(const int64_t *dims, int ndim)
{
    PyObject *shape = PyTuple_New(ndim);
    for (int i = 0; shape && i < ndim; i++) {
        PyObject *length = PyLong_FromLongLong(dims[i]);
        if (!length)
            Py_CLEAR(shape);
        else
            PyTuple_SetItem(shape, i, length);
    }
    return shape;
}

/* The list of whole tensors of a step's table, as it is now: another step that uses the table has another list. */
static PyObject *whole_of(PyObject *step)
{
    PyObject *table = PyObject_GetAttr(step, names.table), *list = table ? PyObject_GetAttr(table, names.whole) : NULL;
    Py_XDECREF(table);
    if (list && !PyList_CheckExact(list))
        Py_CLEAR(list);
    return list;
}

/* The entry of a whole tensor, whose row is to be filled in. */
static PyObject *whole_entry(const Plan *p, const int64_t *dims, int ndim, uint64_t probe)
{
    PyObject *copy = copied_elements(p), *shape = copy ? tuple_of(dims, ndim) : NULL;
    PyObject *entry = shape ? Py_BuildValue("OKOiO", Py_None, (unsigned long long)probe, copy, p->dtype, shape) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(copy);
    return entry;
}

/* Record a dense run and keep all of it. The entry is made before the row: what fails is left to Python, and between row and
 * list nothing is allocated that a collection would follow, in which another thread could close the step. */
static int64_t record_whole(const Target *t, Plan *p, const int64_t *dims, int ndim, PyObject *step, uint64_t probe)
{
    int64_t row = NOT_PLAIN;
    PyObject *list = whole_of(step), *entry = list ? whole_entry(p, dims, ndim, probe) : NULL;
    if (entry && (row = record_row(t, p, dims, ndim)) >= 0) {
        PyObject *number = PyLong_FromLongLong(row);
        if (!number || PyTuple_SetItem(entry, 0, number) || PyList_Append(list, entry))
            PyErr_Clear(); /* the row is there: Python must not write another */
    }
    Py_XDECREF(entry);
    Py_XDECREF(list);
    return row;
}

/* The row of a tensor; negative where Python has to record it. */
static int64_t record_plain(const NativeHook *hook, const Target *t, PyObject *step, PyObject *tensor)
{
    Plan p;
    DLTensor view;
    int64_t dims[MAX_DIMS];
    const uint64_t whole = t->probes & hook->whole;
    if (tensor_from_object(tensor, &view) || dl_plan(&view, &p, dims))
        return NOT_PLAIN;
    p.histogram = t->want ? TRACKED : NONE;
    return whole ? record_whole(t, &p, dims, view.ndim, step, whole) : record_row(t, &p, dims, view.ndim);
}

static int is_recomputation(const Reader *r)
{
    PyObject *task = PyObject_CallNoArgs(r->backward_task);
    const long number = task ? PyLong_AsLong(task) : -1;
    Py_XDECREF(task);
    return number != -1 ? 1 : PyErr_Occurred() ? -1 : 0;
}

/* Record a plain tensor in a step that the caller holds. */
static int record_in_step(Reader *r, const NativeHook *hook, PyObject *step, PyObject *tensor)
{
    Target t = {.begin = begun(IN_HOOK)};
    const int done = hook->key >= 0 ? aim(r, hook, step, &t) : LEAVE;
    if (done != RECORD)
        return done;
    t.recomputed = is_recomputation(r);
    return t.recomputed >= 0 && record_plain(hook, &t, step, tensor) >= 0 ? RECORD : LEAVE;
}

/* Record what a module took or gave. */
static int record_in_open_step(Reader *r, const NativeHook *hook, PyObject *tensor)
{
    if (hook->key < 0 || !may_read(r) || !is_plain_type(r, tensor))
        return LEAVE;
    PyObject *step = open_step(r);
    const int done = step ? record_in_step(r, hook, step, tensor) : LEAVE;
    Py_XDECREF(step); /* it kept the table alive */
    return done;
}

/* The row of a gradient has the number of the call that it belongs to, once: a second backward is counted on. */
static void number_call(NativeHook *hook, int64_t *header, int64_t row)
{
    if (hook->call >= 0)
        COLUMN(int32_t, CALL)[row] = (int32_t)hook->call;
    hook->call = -1;
}

/* Record what arrives at a node, in the step of the forward call. One that is closed already is left to Python. */
static int record_gradient(Reader *r, NativeHook *hook, PyObject *gradients)
{
    Target t = {.begin = begun(IN_HOOK)};
    const Py_ssize_t index = (Py_ssize_t)hook->index;
    if (!hook->step || !may_read(r) || !PyTuple_CheckExact(gradients))
        return LEAVE;
    PyObject *tensor = index >= 0 && index < PyTuple_Size(gradients) ? PyTuple_GetItem(gradients, index) : NULL;
    if (!tensor || !is_plain_type(r, tensor))
        return LEAVE;
    PyObject *step = Py_NewRef(hook->step);
    const StepState *state = step_state(step);
    int done = state && !state->closed ? aim(r, hook, step, &t) : LEAVE;
    if (done == RECORD) {
        const int64_t row = record_plain(hook, &t, step, tensor);
        if (row < 0)
            done = LEAVE;
        else
            number_call(hook, t.header, row);
    }
    Py_DECREF(step);
    return done;
}

#include "await.h"

static int reader_traverse(PyObject *self, visitproc visit, void *arg)
{
    Reader *r = (Reader *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(r->compiler);
    Py_VISIT(r->tracing);
    Py_VISIT(r->backward_task);
    Py_VISIT(r->tensor);
    Py_VISIT(r->parameter);
    Py_VISIT(r->steps);
    Py_VISIT(r->recorder);
    Py_VISIT(r->mode_is_on);
    Py_VISIT(r->grad_enabled);
    Py_VISIT(r->compiler_callback);
    Py_VISIT(r->step);
    return 0;
}

static int reader_clear(PyObject *self)
{
    Reader *r = (Reader *)self;
    r->enabled = 0; /* a hook that outlives the collection leaves everything to Python */
    r->header = NULL;
    Py_CLEAR(r->compiler);
    Py_CLEAR(r->tracing);
    Py_CLEAR(r->backward_task);
    Py_CLEAR(r->tensor);
    Py_CLEAR(r->parameter);
    Py_CLEAR(r->steps);
    Py_CLEAR(r->recorder);
    Py_CLEAR(r->mode_is_on);
    Py_CLEAR(r->grad_enabled);
    Py_CLEAR(r->compiler_callback);
    Py_CLEAR(r->step);
    return 0;
}

static void release_object(PyObject *self, inquiry clear)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void reader_dealloc(PyObject *self) { release_object(self, reader_clear); }

static int reader_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"compiler", "tracing", "backward_task", "tensor", "parameter", "steps", "recorder",
                               "mode_is_on", "grad_enabled", "compiler_callback", NULL};
    PyObject *given[10];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOOO!OOO", keywords, &PyDict_Type, &given[0], &given[1], &given[2],
                                     &given[3], &given[4], &given[5], recorder_type, &given[6], &given[7], &given[8],
                                     &given[9]))
        return -1;
    reader_clear(self);
    Reader *r = (Reader *)self;
    r->compiler = Py_NewRef(given[0]);
    r->tracing = Py_NewRef(given[1]);
    r->backward_task = Py_NewRef(given[2]);
    r->tensor = Py_NewRef(given[3]);
    r->parameter = Py_NewRef(given[4]);
    r->steps = Py_NewRef(given[5]);
    r->recorder = Py_NewRef(given[6]);
    r->mode_is_on = Py_NewRef(given[7]);
    r->grad_enabled = Py_NewRef(given[8]);
    r->compiler_callback = Py_NewRef(given[9]);
    r->enabled = 1;
    return 0;
}

static PyObject *reader_disable(PyObject *self, PyObject *unused)
{
    (void)unused;
    ((Reader *)self)->enabled = 0;
    Py_RETURN_NONE;
}

static PyMethodDef reader_methods[] = {
    {"disable", reader_disable, METH_NOARGS, "Leave every tensor to Python from now on."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Reader(compiler, tracing, …): what hooks ask of PyTorch and of the tap"},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, reader_init}, {Py_tp_dealloc, reader_dealloc},
    {Py_tp_traverse, reader_traverse}, {Py_tp_clear, reader_clear}, {Py_tp_methods, reader_methods}, {0, NULL},
};
static PyType_Spec reader_spec = {
    "tensortap.reduce._kernel.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, reader_slots,
};

/* ---- the recorder and its steps ---- */

static int recorder_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((RecorderState *)self)->current);
    return 0;
}

static int recorder_clear(PyObject *self)
{
    Py_CLEAR(((RecorderState *)self)->current);
    return 0;
}

static void recorder_dealloc(PyObject *self) { release_object(self, recorder_clear); }

static PyMemberDef recorder_members[] = {
    {"current", T_OBJECT_EX, offsetof(RecorderState, current), 0, "the open step"},
    {"per_thread", T_BOOL, offsetof(RecorderState, per_thread), 0, "whether some thread has a step of its own"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot recorder_slots[] = {
    {Py_tp_doc, "What hooks in C ask of a recorder."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, recorder_dealloc}, {Py_tp_traverse, recorder_traverse},
    {Py_tp_clear, recorder_clear}, {Py_tp_members, recorder_members}, {0, NULL},
};
static PyType_Spec recorder_spec = {
    "tensortap.reduce._kernel.RecorderState", sizeof(RecorderState), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, recorder_slots,
};

static PyMemberDef step_members[] = {
    {"armed", T_ULONGLONG, offsetof(StepState, armed), 0, "the probes that may want the step, as bits"},
    {"hist", T_ULONGLONG, offsetof(StepState, hist), 0, "those of them that take histograms"},
    {"closed", T_BOOL, offsetof(StepState, closed), 0, "whether the step is over"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot step_slots[] = {
    {Py_tp_doc, "What hooks in C ask of a step that is being recorded."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_members, step_members}, {0, NULL},
};
static PyType_Spec step_spec = {
    "tensortap.reduce._kernel.StepState", sizeof(StepState), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, step_slots,
};

/* ---- the hooks ---- */

static int hook_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((NativeHook *)self)->reader);
    Py_VISIT(((NativeHook *)self)->python);
    Py_VISIT(((NativeHook *)self)->step);
    Py_VISIT(((NativeHook *)self)->place);
    Py_VISIT(((NativeHook *)self)->for_node);
    return 0;
}

static void disconnect(NativeHook *hook)
{
    Py_CLEAR(hook->reader);
    Py_CLEAR(hook->python);
    Py_CLEAR(hook->for_node);
}

static int hook_clear(PyObject *self)
{
    disconnect((NativeHook *)self);
    Py_CLEAR(((NativeHook *)self)->step);
    Py_CLEAR(((NativeHook *)self)->place);
    return 0;
}

static void hook_dealloc(PyObject *self) { release_object(self, hook_clear); }

/* What to look at: the gradients of (gradients), the output of (module, args, output), or the only argument of (module, args[, kwargs]). */
static PyObject *find_among(PyObject *given, int position)
{
    const Py_ssize_t count = PyTuple_Size(given);
    if (position == 0)
        return count == 1 ? PyTuple_GetItem(given, 0) : NULL;
    PyObject *at = position < count ? PyTuple_GetItem(given, position) : NULL;
    if (!at || position == 2)
        return count == 3 ? at : NULL;
    PyObject *kwargs = count == 3 ? PyTuple_GetItem(given, 2) : NULL;
    if (kwargs && !(PyDict_CheckExact(kwargs) && PyDict_Size(kwargs) == 0))
        return NULL;
    return PyTuple_CheckExact(at) && PyTuple_Size(at) == 1 ? PyTuple_GetItem(at, 0) : NULL;
}

static PyObject *call_with_self(PyObject *self, PyObject *function, PyObject *given, PyObject *kwargs)
{
    if (!function) {
        PyErr_SetString(PyExc_RuntimeError, "a hook of tensortap was called before connect()");
        return NULL;
    }
    PyObject *python = Py_NewRef(function), *result = NULL;
    const Py_ssize_t count = PyTuple_Size(given);
    PyObject *args = PyTuple_New(count + 1);
    for (Py_ssize_t i = 0; args && i <= count; i++)
        PyTuple_SetItem(args, i, Py_NewRef(i ? PyTuple_GetItem(given, i - 1) : self));
    if (args)
        result = PyObject_Call(python, args, kwargs);
    Py_XDECREF(args);
    Py_DECREF(python);
    return result;
}

static PyObject *hook_call(PyObject *self, PyObject *given, PyObject *kwargs)
{
    NativeHook *hook = (NativeHook *)self;
    PyObject *found = (hook->key >= 0 || hook->for_node) && !kwargs ? find_among(given, hook->position) : NULL;
    if (found) {
        Reader *reader = (Reader *)Py_XNewRef((PyObject *)hook->reader);
        const int done = hook->for_node ? record_and_await(reader, hook, found)
                         : hook->position ? record_in_open_step(reader, hook, found)
                                          : record_gradient(reader, hook, found);
        Py_XDECREF((PyObject *)reader);
        if (done == RAISE)
            return NULL;
        if (done != LEAVE)
            Py_RETURN_NONE;
        PyErr_Clear();
    }
    return call_with_self(self, hook->python, given, kwargs);
}

static PyObject *hook_connect(PyObject *self, PyObject *args)
{
    NativeHook *hook = (NativeHook *)self;
    PyObject *reader, *python;
    int position;
    if (!PyArg_ParseTuple(args, "OOi", &reader, &python, &position))
        return NULL;
    if ((reader != Py_None && Py_TYPE(reader) != reader_type) || position < 0 || position > 2) {
        PyErr_SetString(PyExc_TypeError, "connect(reader, python, position) takes a Reader or None, and 0, 1 or 2");
        return NULL;
    }
    disconnect(hook);
    hook->key = -1;
    hook->position = position;
    hook->reader = reader == Py_None ? NULL : (Reader *)Py_NewRef(reader);
    hook->python = Py_NewRef(python);
    Py_RETURN_NONE;
}

static PyObject *hook_use_point(PyObject *self, PyObject *args)
{
    NativeHook *hook = (NativeHook *)self;
    PyObject *probes, *keeping;
    long long key;
    if (!PyArg_ParseTuple(args, "LO!O!", &key, &PyLong_Type, &probes, &PyLong_Type, &keeping))
        return NULL;
    hook->probes = PyLong_AsUnsignedLongLongMask(probes);
    hook->keeping = PyLong_AsUnsignedLongLongMask(keeping);
    hook->whole = 0;
    hook->key = hook->reader ? key : -1;
    Py_RETURN_NONE;
}

static PyObject *hook_keep_whole(PyObject *self, PyObject *probes)
{
    const uint64_t whole = PyLong_AsUnsignedLongLongMask(probes);
    if (whole == UINT64_MAX && PyErr_Occurred())
        return NULL;
    ((NativeHook *)self)->whole = whole & ((NativeHook *)self)->keeping;
    Py_RETURN_NONE;
}

static PyObject *hook_await_gradients(PyObject *self, PyObject *args)
{
    NativeHook *hook = (NativeHook *)self;
    PyObject *for_node, *probes;
    if (!PyArg_ParseTuple(args, "O!O!", hook_type, &for_node, &PyLong_Type, &probes))
        return NULL;
    PyObject *before = (PyObject *)hook->for_node;
    hook->gradient_probes = PyLong_AsUnsignedLongLongMask(probes);
    hook->for_node = hook->reader ? (NativeHook *)Py_NewRef(for_node) : NULL;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyMemberDef hook_members[] = {
    {"step", T_OBJECT, offsetof(NativeHook, step), 0, "the step that a gradient belongs to"},
    {"place", T_OBJECT, offsetof(NativeHook, place), 0, "where a gradient is recorded"},
    {"call", T_LONGLONG, offsetof(NativeHook, call), 0, "the number of the forward call; negative once it was used"},
    {"index", T_LONGLONG, offsetof(NativeHook, index), 0, "which of a node's outputs"},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef hook_methods[] = {
    {"await_gradients", hook_await_gradients, METH_VARARGS,
     "await_gradients(hook, probes): put a copy of a hook on the node of each output, for the probes that want gradients"},
    {"connect", hook_connect, METH_VARARGS, 
     "connect(reader, python, position): what to ask, what to call where C gives up, and which argument is recorded"},
    {"use_point", hook_use_point, METH_VARARGS, "use_point(key, probes, keeping): record single tensors in C, as this point"},
    {"keep_whole", hook_keep_whole, METH_O, "keep_whole(probes): copy whole tensors for these of the point's probes"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot hook_slots[] = {
    {Py_tp_doc, "The base class of hooks whose calls are answered in C as far as possible."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear}, {Py_tp_call, hook_call}, {Py_tp_methods, hook_methods},
    {Py_tp_members, hook_members}, {0, NULL},
};
static PyType_Spec hook_spec = {
    "tensortap.reduce._kernel.NativeHook", sizeof(NativeHook), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, hook_slots,
};

#include "ops.h"

/* Show a function as a class's `__call__` and go on answering calls in C. torch.compile follows what a class shows; an
 * ordinary assignment would have the interpreter call the function too. */
static PyObject *py_show_call(PyObject *module, PyObject *args)
{
    PyObject *type, *function;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &function))
        return NULL;
    const int is_scope = PyType_IsSubtype((PyTypeObject *)type, scope_type);
    if (!is_scope && !PyType_IsSubtype((PyTypeObject *)type, hook_type)) {
        PyErr_SetString(PyExc_TypeError, "show_call(type, function) takes a subclass of NativeHook or ScopeHook");
        return NULL;
    }
    PyObject *namespace = PyObject_GenericGetDict(type, NULL);
    const int failed = !namespace || PyDict_SetItemString(namespace, "__call__", function);
    Py_XDECREF(namespace);
    PyType_Modified((PyTypeObject *)type);
    if (failed)
        return NULL;
    return PyBool_FromLong(PyType_GetSlot((PyTypeObject *)type, Py_tp_call) == (void *)(is_scope ? scope_call : hook_call));
}

static int add_hooks(PyObject *module)
{
    static const struct {
        PyObject **name;
        const char *text;
    } interned[] = {
        {&names.is_compiling, "_is_compiling_flag"}, {&names.current, "current"},
        {&names.table, "table"}, {&names.whole, "whole"}, {&names.bound, "bound"},
        {&names.calls, "calls"}, {&names.requires_grad, "requires_grad"},
        {&names.grad_fn, "grad_fn"}, {&names.output_nr, "output_nr"}, {&names.register_prehook, "register_prehook"},
        {&names.take_output, "take_output"}, {&names.await_gradient, "await_gradient"}, {&names.state, "state"},
        {&names.generation, "generation"}, {&names.bits, "bits"}, {&names.recorder, "recorder"},
        {&names.take_left, "take_left"},
    };
    for (size_t i = 0; i < sizeof interned / sizeof *interned; i++)
        if (!*interned[i].name && !(*interned[i].name = PyUnicode_InternFromString(interned[i].text)))
            return -1;
    return add_type(module, "Reader", &reader_type, &reader_spec) ||
           add_type(module, "RecorderState", &recorder_type, &recorder_spec) ||
           add_type(module, "StepState", &step_type, &step_spec) ||
           add_type(module, "NativeHook", &hook_type, &hook_spec) || add_operations(module);
}
