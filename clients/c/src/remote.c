/* Blocks over TCP: copied between the server's memory and the caller's, each verified as it arrives.
 *
 * A large transfer is cut into even, adjacent parts; each goes over a connection of its own, by a thread of its own.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "xxh3.h"

#define PIECE_BYTES ((uint64_t)1 << 20) /* summed while it is still in the CPU's cache */
#define SHARED_BYTES ((uint64_t)4 << 20) /* less than this goes over one connection */

/* What is moved: into `into`, or from `blocks` into the slots of a reservation. */
typedef struct transfer {
    const uint8_t *hashes;
    void *const *into;
    const void *const *blocks;
    const uint64_t *positions;
    uint64_t reservation;
} transfer;

/* Blocks, or slots, first .. first + count of a transfer. */
typedef struct part {
    kvt_client *client;
    const transfer *all;
    kvt_status (*move)(struct part *part);
    size_t first;
    size_t count;
    size_t num_done;
    kvt_status status;
    pthread_t thread;
    bool has_thread;
} part;

static void *run_part(void *argument) {
    part *own = argument;
    own->status = kvt_begin_call(own->client, own->count * own->client->block_bytes);
    if (own->status == KVT_OK) {
        own->status = own->move(own);
    }
    return NULL;
}

/* The first part is moved by this thread, and so are others that cannot have a thread or a connection. */
static void run_parts(kvt_client *client, part *parts, size_t num_parts) {
    for (size_t i = 1; i < num_parts; i++) {
        kvt_client *helper = kvt_helper(client, i - 1);
        parts[i].client = helper ? helper : client;
        parts[i].has_thread = helper && pthread_create(&parts[i].thread, NULL, run_part, &parts[i]) == 0;
    }
    run_part(&parts[0]);
    for (size_t i = 1; i < num_parts; i++) {
        if (parts[i].has_thread) {
            pthread_join(parts[i].thread, NULL);
        } else {
            run_part(&parts[i]);
        }
    }
}

/* Move `count` blocks; `*num_done` is how many leading ones were. The first failure is the transfer's. */
static kvt_status move_in_parts(kvt_client *client, const transfer *all, size_t count,
                                kvt_status (*move)(part *part), size_t *num_done) {
    part parts[1 + KVT_MAX_HELPERS];
    size_t num_parts = count * client->block_bytes < SHARED_BYTES ? 1 : 1 + kvt_num_helpers();
    num_parts = num_parts < count ? num_parts : count;
    for (size_t i = 0; i < num_parts; i++) {
        size_t first = count * i / num_parts;
        part made = {client, all, move, first, count * (i + 1) / num_parts - first, 0, KVT_OK, pthread_self(), false};
        parts[i] = made;
    }
    run_parts(client, parts, num_parts);
    kvt_status status = KVT_OK;
    for (size_t i = 0; i < num_parts; i++) {
        if (*num_done == parts[i].first) {
            *num_done += parts[i].num_done;
        }
        if (status == KVT_OK && parts[i].status != KVT_OK) {
            status = parts[i].status;
            if (parts[i].client != client) {
                client->failure = parts[i].client->failure;
            }
        }
    }
    return status;
}

/* --- get --------------------------------------------------------------------------------------------------------- */

static kvt_status receive_block(kvt_client *client, const uint8_t *hash, uint8_t *into, uint64_t expected) {
    kvt_xxh3 sum;
    kvt_checksum_start(&sum, client->namespace_id, hash);
    for (uint64_t at = 0; at < client->block_bytes;) {
        uint64_t left = client->block_bytes - at;
        size_t piece = (size_t)(left < PIECE_BYTES ? left : PIECE_BYTES);
        kvt_status status = kvt_stream_receive(&client->stream, into + at, piece, &client->failure);
        if (status != KVT_OK) {
            return status;
        }
        kvt_xxh3_add(&sum, into + at, piece);
        at += piece;
    }
    if (kvt_xxh3_end(&sum) != expected) {
        return kvt_fail(&client->failure, KVT_CORRUPT, "block %02x%02x%02x%02x... arrived with other bytes than were stored",
                        hash[0], hash[1], hash[2], hash[3]);
    }
    return KVT_OK;
}

