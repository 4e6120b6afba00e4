// What a running kernel and a thread of the host say to each other through pinned host memory. The
// tests emulate this file on the CPU. sm_70 or newer.
#pragma once
#include "ptx.cuh"

// Read a word that the host writes meanwhile. What the host wrote before it is visible afterwards.
DEVICE unsigned load_from_host(const unsigned* from) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Write a word that the host reads meanwhile. What this thread wrote before it is visible then.
DEVICE void store_to_host(unsigned* to, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(to), "r"(value) : "memory");
}

// Let the host see what this thread has written, before it sees anything written later.
DEVICE void show_to_host() { __threadfence_system(); }

// Time of a clock that all of the GPU shares, in nanoseconds.
DEVICE unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Leave the link alone for a moment.
DEVICE void nap() { __nanosleep(500); }
