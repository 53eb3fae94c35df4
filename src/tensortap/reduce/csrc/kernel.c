/* The reduction kernel: one row of exact statistics, and on request a complete float-bit histogram, from a buffer.
 *
 * One algorithm, fixed to the last bit. Elements are taken in storage order in blocks of 4096, each read once: minimum,
 * maximum, zeros, and sums of the first four powers of deviations from a pivot, in double. The blocks of a chunk of 2^17
 * elements share the pivot: zero, or the mean of the first elements where that is larger than their spread. Moments from
 * such sums lose a few bits at most; a block where they would lose more is read again around its own mean, and merges by
 * Chan's formula. Chunks merge in order, and threads take whole chunks: so the instruction set, the number of threads and
 * the NumPy kernel (numpy_moments.py) give the same bits.
 *
 * This file holds what is independent of the instruction set: the plan that turns shape and strides into runs, the
 * thread pool, and the Python functions. body.h is the arithmetic, compiled once per level;
 * hash.h is the content hash; columns.h has statistics by column, for matrices of activations; dlpack.h reads the tensors
 * of frameworks, many.h several at once and changes.h what an optimizer changed; hook.h, await.h and ops.h are what PyTorch calls; message.h writes a table as an Arrow message; xla.h and onnx.h let XLA and
 * ONNX Runtime call it inside their graphs.
 */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#else
#define X86 0
#endif

#ifdef __FAST_MATH__
#error "the kernel counts NaN and infinities: build it without -ffast-math"
#endif

#define BLOCK 4096
#define SUM_LANES 8
#define SAMPLE 64 /* elements of a chunk by which its pivot is chosen */
#define CHUNK ((int64_t)1 << 17)
#define BUCKETS 4080u /* 2 signs * 255 exponents * 8: the rest of 4096 is non-finite */
#define TABLES 4
#define PIECE 512 /* elements whose buckets are found before they are counted */
#define TRACK ((int64_t)1 << 16)
#define MAX_DIMS 64
#define MAX_THREADS 64
/* A release can cost a whole switch interval (5 ms) when another Python thread is busy, so only long work does it. */
#define RELEASE_GIL ((int64_t)1 << 18)
#define USE_THREADS ((int64_t)1 << 19)
#define ALMOST (1 - 0x1p-44) /* one, but for what rounding may have added */
#define USE_LENT (2 * (int64_t)CHUNK)

enum { F64, F32, F16, BF16, F8E4M3, F8E5M2, I8, I16, I32, I64, U8, U16, U32, U64, BOOL, C64, C128, F8E4M3Z, F8E5M2Z, DTYPES };
static const int item_size[DTYPES] = {8, 4, 2, 2, 1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16, 1, 1};
/* Types whose every value is a float exactly: they take the float passes. */
static const int is_single[DTYPES] = {0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1};
static float fp8[4][256];

/* Where the lanes of a vector count their zeros: beyond the buckets. */
#define P(i) (BUCKETS + (i)), (BUCKETS + (i) + 1), (BUCKETS + (i) + 2), (BUCKETS + (i) + 3)
static const uint32_t zero_places[16] = {P(0), P(4), P(8), P(12)};
#undef P

/* ---- values ---- */

typedef struct {
    int64_t n, nan, posinf, neginf, zeros; /* n: finite elements */
    double min, max, mean, m2, m3, m4, l1; /* over those; sums of powers of deviations from the mean */
    uint64_t hash; /* of a chunk: linear (hash.h) */
} Moments;

static const Moments EMPTY = {.min = INFINITY, .max = -INFINITY};

typedef struct {
    double d, q, c, f, a; /* sums of deviations, of their squares, cubes and fourth powers, and of magnitudes */
} Sums;

/* What is known of a chunk so far: blocks whose sums around the pivot are added up, and those with their own moments. */
typedef struct {
    double pivot;
    Moments together, apart; /* the moments of together come from the sums */
    Sums sums;
} Chunk;
#define UNKNOWN INFINITY /* the pivot before the first block */

struct Job;
typedef uint64_t Hash(uint64_t state, const void *data, size_t n);
typedef struct Plan {
    const char *base;
    void (*run)(struct Job *, int workers, void *context), *context; /* how several threads take the chunks of one job */
    int dtype, ndim, aligned;
    Hash *hash; /* how to hash; NULL: no hash is wanted */
    const struct Plan *logical; /* where hashes take elements from, when storage is in another order; or NULL */
    enum { NONE, TRACKED, UNTRACKED } histogram; /* of few elements the range of buckets is tracked */
    int64_t numel, dims[MAX_DIMS], strides[MAX_DIMS];
    double scale;
} Plan;

/* What one thread needs while it reduces. Tables are zero between calls. */
typedef struct Workspace {
    struct Workspace *next;
    uint32_t low, high; /* smallest bucket - 2 (0 and 1 are looked at anyway) and largest bucket counted so far */
    double converted[BLOCK], finite[BLOCK], wide[BLOCK];
    char gathered[16 * BLOCK];
    uint32_t counts[BUCKETS];
    uint32_t table[TABLES][BUCKETS + 16 + 272]; /* padded: tables 4 KiB apart would seem to wait for each other */
} Workspace;

/* The statistics of a row in the order of the registry (statistics.py), which the module checks when it is imported, and
 * the conditions under which some of them have no value. */
#define STATISTICS(COUNT, REAL)                                   \
    COUNT(numel) COUNT(nan) COUNT(posinf) COUNT(neginf) COUNT(zeros) \
    REAL(min) REAL(max) REAL(mean) REAL(std) REAL(l1) REAL(l2) \
    REAL(absmax) REAL(skewness) REAL(kurtosis) COUNT(hash)
#define CONDITIONS(CONDITION) \
    CONDITION(finite, !isnan(r->min)) CONDITION(spread, !isnan(r->kurtosis)) CONDITION(hashed, r->hash != NO_HASH)

#define COUNT(name) int64_t name;
#define REAL(name) double name;
typedef struct {
    STATISTICS(COUNT, REAL)
} Row;
#undef COUNT
#undef REAL

#include "hash.h"

/* Rows of vectors in one dense run, and what is known of some of their columns. */
typedef struct {
    const char *base;
    int dtype;
    int64_t rows, width;
} Matrix;

#define TILE 1024
typedef struct {
    double sum[TILE], squares[TILE]; /* the sum becomes the mean, from which the squares are taken */
    float center[TILE], min[TILE], max[TILE];
    int32_t finite[TILE], zero[TILE], positive[TILE];
} ColumnTile;

/* ---- arithmetic shared by all levels ---- */

static void merge(Moments *a, const Moments *b)
{
    a->nan += b->nan;
    a->posinf += b->posinf;
    a->neginf += b->neginf;
    a->zeros += b->zeros;
    if (b->n == 0)
        return;
    a->min = b->min < a->min ? b->min : a->min;
    a->max = b->max > a->max ? b->max : a->max;
    a->l1 += b->l1;
    if (a->n == 0) {
        a->n = b->n;
        a->mean = b->mean;
        a->m2 = b->m2;
        a->m3 = b->m3;
        a->m4 = b->m4;
        return;
    }
    const double na = (double)a->n, nb = (double)b->n, n = na + nb, delta = b->mean - a->mean;
    const double fa = na / n, fb = nb / n, square = delta * delta;
    a->mean += delta * fb;
    a->m4 += b->m4 + square * square * (na * fb) * (fa * fa - fa * fb + fb * fb) +
             6 * square * (fa * fa * b->m2 + fb * fb * a->m2) + 4 * delta * (fa * b->m3 - fb * a->m3);
    a->m3 += b->m3 + square * delta * (na * fb) * (fa - fb) + 3 * delta * (fa * b->m2 - fb * a->m2);
    a->m2 += b->m2 + square * (na * fb);
    a->n += b->n;
}

