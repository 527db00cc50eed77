/* CPython as a Torpor guest: the exports of `proto/wit/abi.md` on top of an interpreter that has no files.
 *
 * Owns: starting the interpreter, the `_torpor` module (the host's functions for Python), and the way in and out
 * of every call. What a message means is the SDK's business (`torpor_sdk._guest`); here it is bytes.
 *
 * Invariants: no exception leaves a call, whatever it is, SystemExit and MemoryError among them; nothing stays
 * buffered in stdout or stderr when a call returns, so that an image never repeats or loses output; one buffer
 * given to the host is alive at a time.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <stdint.h>
#include <string.h>

#include "heap.h"
#include "settle.h"

#include "frozen_modules.h" /* Generated: `frozen_modules`, every Python module of the guest. */

#define EXPORT(name) __attribute__((export_name(#name), used))
#define IMPORT(name) __attribute__((import_module("torpor"), import_name(#name)))

enum { ABI_VERSION = 1, LOG_ERROR = 3 };

/* CPython allows 5,000 nested C calls under WASI. They need more than the 2 MiB of stack that hosts give; with
 * 2,000, deep nesting ends in RecursionError instead of a trap. */
enum { C_RECURSION_CUT = 3000 };

IMPORT(kube_request) int32_t host_kube_request(const char *message, int32_t length);
IMPORT(kube_tree) int32_t host_kube_tree(const char *message, int32_t length);
IMPORT(http_fetch) int32_t host_http_fetch(const char *message, int32_t length);
IMPORT(config) int32_t host_config(void);
IMPORT(log) void host_log(int32_t level, const char *text, int32_t length);
IMPORT(take) int32_t host_take(char *buffer, int32_t length);

/* ---- The module `_torpor`: what Python calls on the host ---- */

typedef int32_t (*host_call)(const char *message, int32_t length);

/* The result that the host holds after a call returned `length`. */
static PyObject *take(const char *name, int32_t length)
{
    if (length < 0)
        return PyErr_Format(PyExc_RuntimeError,
                            length == -2 ? "%s is not possible now (host answered %d)"
                                         : "%s: the host refused the message (host answered %d)",
                            name, (int)length);
    PyObject *result = PyBytes_FromStringAndSize(NULL, length);
    if (result == NULL)
        return NULL;
    if (host_take(PyBytes_AS_STRING(result), length) != length) {
        Py_DECREF(result);
        return PyErr_Format(PyExc_RuntimeError, "%s: the host gave less than the %d bytes it promised", name,
                            (int)length);
    }
    return result;
}

