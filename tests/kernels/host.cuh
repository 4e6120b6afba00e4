// cuda/host.cuh on the CPU: the kernel runs on one thread, the host's side on another.
#pragma once
#include <ctime>
#include <unistd.h>
static inline unsigned load_from_host(const unsigned* from) {
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
static inline void store_to_host(unsigned* to, unsigned value) {
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
static inline void show_to_host() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline unsigned long long nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
static inline void nap() { usleep(20); }
