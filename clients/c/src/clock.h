/* Deadlines on the monotonic clock. */
#ifndef KVT_CLOCK_H
#define KVT_CLOCK_H

double kvt_now_s(void);

#endif
