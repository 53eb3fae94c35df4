/* The content hash: CRC-64/XZ over the elements' bytes in logical order. A CRC is linear, so that the hash of a whole
 * follows from those of its pieces in order (append_hash), whoever computed them.
 *
 * Words are polynomials over GF(2) with the highest power in the lowest bit, as bytes in memory have it. "Linear" is the
 * hash without the ones at its beginning and end: the remainder of data * x^64.
 */

#define HASH_POLYNOMIAL 0xc96c5795d7870f42ull
#define NO_HASH INT64_MIN /* in a row: the hash was not asked for */

static uint64_t hash_tables[8][256]; /* of a byte that 0 to 7 bytes follow */
static uint64_t hash_powers[64];     /* x^(8 * 2^i): what 2^i bytes that follow multiply by */

static uint64_t hash_multiply(uint64_t a, uint64_t b)
{
    uint64_t product = 0;
    for (; a; a <<= 1) {
        product ^= a >> 63 ? b : 0;
        b = b >> 1 ^ (b & 1 ? HASH_POLYNOMIAL : 0);
    }
    return product;
}

/* What the linear hash of a piece becomes when so many bytes follow it. */
static uint64_t hash_before(uint64_t linear, uint64_t bytes)
{
    for (int i = 0; bytes && linear; i++, bytes >>= 1)
        if (bytes & 1)
            linear = hash_multiply(hash_powers[i], linear);
    return linear;
}

static inline uint64_t hash_word(uint64_t state, const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
    word ^= state;
    return hash_tables[7][word & 255] ^ hash_tables[6][word >> 8 & 255] ^ hash_tables[5][word >> 16 & 255] ^
           hash_tables[4][word >> 24 & 255] ^ hash_tables[3][word >> 32 & 255] ^ hash_tables[2][word >> 40 & 255] ^
           hash_tables[1][word >> 48 & 255] ^ hash_tables[0][word >> 56];
}

/* Long runs as four at once, since each lookup waits for the one before. */
static uint64_t hash_plain(uint64_t state, const void *data, size_t n)
{
    const unsigned char *p = data;
    if (n >= 2048) {
        const size_t each = n / 32 * 8;
        uint64_t of[4] = {state, 0, 0, 0};
        for (size_t i = 0; i < each; i += 8)
            for (int k = 0; k < 4; k++)
                of[k] = hash_word(of[k], p + (size_t)k * each + i);
        state = of[0];
        for (int k = 1; k < 4; k++)
            state = hash_before(state, each) ^ of[k];
        p += 4 * each;
        n -= 4 * each;
    }
    for (; n >= 8; n -= 8, p += 8)
        state = hash_word(state, p);
    for (; n; n--, p++)
        state = hash_tables[0][(state ^ *p) & 255] ^ state >> 8;
    return state;
}

#if X86 && !defined(__clang__)
/* By carry-less multiplication: 128 bits that D bits follow are two products, of their halves with x^(D+63) and x^(D-1)
 * (one power less, since the product of two such words is shifted by one), and the sum replaces the later bits. */
static uint64_t hash_folds[3][2]; /* D = 128, 512, 4096 */
enum { FOLD_128, FOLD_512, FOLD_4096 };

#pragma GCC push_options
#pragma GCC target("pclmul,sse4.1")
static inline __m128i hash_fold(__m128i before, __m128i data, __m128i by)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(before, by, 0x00), _mm_clmulepi64_si128(before, by, 0x11)), data);
}

static inline __m128i hash_by(int distance) { return _mm_loadu_si128((const __m128i *)hash_folds[distance]); }

/* The remaining bytes after `before`, which stands for all bytes until then. */
static uint64_t hash_end(__m128i before, const unsigned char *p, size_t n)
{
    unsigned char last[16];
    const __m128i by = hash_by(FOLD_128);
    for (; n >= 16; n -= 16, p += 16)
        before = hash_fold(before, _mm_loadu_si128((const __m128i *)p), by);
    _mm_storeu_si128((__m128i *)last, before);
    return hash_plain(hash_plain(0, last, 16), p, n);
}

