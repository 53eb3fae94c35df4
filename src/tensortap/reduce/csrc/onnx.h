/* The kernel as operators of ONNX Runtime, `Row`, `RowAndHistogram`, `RowAndHash` and `RowHistogramAndHash` of the domain
 * `tensortap`: a tensor is reduced
 * inside the graph as soon as it is made, and what leaves the graph is its row, as words of 32 bits: a Row, where the
 * histogram's run of buckets begins, how long it is (-1: none), the type (-1: none that we read), the number of
 * dimensions, the dimensions in two words each, and the counts of the run.
 *
 * ONNX Runtime finds the function RegisterCustomOps when it is told of this library. Its own functions are in a table
 * that only ever grows at the end; these are their places in it. The last of them came with version 1.17.
 */

enum {
    ORT_CREATE_STATUS = 0, ORT_CREATE_DOMAIN = 26, ORT_ADD_OPERATOR = 27, ORT_ADD_DOMAIN = 28, ORT_TENSOR_DATA = 51, ORT_ELEMENT_TYPE = 60,
    ORT_DIMENSIONS_COUNT = 61, ORT_DIMENSIONS = 62, ORT_TYPE_AND_SHAPE = 65, ORT_INPUT = 90, ORT_OUTPUT = 91,
    ORT_RELEASE_STATUS = 93, ORT_RELEASE_TYPE_AND_SHAPE = 99, ORT_PARALLEL_FOR = 274
};
enum { ORT_FAIL = 1, ORT_ANY_TYPE = 0, ORT_UINT32 = 12, ORT_TYPES = 21 };
#define ORT_INTERFACE 17

typedef void OrtFunction(void);
typedef struct {
    OrtFunction *const *(*functions)(uint32_t version);
    const char *(*version)(void);
} OrtBase;

typedef struct OrtOperator {
    uint32_t version;
    void *(*create)(const struct OrtOperator *, OrtFunction *const *, const void *info);
    const char *(*name)(const struct OrtOperator *);
    const char *(*provider)(const struct OrtOperator *);
    int (*input_type)(const struct OrtOperator *, size_t);
    size_t (*inputs)(const struct OrtOperator *);
    int (*output_type)(const struct OrtOperator *, size_t);
    size_t (*outputs)(const struct OrtOperator *);
    void (*compute)(void *kernel, void *context);
    void (*destroy)(void *kernel);
    int (*input_character)(const struct OrtOperator *, size_t), (*output_character)(const struct OrtOperator *, size_t);
    int (*input_memory)(const struct OrtOperator *, size_t);
    int (*variadic[4])(const struct OrtOperator *);
    void *(*create_2)(void), *(*compute_2)(void), *(*infer_shape)(void);
    int (*first_opset)(const struct OrtOperator *), (*last_opset)(const struct OrtOperator *);
    size_t (*more[4])(void);
} OrtOperator;

static OrtFunction *const *ort; /* the table; one library of ONNX Runtime is all a process has */

/* Each returns an error, or NULL. An error is the caller's to release. */
#define ORT_CALL(place, types, ...) (((void *(*)types)ort[place])(__VA_ARGS__))
#define ORT_FAILS(place, types, ...) ort_failed(ORT_CALL(place, types, __VA_ARGS__))

static int ort_failed(void *error)
{
    if (error)
        ((void (*)(void *))ort[ORT_RELEASE_STATUS])(error);
    return error != NULL;
}

static const int8_t ort_dtypes[ORT_TYPES] = {
    -1, F32, U8, I8, U16, I16, I32, I64, -1, BOOL, F16, F64, U32, U64, C64, C128, BF16, F8E4M3, F8E4M3Z, F8E5M2, F8E5M2Z,
};

typedef struct {
    void *data;
    int dtype; /* -1: none that we read */
    int64_t dims[MAX_DIMS];
    size_t rank;
} OrtTensor;

static int ort_read(void *context, OrtTensor *t)
{
    void *value = NULL, *about;
    int type = 0;
    if (ORT_FAILS(ORT_INPUT, (void *, size_t, void **), context, 0, &value) || !value ||
        ORT_FAILS(ORT_TYPE_AND_SHAPE, (void *, void **), value, &about))
        return 0;
    int known = !ORT_FAILS(ORT_ELEMENT_TYPE, (void *, int *), about, &type) && type > 0 && type < ORT_TYPES &&
                !ORT_FAILS(ORT_DIMENSIONS_COUNT, (void *, size_t *), about, &t->rank) && t->rank <= MAX_DIMS &&
                !ORT_FAILS(ORT_DIMENSIONS, (void *, int64_t *, size_t), about, t->dims, t->rank);
    ((void (*)(void *))ort[ORT_RELEASE_TYPE_AND_SHAPE])(about);
    if (known && ort_dtypes[type] >= 0 && !ORT_FAILS(ORT_TENSOR_DATA, (void *, void **), value, &t->data))
        t->dtype = ort_dtypes[type];
    return t->dtype >= 0;
}

