/* A client inside: one connection that is made again when it broke, and what the server granted.
 *
 * The lock is held by the thread that talks to the server.
 */
#ifndef KVT_CLIENT_H
#define KVT_CLIENT_H

#include <pthread.h>
#include <sys/types.h>

#include "arena.h"
#include "stream.h"
#include "wire.h"

#define KVT_MAX_LATE 4096 /* endings to be told; with more, no call asks for anything new */
#define KVT_MAX_TOKEN_BYTES 4096
#define KVT_SERVER_ID_BYTES 64
#define KVT_MAX_HELPERS 3
#define KVT_FRAME_BYTES ((uint64_t)32 << 20) /* of payload to a frame */

/* A lease or reservation under a number of the client's own. */
typedef struct kvt_grant {
    kvt_client *client; /* NULL once the client is closed */
    kvt_tag ending;     /* KVT_RELEASE or KVT_CLOSE */
    uint64_t number;
    uint64_t epoch; /* of the server that granted it; 0 for none */
    struct kvt_grant *next;
    struct kvt_grant *previous;
} kvt_grant;

/* An ending that did not get through. */
typedef struct kvt_late_ending {
    kvt_tag tag;
    uint64_t number;
} kvt_late_ending;

struct kvt_client {
    pthread_mutex_t lock;
    pid_t pid;
    kvt_address address;
    kvt_status setup; /* what was wrong with the options */
    double timeout_s;
    uint64_t block_bytes;
    uint32_t block_tokens;
    uint8_t namespace_id[KVT_NAMESPACE_BYTES];
    uint8_t holder[KVT_HOLDER_BYTES];
    char *name;
    uint8_t *token; /* NULL without */
    size_t token_bytes;

    kvt_stream stream;
    uint32_t request;
    uint64_t space;
    uint64_t max_payload_bytes;
    bool has_disk;
    double retry_at;
    double retry_s;

    uint8_t server_id[KVT_SERVER_ID_BYTES];
    size_t server_id_bytes;
    uint64_t epoch; /* counts the servers that answered; 0 before the first */
    kvt_arena *arena;

    uint64_t next_grant;
    kvt_grant grants; /* the head of a ring */
    kvt_late_ending *late;
    size_t num_late;
    size_t late_capacity;

    kvt_client *helpers[KVT_MAX_HELPERS]; /* more connections of this holder, for large transfers over TCP */

    kvt_buffer sent;     /* the frame under way */
    kvt_buffer received; /* the body of the last reply; decoded messages point into it */
    kvt_failure failure;
};

/* --- connection.c: with the lock held --- */

/* Have a connection for a call that may take `extra_bytes` of transfer. */
kvt_status kvt_begin_call(kvt_client *client, uint64_t extra_bytes);

/* Send a request; `*number` is what its reply has to carry. A failure ends the connection. */
kvt_status kvt_send_request(kvt_client *client, const kvt_message *request, struct iovec *payload,
                            size_t num_vectors, uint32_t *number);

/* The next reply, which has to be `tag` and answer `number`; a payload is left to the caller if `header` is given.
 * After KVT_REFUSED and KVT_FULL the connection goes on; any other failure ends it. */
kvt_status kvt_receive_reply(kvt_client *client, uint32_t number, kvt_tag tag, kvt_message *reply,
                             kvt_header *header);

/* A request without a payload, and its reply. */
kvt_status kvt_call(kvt_client *client, const kvt_message *request, kvt_tag tag, kvt_message *reply);

/* Close the connection; the next call makes another. Returns `status`. */
kvt_status kvt_break(kvt_client *client, kvt_status status);

void kvt_disconnect(kvt_client *client);

/* --- grants.c --- */

/* Take a number for a grant that is about to be asked for. The lock is held. */
void kvt_grant_begin(kvt_client *client, kvt_grant *grant, kvt_tag ending);

/* What became of asking: a refusal granted nothing; after another failure the server may have granted it, and it is
 * ended when the server answers. The lock is held. */
void kvt_grant_settle(kvt_client *client, kvt_grant *grant, kvt_status status);

/* Now, or when the server answers again. Takes the lock. */
void kvt_grant_end(kvt_grant *grant);

/* There is nothing to end: the server granted nothing. Takes the lock. */
void kvt_grant_drop(kvt_grant *grant);

/* End what could not be ended before; called on a new connection, with the lock held. */
kvt_status kvt_end_late(kvt_client *client);

/* No grant has a client any more. The lock is held. */
void kvt_grants_forget(kvt_client *client);

/* --- client.c --- */

/* Take the lock for a call. KVT_INVALID, without the lock, in a forked child. */
kvt_status kvt_enter(kvt_client *client);

/* Give the lock back and return `status`. */
kvt_status kvt_leave(kvt_client *client, kvt_status status);

/* KVT_INVALID unless a call's hashes can be meant; `*count` is how many of them one request takes. */
kvt_status kvt_check_hashes(kvt_client *client, const uint8_t *hashes, size_t num_hashes, size_t *count);

/* KVT_PROTOCOL unless all of these offsets are places of whole blocks in the arena. */
kvt_status kvt_check_offsets(kvt_client *client, const uint8_t *offsets, size_t count);

/* How many connections share a transfer with the client's own: fewer with few cores. */
size_t kvt_num_helpers(void);

/* Another connection of the same holder, made when it is first needed; NULL without memory. The caller holds the
 * lock, and may use the helper alone while it does. */
kvt_client *kvt_helper(kvt_client *client, size_t number);

/* --- leases.c, reservations.c, remote.c --- */

/* Slots for the absent of `hashes`; the lock is held. */
kvt_status kvt_ask_for_slots(kvt_client *client, kvt_grant *grant, const uint8_t *hashes, size_t count,
                             kvt_message *reserved);

kvt_status kvt_remote_get(kvt_client *client, const uint8_t *hashes, size_t count, void *const *into,
                          size_t *num_blocks);
kvt_status kvt_remote_set(kvt_client *client, const uint8_t *hashes, size_t count, const void *const *blocks,
                          size_t *num_stored);

/* Copy blocks, neighbours together: one long move is up to twice as fast as many short ones. */
void kvt_copy_blocks(void *const *to, const void *const *from, size_t count, uint64_t block_bytes);

#endif
