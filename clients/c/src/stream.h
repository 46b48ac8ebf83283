/* One connected socket: addresses, connecting, bytes with a deadline, descriptors that come with them. */
#ifndef KVT_STREAM_H
#define KVT_STREAM_H

#include <sys/uio.h>

#include "failure.h"

#define KVT_STREAM_BUFFER_BYTES 65536
#define KVT_NO_FD (-1)

typedef struct kvt_address {
    bool is_unix;
    char path[108]; /* of a socket */
    char host[256];
    char port[6];
} kvt_address;

/* Bytes that came and were not asked for yet are kept in `buffer`. One thread at a time. */
typedef struct kvt_stream {
    int fd;
    int passed_fd; /* the first descriptor received, until it is taken */
    bool takes_fds;
    double deadline;  /* monotonic, of the call under way */
    double timeout_s; /* what the socket itself was told; 0 is nothing */
    size_t start;
    size_t end;
    uint8_t buffer[KVT_STREAM_BUFFER_BYTES];
} kvt_stream;

/* KVT_INVALID for anything but unix:/path and tcp://host:port. */
kvt_status kvt_parse_address(const char *text, kvt_address *address, kvt_failure *failure);

/* Connect by the deadline. KVT_REFUSED for a Unix socket that another user, other than root, serves. */
kvt_status kvt_stream_open(kvt_stream *stream, const kvt_address *address, double deadline, kvt_failure *failure);

/* Close the socket and whatever descriptor came and was not taken. A closed stream may be closed again. */
void kvt_stream_close(kvt_stream *stream);

bool kvt_stream_is_open(const kvt_stream *stream);

/* The peer left, or sent an answer without a request: an idle connection in that state cannot be used. */
bool kvt_stream_has_ended(kvt_stream *stream);

/* Send all of it; the vectors are used up. */
kvt_status kvt_stream_send(kvt_stream *stream, struct iovec *vectors, size_t num_vectors, kvt_failure *failure);

/* Receive exactly `num_bytes`. */
kvt_status kvt_stream_receive(kvt_stream *stream, void *into, size_t num_bytes, kvt_failure *failure);

#endif
