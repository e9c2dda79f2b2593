/* Turning page lists round. Optional: `python3 dev.py compile` builds it, `accounts.py` does without it, and a test compares
 * the two.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

PyDoc_STRVAR(reverse_doc, "Turn a list of page ids round, in place.");

static PyObject *reverse(PyObject *Py_UNUSED(module), PyObject *pages)
{
    Py_buffer ids;
    /* Contiguous, and changeable, or an error. */
    if (PyObject_GetBuffer(pages, &ids, PyBUF_WRITABLE) < 0) {
        return NULL;
    }
    if (ids.itemsize != sizeof(int32_t)) {
        PyBuffer_Release(&ids);
        PyErr_SetString(PyExc_TypeError, "expected page ids of 32 bits");
        return NULL;
    }
    int32_t *first = ids.buf;
    for (Py_ssize_t at = 0, other = ids.len / ids.itemsize - 1; at < other; at++, other--) {
        int32_t id = first[at];
        first[at] = first[other];
        first[other] = id;
    }
    PyBuffer_Release(&ids);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"reverse", reverse, METH_O, reverse_doc}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "native_pages", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native_pages(void)
{
    return PyModuleDef_Init(&definition);
}
