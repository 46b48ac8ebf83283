#define _GNU_SOURCE
#include "failure.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

kvt_status kvt_fail(kvt_failure *failure, kvt_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure->sentence, sizeof failure->sentence, format, arguments);
    va_end(arguments);
    kvt_make_printable(failure->sentence);
    failure->status = status;
    return status;
}

kvt_status kvt_fail_system(kvt_failure *failure, kvt_status status, const char *act, int error) {
    char text[128];
    return kvt_fail(failure, status, "%s: %s", act, strerror_r(error, text, sizeof text));
}

void kvt_make_printable(char *text) {
    for (; *text; text++) {
        unsigned char byte = (unsigned char)*text;
        if (byte < 0x20 || byte == 0x7f) {
            *text = '?';
        }
    }
}

const char *kvt_status_text(kvt_status status) {
    switch (status) {
    case KVT_OK:
        return "no error";
    case KVT_INVALID:
        return "an argument that cannot be meant";
    case KVT_UNAVAILABLE:
        return "no server answers";
    case KVT_TIMEOUT:
        return "no answer within the deadline";
    case KVT_REFUSED:
        return "the server refused";
    case KVT_FULL:
        return "the server is full";
    case KVT_PROTOCOL:
        return "the peer broke the protocol";
    case KVT_CORRUPT:
        return "a block is not what was stored";
    case KVT_NO_MEMORY:
        return "this process has no more memory";
    }
    return "an unknown status";
}
