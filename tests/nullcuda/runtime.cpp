// libcudart: devices, memory, streams, events, and the launches of the kernels that are built into torch.
#include "nullcuda.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

int null_attribute(int what);  // driver.cpp

static thread_local int current_device = 0;

// ---------------------------------------------------------------- memory that is known by its address
struct Block {
    size_t bytes;
    cudaMemoryType type;
    int device;
};
static std::map<char*, Block> blocks;
static std::mutex blocks_mutex;

static void remember(void* p, size_t n, cudaMemoryType type) {
    std::lock_guard<std::mutex> guard(blocks_mutex);
    blocks[(char*)p] = {n, type, current_device};
}
static size_t forget(void* p) {
    std::lock_guard<std::mutex> guard(blocks_mutex);
    auto it = blocks.find((char*)p);
    if (it == blocks.end()) return 0;
    size_t n = it->second.bytes;
    blocks.erase(it);
    return n;
}

// The stream that is being captured: what waits, or copies from memory that the device cannot reach, is an error meanwhile.
static cudaStream_t capturing = nullptr;
static unsigned long long captures = 0;
static cudaError_t unless_capturing() { return capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }
static bool pageable(const void* p);

// A copy to the host delivers zeros: nothing has been computed, so this is what every result is. Others move nothing.
static void copy(const char* call, void* to, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
    const char* names[] = {"h2h", "h2d", "d2h", "d2d", "any"};
    null_log("%s kind=%s bytes=%zu stream=%ld", call, names[kind], n, null_id(stream));
    if (kind == cudaMemcpyDeviceToHost) memset(to, 0, n);
}

static bool pageable(const void* p) {
    std::lock_guard<std::mutex> guard(blocks_mutex);
    auto it = blocks.upper_bound((char*)p);
    return it == blocks.begin() || (char*)p >= (--it)->first + it->second.bytes;
}