/* The payload of one frame. */
static kvt_status receive_blocks(kvt_client *client, const kvt_message *blocks, const kvt_header *header,
                                 const uint8_t *hashes, size_t count, void *const *into, size_t *num_blocks) {
    uint64_t first = blocks->fields[KVT_BLOCKS_FIRST].number;
    uint64_t num_sent = blocks->fields[KVT_BLOCKS_COUNT].number;
    if (first != *num_blocks || num_sent > count - *num_blocks ||
        header->payload_bytes / client->block_bytes != num_sent || header->payload_bytes % client->block_bytes != 0) {
        return kvt_fail(&client->failure, KVT_PROTOCOL, "the server sent other blocks than it was asked for");
    }
    const uint8_t *checksums = blocks->fields[KVT_BLOCKS_CHECKSUMS].bytes;
    for (size_t i = 0; i < num_sent; i++) {
        size_t position = *num_blocks;
        kvt_status status = receive_block(client, hashes + position * KVT_HASH_BYTES, into[position],
                                          kvt_number_at(checksums, i));
        if (status != KVT_OK) {
            return status;
        }
        ++*num_blocks;
    }
    return KVT_OK;
}

/* Have the server look whether it is its copy that was altered; it is dropped then. */
static void suspect(kvt_client *client, const uint8_t *hash) {
    kvt_failure before = client->failure;
    if (kvt_begin_call(client, 0) == KVT_OK) {
        kvt_message request = {KVT_SUSPECT, {kvt_number(client->space), kvt_bytes(hash, KVT_HASH_BYTES)}};
        kvt_message counted;
        kvt_call(client, &request, KVT_COUNTED, &counted);
    }
    client->failure = before;
}

static kvt_status get_frames(kvt_client *client, const uint8_t *hashes, size_t count, void *const *into,
                             size_t *num_blocks) {
    uint64_t frame_blocks = KVT_FRAME_BYTES / client->block_bytes;
    kvt_message request = {KVT_GET,
                           {kvt_number(client->space), kvt_bytes(hashes, count * KVT_HASH_BYTES),
                            kvt_number(frame_blocks ? frame_blocks : 1)}};
    uint32_t number;
    kvt_status status = kvt_send_request(client, &request, NULL, 0, &number);
    bool is_last = false;
    while (status == KVT_OK && !is_last) {
        kvt_header header;
        kvt_message blocks;
        status = kvt_receive_reply(client, number, KVT_BLOCKS, &blocks, &header);
        if (status != KVT_OK) {
            break;
        }
        is_last = blocks.fields[KVT_BLOCKS_IS_LAST].number != 0;
        if (!is_last && blocks.fields[KVT_BLOCKS_COUNT].number == 0) {
            status = kvt_fail(&client->failure, KVT_PROTOCOL, "the server sent a frame without blocks");
        } else {
            status = receive_blocks(client, &blocks, &header, hashes, count, into, num_blocks);
        }
        if (status != KVT_OK) {
            kvt_disconnect(client);
        }
    }
    return status;
}

static kvt_status move_get(part *own) {
    const uint8_t *hashes = own->all->hashes + own->first * KVT_HASH_BYTES;
    kvt_status status =
        get_frames(own->client, hashes, own->count, own->all->into + own->first, &own->num_done);
    if (status == KVT_CORRUPT) {
        suspect(own->client, hashes + own->num_done * KVT_HASH_BYTES);
    }
    return status;
}

kvt_status kvt_remote_get(kvt_client *client, const uint8_t *hashes, size_t num_hashes, void *const *into,
                          size_t *num_blocks) {
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    size_t count;
    status = kvt_check_hashes(client, hashes, num_hashes, &count);
    if (status == KVT_OK && count) {
        transfer all = {hashes, into, NULL, NULL, 0};
        status = move_in_parts(client, &all, count, move_get, num_blocks);
    }
    return kvt_leave(client, status);
}

/* --- set --------------------------------------------------------------------------------------------------------- */

