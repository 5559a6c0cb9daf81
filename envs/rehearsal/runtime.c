/* In front of CUDA's runtime: says that devices are there, so that torch chooses what it chooses on them, and autograd
   works on tensors that have no values. No kernel ever runs.

   SIMULATED_CAPABILITY is that of the devices, major * 10 + minor; SIMULATED_GIB is their memory. */
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES 8

static int value(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    int capability = value("SIMULATED_CAPABILITY", 90);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "simulated");
    p->totalGlobalMem = (size_t)value("SIMULATED_GIB", 80) << 30;
    p->major = capability / 10;
    p->minor = capability % 10;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 50 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *answer, enum cudaDeviceAttr which, int device) {
    int capability = value("SIMULATED_CAPABILITY", 90);
    *answer = which == cudaDevAttrComputeCapabilityMajor   ? capability / 10
              : which == cudaDevAttrComputeCapabilityMinor ? capability % 10
              : which == cudaDevAttrMultiProcessorCount    ? 132
                                                           : 1024;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
    *unused = *all = (size_t)value("SIMULATED_GIB", 80) << 30;
    return cudaSuccess;
}

static __thread int current = 0;
cudaError_t cudaGetDeviceCount(int *count) { *count = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }

/* Streams and events: everything has happened already. */
static long next = 1;
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = 0; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = 0; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) { *lowest = 0; *highest = -1; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = (cudaStream_t)next++; return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = (cudaEvent_t)next++; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) { *ms = 0; return cudaSuccess; }
