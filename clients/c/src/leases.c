/* Leases: blocks to read where they lie. */
#include <stdlib.h>
#include <string.h>

#include "client.h"

#define AWAIT_BLOCKS 8

struct kvt_lease {
    kvt_grant grant;
    kvt_arena *arena; /* NULL over TCP, and without blocks */
    uint64_t block_bytes;
    kvt_ending ended;
    size_t num_blocks;
    size_t num_ready;
    bool is_granted;
    uint64_t offsets[];
};

static kvt_status check_match(kvt_client *client, const kvt_message *matched, size_t num_hashes) {
    const kvt_value *offsets = &matched->fields[KVT_MATCHED_OFFSETS];
    if (offsets->num_bytes / 8 > num_hashes) {
        return kvt_fail(&client->failure, KVT_PROTOCOL, "the server matched more blocks than it was asked for");
    }
    return kvt_check_offsets(client, offsets->bytes, offsets->num_bytes / 8);
}

static void fill_lease(kvt_client *client, kvt_lease *lease, const kvt_message *matched) {
    const kvt_value *offsets = &matched->fields[KVT_MATCHED_OFFSETS];
    lease->num_blocks = offsets->num_bytes / 8;
    lease->ended = kvt_ending_of(&matched->fields[KVT_MATCHED_ENDED]);
    lease->num_ready =
        client->arena ? (size_t)matched->fields[KVT_MATCHED_NUM_READY].number : lease->num_blocks;
    for (size_t i = 0; i < lease->num_blocks; i++) {
        lease->offsets[i] = kvt_number_at(offsets->bytes, i);
    }
    if (lease->num_blocks && client->arena) {
        lease->arena = client->arena;
        kvt_arena_use(client->arena);
    }
}

static kvt_status ask_for_lease(kvt_client *client, const uint8_t *hashes, size_t count, kvt_lease *lease) {
    kvt_status status = kvt_begin_call(client, 0);
    if (status != KVT_OK) {
        return status;
    }
    kvt_grant_begin(client, &lease->grant, KVT_RELEASE);
    kvt_message request = {KVT_MATCH,
                           {kvt_number(client->space), kvt_bytes(hashes, count * KVT_HASH_BYTES),
                            kvt_number(lease->grant.number), kvt_truth(false)}};
    kvt_message matched;
    status = kvt_call(client, &request, KVT_MATCHED, &matched);
    if (status == KVT_OK) {
        status = check_match(client, &matched, count);
        if (status != KVT_OK) {
            kvt_disconnect(client);
        }
    }
    kvt_grant_settle(client, &lease->grant, status);
    if (status == KVT_OK) {
        fill_lease(client, lease, &matched);
        lease->is_granted = true;
    }
    return status;
}

