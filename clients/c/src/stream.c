#define _GNU_SOURCE
#include "stream.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"

#define MAX_VECTORS 512 /* well under IOV_MAX */
#define SEND_BYTES ((size_t)1 << 20)
#define RECEIVE_BYTES ((size_t)1 << 20)
#define MIN_TIMEOUT_S 0.001
#define SLACK_S 0.05

/* --- addresses --------------------------------------------------------------------------------------------------- */

static kvt_status parse_unix(const char *path, kvt_address *address, kvt_failure *failure) {
    if (strncmp(path, "//", 2) == 0) {
        path += 2;
    }
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof address->path) {
        return kvt_fail(failure, KVT_INVALID, "the path of a socket has from 1 to %zu bytes: write unix:/path",
                        sizeof address->path - 1);
    }
    address->is_unix = true;
    memcpy(address->path, path, length + 1);
    return KVT_OK;
}

static bool is_port(const char *text) {
    size_t length = strlen(text);
    if (length == 0 || length > 5 || strspn(text, "0123456789") != length) {
        return false;
    }
    return strtol(text, NULL, 10) <= 65535;
}

static kvt_status parse_tcp(const char *text, kvt_address *address, kvt_failure *failure) {
    const char *colon = strrchr(text, ':');
    const char *end = colon;
    if (colon && colon > text && text[0] == '[' && colon[-1] == ']') {
        text++;
        end--;
    }
    if (!colon || end <= text || (size_t)(end - text) >= sizeof address->host || !is_port(colon + 1)) {
        return kvt_fail(failure, KVT_INVALID, "an address over TCP is tcp://host:port");
    }
    address->is_unix = false;
    memcpy(address->host, text, (size_t)(end - text));
    address->host[end - text] = '\0';
    snprintf(address->port, sizeof address->port, "%s", colon + 1);
    return KVT_OK;
}

kvt_status kvt_parse_address(const char *text, kvt_address *address, kvt_failure *failure) {
    memset(address, 0, sizeof *address);
    if (text && strncmp(text, "unix:", 5) == 0) {
        return parse_unix(text + 5, address, failure);
    }
    if (text && strncmp(text, "tcp://", 6) == 0) {
        return parse_tcp(text + 6, address, failure);
    }
    return kvt_fail(failure, KVT_INVALID, "this is no address: write unix:/path/to/socket or tcp://host:port");
}

/* --- time-outs --------------------------------------------------------------------------------------------------- */

