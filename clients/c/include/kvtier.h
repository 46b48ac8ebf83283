/* libkvtier: a client of kvtier's cache servers.
 *
 * A cache server keeps blocks: the KV of a few consecutive tokens, as one run of bytes. Over a Unix socket a client
 * maps the server's memory and reads and writes blocks in place; over TCP blocks are copied. docs/c.md is the manual,
 * docs/protocol.md the wire format.
 *
 * Calls return a status, and kvt_error() describes the failure in one sentence. A client may be used by any thread;
 * its calls take turns, so threads that want to work at once have a client each. A client belongs to the process that
 * opened it: open one after a fork. A later call reconnects to a server that went away.
 */
#ifndef KVTIER_H
#define KVTIER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default) /* the library hides all other symbols */
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVT_HASH_BYTES 32
#define KVT_NAMESPACE_BYTES 32
#define KVT_MAX_HASHES 524256 /* in one call; further ones are neither found nor stored */

typedef enum kvt_status {
    KVT_OK = 0,
    KVT_INVALID,     /* an invalid argument, setting or call */
    KVT_UNAVAILABLE, /* no server answers, or the connection broke */
    KVT_TIMEOUT,     /* no answer within the deadline */
    KVT_REFUSED,     /* the server refused: token, block size, limit */
    KVT_FULL,        /* the server has no room: all of it is leased, pinned or over a limit */
    KVT_PROTOCOL,    /* the peer violated the protocol */
    KVT_CORRUPT,     /* bytes differ from those that were stored */
    KVT_NO_MEMORY    /* this process has no more memory */
} kvt_status;

/* Why a match ended after its last block. */
typedef enum kvt_ending {
    KVT_ENDED_ALL = 0, /* all blocks matched */
    KVT_ENDED_NEVER_STORED,
    KVT_ENDED_EVICTED,
    KVT_ENDED_PENDING, /* being written */
    KVT_ENDED_LIMIT,   /* this client may lease no more */
    KVT_ENDED_DOWN,    /* the server's disk does not answer */
    KVT_ENDED_LOST     /* it was being read from disk and did not arrive */
} kvt_ending;

typedef struct kvt_client kvt_client;
typedef struct kvt_lease kvt_lease;
typedef struct kvt_reservation kvt_reservation;

/* How to connect. Zero it, then set what you need. kvt_connect() keeps no pointers into it. */
typedef struct kvt_options {
    const char *address;         /* unix:/path/to/socket or tcp://host:port */
    const uint8_t *namespace_id; /* KVT_NAMESPACE_BYTES, from kvt_namespace() */
    uint64_t block_bytes;
    uint32_t block_tokens;
    const char *name;   /* the name in the server's listings, at most 256 characters; or NULL */
    const void *token;  /* for TCP */
    size_t token_bytes; /* at most 4096 */
    double timeout_s;   /* of every call, plus a second per 64 MB of a transfer. 0 is one second */
} kvt_options;

/* The fields of a namespace: two programs share blocks exactly if all are equal. NULL texts are empty. */
typedef struct kvt_namespace_fields {
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t block_tokens;
    uint32_t first_layer;
    const char *dtype;         /* float32, float16, bfloat16, float8_e4m3fn or float8_e5m2 */
    const char *weights;       /* the identity of the weights */
    const char *model_config;  /* a JSON object with sorted keys and no spaces, ASCII; NULL is {} */
    const char *quantization;
    const char *compute_dtype; /* empty: as dtype */
    const char *lora;
    const char *salt;
} kvt_namespace_fields;

/* The version of the protocol that this library speaks. */
int kvt_protocol_version(void);

/* A few words for a status. */
const char *kvt_status_text(kvt_status status);

/* --- identity ---------------------------------------------------------------------------------------------------- */

/* The namespace of these fields, the same as Python's NamespaceFields.digest(). KVT_INVALID for wrong fields. */
kvt_status kvt_namespace(const kvt_namespace_fields *fields, uint8_t digest[KVT_NAMESPACE_BYTES]);

/* The bytes of one block of these fields, or 0 if they are wrong. */
uint64_t kvt_block_bytes(const kvt_namespace_fields *fields);

/* Where the chain of a prompt with a salt of its own begins: pass it as a namespace to kvt_hash_blocks(). */
void kvt_salted_root(const uint8_t namespace_id[KVT_NAMESPACE_BYTES], const char *salt,
                     uint8_t root[KVT_NAMESPACE_BYTES]);

/* The hashes of all full blocks of `tokens`, KVT_HASH_BYTES each; returns how many. `hashes` has room for
 * num_tokens / block_tokens of them. With a parent, the tokens follow that block; else it is NULL. */
size_t kvt_hash_blocks(const uint8_t namespace_id[KVT_NAMESPACE_BYTES], const uint8_t *parent, const uint32_t *tokens,
                       size_t num_tokens, uint32_t block_tokens, uint8_t *hashes);

/* The namespace of a tree of tokens, as kvtier.vineyard's caches of that name, tensor size and layers have it.
 * KVT_INVALID for a name that is not UTF-8. */
kvt_status kvt_tree_namespace(const char *name, uint64_t tensor_bytes, uint64_t layers,
                              uint8_t digest[KVT_NAMESPACE_BYTES]);

/* A run of bytes in memory. */
typedef struct kvt_run {
    const void *bytes;
    size_t num_bytes;
} kvt_run;

