/* orchestrator._seqstate: the C form of orchestrator/runtime/seqstate_ctypes.py, which is the
 * specification. This file knows Python and nothing else: it checks types and ranges, holds buffers,
 * releases the GIL, and turns outcomes into exceptions.
 *
 * Invariants:
 * - arguments are taken apart before the object is claimed: taking apart may run Python code;
 * - while claimed, `busy` is set, so a second thread or a re-entrant call is refused, and the
 *   buffers in use are held;
 * - nothing is kept outside the module's and the objects' own state.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "durable.h"
#include "sequences.h"

struct module_state {
    PyObject *invalid_argument;
    PyObject *backend_error;
    PyObject *pool_full;
    PyObject *state_refused;
    PyObject *sequence_abc;
    PyObject *mapping_abc;
    PyObject *identity_type;
    PyObject *header_type;
    PyObject *memory_type;
    struct checksum sum;
};

typedef struct {
    PyObject_HEAD
    struct sequences all;
    bool open;
    bool busy;
} Memory;

/* A Py_buffer or a copy made of Python ints; 4 * n_ids bytes. */
struct tokens {
    Py_buffer view;
    bool held;
    int32_t *copied;
    const uint8_t *bytes;
    size_t n_ids;
};

static struct PyModuleDef seqstate_module;

static struct module_state *state_of(PyObject *self)
{
    PyObject *module = PyType_GetModuleByDef(Py_TYPE(self), &seqstate_module);
    return module == NULL ? NULL : PyModule_GetState(module);
}

/* --- errors ------------------------------------------------------------------------------------ */

/* Sets the exception an outcome stands for; returns NULL. `path` names the file of a system fault. */
static PyObject *raise(const struct module_state *state, const struct outcome *outcome,
                       PyObject *path)
{
    switch (outcome->fault) {
    case FAULT_ARGUMENT:
        return PyErr_Format(state->invalid_argument, "%s", outcome->text);
    case FAULT_FULL:
        return PyErr_Format(state->pool_full, "%s", outcome->text);
    case FAULT_REFUSED: {
        /* N: takes the text over; it may quote bytes of a forged state that are no UTF-8 */
        PyObject *text =
            PyUnicode_DecodeUTF8(outcome->text, (Py_ssize_t)strlen(outcome->text), "replace");
        PyObject *refusal =
            PyObject_CallFunction(state->state_refused, "sN", outcome->field, text);
        if (refusal != NULL) {
            PyErr_SetObject(state->state_refused, refusal);
            Py_DECREF(refusal);
        }
        return NULL;
    }
    case FAULT_SYSTEM:
        errno = outcome->error_number;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    case FAULT_NO_MEMORY:
        return PyErr_NoMemory();
    case FAULT_BACKEND:
    case FAULT_NONE:
        break;
    }
    return PyErr_Format(state->backend_error, "%s", outcome->text);
}

static PyObject *none_or_raise(const struct module_state *state, bool done,
                               const struct outcome *outcome)
{
    if (!done) {
        return raise(state, outcome, NULL);
    }
    Py_RETURN_NONE;
}

/* "`name` must be `kind`, not <type of value>"; returns NULL. */
static PyObject *wrong_type(const char *name, const char *kind, PyObject *value)
{
    PyObject *type_name = PyType_GetName(Py_TYPE(value));
    if (type_name != NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be %s, not %U", name, kind, type_name);
        Py_DECREF(type_name);
    }
    return NULL;
}

/* --- arguments --------------------------------------------------------------------------------- */

/* The value as an exact int, a new reference; bools and everything that is no integer raise. */
static PyObject *as_index(PyObject *value, const char *name)
{
    PyObject *number = NULL;
    if (!PyBool_Check(value)) {
        number = PyNumber_Index(value);
        if (number != NULL || !PyErr_ExceptionMatches(PyExc_TypeError)) {
            return number;
        }
        PyErr_Clear();
    }
    return wrong_type(name, "an int", value);
}

/* -1 with an exception unless low <= value <= high. */
static int parse_number(const struct module_state *state, PyObject *value, const char *name,
                        int64_t low, int64_t high, int64_t *number)
{
    int overflow = 0;
    PyObject *index = as_index(value, name);
    if (index == NULL) {
        return -1;
    }
    *number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow != 0) {
        PyErr_Format(state->invalid_argument, "%s is beyond 64 bits, allowed are %lld to %lld",
                     name, (long long)low, (long long)high);
        return -1;
    }
    if (*number < low || *number > high) {
        PyErr_Format(state->invalid_argument, "%s is %lld, allowed are %lld to %lld", name,
                     (long long)*number, (long long)low, (long long)high);
        return -1;
    }
    return 0;
}

static int parse_sequence(const struct module_state *state, const Memory *self, PyObject *value,
                          const char *name, int32_t *sequence)
{
    int64_t number;
    if (parse_number(state, value, name, 0, self->all.n_sequences - 1, &number) < 0) {
        return -1;
    }
    *sequence = (int32_t)number;
    return 0;
}

static int parse_bool(PyObject *value, const char *name, bool *truth)
{
    if (!PyBool_Check(value)) {
        wrong_type(name, "a bool", value);
        return -1;
    }
    *truth = value == Py_True;
    return 0;
}

static int parse_address(const struct module_state *state, PyObject *value, const char *name,
                         uintptr_t *address)
{
    PyObject *index = as_index(value, name);
    if (index == NULL) {
        return -1;
    }
    unsigned long long number = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (number == 0 || (number == (unsigned long long)-1 && PyErr_Occurred())) {
        PyErr_Clear();
        PyErr_Format(state->invalid_argument, "%s is not an address", name);
        return -1;
    }
    *address = (uintptr_t)number;
    return 0;
}

