// The null device: what its parts share. A device without memory and without arithmetic: kernels do nothing, copies move nothing,
// and whatever the host reads from it is zero. So no number means anything; but everything that torch does on the host is real.
//
// One library plays libcuda, libcudart, libcublas, NCCL and NVML. Functions that have something to answer are in driver.cpp,
// runtime.cpp, libraries.cpp and nvml.cpp; build.py adds one that returns 0, success, for every other name that torch asks for.
//
// Environment: NULLCUDA_DEVICES (8), NULLCUDA_MAJOR (9: Hopper; 10: Blackwell), NULLCUDA_GIB (80: malloc fails beyond it),
// NULLCUDA_LOG (a path: each process writes what happens to PATH.RANK, a line per event, in the order of the host's calls).
#pragma once
#include <cstddef>
#include <cstdint>

int null_devices();
int null_major();
size_t null_limit();  // bytes of memory of a device
size_t null_used();   // bytes of it that are taken

// Addresses for n bytes of device memory, or nullptr. They cannot be read or written: the host that does so ends with SIGSEGV.
void* null_reserve(size_t n);
void null_unreserve(void* p, size_t n);
bool null_take(size_t n);  // counts n bytes as taken; false, and a line in the log, if there are not as many
void null_give(size_t n);

// One line in the log: printf. Streams and communicators are small numbers in it: null_id.
void null_log(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool null_logs();
long null_handle();                    // a new value for an opaque pointer
long null_id(const void* handle);      // its number; 0 for nullptr, the default stream
