/* A heap of Python objects whose new objects lie together, whatever was freed before.
 *
 * A guest wakes from an image that is mapped copy-on-write: each page that it writes to costs a fault and 4 KiB of
 * private memory. An ordinary allocator reuses what is free, which is scattered over all of the image. This one
 * forgets, when an image is about to be taken (`heap_seal`), all that is free, and goes on in fresh pages.
 *
 * Blocks of all sizes come one after the other from the same chunk (pools by size would write to a page for each size).
 * A freed block waits in the list of its size for the next one of that size. Before memory grows while much of it is
 * free, free blocks that lie side by side are joined; once it has run out, larger ones are split. What is larger than
 * MEDIUM_BYTES_MAX is the C library's.
 *
 * A block is a word with its class, then the payload, at a multiple of 8. One thread: WASI has no others.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "heap.h"

enum {
    PAGE_BYTES = 4096, /* Of the host, which copies pages of this size. */
    WASM_PAGE_BYTES = 65536,
    CHUNK_BYTES = 16 * WASM_PAGE_BYTES,
    /* Of an image, untouched: to grow the memory costs a call to the kernel, after the wake. */
    ROOM_BYTES = 8 * WASM_PAGE_BYTES,
    HEADER_BYTES = 4,
    SMALL_BYTES_MAX = 1024,        /* Classes every 8 bytes up to here, */
    STEPS_BITS = 3,                /* then 8 to a doubling. */
    MEDIUM_BYTES_MAX = 128 * 1024, /* Of a block, with its header. */
    SMALL_CLASSES = SMALL_BYTES_MAX / 8 + 1,
    CLASSES = SMALL_CLASSES + 7 * (1 << STEPS_BITS),
    LARGE = 0xFFFF, /* The class of the C library's. */
    FREE = 1 << 16, /* Beside the class, in the header of a block that waits in a list. */
    REGIONS_MAX = 256,
    JOIN_BYTES_MIN = 4 * 1024 * 1024, /* Free, before it is looked at what can be joined instead of growing. */
};

struct free_block {
    struct free_block *next;
};

static struct free_block *free_blocks[CLASSES];
static uintptr_t chunk_at, chunk_end;
/* Where blocks lie one after the other since the image: from the first's payload to past the last's. The newest one
 * ends at the chunk's. */
static struct region {
    uintptr_t start, end;
} regions[REGIONS_MAX];
static size_t regions_count, free_bytes, used_bytes, freed_since_join;

static void begin_region(void)
{
    if (regions_count < REGIONS_MAX)
        regions[regions_count++] = (struct region){chunk_at + 8, 0};
}

static void end_region(void)
{
    if (regions_count > 0 && regions[regions_count - 1].end == 0)
        regions[regions_count - 1].end = chunk_at + 8;
}

/* The class of blocks of at least `bytes`, and in `*block_bytes` how large they are. */
static uint32_t class_of(size_t bytes, size_t *block_bytes)
{
    if (bytes <= SMALL_BYTES_MAX) {
        *block_bytes = (bytes + 7) & ~(size_t)7;
        return (uint32_t)(*block_bytes / 8);
    }
    /* The step of `bytes`'s power of two that is not smaller: 1025 is of the first step above 1024. */
    unsigned power = 31 - (unsigned)__builtin_clz((uint32_t)(bytes - 1));
    unsigned shift = power - STEPS_BITS;
    size_t step = ((bytes - 1) >> shift) + 1;
    *block_bytes = step << shift;
    return (uint32_t)(SMALL_CLASSES + ((power - 10) << STEPS_BITS) + step - (1 << STEPS_BITS) - 1);
}

/* How large blocks of a class are. */
static size_t block_bytes_of(uint32_t class)
{
    if (class < SMALL_CLASSES)
        return (size_t)class * 8;
    unsigned above = class - SMALL_CLASSES;
    unsigned shift = (above >> STEPS_BITS) + 10 - STEPS_BITS;
    return (size_t)((above & ((1 << STEPS_BITS) - 1)) + (1 << STEPS_BITS) + 1) << shift;
}