/* --- buffers ----------------------------------------------------------------------------------- */

/* Takes a one-dimensional contiguous buffer of items of `itemsize` bytes; the caller releases it. */
static int take_buffer(const struct module_state *state, PyObject *value, const char *name,
                       Py_ssize_t itemsize, Py_buffer *view)
{
    if (!PyObject_CheckBuffer(value)) {
        wrong_type(name, "a buffer", value);
        return -1;
    }
    if (PyObject_GetBuffer(value, view, PyBUF_FULL_RO) < 0) {
        return -1;
    }
    if (view->ndim != 1 || !PyBuffer_IsContiguous(view, 'C')) {
        PyErr_Format(state->invalid_argument, "%s must be one-dimensional and contiguous", name);
    } else if (itemsize != 0 && view->itemsize != itemsize) {
        PyErr_Format(state->invalid_argument, "%s has items of %zd bytes, needed are %zd", name,
                     view->itemsize, itemsize);
    } else {
        return 0;
    }
    PyBuffer_Release(view);
    return -1;
}

static void release_tokens(struct tokens *tokens)
{
    if (tokens->held) {
        PyBuffer_Release(&tokens->view);
    }
    PyMem_Free(tokens->copied);
    memset(tokens, 0, sizeof *tokens);
}

/* True for "i" and "l" with or without a mark of native or little-endian order. */
static bool is_signed_format(const char *format)
{
    if (format == NULL) {
        return false;
    }
    format += strspn(format, "@=<");
    return strcmp(format, "i") == 0 || strcmp(format, "l") == 0;
}

static int take_packed_tokens(const struct module_state *state, PyObject *value,
                              struct tokens *tokens)
{
    if (take_buffer(state, value, "tokens", 0, &tokens->view) < 0) {
        return -1;
    }
    tokens->held = true;
    Py_buffer *view = &tokens->view;
    if (view->itemsize == 1 && view->len % 4 != 0) {
        PyErr_Format(state->invalid_argument, "tokens has %zd bytes, needed is a multiple of 4",
                     view->len);
        return -1;
    }
    if (view->itemsize != 1 && view->itemsize != 4) {
        PyErr_Format(state->invalid_argument, "tokens has items of %zd bytes, needed are 4",
                     view->itemsize);
        return -1;
    }
    if (view->itemsize == 4 && !is_signed_format(view->format)) {
        PyErr_SetString(state->invalid_argument, "tokens must hold signed 32-bit ints");
        return -1;
    }
    tokens->bytes = view->buf;
    tokens->n_ids = (size_t)view->len / 4;
    return 0;
}

static int take_listed_tokens(const struct module_state *state, PyObject *value,
                              struct tokens *tokens)
{
    int result = -1;
    /* A tuple of our own: converting an item may run Python code that changes the caller's list. */
    PyObject *items = PySequence_Tuple(value);
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t n_items = PyTuple_GET_SIZE(items);
    tokens->copied = PyMem_Malloc((size_t)(n_items > 0 ? n_items : 1) * sizeof(int32_t));
    if (tokens->copied == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < n_items; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        int64_t id = -1;
        if (PyLong_CheckExact(item)) {
            int overflow = 0;
            id = PyLong_AsLongLongAndOverflow(item, &overflow);
            id = overflow != 0 ? -1 : id;
        }
        if (id < 0 || id > INT32_MAX) {
            char name[40];
            PyOS_snprintf(name, sizeof name, "token %zd", i);
            if (parse_number(state, item, name, 0, INT32_MAX, &id) < 0) {
                goto end;
            }
        }
        tokens->copied[i] = (int32_t)id;
    }
    tokens->bytes = (const uint8_t *)tokens->copied;
    tokens->n_ids = (size_t)n_items;
    result = 0;
end:
    Py_DECREF(items);
    return result;
}

static int check_ids(const struct module_state *state, const struct tokens *tokens)
{
    if (tokens->n_ids == 0) {
        PyErr_SetString(state->invalid_argument, "tokens is empty, needed is at least 1");
        return -1;
    }
    for (size_t i = 0; i < tokens->n_ids; i++) {
        int32_t id;
        memcpy(&id, tokens->bytes + 4 * i, sizeof id);
        if (id < 0) {
            PyErr_Format(state->invalid_argument, "token %zu is %ld, allowed are 0 to %ld", i,
                         (long)id, (long)INT32_MAX);
            return -1;
        }
    }
    return 0;
}

/* Fills zeroed `tokens`; the caller releases them, after a failure too. */
static int take_tokens(const struct module_state *state, PyObject *value, struct tokens *tokens)
{
    int taken;
    if (PyObject_CheckBuffer(value)) {
        taken = take_packed_tokens(state, value, tokens);
    } else {
        int listed = PyList_Check(value) || PyTuple_Check(value);
        if (!listed && !PyUnicode_Check(value)) {
            listed = PyObject_IsInstance(value, state->sequence_abc);
        }
        if (listed < 0) {
            return -1;
        }
        if (!listed) {
            wrong_type("tokens", "a sequence of ints or an int32 buffer", value);
            return -1;
        }
        taken = take_listed_tokens(state, value, tokens);
    }
    return taken < 0 ? -1 : check_ids(state, tokens);
}

/* --- ownership --------------------------------------------------------------------------------- */

static int claim(const struct module_state *state, Memory *self)
{
    if (self->busy) {
        PyErr_SetString(state->backend_error,
                        "another call is running; one thread owns llama.cpp at a time");
        return -1;
    }
    if (!self->open) {
        PyErr_SetString(state->backend_error, "this memory is closed; its context is gone");
        return -1;
    }
    self->busy = true;
    return 0;
}

static void yield_claim(Memory *self)
{
    self->busy = false;
}

/* --- making ------------------------------------------------------------------------------------ */