static inline double fold_lanes(const double *lane)
{
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* What a pass adds up in lane l (of vectors, or of the doubles that remain), and how lanes become one. */
#define SUMS 5
#define ADD_SUMS(sums, l, deviation, magnitude)                 \
    {                                                           \
        const __typeof__(deviation) square = deviation * deviation; \
        sums[0][l] += deviation;                                \
        sums[1][l] += square;                                   \
        sums[2][l] += square * deviation;                       \
        sums[3][l] += square * square;                          \
        sums[4][l] += magnitude;                                \
    }
#define FOLD_SUMS(lanes)                                                                                           \
    ((Sums){fold_lanes(lanes[0]), fold_lanes(lanes[1]), fold_lanes(lanes[2]), fold_lanes(lanes[3]), fold_lanes(lanes[4])})

/* Whether the sums were taken so far from the mean (twice the spread) that moments from them lose digits. */
static inline int is_far(const Sums *sums, int n) { return sums->d * sums->d > 0.8 * n * sums->q; }

/* The moments of n elements from their sums around a pivot. */
static void central_moments(const Sums *sums, int64_t n, double pivot, Moments *m)
{
    const double offset = sums->d / (double)n, bias = sums->d * offset;
    m->mean = pivot + offset;
    m->m2 = sums->q - bias;
    m->m2 = m->m2 > 0 ? m->m2 : 0;
    m->m3 = sums->c - 3 * offset * sums->q + 2 * offset * bias;
    m->m4 = sums->f - 4 * offset * sums->c + 6 * offset * offset * sums->q - 3 * offset * offset * bias;
    m->l1 = sums->a;
}

static void add_sums(Chunk *chunk, const Moments *m, const Sums *sums)
{
    Moments *all = &chunk->together;
    all->n += m->n;
    all->zeros += m->zeros;
    all->min = m->min < all->min ? m->min : all->min;
    all->max = m->max > all->max ? m->max : all->max;
    chunk->sums.d += sums->d;
    chunk->sums.q += sums->q;
    chunk->sums.c += sums->c;
    chunk->sums.f += sums->f;
    chunk->sums.a += sums->a;
}

static Moments chunk_moments(Chunk *chunk)
{
    if (chunk->together.n) {
        central_moments(&chunk->sums, chunk->together.n, chunk->pivot, &chunk->together);
        merge(&chunk->apart, &chunk->together);
    }
    return chunk->apart;
}

/* ---- elements of the plan, as dense blocks ---- */

#define GATHER(size)                                      \
    case size:                                            \
        for (int64_t i = 0; i < n; i++, from += stride)   \
            memcpy(to + i * size, from, size);            \
        break;

static void gather_row(char *to, const char *from, int64_t n, int64_t stride, int size)
{
    if (stride == size) {
        memcpy(to, from, (size_t)(n * size));
        return;
    }
    switch (size) {
        GATHER(1)
        GATHER(2)
        GATHER(4)
        GATHER(8)
        GATHER(16)
    }
}

static const void *fetch(const Plan *p, Workspace *w, int64_t begin, int n)
{
    const int size = item_size[p->dtype], inner = p->ndim - 1;
    const char *from = p->base;
    int64_t at[MAX_DIMS], rest = begin;
    for (int d = inner; d >= 0; d--) {
        at[d] = d ? rest % p->dims[d] : rest;
        rest /= p->dims[d];
        from += at[d] * p->strides[d];
    }
    if (p->aligned && (n == 1 || (p->strides[inner] == size && p->dims[inner] - at[inner] >= n)))
        return from;
    char *to = w->gathered;
    for (int left = n;;) {
        const int64_t row = p->dims[inner] - at[inner], take = row < left ? row : left;
        gather_row(to, from, take, p->strides[inner], size);
        left -= (int)take;
        if (left == 0)
            return w->gathered;
        to += take * size;
        from -= at[inner] * p->strides[inner];
        at[inner] = 0;
        for (int d = inner - 1; d >= 0; d--) {
            from += p->strides[d];
            if (++at[d] < p->dims[d])
                break;
            from -= at[d] * p->strides[d];
            at[d] = 0;
        }
    }
}

/* ---- levels ---- */

/* Clang has other pragmas for this; until they are tested there it builds the plain level only. */
#if X86 && !defined(__clang__)
#define VECTOR_LEVELS 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,bmi,bmi2,popcnt,prefer-vector-width=512")
#define LEVEL avx512
#define VBYTES 64
#define WIDE(p) _mm512_cvtps_pd(_mm256_loadu_ps(p))
#define VMIN_F32 _mm512_min_ps
#define VMAX_F32 _mm512_max_ps
#define ZERO_MASK_F32(x) _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ)
#define ZERO_MASK_F64(x) _mm512_cmp_pd_mask(x, _mm512_setzero_pd(), _CMP_EQ_OQ)
#define VMIN_U32(a, b) ((V)_mm512_min_epu32((__m512i)(a), (__m512i)(b)))
#define VMAX_U32(a, b) ((V)_mm512_max_epu32((__m512i)(a), (__m512i)(b)))
#define VMIN_F64 _mm512_min_pd
#define VMAX_F64 _mm512_max_pd
#define HALF_STEP 16
#define HALVES(to, from) _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from))))
#include "body.h"
#undef HALF_STEP
#undef HALVES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2,popcnt")
#define LEVEL avx2
#define VBYTES 32
#define WIDE(p) _mm256_cvtps_pd(_mm_loadu_ps(p))
#define VMIN_F32 _mm256_min_ps
#define VMAX_F32 _mm256_max_ps
#define ZERO_MASK_F32(x) _mm256_movemask_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ))
#define ZERO_MASK_F64(x) _mm256_movemask_pd(_mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_EQ_OQ))
#define VMIN_U32(a, b) ((V)_mm256_min_epu32((__m256i)(a), (__m256i)(b)))
#define VMAX_U32(a, b) ((V)_mm256_max_epu32((__m256i)(a), (__m256i)(b)))
#define VMIN_F64 _mm256_min_pd
#define VMAX_F64 _mm256_max_pd
#define HALF_STEP 8
#define HALVES(to, from) _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from))))
#include "body.h"
#undef HALF_STEP
#undef HALVES
#pragma GCC pop_options
#endif

#define SELECT(type, mask, a, b) ((type)(((mask) & (a)) | (~(mask) & (b))))
#if X86
#define WIDE(p) _mm_cvtps_pd(_mm_castpd_ps(_mm_load_sd((const double *)(p))))
#define VMIN_F32 _mm_min_ps
#define VMAX_F32 _mm_max_ps
#define VMIN_F64 _mm_min_pd
#define VMAX_F64 _mm_max_pd
#else
#define WIDE(p) __builtin_convertvector(*(const vhalf_plain *)(p), vdouble_plain)
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef double pair __attribute__((vector_size(16), aligned(8), may_alias));
typedef int32_t quad_mask __attribute__((vector_size(16)));
typedef int64_t pair_mask __attribute__((vector_size(16)));

static inline quad quad_min(quad a, quad b) { return SELECT(quad, a < b, (quad_mask)a, (quad_mask)b); }
static inline quad quad_max(quad a, quad b) { return SELECT(quad, a > b, (quad_mask)a, (quad_mask)b); }
static inline pair pair_min(pair a, pair b) { return SELECT(pair, a < b, (pair_mask)a, (pair_mask)b); }
static inline pair pair_max(pair a, pair b) { return SELECT(pair, a > b, (pair_mask)a, (pair_mask)b); }
#define VMIN_F32 quad_min
#define VMAX_F32 quad_max
#define VMIN_F64 pair_min
#define VMAX_F64 pair_max
#endif

#define LEVEL plain
#define VBYTES 16
#define VMIN_U32(a, b) SELECT(V, (V)((a) < (b)), a, b)
#define VMAX_U32(a, b) SELECT(V, (V)((a) > (b)), a, b)
#include "body.h"

typedef void ReduceChunk(const Plan *, Workspace *, int64_t, int64_t, Moments *);
typedef void ReduceColumns(const Matrix *, Workspace *, ColumnTile *, int64_t, int);
typedef void RoundBfloat16(uint16_t *, const uint32_t *, int64_t);

typedef struct {
    const char *name;
    ReduceChunk *reduce_chunk;
    Hash *hash;
    ReduceColumns *reduce_columns;
    RoundBfloat16 *round_bfloat16;
} Level;
#define LEVEL(name, hash) ((Level){#name, reduce_chunk_##name, hash, reduce_columns_##name, round_bfloat16_##name})

static Level levels[3]; /* best first */
static int level_count;
static Level current;

static void find_levels(void)
{
#ifdef VECTOR_LEVELS
    __builtin_cpu_init();
    Hash *const hash = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1") ? hash_clmul : hash_plain;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
        levels[level_count++] = LEVEL(avx512, __builtin_cpu_supports("vpclmulqdq") ? hash_vclmul : hash);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2"))
        levels[level_count++] = LEVEL(avx2, hash);
#endif
    levels[level_count++] = LEVEL(plain, hash_plain);
    current = levels[0];
}
#undef LEVEL

/* ---- the processor's rounding mode ---- */

#if X86
/* torch.set_flush_denormal changes the caller's mode: subnormals would count as zeros. */
static unsigned standard_mode(void)
{
    const unsigned mode = _mm_getcsr();
    if ((mode & ~0x3fu) != 0x1f80)
        _mm_setcsr(0x1f80);
    return mode;
}

static void restore_mode(unsigned mode)
{
    if ((mode & ~0x3fu) != 0x1f80)
        _mm_setcsr(mode);
}
#else
static unsigned standard_mode(void) { return 0; }
static void restore_mode(unsigned mode) { (void)mode; }
#endif

/* ---- workspaces: a free list, for Python's threads and those of frameworks ---- */

static _Atomic(Workspace *) ready_workspace; /* the one given back last: most calls need no other, and so no lock */
static Workspace *free_workspaces;
static pthread_mutex_t workspaces_lock = PTHREAD_MUTEX_INITIALIZER;

static Workspace *take_workspace(void)
{
    Workspace *w = atomic_exchange(&ready_workspace, NULL);
    if (w)
        return w;
    pthread_mutex_lock(&workspaces_lock);
    w = free_workspaces;
    if (w)
        free_workspaces = w->next;
    pthread_mutex_unlock(&workspaces_lock);
    if (w)
        return w;
    return posix_memalign((void **)&w, 64, sizeof *w) ? NULL : memset(w, 0, sizeof *w);
}

static void give_workspace(Workspace *w)
{
    Workspace *none = NULL;
    if (atomic_compare_exchange_strong(&ready_workspace, &none, w))
        return;
    pthread_mutex_lock(&workspaces_lock);
    w->next = free_workspaces;
    free_workspaces = w;
    pthread_mutex_unlock(&workspaces_lock);
}

/* ---- the pool: a few sleeping threads that help with the chunks of one job at a time ---- */

typedef struct Job {
    const Plan *plan;
    ReduceChunk *reduce_chunk;
    Moments *results;
    Workspace **workspaces;
    int64_t chunks;
    atomic_llong next;
} Job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    atomic_int busy;
    int started, joined, active, places, beside; /* the processor that helpers keep away from, or -1 */
    pthread_t helpers[MAX_THREADS];
    unsigned long generation;
    Job *job;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static int thread_count = 1;

/* Threads that a framework lends. Its workers spin for a while after their own work, in the way of any others on the
 * same cores, and are there at once for more of it: so they may help from two chunks on. */
typedef void Team(void (*work)(void *), void *data, unsigned threads, unsigned flags); /* as libgomp's GOMP_parallel */
static Team *lent_team;
static int lent_threads;

static int64_t nanoseconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A helper that is kept from its core by other work, or that first has to wake, keeps us waiting too. So both ways are
 * paced, in nanoseconds an element, for each size of tensor; the better one is taken, and the other tried now and then,
 * a few times running: a thread that sleeps long does not find to its core at once. */
enum { ALONE, TOGETHER };
#define TRIES 4
#define TRY_OTHER 256
#define SIZES 8
static struct {
    double of[2];
    unsigned turns;
} pace[SIZES];

static int size_class(int64_t numel)
{
    int size = 0;
    for (numel /= 2 * CHUNK; numel > 1 && size < SIZES - 1; numel /= 2)
        size++;
    return size;
}

static int choose_pace(int64_t numel)
{
    const int size = size_class(numel), better = pace[size].of[TOGETHER] <= pace[size].of[ALONE] ? TOGETHER : ALONE;
    const unsigned turn = pace[size].turns++;
    return turn < 2 * TRIES ? turn < TRIES ? ALONE : TOGETHER : turn % TRY_OTHER < TRIES ? !better : better;
}

/* Hopeful: one good time counts at once, and one that is far off counts little. */
static void note_pace(int way, int64_t nanoseconds, int64_t numel)
{
    const double seen = (double)nanoseconds / (double)numel;
    double *known = &pace[size_class(numel)].of[way];
    *known = *known == 0 || seen < *known ? seen : *known + ((seen < 2 * *known ? seen : 2 * *known) - *known) / 8;
}

static void run_chunks(Job *job, Workspace *w)
{
    for (;;) {
        const int64_t chunk = atomic_fetch_add(&job->next, 1), begin = chunk * CHUNK;
        if (chunk >= job->chunks)
            return;
        const int64_t end = begin + CHUNK < job->plan->numel ? begin + CHUNK : job->plan->numel;
        job->reduce_chunk(job->plan, w, begin, end, job->results + chunk);
    }
}

static void *helper(void *unused)
{
    unsigned long seen = 0;
    (void)unused;
    standard_mode();
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.job || pool.generation == seen || pool.joined == pool.places)
            pthread_cond_wait(&pool.work, &pool.lock);
        Job *job = pool.job;
        Workspace *w = job->workspaces[++pool.joined];
        seen = pool.generation;
        pool.active++;
        pthread_mutex_unlock(&pool.lock);
        run_chunks(job, w);
        pthread_mutex_lock(&pool.lock);
        if (--pool.active == 0)
            pthread_cond_signal(&pool.done);
    }
    return NULL;
}

