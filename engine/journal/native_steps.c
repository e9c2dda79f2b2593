/* Steps of a core as JSON, each at once, into one buffer. Optional: `python3 dev.py compile` builds it, a journal does
 * without it, and tests compare what both write, byte by byte.
 *
 * A step is written when it has just been made, while what it consists of is in the processor's caches; nothing is kept
 * of it. It reads the core, and writes nothing but its buffer, the list of evictions, which it empties, and the keys of
 * requests that have arrived.
 */

#include "native_step.h"
#include <stddef.h>
#include <structmember.h>

#define FULL_BYTES (1 << 20)

/* Leave a step to Python: with the error, where there was one. */
static PyObject *leave(StepWriter *self, PyObject *event, PyObject *given, PyObject *error, int failed)
{
    PyObject *kind = NULL, *raised = NULL, *trace = NULL;
    if (failed && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL;
    }
    if (failed) {
        PyErr_Fetch(&kind, &raised, &trace);
        PyErr_NormalizeException(&kind, &raised, &trace);
    }
    PyObject *told = PyObject_CallFunctionObjArgs(self->left, event, given, error, raised ? raised : Py_None, NULL);
    Py_XDECREF(kind);
    Py_XDECREF(raised);
    Py_XDECREF(trace);
    return told;
}

PyDoc_STRVAR(stepped_doc, "Write the step that the core has just made: an event, commands, and the class of an error.");

static PyObject *stepped(StepWriter *self, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *error = count == 3 ? arguments[2] : no_error;
    if (count < 2 || count > 3 || !PyList_CheckExact(arguments[1]) || !PyUnicode_CheckExact(error)) {
        PyErr_SetString(PyExc_TypeError, "expected an event, a list of commands and a string");
        return NULL;
    }
    size_t size = self->buffer.size;
    self->is_writing = 1;
    int status = put_step(self, arguments[0], arguments[1], error);
    self->is_writing = 0;
    if (status) {
        self->buffer.size = size;
        return leave(self, arguments[0], arguments[1], error, status < 0);
    }
    self->events++;
    self->steps++;
    if (self->steps == 1) {
        return PyObject_CallNoArgs(self->begun);
    }
    if (self->steps >= self->full_steps || self->buffer.size >= FULL_BYTES) {
        return PyObject_CallNoArgs(self->full);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(note_eviction_doc, "Note that a copy of a node's pages leaves the index: the node and the tier.");

static PyObject *note_eviction(StepWriter *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || !PyUnicode_CheckExact(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "expected a node and a tier");
        return NULL;
    }
    PyObject *pages = PyObject_GetAttr(arguments[0], arguments[1]);
    Py_buffer ids;
    if (pages == NULL || PyObject_GetBuffer(pages, &ids, PyBUF_SIMPLE) < 0) {
        Py_XDECREF(pages);
        return NULL;
    }
    PyObject *noted = Py_BuildValue("(OnI)", arguments[1], ids.len / ids.itemsize, crc_of(ids.buf, (size_t)ids.len));
    PyBuffer_Release(&ids);
    Py_DECREF(pages);
    int failed = noted == NULL ? -1 : PyList_Append(self->evicted, noted);
    Py_XDECREF(noted);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(take_doc, "Return the steps in the buffer as a JSON list, and how many there are, and empty it; None\n"
                       "while another thread writes a step.");

static PyObject *take(StepWriter *self, PyObject *Py_UNUSED(unused))
{
    if (self->is_writing) {
        Py_RETURN_NONE;
    }
    if (!self->steps) {
        return Py_BuildValue("(y#L)", "", (Py_ssize_t)0, 0LL);
    }
    if (put_character(&self->buffer, ']') < 0) {
        return NULL;
    }
    PyObject *taken = Py_BuildValue("(y#L)", self->buffer.bytes, (Py_ssize_t)self->buffer.size, self->steps);
    self->buffer.size -= 1;
    if (taken != NULL) {
        self->buffer.size = 0;
        self->steps = 0;
    }
    return taken;
}

/* --- Making one --- */

static int offset_of(PyTypeObject *type, PyObject *name, uint16_t *offset)
{
    PyObject *member = PyObject_GetAttr((PyObject *)type, name);
    if (member == NULL) {
        return -1;
    }
    Py_ssize_t found = 0;
    if (Py_IS_TYPE(member, &PyMemberDescr_Type) && PyType_IsSubtype(type, PyDescr_TYPE(member))) {
        found = ((PyMemberDescrObject *)member)->d_member->offset;
    }
    Py_DECREF(member);
    if (found <= 0 || found > UINT16_MAX) {
        PyErr_Format(PyExc_TypeError, "%S of %s is not a field of a struct", name, type->tp_name);
        return -1;
    }
    *offset = (uint16_t)found;
    return 0;
}

static void forget_kind(Kind *kind)
{
    for (uint16_t place = 0; place < kind->count; place++) {
        Py_DECREF(kind->fields[place].unwritten);
    }
    PyMem_Free(kind->fields);
    Py_XDECREF(kind->type);
    memset(kind, 0, sizeof(*kind));
}

PyDoc_STRVAR(add_kind_doc,
             "Make structs of a type known: all words around its values, how many bytes of them are head and tail;\n"
             "of each field its name, the bytes in front of its value, and the object with which it is left out;\n"
             "the field that names the request (None: no request); its keys (0: none, 1: they arrive, 2: they end).");

static PyObject *add_kind(StepWriter *self, PyObject *arguments)
{
    PyTypeObject *type;
    PyObject *fields, *request_id;
    const char *words;
    Py_ssize_t words_bytes;
    unsigned short head, tail, keys_are;
    if (!PyArg_ParseTuple(arguments, "O!y#HHO!OH", &PyType_Type, &type, &words, &words_bytes, &head, &tail,
                          &PyTuple_Type, &fields, &request_id, &keys_are)) {
        return NULL;
    }
    Kind *kind = find_kind(self, type);
    Py_ssize_t count = PyTuple_GET_SIZE(fields), left = words_bytes - head - tail;
    if (kind->type != NULL || self->kind_count >= KIND_SLOTS / 2 || count > UINT16_MAX || keys_are > KEYS_OF_END) {
        PyErr_SetString(PyExc_ValueError, "a kind is added twice, or there is too much of it");
        return NULL;
    }
    Kind made = {.type = type, .head = head, .tail = tail, .keys_are = keys_are};
    made.fields = PyMem_Malloc((size_t)count * sizeof(Field) + (size_t)words_bytes);
    if (made.fields == NULL) {
        return PyErr_NoMemory();
    }
    Py_INCREF(type);
    if (request_id != Py_None && offset_of(type, request_id, &made.request_id) < 0) {
        goto failed;
    }
    memcpy(made.fields + count, words, (size_t)words_bytes);
    for (; made.count < count; made.count++) {
        Field *field = &made.fields[made.count];
        PyObject *name, *unwritten;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(fields, made.count), "UHO", &name, &field->prefix, &unwritten) ||
            offset_of(type, name, &field->offset) < 0) {
            goto failed;
        }
        field->unwritten = Py_NewRef(unwritten);
        left -= field->prefix;
        if (keys_are != NO_KEYS && !PyUnicode_CompareWithASCIIString(name, "keys")) {
            made.keys = field->offset;
        }
    }
    if (left || (keys_are != NO_KEYS && !(made.keys && made.request_id))) {
        PyErr_SetString(PyExc_ValueError, "the words of a kind are not those of its fields, or it has no keys");
        goto failed;
    }
    *kind = made;
    self->kind_count++;
    Py_RETURN_NONE;
failed:
    forget_kind(&made);
    return NULL;
}

