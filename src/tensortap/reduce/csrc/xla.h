/* The kernel as a function that a program compiled by XLA calls, from whichever of its threads has time. `xla_row`
 * takes a dense tensor and the attributes `dtype` and `hash` (whether it is wanted), and gives words of 32 bits: a Row, where the histogram's run of
 * buckets begins, how long it is (-1: none), and, where there is room for BUCKETS words more, the counts of that run.
 *
 * The structures are those of XLA's interface for foreign functions, as far as they are used here. It is a binary
 * interface: fields keep their places, and new ones come after them.
 */

#define XLA_METADATA 1 /* the kind of extension by which XLA asks what a function is */
#define XLA_EXECUTE 3 /* the stage at which buffers have contents */

typedef struct XlaExtension {
    size_t size;
    int kind;
    struct XlaExtension *next;
} XlaExtension;

typedef struct {
    size_t size;
    XlaExtension *extensions;
    int major, minor;
} XlaVersion;

typedef struct {
    size_t size;
    XlaVersion version;
    uint32_t traits;
} XlaMetadata;

typedef struct {
    XlaExtension base;
    XlaMetadata *metadata;
} XlaMetadataExtension;

typedef struct {
    size_t size;
    XlaExtension *extensions;
    XlaVersion version;
} XlaApi;

typedef struct {
    size_t size;
    XlaExtension *extensions;
    int dtype;
    void *data;
    int64_t rank, *dims;
} XlaBuffer;

typedef struct {
    int dtype;
    void *value;
} XlaScalar;

typedef struct {
    size_t size;
    XlaExtension *extensions;
    int64_t count;
    int *kinds;
    XlaBuffer **buffers;
} XlaBuffers;

typedef struct {
    size_t size;
    XlaExtension *extensions;
    int64_t count;
    int *kinds;
    void **names;
    XlaScalar **scalars;
} XlaAttributes;

typedef struct {
    size_t size;
    XlaExtension *extensions;
    const XlaApi *api;
    void *context;
    int stage;
    XlaBuffers given, gives;
    XlaAttributes attributes;
} XlaCall;

/* We use what every version of the interface has, so ours is whichever is asked for. */
static int xla_introduced(const XlaCall *call)
{
    for (XlaExtension *e = call->extensions; e; e = e->next)
        if (e->kind == XLA_METADATA) {
            XlaMetadata *about = ((XlaMetadataExtension *)e)->metadata;
            about->version.major = call->api ? call->api->version.major : 0;
            about->version.minor = call->api ? call->api->version.minor : 0;
            about->traits = 0;
            return 1;
        }
    return 0;
}

static void *xla_row(XlaCall *call)
{
    Result result = NO_RESULT;
    if (xla_introduced(call) || call->stage != XLA_EXECUTE)
        return NULL;
    const XlaBuffer *given = call->given.buffers[0], *gives = call->gives.buffers[0];
    const int dtype = *(int32_t *)call->attributes.scalars[0]->value, histogram = gives->dims[0] > ROW_WORDS + 2;
    const int hash = *(int32_t *)call->attributes.scalars[1]->value; /* they are in the order of their names */
    uint32_t *words = gives->data;
    reduce_here(given->data, dtype, given->dims, given->rank, histogram, hash, NULL, NULL, &result);
    memcpy(words, &result.row, sizeof result.row);
    words[ROW_WORDS] = result.length > 0 ? result.offset : 0;
    words[ROW_WORDS + 1] = (uint32_t)result.length;
    if (result.length > 0)
        memcpy(words + ROW_WORDS + 2, result.counts, (size_t)result.length * sizeof *words);
    if (result.w)
        give_workspace(result.w);
    return NULL;
}
