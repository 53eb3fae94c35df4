/* Single operations: which module runs, and what its operations return, without Python where nothing unusual holds.
 *
 * ModuleCall: a module that runs: its hook, path and sites, and how many operations of each kind it has done.
 * RunningCalls: those of one thread, innermost last, and whether the thread's function mode is on.
 * ScopeHook: the base class of the hooks before and behind a module that begin and end its call. C does it inside
 *     another module's call; the mode is on while the innermost module's operations may be observed.
 * ModeCall: the `__torch_function__` of a function mode. It calls the function, and records what a site with a
 *     `recorder` returns. What it cannot decide goes to the Python method, before anything is done. */

typedef struct {
    PyObject_HEAD
    PyObject *owner, *path, *sites, *counts;
    char visible;
} ModuleCall;

typedef struct {
    PyObject_HEAD
    PyObject *calls, *mode, *push, *pop; /* the mode, and PyTorch's functions for the stack of modes */
    char is_on;
} RunningCalls;

typedef struct {
    PyObject_HEAD
    Reader *reader;
    PyObject *python, *running, *visibility; /* `running` is a thread's: its `state` are RunningCalls */
    PyObject *owner; /* of the call that it ends; NULL for a hook that begins one */
    ModuleCall *call; /* what it begins, used again when nobody holds it any more; NULL where Python must do it */
    int64_t generation; /* of the visibility, for which the call is right */
} ScopeHook;

typedef struct {
    PyObject_HEAD
    Reader *reader;
    PyObject *mode, *python, *known, *taps; /* `mode` is shown as `__self__`: PyTorch looks whose method it calls */
    RunningCalls *state;
} ModeCall;

static PyTypeObject *module_call_type, *running_type, *scope_type, *mode_call_type;

/* ---- the calls ---- */

static int module_call_traverse(PyObject *self, visitproc visit, void *arg)
{
    ModuleCall *call = (ModuleCall *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(call->owner);
    Py_VISIT(call->path);
    Py_VISIT(call->sites);
    Py_VISIT(call->counts);
    return 0;
}

static int module_call_clear(PyObject *self)
{
    ModuleCall *call = (ModuleCall *)self;
    Py_CLEAR(call->owner);
    Py_CLEAR(call->path);
    Py_CLEAR(call->sites);
    Py_CLEAR(call->counts);
    return 0;
}

static void module_call_dealloc(PyObject *self) { release_object(self, module_call_clear); }

static int module_call_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"owner", "path", "sites", "visible", "counts", NULL};
    PyObject *owner, *path, *sites, *counts;
    int visible;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!pO!", keywords, &owner, &PyUnicode_Type, &path, &PyDict_Type, &sites,
                                     &visible, &PyDict_Type, &counts))
        return -1;
    module_call_clear(self);
    ModuleCall *call = (ModuleCall *)self;
    call->owner = Py_NewRef(owner);
    call->path = Py_NewRef(path);
    call->sites = Py_NewRef(sites);
    call->counts = Py_NewRef(counts);
    call->visible = (char)visible;
    return 0;
}

