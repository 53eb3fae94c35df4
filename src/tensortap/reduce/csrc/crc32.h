/* CRC-32 as zlib and gzip have it, by carry-less multiplication: what files carry as their checksum. `crc32_fast` is NULL where
 * the processor, or the compiler, cannot; then zlib does it.
 *
 * The constants are powers of x modulo the polynomial, as in Gopal et al., "Fast CRC Computation Using PCLMULQDQ", 2009. */

static uint32_t (*crc32_fast)(const unsigned char *p, size_t n);

#if X86 && !defined(__clang__)
static uint32_t crc32_table[256];

static uint32_t crc32_bytes(uint32_t state, const unsigned char *p, size_t n)
{
    for (; n; n--, p++)
        state = crc32_table[(state ^ *p) & 255] ^ state >> 8;
    return state;
}

#pragma GCC push_options
#pragma GCC target("pclmul,sse4.1")
static inline __m128i crc32_fold(__m128i before, __m128i data, __m128i by)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(before, by, 0x00), _mm_clmulepi64_si128(before, by, 0x11)), data);
}

static uint32_t crc32_clmul(const unsigned char *p, size_t n)
{
    if (n < 64)
        return ~crc32_bytes(~0u, p, n);
    unsigned char last[16];
    __m128i a[4];
    const __m128i by = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), next = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    for (int i = 0; i < 4; i++)
        a[i] = _mm_loadu_si128((const __m128i *)p + i);
    a[0] = _mm_xor_si128(a[0], _mm_cvtsi32_si128(-1));
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            a[i] = crc32_fold(a[i], _mm_loadu_si128((const __m128i *)p + i), by);
    for (int i = 1; i < 4; i++)
        a[0] = crc32_fold(a[0], a[i], next);
    for (; n >= 16; p += 16, n -= 16)
        a[0] = crc32_fold(a[0], _mm_loadu_si128((const __m128i *)p), next);
    _mm_storeu_si128((__m128i *)last, a[0]);
    return ~crc32_bytes(crc32_bytes(0, last, sizeof last), p, n);
}
#pragma GCC pop_options

static void find_crc32(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? 0xedb88320u : 0);
        crc32_table[byte] = state;
    }
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
        crc32_fast = crc32_clmul;
}
#else
static void find_crc32(void) {}
#endif

/* None where zlib has to do it. */
static PyObject *py_crc32(PyObject *module, PyObject *data)
{
    Py_buffer view;
    uint32_t crc;
    (void)module;
    if (!crc32_fast)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE))
        return NULL;
    if (view.len < 1 << 16) {
        crc = crc32_fast(view.buf, (size_t)view.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = crc32_fast(view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}
