/* One step of a core as JSON, as recorder.py and witness.py have it. For native_steps.c alone.
 *
 * Most of what this costs is to find its own code and data again, which have left the caches since the last step. So
 * what is known of a kind of structs lies in one piece, and fields are read where they lie in an instance. A value that
 * is not plain is left to `encode`, in Python.
 */

#include "native_hash.h"
#include "native_json.h"

#define KIND_SLOTS 256 /* A power of two, several times the number of kinds. */
#define DEPTH_MAX 16

typedef struct {
    PyObject *unwritten; /* The field is left out where it is this object. Never NULL. */
    uint16_t offset;     /* Of the field, in an instance. */
    uint16_t prefix;     /* So many bytes of the kind's words stand before its value. */
} Field;

enum Keys { NO_KEYS, KEYS_OF_ARRIVAL, KEYS_OF_END };

typedef struct {
    PyTypeObject *type;
    Field *fields; /* Behind them, in the same piece of memory, all words: the head's, those of fields, the tail's. */
    uint16_t count, head, tail;
    uint16_t request_id, keys; /* Where these fields lie; 0: there is none. */
    uint16_t keys_are;
} Kind;

typedef struct {
    PyObject_HEAD
    PyObject *core, *requests, *evicted; /* What a step is read from. */
    PyObject *arrived; /* By request: the keys that have arrived, and their digests, or none of these. */
    PyObject *states;  /* Each state, and its JSON behind it. */
    PyObject *books, *encode, *begun, *full, *left, *crowded;
    PyObject *array_type;
    Buffer buffer;
    long long events, steps, books_every, full_steps;
    Py_ssize_t key_bytes, pages_max, arrived_max;
    int with_tokens, is_writing, kind_count;
    Kind kinds[KIND_SLOTS];
} StepWriter;

/* What stands for the keys of the event that is written. */
typedef struct {
    PyObject *keys;
    Py_ssize_t same_pages;
} Hidden;

static PyObject *name_moves, *name_state, *no_error, *no_digests;

static int put_value(StepWriter *self, PyObject *value, int depth);

static int put_other(StepWriter *self, PyObject *value)
{
    PyObject *json = PyObject_CallOneArg(self->encode, value);
    if (json == NULL) {
        return -1;
    }
    int failed = -1;
    if (PyBytes_Check(json)) {
        failed = put(&self->buffer, PyBytes_AS_STRING(json), (size_t)PyBytes_GET_SIZE(json));
    } else {
        PyErr_SetString(PyExc_TypeError, "what encode returned is no bytes");
    }
    Py_DECREF(json);
    return failed;
}

static int put_items(StepWriter *self, PyObject *items, int depth)
{
    int failed = put_character(&self->buffer, '[');
    /* Whatever `encode` may do to a list meanwhile. */
    for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(items) && !failed; place++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, place));
        failed = (place && put_character(&self->buffer, ',') < 0) || put_value(self, item, depth + 1) < 0;
        Py_DECREF(item);
    }
    return failed ? -1 : put_character(&self->buffer, ']');
}

static int put_dict(StepWriter *self, PyObject *value, int depth)
{
    PyObject *name, *entry;
    Py_ssize_t place = 0;
    char before = '{';
    while (PyDict_Next(value, &place, &name, &entry)) {
        if (!PyUnicode_Check(name)) {
            PyErr_SetString(PyExc_TypeError, "JSON knows names that are strings, and no others");
            return -1;
        }
        if (put_character(&self->buffer, before) < 0 || put_value(self, name, depth) < 0 ||
            put_character(&self->buffer, ':') < 0 || put_value(self, entry, depth + 1) < 0) {
            return -1;
        }
        before = ',';
    }
    return before == '{' ? put(&self->buffer, "{}", 2) : put_character(&self->buffer, '}');
}

static Kind *find_kind(StepWriter *self, PyTypeObject *type)
{
    size_t slot = ((uintptr_t)type >> 4 ^ (uintptr_t)type >> 12) & (KIND_SLOTS - 1);
    while (self->kinds[slot].type != NULL && self->kinds[slot].type != type) {
        slot = (slot + 1) & (KIND_SLOTS - 1);
    }
    return &self->kinds[slot];
}

static PyObject *field_at(PyObject *value, uint16_t offset)
{
    return *(PyObject **)((char *)value + offset);
}