static int parse_build(const struct module_state *state, PyObject *value, struct identity *identity)
{
    Py_ssize_t length = 0;
    if (!PyUnicode_Check(value)) {
        wrong_type("build", "a str", value);
        return -1;
    }
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            PyErr_Clear();
            PyErr_SetString(state->invalid_argument, "build is not valid text");
        }
        return -1;
    }
    if (length == 0 || length > BUILD_ROOM || strlen(text) != (size_t)length) {
        PyErr_Format(state->invalid_argument,
                     "build has %zd bytes, allowed are 1 to %d, no NUL", length, BUILD_ROOM);
        return -1;
    }
    memcpy(identity->build, text, (size_t)length);
    return 0;
}

static int parse_model(const struct module_state *state, PyObject *value, struct identity *identity)
{
    if (!PyBytes_Check(value)) {
        wrong_type("model", "bytes", value);
        return -1;
    }
    if (PyBytes_GET_SIZE(value) != MODEL_ROOM) {
        PyErr_Format(state->invalid_argument, "model has %zd bytes, a fingerprint has %d",
                     PyBytes_GET_SIZE(value), MODEL_ROOM);
        return -1;
    }
    memcpy(identity->model, PyBytes_AS_STRING(value), MODEL_ROOM);
    return 0;
}

static int parse_identity_number(const struct module_state *state, PyObject *value, int field,
                                 struct identity *identity)
{
    const char *name = identity_fields[field];
    int64_t number = 0;
    if (field == 2 || field == 3) {
        bool truth;
        if (parse_bool(value, name, &truth) < 0) {
            return -1;
        }
        number = truth;
    } else if (parse_number(state, value, name, field < 2 ? 1 : 0, INT32_MAX, &number) < 0) {
        return -1;
    }
    identity->number[field] = (uint32_t)number;
    return 0;
}

/* Reads the attributes of an Identity, the module's own or the twin's, into zeroed `identity`. */
static int parse_identity(const struct module_state *state, PyObject *value,
                          struct identity *identity)
{
    for (int i = -2; i < 6; i++) {
        const char *name = i == -2 ? "build" : i == -1 ? "model" : identity_fields[i];
        PyObject *field = PyObject_GetAttrString(value, name);
        if (field == NULL) {
            return -1;
        }
        int parsed = i == -2   ? parse_build(state, field, identity)
                     : i == -1 ? parse_model(state, field, identity)
                               : parse_identity_number(state, field, i, identity);
        Py_DECREF(field);
        if (parsed < 0) {
            return -1;
        }
    }
    return 0;
}

static int parse_kind(const struct module_state *state, PyObject *value, enum memory_kind *kind)
{
    if (!PyUnicode_Check(value)) {
        wrong_type("memory", "a str", value);
        return -1;
    }
    for (int candidate = MEMORY_ATTENTION; candidate <= MEMORY_RECURRENT; candidate++) {
        *kind = (enum memory_kind)candidate;
        if (PyUnicode_CompareWithASCIIString(value, memory_name(*kind)) == 0) {
            return 0;
        }
    }
    PyErr_SetString(state->invalid_argument,
                    "memory must be \"attention\", \"hybrid\" or \"recurrent\"");
    return -1;
}

/* One address out of the mapping. */
static int resolve(const struct module_state *state, PyObject *functions, const char *name,
                   uintptr_t *address)
{
    PyObject *key = PyUnicode_FromString(name);
    if (key == NULL) {
        return -1;
    }
    PyObject *value = PyObject_GetItem(functions, key);
    Py_DECREF(key);
    if (value == NULL) {
        if (PyErr_ExceptionMatches(PyExc_KeyError)) {
            PyErr_Clear();
            PyErr_Format(state->invalid_argument,
                         "functions lacks %s; this llama.cpp is not supported", name);
        }
        return -1;
    }
    int parsed = parse_address(state, value, name, address);
    Py_DECREF(value);
    return parsed;
}

static int resolve_calls(const struct module_state *state, PyObject *functions,
                         struct llama_calls *llama)
{
    const struct {
        const char *name;
        void *call; /* where the function's address goes */
    } wanted[] = {
        {"llama_get_memory", &llama->get_memory},
        {"llama_memory_seq_cp", &llama->seq_cp},
        {"llama_memory_seq_rm", &llama->seq_rm},
        {"llama_memory_seq_pos_min", &llama->pos_min},
        {"llama_memory_seq_pos_max", &llama->pos_max},
        {"llama_memory_clear", &llama->memory_clear},
        {"llama_state_seq_get_size_ext", &llama->get_size},
        {"llama_state_seq_get_data_ext", &llama->get_data},
        {"llama_state_seq_set_data_ext", &llama->set_data},
    };
    int is_mapping = PyObject_IsInstance(functions, state->mapping_abc);
    if (is_mapping < 0) {
        return -1;
    }
    if (!is_mapping) {
        wrong_type("functions", "a mapping", functions);
        return -1;
    }
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        uintptr_t address;
        if (resolve(state, functions, wanted[i].name, &address) < 0) {
            return -1;
        }
        memcpy(wanted[i].call, &address, sizeof address);
    }
    return 0;
}