/* SHA-256, and XXH3 of 64 bits, of runs one after the other. */
void kvt_digest(const kvt_run *runs, size_t num_runs, uint8_t digest[KVT_HASH_BYTES]);
uint64_t kvt_sum(uint64_t seed, const kvt_run *runs, size_t num_runs);

/* --- a client ---------------------------------------------------------------------------------------------------- */

/* Connect. `*client` is also set on failure, for kvt_error(), and must be closed; it is NULL only
 * if there is no memory. A client whose server did not answer can be used, and connects once the server runs. */
kvt_status kvt_connect(const kvt_options *options, kvt_client **client);

/* Give back everything and free the client. Open leases and reservations must not be used any more, but
 * must still be released. NULL is allowed. */
void kvt_close(kvt_client *client);

/* One sentence about the last failed call. Valid until this thread calls it again. */
const char *kvt_error(kvt_client *client);

kvt_status kvt_ping(kvt_client *client);

/* The server is on this host: blocks can be read and written in place. */
bool kvt_is_local(const kvt_client *client);

/* The server's facts at connection: the size of its memory (0 over TCP), and whether it has a disk. */
uint64_t kvt_memory_bytes(kvt_client *client);
bool kvt_has_disk(kvt_client *client);

/* How many servers have answered this client so far: one more after each restart of the server. */
uint64_t kvt_num_servers(kvt_client *client);

/* The server's contents and counters as JSON; free() it. NULL unless the status is KVT_OK. */
kvt_status kvt_stats(kvt_client *client, char **json);

/* All hashes of the namespace that are cached, in the order in which they were stored; free() them. NULL if
 * there are none, or the status is not KVT_OK. */
kvt_status kvt_list(kvt_client *client, uint8_t **hashes, size_t *num_hashes);

/* --- reading ----------------------------------------------------------------------------------------------------- */

/* Lease the longest cached prefix of `hashes`. Afterwards `*lease` has to be released; it is NULL unless the status is
 * KVT_OK. An empty lease is not an error: kvt_lease_ended() says why. */
kvt_status kvt_match(kvt_client *client, const uint8_t *hashes, size_t num_hashes, kvt_lease **lease);

size_t kvt_lease_num_blocks(const kvt_lease *lease);
kvt_ending kvt_lease_ended(const kvt_lease *lease);

/* Wait until the first `count` blocks are in memory (from disk, for example). `*num_ready` is how many are; if it is
 * less, the others are lost and the lease has that many blocks from now on. */
kvt_status kvt_lease_wait(kvt_lease *lease, size_t count, size_t *num_ready);

/* Where blocks first, first + 1, ... lie: `count` pointers to block_bytes each, valid until the lease is released.
 * Waits for blocks that come from disk. KVT_INVALID over TCP, and KVT_UNAVAILABLE if some of them are lost. */
kvt_status kvt_lease_views(kvt_lease *lease, size_t first, size_t count, const void **views);

/* End the lease and free it. NULL is allowed. If the server does not answer, the release is sent later. */
void kvt_lease_release(kvt_lease *lease);

/* Copy the longest cached prefix into `into`, one buffer of block_bytes for each hash. `*num_blocks` leading ones
 * arrived, also if the status is not KVT_OK; the other buffers are undefined. */
kvt_status kvt_get(kvt_client *client, const uint8_t *hashes, size_t num_hashes, void *const *into,
                   size_t *num_blocks);

/* One byte for each hash: 1 where it is cached, else 0. All are 0 if the status is not KVT_OK. */
kvt_status kvt_contains(kvt_client *client, const uint8_t *hashes, size_t num_hashes, uint8_t *flags);

/* --- writing ----------------------------------------------------------------------------------------------------- */

/* Store blocks of block_bytes, one for each hash. `*num_stored` were written; cached ones are not written
 * again. KVT_FULL if some are absent and there was room for none. */
kvt_status kvt_set(kvt_client *client, const uint8_t *hashes, size_t num_hashes, const void *const *blocks,
                   size_t *num_stored);

/* Slots for the absent ones of `hashes`, to be written in place; on this host only. Others see a block once it is
 * committed. Afterwards `*reservation` has to be closed; it is NULL unless the status is KVT_OK. */
kvt_status kvt_reserve(kvt_client *client, const uint8_t *hashes, size_t num_hashes, kvt_reservation **reservation);

size_t kvt_reservation_num_slots(const kvt_reservation *reservation);

/* Blocks that are being written by others, and those that found no room. */
size_t kvt_reservation_num_pending(const kvt_reservation *reservation);
size_t kvt_reservation_num_refused(const kvt_reservation *reservation);

/* Which of the hashes a slot is for. */
size_t kvt_reservation_position(const kvt_reservation *reservation, size_t slot);

/* block_bytes to write to, valid until the reservation is closed, or NULL if there is no such slot. */
void *kvt_reservation_slot(const kvt_reservation *reservation, size_t slot);

/* Commit slots first .. first + count, whose bytes are written: all clients see them now. */
kvt_status kvt_commit(kvt_reservation *reservation, size_t first, size_t count, size_t *num_committed);

/* Give back uncommitted slots, and free the reservation. NULL is allowed. */
void kvt_reservation_close(kvt_reservation *reservation);

/* Forget these; with NULL for `hashes`, everything of the namespace. */
kvt_status kvt_drop(kvt_client *client, const uint8_t *hashes, size_t num_hashes, size_t *num_dropped);

/* Wait until all that was stored before is as durable as the server makes it. */
kvt_status kvt_flush(kvt_client *client);

#ifdef __cplusplus
}
#endif

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif
