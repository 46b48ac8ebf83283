/* A client process for tests: commands in lines on standard input, one line of answer each.
 *
 *     actor ADDRESS NAMESPACE BLOCK_BYTES BLOCK_TOKENS TIMEOUT_S [TOKEN]
 *
 * A prompt is a seed and a number of blocks; the bytes of a block are its hash over and over.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pieces.h"

typedef struct actor {
    kvt_client *client;
    const uint8_t *namespace_id;
    size_t block_bytes;
    uint32_t block_tokens;
    kvt_lease *held;
    kvt_reservation *reserved;
} actor;

typedef struct prompt {
    uint8_t *hashes;
    size_t count;
} prompt;

static prompt prompt_of(const actor *self, unsigned long seed, unsigned long count) {
    prompt made = {hashes_of(self->namespace_id, self->block_tokens, (uint32_t)seed, count), count};
    return made;
}

static const uint8_t *hash_at(const prompt *of, size_t position) {
    return of->hashes + position * KVT_HASH_BYTES;
}

static void say_failure(const actor *self, kvt_status status) {
    printf("failed %d %s\n", (int)status, kvt_error(self->client));
}

/* --- acts -------------------------------------------------------------------------------------------------------- */

static kvt_status store(const actor *self, const prompt *of, size_t *num_stored) {
    uint8_t *memory = room_for(of->count * self->block_bytes);
    const void **blocks = room_for(of->count * sizeof *blocks);
    for (size_t i = 0; i < of->count; i++) {
        write_block(memory + i * self->block_bytes, hash_at(of, i), self->block_bytes);
        blocks[i] = memory + i * self->block_bytes;
    }
    kvt_status status = kvt_set(self->client, of->hashes, of->count, blocks, num_stored);
    free(memory);
    free(blocks);
    return status;
}

static kvt_status load(const actor *self, const prompt *of, size_t *num_blocks, size_t *num_wrong) {
    uint8_t *memory = room_for(of->count * self->block_bytes);
    void **into = room_for(of->count * sizeof *into);
    for (size_t i = 0; i < of->count; i++) {
        into[i] = memory + i * self->block_bytes;
    }
    kvt_status status = kvt_get(self->client, of->hashes, of->count, into, num_blocks);
    *num_wrong = 0;
    for (size_t i = 0; i < *num_blocks; i++) {
        *num_wrong += !is_right_block(into[i], hash_at(of, i), self->block_bytes);
    }
    free(memory);
    free(into);
    return status;
}

static size_t count_wrong(const actor *self, const prompt *of, kvt_lease *lease) {
    size_t count = kvt_lease_num_blocks(lease);
    const void **views = room_for(count * sizeof *views);
    size_t num_wrong = 0;
    if (kvt_lease_views(lease, 0, count, views) == KVT_OK) {
        for (size_t i = 0; i < count; i++) {
            num_wrong += !is_right_block(views[i], hash_at(of, i), self->block_bytes);
        }
    }
    free(views);
    return num_wrong;
}

static kvt_status look(const actor *self, const prompt *of, size_t *num_blocks, size_t *num_wrong, int *ended) {
    kvt_lease *lease;
    *num_blocks = *num_wrong = 0;
    kvt_status status = kvt_match(self->client, of->hashes, of->count, &lease);
    if (status == KVT_OK) {
        *num_wrong = kvt_is_local(self->client) ? count_wrong(self, of, lease) : 0;
        *num_blocks = kvt_lease_num_blocks(lease);
        *ended = (int)kvt_lease_ended(lease);
        kvt_lease_release(lease);
    }
    return status;
}

static void act_set(actor *self, const prompt *of) {
    size_t num_stored;
    kvt_status status = store(self, of, &num_stored);
    if (status == KVT_OK) {
        printf("stored %zu\n", num_stored);
    } else {
        say_failure(self, status);
    }
}

static void act_get(actor *self, const prompt *of) {
    size_t num_blocks, num_wrong;
    kvt_status status = load(self, of, &num_blocks, &num_wrong);
    if (status == KVT_OK) {
        printf("got %zu wrong %zu\n", num_blocks, num_wrong);
    } else {
        say_failure(self, status);
    }
}

static void act_views(actor *self, const prompt *of) {
    size_t num_blocks, num_wrong;
    int ended = 0;
    kvt_status status = look(self, of, &num_blocks, &num_wrong, &ended);
    if (status == KVT_OK) {
        printf("leased %zu wrong %zu ended %d\n", num_blocks, num_wrong, ended);
    } else {
        say_failure(self, status);
    }
}

static void act_contains(actor *self, const prompt *of) {
    uint8_t *flags = room_for(of->count);
    kvt_status status = kvt_contains(self->client, of->hashes, of->count, flags);
    if (status == KVT_OK) {
        printf("flags ");
        for (size_t i = 0; i < of->count; i++) {
            printf("%d", flags[i]);
        }
        printf("\n");
    } else {
        say_failure(self, status);
    }
    free(flags);
}

static void act_drop(actor *self, const prompt *of) {
    size_t num_dropped;
    kvt_status status = kvt_drop(self->client, of->hashes, of->count, &num_dropped);
    if (status == KVT_OK) {
        printf("dropped %zu\n", num_dropped);
    } else {
        say_failure(self, status);
    }
}

/* Lease a prompt until `release`. */
static void act_hold(actor *self, const prompt *of) {
    kvt_status status = kvt_match(self->client, of->hashes, of->count, &self->held);
    if (status == KVT_OK) {
        printf("held %zu wrong %zu\n", kvt_lease_num_blocks(self->held), count_wrong(self, of, self->held));
    } else {
        say_failure(self, status);
    }
}

/* Reserve a prompt, write half of each slot, commit the first once all of its bytes are written, and keep the rest. */
static void act_reserve(actor *self, const prompt *of) {
    kvt_status status = kvt_reserve(self->client, of->hashes, of->count, &self->reserved);
    if (status != KVT_OK) {
        say_failure(self, status);
        return;
    }
    size_t num_slots = kvt_reservation_num_slots(self->reserved);
    size_t num_committed = 0;
    for (size_t i = 0; i < num_slots; i++) {
        const uint8_t *hash = hash_at(of, kvt_reservation_position(self->reserved, i));
        size_t num_bytes = i == 0 ? self->block_bytes : self->block_bytes / 2;
        write_block(kvt_reservation_slot(self->reserved, i), hash, num_bytes);
    }
    if (num_slots) {
        status = kvt_commit(self->reserved, 0, 1, &num_committed);
    }
    if (status == KVT_OK) {
        printf("reserved %zu committed %zu pending %zu refused %zu\n", num_slots, num_committed,
               kvt_reservation_num_pending(self->reserved), kvt_reservation_num_refused(self->reserved));
    } else {
        say_failure(self, status);
    }
}

static void act_release(actor *self) {
    kvt_lease_release(self->held);
    kvt_reservation_close(self->reserved);
    self->held = NULL;
    self->reserved = NULL;
    printf("released\n");
}

static void say_plainly(actor *self, kvt_status status) {
    if (status == KVT_OK) {
        printf("done\n");
    } else {
        say_failure(self, status);
    }
}

/* --- everything at random ---------------------------------------------------------------------------------------- */

typedef struct counts {
    size_t operations, read, stored, wrong, failures;
} counts;

