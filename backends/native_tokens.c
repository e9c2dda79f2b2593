/* Packing of int64 token ids in one pass. Optional: `python3 dev.py compile` builds it, `keys.py` does without it, and a
 * test compares the two. It reads nothing but the buffer that it is given, and writes nothing but the bytes it returns.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Copy the lower halves; the upper halves of all ids together show whether one had any bit there, or was negative. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
static uint64_t copy_halves(const char *restrict ids, char *restrict halves, Py_ssize_t count)
{
    uint64_t all = 0;
    for (Py_ssize_t place = 0; place < count; place++) {
        uint64_t id;
        /* No pointer to numbers: neither side need be aligned. Compilers make plain vector instructions of this. */
        memcpy(&id, ids + place * sizeof(id), sizeof(id));
        uint32_t half = (uint32_t)id;
        all |= id;
        memcpy(halves + place * sizeof(half), &half, sizeof(half));
    }
    return all >> 32;
}

PyDoc_STRVAR(halved_doc, "Return the lower halves of contiguous int64 numbers; None where one is not from 0 to 2**32 - 1.");

static PyObject *halved(PyObject *Py_UNUSED(module), PyObject *ids)
{
    Py_buffer numbers;
    /* Contiguous, or an error. */
    if (PyObject_GetBuffer(ids, &numbers, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (numbers.len % sizeof(uint64_t)) {
        PyBuffer_Release(&numbers);
        PyErr_SetString(PyExc_ValueError, "not a buffer of int64 numbers");
        return NULL;
    }
    Py_ssize_t count = numbers.len / (Py_ssize_t)sizeof(uint64_t);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint32_t));
    if (packed != NULL && copy_halves(numbers.buf, PyBytes_AS_STRING(packed), count)) {
        Py_SETREF(packed, Py_NewRef(Py_None));
    }
    PyBuffer_Release(&numbers);
    return packed;
}

static PyMethodDef methods[] = {{"halved", halved, METH_O, halved_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "native_tokens", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native_tokens(void)
{
    return PyModuleDef_Init(&definition);
}
