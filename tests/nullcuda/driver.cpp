// libcuda: the driver's own functions, for Triton's kernels and for the caching allocator's expandable segments. And what all parts
// share: limits, memory, log.
#include "nullcuda.h"

#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

// Read when asked for, not when the library is loaded: tests fork processes that differ in these.
static double number(const char* name, double otherwise) {
    const char* text = getenv(name);
    return text ? atof(text) : otherwise;
}
int null_devices() { static int n = (int)number("NULLCUDA_DEVICES", 8); return n; }
int null_major() { static int n = (int)number("NULLCUDA_MAJOR", 9); return n; }
size_t null_limit() { static size_t n = (size_t)(number("NULLCUDA_GIB", 80) * (1ull << 30)); return n; }

// ---------------------------------------------------------------- log
static std::mutex log_mutex;

static FILE* log_file() {
    static FILE* file = [] {
        const char *path = getenv("NULLCUDA_LOG"), *rank = getenv("RANK");
        return path ? fopen((std::string(path) + "." + (rank ? rank : "0")).c_str(), "a") : nullptr;
    }();
    return file;
}

bool null_logs() { return log_file() != nullptr; }

void null_log(const char* format, ...) {
    FILE* file = log_file();
    if (!file) return;
    std::lock_guard<std::mutex> guard(log_mutex);
    va_list args;
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fputc('\n', file);
}

extern "C" {  // for Python, through ctypes
void nullcuda_mark(const char* text) { null_log("mark %s", text); }  // between the events, where a part of a step begins
void nullcuda_flush() { if (FILE* file = log_file()) fflush(file); }  // recipes end with os._exit, which flushes nothing
}

// ---------------------------------------------------------------- memory, handles
static std::atomic<size_t> used{0};
size_t null_used() { return used; }
void null_give(size_t n) { used -= n; }

bool null_take(size_t n) {
    if ((used += n) <= null_limit()) return true;
    used -= n;
    null_log("malloc_failed bytes=%zu", n);
    return false;
}

void* null_reserve(size_t n) {
    void* p = mmap(nullptr, n ? n : 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}
void null_unreserve(void* p, size_t n) { munmap(p, n ? n : 1); }

// Handles of streams, events and communicators are numbers in steps of 16, above anything that could be a small special value.
static std::atomic<long> handles{0x1000};
long null_handle() { return handles += 16; }
long null_id(const void* handle) { return handle ? ((long)handle - 0x1000) / 16 : 0; }

// ---------------------------------------------------------------- devices
static int attribute(int what) {
    switch (what) {  // of an H100; the numbers of the runtime's enum are the same
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1755000;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return null_major();
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
        default: return 1;  // most of the others ask whether something is supported
    }
}
int null_attribute(int what) { return attribute(what); }

extern "C" {
CUresult cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* n) { *n = null_devices(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int i) { *device = i; return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t* n, CUdevice) { *n = null_limit(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute what, CUdevice) { *value = attribute(what); return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int n, CUdevice) {
    snprintf(name, n, "%s", null_major() == 9 ? "NVIDIA H100 80GB HBM3" : "NVIDIA B200");
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) { *text = "an error of the null device"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char** text) { *text = "NULL_DEVICE"; return CUDA_SUCCESS; }

static CUcontext context = (CUcontext)0x99;
CUresult cuCtxGetCurrent(CUcontext* c) { *c = context; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* n, CUlimit) { *n = 0; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { *c = context; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute what, CUdeviceptr p) {
    if (what == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = p;  // Triton asks for every argument
    else *(int*)value = what == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? CU_MEMORYTYPE_DEVICE : 0;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- modules: a function is its name
CUresult cuModuleLoadData(CUmodule* module, const void*) { *module = (CUmodule)0x55; return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    *module = (CUmodule)0x55;
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}
CUresult cuModuleGetGlobal(CUdeviceptr* p, size_t* n, CUmodule, const char*) {
    *p = 0x66;
    if (n) *n = 8;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute what, CUfunction) {
    *value = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : what == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { *n = 16; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) { *n = 2; return CUDA_SUCCESS; }

CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream, void**,
                        void**) {
    null_log("triton stream=%ld name=%s", null_id(stream), (const char*)f);
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void**, void**) {
    null_log("triton stream=%ld name=%s", null_id(config->hStream), (const char*)f);
    return CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream stream, void**) {
    null_log("triton stream=%ld name=%s", null_id(stream), (const char*)f);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- virtual memory: a handle is a number of bytes
CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *n = 2 << 20;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
    *p = (CUdeviceptr)null_reserve(n);
    return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { null_unreserve((void*)p, n); return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t n, const CUmemAllocationProp*, unsigned long long) {
    *handle = n;
    return null_take(n) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { null_give(handle); return CUDA_SUCCESS; }
CUresult cuMemMap(CUdeviceptr, size_t n, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    null_log("map bytes=%zu", n);
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr, size_t n) { null_log("unmap bytes=%zu", n); return CUDA_SUCCESS; }

// What NVIDIA's libraries know of the driver and nobody else: they ask for it, and do without.
CUresult cuGetExportTable(const void** table, const CUuuid*) { *table = nullptr; return CUDA_ERROR_NOT_FOUND; }

// ---------------------------------------------------------------- the driver's functions by name, for the runtime, NCCL and Triton
CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    *function = dlsym(library, name);
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}
}