static uint32_t next_random(uint32_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void mix_once(actor *self, uint32_t *state, uint32_t num_prompts, uint32_t num_blocks, counts *sum) {
    prompt of = prompt_of(self, next_random(state) % num_prompts, 1 + next_random(state) % num_blocks);
    size_t found = 0, wrong = 0;
    int ended;
    kvt_status status;
    switch (next_random(state) % 10) {
    case 0:
    case 1:
    case 2:
        status = look(self, &of, &found, &wrong, &ended);
        sum->read += found;
        break;
    case 3:
    case 4:
    case 5:
        status = load(self, &of, &found, &wrong);
        sum->read += found;
        break;
    case 6:
    case 7:
    case 8:
        status = store(self, &of, &found);
        sum->stored += found;
        break;
    default:
        status = kvt_drop(self->client, of.hashes, of.count < 3 ? of.count : 3, &found);
        break;
    }
    sum->operations++;
    sum->wrong += wrong;
    sum->failures += status != KVT_OK && status != KVT_FULL;
    free(of.hashes);
}

static void mix_until(actor *self, const unsigned long numbers[4], unsigned long seed, counts *sum) {
    uint32_t state = (uint32_t)seed * 2654435761U + 1;
    double until = now_s() + (double)numbers[1];
    while (now_s() < until) {
        mix_once(self, &state, (uint32_t)numbers[2], (uint32_t)numbers[3], sum);
    }
}

static void say_counts(const counts *sum) {
    printf("operations %zu read %zu stored %zu wrong %zu failures %zu\n", sum->operations, sum->read, sum->stored,
           sum->wrong, sum->failures);
}

/* mix SEED SECONDS PROMPTS BLOCKS */
static void act_mix(actor *self, const unsigned long numbers[4]) {
    counts sum = {0, 0, 0, 0, 0};
    mix_until(self, numbers, numbers[0], &sum);
    say_counts(&sum);
}

#define NUM_THREADS 4

typedef struct mixer {
    actor *self;
    const unsigned long *numbers;
    unsigned long seed;
    counts sum;
} mixer;

static void *run_mixer(void *argument) {
    mixer *own = argument;
    mix_until(own->self, own->numbers, own->seed, &own->sum);
    return NULL;
}

/* threads SEED SECONDS PROMPTS BLOCKS: several threads mix on one client. */
static void act_threads(actor *self, const unsigned long numbers[4]) {
    mixer mixers[NUM_THREADS];
    pthread_t threads[NUM_THREADS];
    counts sum = {0, 0, 0, 0, 0};
    for (unsigned long i = 0; i < NUM_THREADS; i++) {
        mixer made = {self, numbers, numbers[0] + i, {0, 0, 0, 0, 0}};
        mixers[i] = made;
        if (pthread_create(&threads[i], NULL, run_mixer, &mixers[i]) != 0) {
            exit(2);
        }
    }
    for (unsigned long i = 0; i < NUM_THREADS; i++) {
        pthread_join(threads[i], NULL);
        sum.operations += mixers[i].sum.operations;
        sum.read += mixers[i].sum.read;
        sum.stored += mixers[i].sum.stored;
        sum.wrong += mixers[i].sum.wrong;
        sum.failures += mixers[i].sum.failures;
    }
    say_counts(&sum);
}

/* In a forked child the client is of no use, and harmless. */
static void act_fork(actor *self) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int is_refused = kvt_ping(self->client) == KVT_INVALID && strstr(kvt_error(self->client), "after the fork");
        kvt_lease_release(self->held);
        kvt_close(self->client);
        _exit(is_refused ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    printf("child %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* --- lines ------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    void (*act)(actor *self, const prompt *of);
} acts[] = {
    {"set", act_set},   {"get", act_get},   {"views", act_views},     {"contains", act_contains},
    {"drop", act_drop}, {"hold", act_hold}, {"reserve", act_reserve},
};

static void act_line(actor *self, char *line) {
    char name[32] = "";
    unsigned long numbers[4] = {0, 0, 0, 0};
    sscanf(line, "%31s %lu %lu %lu %lu", name, &numbers[0], &numbers[1], &numbers[2], &numbers[3]);
    for (size_t i = 0; i < sizeof acts / sizeof acts[0]; i++) {
        if (strcmp(name, acts[i].name) == 0) {
            prompt of = prompt_of(self, numbers[0], numbers[1]);
            acts[i].act(self, &of);
            free(of.hashes);
            return;
        }
    }
    if (strcmp(name, "mix") == 0) {
        act_mix(self, numbers);
    } else if (strcmp(name, "threads") == 0) {
        act_threads(self, numbers);
    } else if (strcmp(name, "fork") == 0) {
        act_fork(self);
    } else if (strcmp(name, "release") == 0) {
        act_release(self);
    } else if (strcmp(name, "flush") == 0) {
        say_plainly(self, kvt_flush(self->client));
    } else if (strcmp(name, "ping") == 0) {
        say_plainly(self, kvt_ping(self->client));
    } else {
        printf("failed -1 unknown command\n");
    }
}

int main(int count, char **arguments) {
    if (count < 6) {
        fprintf(stderr, "usage: actor ADDRESS NAMESPACE BLOCK_BYTES BLOCK_TOKENS TIMEOUT_S [TOKEN]\n");
        return 2;
    }
    uint8_t *namespace_id;
    kvt_options options = options_of(count, arguments, &namespace_id);
    options.name = "actor";
    options.timeout_s = strtod(arguments[5], NULL);
    actor self;
    memset(&self, 0, sizeof self);
    self.namespace_id = namespace_id;
    self.block_bytes = (size_t)options.block_bytes;
    self.block_tokens = options.block_tokens;
    kvt_status status = kvt_connect(&options, &self.client);
    say_plainly(&self, status);
    fflush(stdout);
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        act_line(&self, line);
        fflush(stdout);
    }
    kvt_lease_release(self.held);
    kvt_reservation_close(self.reserved);
    kvt_close(self.client);
    free(namespace_id);
    return 0;
}
