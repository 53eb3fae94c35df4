/* What is done with all rows of a table when its step closes, and with an empty one when another begins. */

enum { STEP_AT, KEYS_AT, PROBES_AT, RECOMPUTED_AT, ROWS_THEN };

/* The bits of rows that are not there any more may be anything. */
static int same_bits(const uint8_t *a, const uint8_t *b, int64_t rows)
{
    const int64_t whole = rows / 8;
    return !memcmp(a, b, (size_t)whole) && !(rows & 7 && (a[whole] ^ b[whole]) & ((1u << (rows & 7)) - 1));
}

/* The plan is a list of int64: the addresses of the column of step numbers and of copies of the columns key, probes and
 * recomputed, and how many rows these copies have. True when the table had the same there the last time; else it is copied. */
static PyObject *py_settle(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("settle(layout_address, plan_address, step)", count, 3))
        return NULL;
    const int64_t *header = PyLong_AsVoidPtr(args[0]);
    int64_t *plan = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[1]);
    const int64_t step = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const int64_t rows = header[ROWS];
    int64_t *numbers = (int64_t *)(uintptr_t)plan[STEP_AT];
    void *keys = (void *)(uintptr_t)plan[KEYS_AT], *probes = (void *)(uintptr_t)plan[PROBES_AT];
    uint8_t *recomputed = (uint8_t *)(uintptr_t)plan[RECOMPUTED_AT];
    const size_t of_keys = (size_t)rows * sizeof(int32_t), of_probes = (size_t)rows * sizeof(uint64_t);
    for (int64_t i = 0; i < rows; i++)
        numbers[i] = step;
    if (plan[ROWS_THEN] == rows && !memcmp(keys, COLUMN(int32_t, KEY), of_keys) &&
        !memcmp(probes, COLUMN(uint64_t, PROBES), of_probes) && same_bits(recomputed, COLUMN(uint8_t, RECOMPUTED), rows))
        Py_RETURN_TRUE;
    memcpy(keys, COLUMN(int32_t, KEY), of_keys);
    memcpy(probes, COLUMN(uint64_t, PROBES), of_probes);
    memcpy(recomputed, COLUMN(uint8_t, RECOMPUTED), (size_t)(rows + 7) / 8);
    plan[ROWS_THEN] = rows;
    Py_RETURN_FALSE;
}

/* Add what each row cost, in seconds, to the total of its key; -1 when there are too few totals. */
static PyObject *py_charge(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("charge(layout_address, totals_address, length)", count, 3))
        return NULL;
    const int64_t *header = PyLong_AsVoidPtr(args[0]);
    double *totals = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[1]), sum = 0.0;
    const int64_t length = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const int32_t *key = COLUMN(int32_t, KEY);
    const int64_t *cost = COLUMN(int64_t, COST), rows = header[ROWS];
    for (int64_t i = 0; i < rows; i++)
        if (key[i] >= length)
            return PyFloat_FromDouble(-1.0);
    for (int64_t i = 0; i < rows; i++) {
        const double seconds = (double)cost[i] * 1e-9;
        totals[key[i]] += seconds;
        sum += seconds;
    }
    return PyFloat_FromDouble(sum);
}

/* Forget all rows, and take as many as there is room for. The capacity comes last: by it other threads know. */
static PyObject *py_reopen(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("reopen(layout_address, capacity, time, hash_probes)", count, 4))
        return NULL;
    int64_t *header = PyLong_AsVoidPtr(args[0]);
    const int64_t capacity = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[1]);
    const int64_t time = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    const uint64_t hashed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLongMask(args[3]);
    if (PyErr_Occurred())
        return NULL;
    header[ROW_CAPACITY] = 0;
    header[ROWS] = header[HIST] = header[DIMS] = header[NONFINITE] = 0;
    header[FIXED_TIME] = time;
    if (!time)
        read_wall_clock();
    header[HASH_PROBES] = (int64_t)hashed;
    memset(COLUMN(int32_t, CALLS), 0, 2 * (size_t)header[KEY_CAPACITY] * sizeof(int32_t));
    header[ROW_CAPACITY] = capacity;
    Py_RETURN_NONE;
}
