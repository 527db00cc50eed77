/* What an instance writes to after a wake costs a page each time: a fault, a copy, 4 KiB of private memory. Of 230
 * pages that a small reconcile wrote to, 124 were the same afterwards as before: reference counts that went up and
 * down. Most others were counters in the code of functions, which lay all over the heap.
 *
 * So, before an image is taken, every object becomes immortal (PEP 683): it is in the image anyway, and what is
 * counted nevermore is written to nevermore. It costs what an operator drops later of what it had made at import:
 * that stays in memory until the unload, and its `__del__` and weak references never hear of an end.
 *
 * And the code whose counters go on changing is gathered in one place (`_torpor_warmup` knows which that is).
 */

#define Py_BUILD_CORE 1
#include "settle.h"

#include <internal/pycore_interp.h>
#include <internal/pycore_pystate.h>

#include <string.h>

#include "heap.h"

/* ---- Objects that live for ever ---- */

static int immortalize(PyObject *object, void *unused);

/* Code is no container to the garbage collector. */
static void immortalize_parts(PyCodeObject *code)
{
    PyObject *parts[] = {
        code->co_consts,    code->co_names, code->co_exceptiontable, code->co_localsplusnames, code->co_localspluskinds,
        code->co_filename,  code->co_name,  code->co_qualname,       code->co_linetable,
    };
    for (size_t at = 0; at < sizeof parts / sizeof *parts; at++)
        immortalize(parts[at], NULL);
}

static int immortalize(PyObject *object, void *unused)
{
    enum { DEPTH_MAX = 100 }; /* Of tuples in tuples: what lies deeper is counted as ever, which is right too. */
    static int depth;
    if (object == NULL || _Py_IsImmortal(object) || depth == DEPTH_MAX)
        return 0;
    object->ob_refcnt = _Py_IMMORTAL_REFCNT;
    depth++;
    if (PyCode_Check(object))
        immortalize_parts((PyCodeObject *)object);
    else if (PyObject_IS_GC(object) && !PyObject_GC_IsTracked(object)) /* Those tracked are visited themselves. */
        Py_TYPE(object)->tp_traverse(object, immortalize, NULL);
    depth--;
    return 0;
}

/* A container that the garbage collector knows, and what it refers to. */
static int immortalize_with_content(PyObject *object, void *unused)
{
    immortalize(object, NULL);
    Py_TYPE(object)->tp_traverse(object, immortalize, NULL);
    /* What the collector does not need to see. */
    if (PyDict_Check(object)) {
        Py_ssize_t at = 0;
        PyObject *key, *value;
        while (PyDict_Next(object, &at, &key, &value))
            immortalize(key, NULL);
    } else if (PyType_Check(object) && PyType_HasFeature((PyTypeObject *)object, Py_TPFLAGS_HEAPTYPE)) {
        immortalize(((PyHeapTypeObject *)object)->ht_name, NULL);
        immortalize(((PyHeapTypeObject *)object)->ht_qualname, NULL);
    }
    return 1; /* Go on. */
}

/* Zeros take no room in an image, and pages that were never used need not be restored. */
static void clear_stack(void)
{
    enum { DEPTH = 512 * 1024, OWN = 1024 };
    char here;
    uintptr_t end = (uintptr_t)&here - OWN;
    if (end > DEPTH)
        memset((void *)(end - DEPTH), 0, DEPTH);
}

void settle_memory(void)
{
    PyUnstable_GC_VisitObjects(immortalize_with_content, NULL);
    PyObject *interned = _PyInterpreterState_GET()->cached_objects.interned_strings;
    if (interned != NULL)
        immortalize_with_content(interned, NULL);
    heap_seal();
    clear_stack();
}

/* ---- Code that lies together ---- */

/* The copy of a code object, or NULL; `copies` is by address, since equal code of two files is equal. */
static PyObject *copy_of(PyObject *copies, PyObject *code)
{
    PyObject *address = PyLong_FromVoidPtr(code);
    PyObject *copy = address == NULL ? NULL : PyDict_GetItemWithError(copies, address);
    Py_XDECREF(address);
    return copy;
}

/* In the constants of code: what its inner functions are made of. */
static void replace_in_constants(PyObject *constants, PyObject *copies)
{
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(constants); at++) {
        PyObject *item = PyTuple_GET_ITEM(constants, at);
        if (!PyCode_Check(item))
            continue;
        replace_in_constants(((PyCodeObject *)item)->co_consts, copies);
        PyObject *copy = copy_of(copies, item);
        if (copy != NULL)
            PyTuple_SET_ITEM(constants, at, copy); /* Both are immortal: nothing to count. */
    }
}

static int replace_in(PyObject *object, void *copies)
{
    if (PyFunction_Check(object)) {
        PyFunctionObject *function = (PyFunctionObject *)object;
        replace_in_constants(((PyCodeObject *)function->func_code)->co_consts, copies);
        PyObject *copy = copy_of(copies, function->func_code);
        if (copy != NULL)
            function->func_code = copy;
    }
    return 1;
}

/* With the instructions as the interpreter has specialized them, so it has to be byte by byte. Original and copy
 * refer to the same objects, and are both immortal, as those are. */
static PyObject *copied(PyCodeObject *code)
{
    size_t size = (size_t)_PyObject_VAR_SIZE(&PyCode_Type, Py_SIZE(code));
    PyObject *copy = PyObject_Malloc(size);
    if (copy == NULL)
        return PyErr_NoMemory();
    immortalize((PyObject *)code, NULL);
    return memcpy(copy, code, size);
}

PyObject *gather_code(PyObject *self, PyObject *codes)
{
    if (!PyList_Check(codes))
        return PyErr_Format(PyExc_TypeError, "gather: a list of code objects is needed");
    PyObject *copies = PyDict_New();
    if (copies == NULL)
        return NULL;
    heap_seal();
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(codes); at++) {
        PyObject *code = PyList_GET_ITEM(codes, at);
        if (!PyCode_Check(code) || ((PyCodeObject *)code)->co_weakreflist != NULL)
            continue; /* A copy would share its list of weak references. */
        PyObject *copy = copied((PyCodeObject *)code);
        PyObject *address = PyLong_FromVoidPtr(code);
        if (copy == NULL || address == NULL || PyDict_SetItem(copies, address, copy) < 0) {
            Py_XDECREF(address);
            Py_DECREF(copies);
            return NULL;
        }
        Py_DECREF(address);
    }
    heap_seal();
    PyUnstable_GC_VisitObjects(replace_in, copies);
    Py_DECREF(copies);
    Py_RETURN_NONE;
}