extern "C" {
// ---------------------------------------------------------------- devices
cudaError_t cudaGetDeviceCount(int* n) { *n = null_devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) { *value = null_attribute(what); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", null_major() == 9 ? "NVIDIA H100 80GB HBM3" : "NVIDIA B200");
    p->major = null_major();
    p->totalGlobalMem = null_limit();
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 5120;
    p->textureAlignment = 512;
    p->pciBusID = device;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = 1;
    p->cooperativeLaunch = p->clusterLaunch = p->memoryPoolsSupported = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int device) {
    snprintf(text, n, "0000:%02x:00.0", device);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
    if (lowest) *lowest = 0;
    if (highest) *highest = -5;
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the null device";
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheNullDevice"; }

// ---------------------------------------------------------------- memory
cudaError_t cudaMalloc(void** p, size_t n) {
    if (!null_take(n)) return cudaErrorMemoryAllocation;
    null_log("malloc bytes=%zu", n);
    remember(*p = null_reserve(n), n, cudaMemoryTypeDevice);
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
    if (!p) return cudaSuccess;
    size_t n = forget(p);
    null_log("free bytes=%zu", n);
    null_give(n);
    null_unreserve(p, n);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {  // pinned memory of the host is memory
    *p = calloc(n ? n : 1, 1);
    if (!*p) return cudaErrorMemoryAllocation;
    null_log("host_alloc bytes=%zu", n);
    remember(*p, n, cudaMemoryTypeHost);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) {
    null_log("host_free bytes=%zu", forget(p));
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) { remember(p, n, cudaMemoryTypeHost); return cudaSuccess; }
cudaError_t cudaHostUnregister(void* p) { forget(p); return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = null_limit();
    *free = null_limit() - null_used();
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    memset(a, 0, sizeof *a);
    std::lock_guard<std::mutex> guard(blocks_mutex);
    auto it = blocks.upper_bound((char*)p);
    if (it != blocks.begin() && (char*)p < (--it)->first + it->second.bytes) {
        a->type = it->second.type;
        a->device = it->second.device;
        a->devicePointer = a->hostPointer = (void*)p;
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void*, size_t n, cudaMemcpyKind kind) {  // the host waits for this one
    copy("copy_sync", to, n, kind, nullptr);
    return unless_capturing();
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
    copy("copy", to, n, kind, stream);
    // memory of expandable segments is not among the blocks, but a copy on the device knows its kind
    bool on_device = kind == cudaMemcpyDeviceToDevice;
    return stream == capturing && !on_device && (pageable(to) || pageable(from)) ? unless_capturing() : cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t pitch, const void*, size_t, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) copy("copy", (char*)to + row * pitch, width, kind, stream);
    return cudaSuccess;
}
cudaError_t cudaMemset(void*, int, size_t n) { null_log("memset bytes=%zu stream=0", n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void*, int, size_t n, cudaStream_t stream) {
    null_log("memset bytes=%zu stream=%ld", n, null_id(stream));
    return cudaSuccess;
}

// ---------------------------------------------------------------- streams and events: all is done as soon as it is asked for
static cudaError_t stream_of(cudaStream_t* stream) { *stream = (cudaStream_t)null_handle(); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return stream_of(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return stream_of(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return stream_of(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = capturing && stream == capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* n) {
    bool active = capturing && stream == capturing;
    if (status) *status = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = active ? captures : 0;
    if (graph) *graph = nullptr;
    if (n) *n = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    null_log("sync_stream stream=%ld", null_id(stream));
    return stream == capturing ? unless_capturing() : cudaSuccess;  // others may be waited for
}
cudaError_t cudaDeviceSynchronize() { null_log("sync_device"); return unless_capturing(); }

// ---------------------------------------------------------------- graphs: what is launched during a capture is in the log once
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    capturing = stream;
    captures++;
    null_log("capture stream=%ld", null_id(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (stream != capturing) return cudaErrorStreamCaptureUnmatched;
    capturing = nullptr;
    *graph = (cudaGraph_t)null_handle();
    null_log("captured stream=%ld", null_id(stream));
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t, unsigned long long) {
    *exec = (cudaGraphExec_t)null_handle();
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) {
    null_log("graph stream=%ld", null_id(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    null_log("wait stream=%ld event=%ld", null_id(stream), null_id(event));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = (cudaEvent_t)null_handle(); return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
static cudaError_t recorded(cudaEvent_t event, cudaStream_t stream) {
    null_log("record stream=%ld event=%ld", null_id(stream), null_id(event));
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return recorded(event, stream); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return recorded(event, stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { null_log("sync_event event=%ld", null_id(event)); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 1; return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { function(data); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

// ---------------------------------------------------------------- kernels
// What the compiler's code calls when a library with kernels is loaded: host address of the stub -> name.
static std::unordered_map<const void*, const char*>& names() {
    static auto* map = new std::unordered_map<const void*, const char*>();
    return *map;
}
void** __cudaRegisterFatBinary(void*) { static void* handle[4]; return handle; }
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, void*, void*, void*, void*, int*) {
    names()[stub] = name;
}
struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
static thread_local Configuration pushed;  // by kernel<<<grid, block, shared, stream>>>, for the stub that is called next
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void**)stream = pushed.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) { *kernel = (cudaKernel_t)stub; return cudaSuccess; }

static cudaError_t launch(const void* stub, cudaStream_t stream) {
    if (null_logs()) {
        auto it = names().find(stub);
        null_log("kernel stream=%ld name=%s", null_id(stream), it == names().end() ? "?" : it->second);
    }
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(kernel, s); }
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(kernel, s); }
cudaError_t cudaLaunchKernel(const void* stub, dim3, dim3, void**, size_t, cudaStream_t stream) { return launch(stub, stream); }
cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(stub, s); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void**) {
    return launch(stub, config->stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = null_major() * 10;
    a->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
    *n = 2;
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** p, const void*) { static char some[1 << 20]; *p = some; return cudaSuccess; }
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**,
                                unsigned) {
    *library = (cudaLibrary_t)0x78;
    return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char*) {
    *kernel = (cudaKernel_t)0x77;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = dlsym(library, name);
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
}
