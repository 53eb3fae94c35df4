/* A step table as one record batch message of an Arrow stream: the metadata that Arrow made for a batch of this schema, with
 * the lengths of this step filled in, and the columns behind it. Arrow would look at every column anew in every step.
 *
 * The plan (store/messages.py) is a list of int64: where in the metadata the batch's length, the body's length, the nodes and
 * the buffers lie, how many nodes there are, and for each node: the unit of its length, the address of its bitmap of values
 * (NO_BITMAP: all are there; ALL_NULL: none is), how many buffers follow the bitmap, and for each of them unit, width and
 * address (0: zeros). */

enum { NOTHING_OF_IT, BY_ROW, BY_BIT, BY_END, BY_BUCKET, BY_DIM };
enum { NO_BITMAP, ALL_NULL };
enum { LENGTH_AT, BODY_AT, NODES_AT, BUFFERS_AT, NODE_COUNT, FIRST_NODE };
#define PADDED(n) (((n) + 7) & ~(int64_t)7)

typedef struct {
    const int64_t *header;
    char *metadata, *body; /* NULL while the body is only measured */
    int64_t size, node, buffer; /* of the body so far; where the next node and buffer lie in the metadata */
} Message;

static int64_t units(const int64_t *header, int64_t unit)
{
    const int64_t rows = header[ROWS];
    switch (unit) {
    case BY_ROW: return rows;
    case BY_BIT: return (rows + 7) / 8;
    case BY_END: return rows + 1;
    case BY_BUCKET: return COLUMN(int32_t, HIST_ENDS)[rows];
    case BY_DIM: return COLUMN(int32_t, DIMS_ENDS)[rows];
    default: return 0;
    }
}

static int64_t set_bits(const uint8_t *bitmap, int64_t rows)
{
    int64_t count = 0;
    for (int64_t i = 0; i < rows / 8; i++)
        count += __builtin_popcount(bitmap[i]);
    return rows & 7 ? count + __builtin_popcount(bitmap[rows / 8] & ((1u << (rows & 7)) - 1)) : count;
}

static void put_pair(char *at, int64_t first, int64_t second)
{
    memcpy(at, &first, sizeof first);
    memcpy(at + sizeof first, &second, sizeof second);
}

static void put_buffer(Message *m, int64_t bytes, int64_t address)
{
    if (m->body) {
        char *to = m->body + m->size;
        if (address)
            memcpy(to, (const void *)(uintptr_t)address, (size_t)bytes);
        else
            memset(to, 0, (size_t)bytes);
        memset(to + bytes, 0, (size_t)(PADDED(bytes) - bytes));
        put_pair(m->metadata + m->buffer, m->size, bytes);
    }
    m->buffer += 16;
    m->size += PADDED(bytes);
}

static const int64_t *put_node(Message *m, const int64_t *plan)
{
    const int64_t length = units(m->header, plan[0]), bitmap = plan[1], buffers = plan[2];
    const int64_t nulls = bitmap == NO_BITMAP  ? 0
                          : bitmap == ALL_NULL ? length
                                               : length - set_bits((const uint8_t *)(uintptr_t)bitmap, length);
    if (m->body)
        put_pair(m->metadata + m->node, length, nulls);
    m->node += 16;
    put_buffer(m, nulls ? (length + 7) / 8 : 0, bitmap == ALL_NULL ? 0 : bitmap);
    plan += 3;
    for (int64_t i = 0; i < buffers; i++, plan += 3)
        put_buffer(m, units(m->header, plan[0]) * plan[1], plan[2]);
    return plan;
}

static void put_nodes(Message *m, const int64_t *plan)
{
    m->size = 0;
    m->node = plan[NODES_AT];
    m->buffer = plan[BUFFERS_AT];
    const int64_t *next = plan + FIRST_NODE;
    for (int64_t i = 0; i < plan[NODE_COUNT]; i++)
        next = put_node(m, next);
}

/* Make the message in a bytearray, whose memory serves step after step; -1 with an error set. */
static int make_message(const int64_t *header, const int64_t *plan, PyObject *made, PyObject *into)
{
    char *metadata;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(made, &metadata, &size))
        return -1;
    if (!PyByteArray_CheckExact(into)) {
        PyErr_SetString(PyExc_TypeError, "a message is made in a bytearray");
        return -1;
    }
    Message m = {.header = header};
    put_nodes(&m, plan);
    if (PyByteArray_Resize(into, size + (Py_ssize_t)m.size))
        return -1;
    m.metadata = PyByteArray_AsString(into);
    m.body = m.metadata + size;
    memcpy(m.metadata, metadata, (size_t)size);
    memcpy(m.metadata + plan[LENGTH_AT], &header[ROWS], sizeof(int64_t));
    memcpy(m.metadata + plan[BODY_AT], &m.size, sizeof(int64_t));
    put_nodes(&m, plan);
    return 0;
}

/* Without the GIL; -1 with an error set. What was written before an error stays. */
static int write_whole(int file, const char *data, Py_ssize_t size)
{
    while (size > 0) {
        ssize_t written;
        Py_BEGIN_ALLOW_THREADS
        written = write(file, data, (size_t)size);
        Py_END_ALLOW_THREADS
        if (written < 0 && errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
        if (written < 0 && PyErr_CheckSignals())
            return -1;
        data += written > 0 ? written : 0;
        size -= written > 0 ? written : 0;
    }
    return 0;
}

/* The buffer is held meanwhile, so that nobody can resize it. */
static PyObject *write_buffer(int file, PyObject *from)
{
    Py_buffer view;
    if (PyObject_GetBuffer(from, &view, PyBUF_SIMPLE))
        return NULL;
    PyObject *size = write_whole(file, view.buf, view.len) ? NULL : PyLong_FromSsize_t(view.len);
    PyBuffer_Release(&view);
    return size;
}

static PyObject *py_append_rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("append_rows(layout_address, plan_address, metadata, into, file)", count, 5))
        return NULL;
    const int64_t *header = PyLong_AsVoidPtr(args[0]), *plan = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[1]);
    const int file = PyErr_Occurred() ? -1 : (int)PyLong_AsLong(args[4]);
    if (PyErr_Occurred() || make_message(header, plan, args[2], args[3]))
        return NULL;
    return file < 0 ? PyLong_FromSsize_t(PyByteArray_Size(args[3])) : write_buffer(file, args[3]);
}
