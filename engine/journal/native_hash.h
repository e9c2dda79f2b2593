/* Python's hash of bytes, of many pages. For native_steps.c alone.
 *
 * It is SipHash-1-3 (J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input PRF", 2012), in which each round waits
 * for the one before. So eight pages are hashed at a time where the processor has AVX-512 and what comes of it is what
 * Python says.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* As pages.py has it. */
#if PY_VERSION_HEX >= 0x030e0000
#define hash_of Py_HashBuffer
#else
#define hash_of _Py_HashBytes
#endif

#define DIGEST_BYTES 8

/* Later versions of Python keep the secret to themselves. */
#if defined(__x86_64__) && defined(__GNUC__) && PY_VERSION_HEX < 0x030d0000
#include <immintrin.h>

#define LANES 8
#define ROW (LANES * sizeof(uint64_t))
typedef uint64_t Lanes __attribute__((vector_size(ROW)));

#define ROTATE(lanes, bits) ((lanes) << (bits) | (lanes) >> (64 - (bits)))
#define ROUND \
    (v0 += v1, v1 = ROTATE(v1, 13) ^ v0, v0 = ROTATE(v0, 32), v2 += v3, v3 = ROTATE(v3, 16) ^ v2, \
     v0 += v3, v3 = ROTATE(v3, 21) ^ v0, v2 += v1, v1 = ROTATE(v1, 17) ^ v2, v2 = ROTATE(v2, 32))

/* The next 8 words of each of 8 pages: words[i] are the i-th of all. */
__attribute__((target("avx512f")))
static inline void turn(const unsigned char *pages, size_t size, Lanes words[LANES])
{
    __m512i rows[LANES], pairs[LANES];
    for (size_t page = 0; page < LANES; page++) {
        rows[page] = _mm512_loadu_si512(pages + page * size);
    }
    for (int page = 0; page < LANES; page += 2) {
        pairs[page] = _mm512_unpacklo_epi64(rows[page], rows[page + 1]);
        pairs[page + 1] = _mm512_unpackhi_epi64(rows[page], rows[page + 1]);
    }
    for (int odd = 0; odd < 2; odd++) {
        /* Of two words each, in quarters: those that are 0 or 4 from the first, and 2 or 6. */
        __m512i near0 = _mm512_shuffle_i64x2(pairs[odd], pairs[odd + 2], 0x88);
        __m512i near1 = _mm512_shuffle_i64x2(pairs[odd + 4], pairs[odd + 6], 0x88);
        __m512i far0 = _mm512_shuffle_i64x2(pairs[odd], pairs[odd + 2], 0xdd);
        __m512i far1 = _mm512_shuffle_i64x2(pairs[odd + 4], pairs[odd + 6], 0xdd);
        words[odd] = (Lanes)_mm512_shuffle_i64x2(near0, near1, 0x88);
        words[odd + 4] = (Lanes)_mm512_shuffle_i64x2(near0, near1, 0xdd);
        words[odd + 2] = (Lanes)_mm512_shuffle_i64x2(far0, far1, 0x88);
        words[odd + 6] = (Lanes)_mm512_shuffle_i64x2(far0, far1, 0xdd);
    }
}

/* Eight pages that follow each other; their size is a multiple of ROW bytes. */
__attribute__((target("avx512f")))
static void hash_eight(const unsigned char *pages, size_t size, unsigned char *digests)
{
    uint64_t k0 = _Py_HashSecret.siphash.k0, k1 = _Py_HashSecret.siphash.k1;
    Lanes v0 = (Lanes){0} + (k0 ^ 0x736f6d6570736575), v1 = (Lanes){0} + (k1 ^ 0x646f72616e646f6d);
    Lanes v2 = (Lanes){0} + (k0 ^ 0x6c7967656e657261), v3 = (Lanes){0} + (k1 ^ 0x7465646279746573);
    Lanes words[LANES], end = (Lanes){0} + ((uint64_t)size << 56);
    for (size_t at = 0; at < size; at += ROW) {
        turn(pages + at, size, words);
        for (int word = 0; word < LANES; word++) {
            v3 ^= words[word];
            ROUND;
            v0 ^= words[word];
        }
    }
    v3 ^= end;
    ROUND;
    v0 ^= end;
    v2 ^= 0xff;
    ROUND;
    ROUND;
    ROUND;
    Lanes hashes = v0 ^ v1 ^ v2 ^ v3;
    for (int page = 0; page < LANES; page++) {
        /* Python has no hash that is -1. */
        uint64_t digest = hashes[page] == UINT64_MAX ? UINT64_MAX - 1 : hashes[page];
        memcpy(digests + page * DIGEST_BYTES, &digest, DIGEST_BYTES);
    }
}

static int can_hash_eight;

static void compare_hashes(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f")) {
        return;
    }
    unsigned char pages[LANES * ROW], digests[LANES * DIGEST_BYTES];
    for (size_t at = 0; at < sizeof(pages); at++) {
        pages[at] = (unsigned char)(at * 37 + at / ROW);
    }
    hash_eight(pages, ROW, digests);
    can_hash_eight = 1;
    for (size_t page = 0; page < LANES; page++) {
        int64_t digest = hash_of(pages + page * ROW, ROW);
        can_hash_eight &= !memcmp(digests + page * DIGEST_BYTES, &digest, DIGEST_BYTES);
    }
}

static size_t hash_wide(const unsigned char *keys, size_t pages, size_t size, unsigned char *digests)
{
    size_t done = 0;
    while (can_hash_eight && size % ROW == 0 && pages - done >= LANES) {
        hash_eight(keys + done * size, size, digests + done * DIGEST_BYTES);
        done += LANES;
    }
    return done;
}
#else
#define hash_wide(keys, pages, size, digests) 0
static void compare_hashes(void) {}
#endif

/* One digest for each page. */
static void hash_pages(const unsigned char *keys, size_t pages, size_t size, unsigned char *digests)
{
    for (size_t page = hash_wide(keys, pages, size, digests); page < pages; page++) {
        int64_t digest = hash_of(keys + page * size, (Py_ssize_t)size);
        memcpy(digests + page * DIGEST_BYTES, &digest, DIGEST_BYTES);
    }
}