/* Around a fork: no other thread shall leave the list half changed to the child. */
static void hold_workspaces(void) { pthread_mutex_lock(&workspaces_lock); }
static void let_workspaces(void) { pthread_mutex_unlock(&workspaces_lock); }

/* A forked child has none of its parent's threads. */
static void forget_pool(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    atomic_store(&pool.busy, 0);
    pool.started = pool.joined = pool.active = 0;
    pool.job = NULL;
    lent_team = NULL; /* nor those that were lent to it */
    pthread_mutex_init(&workspaces_lock, NULL);
}

static void start_helpers(int wanted)
{
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool.started < wanted; pool.started++) {
        if (pthread_create(&pool.helpers[pool.started], NULL, helper, NULL))
            break;
        pthread_detach(pool.helpers[pool.started]);
        pool.beside = -1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Where a framework's threads spin on all other processors, the system would wake a helper on the caller's own, to wait
 * there until it is done. */
static void keep_helpers_away(void)
{
#ifdef __linux__
    const int here = sched_getcpu();
    cpu_set_t others;
    if (here < 0 || here == pool.beside || sched_getaffinity(0, sizeof others, &others))
        return;
    pool.beside = here;
    CPU_CLR(here, &others);
    for (int i = 0; CPU_COUNT(&others) && i < pool.started; i++)
        pthread_setaffinity_np(pool.helpers[i], sizeof others, &others);
#endif
}

/* Helpers that wake after the last chunk is taken do not join: the caller waits only for work in progress. */
static void run_with_helpers(Job *job, int helpers)
{
    start_helpers(helpers);
    keep_helpers_away();
    pthread_mutex_lock(&pool.lock);
    pool.job = job;
    pool.joined = 0;
    pool.places = helpers;
    pool.generation++;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    run_chunks(job, job->workspaces[0]);
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL;
    while (pool.active)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

typedef struct {
    Job *job;
    atomic_int joined;
} Shift;

static void work_shift(void *data)
{
    Shift *shift = data;
    const unsigned mode = standard_mode();
    run_chunks(shift->job, shift->job->workspaces[atomic_fetch_add(&shift->joined, 1)]);
    restore_mode(mode);
}

/* For work that Python asks for. The team is the one that was there when the workers were counted: while the GIL is
 * released, another thread may lend or take back. */
static void run_job(Job *job, int workers, void *context)
{
    Team *const *team = context;
    if (*team) {
        Shift shift = {job, 0};
        (*team)(work_shift, &shift, (unsigned)workers, 0);
    } else {
        run_with_helpers(job, workers - 1);
    }
}

/* ---- one reduction ---- */

static int may_help(int64_t numel)
{
    return lent_team ? lent_threads > 1 && numel >= USE_LENT : thread_count > 1 && numel >= USE_THREADS;
}

/* How many threads are worth while; with more than one of our own the pool is taken, and to be given back. */
static int workers_for(int64_t numel)
{
    const int64_t chunks = (numel + CHUNK - 1) / CHUNK;
    int most = 1, idle = 0;
    if (!may_help(numel) || choose_pace(numel) == ALONE)
        return 1;
    if (lent_team)
        most = lent_threads;
    else if (atomic_compare_exchange_strong(&pool.busy, &idle, 1))
        most = thread_count;
    return most > 1 && chunks < most ? (int)chunks : most; /* of nothing there are no chunks */
}

/* The moments of a chunk that follows those before it. */
static void add_chunk(const Plan *p, Moments *total, const Moments *chunk, int64_t elements)
{
    merge(total, chunk);
    if (p->hash)
        total->hash = hash_before(total->hash, (uint64_t)(elements * item_size[p->dtype])) ^ chunk->hash;
}

static Moments reduce_alone(const Plan *p, ReduceChunk *reduce_chunk, Workspace *w)
{
    Moments total = EMPTY, part;
    for (int64_t begin = 0; begin < p->numel; begin += CHUNK) {
        const int64_t end = begin + CHUNK < p->numel ? begin + CHUNK : p->numel;
        reduce_chunk(p, w, begin, end, &part);
        add_chunk(p, &total, &part, end - begin);
    }
    return total;
}

static Moments reduce_all(const Plan *p, ReduceChunk *reduce_chunk, Workspace **ws, int workspaces)
{
    Moments *results = NULL, total = EMPTY;
    const int64_t chunks = (p->numel + CHUNK - 1) / CHUNK;
    if (workspaces > 1)
        results = malloc((size_t)chunks * sizeof *results);
    if (!results)
        return reduce_alone(p, reduce_chunk, ws[0]);
    Job job = {p, reduce_chunk, results, ws, chunks, 0};
    p->run(&job, workspaces, p->context);
    for (int64_t i = 0; i < chunks; i++)
        add_chunk(p, &total, results + i, i + 1 < chunks ? CHUNK : p->numel - i * CHUNK);
    free(results);
    return total;
}

/* Fourth powers of doubles beyond these magnitudes, summed, could overflow or lose digits: such tensors are scaled. */
static double scale_for(const Plan *p, const Moments *m)
{
    if ((p->dtype != F64 && p->dtype != C128) || m->n == 0)
        return 1;
    const double most = fabs(m->min) > fabs(m->max) ? fabs(m->min) : fabs(m->max);
    int exponent = 0;
    if (most > 0x1p200 || (most > 0 && most < 0x1p-180))
        frexp(most, &exponent);
    return ldexp(1, exponent > 1000 ? -1000 : exponent < -1000 ? 1000 : -exponent);
}

/* Counts and ends come from the elements as they are, moments from the scaled ones. */
static Row finish(const Moments *m, const Moments *scaled, int64_t numel, double unscale)
{
    Row r = {
        .numel = numel, .nan = m->nan, .posinf = m->posinf, .neginf = m->neginf, .zeros = m->zeros,
        .min = NAN, .max = NAN, .mean = NAN, .std = NAN, .absmax = NAN, .skewness = NAN, .kurtosis = NAN,
    };
    if (m->n) {
        const double n = (double)m->n, mean = scaled->mean, m2 = scaled->m2;
        r.min = m->min + 0.0; /* no negative zero */
        r.max = m->max + 0.0;
        r.mean = mean * unscale + 0.0;
        r.mean = r.mean < r.min ? r.min : r.mean > r.max ? r.max : r.mean;
        r.std = sqrt(m2 / n) * unscale;
        r.l1 = scaled->l1 * unscale;
        r.absmax = fabs(r.min) > fabs(r.max) ? fabs(r.min) : fabs(r.max);
        const double variance = m2 / n;
        if (variance > 0) {
            const double kurtosis = scaled->m4 / m2 / variance;
            r.skewness = scaled->m3 / m2 / sqrt(variance);
            r.kurtosis = kurtosis > 1 ? kurtosis : 1;
        }
        const double l2 = sqrt(m2 + n * mean * mean);
        r.l2 = l2 * unscale == INFINITY && l2 * ALMOST * unscale < INFINITY ? DBL_MAX : l2 * unscale; /* by rounding */
    }
    return r;
}

/* Adds up the tables of all workspaces, leaves them zero, and returns the run of buckets in ws[0]->counts. */
static int collect(Workspace **ws, int workspaces, uint32_t *offset)
{
    uint32_t *counts = ws[0]->counts, first = BUCKETS, last = 0;
    for (int i = 0; i < workspaces; i++) {
        const Workspace *w = ws[i];
        uint32_t tiny = 0;
        for (int t = 0; t < TABLES; t++)
            tiny |= w->table[t][0] | w->table[t][1];
        const uint32_t from = tiny ? 0 : w->low < BUCKETS ? w->low + 2 : BUCKETS;
        first = from < first ? from : first;
        last = w->high > last ? w->high : last;
    }
    last = last < BUCKETS ? last : BUCKETS - 1;
    if (first <= last)
        memset(counts + first, 0, (last - first + 1) * sizeof *counts);
    for (int i = 0; i < workspaces; i++)
        for (int t = 0; t < TABLES; t++) {
            uint32_t *table = ws[i]->table[t];
            for (uint32_t j = first; j <= last; j++)
                counts[j] += table[j];
            if (first <= last)
                memset(table + first, 0, (last - first + 1) * sizeof *table);
            memset(table + BUCKETS, 0, 16 * sizeof *table);
        }
    while (first <= last && counts[first] == 0)
        first++;
    while (first < last && counts[last] == 0)
        last--;
    *offset = first <= last ? first : 0;
    return first <= last ? (int)(last - first + 1) : 0;
}

typedef struct {
    Row row;
    uint32_t offset;
    int length; /* -1: no histogram */
    const uint32_t *counts; /* of the run of buckets, in w where they were just counted */
    Workspace *w; /* the caller gives it back */
} Result;

static void prepare(Plan *p, Workspace *w)
{
    if (p->histogram)
        p->histogram = p->numel > UINT32_MAX ? NONE : p->numel > TRACK ? UNTRACKED : TRACKED;
    w->low = p->histogram == UNTRACKED ? 0 : UINT32_MAX;
    w->high = p->histogram == UNTRACKED ? BUCKETS - 1 : 0;
}

/* Needs no GIL. The histogram's counts are left in ws[0]. */
static void reduce_prepared(Plan *p, ReduceChunk *reduce_chunk, Workspace **ws, int workspaces, Result *result)
{
    const unsigned mode = standard_mode();
    const Moments m = reduce_all(p, reduce_chunk, ws, workspaces);
    result->length = p->histogram ? collect(ws, workspaces, &result->offset) : -1;
    result->counts = ws[0]->counts + (result->length > 0 ? result->offset : 0);
    const int64_t hash = p->hash ? finished_hash(m.hash, (uint64_t)(p->numel * item_size[p->dtype])) : NO_HASH;
    p->histogram = NONE;
    p->hash = NULL;
    p->scale = scale_for(p, &m);
    const Moments scaled = p->scale == 1 ? m : reduce_all(p, reduce_chunk, ws, workspaces);
    result->row = finish(&m, &scaled, p->numel, 1 / p->scale);
    result->row.hash = hash;
    restore_mode(mode);
}

/* As many prepared workspaces as there is memory for. */
static int take_workspaces(Plan *p, Workspace **ws, int wanted)
{
    int taken = 0;
    while (taken < wanted && (ws[taken] = take_workspace()))
        prepare(p, ws[taken++]);
    return taken;
}

/* Called and left with the GIL held. */
static int reduce_plan(Plan *p, Result *result)
{
    Workspace *ws[MAX_THREADS];
    Team *team = lent_team;
    const int wanted = workers_for(p->numel), workspaces = take_workspaces(p, ws, wanted);
    ReduceChunk *const reduce_chunk = current.reduce_chunk;
    PyThreadState *released = NULL;

    p->run = run_job;
    p->context = &team;
    if (workspaces < wanted) {
        PyErr_NoMemory();
    } else {
        if (p->numel >= RELEASE_GIL)
            released = PyEval_SaveThread();
        const int paced = may_help(p->numel); /* of small tensors not even the clock is read */
        const int64_t begin = paced ? nanoseconds(CLOCK_MONOTONIC) : 0;
        reduce_prepared(p, reduce_chunk, ws, workspaces, result);
        const int64_t end = paced ? nanoseconds(CLOCK_MONOTONIC) : 0;
        if (released)
            PyEval_RestoreThread(released);
        if (paced)
            note_pace(wanted > 1 ? TOGETHER : ALONE, end - begin, p->numel);
    }
    if (wanted > 1 && !team)
        atomic_store(&pool.busy, 0);
    for (int i = workspaces == wanted; i < workspaces; i++)
        give_workspace(ws[i]);
    result->w = ws[0];
    return workspaces == wanted ? 0 : -1;
}

/* ---- the plan: shape and strides as few runs, largest stride outermost ---- */

static int read_shape(PyObject *shape, int64_t *dims)
{
    if (!PyTuple_Check(shape)) {
        PyErr_SetString(PyExc_TypeError, "shape must be a tuple of ints");
        return -1;
    }
    const Py_ssize_t n = PyTuple_Size(shape);
    if (n > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "shape has %zd dimensions; at most %d are supported", n, MAX_DIMS);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (dims[i] == -1 && PyErr_Occurred())
            return -1;
        if (dims[i] < 0) {
            PyErr_Format(PyExc_ValueError, "shape[%zd] is negative: %lld", i, (long long)dims[i]);
            return -1;
        }
    }
    return (int)n;
}

static int count_elements(Plan *p, const int64_t *dims, int n)
{
    int64_t product = 1;
    int too_many = 0;
    p->numel = 1;
    for (int i = 0; i < n; i++) {
        if (dims[i] == 0)
            p->numel = 0;
        else
            too_many |= __builtin_mul_overflow(product, dims[i], &product);
    }
    if (too_many && p->numel) {
        PyErr_SetString(PyExc_ValueError, "shape has more than 2^63 elements");
        return -1;
    }
    p->numel = p->numel ? product : 0;
    return 0;
}

static void insert_run(Plan *p, int64_t dim, int64_t stride)
{
    if (dim == 1)
        return;
    if (stride < 0) {
        p->base += (dim - 1) * stride;
        stride = -stride;
    }
    int at = p->ndim++;
    for (; at > 0 && p->strides[at - 1] < stride; at--) {
        p->strides[at] = p->strides[at - 1];
        p->dims[at] = p->dims[at - 1];
    }
    p->strides[at] = stride;
    p->dims[at] = dim;
}

static void merge_runs(Plan *p)
{
    int last = 0;
    for (int d = 1; d < p->ndim; d++) {
        if (p->strides[last] == p->strides[d] * p->dims[d]) {
            p->dims[last] *= p->dims[d];
            p->strides[last] = p->strides[d];
        } else {
            last++;
            p->dims[last] = p->dims[d];
            p->strides[last] = p->strides[d];
        }
    }
    p->ndim = last + 1;
}

static void check_alignment(Plan *p)
{
    const int size = item_size[p->dtype], unit = size > 8 || p->dtype == C64 ? size / 2 : size;
    uintptr_t all = (uintptr_t)p->base;
    for (int d = 0; d < p->ndim; d++)
        all |= (uintptr_t)p->strides[d];
    p->aligned = all % (uintptr_t)unit == 0;
}

static int read_strides(Plan *p, Plan *logical, PyObject *strides, const int64_t *dims, int n)
{
    if (!PyTuple_Check(strides)) {
        PyErr_SetString(PyExc_TypeError, "strides must be None or a tuple of ints (bytes)");
        return -1;
    }
    if (PyTuple_Size(strides) != n) {
        PyErr_Format(PyExc_ValueError, "shape has %d entries but strides has %zd", n, PyTuple_Size(strides));
        return -1;
    }
    for (int i = 0; i < n; i++) {
        const int64_t stride = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
        if (stride == -1 && PyErr_Occurred())
            return -1;
        if (dims[i] != 1) {
            logical->dims[logical->ndim] = dims[i];
            logical->strides[logical->ndim++] = stride;
        }
        insert_run(p, dims[i], stride);
    }
    return 0;
}

/* Elements in logical order, where that is not the order of storage. */
static void order_logically(Plan *p, Plan *logical)
{
    merge_runs(logical);
    if (logical->ndim == p->ndim && logical->base == p->base && logical->ndim &&
        !memcmp(logical->strides, p->strides, (size_t)p->ndim * sizeof *p->strides) &&
        !memcmp(logical->dims, p->dims, (size_t)p->ndim * sizeof *p->dims))
        return;
    check_alignment(logical);
    p->logical = logical;
}

static int make_plan(
    Plan *p, Plan *logical, int64_t *dims, PyObject *address, PyObject *dtype, PyObject *shape, PyObject *strides)
{
    const long code = PyLong_AsLong(dtype);
    if (code == -1 && PyErr_Occurred())
        return -1;
    if (code < 0 || code >= DTYPES) {
        PyErr_Format(PyExc_ValueError, "unknown dtype code %ld; types.DTYPES has 0 to %d", code, DTYPES - 1);
        return -1;
    }
    p->base = PyLong_AsVoidPtr(address);
    if (!p->base && PyErr_Occurred())
        return -1;
    logical->base = p->base;
    logical->dtype = p->dtype = (int)code;
    logical->ndim = p->ndim = 0;
    p->logical = NULL;
    p->scale = 1;
    const int n = read_shape(shape, dims);
    if (n < 0 || count_elements(p, dims, n))
        return -1;
    if (p->numel && !p->base) {
        PyErr_SetString(PyExc_ValueError, "address is 0 but the shape has elements");
        return -1;
    }
    if (strides != Py_None && read_strides(p, logical, strides, dims, n))
        return -1;
    if (p->ndim == 0) {
        p->ndim = 1;
        p->dims[0] = p->numel;
        p->strides[0] = item_size[code];
    } else if (p->numel) {
        merge_runs(p);
        order_logically(p, logical);
    }
    check_alignment(p);
    return n;
}

/* ---- inside the graphs of frameworks, on threads of theirs ---- */

#define ROW_WORDS ((int64_t)(sizeof(Row) / sizeof(uint32_t)))
static const Result NO_RESULT = {.row = {.numel = -1, .hash = NO_HASH}, .length = -1};

typedef void Run(Job *job, int workers, void *context);

/* The row of a dense tensor, without Python, by as many of the caller's threads as are worth while, or by this one alone.
 * Without memory the result stays as it was. The caller gives the workspace back, when the histogram was read. */
static void reduce_here(
    const void *data, int dtype, const int64_t *dims, int64_t rank, int histogram, int hash, Run *run, void *context,
    Result *result)
{
    Plan p = {.base = data, .dtype = dtype, .scale = 1, .ndim = 1, .run = run, .context = context,
              .hash = hash ? current.hash : NULL};
    Workspace *ws[MAX_THREADS];
    uint64_t numel = 1; /* unsigned: before a dimension of nothing the others may be of any size */
    for (int64_t i = 0; i < rank; i++)
        numel *= (uint64_t)dims[i];
    p.dims[0] = p.numel = (int64_t)numel;
    p.strides[0] = item_size[dtype];
    check_alignment(&p);
    p.histogram = histogram ? TRACKED : NONE;
    const int64_t chunks = p.numel / CHUNK;
    const int wanted = !run || chunks < 2 ? 1 : chunks < thread_count ? (int)chunks : thread_count;
    const int workspaces = take_workspaces(&p, ws, wanted);
    if (workspaces == 0)
        return;
    reduce_prepared(&p, current.reduce_chunk, ws, workspaces, result);
    for (int i = 1; i < workspaces; i++)
        give_workspace(ws[i]);
    result->w = ws[0];
}

#include "xla.h"
#include "onnx.h"

/* ---- Python functions ---- */

static int expect(const char *name, Py_ssize_t got, Py_ssize_t wanted)
{
    if (got == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, got);
    return -1;
}

static PyObject *py_reduce(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Plan p, logical;
    Result result;
    int64_t dims[MAX_DIMS];
    (void)module;
    if (count != 7 && expect("reduce(row_address, hist_address, address, dtype, shape, strides)", count, 6))
        return NULL;
    Row *row = PyLong_AsVoidPtr(args[0]);
    uint32_t *hist = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (!row) {
        PyErr_Format(PyExc_ValueError, "row_address is 0; it must point to room for %d eight-byte values",
                     (int)(sizeof(Row) / 8));
        return NULL;
    }
    const int hash = count == 7 ? PyObject_IsTrue(args[6]) : 0;
    p.histogram = hist ? TRACKED : NONE;
    p.hash = hash ? current.hash : NULL;
    if (hash < 0 || make_plan(&p, &logical, dims, args[2], args[3], args[4], args[5]) < 0 || reduce_plan(&p, &result))
        return NULL;
    *row = result.row;
    if (result.length > 0)
        memcpy(hist, result.counts, (size_t)result.length * sizeof *hist);
    give_workspace(result.w);
    return Py_BuildValue("ii", result.length > 0 ? (int)result.offset : 0, result.length);
}

/* Seven rows of `width` eight-byte values: finite, zero, positive (counts), mean, squares, min, max. */
static void put_columns(const ColumnTile *t, char *out, int64_t width, int64_t from, int n)
{
    int64_t *counts = (int64_t *)out + from;
    double *reals = (double *)out + 3 * width + from;
    for (int j = 0; j < n; j++) {
        counts[j] = t->finite[j];
        counts[width + j] = t->zero[j];
        counts[2 * width + j] = t->positive[j];
        reals[j] = t->sum[j];
        reals[width + j] = t->squares[j];
        reals[2 * width + j] = (double)t->min[j] + 0.0; /* no negative zero */
        reals[3 * width + j] = (double)t->max[j] + 0.0;
    }
}

static PyObject *py_reduce_columns(PyObject *module, PyObject *args)
{
    unsigned long long out, address;
    long long rows, width;
    int dtype;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKiLL", &out, &address, &dtype, &rows, &width))
        return NULL;
    if (!out || !address || dtype < 0 || dtype >= DTYPES || !is_single[dtype] || rows < 1 || rows > INT32_MAX || width < 1) {
        PyErr_SetString(PyExc_ValueError, "reduce_columns takes a matrix of a type that is exact as float");
        return NULL;
    }
    const Matrix m = {(const char *)(uintptr_t)address, dtype, rows, width};
    Workspace *w = take_workspace();
    ColumnTile *t = w ? malloc(sizeof *t) : NULL;
    if (t) {
        Py_BEGIN_ALLOW_THREADS
        const unsigned mode = standard_mode();
        for (int64_t from = 0; from < width; from += TILE) {
            const int n = width - from < TILE ? (int)(width - from) : TILE;
            memset(t, 0, sizeof *t);
            for (int j = 0; j < n; j++) {
                t->min[j] = INFINITY;
                t->max[j] = -INFINITY;
            }
            current.reduce_columns(&m, w, t, from, n);
            put_columns(t, (char *)(uintptr_t)out, width, from, n);
        }
        restore_mode(mode);
        Py_END_ALLOW_THREADS
    }
    free(t);
    if (w)
        give_workspace(w);
    if (!t)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *py_round_bfloat16(PyObject *module, PyObject *args)
{
    unsigned long long out, address;
    long long count;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKL", &out, &address, &count))
        return NULL;
    if (count > 0) {
        Py_BEGIN_ALLOW_THREADS
        current.round_bfloat16((uint16_t *)(uintptr_t)out, (const uint32_t *)(uintptr_t)address, count);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *py_hash_bytes(PyObject *module, PyObject *args)
{
    unsigned long long address;
    long long count;
    uint64_t linear = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "KL", &address, &count))
        return NULL;
    if (count > 0) {
        Py_BEGIN_ALLOW_THREADS
        linear = current.hash(0, (const void *)(uintptr_t)address, (size_t)count);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(finished_hash(linear, count > 0 ? (uint64_t)count : 0));
}

/* Rows lie anywhere, so that each begins with a wait for memory: those a few rows ahead are asked for meanwhile. */
#define AHEAD 8
static void gather_rows(char *out, const uint64_t *addresses, int64_t count, size_t size)
{
    const size_t early = size < 512 ? size : 512; /* what the processor does not fetch ahead by itself */
    for (int64_t i = 0; i < count; i++, out += size) {
        if (i + AHEAD < count)
            for (size_t at = 0; at < early; at += 64)
                __builtin_prefetch((const char *)(uintptr_t)addresses[i + AHEAD] + at);
        memcpy(out, (const void *)(uintptr_t)addresses[i], size);
    }
}

static PyObject *py_gather_rows(PyObject *module, PyObject *args)
{
    unsigned long long out, addresses;
    long long count, size;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKLL", &out, &addresses, &count, &size))
        return NULL;
    if (count > 0 && size > 0) {
        Py_BEGIN_ALLOW_THREADS
        gather_rows((char *)(uintptr_t)out, (const uint64_t *)(uintptr_t)addresses, count, (size_t)size);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* Positions in the header and in the list of columns of a step table. */
enum { ROWS, ROW_CAPACITY, HIST, HIST_CAPACITY, DIMS, DIMS_CAPACITY, NONFINITE, FIXED_TIME, KEY_CAPACITY, HASH_PROBES, POINTERS = 16 };
enum {
    KEY, CALL, SEQ, DTYPE, RECOMPUTED, PROBES, TIME,
#define PLACE(name, ...) PLACE_##name,
    STATISTICS(PLACE, PLACE) CONDITIONS(PLACE)
#undef PLACE
    HIST_OFFSET, HIST_VALID, HIST_ENDS, HIST_COUNTS, DIMS_ENDS, DIMS_VALUES, CALLS, COST
};
#define COLUMN(type, column) ((type *)(uintptr_t)header[POINTERS + (column)])

static void put_bit(uint8_t *bitmap, int64_t i, int on)
{
    const uint8_t bit = (uint8_t)(1u << (i & 7));
    bitmap[i >> 3] = (uint8_t)(on ? bitmap[i >> 3] | bit : bitmap[i >> 3] & ~bit);
}

static int has_room(const int64_t *header, int64_t key, int ndim, int counts)
{
    const int64_t hist = header[HIST] + counts, dims = header[DIMS] + ndim;
    return header[ROWS] < header[ROW_CAPACITY] && key < header[KEY_CAPACITY] && hist <= header[HIST_CAPACITY] &&
           hist <= INT32_MAX && dims <= header[DIMS_CAPACITY] && dims <= INT32_MAX;
}

static void put_statistics(const int64_t *header, int64_t i, const Row *r)
{
#define COUNT(name) COLUMN(int64_t, PLACE_##name)[i] = r->name;
#define REAL(name) COLUMN(double, PLACE_##name)[i] = r->name;
#define CONDITION(name, holds) put_bit(COLUMN(uint8_t, PLACE_##name), i, holds);
    STATISTICS(COUNT, REAL)
    CONDITIONS(CONDITION)
#undef COUNT
#undef REAL
#undef CONDITION
}

/* What the wall clock is ahead of the monotonic one. It is read again when a step opens, so that rows need one clock. */
static int64_t wall_clock_ahead;

static void read_wall_clock(void) { wall_clock_ahead = nanoseconds(CLOCK_REALTIME) - nanoseconds(CLOCK_MONOTONIC); }

/* `now` is the monotonic clock's. */
static int64_t append(int64_t *header, int64_t key, uint64_t probes, int recomputed, int dtype, const int64_t *dims,
                      int ndim, const Result *result, int64_t now)
{
    const int64_t i = header[ROWS], nonfinite = result->row.nan + result->row.posinf + result->row.neginf;
    const int counts = result->length > 0 ? result->length : 0;

    COLUMN(int32_t, KEY)[i] = (int32_t)key;
    COLUMN(int32_t, CALL)[i] = COLUMN(int32_t, CALLS)[2 * key + recomputed]++;
    COLUMN(int32_t, SEQ)[i] = (int32_t)i;
    COLUMN(int8_t, DTYPE)[i] = (int8_t)dtype;
    put_bit(COLUMN(uint8_t, RECOMPUTED), i, recomputed);
    COLUMN(uint64_t, PROBES)[i] = probes;
    COLUMN(int64_t, TIME)[i] = header[FIXED_TIME] ? header[FIXED_TIME] : (now + wall_clock_ahead) / 1000;
    put_statistics(header, i, &result->row);

    COLUMN(int32_t, HIST_OFFSET)[i] = counts ? (int32_t)result->offset : 0;
    put_bit(COLUMN(uint8_t, HIST_VALID), i, result->length >= 0);
    if (counts)
        memcpy(COLUMN(uint32_t, HIST_COUNTS) + header[HIST], result->counts, (size_t)counts * sizeof(uint32_t));
    header[HIST] += counts;
    COLUMN(int32_t, HIST_ENDS)[i + 1] = (int32_t)header[HIST];

    if (ndim)
        memcpy(COLUMN(int64_t, DIMS_VALUES) + header[DIMS], dims, (size_t)ndim * sizeof *dims);
    header[DIMS] += ndim;
    COLUMN(int32_t, DIMS_ENDS)[i + 1] = (int32_t)header[DIMS];

    header[NONFINITE] += nonfinite > 0;
    header[ROWS] = i + 1;
    return i;
}

/* What `record` and `record_tensor` are given first: the table, the key, probes, want and recomputed. */
typedef struct {
    int64_t *header, key, begin;
    uint64_t probes;
    int want, recomputed;
} Target;

/* When what leads to a row began, as far as that is known: in a real step, where the caches hold the model and not our code,
 * a hook of PyTorch's costs 1.2 us besides what it does, and 5 us where Python answers it (100 x (Linear 64 + ReLU)). */
enum { IN_HOOK = 1200, IN_PYTHON = 5000 };
static int64_t begun(int64_t before) { return nanoseconds(CLOCK_MONOTONIC) - before; }

static int read_target(PyObject *const *args, Target *t)
{
    t->begin = begun(IN_PYTHON);
    t->header = PyLong_AsVoidPtr(args[0]);
    if (!t->header) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "layout_address is 0");
        return -1;
    }
    t->key = PyLong_AsLongLong(args[1]);
    if (t->key < 0) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "key is negative: %lld", (long long)t->key);
        return -1;
    }
    t->probes = PyLong_AsUnsignedLongLongMask(args[2]);
    const long want = t->probes == UINT64_MAX && PyErr_Occurred() ? -1 : PyLong_AsLong(args[3]);
    if (want == -1 && PyErr_Occurred())
        return -1;
    t->want = (int)want;
    t->recomputed = PyObject_IsTrue(args[4]);
    return t->recomputed < 0 ? -1 : 0;
}

#define NO_MEMORY (-3)

/* The row; -1 when there is no room, NO_MEMORY with an error set. */
static int64_t record_row(const Target *t, Plan *p, const int64_t *dims, int ndim)
{
    int64_t *header = t->header;
    Result result;
    if (!has_room(header, t->key, ndim, 0))
        return -1;
    p->hash = t->probes & (uint64_t)header[HASH_PROBES] ? current.hash : NULL;
    if (reduce_plan(p, &result))
        return NO_MEMORY;
    int64_t row = -1; /* while the GIL was released another thread may have filled the table */
    if (has_room(header, t->key, ndim, result.length > 0 ? result.length : 0)) {
        const int64_t now = nanoseconds(CLOCK_MONOTONIC);
        row = append(header, t->key, t->probes, t->recomputed, p->dtype, dims, ndim, &result, now);
        COLUMN(int64_t, COST)[row] = now - t->begin;
    }
    give_workspace(result.w);
    return row;
}

static PyObject *record_plan(const Target *t, Plan *p, const int64_t *dims, int ndim)
{
    const int64_t row = record_row(t, p, dims, ndim);
    return row == NO_MEMORY ? NULL : PyLong_FromLongLong(row);
}

static PyObject *py_record(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Plan p, logical;
    Target target;
    int64_t dims[MAX_DIMS];
    (void)module;
    if (expect("record(layout_address, key, probes, want, recomputed, dtype, address, shape, strides)", count, 9))
        return NULL;
    if (read_target(args, &target))
        return NULL;
    p.histogram = target.want & 1 ? TRACKED : NONE;
    const int ndim = make_plan(&p, &logical, dims, args[6], args[5], args[7], args[8]);
    return ndim < 0 ? NULL : record_plan(&target, &p, dims, ndim);
}

#include "dlpack.h"
#include "many.h"
#include "changes.h"
#include "hook.h"
#include "message.h"
#include "closing.h"
#include "crc32.h"
#include "histograms.h"

static PyObject *py_commit(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    int64_t dims[MAX_DIMS];
    (void)module;
    if (expect("commit(layout_address, key, probes, recomputed, dtype, shape, row_address, hist_offset, hist_address, "
               "hist_length)", count, 10))
        return NULL;
    int64_t *header = PyLong_AsVoidPtr(args[0]);
    const int64_t key = PyErr_Occurred() ? -1 : PyLong_AsLongLong(args[1]);
    const uint64_t probes = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLongMask(args[2]);
    const int recomputed = PyErr_Occurred() ? -1 : PyObject_IsTrue(args[3]);
    const long dtype = PyErr_Occurred() ? -1 : PyLong_AsLong(args[4]);
    const int ndim = PyErr_Occurred() ? -1 : read_shape(args[5], dims);
    const Row *row = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[6]);
    const long offset = PyErr_Occurred() ? -1 : PyLong_AsLong(args[7]);
    const uint32_t *counts = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(args[8]);
    const long length = PyErr_Occurred() ? -1 : PyLong_AsLong(args[9]);
    if (PyErr_Occurred())
        return NULL;
    if (!has_room(header, key, ndim, length > 0 ? (int)length : 0))
        return PyLong_FromLong(-1);
    const Result result = {*row, (uint32_t)offset, (int)length, counts, NULL};
    const int64_t now = nanoseconds(CLOCK_MONOTONIC);
    const int64_t at = append(header, key, probes, recomputed, (int)dtype, dims, ndim, &result, now);
    COLUMN(int64_t, COST)[at] = 0;
    return PyLong_FromLongLong(at);
}