static int put_keys(StepWriter *self, const Hidden *hidden)
{
    const unsigned char *keys = (const unsigned char *)PyBytes_AS_STRING(hidden->keys);
    Py_ssize_t skipped = hidden->same_pages * self->key_bytes, left = PyBytes_GET_SIZE(hidden->keys) - skipped;
    keys += skipped;
    if (self->with_tokens) {
        return put_base64(&self->buffer, keys, (size_t)left);
    }
    size_t pages = (size_t)(left / self->key_bytes);
    /* Put where their base64 will end at the latest, so that it never runs into what it still has to read. */
    size_t base64 = pages * DIGEST_BYTES * 4 / 3 + 8;
    if (room(&self->buffer, base64 + pages * DIGEST_BYTES) < 0) {
        return -1;
    }
    unsigned char *digests = (unsigned char *)self->buffer.bytes + self->buffer.size + base64;
    hash_pages(keys, pages, (size_t)self->key_bytes, digests);
    return put_base64(&self->buffer, digests, pages * DIGEST_BYTES);
}

static int is_unwritten(PyObject *entry, PyObject *unwritten)
{
    return entry == unwritten || (PyFloat_CheckExact(entry) && PyFloat_CheckExact(unwritten) &&
                                  isinf(PyFloat_AS_DOUBLE(entry)) && isinf(PyFloat_AS_DOUBLE(unwritten)));
}

static int put_struct(StepWriter *self, PyObject *value, const Kind *kind, const Hidden *hidden, int depth)
{
    const char *words = (const char *)(kind->fields + kind->count);
    if (put(&self->buffer, words, kind->head) < 0) {
        return -1;
    }
    words += kind->head;
    for (const Field *field = kind->fields; field < kind->fields + kind->count; words += field->prefix, field++) {
        PyObject *entry = field_at(value, field->offset);
        if (entry == NULL) {
            PyErr_SetString(PyExc_AttributeError, "a field without a value");
            return -1;
        }
        if (is_unwritten(entry, field->unwritten)) {
            continue;
        }
        if (put(&self->buffer, words, field->prefix) < 0 ||
            (hidden != NULL && field->offset == kind->keys ? put_keys(self, hidden)
                                                           : put_value(self, entry, depth + 1)) < 0) {
            return -1;
        }
    }
    return put(&self->buffer, words, kind->tail);
}

/* A state, whose JSON is known; 1 for anything else. */
static int put_member(StepWriter *self, PyObject *value)
{
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(self->states); place += 2) {
        if (PyTuple_GET_ITEM(self->states, place) == value) {
            PyObject *json = PyTuple_GET_ITEM(self->states, place + 1);
            return put(&self->buffer, PyBytes_AS_STRING(json), (size_t)PyBytes_GET_SIZE(json));
        }
    }
    return 1;
}

static int put_value(StepWriter *self, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    Buffer *buffer = &self->buffer;
    int status = 1;
    if (type == &PyLong_Type) {
        status = put_int(buffer, value);
    } else if (type == &PyUnicode_Type) {
        status = put_str(buffer, value);
    } else if (depth >= DEPTH_MAX) {
        status = 1;
    } else if (type == &PyList_Type || type == &PyTuple_Type) {
        status = put_items(self, value, depth);
    } else if (type == (PyTypeObject *)self->array_type) {
        status = put_sum(buffer, value);
    } else if (type == &PyFloat_Type) {
        status = put_float(buffer, value);
    } else if (value == Py_None) {
        status = put(buffer, "null", 4);
    } else if (type == &PyBool_Type) {
        status = value == Py_True ? put(buffer, "true", 4) : put(buffer, "false", 5);
    } else if (type == &PyDict_Type) {
        status = put_dict(self, value, depth);
    } else {
        const Kind *kind = find_kind(self, type);
        status = kind->type != NULL ? put_struct(self, value, kind, NULL, depth) : put_member(self, value);
    }
    return status > 0 ? put_other(self, value) : status;
}

static int put_attribute(StepWriter *self, PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) {
        return -1;
    }
    int failed = put_value(self, value, 0);
    Py_DECREF(value);
    return failed;
}

static int put_state(StepWriter *self, PyObject *event, const Kind *kind)
{
    PyObject *request = NULL;
    if (kind->request_id) {
        request = PyDict_GetItemWithError(self->requests, field_at(event, kind->request_id));
    }
    if (request == NULL) {
        return PyErr_Occurred() ? -1 : put(&self->buffer, "null", 4);
    }
    return put_attribute(self, request, name_state);
}

static int put_evicted(StepWriter *self)
{
    if (!PyList_GET_SIZE(self->evicted)) {
        return put(&self->buffer, "[]", 2);
    }
    return put_value(self, self->evicted, 0) < 0 ? -1 : PyList_SetSlice(self->evicted, 0, PY_SSIZE_T_MAX, NULL);
}