static PyMemberDef module_call_members[] = {
    {"owner", T_OBJECT, offsetof(ModuleCall, owner), READONLY, "what began it"},
    {"path", T_OBJECT, offsetof(ModuleCall, path), READONLY, "the module's path"},
    {"sites", T_OBJECT, offsetof(ModuleCall, sites), READONLY, "the module's sites by the name of the operation"},
    {"counts", T_OBJECT, offsetof(ModuleCall, counts), READONLY, "how many operations of each name it has done"},
    {"visible", T_BOOL, offsetof(ModuleCall, visible), 0, "whether its operations may be observed"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot module_call_slots[] = {
    {Py_tp_doc, "ModuleCall(owner, path, sites, visible, counts): a running module."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, module_call_init}, {Py_tp_dealloc, module_call_dealloc},
    {Py_tp_traverse, module_call_traverse}, {Py_tp_clear, module_call_clear}, {Py_tp_members, module_call_members},
    {0, NULL},
};
static PyType_Spec module_call_spec = {
    "tensortap.reduce._kernel.ModuleCall", sizeof(ModuleCall), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, module_call_slots,
};

static int running_traverse(PyObject *self, visitproc visit, void *arg)
{
    RunningCalls *state = (RunningCalls *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(state->calls);
    Py_VISIT(state->mode);
    Py_VISIT(state->push);
    Py_VISIT(state->pop);
    return 0;
}

static int running_clear(PyObject *self)
{
    RunningCalls *state = (RunningCalls *)self;
    Py_CLEAR(state->calls);
    Py_CLEAR(state->mode);
    Py_CLEAR(state->push);
    Py_CLEAR(state->pop);
    return 0;
}

static void running_dealloc(PyObject *self) { release_object(self, running_clear); }

static int running_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"push", "pop", NULL};
    PyObject *push, *pop;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", keywords, &push, &pop))
        return -1;
    running_clear(self);
    RunningCalls *state = (RunningCalls *)self;
    state->calls = PyList_New(0);
    state->push = Py_NewRef(push);
    state->pop = Py_NewRef(pop);
    return state->calls ? 0 : -1;
}

static PyMemberDef running_members[] = {
    {"calls", T_OBJECT, offsetof(RunningCalls, calls), READONLY, "the modules that run, innermost last"},
    {"is_on", T_BOOL, offsetof(RunningCalls, is_on), 0, "whether the function mode is active"},
    {"mode", T_OBJECT, offsetof(RunningCalls, mode), 0, "the mode that C pushes on top; None where Python has to place it"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot running_slots[] = {
    {Py_tp_doc, "RunningCalls(push, pop): the modules that run in a thread."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, running_init}, {Py_tp_dealloc, running_dealloc},
    {Py_tp_traverse, running_traverse}, {Py_tp_clear, running_clear}, {Py_tp_members, running_members}, {0, NULL},
};
static PyType_Spec running_spec = {
    "tensortap.reduce._kernel.RunningCalls", sizeof(RunningCalls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, running_slots,
};

/* The call at a position, borrowed; NULL where there is none of ours. */
static ModuleCall *call_at(const RunningCalls *state, Py_ssize_t position)
{
    PyObject *found = position >= 0 && position < PyList_Size(state->calls) ? PyList_GetItem(state->calls, position) : NULL;
    return found && Py_TYPE(found) == module_call_type ? (ModuleCall *)found : NULL;
}

static int push_mode(const RunningCalls *state, PyObject *mode)
{
    PyObject *result = PyObject_CallFunctionObjArgs(state->push, mode, NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Push or pop the mode. One that is not on top stays where it is. */
static int adjust(RunningCalls *state, int wanted)
{
    if (state->is_on == wanted)
        return 0;
    if (!state->mode || state->mode == Py_None)
        return -1;
    PyObject *top = wanted ? NULL : PyObject_CallNoArgs(state->pop);
    if (!wanted && !top)
        return -1;
    const int is_ours = wanted || top == state->mode;
    const int failed = wanted ? push_mode(state, state->mode) : is_ours ? 0 : push_mode(state, top);
    Py_XDECREF(top);
    if (!failed && is_ours)
        state->is_on = (char)wanted;
    return failed;
}

/* ---- the hooks ---- */

static int scope_traverse(PyObject *self, visitproc visit, void *arg)
{
    ScopeHook *hook = (ScopeHook *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(hook->reader);
    Py_VISIT(hook->python);
    Py_VISIT(hook->running);
    Py_VISIT(hook->visibility);
    Py_VISIT(hook->owner);
    Py_VISIT(hook->call);
    return 0;
}

static int scope_clear(PyObject *self)
{
    ScopeHook *hook = (ScopeHook *)self;
    Py_CLEAR(hook->reader);
    Py_CLEAR(hook->python);
    Py_CLEAR(hook->running);
    Py_CLEAR(hook->visibility);
    Py_CLEAR(hook->owner);
    Py_CLEAR(hook->call);
    return 0;
}

static void scope_dealloc(PyObject *self) { release_object(self, scope_clear); }

/* The calling thread's calls, as a new reference. */
static RunningCalls *state_of(const ScopeHook *hook)
{
    PyObject *state = PyObject_GetAttr(hook->running, names.state);
    if (state && Py_TYPE(state) != running_type)
        Py_CLEAR(state);
    return (RunningCalls *)state;
}

/* The call to begin, as a new reference with no operations counted. */
static ModuleCall *fresh_call(const ScopeHook *hook)
{
    ModuleCall *call = hook->call;
    if (Py_REFCNT((PyObject *)call) == 1 && Py_REFCNT(call->counts) == 1) {
        PyDict_Clear(call->counts);
        return (ModuleCall *)Py_NewRef((PyObject *)call);
    }
    ModuleCall *made = (ModuleCall *)PyType_GenericNew(module_call_type, NULL, NULL);
    if (made) {
        made->owner = Py_NewRef(call->owner);
        made->path = Py_NewRef(call->path);
        made->sites = Py_NewRef(call->sites);
        made->visible = call->visible;
        if (!(made->counts = PyDict_New()))
            Py_CLEAR(made);
    }
    return made;
}

static int begin_call(ScopeHook *hook)
{
    uint64_t generation;
    if (!hook->call || !may_read(hook->reader) || !returns(hook->reader->compiler_callback, Py_None))
        return LEAVE;
    if (unsigned_attribute(hook->visibility, names.generation, &generation) || (int64_t)generation != hook->generation)
        return LEAVE;
    RunningCalls *state = state_of(hook);
    ModuleCall *call = NULL;
    if (state && PyList_Size(state->calls) && !adjust(state, hook->call->visible))
        call = fresh_call(hook);
    const int done = call && !PyList_Append(state->calls, (PyObject *)call) ? RECORD : LEAVE;
    Py_XDECREF((PyObject *)call);
    Py_XDECREF((PyObject *)state);
    return done;
}

static int end_call(ScopeHook *hook)
{
    if (!is_compiling_nothing(hook->reader))
        return LEAVE;
    RunningCalls *state = state_of(hook);
    int done = LEAVE;
    if (state) {
        const Py_ssize_t last = PyList_Size(state->calls) - 1;
        const ModuleCall *top = call_at(state, last), *below = call_at(state, last - 1);
        if (top && below && top->owner == hook->owner && !adjust(state, below->visible))
            done = PyList_SetSlice(state->calls, last, last + 1, NULL) ? LEAVE : RECORD;
    }
    Py_XDECREF((PyObject *)state);
    return done;
}

static PyObject *scope_call(PyObject *self, PyObject *given, PyObject *kwargs)
{
    ScopeHook *hook = (ScopeHook *)self;
    if (hook->running && !kwargs && (hook->owner ? end_call : begin_call)(hook) == RECORD)
        Py_RETURN_NONE;
    PyErr_Clear();
    return call_with_self(self, hook->python, given, kwargs);
}

static PyObject *scope_connect(PyObject *self, PyObject *args)
{
    ScopeHook *hook = (ScopeHook *)self;
    PyObject *reader, *python, *running, *visibility, *owner;
    if (!PyArg_ParseTuple(args, "OOOOO", &reader, &python, &running, &visibility, &owner))
        return NULL;
    if (reader != Py_None && Py_TYPE(reader) != reader_type) {
        PyErr_SetString(PyExc_TypeError, "connect(reader, python, running, visibility, owner) takes a Reader or None");
        return NULL;
    }
    scope_clear(self);
    hook->python = Py_NewRef(python);
    if (reader != Py_None) {
        hook->reader = (Reader *)Py_NewRef(reader);
        hook->running = Py_NewRef(running);
        hook->visibility = Py_NewRef(visibility);
        hook->owner = owner == Py_None ? NULL : Py_NewRef(owner);
    }
    Py_RETURN_NONE;
}

static PyObject *scope_use_call(PyObject *self, PyObject *args)
{
    ScopeHook *hook = (ScopeHook *)self;
    PyObject *call;
    long long generation;
    if (!PyArg_ParseTuple(args, "O!L", module_call_type, &call, &generation))
        return NULL;
    PyObject *before = (PyObject *)hook->call;
    hook->generation = generation;
    hook->call = hook->reader ? (ModuleCall *)Py_NewRef(call) : NULL;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyMethodDef scope_methods[] = {
    {"connect", scope_connect, METH_VARARGS,
     "connect(reader, python, running, visibility, owner): what to ask, what to call where C gives up, and whose call ends"},
    {"use_call", scope_use_call, METH_VARARGS, "use_call(call, generation): begin calls like this one in C"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot scope_slots[] = {
    {Py_tp_doc, "The base class of hooks that begin and end a module's call, in C as far as possible."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, scope_dealloc}, {Py_tp_traverse, scope_traverse},
    {Py_tp_clear, scope_clear}, {Py_tp_call, scope_call}, {Py_tp_methods, scope_methods}, {0, NULL},
};
static PyType_Spec scope_spec = {
    "tensortap.reduce._kernel.ScopeHook", sizeof(ScopeHook), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, scope_slots,
};

/* ---- the mode ---- */

static int mode_call_traverse(PyObject *self, visitproc visit, void *arg)
{
    ModeCall *mode = (ModeCall *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(mode->reader);
    Py_VISIT(mode->mode);
    Py_VISIT(mode->python);
    Py_VISIT(mode->known);
    Py_VISIT(mode->taps);
    Py_VISIT(mode->state);
    return 0;
}

static int mode_call_clear(PyObject *self)
{
    ModeCall *mode = (ModeCall *)self;
    Py_CLEAR(mode->reader);
    Py_CLEAR(mode->mode);
    Py_CLEAR(mode->python);
    Py_CLEAR(mode->known);
    Py_CLEAR(mode->taps);
    Py_CLEAR(mode->state);
    return 0;
}

static void mode_call_dealloc(PyObject *self) { release_object(self, mode_call_clear); }

static int mode_call_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"reader", "mode", "python", "known", "taps", "state", NULL};
    PyObject *reader, *itself, *python, *known, *taps, *state;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOO!OO!", keywords, reader_type, &reader, &itself, &python, &PyDict_Type,
                                     &known, &taps, running_type, &state))
        return -1;
    mode_call_clear(self);
    ModeCall *mode = (ModeCall *)self;
    mode->reader = (Reader *)Py_NewRef(reader);
    mode->mode = Py_NewRef(itself);
    mode->python = Py_NewRef(python);
    mode->known = Py_NewRef(known);
    mode->taps = Py_NewRef(taps);
    mode->state = (RunningCalls *)Py_NewRef(state);
    return 0;
}

/* The next site of an operation in a module's call, borrowed; NULL where Python has to make it. */
static PyObject *next_site(const ModuleCall *call, PyObject *name, Py_ssize_t *number)
{
    PyObject *found = PyDict_GetItemWithError(call->sites, name);
    PyObject *done = found && PyList_CheckExact(found) ? PyDict_GetItemWithError(call->counts, name) : NULL;
    *number = done ? PyLong_AsSsize_t(done) : 0;
    if (!found || !PyList_CheckExact(found) || PyErr_Occurred())
        return NULL;
    return *number < PyList_Size(found) ? PyList_GetItem(found, *number) : NULL;
}

static int count_operation(const ModuleCall *call, PyObject *name, Py_ssize_t number)
{
    PyObject *next = PyLong_FromSsize_t(number + 1);
    const int failed = !next || PyDict_SetItem(call->counts, name, next);
    Py_XDECREF(next);
    return failed ? -1 : 0;
}

/* What records the output of the operation that is about to run, and its site, both in new references; the operation is
 * counted. NULL where Python has to decide: then nothing is. */
static NativeHook *recorder_for(const ModeCall *mode, PyObject *name, PyObject *step, PyObject **site)
{
    uint64_t bits;
    Py_ssize_t number;
    const StepState *state = step_state(step);
    const ModuleCall *call = call_at(mode->state, PyList_Size(mode->state->calls) - 1);
    if (!call || !state || unsigned_attribute(mode->taps, names.bits, &bits) || !(state->armed & bits))
        return NULL;
    PyObject *found = next_site(call, name, &number), *recorder = found ? PyObject_GetAttr(found, names.recorder) : NULL;
    if (recorder && (Py_TYPE(recorder) != hook_type || count_operation(call, name, number)))
        Py_CLEAR(recorder);
    *site = recorder ? Py_NewRef(found) : NULL;
    return (NativeHook *)recorder;
}

static PyObject *call_function(PyObject *function, PyObject *args, PyObject *kwargs)
{
    PyObject *none = args ? NULL : PyTuple_New(0);
    PyObject *result = args || none ? PyObject_Call(function, args ? args : none, kwargs == Py_None ? NULL : kwargs) : NULL;
    Py_XDECREF(none);
    return result;
}

/* Call a wanted operation and record what it returns. NULL without an error: Python has to do all of it. */
static PyObject *observe_in_c(ModeCall *mode, PyObject *name, PyObject *function, PyObject *args, PyObject *kwargs)
{
    PyObject *site = NULL, *step = tensor_from_object ? open_step(mode->reader) : NULL;
    NativeHook *recorder = step ? recorder_for(mode, name, step, &site) : NULL;
    PyObject *output = NULL;
    if (recorder && (output = call_function(function, args, kwargs))) {
        int done = LEAVE;
        if ((PyObject *)Py_TYPE(output) == mode->reader->tensor)
            done = record_in_step(mode->reader, recorder, step, output);
        if (done == LEAVE) {
            PyErr_Clear();
            PyObject *result = PyObject_CallMethodObjArgs(mode->taps, names.take_left, site, output, step, NULL);
            if (!result)
                Py_CLEAR(output);
            Py_XDECREF(result);
        }
    } else if (!recorder) {
        PyErr_Clear();
    }
    Py_XDECREF((PyObject *)recorder);
    Py_XDECREF(site);
    Py_XDECREF(step);
    return output;
}

/* __torch_function__(function, types, args=(), kwargs=None) */
static PyObject *mode_call_call(PyObject *self, PyObject *given, PyObject *keywords)
{
    ModeCall *mode = (ModeCall *)self;
    const Py_ssize_t count = PyTuple_Size(given);
    if (!mode->reader || keywords || count < 2 || count > 4)
        return PyObject_Call(mode->python, given, keywords);
    PyObject *function = PyTuple_GetItem(given, 0), *args = count > 2 ? PyTuple_GetItem(given, 2) : NULL;
    PyObject *kwargs = count > 3 ? PyTuple_GetItem(given, 3) : NULL, *name = NULL;
    const int plain = (!args || PyTuple_CheckExact(args)) && (!kwargs || kwargs == Py_None || PyDict_CheckExact(kwargs));
    if (plain && is_compiling_nothing(mode->reader))
        name = PyDict_GetItemWithError(mode->known, function);
    if (name == Py_None)
        return call_function(function, args, kwargs);
    if (name) {
        Py_INCREF(name);
        PyObject *output = observe_in_c(mode, name, function, args, kwargs);
        Py_DECREF(name);
        if (output || PyErr_Occurred())
            return output;
    }
    PyErr_Clear(); /* a function that cannot be hashed */
    return PyObject_Call(mode->python, given, keywords);
}

static PyMemberDef mode_call_members[] = {
    {"__self__", T_OBJECT, offsetof(ModeCall, mode), READONLY, "the mode whose method it is"},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot mode_call_slots[] = {
    {Py_tp_members, mode_call_members},
    {Py_tp_doc, "ModeCall(reader, mode, python, known, taps, state): the `__torch_function__` of a function mode."},
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, mode_call_init}, {Py_tp_dealloc, mode_call_dealloc},
    {Py_tp_traverse, mode_call_traverse}, {Py_tp_clear, mode_call_clear}, {Py_tp_call, mode_call_call}, {0, NULL},
};
static PyType_Spec mode_call_spec = {
    "tensortap.reduce._kernel.ModeCall", sizeof(ModeCall), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, mode_call_slots,
};

static int add_type(PyObject *module, const char *name, PyTypeObject **type, PyType_Spec *spec)
{
    if (!*type && !(*type = (PyTypeObject *)PyType_FromSpec(spec)))
        return -1;
    return PyModule_AddObjectRef(module, name, (PyObject *)*type);
}

static int add_operations(PyObject *module)
{
    return add_type(module, "ModuleCall", &module_call_type, &module_call_spec) ||
           add_type(module, "RunningCalls", &running_type, &running_spec) ||
           add_type(module, "ScopeHook", &scope_type, &scope_spec) ||
           add_type(module, "ModeCall", &mode_call_type, &mode_call_spec);
}
