/* Reservations: slots in a server's memory that are written in place, and set, which uses them. */
#include <stdlib.h>
#include <string.h>

#include "client.h"

#define FIRST_PART_BYTES ((uint64_t)2 << 20)
#define PART_BYTES ((uint64_t)32 << 20)
#define MAX_PARTS 64

struct kvt_reservation {
    kvt_grant grant;
    kvt_arena *arena; /* NULL without slots */
    uint64_t block_bytes;
    size_t num_slots;
    size_t num_pending;
    size_t num_refused;
    uint64_t places[]; /* the positions, then the offsets */
};

static size_t at_most(uint64_t number, size_t limit) {
    return number < limit ? (size_t)number : limit;
}

static kvt_status check_slots(kvt_client *client, const kvt_message *reserved, size_t num_hashes) {
    const kvt_value *positions = &reserved->fields[KVT_RESERVED_POSITIONS];
    size_t count = positions->num_bytes / 8;
    bool is_right = count <= num_hashes;
    for (size_t i = 0; is_right && i < count; i++) {
        is_right = kvt_number_at(positions->bytes, i) < num_hashes;
    }
    if (!is_right) {
        return kvt_fail(&client->failure, KVT_PROTOCOL, "the server reserved blocks that it was not asked for");
    }
    if (!client->address.is_unix) {
        return KVT_OK;
    }
    return kvt_check_offsets(client, reserved->fields[KVT_RESERVED_OFFSETS].bytes, count);
}

kvt_status kvt_ask_for_slots(kvt_client *client, kvt_grant *grant, const uint8_t *hashes, size_t count,
                             kvt_message *reserved) {
    kvt_grant_begin(client, grant, KVT_CLOSE);
    kvt_message request = {KVT_RESERVE,
                           {kvt_number(client->space), kvt_bytes(hashes, count * KVT_HASH_BYTES),
                            kvt_number(grant->number)}};
    kvt_status status = kvt_call(client, &request, KVT_RESERVED, reserved);
    if (status == KVT_OK) {
        status = check_slots(client, reserved, count);
        if (status != KVT_OK) {
            kvt_disconnect(client);
        }
    }
    if (status == KVT_OK && reserved->fields[KVT_RESERVED_NUM_REFUSED].number &&
        !reserved->fields[KVT_RESERVED_POSITIONS].num_bytes) {
        const kvt_value *reason = &reserved->fields[KVT_RESERVED_REASON];
        status = kvt_fail(&client->failure, KVT_FULL, "there is no room for %llu blocks: %.*s",
                          (unsigned long long)reserved->fields[KVT_RESERVED_NUM_REFUSED].number,
                          (int)at_most(reason->num_bytes, 200), (const char *)reason->bytes);
    }
    kvt_grant_settle(client, grant, status);
    return status;
}

static void fill_reservation(kvt_client *client, kvt_reservation *reservation, const kvt_message *reserved) {
    const kvt_value *positions = &reserved->fields[KVT_RESERVED_POSITIONS];
    const kvt_value *offsets = &reserved->fields[KVT_RESERVED_OFFSETS];
    size_t count = positions->num_bytes / 8;
    reservation->num_slots = count;
    reservation->num_pending = at_most(reserved->fields[KVT_RESERVED_NUM_PENDING].number, KVT_MAX_HASHES);
    reservation->num_refused = at_most(reserved->fields[KVT_RESERVED_NUM_REFUSED].number, KVT_MAX_HASHES);
    for (size_t i = 0; i < count; i++) {
        reservation->places[i] = kvt_number_at(positions->bytes, i);
        reservation->places[count + i] = kvt_number_at(offsets->bytes, i);
    }
    if (count) {
        reservation->arena = client->arena;
        kvt_arena_use(client->arena);
    }
}