/* By the buffer protocol, a few times faster than NumPy's own attributes; 0 for types that it does not know. */
static PyObject *py_address(PyObject *module, PyObject *array)
{
    Py_buffer view;
    (void)module;
    if (PyObject_GetBuffer(array, &view, PyBUF_STRIDED_RO)) {
        PyErr_Clear();
        return PyLong_FromLong(0);
    }
    PyObject *address = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view);
    return address;
}

/* Memory that somebody else keeps alive, as an object that arrays can be made of. */
static PyObject *py_memory(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (expect("memory(address, size)", count, 2))
        return NULL;
    char *address = PyLong_AsVoidPtr(args[0]);
    const Py_ssize_t size = PyErr_Occurred() ? -1 : PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (!address || size < 0) {
        PyErr_SetString(PyExc_ValueError, "the address is 0, or the size is negative");
        return NULL;
    }
    return PyMemoryView_FromMemory(address, size, PyBUF_READ);
}

static PyObject *py_level(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(current.name);
}

static PyObject *py_set_level(PyObject *module, PyObject *name)
{
    (void)module;
    for (int i = 0; i < level_count; i++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, levels[i].name) == 0) {
            current = levels[i];
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "no kernel level %R on this processor; see LEVELS", name);
    return NULL;
}

static PyObject *py_threads(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyLong_FromLong(thread_count);
}

