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
#define MOST_PARTS 512

static char NO_BYTES[1 << 20]; /* zeros, never written to: so many that the zeros of any table are few parts */

typedef struct {
    const int64_t *header;
    char *metadata, *body; /* where to write to; NULL: the body is only measured, or written from where it lies */
    struct iovec *parts;   /* where the body lies, or NULL */
    int count;             /* of parts; more than MOST_PARTS are not noted */
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

/* An address of 0 stands for zeros. */
static void put_part(Message *m, const char *data, int64_t bytes)
{
    while (bytes > 0) {
        const int64_t size = data || bytes < (int64_t)sizeof NO_BYTES ? bytes : (int64_t)sizeof NO_BYTES;
        if (m->count < MOST_PARTS)
            m->parts[m->count] = (struct iovec){(void *)(uintptr_t)(data ? data : NO_BYTES), (size_t)size};
        m->count++;
        bytes -= size;
    }
}

static void put_buffer(Message *m, int64_t bytes, int64_t address)
{
    if (m->parts) {
        put_part(m, (const char *)(uintptr_t)address, bytes);
        put_part(m, NULL, PADDED(bytes) - bytes);
        put_pair(m->metadata + m->buffer, m->size, bytes);
    } else if (m->body) {
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
    if (m->body || m->parts)
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

/* Make room for `size` bytes behind the metadata in a bytearray, and copy that; -1 with an error set. */
static int begin_message(Message *m, PyObject *made, PyObject *into, int64_t size)
{
    char *metadata;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(made, &metadata, &length))
        return -1;
    if (!PyByteArray_CheckExact(into)) {
        PyErr_SetString(PyExc_TypeError, "a message is made in a bytearray");
        return -1;
    }
    if (PyByteArray_Resize(into, length + (Py_ssize_t)size))
        return -1;
    m->metadata = PyByteArray_AsString(into);
    memcpy(m->metadata, metadata, (size_t)length);
    return 0;
}

static void end_message(Message *m, const int64_t *plan)
{
    memcpy(m->metadata + plan[LENGTH_AT], &m->header[ROWS], sizeof(int64_t));
    memcpy(m->metadata + plan[BODY_AT], &m->size, sizeof(int64_t));
}

/* The whole message in a bytearray, whose memory serves step after step. */
static PyObject *copied_message(Message *m, const int64_t *plan, PyObject *made, PyObject *into)
{
    put_nodes(m, plan);
    if (begin_message(m, made, into, m->size))
        return NULL;
    m->body = m->metadata + PyBytes_Size(made);
    put_nodes(m, plan);
    end_message(m, plan);
    return PyLong_FromSsize_t(PyByteArray_Size(into));
}

/* Without the GIL; -1 with an error set. What was written before an error stays. */
static int write_parts(int file, struct iovec *parts, int count)
{
    while (count > 0) {
        ssize_t written;
        Py_BEGIN_ALLOW_THREADS
        written = writev(file, parts, count);
        Py_END_ALLOW_THREADS
        if (written < 0 && errno != EINTR) {
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
        if (written < 0 && PyErr_CheckSignals())
            return -1;
        for (; count > 0 && written >= (ssize_t)parts->iov_len; count--, parts++)
            written -= (ssize_t)parts->iov_len;
        if (count > 0 && written > 0) { /* the disk may be nearly full */
            parts->iov_base = (char *)parts->iov_base + written;
            parts->iov_len -= (size_t)written;
        }
    }
    return 0;
}

/* The metadata from the bytearray, and the columns from where they lie: a closed table takes no more rows. */
static PyObject *written_message(Message *m, const int64_t *plan, PyObject *made, PyObject *into, int file)
{
    struct iovec parts[1 + MOST_PARTS];
    Py_buffer view;
    if (begin_message(m, made, into, 0))
        return NULL;
    m->parts = parts + 1;
    put_nodes(m, plan);
    end_message(m, plan);
    if (m->count > MOST_PARTS) {
        PyErr_SetString(PyExc_ValueError, "a message has too many parts");
        return NULL;
    }
    if (PyObject_GetBuffer(into, &view, PyBUF_SIMPLE)) /* held, so that nobody can resize it */
        return NULL;
    const int64_t size = view.len + m->size;
    parts[0] = (struct iovec){view.buf, (size_t)view.len};
    const int failed = write_parts(file, parts, 1 + m->count);
    PyBuffer_Release(&view);
    return failed ? NULL : PyLong_FromLongLong(size);
}

static PyObject *py_append_rows(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("append_rows(layout_address, plan_address, metadata, into, file)", count, 5))
        return NULL;
    Message m = {.header = PyLong_AsVoidPtr(args[0])};
    const int64_t *plan = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[1]);
    const int file = PyErr_Occurred() ? -1 : (int)PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    return file < 0 ? copied_message(&m, plan, args[2], args[3]) : written_message(&m, plan, args[2], args[3], file);
}