kvt_status kvt_reserve(kvt_client *client, const uint8_t *hashes, size_t num_hashes, kvt_reservation **reservation) {
    *reservation = NULL;
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    size_t count;
    status = kvt_check_hashes(client, hashes, num_hashes, &count);
    if (status == KVT_OK && !client->address.is_unix) {
        status = kvt_fail(&client->failure, KVT_INVALID, "slots can be written in place only on a server of this host");
    }
    if (status != KVT_OK) {
        return kvt_leave(client, status);
    }
    kvt_reservation *made = calloc(1, sizeof *made + 2 * count * sizeof made->places[0]);
    if (!made) {
        return kvt_leave(client, kvt_fail(&client->failure, KVT_NO_MEMORY, "there is no memory for a reservation"));
    }
    made->block_bytes = client->block_bytes;
    if (count) {
        status = kvt_begin_call(client, 0);
        kvt_message reserved;
        if (status == KVT_OK) {
            status = kvt_ask_for_slots(client, &made->grant, hashes, count, &reserved);
        }
        if (status == KVT_OK) {
            fill_reservation(client, made, &reserved);
        }
    }
    if (status == KVT_OK) {
        *reservation = made;
    } else {
        free(made);
    }
    return kvt_leave(client, status);
}

size_t kvt_reservation_num_slots(const kvt_reservation *reservation) {
    return reservation->num_slots;
}

size_t kvt_reservation_num_pending(const kvt_reservation *reservation) {
    return reservation->num_pending;
}

size_t kvt_reservation_num_refused(const kvt_reservation *reservation) {
    return reservation->num_refused;
}

size_t kvt_reservation_position(const kvt_reservation *reservation, size_t slot) {
    return slot < reservation->num_slots ? (size_t)reservation->places[slot] : 0;
}

void *kvt_reservation_slot(const kvt_reservation *reservation, size_t slot) {
    if (slot >= reservation->num_slots) {
        return NULL;
    }
    uint64_t offset = reservation->places[reservation->num_slots + slot];
    kvt_arena_populate(reservation->arena, offset, reservation->block_bytes);
    return reservation->arena->base + offset;
}

void kvt_reservation_close(kvt_reservation *reservation) {
    if (!reservation) {
        return;
    }
    if (reservation->num_slots) {
        kvt_grant_end(&reservation->grant);
    } else if (reservation->grant.client) {
        kvt_grant_drop(&reservation->grant); /* there is no reservation without slots */
    }
    kvt_arena_leave(reservation->arena);
    free(reservation);
}

/* --- commit ------------------------------------------------------------------------------------------------------ */

static kvt_status begin_commits(kvt_reservation *reservation, uint64_t extra_bytes) {
    kvt_client *client = reservation->grant.client;
    kvt_status status = kvt_begin_call(client, extra_bytes);
    if (status == KVT_OK && reservation->grant.epoch != client->epoch) {
        status = kvt_fail(&client->failure, KVT_REFUSED, "the server that held this reservation is gone");
    }
    return status;
}

static kvt_status send_commit(kvt_reservation *reservation, size_t first, size_t count, uint32_t *number) {
    kvt_message commit = {KVT_COMMIT,
                          {kvt_number(reservation->grant.number), kvt_number(first), kvt_number(count)}};
    return kvt_send_request(reservation->grant.client, &commit, NULL, 0, number);
}

static kvt_status receive_commit(kvt_client *client, uint32_t number, size_t count, size_t *num_committed) {
    kvt_message counted;
    kvt_status status = kvt_receive_reply(client, number, KVT_COUNTED, &counted, NULL);
    if (status == KVT_OK) {
        *num_committed += at_most(counted.fields[0].number, count);
    }
    return status;
}

kvt_status kvt_commit(kvt_reservation *reservation, size_t first, size_t count, size_t *num_committed) {
    *num_committed = 0;
    kvt_client *client = reservation->grant.client;
    if (!client) {
        return KVT_INVALID;
    }
    kvt_status status = kvt_enter(client);
    if (status != KVT_OK) {
        return status;
    }
    if (first > reservation->num_slots || count > reservation->num_slots - first) {
        return kvt_leave(client, kvt_fail(&client->failure, KVT_INVALID, "the reservation has no such slots"));
    }
    if (count) {
        uint32_t number;
        status = begin_commits(reservation, 0);
        if (status == KVT_OK) {
            status = send_commit(reservation, first, count, &number);
        }
        if (status == KVT_OK) {
            status = receive_commit(client, number, count, num_committed);
        }
    }
    return kvt_leave(client, status);
}