kvt_status kvt_match(kvt_client *client, const uint8_t *hashes, size_t num_hashes, kvt_lease **lease) {
    *lease = NULL;
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    size_t count;
    status = kvt_check_hashes(client, hashes, num_hashes, &count);
    if (status != KVT_OK) {
        return kvt_leave(client, status);
    }
    kvt_lease *made = calloc(1, sizeof *made + count * sizeof made->offsets[0]);
    if (!made) {
        return kvt_leave(client, kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a lease"));
    }
    made->block_bytes = client->block_bytes;
    if (count) {
        status = ask_for_lease(client, hashes, count, made);
    }
    if (status == KVT_OK) {
        *lease = made;
    } else {
        free(made);
    }
    return kvt_leave(client, status);
}

size_t kvt_lease_num_blocks(const kvt_lease *lease) {
    return lease->num_blocks;
}

kvt_ending kvt_lease_ended(const kvt_lease *lease) {
    return lease->ended;
}

/* The number of leading blocks of a lease in memory, of `count` that a caller waits for. The lock is held. */
static kvt_status await_blocks(kvt_client *client, kvt_lease *lease, size_t count) {
    kvt_status status = kvt_begin_call(client, count * lease->block_bytes);
    if (status == KVT_OK && lease->grant.epoch != client->epoch) {
        return kvt_fail(&client->failure, KVT_UNAVAILABLE, "the server that loaded these blocks is gone");
    }
    kvt_message request = {KVT_AWAIT, {kvt_number(lease->grant.number), kvt_number(count)}};
    kvt_message counted;
    if (status == KVT_OK) {
        status = kvt_call(client, &request, KVT_COUNTED, &counted);
    }
    if (status == KVT_OK) {
        uint64_t found = counted.fields[0].number;
        size_t num_ready = found < count ? (size_t)found : count;
        lease->num_ready = num_ready > lease->num_ready ? num_ready : lease->num_ready;
    }
    return status;
}

kvt_status kvt_lease_wait(kvt_lease *lease, size_t count, size_t *num_ready) {
    size_t wanted = count < lease->num_blocks ? count : lease->num_blocks;
    kvt_status status = KVT_OK;
    if (wanted > lease->num_ready) {
        kvt_client *client = lease->grant.client;
        if (!client) {
            *num_ready = 0;
            return KVT_INVALID;
        }
        status = kvt_enter(client);
        if (status != KVT_OK) {
            *num_ready = 0;
            return status;
        }
        status = kvt_leave(client, await_blocks(client, lease, wanted));
        if (lease->num_ready < wanted) {
            lease->num_blocks = lease->num_ready;
            lease->ended = KVT_ENDED_LOST;
        }
    }
    *num_ready = lease->num_ready < lease->num_blocks ? lease->num_ready : lease->num_blocks;
    return status;
}

static kvt_status refuse_views(kvt_lease *lease, kvt_status status, const char *why) {
    kvt_client *client = lease->grant.client;
    if (client && kvt_enter(client) == KVT_OK) {
        kvt_fail(&client->failure, status, "%s", why);
        kvt_leave(client, status);
    }
    return status;
}

kvt_status kvt_lease_views(kvt_lease *lease, size_t first, size_t count, const void **views) {
    if (!count) {
        return KVT_OK;
    }
    if (first > lease->num_blocks || count > lease->num_blocks - first) {
        return refuse_views(lease, KVT_INVALID, "the lease has no such blocks");
    }
    if (!lease->arena) {
        return refuse_views(lease, KVT_INVALID, "blocks over TCP are in no memory of this process: use kvt_get()");
    }
    if (first + count > lease->num_ready) {
        size_t num_ready;
        kvt_status status = kvt_lease_wait(lease, first + count, &num_ready);
        if (status != KVT_OK) {
            return status;
        }
        if (num_ready < first + count) {
            return refuse_views(lease, KVT_UNAVAILABLE, "blocks did not come from the server's disk");
        }
    }
    for (size_t i = 0; i < count; i++) {
        views[i] = lease->arena->base + lease->offsets[first + i];
    }
    return KVT_OK;
}

void kvt_lease_release(kvt_lease *lease) {
    if (!lease) {
        return;
    }
    if (lease->is_granted) {
        if (lease->num_blocks || lease->arena) {
            kvt_grant_end(&lease->grant);
        } else {
            kvt_grant_drop(&lease->grant); /* the server leases nothing if nothing matched */
        }
    }
    kvt_arena_leave(lease->arena);
    free(lease);
}

/* --- get --------------------------------------------------------------------------------------------------------- */

/* Copy the blocks in memory while the others are in flight. */
static kvt_status copy_out(kvt_lease *lease, void *const *into, size_t *num_blocks) {
    kvt_status status = KVT_OK;
    const void *views[256];
    size_t position = 0;
    while (position < lease->num_blocks && status == KVT_OK) {
        size_t end = lease->num_ready > position ? lease->num_ready : position + AWAIT_BLOCKS;
        end = end < lease->num_blocks ? end : lease->num_blocks;
        size_t num_ready;
        status = kvt_lease_wait(lease, end, &num_ready);
        end = end < num_ready ? end : num_ready;
        while (position < end) {
            size_t count = end - position < 256 ? end - position : 256;
            for (size_t i = 0; i < count; i++) {
                views[i] = lease->arena->base + lease->offsets[position + i];
            }
            kvt_copy_blocks(into + position, views, count, lease->block_bytes);
            position += count;
        }
    }
    *num_blocks = position;
    return status;
}

kvt_status kvt_get(kvt_client *client, const uint8_t *hashes, size_t num_hashes, void *const *into,
                   size_t *num_blocks) {
    *num_blocks = 0;
    if (!kvt_is_local(client)) {
        return kvt_remote_get(client, hashes, num_hashes, into, num_blocks);
    }
    kvt_lease *lease;
    kvt_status status = kvt_match(client, hashes, num_hashes, &lease);
    if (status != KVT_OK) {
        return status;
    }
    if (lease->arena) {
        status = copy_out(lease, into, num_blocks);
    }
    kvt_lease_release(lease);
    return status;
}