static PyObject *py_set_threads(PyObject *module, PyObject *number)
{
    (void)module;
    const long n = PyLong_AsLong(number);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    if (n < 1 || n > MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "threads must be 1 to %d, not %ld", MAX_THREADS, n);
        return NULL;
    }
    thread_count = (int)n;
    Py_RETURN_NONE;
}

static PyObject *py_borrow(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "borrow takes an address and a number of threads");
        return NULL;
    }
    void *const team = PyLong_AsVoidPtr(args[0]);
    const long n = PyErr_Occurred() ? -1 : PyLong_AsLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (n < 1 || n > MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "threads must be 1 to %d, not %ld", MAX_THREADS, n);
        return NULL;
    }
    lent_threads = (int)n;
    *(void **)&lent_team = team;
    memset(pace, 0, sizeof pace);
    Py_RETURN_NONE;
}

static PyObject *py_xla(PyObject *module, PyObject *unused)
{
    void *(*const function)(XlaCall *) = xla_row;
    void *address;
    (void)module;
    (void)unused;
    memcpy(&address, &function, sizeof address);
    return PyCapsule_New(address, NULL, NULL);
}

static PyMethodDef functions[] = {
    {"reduce", (PyCFunction)(void (*)(void))py_reduce, METH_FASTCALL,
     "reduce(row_address, hist_address, address, dtype, shape, strides, hash=False) -> (hist_offset, hist_length)"},
    {"record", (PyCFunction)(void (*)(void))py_record, METH_FASTCALL,
     "record(layout_address, key, probes, want, recomputed, dtype, address, shape, strides) -> row, or -1 when full"},
    {"use_exchange", py_use_exchange, METH_O,
     "use_exchange(capsule) -> bool: read tensors by a framework's DLPack exchange API, where its version is known"},
    {"record_tensor", (PyCFunction)(void (*)(void))py_record_tensor, METH_FASTCALL,
     "record_tensor(layout_address, key, probes, want, recomputed, tensor) -> row, -1 when full, -2 when not plain"},
    {"copy_tensors", (PyCFunction)(void (*)(void))py_copy_tensors, METH_FASTCALL,
     "copy_tensors(copies_address, buffer_address, buffer_size, tensors) -> bytes needed"},
    {"record_changes", (PyCFunction)(void (*)(void))py_record_changes, METH_FASTCALL,
     "record_changes(layout_address, entries_address, copies_address, buffer_address, norms_address, tensors, first) -> next"},
    {"norms", py_norms, METH_O, "norms(tensors) -> the L2 norm of each; None where a tensor is not plain"},
    {"record_many", (PyCFunction)(void (*)(void))py_record_many, METH_FASTCALL,
     "record_many(layout_address, entries_address, tensors, first) -> the first tensor that has no row"},
    {"show_call", py_show_call, METH_VARARGS,
     "show_call(type, function) -> bool: show a function as __call__ of a subclass of NativeHook, called by C alone"},
    {"commit", (PyCFunction)(void (*)(void))py_commit, METH_FASTCALL,
     "commit(layout_address, key, probes, recomputed, dtype, shape, row_address, hist_offset, hist_address, length)"},
    {"append_rows", (PyCFunction)(void (*)(void))py_append_rows, METH_FASTCALL,
     "append_rows(layout_address, plan_address, metadata, into, file) -> size: write the rows as a message of an Arrow stream"},
    {"settle", (PyCFunction)(void (*)(void))py_settle, METH_FASTCALL,
     "settle(layout_address, plan_address, step) -> bool: number the rows; whether these are as before but for their values"},
    {"crc32", py_crc32, METH_O, "crc32(data) -> int: as zlib's; None where the processor has no instruction for it"},
    {"charge", (PyCFunction)(void (*)(void))py_charge, METH_FASTCALL,
     "charge(layout_address, totals_address, length, around) -> seconds: add up by key what the rows cost"},
    {"reopen", (PyCFunction)(void (*)(void))py_reopen, METH_FASTCALL,
     "reopen(layout_address, capacity, time, hash_probes): forget all rows and take others"},
    {"reduce_columns", py_reduce_columns, METH_VARARGS,
     "reduce_columns(out_address, address, dtype, rows, width): statistics of every column of a dense matrix"},
    {"round_bfloat16", py_round_bfloat16, METH_VARARGS,
     "round_bfloat16(out_address, address, count): float32 to the nearest bfloat16"},
    {"hash_bytes", py_hash_bytes, METH_VARARGS, "hash_bytes(address, count): the content hash of bytes"},
    {"gather_rows", py_gather_rows, METH_VARARGS,
     "gather_rows(out_address, addresses_address, count, size): copy so many bytes from each address"},
    {"add_histograms", py_add_histograms, METH_VARARGS,
     "add_histograms(dense_address, groups, buckets, group_address, first_address, ends_address, rows, counts_address, "
     "size): add the counts of each row to the histogram of its group"},
    {"address", py_address, METH_O, "Where an array's elements lie; 0 when it does not say."},
    {"memory", (PyCFunction)(void (*)(void))py_memory, METH_FASTCALL, "memory(address, size): a read-only view of memory"},
    {"level", py_level, METH_NOARGS, "The instruction set in use."},
    {"set_level", py_set_level, METH_O, "Use one of LEVELS."},
    {"threads", py_threads, METH_NOARGS, "How many threads a large reduction may use."},
    {"set_threads", py_set_threads, METH_O, "Let large reductions use up to this many threads."},
    {"borrow", (PyCFunction)(void (*)(void))py_borrow, METH_FASTCALL,
     "borrow(address, threads): let a framework's threads help; the address of its GOMP_parallel, or 0 for our own"},
    {"xla", py_xla, METH_NOARGS, "A capsule with the function that programs of XLA call: a tensor to a row's words."},
    {NULL, NULL, 0, NULL},
};