/* --- set --------------------------------------------------------------------------------------------------------- */

static void fill_slots(kvt_reservation *reservation, const void *const *blocks, size_t first, size_t count) {
    void *to[256];
    const void *from[256];
    while (count) {
        size_t num_moved = count < 256 ? count : 256;
        for (size_t i = 0; i < num_moved; i++) {
            to[i] = kvt_reservation_slot(reservation, first + i);
            from[i] = blocks[reservation->places[first + i]];
        }
        kvt_copy_blocks(to, from, num_moved, reservation->block_bytes);
        first += num_moved;
        count -= num_moved;
    }
}

/* Parts of a set: all at once, unless there is a disk, which then writes the first while the next are copied. */
static size_t next_part(const kvt_reservation *reservation, bool has_disk, size_t first, uint64_t part_bytes) {
    size_t left = reservation->num_slots - first;
    if (!has_disk) {
        return left;
    }
    uint64_t count = part_bytes / reservation->block_bytes;
    return count == 0 ? 1 : at_most(count, left);
}

/* Copy and commit part by part; the answers are read when as many as may be are on their way, or at the end. */
static kvt_status store_parts(kvt_reservation *reservation, const void *const *blocks, size_t *num_stored) {
    kvt_client *client = reservation->grant.client;
    uint32_t numbers[MAX_PARTS];
    size_t counts[MAX_PARTS];
    size_t num_sent = 0, num_read = 0, first = 0;
    uint64_t part_bytes = FIRST_PART_BYTES;
    kvt_status status = KVT_OK;
    bool has_begun = false;
    while (status == KVT_OK && (first < reservation->num_slots || num_read < num_sent)) {
        bool can_send = first < reservation->num_slots && num_sent - num_read < MAX_PARTS;
        if (!can_send) {
            size_t at = num_read++ % MAX_PARTS;
            status = receive_commit(client, numbers[at], counts[at], num_stored);
            continue;
        }
        size_t count = next_part(reservation, client->has_disk, first, part_bytes);
        fill_slots(reservation, blocks, first, count);
        if (!has_begun) {
            status = begin_commits(reservation, reservation->num_slots * reservation->block_bytes);
            has_begun = true;
        }
        if (status == KVT_OK) {
            counts[num_sent % MAX_PARTS] = count;
            status = send_commit(reservation, first, count, &numbers[num_sent % MAX_PARTS]);
            num_sent++;
        }
        first += count;
        part_bytes = 2 * part_bytes < PART_BYTES ? 2 * part_bytes : PART_BYTES;
    }
    if (num_read < num_sent) {
        kvt_disconnect(client); /* unread answers would be taken for those of later requests */
    }
    return status;
}

static kvt_status local_set(kvt_client *client, const uint8_t *hashes, size_t num_hashes,
                            const void *const *blocks, size_t *num_stored) {
    kvt_reservation *reservation;
    kvt_status status = kvt_reserve(client, hashes, num_hashes, &reservation);
    if (status != KVT_OK) {
        return status;
    }
    if (reservation->num_slots) {
        if (client->has_disk) { /* no other call may come between the commits */
            status = kvt_enter(client);
            if (status == KVT_OK) {
                status = kvt_leave(client, store_parts(reservation, blocks, num_stored));
            }
        } else {
            fill_slots(reservation, blocks, 0, reservation->num_slots);
            status = kvt_commit(reservation, 0, reservation->num_slots, num_stored);
        }
    }
    kvt_reservation_close(reservation);
    return status;
}

kvt_status kvt_set(kvt_client *client, const uint8_t *hashes, size_t num_hashes, const void *const *blocks,
                   size_t *num_stored) {
    *num_stored = 0;
    if (kvt_is_local(client)) {
        return local_set(client, hashes, num_hashes, blocks, num_stored);
    }
    return kvt_remote_set(client, hashes, num_hashes, blocks, num_stored);
}