static PyObject *call_host(const char *name, host_call call, PyObject *message)
{
    Py_buffer view;
    if (PyObject_GetBuffer(message, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int32_t length = view.len > INT32_MAX ? -1 : call(view.buf, (int32_t)view.len);
    PyBuffer_Release(&view);
    return take(name, length);
}

static PyObject *kube_request(PyObject *self, PyObject *message)
{
    return call_host("kube_request", host_kube_request, message);
}

static PyObject *kube_tree(PyObject *self, PyObject *message)
{
    return call_host("kube_tree", host_kube_tree, message);
}

static PyObject *http_fetch(PyObject *self, PyObject *message)
{
    return call_host("http_fetch", host_http_fetch, message);
}

static PyObject *config(PyObject *self, PyObject *unused)
{
    return take("config", host_config());
}

static PyObject *log_line(PyObject *self, PyObject *args)
{
    int level;
    Py_buffer text; /* s*: str as UTF-8, or bytes. */
    if (!PyArg_ParseTuple(args, "is*:log", &level, &text))
        return NULL;
    host_log(level, text.buf, text.len > INT32_MAX ? INT32_MAX : (int32_t)text.len);
    PyBuffer_Release(&text);
    Py_RETURN_NONE;
}

static PyMethodDef torpor_methods[] = {
    {"kube_request", kube_request, METH_O, "kube_request(message: bytes) -> bytes"},
    {"kube_tree", kube_tree, METH_O, "kube_tree(message: bytes) -> bytes"},
    {"http_fetch", http_fetch, METH_O, "http_fetch(message: bytes) -> bytes"},
    {"config", config, METH_NOARGS, "config() -> bytes, JSON"},
    {"log", log_line, METH_VARARGS, "log(level: int, text: str | bytes) -> None"},
    {"gather", gather_code, METH_O, "gather(codes: list[code]) -> None; see settle.h"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef torpor_module = {
    PyModuleDef_HEAD_INIT, "_torpor", "The host's functions; messages are those of the operator ABI.", -1,
    torpor_methods,
};

static PyObject *init_torpor(void)
{
    return PyModule_Create(&torpor_module);
}

/* ---- Starting ---- */

static PyObject *boot; /* The module `_torpor_boot`: the Python half of this file. */

static void must(PyStatus status)
{
    if (PyStatus_Exception(status))
        Py_ExitStatusException(status);
}

static void set(PyConfig *config, wchar_t **field, const wchar_t *value)
{
    must(PyConfig_SetString(config, field, value));
}

/* An interpreter that looks for nothing: every module is frozen in, every path is empty. */
static void start_interpreter(void)
{
    heap_install();
    PyPreConfig early;
    PyPreConfig_InitIsolatedConfig(&early);
    early.utf8_mode = 1;
    must(Py_PreInitialize(&early));

    PyImport_FrozenModules = frozen_modules;
    if (PyImport_AppendInittab("_torpor", init_torpor) < 0)
        must(PyStatus_NoMemory());

    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    config.site_import = 0;
    config.write_bytecode = 0;
    config.install_signal_handlers = 0;
    config.pathconfig_warnings = 0;
    config.buffered_stdio = 0;
    config.module_search_paths_set = 1;
    set(&config, &config.program_name, L"operator");
    set(&config, &config.executable, L"");
    set(&config, &config.base_executable, L"");
    set(&config, &config.home, L"");
    set(&config, &config.prefix, L"");
    set(&config, &config.base_prefix, L"");
    set(&config, &config.exec_prefix, L"");
    set(&config, &config.base_exec_prefix, L"");
    set(&config, &config.stdlib_dir, L"");
    set(&config, &config.stdio_encoding, L"utf-8");
    set(&config, &config.stdio_errors, L"backslashreplace");
    wchar_t *argv[] = {L"operator"};
    must(PyConfig_SetArgv(&config, 1, argv));
    must(Py_InitializeFromConfig(&config));
    PyConfig_Clear(&config);
    PyThreadState_Get()->c_recursion_remaining -= C_RECURSION_CUT;
}

/* Takes the pending exception and tells it as bytes; NULL, without an exception, if even that fails. It is never
 * printed: PyErr_Print would end the process on SystemExit, and there is none to end. */
static PyObject *explain_pending(void)
{
    PyObject *exception = PyErr_GetRaisedException();
    PyObject *told = boot == NULL ? NULL : PyObject_CallMethod(boot, "explain", "O", exception ? exception : Py_None);
    Py_XDECREF(exception);
    if (told != NULL && !PyBytes_Check(told))
        Py_CLEAR(told);
    PyErr_Clear();
    return told;
}

/* Calls `_torpor_boot.NAME()` where the caller has nobody to give an error to: it goes to the log. */
static void tell_boot(const char *name)
{
    static const char plain[] = "a hook of the Python runtime failed";
    PyObject *result = boot == NULL ? NULL : PyObject_CallMethod(boot, name, NULL);
    if (result == NULL && PyErr_Occurred()) {
        PyObject *told = explain_pending();
        if (told != NULL)
            host_log(LOG_ERROR, PyBytes_AS_STRING(told), (int32_t)PyBytes_GET_SIZE(told));
        else
            host_log(LOG_ERROR, plain, sizeof plain - 1);
        Py_XDECREF(told);
    }
    Py_XDECREF(result);
}

/* The last thing before an image may be taken. */
static void settle(void)
{
    tell_boot("settle");
    settle_memory();
}

/* A constructor and not an export of our own: the C library's `_initialize` runs it, after its own. */
__attribute__((constructor)) static void initialize(void)
{
    start_interpreter();
    boot = PyImport_ImportModule("_torpor_boot");
    if (boot == NULL) {
        PyErr_Print();
        Py_FatalError("the guest's own modules cannot be imported");
    }
    settle();
}

/* ---- Calls ---- */

static PyObject *pending; /* The buffer that the host fills for its next call. */
static PyObject *held;    /* The result that the host is reading. */

EXPORT(torpor_abi_version) int32_t torpor_abi_version(void)
{
    return ABI_VERSION;
}

/* A bytes object of our own, so that the input is copied once only, by the host. */
EXPORT(torpor_alloc) char *torpor_alloc(int32_t length)
{
    Py_CLEAR(pending);
    if (length < 0)
        return NULL;
    /* One byte at least: the empty bytes object is shared by all of Python. */
    pending = PyBytes_FromStringAndSize(NULL, length == 0 ? 1 : length);
    if (pending == NULL) {
        PyErr_Clear();
        return NULL;
    }
    return PyBytes_AS_STRING(pending);
}

/* The input of this call as bytes, a new reference; NULL with an exception. */
static PyObject *input(const char *data, int32_t length)
{
    PyObject *given = pending;
    pending = NULL;
    if (given != NULL && data == PyBytes_AS_STRING(given) && length == PyBytes_GET_SIZE(given))
        return given;
    PyObject *copy = length < 0 ? PyErr_Format(PyExc_ValueError, "the input is longer than 2 GiB")
                                : PyBytes_FromStringAndSize(data, length);
    Py_XDECREF(given);
    return copy;
}

static int64_t give(PyObject *bytes)
{
    Py_XSETREF(held, bytes);
    uint32_t address = (uint32_t)(uintptr_t)PyBytes_AS_STRING(bytes);
    return (int64_t)((uint64_t)address << 32 | (uint32_t)PyBytes_GET_SIZE(bytes));
}

/* `prefix` (whole fields) and `text` as one more field. */
static PyObject *message_of(const char *prefix, size_t prefix_length, const char *text, size_t length)
{
    PyObject *message = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(prefix_length + 4 + length));
    if (message == NULL)
        return NULL;
    char *at = PyBytes_AS_STRING(message);
    uint32_t size = (uint32_t)length; /* Wasm is little-endian, as the ABI is. */
    memcpy(at, prefix, prefix_length);
    memcpy(at + prefix_length, &size, 4);
    memcpy(at + prefix_length + 4, text, length);
    return message;
}

/* How a call says that it failed: the fields before the text of its error. */
struct failure {
    const char *prefix;
    size_t length;
};
static const char outcome_error[] = "\5\0\0\0error\0\0\0\0"; /* outcome, an empty requeue-after-ms */
static const struct failure error_first = {"", 0};
static const struct failure error_outcome = {outcome_error, sizeof outcome_error - 1};

/* The pending exception as the call's result. */
static int64_t fail(const struct failure *failure)
{
    static const char plain[] = "the operator failed, and so did describing how";
    PyObject *told = explain_pending();
    PyObject *message = NULL;
    if (told != NULL)
        message = message_of(failure->prefix, failure->length, PyBytes_AS_STRING(told), (size_t)PyBytes_GET_SIZE(told));
    Py_XDECREF(told);
    PyErr_Clear();
    if (message == NULL)
        message = message_of(failure->prefix, failure->length, plain, sizeof plain - 1);
    if (message == NULL)
        Py_FatalError("out of memory while reporting an error");
    tell_boot("flush");
    return give(message);
}

/* Calls `_torpor_boot.NAME(argument)`, without argument where it is NULL. Takes over the reference. */
static int64_t call_boot(const char *name, PyObject *argument, const struct failure *failure)
{
    PyObject *result = argument == NULL ? PyObject_CallMethod(boot, name, NULL)
                                        : PyObject_CallMethod(boot, name, "O", argument);
    Py_XDECREF(argument);
    if (result != NULL && !PyBytes_Check(result)) {
        PyErr_Format(PyExc_TypeError, "%s must return bytes, not %.100s", name, Py_TYPE(result)->tp_name);
        Py_CLEAR(result);
    }
    if (result == NULL)
        return fail(failure);
    tell_boot("flush");
    return give(result);
}

static int64_t call_boot_with(const char *name, const char *data, int32_t length, const struct failure *failure)
{
    PyObject *message = input(data, length);
    return message == NULL ? fail(failure) : call_boot(name, message, failure);
}

EXPORT(torpor_load) int64_t torpor_load(const char *data, int32_t length)
{
    return call_boot_with("load", data, length, &error_first);
}

EXPORT(torpor_describe) int64_t torpor_describe(void)
{
    int64_t result = call_boot("describe", NULL, &error_first);
    settle();
    return result;
}

EXPORT(torpor_reconcile) int64_t torpor_reconcile(const char *data, int32_t length)
{
    return call_boot_with("reconcile", data, length, &error_outcome);
}

EXPORT(torpor_map) int64_t torpor_map(const char *data, int32_t length)
{
    return call_boot_with("map", data, length, &error_first);
}

EXPORT(torpor_wake) void torpor_wake(void)
{
    tell_boot("wake");
    tell_boot("flush");
}
