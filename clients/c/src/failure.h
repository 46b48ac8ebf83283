/* Why something failed: a status and one sentence. */
#ifndef KVT_FAILURE_H
#define KVT_FAILURE_H

#include "kvtier.h"

#define KVT_SENTENCE_BYTES 384

typedef struct kvt_failure {
    kvt_status status;
    char sentence[KVT_SENTENCE_BYTES];
} kvt_failure;

/* Fill in `failure` and return the status. */
kvt_status kvt_fail(kvt_failure *failure, kvt_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* As kvt_fail(), with what the system says of `error`. */
kvt_status kvt_fail_system(kvt_failure *failure, kvt_status status, const char *act, int error);

/* Text of a peer's for people: bytes that could control a terminal become question marks. */
void kvt_make_printable(char *text);

#endif