static PyObject *Memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"functions", "context", "n_sequences", "memory", "identity", NULL};
    PyObject *functions, *context, *n_sequences, *memory, *identity;
    struct sequences all = {0};
    struct outcome outcome = {0};
    int64_t number;
    uintptr_t address;
    bool opened;

    PyObject *module = PyType_GetModuleByDef(type, &seqstate_module);
    if (module == NULL) {
        return NULL;
    }
    const struct module_state *state = PyModule_GetState(module);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO$OOO:SequenceMemory", names, &functions,
                                     &context, &n_sequences, &memory, &identity)) {
        return NULL;
    }
    if (parse_kind(state, memory, &all.kind) < 0 ||
        parse_number(state, n_sequences, "n_sequences", 1, 256, &number) < 0 ||
        parse_identity(state, identity, &all.identity) < 0 ||
        parse_address(state, context, "context", &address) < 0 ||
        resolve_calls(state, functions, &all.llama) < 0) {
        return NULL;
    }
    all.sum = &state->sum;
    all.context = (void *)address;
    all.n_sequences = (int32_t)number;
    Py_BEGIN_ALLOW_THREADS
    opened = sequences_open(&all, &outcome);
    Py_END_ALLOW_THREADS
    if (!opened) {
        sequences_release(&all);
        return raise(state, &outcome, NULL);
    }
    Memory *self = (Memory *)type->tp_alloc(type, 0);
    if (self == NULL) {
        sequences_release(&all);
        return NULL;
    }
    self->all = all;
    self->open = true;
    return (PyObject *)self;
}

static int Memory_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void Memory_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    sequences_release(&((Memory *)self)->all);
    type->tp_free(self);
    Py_DECREF(type);
}

/* --- methods ----------------------------------------------------------------------------------- */

PyDoc_STRVAR(close_doc, "close()\n--\n\nForget the context; every later call raises BackendError.");