static void ort_write(void *context, const OrtTensor *t, const Result *result)
{
    const int counts = result->length > 0 ? result->length : 0;
    const int64_t rank = t->dtype < 0 ? 0 : (int64_t)t->rank, length = ROW_WORDS + 4 + 2 * rank + counts;
    void *value;
    uint32_t *words;
    if (ORT_FAILS(ORT_OUTPUT, (void *, size_t, const int64_t *, size_t, void **), context, 0, &length, 1, &value) ||
        ORT_FAILS(ORT_TENSOR_DATA, (void *, void **), value, (void **)&words))
        return;
    memcpy(words, &result->row, sizeof result->row);
    words += ROW_WORDS;
    *words++ = counts ? result->offset : 0;
    *words++ = (uint32_t)result->length;
    *words++ = (uint32_t)t->dtype;
    *words++ = (uint32_t)rank;
    memcpy(words, t->dims, (size_t)rank * sizeof *t->dims);
    if (counts)
        memcpy(words + 2 * rank, result->counts, (size_t)counts * sizeof *words);
}

static void ort_work(void *data, size_t number)
{
    Job *job = data;
    const unsigned mode = standard_mode();
    run_chunks(job, job->workspaces[number]);
    restore_mode(mode);
}

/* By the threads of the session, as many as the user gave it; by this one alone if that fails. */
static void ort_run(Job *job, int workers, void *context)
{
    if (ORT_FAILS(ORT_PARALLEL_FOR, (void *, void (*)(void *, size_t), size_t, size_t, void *), context, ort_work,
                  (size_t)workers, 0, job))
        run_chunks(job, job->workspaces[0]);
}

static void ort_compute(void *kernel, void *context)
{
    OrtTensor t = {.dtype = -1};
    Result result = NO_RESULT;
    if (ort_read(context, &t))
        reduce_here(t.data, t.dtype, t.dims, (int64_t)t.rank, *(const int *)kernel & 1, *(const int *)kernel & 2, ort_run,
                    context, &result);
    ort_write(context, &t, &result);
    if (result.w)
        give_workspace(result.w);
}

static const int ort_wants[4] = {0, 1, 2, 3}; /* histogram: 1, hash: 2 */
static const char *const ort_names[4] = {"Row", "RowAndHistogram", "RowAndHash", "RowHistogramAndHash"};
static const char *ort_name(const OrtOperator *op);
static void *ort_create(const OrtOperator *op, OrtFunction *const *functions, const void *info);
static const char *ort_provider(const OrtOperator *op) { return (void)op, NULL; } /* the CPU's */
static int ort_input_type(const OrtOperator *op, size_t i) { return (void)op, (void)i, ORT_ANY_TYPE; }
static int ort_output_type(const OrtOperator *op, size_t i) { return (void)op, (void)i, ORT_UINT32; }
static int ort_usual(const OrtOperator *op, size_t i) { return (void)op, (void)i, 0; } /* required, where it is */
static int ort_fixed(const OrtOperator *op) { return (void)op, 1; }
static int ort_always(const OrtOperator *op) { return (void)op, INT_MAX; }
static size_t ort_one(const OrtOperator *op) { return (void)op, 1; }
static void ort_destroy(void *kernel) { (void)kernel; }

#define OPERATOR \
    { \
        .version = ORT_INTERFACE, .create = ort_create, .name = ort_name, .provider = ort_provider, \
        .input_type = ort_input_type, .inputs = ort_one, .output_type = ort_output_type, .outputs = ort_one, \
        .compute = ort_compute, .destroy = ort_destroy, .input_character = ort_usual, .output_character = ort_usual, \
        .input_memory = ort_usual, .variadic = {ort_fixed, ort_fixed, ort_fixed, ort_fixed}, \
        .first_opset = ort_fixed, .last_opset = ort_always, \
    }
static const OrtOperator ort_operators[4] = {OPERATOR, OPERATOR, OPERATOR, OPERATOR};

static const char *ort_name(const OrtOperator *op) { return ort_names[op - ort_operators]; }

static void *ort_create(const OrtOperator *op, OrtFunction *const *functions, const void *info)
{
    (void)functions;
    (void)info;
    return (void *)&ort_wants[op - ort_operators];
}

static void *ort_make_domain(void **domain)
{
    void *made, *error = ORT_CALL(ORT_CREATE_DOMAIN, (const char *, void **), "tensortap", &made);
    for (int i = 0; i < 4 && !error; i++)
        error = ORT_CALL(ORT_ADD_OPERATOR, (void *, const OrtOperator *), made, &ort_operators[i]);
    if (!error)
        *domain = made;
    return error;
}

/* What ONNX Runtime calls, from any thread. The domain is made once, for no session may outlive it. A library of
 * before our interface is told so by the one function that every version has at the same place. */
__attribute__((visibility("default"))) void *RegisterCustomOps(void *options, const OrtBase *base)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *domain;
    void *error = NULL;
    OrtFunction *const *table = base->functions(ORT_INTERFACE);
    if (!table)
        return ((void *(*)(int, const char *))base->functions(1)[ORT_CREATE_STATUS])(
            ORT_FAIL, "tensortap's operators need ONNX Runtime 1.17 or later");
    pthread_mutex_lock(&lock);
    ort = table;
    if (!domain)
        error = ort_make_domain(&domain);
    pthread_mutex_unlock(&lock);
    return error ? error : ORT_CALL(ORT_ADD_DOMAIN, (void *, void *), options, domain);
}
