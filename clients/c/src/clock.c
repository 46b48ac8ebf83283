#define _GNU_SOURCE
#include "clock.h"

#include <time.h>

double kvt_now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}