/* Makes room for `bytes` in the chunk; what is left of another one is lost. */
static int extend(size_t bytes)
{
    size_t grown = bytes + PAGE_BYTES > CHUNK_BYTES ? bytes + PAGE_BYTES : CHUNK_BYTES;
    grown = (grown + WASM_PAGE_BYTES - 1) / WASM_PAGE_BYTES;
    size_t before = __builtin_wasm_memory_grow(0, grown);
    if (before == SIZE_MAX) { /* Near the limit: no more than what is needed. */
        grown = (bytes + PAGE_BYTES + WASM_PAGE_BYTES - 1) / WASM_PAGE_BYTES;
        before = __builtin_wasm_memory_grow(0, grown);
        if (before == SIZE_MAX)
            return -1;
    }
    uintptr_t start = before * WASM_PAGE_BYTES;
    if (start != chunk_end || chunk_end == 0) {
        end_region();
        chunk_at = start;
        begin_region();
    }
    chunk_end = start + grown * WASM_PAGE_BYTES;
    return 0;
}

static uint32_t *header_of(void *payload)
{
    return (uint32_t *)((char *)payload - HEADER_BYTES);
}

static void put_back(void *payload, uint32_t class)
{
    struct free_block *block = payload;
    *header_of(payload) = class | FREE;
    block->next = free_blocks[class];
    free_blocks[class] = block;
    free_bytes += block_bytes_of(class);
}

/* A run of free memory as blocks, the largest first. */
static void put_run(uintptr_t payload, size_t bytes)
{
    uint32_t class = CLASSES - 1;
    while (bytes > 0) {
        while (block_bytes_of(class) > bytes)
            class--;
        put_back((void *)payload, class);
        payload += block_bytes_of(class);
        bytes -= block_bytes_of(class);
    }
}

/* With no memory left: a part of any free block that is larger. */
static void *part_of_larger(uint32_t class, size_t bytes)
{
    for (uint32_t from = class + 1; from < CLASSES; from++) {
        struct free_block *block = free_blocks[from];
        if (block == NULL)
            continue;
        free_blocks[from] = block->next;
        free_bytes -= block_bytes_of(from);
        size_t rest = block_bytes_of(from) - bytes;
        put_run((uintptr_t)block + bytes, rest);
        *header_of(block) = class;
        return block;
    }
    return NULL;
}

static int in_a_region(uintptr_t payload)
{
    for (size_t at = 0; at < regions_count; at++)
        if (payload >= regions[at].start && payload < regions[at].end)
            return 1;
    return 0;
}

/* Makes one block of free ones that lie side by side. */
static void join(void)
{
    freed_since_join = 0;
    int open = regions_count > 0 && regions[regions_count - 1].end == 0;
    end_region();
    for (uint32_t class = 0; class < CLASSES; class++) { /* Those of the image stay as they are. */
        struct free_block **link = &free_blocks[class];
        while (*link != NULL) {
            if (in_a_region((uintptr_t)*link)) {
                free_bytes -= block_bytes_of(class);
                *link = (*link)->next;
            } else {
                link = &(*link)->next;
            }
        }
    }
    for (size_t region = 0; region < regions_count; region++) {
        uintptr_t at = regions[region].start, run = at;
        while (at < regions[region].end) {
            uint32_t header = *header_of((void *)at);
            size_t bytes = block_bytes_of(header & 0xFFFF);
            if (!(header & FREE)) {
                put_run(run, at - run);
                run = at + bytes;
            }
            at += bytes;
        }
        put_run(run, at - run);
    }
    if (open)
        regions[regions_count - 1].end = 0;
}

