/* The memory of a server on this host, as this process maps it. Kept while it is in use. Thread-safe. */
#ifndef KVT_ARENA_H
#define KVT_ARENA_H

#include <pthread.h>

#include "failure.h"

typedef struct kvt_arena {
    uint8_t *base;
    size_t num_bytes;
    pthread_mutex_t lock;
    size_t num_users;
    uint8_t *populated; /* one byte for each piece: its pages are present in this process */
    bool can_populate;
} kvt_arena;

/* Map the memory behind `fd`, which is closed. KVT_PROTOCOL unless it is a memfd of that size whose size is sealed. */
kvt_status kvt_arena_map(int fd, uint64_t num_bytes, kvt_arena **arena, kvt_failure *failure);

void kvt_arena_use(kvt_arena *arena);

/* The last user unmaps it. NULL is allowed. */
void kvt_arena_leave(kvt_arena *arena);

/* A hint: make the pages of a range present, in one call instead of a fault each. */
void kvt_arena_populate(kvt_arena *arena, uint64_t offset, uint64_t num_bytes);

#endif