static uint64_t hash_clmul(uint64_t state, const void *data, size_t n)
{
    const unsigned char *p = data;
    if (n < 64)
        return hash_plain(state, data, n);
    __m128i a[4];
    const __m128i by = hash_by(FOLD_512), next = hash_by(FOLD_128);
    for (int i = 0; i < 4; i++)
        a[i] = _mm_loadu_si128((const __m128i *)p + i);
    a[0] = _mm_xor_si128(a[0], _mm_cvtsi64_si128((long long)state));
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            a[i] = hash_fold(a[i], _mm_loadu_si128((const __m128i *)p + i), by);
    for (int i = 1; i < 4; i++)
        a[0] = hash_fold(a[0], a[i], next);
    return hash_end(a[0], p, n);
}
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,vpclmulqdq,pclmul,sse4.1")
static inline __m512i hash_fold_4(__m512i before, __m512i data, __m512i by)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(before, by, 0x00), _mm512_clmulepi64_epi128(before, by, 0x11),
                                     data, 0x96);
}

static uint64_t hash_vclmul(uint64_t state, const void *data, size_t n)
{
    const unsigned char *p = data;
    if (n < 1024)
        return hash_clmul(state, data, n);
    __m512i a[8];
    const __m512i by = _mm512_broadcast_i32x4(hash_by(FOLD_4096)), next = _mm512_broadcast_i32x4(hash_by(FOLD_512));
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_loadu_si512(p + 64 * i);
    a[0] = _mm512_xor_si512(a[0], _mm512_zextsi128_si512(_mm_cvtsi64_si128((long long)state)));
    for (p += 512, n -= 512; n >= 512; p += 512, n -= 512)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            a[i] = hash_fold_4(a[i], _mm512_loadu_si512(p + 64 * i), by);
    for (int i = 1; i < 8; i++)
        a[0] = hash_fold_4(a[0], a[i], next);
    for (; n >= 64; p += 64, n -= 64)
        a[0] = hash_fold_4(a[0], _mm512_loadu_si512(p), next);
    __m128i all = _mm512_extracti32x4_epi32(a[0], 0);
    all = hash_fold(all, _mm512_extracti32x4_epi32(a[0], 1), hash_by(FOLD_128));
    all = hash_fold(all, _mm512_extracti32x4_epi32(a[0], 2), hash_by(FOLD_128));
    all = hash_fold(all, _mm512_extracti32x4_epi32(a[0], 3), hash_by(FOLD_128));
    return hash_end(all, p, n);
}
#pragma GCC pop_options

static uint64_t hash_power_of_x(int power)
{
    uint64_t x = 1ull << 63;
    for (; power; power--)
        x = x >> 1 ^ (x & 1 ? HASH_POLYNOMIAL : 0);
    return x;
}

static void fill_hash_folds(void)
{
    static const int distances[3] = {128, 512, 4096};
    for (int i = 0; i < 3; i++) {
        hash_folds[i][0] = hash_power_of_x(distances[i] + 63);
        hash_folds[i][1] = hash_power_of_x(distances[i] - 1);
    }
}
#else
static void fill_hash_folds(void) {}
#endif

static void fill_hash_tables(void)
{
    for (int byte = 0; byte < 256; byte++) {
        uint64_t state = (uint64_t)byte;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? HASH_POLYNOMIAL : 0);
        hash_tables[0][byte] = state;
    }
    for (int i = 1; i < 8; i++)
        for (int byte = 0; byte < 256; byte++)
            hash_tables[i][byte] = hash_tables[0][hash_tables[i - 1][byte] & 255] ^ hash_tables[i - 1][byte] >> 8;
    hash_powers[0] = 1ull << 55; /* x^8 */
    for (int i = 1; i < 64; i++)
        hash_powers[i] = hash_multiply(hash_powers[i - 1], hash_powers[i - 1]);
    fill_hash_folds();
}

/* The hash of a whole from its linear hash, with the ones that CRC-64/XZ begins and ends with. */
static int64_t finished_hash(uint64_t linear, uint64_t bytes)
{
    return (int64_t)~(hash_before(~0ull, bytes) ^ linear);
}
