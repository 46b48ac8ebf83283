#define _GNU_SOURCE
#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIECE_BYTES ((uint64_t)2 << 20)
#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* What does not shrink under our feet, and is as large as the peer said. */
static bool is_sealed_memory(int fd, uint64_t num_bytes) {
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & SIZE_SEALS) == SIZE_SEALS && fstat(fd, &status) == 0 && status.st_size > 0 &&
           (uint64_t)status.st_size == num_bytes;
}

static kvt_status map_sealed(int fd, uint64_t num_bytes, kvt_arena **arena, kvt_failure *failure) {
    if (num_bytes == 0 || num_bytes > SIZE_MAX / 2 || !is_sealed_memory(fd, num_bytes)) {
        return kvt_fail(failure, KVT_PROTOCOL,
                        "the server passed a descriptor that is not a sealed arena of the size it said");
    }
    kvt_arena *made = calloc(1, sizeof *made);
    uint8_t *populated = calloc((size_t)((num_bytes - 1) / PIECE_BYTES + 1), 1);
    if (!made || !populated) {
        free(made);
        free(populated);
        return kvt_fail(failure, KVT_NO_MEMORY, "there is no memory to map an arena");
    }
    void *base = mmap(NULL, (size_t)num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        free(made);
        free(populated);
        return kvt_fail_system(failure, KVT_UNAVAILABLE, "the server's memory cannot be mapped", errno);
    }
    madvise(base, (size_t)num_bytes, MADV_DONTDUMP); /* as secret as the prompts */
    made->base = base;
    made->num_bytes = (size_t)num_bytes;
    made->num_users = 1;
    made->populated = populated;
    made->can_populate = true;
    pthread_mutex_init(&made->lock, NULL);
    *arena = made;
    return KVT_OK;
}

kvt_status kvt_arena_map(int fd, uint64_t num_bytes, kvt_arena **arena, kvt_failure *failure) {
    kvt_status status = map_sealed(fd, num_bytes, arena, failure);
    close(fd);
    return status;
}

void kvt_arena_use(kvt_arena *arena) {
    pthread_mutex_lock(&arena->lock);
    arena->num_users++;
    pthread_mutex_unlock(&arena->lock);
}

void kvt_arena_leave(kvt_arena *arena) {
    if (!arena) {
        return;
    }
    pthread_mutex_lock(&arena->lock);
    bool is_last = --arena->num_users == 0;
    pthread_mutex_unlock(&arena->lock);
    if (is_last) {
        munmap(arena->base, arena->num_bytes);
        pthread_mutex_destroy(&arena->lock);
        free(arena->populated);
        free(arena);
    }
}

static void populate_piece(kvt_arena *arena, uint64_t piece) {
    uint64_t start = piece * PIECE_BYTES;
    uint64_t length = arena->num_bytes - start < PIECE_BYTES ? arena->num_bytes - start : PIECE_BYTES;
    if (madvise(arena->base + start, (size_t)length, MADV_POPULATE_WRITE) == 0) {
        arena->populated[piece] = 1;
    } else if (errno == EINVAL) {
        arena->can_populate = false; /* a kernel before 5.14 */
    }
}

void kvt_arena_populate(kvt_arena *arena, uint64_t offset, uint64_t num_bytes) {
    pthread_mutex_lock(&arena->lock);
    for (uint64_t piece = offset / PIECE_BYTES; piece <= (offset + num_bytes - 1) / PIECE_BYTES; piece++) {
        if (arena->can_populate && !arena->populated[piece]) {
            populate_piece(arena, piece);
        }
    }
    pthread_mutex_unlock(&arena->lock);
}