/* ---- start ---- */

static float fp8_value(int code, int mantissa_bits, int bias)
{
    const int mantissa = code & ((1 << mantissa_bits) - 1), exponent = (code & 0x7f) >> mantissa_bits;
    const float size = exponent ? ldexpf((float)(mantissa | 1 << mantissa_bits), exponent - bias - mantissa_bits)
                                : ldexpf((float)mantissa, 1 - bias - mantissa_bits);
    return code & 0x80 ? -size : size;
}

static void fill_fp8(void)
{
    for (int code = 0; code < 256; code++) {
        const int magnitude = code & 0x7f;
        fp8[0][code] = magnitude == 0x7f ? NAN : fp8_value(code, 3, 7);
        fp8[1][code] = magnitude > 0x7c ? NAN : fp8_value(code, 2, 15);
        if (magnitude == 0x7c)
            fp8[1][code] = code & 0x80 ? -INFINITY : INFINITY;
        fp8[2][code] = code == 0x80 ? NAN : fp8_value(code, 3, 8);
        fp8[3][code] = code == 0x80 ? NAN : fp8_value(code, 2, 16);
    }
}

static int default_threads(void)
{
    const char *wanted = getenv("TENSORTAP_THREADS");
    int n = wanted ? atoi(wanted) : 0;
    if (n < 1) {
#ifdef __linux__
        cpu_set_t cpus;
        n = sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus);
#else
        n = (int)sysconf(_SC_NPROCESSORS_ONLN);
#endif
        n = n > 4 ? 4 : n;
    }
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

