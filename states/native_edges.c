/* Comparing a prompt with the keys of a node. Optional: `python3 dev.py compile` builds it, `edges.py` does without it,
 * and a test compares the two. It reads nothing but the bytes that it is given, and writes nothing.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <stdint.h>

#define LINE 64
#define HALF 32
#define STRIDE 512
/* Below this the plain comparison takes about as long. */
#define WIDE_MIN 8192

/* Two long runs are read at the pace of the second-level cache, a line in each cycle, by aligned loads of 32 bytes, many in
 * a row. Where the addresses agree by 32, what they load is compared as it is.
 */
__attribute__((target("avx2"))) static int same_even(const char *ours, const char *theirs, size_t size)
{
    size_t at = -(uintptr_t)ours & (HALF - 1);
    if (memcmp(ours, theirs, at)) {
        return 0;
    }
    for (; at + STRIDE <= size; at += STRIDE) {
        __m256i differs = _mm256_setzero_si256();
        for (size_t half = at; half < at + STRIDE; half += HALF) {
            __m256i other = _mm256_load_si256((const __m256i *)(theirs + half));
            differs = _mm256_or_si256(differs, _mm256_xor_si256(_mm256_load_si256((const __m256i *)(ours + half)), other));
        }
        if (!_mm256_testz_si256(differs, differs)) {
            return 0;
        }
    }
    return !memcmp(ours + at, theirs + at, size - at);
}

/* An aligned line, by its halves: whole lines by one load each, though fewer, take now the same time and now a third more,
 * as the prefetching has it.
 */
__attribute__((target("avx512f"), always_inline)) static inline __m512i line_at(const char *line)
{
    __m512i first = _mm512_castsi256_si512(_mm256_load_si256((const __m256i *)line));
    return _mm512_inserti64x4(first, _mm256_load_si256((const __m256i *)(line + HALF)), 1);
}

/* Where theirs begin `words` of 8 bytes further in their line than ours, each of our lines is the end of one of theirs and
 * the begin of the next: a load across two lines counts twice.
 */
#define SAME_ODD(name, words) \
    __attribute__((target("avx512f"))) static int name(const char *ours, const char *theirs, size_t size) \
    { \
        /* From the second line on: the line of theirs that this begins in is theirs from its begin. */ \
        size_t at = (-(uintptr_t)ours & (LINE - 1)) + LINE; \
        if (memcmp(ours, theirs, at)) { \
            return 0; \
        } \
        __m512i begun = line_at(theirs + at - 8 * (words)); \
        for (; at + STRIDE + LINE <= size; at += STRIDE) { \
            __m512i differs = _mm512_setzero_si512(); \
            for (size_t line = at; line < at + STRIDE; line += LINE) { \
                __m512i next = line_at(theirs + line + LINE - 8 * (words)); \
                __m512i other = _mm512_alignr_epi64(next, begun, words); \
                differs = _mm512_or_si512(differs, _mm512_xor_si512(line_at(ours + line), other)); \
                begun = next; \
            } \
            if (_mm512_test_epi64_mask(differs, differs)) { \
                return 0; \
            } \
        } \
        return !memcmp(ours + at, theirs + at, size - at); \
    }
SAME_ODD(same_two_on, 2)
SAME_ODD(same_six_on, 6)

static int has_halves, has_lines;

/* Bytes of Python begin at multiples of 16, and of a node and a prompt the same places are compared: by what else
 * the addresses may differ is nobody's case.
 */
static int same(const char *ours, const char *theirs, size_t size)
{
    if (size >= WIDE_MIN) {
        switch (((uintptr_t)theirs - (uintptr_t)ours) & (LINE - 1)) {
        case 0:
        case 32:
            if (has_halves) {
                return same_even(ours, theirs, size);
            }
            break;
        case 16:
            if (has_lines) {
                return same_two_on(ours, theirs, size);
            }
            break;
        case 48:
            if (has_lines) {
                return same_six_on(ours, theirs, size);
            }
            break;
        }
    }
    return !memcmp(ours, theirs, size);
}

static int look_at_processor(PyObject *Py_UNUSED(module))
{
    __builtin_cpu_init();
    has_halves = __builtin_cpu_supports("avx2") != 0;
    has_lines = __builtin_cpu_supports("avx512f") != 0;
    return 0;
}
#else
static int same(const char *ours, const char *theirs, size_t size)
{
    return !memcmp(ours, theirs, size);
}

static int look_at_processor(PyObject *Py_UNUSED(module))
{
    return 0;
}
#endif

PyDoc_STRVAR(begins_with_doc, "Tell whether `edge` is what `keys` go on with from byte `at` on.");

static PyObject *begins_with(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3 || !PyBytes_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "expected bytes, a buffer and an offset");
        return NULL;
    }
    Py_ssize_t at = PyNumber_AsSsize_t(arguments[2], PyExc_OverflowError);
    if (at < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "the offset is negative");
        }
        return NULL;
    }
    Py_buffer edge;
    /* Contiguous, or an error. */
    if (PyObject_GetBuffer(arguments[1], &edge, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_ssize_t left = PyBytes_GET_SIZE(arguments[0]) - at;
    int begins = edge.len <= left && same(PyBytes_AS_STRING(arguments[0]) + at, edge.buf, (size_t)edge.len);
    PyBuffer_Release(&edge);
    return PyBool_FromLong(begins);
}

static PyMethodDef methods[] = {
    {"begins_with", (PyCFunction)(void (*)(void))begins_with, METH_FASTCALL, begins_with_doc},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, look_at_processor}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "native_edges", NULL, 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native_edges(void)
{
    return PyModuleDef_Init(&definition);
}
