/* What a server grants for a while, and how it is given back even if the server does not answer at the time. */
#include <stdlib.h>

#include "client.h"

#define FIRST_CAPACITY 16

void kvt_grant_begin(kvt_client *client, kvt_grant *grant, kvt_tag ending) {
    grant->client = client;
    grant->ending = ending;
    grant->number = client->next_grant++;
    grant->epoch = 0;
    grant->next = &client->grants;
    grant->previous = client->grants.previous;
    grant->previous->next = grant;
    client->grants.previous = grant;
}

static void unlink_grant(kvt_grant *grant) {
    grant->previous->next = grant->next;
    grant->next->previous = grant->previous;
}

/* Without memory the server learns of it when this process or client ends. */
static void end_later(kvt_client *client, const kvt_grant *grant) {
    if (client->num_late == client->late_capacity) {
        size_t capacity = client->late_capacity ? 2 * client->late_capacity : FIRST_CAPACITY;
        kvt_late_ending *late = realloc(client->late, capacity * sizeof *late);
        if (!late) {
            return;
        }
        client->late = late;
        client->late_capacity = capacity;
    }
    client->late[client->num_late].tag = grant->ending;
    client->late[client->num_late].number = grant->number;
    client->num_late++;
}

void kvt_grant_settle(kvt_client *client, kvt_grant *grant, kvt_status status) {
    if (status == KVT_OK) {
        grant->epoch = client->epoch;
        return;
    }
    unlink_grant(grant);
    if (status != KVT_REFUSED && status != KVT_FULL) {
        end_later(client, grant);
    }
}

static kvt_status end_now(kvt_client *client, kvt_tag tag, uint64_t number) {
    kvt_message ending = {tag, {kvt_number(number)}};
    kvt_message done;
    return kvt_call(client, &ending, KVT_DONE, &done);
}

void kvt_grant_end(kvt_grant *grant) {
    kvt_client *client = grant->client;
    if (!client || kvt_enter(client) != KVT_OK) {
        return; /* the client has given it back, or it is the parent's */
    }
    unlink_grant(grant);
    kvt_failure before = client->failure;
    if (grant->epoch == client->epoch && grant->epoch != 0) {
        kvt_status status = kvt_begin_call(client, 0);
        if (status == KVT_OK && grant->epoch == client->epoch) {
            status = end_now(client, grant->ending, grant->number);
        }
        if (status != KVT_OK && status != KVT_REFUSED && grant->epoch == client->epoch) {
            end_later(client, grant);
        }
    }
    client->failure = before; /* the caller is not told */
    kvt_leave(client, KVT_OK);
}

void kvt_grant_drop(kvt_grant *grant) {
    kvt_client *client = grant->client;
    if (client && kvt_enter(client) == KVT_OK) {
        unlink_grant(grant);
        kvt_leave(client, KVT_OK);
    }
}

kvt_status kvt_end_late(kvt_client *client) {
    while (client->num_late) {
        const kvt_late_ending *late = &client->late[client->num_late - 1];
        kvt_status status = end_now(client, late->tag, late->number);
        if (status != KVT_OK && status != KVT_REFUSED) {
            return status;
        }
        client->num_late--;
    }
    return KVT_OK;
}

void kvt_grants_forget(kvt_client *client) {
    while (client->grants.next != &client->grants) {
        kvt_grant *grant = client->grants.next;
        unlink_grant(grant);
        grant->client = NULL;
    }
}