static PyObject *level_names(void)
{
    PyObject *names = PyTuple_New(level_count);
    for (int i = 0; names && i < level_count; i++) {
        PyObject *name = PyUnicode_FromString(levels[i].name);
        if (!name || PyTuple_SetItem(names, i, name) < 0)
            Py_CLEAR(names);
    }
    return names;
}

#define NAME(name) #name,
static const char *const statistics[] = {STATISTICS(NAME, NAME)};
#undef NAME

static PyObject *statistic_names(void)
{
    const Py_ssize_t count = sizeof statistics / sizeof *statistics;
    PyObject *names = PyTuple_New(count);
    for (Py_ssize_t i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(statistics[i]);
        if (!name || PyTuple_SetItem(names, i, name) < 0)
            Py_CLEAR(names);
    }
    return names;
}

static const char NOT_HERE[] =
    "tensortap does not run in subinterpreters: its kernel has one state for the whole process; import it in the main "
    "interpreter, or use processes";

/* Run once in each interpreter that imports the module. Not an ImportError: that would mean that NumPy can take over. */
static int start(PyObject *module)
{
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_RuntimeError, NOT_HERE);
        return -1;
    }
    if (level_count == 0) {
        find_levels();
        fill_fp8();
        fill_hash_tables();
        find_crc32();
        read_wall_clock();
        thread_count = default_threads();
        pthread_atfork(hold_workspaces, let_workspaces, forget_pool);
    }
    PyObject *names = level_names(), *rows = names ? statistic_names() : NULL;
    const int failed = !rows || PyModule_AddObjectRef(module, "LEVELS", names) < 0 ||
                       PyModule_AddObjectRef(module, "STATISTICS", rows) < 0 || add_hooks(module) < 0;
    Py_XDECREF(names);
    Py_XDECREF(rows);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, start}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Statistics and float-bit histograms of buffers, in C.", 0, functions, module_slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