static PyObject *Memory_close(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    if (state == NULL) {
        return NULL;
    }
    if (!self->open) {
        Py_RETURN_NONE;
    }
    if (claim(state, self) < 0) {
        return NULL;
    }
    self->open = false;
    yield_claim(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(positions_doc, "positions(sequence)\n--\n\n"
                            "First and last position held, -1 when empty.");

static PyObject *Memory_positions(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id;
    int32_t sequence;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O:positions", names, &id) ||
        parse_sequence(state, self, id, "sequence", &sequence) < 0 || claim(state, self) < 0) {
        return NULL;
    }
    /* a look at the metadata: shorter than giving up the GIL */
    struct positions held = sequences_positions(&self->all, sequence);
    yield_claim(self);
    return Py_BuildValue("(ii)", (int)held.low, (int)held.high);
}

PyDoc_STRVAR(copy_doc, "copy(source, target, length=None)\n--\n\n"
                       "Let the empty target share what source holds, or its rows [0, length) only.");

static PyObject *Memory_copy(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"source", "target", "length", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *from, *to, *end = Py_None;
    int32_t source, target;
    int64_t length = -1;
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:copy", names, &from, &to, &end) ||
        parse_sequence(state, self, from, "source", &source) < 0 ||
        parse_sequence(state, self, to, "target", &target) < 0 ||
        (end != Py_None && parse_number(state, end, "length", 1, INT32_MAX, &length) < 0) ||
        claim(state, self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    done = sequences_copy(&self->all, source, target, length, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    return none_or_raise(state, done, &outcome);
}

typedef bool one_sequence(struct sequences *, int32_t, struct outcome *);

/* The common form of clear, strip and scrub. */
static PyObject *on_one_sequence(PyObject *object, PyObject *args, PyObject *kwargs,
                                 const char *format, one_sequence *act)
{
    static char *names[] = {"sequence", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id;
    int32_t sequence;
    struct outcome outcome = {0};
    bool done;

    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &id) ||
        parse_sequence(state, self, id, "sequence", &sequence) < 0) {
        return NULL;
    }
    if (act == sequences_strip && self->all.kind != MEMORY_HYBRID) {
        return PyErr_Format(state->invalid_argument,
                            "only hybrid memory can be stripped, this is %s",
                            memory_name(self->all.kind));
    }
    if (claim(state, self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    done = act(&self->all, sequence, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    return none_or_raise(state, done, &outcome);
}

PyDoc_STRVAR(clear_doc, "clear(sequence)\n--\n\nEmpty one sequence.");

static PyObject *Memory_clear(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return on_one_sequence(object, args, kwargs, "O:clear", sequences_clear);
}

PyDoc_STRVAR(strip_doc, "strip(sequence)\n--\n\n"
                        "Drop the recurrent state of a hybrid sequence and keep its rows.");

static PyObject *Memory_strip(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return on_one_sequence(object, args, kwargs, "O:strip", sequences_strip);
}

PyDoc_STRVAR(scrub_doc, "scrub(sequence)\n--\n\n"
                        "Empty a sequence whose state holds NaN, so that its cell poisons nobody.");

static PyObject *Memory_scrub(PyObject *object, PyObject *args, PyObject *kwargs)
{
    return on_one_sequence(object, args, kwargs, "O:scrub", sequences_scrub);
}

PyDoc_STRVAR(clear_all_doc, "clear_all()\n--\n\n"
                            "Empty every sequence and overwrite the memory with zeros.");

static PyObject *Memory_clear_all(PyObject *object, PyObject *Py_UNUSED(ignored))
{
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    struct outcome outcome = {0};
    bool done;

    if (state == NULL || claim(state, self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    done = sequences_clear_all(&self->all, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    return none_or_raise(state, done, &outcome);
}

PyDoc_STRVAR(cut_doc, "cut(sequence, length)\n--\n\n"
                      "Keep the rows [0, length) and drop those above.");

static PyObject *Memory_cut(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "length", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id, *end;
    int32_t sequence;
    int64_t length;
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO:cut", names, &id, &end) ||
        parse_sequence(state, self, id, "sequence", &sequence) < 0 ||
        parse_number(state, end, "length", 0, INT32_MAX, &length) < 0 || claim(state, self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    done = sequences_cut(&self->all, sequence, (int32_t)length, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    return none_or_raise(state, done, &outcome);
}

PyDoc_STRVAR(state_size_doc, "state_size(sequence, *, rows=True)\n--\n\n"
                             "Bytes that save would give now, header and token ids included.");

static PyObject *Memory_state_size(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "rows", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id, *with_rows = Py_True;
    int32_t sequence;
    bool rows;
    struct outcome outcome = {0};
    size_t size;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O:state_size", names, &id, &with_rows) ||
        parse_sequence(state, self, id, "sequence", &sequence) < 0 ||
        parse_bool(with_rows, "rows", &rows) < 0 || claim(state, self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    size = sequences_state_size(&self->all, sequence, rows, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    return size == 0 ? raise(state, &outcome, NULL) : PyLong_FromSize_t(size);
}

/* --- saving ------------------------------------------------------------------------------------ */

/* Takes the arguments that all forms of save share. The caller releases the tokens, after a failure
 * too. */
static int take_save(const struct module_state *state, const Memory *self, PyObject *const value[3],
                     struct tokens *tokens, struct save *save)
{
    if (parse_sequence(state, self, value[0], "sequence", &save->sequence) < 0 ||
        take_tokens(state, value[1], tokens) < 0 || parse_bool(value[2], "rows", &save->rows) < 0) {
        return -1;
    }
    save->fed = tokens->bytes;
    save->n_fed = tokens->n_ids;
    return 0;
}

PyDoc_STRVAR(save_doc, "save(sequence, tokens, *, rows=True)\n--\n\n"
                       "The sequence as bytes that a restore can verify.");

static PyObject *Memory_save(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "tokens", "rows", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *value[3] = {NULL, NULL, Py_True};
    PyObject *blob = NULL;
    struct tokens tokens = {0};
    struct save save = {0};
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O:save", names, &value[0], &value[1],
                                     &value[2]) ||
        take_save(state, self, value, &tokens, &save) < 0 || claim(state, self) < 0) {
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    done = sequences_save_size(&self->all, &save, &outcome);
    Py_END_ALLOW_THREADS
    if (done) {
        blob = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)save.size);
    }
    if (blob != NULL) {
        uint8_t *room = (uint8_t *)PyBytes_AS_STRING(blob);
        Py_BEGIN_ALLOW_THREADS
        done = sequences_save(&self->all, &save, room, &outcome);
        Py_END_ALLOW_THREADS
    }
    yield_claim(self);
    if (!done) {
        Py_CLEAR(blob);
        raise(state, &outcome, NULL);
    }
end:
    release_tokens(&tokens);
    return blob;
}

PyDoc_STRVAR(save_into_doc, "save_into(sequence, tokens, buffer, *, rows=True)\n--\n\n"
                            "As save, into a writable buffer; the number of bytes written.");

static PyObject *Memory_save_into(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "tokens", "buffer", "rows", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *value[3] = {NULL, NULL, Py_True};
    PyObject *buffer, *result = NULL;
    Py_buffer view = {0};
    struct tokens tokens = {0};
    struct save save = {0};
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$O:save_into", names, &value[0], &value[1],
                                     &buffer, &value[2]) ||
        take_save(state, self, value, &tokens, &save) < 0 ||
        take_buffer(state, buffer, "buffer", 1, &view) < 0) {
        goto end;
    }
    if (view.readonly) {
        PyErr_SetString(state->invalid_argument, "buffer is read-only, needed is a writable one");
        goto end;
    }
    if (claim(state, self) < 0) {
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    done = sequences_save_size(&self->all, &save, &outcome);
    if (done && (size_t)view.len < save.size) {
        done = fail(&outcome, FAULT_ARGUMENT, NULL, "buffer has %zd bytes, the state needs %zu",
                    view.len, save.size);
    }
    done = done && sequences_save(&self->all, &save, view.buf, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    result = done ? PyLong_FromSize_t(save.size) : raise(state, &outcome, NULL);
end:
    PyBuffer_Release(&view);
    release_tokens(&tokens);
    return result;
}

/* Saves to a buffer of its own and from there to the file; runs without the GIL. */
static bool save_to_file(struct sequences *all, struct save *save, const char *path,
                         struct outcome *outcome)
{
    if (!sequences_save_size(all, save, outcome)) {
        return false;
    }
    uint8_t *blob = malloc(save->size);
    if (blob == NULL) {
        return fail(outcome, FAULT_NO_MEMORY, NULL, "no memory for a state");
    }
    bool done = sequences_save(all, save, blob, outcome) &&
                durable_replace(path, blob, save->size, outcome);
    free(blob);
    return done;
}

PyDoc_STRVAR(save_file_doc, "save_file(sequence, tokens, path, *, rows=True)\n--\n\n"
                            "As save, into a file that is replaced whole or not at all; its size.");

static PyObject *Memory_save_file(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "tokens", "path", "rows", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *value[3] = {NULL, NULL, Py_True};
    PyObject *path, *encoded = NULL, *result = NULL;
    struct tokens tokens = {0};
    struct save save = {0};
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$O:save_file", names, &value[0], &value[1],
                                     &path, &value[2]) ||
        take_save(state, self, value, &tokens, &save) < 0 ||
        !PyUnicode_FSConverter(path, &encoded) || claim(state, self) < 0) {
        goto end;
    }
    const char *name = PyBytes_AS_STRING(encoded);
    Py_BEGIN_ALLOW_THREADS
    done = save_to_file(&self->all, &save, name, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    result = done ? PyLong_FromSize_t(save.size) : raise(state, &outcome, path);
end:
    Py_XDECREF(encoded);
    release_tokens(&tokens);
    return result;
}

/* --- saving in slices -------------------------------------------------------------------------- */

static int parse_position(const struct module_state *state, PyObject *value, const char *name,
                          uint32_t *position)
{
    int64_t number;
    if (parse_number(state, value, name, 0, INT32_MAX, &number) < 0) {
        return -1;
    }
    *position = (uint32_t)number;
    return 0;
}

PyDoc_STRVAR(save_rows_doc, "save_rows(sequence, start, end, tokens, *, scratch)\n--\n\n"
                            "The rows of positions [start, end) as bytes that restore_rows can "
                            "verify.");

static PyObject *Memory_save_rows(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "start", "end", "tokens", "scratch", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id, *first, *last, *ids, *spare, *blob = NULL;
    struct tokens tokens = {0};
    struct slice slice = {0};
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO$O:save_rows", names, &id, &first, &last,
                                     &ids, &spare) ||
        parse_sequence(state, self, id, "sequence", &slice.sequence) < 0 ||
        parse_position(state, first, "start", &slice.start) < 0 ||
        parse_position(state, last, "end", &slice.end) < 0 ||
        take_tokens(state, ids, &tokens) < 0 ||
        parse_sequence(state, self, spare, "scratch", &slice.scratch) < 0 ||
        claim(state, self) < 0) {
        goto end;
    }
    slice.fed = tokens.bytes;
    slice.n_fed = tokens.n_ids;
    Py_BEGIN_ALLOW_THREADS
    done = sequences_slice_begin(&self->all, &slice, &outcome);
    Py_END_ALLOW_THREADS
    if (done) {
        blob = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)slice.size);
        uint8_t *room = blob == NULL ? NULL : (uint8_t *)PyBytes_AS_STRING(blob);
        Py_BEGIN_ALLOW_THREADS
        done = sequences_slice_end(&self->all, &slice, room, &outcome);
        Py_END_ALLOW_THREADS
    }
    yield_claim(self);
    if (!done) {
        Py_CLEAR(blob);
        PyErr_Clear(); /* what went wrong with the memory matters more than a want of room */
        raise(state, &outcome, NULL);
    }
end:
    release_tokens(&tokens);
    return blob;
}

/* --- restoring --------------------------------------------------------------------------------- */

PyDoc_STRVAR(restore_doc, "restore(sequence, blob, tokens, *, rows=None)\n--\n\n"
                          "Bring a saved state back; the number of tokens the sequence then holds.");

static PyObject *Memory_restore(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "blob", "tokens", "rows", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id, *blob, *ids, *with_rows = Py_None, *result = NULL;
    int32_t sequence;
    bool rows = false;
    Py_buffer view = {0};
    struct tokens tokens = {0};
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOO|$O:restore", names, &id, &blob, &ids,
                                     &with_rows) ||
        parse_sequence(state, self, id, "sequence", &sequence) < 0 ||
        take_tokens(state, ids, &tokens) < 0 || take_buffer(state, blob, "blob", 1, &view) < 0 ||
        (with_rows != Py_None && parse_bool(with_rows, "rows", &rows) < 0) ||
        claim(state, self) < 0) {
        goto end;
    }
    const struct restore given = {
        .blob = view.buf,
        .n_bytes = (size_t)view.len,
        .fed = tokens.bytes,
        .n_fed = tokens.n_ids,
        .form = with_rows == Py_None ? -1 : rows ? FORM_WHOLE : FORM_STATE,
    };
    Py_BEGIN_ALLOW_THREADS
    done = sequences_restore(&self->all, sequence, &given, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    result = done ? PyLong_FromSize_t(tokens.n_ids) : raise(state, &outcome, NULL);
end:
    PyBuffer_Release(&view);
    release_tokens(&tokens);
    return result;
}

PyDoc_STRVAR(restore_rows_doc, "restore_rows(sequence, start, blob, tokens, *, scratch)\n--\n\n"
                               "Append a slice to a sequence of start rows; the number of rows it "
                               "then holds.");

static PyObject *Memory_restore_rows(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "start", "blob", "tokens", "scratch", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id, *first, *blob, *ids, *spare, *result = NULL;
    int32_t sequence, scratch;
    uint32_t start, n_held = 0;
    Py_buffer view = {0};
    struct tokens tokens = {0};
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO$O:restore_rows", names, &id, &first,
                                     &blob, &ids, &spare) ||
        parse_sequence(state, self, id, "sequence", &sequence) < 0 ||
        parse_position(state, first, "start", &start) < 0 || take_tokens(state, ids, &tokens) < 0 ||
        take_buffer(state, blob, "blob", 1, &view) < 0 ||
        parse_sequence(state, self, spare, "scratch", &scratch) < 0 || claim(state, self) < 0) {
        goto end;
    }
    const struct restore given = {
        .blob = view.buf,
        .n_bytes = (size_t)view.len,
        .fed = tokens.bytes,
        .n_fed = tokens.n_ids,
    };
    Py_BEGIN_ALLOW_THREADS
    done = sequences_append(&self->all, sequence, scratch, start, &given, &n_held, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    result = done ? PyLong_FromUnsignedLong(n_held) : raise(state, &outcome, NULL);
end:
    PyBuffer_Release(&view);
    release_tokens(&tokens);
    return result;
}

/* Reads a saved state whole, to be freed by the caller, after a look at its header. NULL after a
 * failure, a refusal included. Runs without the GIL. */
static uint8_t *read_state(const char *path, size_t *n_bytes, struct outcome *outcome)
{
    struct header header;
    uint8_t head[HEADER_LENGTH];
    uint8_t *blob = NULL;
    uint64_t size = 0;
    size_t n_head;

    int file = durable_open(path, &size, outcome);
    if (file < 0) {
        return NULL;
    }
    n_head = size < HEADER_LENGTH ? (size_t)size : HEADER_LENGTH;
    if (!durable_read(file, head, n_head, outcome) || !blob_frame(&header, head, size, outcome)) {
        goto end;
    }
    blob = malloc((size_t)size);
    if (blob == NULL) {
        fail(outcome, FAULT_NO_MEMORY, NULL, "no memory for a state");
        goto end;
    }
    memcpy(blob, head, n_head);
    if (!durable_read(file, blob + n_head, (size_t)size - n_head, outcome)) {
        free(blob);
        blob = NULL;
    }
    *n_bytes = (size_t)size;
end:
    close(file);
    return blob;
}

/* Restores from a file; a refusal of its header empties the sequence as any refusal does. */
static bool restore_from_file(struct sequences *all, int32_t sequence, const char *path,
                              const struct tokens *tokens, struct outcome *outcome)
{
    size_t n_bytes = 0;
    uint8_t *blob = read_state(path, &n_bytes, outcome);
    if (blob == NULL) {
        if (outcome->fault == FAULT_REFUSED) {
            sequences_clear(all, sequence, outcome);
        }
        return false;
    }
    const struct restore given = {
        .blob = blob,
        .n_bytes = n_bytes,
        .fed = tokens->bytes,
        .n_fed = tokens->n_ids,
        .form = -1,
    };
    bool done = sequences_restore(all, sequence, &given, outcome);
    free(blob);
    return done;
}

PyDoc_STRVAR(restore_file_doc, "restore_file(sequence, path, tokens)\n--\n\n"
                               "As restore, from a file. An OSError leaves the sequence as it was.");

static PyObject *Memory_restore_file(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sequence", "path", "tokens", NULL};
    Memory *self = (Memory *)object;
    const struct module_state *state = state_of(object);
    PyObject *id, *path, *ids, *encoded = NULL, *result = NULL;
    int32_t sequence;
    struct tokens tokens = {0};
    struct outcome outcome = {0};
    bool done;

    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOO:restore_file", names, &id, &path, &ids) ||
        parse_sequence(state, self, id, "sequence", &sequence) < 0 ||
        take_tokens(state, ids, &tokens) < 0 || !PyUnicode_FSConverter(path, &encoded) ||
        claim(state, self) < 0) {
        goto end;
    }
    const char *name = PyBytes_AS_STRING(encoded);
    Py_BEGIN_ALLOW_THREADS
    done = restore_from_file(&self->all, sequence, name, &tokens, &outcome);
    Py_END_ALLOW_THREADS
    yield_claim(self);
    result = done ? PyLong_FromSize_t(tokens.n_ids) : raise(state, &outcome, path);
end:
    Py_XDECREF(encoded);
    release_tokens(&tokens);
    return result;
}

/* --- describing -------------------------------------------------------------------------------- */

static PyObject *build_identity(const struct module_state *state, const struct identity *identity)
{
    const uint32_t *number = identity->number;
    PyObject *build =
        PyUnicode_DecodeUTF8(identity->build, (Py_ssize_t)strlen(identity->build), "replace");
    return PyObject_CallFunction(state->identity_type, "Ny#IINNii", build,
                                 (const char *)identity->model, (Py_ssize_t)MODEL_ROOM, number[0],
                                 number[1], PyBool_FromLong(number[2] != 0),
                                 PyBool_FromLong(number[3] != 0), (int)number[4], (int)number[5]);
}

static PyObject *build_header(const struct module_state *state, const struct header *header,
                              const uint8_t *blob)
{
    PyObject *identity = build_identity(state, &header->identity);
    if (identity == NULL) {
        return NULL;
    }
    return PyObject_CallFunction(
        state->header_type, "IssNIIKKIy#", header->version, form_name(header->form),
        memory_name(header->memory), identity, header->start, header->n_tokens,
        (unsigned long long)header->token_hash, (unsigned long long)header->payload_length,
        header->checksum, (const char *)blob + HEADER_LENGTH, (Py_ssize_t)header_n_ids(header) * 4);
}

PyDoc_STRVAR(describe_doc, "describe(blob)\n--\n\n"
                           "What a saved state says of itself, after every byte was verified.");

static PyObject *describe(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"blob", NULL};
    const struct module_state *state = PyModule_GetState(module);
    PyObject *blob, *result = NULL;
    Py_buffer view = {0};
    struct header header;
    struct outcome outcome = {0};
    bool verified;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:describe", names, &blob) ||
        take_buffer(state, blob, "blob", 1, &view) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    verified = blob_verify(&header, &state->sum, view.buf, (size_t)view.len, &outcome);
    Py_END_ALLOW_THREADS
    result = verified ? build_header(state, &header, view.buf) : raise(state, &outcome, NULL);
    PyBuffer_Release(&view);
    return result;
}

