/* Blocks over TCP: copied between the server's memory and the caller's, each verified as it arrives. */
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "xxh3.h"

#define PIECE_BYTES ((uint64_t)1 << 20) /* summed while it is still in the CPU's cache */

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

kvt_status kvt_remote_get(kvt_client *client, const uint8_t *hashes, size_t num_hashes, void *const *into,
                          size_t *num_blocks) {
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    size_t count;
    status = kvt_check_hashes(client, hashes, num_hashes, &count);
    if (status == KVT_OK && count) {
        status = kvt_begin_call(client, count * client->block_bytes);
        if (status == KVT_OK) {
            status = get_frames(client, hashes, count, into, num_blocks);
        }
        if (status == KVT_CORRUPT) {
            suspect(client, hashes + *num_blocks * KVT_HASH_BYTES);
        }
    }
    return kvt_leave(client, status);
}

/* --- set --------------------------------------------------------------------------------------------------------- */

typedef struct filling {
    const uint64_t *positions;
    size_t num_slots;
    size_t frame_slots;
    struct iovec *vectors; /* for one frame */
    uint32_t *numbers;     /* of the frames' requests */
    size_t num_frames;
} filling;

static kvt_status send_fill(kvt_client *client, const kvt_grant *grant, filling *all, size_t first,
                            const void *const *blocks) {
    size_t left = all->num_slots - first;
    size_t count = left < all->frame_slots ? left : all->frame_slots;
    for (size_t i = 0; i < count; i++) {
        all->vectors[i].iov_base = (void *)(uintptr_t)blocks[all->positions[first + i]];
        all->vectors[i].iov_len = (size_t)client->block_bytes;
    }
    kvt_message fill = {KVT_FILL, {kvt_number(grant->number), kvt_number(first), kvt_number(count)}};
    return kvt_send_request(client, &fill, all->vectors, count, &all->numbers[all->num_frames++]);
}

static kvt_status send_frames(kvt_client *client, const kvt_grant *grant, filling *all, const void *const *blocks,
                              size_t *num_stored) {
    kvt_status status = KVT_OK;
    for (size_t first = 0; status == KVT_OK && first < all->num_slots; first += all->frame_slots) {
        status = send_fill(client, grant, all, first, blocks);
    }
    for (size_t i = 0; status == KVT_OK && i < all->num_frames; i++) {
        kvt_message counted;
        status = kvt_receive_reply(client, all->numbers[i], KVT_COUNTED, &counted, NULL);
        if (status == KVT_OK) {
            uint64_t count = counted.fields[0].number;
            size_t left = all->num_slots - *num_stored;
            *num_stored += count < left ? (size_t)count : left;
        } else if (i + 1 < all->num_frames) {
            kvt_disconnect(client); /* answers that nobody reads would be taken for others */
        }
    }
    return status;
}

static kvt_status fill_slots(kvt_client *client, const kvt_grant *grant, const kvt_value *packed,
                             const void *const *blocks, size_t *num_stored) {
    filling all;
    memset(&all, 0, sizeof all);
    all.num_slots = packed->num_bytes / 8;
    if (!all.num_slots) {
        return KVT_OK;
    }
    uint64_t frame_bytes =
        client->max_payload_bytes < KVT_FRAME_BYTES ? client->max_payload_bytes : KVT_FRAME_BYTES;
    uint64_t frame_slots = frame_bytes / client->block_bytes;
    all.frame_slots = frame_slots == 0 ? 1 : frame_slots < all.num_slots ? (size_t)frame_slots : all.num_slots;
    uint64_t *positions = calloc(all.num_slots, sizeof *positions);
    all.vectors = calloc(all.frame_slots, sizeof *all.vectors);
    all.numbers = calloc(all.num_slots / all.frame_slots + 1, sizeof *all.numbers);
    kvt_status status = KVT_OK;
    if (positions && all.vectors && all.numbers) {
        for (size_t i = 0; i < all.num_slots; i++) {
            positions[i] = kvt_number_at(packed->bytes, i);
        }
        all.positions = positions;
        status = send_frames(client, grant, &all, blocks, num_stored);
    } else {
        status = kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a transfer");
    }
    free(positions);
    free(all.vectors);
    free(all.numbers);
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
    status = kvt_begin_call(client, count * client->block_bytes);
    if (status == KVT_OK) {
        status = kvt_ask_for_slots(client, &grant, hashes, count, &reserved);
    }
    if (status != KVT_OK) {
        return kvt_leave(client, status);
    }
    bool has_slots = reserved.fields[KVT_RESERVED_POSITIONS].num_bytes != 0;
    status = fill_slots(client, &grant, &reserved.fields[KVT_RESERVED_POSITIONS], blocks, num_stored);
    kvt_leave(client, status);
    if (has_slots) {
        kvt_grant_end(&grant);
    } else {
        kvt_grant_drop(&grant);
    }
    return status;
}
