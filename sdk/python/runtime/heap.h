/* The heap of Python objects: see heap.c. */

#pragma once

/* Makes it the allocator of Python's objects and buffers. Before the interpreter starts. */
void heap_install(void);

/* What is allocated from now on lies together, on pages that nothing was written to yet. */
void heap_seal(void);