/* The last of a list of pages; -1: it is empty. */
static int put_last(StepWriter *self, PyObject *pages)
{
    Py_buffer ids;
    if (PyObject_GetBuffer(pages, &ids, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    int last = -1;
    if (ids.len) {
        memcpy(&last, (char *)ids.buf + ids.len - sizeof(last), sizeof(last));
    }
    PyBuffer_Release(&ids);
    return last < 0 ? put(&self->buffer, "-1", 2) : put_unsigned(&self->buffer, (uint64_t)last);
}

/* As `Witness.all_books` reads them from their places. */
static int put_books(StepWriter *self)
{
    if (self->events % self->books_every) {
        return put(&self->buffer, "[]", 2);
    }
    char before = '[';
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(self->books); at++, before = ',') {
        PyObject *place = PyTuple_GET_ITEM(self->books, at);
        if (put_character(&self->buffer, before) < 0) {
            return -1;
        }
        int failed = 0;
        if (PyList_CheckExact(place)) {
            for (Py_ssize_t count = 0; count < PyList_GET_SIZE(place) && !failed; count++) {
                failed = (count && put_character(&self->buffer, ',') < 0) ||
                         put_value(self, PyList_GET_ITEM(place, count), 0) < 0;
            }
        } else if (PyTuple_CheckExact(place)) {
            failed = put_attribute(self, PyTuple_GET_ITEM(place, 0), PyTuple_GET_ITEM(place, 1)) < 0;
        } else {
            failed = put_last(self, place) < 0;
        }
        if (failed) {
            return -1;
        }
    }
    return put_character(&self->buffer, ']');
}

static int begins_with(PyObject *keys, PyObject *first)
{
    Py_ssize_t size = PyBytes_GET_SIZE(first);
    return size <= PyBytes_GET_SIZE(keys) && !memcmp(PyBytes_AS_STRING(keys), PyBytes_AS_STRING(first), (size_t)size);
}

/* Find out what stands for the keys of an event; 1 where too many pages would have to be hashed. */
static int hide(StepWriter *self, PyObject *event, const Kind *kind, Hidden *hidden)
{
    PyObject *request_id = field_at(event, kind->request_id);
    PyObject *keys = hidden->keys = field_at(event, kind->keys);
    if (!PyBytes_CheckExact(keys) || PyBytes_GET_SIZE(keys) % self->key_bytes) {
        PyErr_SetString(PyExc_TypeError, "keys are no bytes, or no whole pages");
        return -1;
    }
    hidden->same_pages = 0;
    PyObject *had = NULL;
    if (kind->keys_are == KEYS_OF_END) {
        had = PyDict_GetItemWithError(self->arrived, request_id);
        if (had == NULL && PyErr_Occurred()) {
            return -1;
        }
        /* What was finished begins with what has arrived, whose pages are known and not written again. */
        if (had != NULL && begins_with(keys, PyTuple_GET_ITEM(had, 0))) {
            hidden->same_pages = PyBytes_GET_SIZE(PyTuple_GET_ITEM(had, 0)) / self->key_bytes;
        }
    }
    if (!self->with_tokens && PyBytes_GET_SIZE(keys) / self->key_bytes - hidden->same_pages > self->pages_max) {
        return 1;
    }
    if (kind->keys_are == KEYS_OF_END) {
        return had == NULL ? 0 : PyDict_DelItem(self->arrived, request_id);
    }
    if (PyDict_GET_SIZE(self->arrived) > self->arrived_max) {
        PyObject *most = PyObject_CallNoArgs(self->crowded);
        self->arrived_max = most == NULL ? -1 : PyLong_AsSsize_t(most);
        Py_XDECREF(most);
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    had = PyTuple_Pack(2, keys, no_digests);
    int failed = had == NULL ? -1 : PyDict_SetItem(self->arrived, request_id, had);
    Py_XDECREF(had);
    return failed;
}

static int put_step(StepWriter *self, PyObject *event, PyObject *given, PyObject *error)
{
    const Kind *kind = find_kind(self, Py_TYPE(event));
    Buffer *buffer = &self->buffer;
    Hidden hidden = {NULL, 0};
    if (kind->type == NULL) {
        return 1;
    }
    if (kind->keys_are != NO_KEYS) {
        int status = hide(self, event, kind, &hidden);
        if (status) {
            return status;
        }
    }
    if (put(buffer, self->steps ? ",[" : "[[", 2) < 0 || put_unsigned(buffer, (uint64_t)self->events) < 0 ||
        put_character(buffer, ',') < 0 || put_struct(self, event, kind, hidden.keys ? &hidden : NULL, 0) < 0 ||
        put_character(buffer, ',') < 0 || put_state(self, event, kind) < 0 || put(buffer, ",[", 2) < 0 ||
        put_attribute(self, self->core, name_moves) < 0 || put_character(buffer, ',') < 0 ||
        put_value(self, given, 0) < 0 || put_character(buffer, ',') < 0 || put_evicted(self) < 0 ||
        put_character(buffer, ',') < 0 || put_books(self) < 0 || put_character(buffer, ',') < 0 ||
        put_value(self, error, 0) < 0 || put(buffer, "],", 2) < 0 ||
        put_unsigned(buffer, (uint64_t)hidden.same_pages) < 0) {
        return -1;
    }
    return put_character(buffer, ']');
}