/* Every object that a writer holds, but for its kinds. */
#define EACH_HELD(DO) \
    DO(core) DO(requests) DO(evicted) DO(arrived) DO(states) DO(books) DO(encode) DO(begun) DO(full) DO(left) \
    DO(crowded) DO(array_type)

static int writer_init(StepWriter *self, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"core", "requests", "evicted", "arrived", "states", "books", "encode", "begun", "full",
                            "left", "crowded", "array_type", "books_every", "full_steps", "key_bytes", "pages_max",
                            "arrived_max", "with_tokens", NULL};
    PyObject *core, *requests, *evicted, *arrived, *states, *books, *encode, *begun, *full, *left, *crowded;
    PyObject *array_type;
    if (self->core != NULL) {
        PyErr_SetString(PyExc_TypeError, "a writer is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(
            arguments, named, "$OO!O!O!O!O!OOOOOO!LLnnnp", names, &core, &PyDict_Type, &requests, &PyList_Type, &evicted,
            &PyDict_Type, &arrived, &PyTuple_Type, &states, &PyTuple_Type, &books, &encode, &begun, &full, &left,
            &crowded, &PyType_Type, &array_type, &self->books_every, &self->full_steps, &self->key_bytes,
            &self->pages_max, &self->arrived_max, &self->with_tokens)) {
        return -1;
    }
    if (self->books_every < 1 || self->key_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "books_every and key_bytes are 1 at least");
        return -1;
    }
#define KEEP(name) self->name = Py_NewRef(name);
    EACH_HELD(KEEP)
    return 0;
}

static int writer_traverse(StepWriter *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
#define VISIT(name) Py_VISIT(self->name);
    EACH_HELD(VISIT)
    return 0;
}

static int writer_clear(StepWriter *self)
{
#define CLEAR(name) Py_CLEAR(self->name);
    EACH_HELD(CLEAR)
    return 0;
}

static void writer_dealloc(StepWriter *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    writer_clear(self);
    for (Kind *kind = self->kinds; kind < self->kinds + KIND_SLOTS; kind++) {
        forget_kind(kind);
    }
    PyMem_Free(self->buffer.bytes);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef writer_methods[] = {
    {"stepped", (PyCFunction)(void (*)(void))stepped, METH_FASTCALL, stepped_doc},
    {"note_eviction", (PyCFunction)(void (*)(void))note_eviction, METH_FASTCALL, note_eviction_doc},
    {"take", (PyCFunction)take, METH_NOARGS, take_doc},
    {"add_kind", (PyCFunction)add_kind, METH_VARARGS, add_kind_doc},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef writer_members[] = {
    {"events", T_LONGLONG, offsetof(StepWriter, events), 0, "The number of the next step."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot writer_slots[] = {
    {Py_tp_init, writer_init},       {Py_tp_traverse, writer_traverse}, {Py_tp_clear, writer_clear},
    {Py_tp_dealloc, writer_dealloc}, {Py_tp_methods, writer_methods},   {Py_tp_members, writer_members},
    {0, NULL},
};
static PyType_Spec writer_spec = {
    "tidekv.engine.journal.native_steps.StepWriter",
    sizeof(StepWriter),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    writer_slots,
};

static int fill(PyObject *module)
{
    look_at_processor();
    compare_hashes();
    name_moves = PyUnicode_InternFromString("moves");
    name_state = PyUnicode_InternFromString("state");
    no_error = PyUnicode_InternFromString("");
    no_digests = PyBytes_FromStringAndSize(NULL, 0);
    PyObject *type = PyType_FromModuleAndSpec(module, &writer_spec, NULL);
    if (name_moves == NULL || name_state == NULL || no_error == NULL || no_digests == NULL || type == NULL) {
        return -1;
    }
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "native_steps", NULL, 0, NULL, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_native_steps(void)
{
    return PyModuleDef_Init(&definition);
}