static void set_timeout(kvt_stream *stream, double timeout_s) {
    stream->timeout_s = timeout_s;
    if (timeout_s < MIN_TIMEOUT_S) {
        timeout_s = MIN_TIMEOUT_S;
    }
    struct timeval limit;
    limit.tv_sec = (time_t)timeout_s;
    limit.tv_usec = (suseconds_t)((timeout_s - (double)limit.tv_sec) * 1e6);
    setsockopt(stream->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(stream->fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

/* Each change is a system call: the socket's own limit may run a little too long. */
static kvt_status check_deadline(kvt_stream *stream, kvt_failure *failure) {
    double left_s = stream->deadline - kvt_now_s();
    if (left_s <= 0) {
        return kvt_fail(failure, KVT_TIMEOUT, "no answer within the deadline");
    }
    if (stream->timeout_s < left_s || stream->timeout_s > left_s + SLACK_S) {
        set_timeout(stream, left_s + SLACK_S / 2);
    }
    return KVT_OK;
}

static kvt_status fail_io(int error, kvt_failure *failure) {
    if (error == EAGAIN || error == EWOULDBLOCK || error == EINPROGRESS || error == ETIMEDOUT) {
        return kvt_fail(failure, KVT_TIMEOUT, "no answer within the deadline");
    }
    return kvt_fail_system(failure, KVT_UNAVAILABLE, "the connection broke", error);
}

/* --- connecting -------------------------------------------------------------------------------------------------- */

static void start_stream(kvt_stream *stream, int fd, double deadline) {
    stream->fd = fd;
    stream->passed_fd = KVT_NO_FD;
    stream->takes_fds = false;
    stream->deadline = deadline;
    stream->timeout_s = 0;
    stream->start = stream->end = 0;
}

static kvt_status connect_socket(kvt_stream *stream, const struct sockaddr *target, socklen_t length,
                                 const char *shown, kvt_failure *failure) {
    kvt_status status = check_deadline(stream, failure);
    if (status != KVT_OK) {
        return status;
    }
    int result;
    do {
        result = connect(stream->fd, target, length);
    } while (result != 0 && errno == EINTR);
    if (result == 0 || errno == EISCONN) {
        return KVT_OK;
    }
    char act[320];
    snprintf(act, sizeof act, "no cache server answers on %s", shown);
    if (errno == EAGAIN || errno == EINPROGRESS || errno == ETIMEDOUT || errno == EALREADY) {
        return kvt_fail(failure, KVT_TIMEOUT, "%s within the deadline", act);
    }
    return kvt_fail_system(failure, KVT_UNAVAILABLE, act, errno);
}

/* A server's memory is as good as its owner: another user's may hold anything. */
static kvt_status check_owner(int fd, const char *path, kvt_failure *failure) {
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
        return kvt_fail_system(failure, KVT_REFUSED, "the owner of the socket is not known", errno);
    }
    if (peer.uid != geteuid() && peer.uid != 0) {
        return kvt_fail(failure, KVT_REFUSED, "unix:%s is served by another user (%lu), who is not trusted", path,
                        (unsigned long)peer.uid);
    }
    return KVT_OK;
}

static kvt_status open_unix(kvt_stream *stream, const kvt_address *address, double deadline, kvt_failure *failure) {
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return kvt_fail_system(failure, KVT_UNAVAILABLE, "no socket can be made", errno);
    }
    start_stream(stream, fd, deadline);
    struct sockaddr_un target;
    memset(&target, 0, sizeof target);
    target.sun_family = AF_UNIX;
    memcpy(target.sun_path, address->path, sizeof target.sun_path);
    kvt_status status =
        connect_socket(stream, (const struct sockaddr *)&target, sizeof target, address->path, failure);
    if (status == KVT_OK) {
        status = check_owner(fd, address->path, failure);
    }
    if (status != KVT_OK) {
        kvt_stream_close(stream);
    }
    return status;
}

static kvt_status open_tcp_at(kvt_stream *stream, const struct addrinfo *place, const char *shown, double deadline,
                              kvt_failure *failure) {
    int fd = socket(place->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return kvt_fail_system(failure, KVT_UNAVAILABLE, "no socket can be made", errno);
    }
    start_stream(stream, fd, deadline);
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    kvt_status status = connect_socket(stream, place->ai_addr, place->ai_addrlen, shown, failure);
    if (status != KVT_OK) {
        kvt_stream_close(stream);
    }
    return status;
}

static kvt_status open_tcp(kvt_stream *stream, const kvt_address *address, double deadline, kvt_failure *failure) {
    struct addrinfo wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.ai_socktype = SOCK_STREAM;
    struct addrinfo *places = NULL;
    int error = getaddrinfo(address->host, address->port, &wanted, &places);
    if (error != 0) {
        return kvt_fail(failure, KVT_UNAVAILABLE, "the host %s is not known: %s", address->host, gai_strerror(error));
    }
    kvt_status status = kvt_fail(failure, KVT_UNAVAILABLE, "the host %s has no address", address->host);
    for (const struct addrinfo *place = places; place && status != KVT_OK; place = place->ai_next) {
        status = open_tcp_at(stream, place, address->host, deadline, failure);
    }
    freeaddrinfo(places);
    return status;
}

kvt_status kvt_stream_open(kvt_stream *stream, const kvt_address *address, double deadline, kvt_failure *failure) {
    start_stream(stream, KVT_NO_FD, deadline);
    return address->is_unix ? open_unix(stream, address, deadline, failure)
                            : open_tcp(stream, address, deadline, failure);
}

void kvt_stream_close(kvt_stream *stream) {
    if (stream->fd != KVT_NO_FD) {
        close(stream->fd);
        stream->fd = KVT_NO_FD;
    }
    if (stream->passed_fd != KVT_NO_FD) {
        close(stream->passed_fd);
        stream->passed_fd = KVT_NO_FD;
    }
    stream->start = stream->end = 0;
}

bool kvt_stream_is_open(const kvt_stream *stream) {
    return stream->fd != KVT_NO_FD;
}

bool kvt_stream_has_ended(kvt_stream *stream) {
    struct pollfd waiting = {stream->fd, POLLIN, 0};
    return stream->start != stream->end || poll(&waiting, 1, 0) != 0;
}

/* --- bytes ------------------------------------------------------------------------------------------------------- */

/* How many of the vectors are handed to the kernel at once: more would only make the peer wait. */
static size_t vectors_at_once(const struct iovec *vectors, size_t num_vectors) {
    size_t count = 0;
    size_t num_bytes = 0;
    while (count < num_vectors && count < MAX_VECTORS && num_bytes < SEND_BYTES) {
        num_bytes += vectors[count++].iov_len;
    }
    return count;
}

kvt_status kvt_stream_send(kvt_stream *stream, struct iovec *vectors, size_t num_vectors, kvt_failure *failure) {
    while (num_vectors) {
        kvt_status status = check_deadline(stream, failure);
        if (status != KVT_OK) {
            return status;
        }
        struct msghdr message;
        memset(&message, 0, sizeof message);
        message.msg_iov = vectors;
        message.msg_iovlen = vectors_at_once(vectors, num_vectors);
        ssize_t sent = sendmsg(stream->fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) {
                continue;
            }
            return fail_io(errno, failure);
        }
        size_t left = (size_t)sent;
        while (num_vectors && left >= vectors->iov_len) {
            left -= vectors->iov_len;
            vectors++;
            num_vectors--;
        }
        if (left) {
            vectors->iov_base = (uint8_t *)vectors->iov_base + left;
            vectors->iov_len -= left;
        }
    }
    return KVT_OK;
}

