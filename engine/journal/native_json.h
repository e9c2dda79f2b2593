/* JSON into a buffer that grows: numbers, strings, bytes, and the CRC-32 of arrays. For native_steps.c alone. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BUFFER_BYTES_MIN 16384

typedef struct {
    char *bytes;
    size_t size, capacity;
} Buffer;

static int grow(Buffer *buffer, size_t more)
{
    size_t capacity = buffer->capacity ? buffer->capacity : BUFFER_BYTES_MIN;
    while (capacity < buffer->size + more) {
        capacity *= 2;
    }
    char *bytes = PyMem_Realloc(buffer->bytes, capacity);
    if (bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    buffer->bytes = bytes;
    buffer->capacity = capacity;
    return 0;
}

static inline int room(Buffer *buffer, size_t more)
{
    return buffer->size + more <= buffer->capacity ? 0 : grow(buffer, more);
}

static int put(Buffer *buffer, const char *bytes, size_t size)
{
    if (room(buffer, size) < 0) {
        return -1;
    }
    memcpy(buffer->bytes + buffer->size, bytes, size);
    buffer->size += size;
    return 0;
}

static int put_character(Buffer *buffer, char character)
{
    if (room(buffer, 1) < 0) {
        return -1;
    }
    buffer->bytes[buffer->size++] = character;
    return 0;
}

static int put_unsigned(Buffer *buffer, uint64_t number)
{
    char digits[20];
    size_t at = sizeof(digits);
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    return put(buffer, digits + at, sizeof(digits) - at);
}

/* The functions below return 1, and write nothing, where the value is not that simple. */

static int put_int(Buffer *buffer, PyObject *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) {
        return 1;
    }
    if (number < 0 && put_character(buffer, '-') < 0) {
        return -1;
    }
    return put_unsigned(buffer, number < 0 ? 0 - (uint64_t)number : (uint64_t)number);
}

static int put_str(Buffer *buffer, PyObject *value)
{
    if (!PyUnicode_IS_COMPACT_ASCII(value)) {
        return 1;
    }
    size_t size = (size_t)PyUnicode_GET_LENGTH(value);
    const unsigned char *characters = PyUnicode_1BYTE_DATA(value);
    if (room(buffer, size + 2) < 0) {
        return -1;
    }
    char *at = buffer->bytes + buffer->size;
    *at++ = '"';
    for (size_t place = 0; place < size; place++) {
        unsigned char character = characters[place];
        if (character < ' ' || character == '"' || character == '\\' || character == 0x7f) {
            return 1;
        }
        *at++ = (char)character;
    }
    *at++ = '"';
    buffer->size += size + 2;
    return 0;
}

/* Times are whole nanoseconds, mostly. Below 10**15 of them they have 15 digits at most, and no float is the nearest to
 * two numbers of 15 digits: so this is the shortest decimal number that is read as this float.
 */
static int put_float(Buffer *buffer, PyObject *value)
{
    double number = PyFloat_AS_DOUBLE(value);
    if (!(number >= 1e-3 && number < 1e6)) {
        return 1;
    }
    uint64_t nanoseconds = (uint64_t)llround(number * 1e9);
    if ((double)nanoseconds / 1e9 != number) {
        return 1;
    }
    uint64_t fraction = nanoseconds % 1000000000;
    char digits[10] = ".000000000";
    size_t count = 9;
    while (count > 1 && fraction % 10 == 0) {
        fraction /= 10;
        count--;
    }
    for (size_t at = count; at > 0; at--) {
        digits[at] = (char)('0' + fraction % 10);
        fraction /= 10;
    }
    return put_unsigned(buffer, nanoseconds / 1000000000) < 0 ? -1 : put(buffer, digits, count + 1);
}

static char letter(uint32_t bits)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    return letters[bits & 63];
}

static int put_base64(Buffer *buffer, const unsigned char *bytes, size_t size)
{
    if (room(buffer, (size + 2) / 3 * 4 + 2) < 0) {
        return -1;
    }
    char *at = buffer->bytes + buffer->size;
    *at++ = '"';
    for (; size > 0; bytes += 3, at += 4) {
        uint32_t three = (uint32_t)bytes[0] << 16;
        three |= (size > 1 ? (uint32_t)bytes[1] << 8 : 0) | (size > 2 ? bytes[2] : 0);
        at[0] = letter(three >> 18);
        at[1] = letter(three >> 12);
        at[2] = size > 1 ? letter(three >> 6) : '=';
        at[3] = size > 2 ? letter(three) : '=';
        size -= size > 3 ? 3 : size;
    }
    *at++ = '"';
    buffer->size = (size_t)(at - buffer->bytes);
    return 0;
}

/* --- CRC-32, as zlib has it. Its tables are 8 KiB, which are not in the cache where a step is written. --- */

static uint32_t crc_by_halves(uint32_t crc, const unsigned char *bytes, size_t size)
{
    static const uint32_t of_half[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    while (size--) {
        crc ^= *bytes++;
        crc = crc >> 4 ^ of_half[crc & 15];
        crc = crc >> 4 ^ of_half[crc & 15];
    }
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Folding by multiplication without carries: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction", Intel 2009; the constants are its powers of x modulo the reflected polynomial of CRC-32.
 */
__attribute__((target("pclmul,sse4.1")))
static uint32_t crc_by_folding(uint32_t crc, const unsigned char *bytes, size_t size)
{
    const __m128i by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i folded = _mm_xor_si128(_mm_loadu_si128((const __m128i *)bytes), _mm_cvtsi32_si128((int)crc));
    for (bytes += 16, size -= 16; size >= 16; bytes += 16, size -= 16) {
        __m128i upper = _mm_clmulepi64_si128(folded, by_16, 0x11);
        folded = _mm_xor_si128(_mm_clmulepi64_si128(folded, by_16, 0x00), upper);
        folded = _mm_xor_si128(folded, _mm_loadu_si128((const __m128i *)bytes));
    }
    /* 128 bits to 64, and then to 32 by Barrett's reduction. */
    folded = _mm_xor_si128(_mm_clmulepi64_si128(folded, by_16, 0x10), _mm_srli_si128(folded, 8));
    __m128i rest = _mm_srli_si128(folded, 4);
    const __m128i by_8 = _mm_set_epi64x(0, 0x163cd6124);
    folded = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(folded, low), by_8, 0x00), rest);
    const __m128i reduction = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    rest = _mm_clmulepi64_si128(_mm_and_si128(folded, low), reduction, 0x10);
    rest = _mm_clmulepi64_si128(_mm_and_si128(rest, low), reduction, 0x00);
    crc = (uint32_t)_mm_extract_epi32(_mm_xor_si128(folded, rest), 1);
    return crc_by_halves(crc, bytes, size);
}

static int has_folding;

static void look_at_processor(void)
{
    __builtin_cpu_init();
    has_folding = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

static uint32_t crc_of(const unsigned char *bytes, size_t size)
{
    return ~(has_folding && size >= 16 ? crc_by_folding(~0u, bytes, size) : crc_by_halves(~0u, bytes, size));
}
#else
static void look_at_processor(void) {}

static uint32_t crc_of(const unsigned char *bytes, size_t size)
{
    return ~crc_by_halves(~0u, bytes, size);
}
#endif

static int put_sum(Buffer *buffer, PyObject *pages)
{
    Py_buffer ids;
    /* Contiguous, or an error. */
    if (PyObject_GetBuffer(pages, &ids, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    uint32_t sum = crc_of(ids.buf, (size_t)ids.len);
    PyBuffer_Release(&ids);
    return put_unsigned(buffer, sum);
}