/* --- the module -------------------------------------------------------------------------------- */

#define WITH_KEYWORDS(function) (PyCFunction)(void (*)(void)) function, METH_VARARGS | METH_KEYWORDS

static PyMethodDef memory_methods[] = {
    {"close", Memory_close, METH_NOARGS, close_doc},
    {"positions", WITH_KEYWORDS(Memory_positions), positions_doc},
    {"copy", WITH_KEYWORDS(Memory_copy), copy_doc},
    {"clear", WITH_KEYWORDS(Memory_clear), clear_doc},
    {"clear_all", Memory_clear_all, METH_NOARGS, clear_all_doc},
    {"cut", WITH_KEYWORDS(Memory_cut), cut_doc},
    {"strip", WITH_KEYWORDS(Memory_strip), strip_doc},
    {"scrub", WITH_KEYWORDS(Memory_scrub), scrub_doc},
    {"state_size", WITH_KEYWORDS(Memory_state_size), state_size_doc},
    {"save", WITH_KEYWORDS(Memory_save), save_doc},
    {"save_into", WITH_KEYWORDS(Memory_save_into), save_into_doc},
    {"save_file", WITH_KEYWORDS(Memory_save_file), save_file_doc},
    {"save_rows", WITH_KEYWORDS(Memory_save_rows), save_rows_doc},
    {"restore", WITH_KEYWORDS(Memory_restore), restore_doc},
    {"restore_rows", WITH_KEYWORDS(Memory_restore_rows), restore_rows_doc},
    {"restore_file", WITH_KEYWORDS(Memory_restore_file), restore_file_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(memory_doc,
             "SequenceMemory(functions, context, *, n_sequences, memory, identity)\n--\n\n"
             "The sequences of one llama.cpp context.");

static PyType_Slot memory_slots[] = {
    {Py_tp_doc, (void *)memory_doc},
    {Py_tp_new, Memory_new},
    {Py_tp_dealloc, Memory_dealloc},
    {Py_tp_traverse, Memory_traverse},
    {Py_tp_methods, memory_methods},
    {0, NULL},
};

static PyType_Spec memory_spec = {
    .name = "orchestrator._seqstate.SequenceMemory",
    .basicsize = sizeof(Memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = memory_slots,
};

static PyMethodDef module_methods[] = {
    {"describe", WITH_KEYWORDS(describe), describe_doc},
    {NULL, NULL, 0, NULL},
};

/* An attribute of another module, a new reference. */
static PyObject *fetch(const char *module_name, const char *attribute)
{
    PyObject *module = PyImport_ImportModule(module_name);
    if (module == NULL) {
        return NULL;
    }
    PyObject *value = PyObject_GetAttrString(module, attribute);
    Py_DECREF(module);
    return value;
}

/* A namedtuple type that names this module as its home. */
static PyObject *make_record(PyObject *module, const char *name, const char *fields)
{
    PyObject *record = NULL;
    PyObject *namedtuple = fetch("collections", "namedtuple");
    PyObject *home = PyModule_GetNameObject(module);
    if (namedtuple != NULL && home != NULL) {
        record = PyObject_CallFunction(namedtuple, "ss", name, fields);
    }
    if (record != NULL && PyObject_SetAttrString(record, "__module__", home) < 0) {
        Py_CLEAR(record);
    }
    Py_XDECREF(home);
    Py_XDECREF(namedtuple);
    return record;
}

static int fetch_names(struct module_state *state)
{
    const struct {
        PyObject **place;
        const char *module;
        const char *attribute;
    } wanted[] = {
        {&state->invalid_argument, "orchestrator.errors", "InvalidArgument"},
        {&state->backend_error, "orchestrator.errors", "BackendError"},
        {&state->pool_full, "orchestrator.errors", "PoolFull"},
        {&state->state_refused, "orchestrator.errors", "StateRefused"},
        {&state->sequence_abc, "collections.abc", "Sequence"},
        {&state->mapping_abc, "collections.abc", "Mapping"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        *wanted[i].place = fetch(wanted[i].module, wanted[i].attribute);
        if (*wanted[i].place == NULL) {
            return -1;
        }
    }
    return 0;
}

static int seqstate_exec(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);

    checksum_prepare(&state->sum);
    if (fetch_names(state) < 0) {
        return -1;
    }
    state->identity_type = make_record(
        module, "Identity", "build model n_layer n_ctx flash_attn unified type_k type_v");
    state->header_type = make_record(
        module, "Header",
        "version form memory identity start n_tokens token_hash payload_length checksum tokens");
    state->memory_type = PyType_FromModuleAndSpec(module, &memory_spec, NULL);
    if (state->identity_type == NULL || state->header_type == NULL || state->memory_type == NULL) {
        return -1;
    }
    if (PyModule_AddObjectRef(module, "Identity", state->identity_type) < 0 ||
        PyModule_AddObjectRef(module, "Header", state->header_type) < 0 ||
        PyModule_AddIntConstant(module, "HEADER_LENGTH", HEADER_LENGTH) < 0 ||
        PyModule_AddIntConstant(module, "FORMAT_VERSION", FORMAT_VERSION) < 0) {
        return -1;
    }
    return PyModule_AddType(module, (PyTypeObject *)state->memory_type);
}

static int seqstate_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct module_state *state = PyModule_GetState(module);
    Py_VISIT(state->invalid_argument);
    Py_VISIT(state->backend_error);
    Py_VISIT(state->pool_full);
    Py_VISIT(state->state_refused);
    Py_VISIT(state->sequence_abc);
    Py_VISIT(state->mapping_abc);
    Py_VISIT(state->identity_type);
    Py_VISIT(state->header_type);
    Py_VISIT(state->memory_type);
    return 0;
}

static int seqstate_clear(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->invalid_argument);
    Py_CLEAR(state->backend_error);
    Py_CLEAR(state->pool_full);
    Py_CLEAR(state->state_refused);
    Py_CLEAR(state->sequence_abc);
    Py_CLEAR(state->mapping_abc);
    Py_CLEAR(state->identity_type);
    Py_CLEAR(state->header_type);
    Py_CLEAR(state->memory_type);
    return 0;
}

static void seqstate_free(void *module)
{
    seqstate_clear((PyObject *)module);
}

static PyModuleDef_Slot seqstate_slots[] = {
    {Py_mod_exec, seqstate_exec},
    {0, NULL},
};

PyDoc_STRVAR(seqstate_doc, "Sequence memory of llama.cpp: copy, cut, save and restore, checked.\n\n"
                           "The specification is orchestrator.runtime.seqstate_ctypes.");

static struct PyModuleDef seqstate_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_seqstate",
    .m_doc = seqstate_doc,
    .m_size = sizeof(struct module_state),
    .m_methods = module_methods,
    .m_slots = seqstate_slots,
    .m_traverse = seqstate_traverse,
    .m_clear = seqstate_clear,
    .m_free = seqstate_free,
};

PyMODINIT_FUNC PyInit__seqstate(void)
{
    return PyModuleDef_Init(&seqstate_module);
}