/* Keep the first descriptor that comes, and close all others: a peer must not fill our table of them. */
static void take_descriptors(kvt_stream *stream, struct msghdr *message) {
    for (struct cmsghdr *head = CMSG_FIRSTHDR(message); head; head = CMSG_NXTHDR(message, head)) {
        if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
            if (stream->passed_fd == KVT_NO_FD) {
                stream->passed_fd = fd;
            } else {
                close(fd);
            }
        }
    }
}

static ssize_t receive_with_descriptors(kvt_stream *stream, void *into, size_t num_bytes) {
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec vector = {into, num_bytes};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    ssize_t received = recvmsg(stream->fd, &message, MSG_CMSG_CLOEXEC);
    if (received >= 0) {
        take_descriptors(stream, &message);
    }
    return received;
}

/* At least one byte and at most `num_bytes`. */
static kvt_status receive_some(kvt_stream *stream, void *into, size_t num_bytes, size_t *received,
                               kvt_failure *failure) {
    for (;;) {
        kvt_status status = check_deadline(stream, failure);
        if (status != KVT_OK) {
            return status;
        }
        ssize_t result = stream->takes_fds ? receive_with_descriptors(stream, into, num_bytes)
                                           : recv(stream->fd, into, num_bytes, 0);
        if (result > 0) {
            *received = (size_t)result;
            return KVT_OK;
        }
        if (result == 0) {
            return kvt_fail(failure, KVT_UNAVAILABLE, "the peer closed the connection");
        }
        if (errno != EINTR) {
            return fail_io(errno, failure);
        }
    }
}

static size_t take_buffered(kvt_stream *stream, uint8_t *into, size_t num_bytes) {
    size_t there = stream->end - stream->start;
    size_t taken = there < num_bytes ? there : num_bytes;
    memcpy(into, stream->buffer + stream->start, taken);
    stream->start += taken;
    return taken;
}

kvt_status kvt_stream_receive(kvt_stream *stream, void *into, size_t num_bytes, kvt_failure *failure) {
    uint8_t *at = into;
    while (num_bytes) {
        size_t taken = take_buffered(stream, at, num_bytes);
        at += taken;
        num_bytes -= taken;
        if (!num_bytes) {
            return KVT_OK;
        }
        size_t received;
        kvt_status status;
        if (num_bytes < KVT_STREAM_BUFFER_BYTES) {
            status = receive_some(stream, stream->buffer, sizeof stream->buffer, &received, failure);
            stream->start = 0;
            stream->end = status == KVT_OK ? received : 0;
        } else {
            size_t wanted = num_bytes < RECEIVE_BYTES ? num_bytes : RECEIVE_BYTES;
            status = receive_some(stream, at, wanted, &received, failure);
            if (status == KVT_OK) {
                at += received;
                num_bytes -= received;
            }
        }
        if (status != KVT_OK) {
            return status;
        }
    }
    return KVT_OK;
}
