// cuBLAS, NCCL and NVML: matrix products by their sizes, collectives by their communicator, stream and number of elements.
#include "nullcuda.h"

#include <driver_types.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string_view>

extern "C" {
// ---------------------------------------------------------------- cuBLAS
// Declared here, because its header includes what torch's packages do not bring. Handles are pointers, enums and status int: 0 is
// success, CUBLAS_DEFAULT_MATH, CUBLAS_POINTER_MODE_HOST.
struct Handle {
    cudaStream_t stream;
};
static const int CUBLAS = 130100;  // version
int cublasCreate_v2(Handle** handle) { *handle = new Handle{}; return 0; }
int cublasDestroy_v2(Handle* handle) { delete handle; return 0; }
int cublasSetStream_v2(Handle* handle, cudaStream_t stream) { handle->stream = stream; return 0; }
int cublasGetStream_v2(Handle* handle, cudaStream_t* stream) { *stream = handle->stream; return 0; }
int cublasGetVersion_v2(Handle*, int* version) { *version = CUBLAS; return 0; }
int cublasGetMathMode(Handle*, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(Handle*, int* mode) { *mode = 0; return 0; }
const char* cublasGetStatusString(int) { return "a status of the null device"; }
int cublasGemmEx(Handle* handle, int, int, int m, int n, int k) {  // the other arguments are the tensors and how to compute
    null_log("gemm stream=%ld m=%d n=%d k=%d", null_id(handle->stream), m, n, k);
    return 0;
}
int cublasGemmStridedBatchedEx(Handle* handle, int, int, int m, int n, int k) {
    null_log("gemm stream=%ld m=%d n=%d k=%d batched", null_id(handle->stream), m, n, k);
    return 0;
}
void null_blas(const char* name) { null_log("gemm name=%s", name); }  // the other products, from what build.py writes
size_t cublasLtGetVersion() { return CUBLAS; }
int cublasLtCreate(void** handle) { *handle = (void*)null_handle(); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
    *found = 1;
    return 0;
}
int cublasLtMatmul(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, size_t,
                   cudaStream_t stream) {
    null_log("gemm stream=%ld name=cublasLtMatmul", null_id(stream));
    return 0;
}

// ---------------------------------------------------------------- NCCL: nobody waits for anybody
struct Comm {
    unsigned id;  // the same number on all ranks of a communicator
    int size, rank;
};
typedef Comm* ncclComm_t;
struct ncclUniqueId {
    char internal[128];
};
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t;
static const int ncclSuccess = 0, NCCL_VERSION_CODE = 22907;
ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "a result of the null device"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    memset(id, 0, sizeof *id);
    long unique[2] = {getpid(), null_handle()};
    memcpy(id, unique, sizeof unique);
    return ncclSuccess;
}
static ncclResult_t joined(ncclComm_t* comm, int size, const ncclUniqueId& id, int rank) {
    unsigned hash = std::hash<std::string_view>()(std::string_view(id.internal, sizeof id.internal));
    *comm = new Comm{hash % 1000000, size, rank};
    null_log("nccl init comm=%u size=%d rank=%d", (*comm)->id, size, rank);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) { return joined(comm, size, id, rank); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, void*) {
    return joined(comm, size, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, void*) {
    return joined(comm, size, ids[0], rank);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, void*) {
    *out = new Comm{comm->id + color + 1, comm->size, key};
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* n) { *n = comm->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { *error = ncclSuccess; return ncclSuccess; }

cudaError_t cudaMalloc(void**, size_t);
cudaError_t cudaFree(void*);
ncclResult_t ncclMemAlloc(void** p, size_t n) {
    null_log("nccl mem_alloc bytes=%zu", n);
    return cudaMalloc(p, n);
}
ncclResult_t ncclMemFree(void* p) { return cudaFree(p); }
ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) { *handle = (void*)null_handle(); return ncclSuccess; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, void** window, int) {
    *window = (void*)null_handle();
    return ncclSuccess;
}

// count: elements as the call names them, of this rank's part where ranks send different ones; type: nccl.h's ncclDataType_t
static ncclResult_t log_call(const char* name, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s) {
    null_log("nccl %s comm=%u size=%d rank=%d peer=%d count=%zu type=%d stream=%ld", name, comm->id, comm->size, comm->rank, peer,
             count, type, null_id(s));
    return ncclSuccess;
}
ncclResult_t ncclGroupStart() { null_log("nccl group_start"); return ncclSuccess; }
ncclResult_t ncclGroupEnd() { null_log("nccl group_end"); return ncclSuccess; }
ncclResult_t ncclSend(const void*, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    return log_call("send", n, t, peer, c, s);
}
ncclResult_t ncclRecv(void*, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    return log_call("recv", n, t, peer, c, s);
}
ncclResult_t ncclAllReduce(const void*, void*, size_t n, ncclDataType_t t, ncclRedOp_t, ncclComm_t c, cudaStream_t s) {
    return log_call("all_reduce", n, t, -1, c, s);
}
ncclResult_t ncclAllGather(const void*, void*, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    return log_call("all_gather", n, t, -1, c, s);
}
ncclResult_t ncclReduceScatter(const void*, void*, size_t n, ncclDataType_t t, ncclRedOp_t, ncclComm_t c, cudaStream_t s) {
    return log_call("reduce_scatter", n, t, -1, c, s);
}
ncclResult_t ncclAlltoAll(const void*, void*, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    return log_call("all_to_all", n, t, -1, c, s);
}
ncclResult_t ncclReduce(const void*, void*, size_t n, ncclDataType_t t, ncclRedOp_t, int root, ncclComm_t c, cudaStream_t s) {
    return log_call("reduce", n, t, root, c, s);
}
ncclResult_t ncclBroadcast(const void*, void*, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return log_call("broadcast", n, t, root, c, s);
}
ncclResult_t ncclBcast(void*, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return log_call("broadcast", n, t, root, c, s);
}

// ---------------------------------------------------------------- NVML, whose header torch's packages do not bring
static const int NOT_SUPPORTED = 3;
int nvmlInit_v2() { return 0; }
int nvmlInit() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* n) { *n = null_devices(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { *device = (void*)1; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = (void*)1; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses() { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses_v2() { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses_v3() { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV() { return 0; }  // asked before the first expandable segment is mapped
int nvmlSystemGetCudaDriverVersion_v2() { return NOT_SUPPORTED; }
const char* nvmlErrorString(int) { return "an error of the null device"; }
}
