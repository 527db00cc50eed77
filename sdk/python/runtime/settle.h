/* Makes what is in memory cheap to wake from: see settle.c. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Whatever is alive now lives for ever and is not counted any more; what is allocated later lies together; the stack
 * below is empty. Before an image is taken, with the garbage collected. */
void settle_memory(void);

/* A method that takes a list of code objects, and puts them into memory of their own, one after the other. Of code
 * that is not on the list nothing changes. Before the code is settled; what runs meanwhile goes on in the original. */
PyObject *gather_code(PyObject *self, PyObject *codes);