static void *heap_malloc(void *context, size_t size)
{
    size_t bytes = (size == 0 ? 1 : size) + HEADER_BYTES;
    if (bytes > MEDIUM_BYTES_MAX) {
        char *block = size > PY_SSIZE_T_MAX - 8 ? NULL : malloc(size + 8);
        if (block == NULL)
            return NULL;
        *header_of(block + 8) = LARGE;
        return block + 8;
    }
    uint32_t class = class_of(bytes, &bytes);
    struct free_block *block = free_blocks[class];
    if (block != NULL) {
        free_blocks[class] = block->next;
        free_bytes -= bytes;
        *header_of(block) = class;
        return block;
    }
    /* `chunk_at` is where the next payload begins. */
    if (chunk_end - chunk_at < bytes + 8) {
        if (free_bytes > JOIN_BYTES_MIN && free_bytes > used_bytes / 2 && freed_since_join > JOIN_BYTES_MIN / 16) {
            void *part = part_of_larger(class, bytes);
            if (part != NULL)
                return part;
            join();
            if ((block = free_blocks[class]) != NULL)
                return heap_malloc(context, size);
            if ((part = part_of_larger(class, bytes)) != NULL)
                return part;
        }
        if (extend(bytes) < 0) {
            void *part = part_of_larger(class, bytes);
            if (part != NULL || freed_since_join == 0)
                return part;
            join();
            return free_blocks[class] != NULL ? heap_malloc(context, size) : part_of_larger(class, bytes);
        }
    }
    used_bytes += bytes;
    void *payload = (void *)(chunk_at + 8);
    chunk_at += bytes;
    *header_of(payload) = class;
    return payload;
}

static void heap_free(void *context, void *payload)
{
    if (payload == NULL)
        return;
    uint32_t class = *header_of(payload);
    if (class == LARGE) {
        free((char *)payload - 8);
        return;
    }
    put_back(payload, class);
    freed_since_join += block_bytes_of(class);
}

static void *heap_calloc(void *context, size_t count, size_t size)
{
    if (size != 0 && count > PY_SSIZE_T_MAX / size)
        return NULL;
    void *payload = heap_malloc(context, count * size);
    if (payload != NULL)
        memset(payload, 0, count * size);
    return payload;
}

static void *heap_realloc(void *context, void *payload, size_t size)
{
    if (payload == NULL)
        return heap_malloc(context, size);
    uint32_t class = *header_of(payload);
    size_t capacity;
    if (class == LARGE) {
        if (size + HEADER_BYTES > MEDIUM_BYTES_MAX) {
            char *block = size > PY_SSIZE_T_MAX - 8 ? NULL : realloc((char *)payload - 8, size + 8);
            return block == NULL ? NULL : block + 8;
        }
        capacity = size; /* It shrinks. */
    } else {
        capacity = block_bytes_of(class) - HEADER_BYTES;
        if (size <= capacity && size >= capacity / 2)
            return payload;
    }
    void *moved = heap_malloc(context, size);
    if (moved == NULL)
        return size <= capacity ? payload : NULL; /* What shrinks may stay. */
    memcpy(moved, payload, size < capacity ? size : capacity);
    heap_free(context, payload);
    return moved;
}

void heap_install(void)
{
    PyMemAllocatorEx heap = {NULL, heap_malloc, heap_calloc, heap_realloc, heap_free};
    PyMem_SetAllocator(PYMEM_DOMAIN_MEM, &heap);
    PyMem_SetAllocator(PYMEM_DOMAIN_OBJ, &heap);
}

void heap_seal(void)
{
    for (uint32_t class = 0; class < CLASSES; class++) {
        struct free_block *block = free_blocks[class];
        free_blocks[class] = NULL;
        while (block != NULL) {
            struct free_block *next = block->next;
            memset(header_of(block), 0, block_bytes_of(class)); /* Zeros take no room in an image. */
            block = next;
        }
    }
    chunk_at = (chunk_at + PAGE_BYTES - 1) & ~(uintptr_t)(PAGE_BYTES - 1);
    regions_count = free_bytes = used_bytes = 0;
    begin_region();
    if (chunk_end - chunk_at < ROOM_BYTES)
        extend(ROOM_BYTES);
}