/* Send slots first .. first + count of a part, in one frame. */
static kvt_status send_fill(part *own, size_t first, size_t count, struct iovec *vectors, uint32_t *number) {
    for (size_t i = 0; i < count; i++) {
        vectors[i].iov_base = (void *)(uintptr_t)own->all->blocks[own->all->positions[first + i]];
        vectors[i].iov_len = (size_t)own->client->block_bytes;
    }
    kvt_message fill = {KVT_FILL, {kvt_number(own->all->reservation), kvt_number(first), kvt_number(count)}};
    return kvt_send_request(own->client, &fill, vectors, count, number);
}

/* All frames first, then their answers. */
static kvt_status send_frames(part *own, size_t frame_slots, struct iovec *vectors, uint32_t *numbers) {
    kvt_status status = KVT_OK;
    size_t num_frames = 0;
    for (size_t at = 0; status == KVT_OK && at < own->count; at += frame_slots) {
        size_t count = own->count - at < frame_slots ? own->count - at : frame_slots;
        status = send_fill(own, own->first + at, count, vectors, &numbers[num_frames++]);
    }
    for (size_t i = 0; status == KVT_OK && i < num_frames; i++) {
        kvt_message counted;
        status = kvt_receive_reply(own->client, numbers[i], KVT_COUNTED, &counted, NULL);
        if (status == KVT_OK) {
            uint64_t count = counted.fields[0].number;
            size_t left = own->count - own->num_done;
            own->num_done += count < left ? (size_t)count : left;
        } else if (i + 1 < num_frames) {
            kvt_disconnect(own->client); /* unread answers would be taken for those of later requests */
        }
    }
    return status;
}

static kvt_status move_set(part *own) {
    kvt_client *client = own->client;
    uint64_t frame_bytes =
        client->max_payload_bytes < KVT_FRAME_BYTES ? client->max_payload_bytes : KVT_FRAME_BYTES;
    uint64_t wanted = frame_bytes / client->block_bytes;
    size_t frame_slots = wanted == 0 ? 1 : wanted < own->count ? (size_t)wanted : own->count;
    struct iovec *vectors = calloc(frame_slots, sizeof *vectors);
    uint32_t *numbers = calloc(own->count / frame_slots + 1, sizeof *numbers);
    kvt_status status = vectors && numbers
                            ? send_frames(own, frame_slots, vectors, numbers)
                            : kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a transfer");
    free(vectors);
    free(numbers);
    return status;
}

static kvt_status fill_slots(kvt_client *client, const kvt_grant *grant, const kvt_value *packed,
                             const void *const *blocks, size_t *num_stored) {
    size_t num_slots = packed->num_bytes / 8;
    uint64_t *positions = calloc(num_slots, sizeof *positions);
    if (!positions) {
        return kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a transfer");
    }
    for (size_t i = 0; i < num_slots; i++) {
        positions[i] = kvt_number_at(packed->bytes, i);
    }
    transfer all = {NULL, NULL, blocks, positions, grant->number};
    kvt_status status = move_in_parts(client, &all, num_slots, move_set, num_stored);
    free(positions);
    return status;
}

kvt_status kvt_remote_set(kvt_client *client, const uint8_t *hashes, size_t num_hashes, const void *const *blocks,
                          size_t *num_stored) {
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    size_t count;
    status = kvt_check_hashes(client, hashes, num_hashes, &count);
    if (status != KVT_OK || !count) {
        return kvt_leave(client, status);
    }
    kvt_grant grant;
    kvt_message reserved;
    status = kvt_begin_call(client, 0);
    if (status == KVT_OK) {
        status = kvt_ask_for_slots(client, &grant, hashes, count, &reserved);
    }
    if (status != KVT_OK) {
        return kvt_leave(client, status);
    }
    bool has_slots = reserved.fields[KVT_RESERVED_POSITIONS].num_bytes != 0;
    if (has_slots) {
        status = fill_slots(client, &grant, &reserved.fields[KVT_RESERVED_POSITIONS], blocks, num_stored);
    }
    kvt_leave(client, status);
    if (has_slots) {
        kvt_grant_end(&grant);
    } else {
        kvt_grant_drop(&grant);
    }
    return status;
}
