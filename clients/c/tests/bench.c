/* Times calls of a client, for a benchmark that has Python's beside it.
 *
 *     bench ADDRESS NAMESPACE BLOCK_BYTES BLOCK_TOKENS NUM_BLOCKS [TOKEN]
 *
 * The blocks of the prompt with seed 1 are cached. Each line asks for one measurement, answered with nanoseconds:
 * "get" copies all of them into memory of this process, "views" matches, looks at all and releases.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <sys/mman.h>
#include <time.h>

#include "pieces.h"

typedef struct bench {
    kvt_client *client;
    uint8_t *hashes;
    size_t num_blocks;
    size_t block_bytes;
    void **into;
    const void **views;
} bench;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

static uint64_t time_get(const bench *self) {
    size_t num_found;
    uint64_t started_at = now_ns();
    kvt_status status = kvt_get(self->client, self->hashes, self->num_blocks, self->into, &num_found);
    uint64_t elapsed = now_ns() - started_at;
    return status == KVT_OK && num_found == self->num_blocks ? elapsed : 0;
}

static uint64_t time_views(const bench *self) {
    kvt_lease *lease;
    uint64_t started_at = now_ns();
    kvt_status status = kvt_match(self->client, self->hashes, self->num_blocks, &lease);
    if (status == KVT_OK) {
        status = kvt_lease_views(lease, 0, self->num_blocks, self->views);
        kvt_lease_release(lease);
    }
    uint64_t elapsed = now_ns() - started_at;
    return status == KVT_OK ? elapsed : 0;
}

/* All blocks of the last get hold their bytes. */
static int is_right(const bench *self) {
    for (size_t i = 0; i < self->num_blocks; i++) {
        if (!is_right_block(self->into[i], self->hashes + i * KVT_HASH_BYTES, self->block_bytes)) {
            return 0;
        }
    }
    return 1;
}

static void make_room(bench *self) {
    size_t num_bytes = self->num_blocks * self->block_bytes;
    uint8_t *memory = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        exit(2);
    }
    memset(memory, 0xa5, num_bytes);
    self->into = room_for(self->num_blocks * sizeof *self->into);
    self->views = room_for(self->num_blocks * sizeof *self->views);
    for (size_t i = 0; i < self->num_blocks; i++) {
        self->into[i] = memory + i * self->block_bytes;
    }
}

int main(int count, char **arguments) {
    if (count < 6) {
        fprintf(stderr, "usage: bench ADDRESS NAMESPACE BLOCK_BYTES BLOCK_TOKENS NUM_BLOCKS [TOKEN]\n");
        return 2;
    }
    uint8_t *namespace_id;
    kvt_options options = options_of(count, arguments, &namespace_id);
    options.timeout_s = 60;
    bench self;
    memset(&self, 0, sizeof self);
    self.num_blocks = strtoul(arguments[5], NULL, 10);
    self.block_bytes = (size_t)options.block_bytes;
    self.hashes = hashes_of(namespace_id, options.block_tokens, 1, self.num_blocks);
    make_room(&self);
    if (kvt_connect(&options, &self.client) != KVT_OK) {
        fprintf(stderr, "%s\n", kvt_error(self.client));
        return 1;
    }
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (strcmp(line, "check\n") == 0) {
            printf("%d\n", is_right(&self));
        } else {
            printf("%" PRIu64 "\n", strcmp(line, "get\n") == 0 ? time_get(&self) : time_views(&self));
        }
        fflush(stdout);
    }
    kvt_close(self.client);
    free(self.hashes);
    free(self.into);
    free(self.views);
    free(namespace_id);
    return 0;
}
