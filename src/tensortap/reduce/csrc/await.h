/* Gradients of outputs: in every call a hook goes on the node that made the output, which records what arrives there.
 *
 * All that could leave the call to Python is asked before anything is done. From then on Python does only what is left:
 * `take_output(output, step)` where the row of the output needs it, `await_gradient(output, step, call)` where
 * registering has failed. */

/* A copy of a hook, for the node of one output. */
static NativeHook *copy_for_node(const NativeHook *hook, PyObject *step, long long call, long long index)
{
    PyTypeObject *type = Py_TYPE((PyObject *)hook);
    NativeHook *copy = (NativeHook *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!copy)
        return NULL;
    copy->reader = (Reader *)Py_XNewRef((PyObject *)hook->reader);
    copy->python = Py_XNewRef(hook->python);
    copy->place = Py_XNewRef(hook->place);
    copy->step = Py_NewRef(step);
    copy->position = hook->position;
    copy->key = hook->key;
    copy->probes = hook->probes;
    copy->keeping = hook->keeping;
    copy->whole = hook->whole;
    copy->call = call;
    copy->index = index;
    return copy;
}

static int register_on_node(const NativeHook *hook, PyObject *node, PyObject *output, PyObject *step, long long call)
{
    PyObject *number = PyObject_GetAttr(output, names.output_nr);
    const long long index = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    NativeHook *copy = index >= 0 ? copy_for_node(hook->for_node, step, call, index) : NULL;
    PyObject *handle = copy ? PyObject_CallMethodObjArgs(node, names.register_prehook, copy, NULL) : NULL;
    Py_XDECREF(handle);
    Py_XDECREF((PyObject *)copy);
    return handle ? 0 : -1;
}

/* The number of this call of the hook's module in its step, which is counted; -1 with an error set. */
static long long count_call(NativeHook *hook, PyObject *step)
{
    PyObject *calls = PyObject_GetAttr(step, names.calls);
    PyObject *before = calls ? PyDict_GetItemWithError(calls, (PyObject *)hook) : NULL;
    const long long call = before ? PyLong_AsLongLong(before) : 0;
    PyObject *next = calls && !PyErr_Occurred() ? PyLong_FromLongLong(call + 1) : NULL;
    const int failed = !next || PyDict_SetItem(calls, (PyObject *)hook, next);
    Py_XDECREF(next);
    Py_XDECREF(calls);
    return failed ? -1 : call;
}

static int attribute_is(PyObject *object, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(object, name);
    Py_XDECREF(value);
    return value == expected;
}

/* The node that made an output in an ordinary forward, as a new reference; NULL where Python has to decide. */
static PyObject *node_of(const Reader *r, PyObject *output)
{
    if (!returns(r->mode_is_on, Py_False) || !returns(r->grad_enabled, Py_True) || is_recomputation(r))
        return NULL;
    if (!attribute_is(output, names.requires_grad, Py_True))
        return NULL;
    PyObject *node = PyObject_GetAttr(output, names.grad_fn);
    if (node == Py_None)
        Py_CLEAR(node);
    return node;
}

/* Have Python do a part. It counts its own errors, and raises them only where the user has asked for that. */
static int do_in_python(NativeHook *hook, PyObject *name, PyObject *output, PyObject *step, PyObject *call)
{
    PyErr_Clear();
    PyObject *result = PyObject_CallMethodObjArgs((PyObject *)hook, name, output, step, call, NULL);
    Py_XDECREF(result);
    return result ? RECORD : RAISE;
}

static int record_output(Reader *r, NativeHook *hook, Target *t, PyObject *output, PyObject *step)
{
    const int wanted = hook->key >= 0 ? aim(r, hook, step, t) : NOTHING;
    if (wanted == NOTHING || (wanted == RECORD && record_plain(hook, t, step, output) >= 0))
        return RECORD;
    return do_in_python(hook, names.take_output, output, step, NULL);
}

static int await_gradient(NativeHook *hook, PyObject *node, PyObject *output, PyObject *step)
{
    const long long call = count_call(hook, step);
    if (call >= 0 && !register_on_node(hook, node, output, step, call))
        return RECORD;
    PyErr_Clear();
    PyObject *number = PyLong_FromLongLong(call);
    const int done = number ? do_in_python(hook, names.await_gradient, output, step, number) : RAISE;
    Py_XDECREF(number);
    return done;
}

/* Record what a module returned where that is wanted, and await its gradient. */
static int record_and_await(Reader *r, NativeHook *hook, PyObject *output)
{
    Target t = {.begin = begun(IN_HOOK)};
    if (!may_read(r) || !is_plain_type(r, output))
        return LEAVE;
    PyObject *step = open_step(r), *node = NULL;
    const StepState *state = step ? step_state(step) : NULL;
    int done = state ? RECORD : LEAVE;
    const int gradient = state && state->armed & hook->gradient_probes;
    if (gradient && !(node = node_of(r, output)))
        done = LEAVE;
    if (done == RECORD && !gradient)
        done = hook->key >= 0 ? record_in_open_step(r, hook, output) : NOTHING;
    else if (done == RECORD && (done = record_output(r, hook, &t, output, step)) == RECORD)
        done = await_gradient(hook, node, output, step);
    Py_XDECREF(node);
    Py_XDECREF(step);
    return done;
}
