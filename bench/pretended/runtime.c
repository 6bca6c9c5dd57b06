/* The CUDA runtime and cuBLAS of a card that is not there (bench/pretended_card.py): an H100 by its properties.
   Memory is reserved and counted, copies up to 64 MiB are made, kernels do nothing. */

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#undef cudaGetDeviceProperties
static size_t total = 80ull << 30, used = 0;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define MAX 200000
static void *ptrs[MAX];
static size_t sizes[MAX];
static int host[MAX];
static int n = 0;
static void *grab(size_t s) {
    void *p = mmap(0, s, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? 0 : p;
}
static cudaError_t alloc(void **p, size_t s, int h) {
    pthread_mutex_lock(&lock);
    cudaError_t r = cudaSuccess;
    s = (s + 4095) & ~4095ull;
    if (!s)
        s = 4096;
    if (!h && used + s > total) {
        r = cudaErrorMemoryAllocation;
        *p = 0;
    } else {
        *p = grab(s);
        if (!*p)
            r = cudaErrorMemoryAllocation;
        else {
            int i = 0;
            while (i < n && ptrs[i])
                i++;
            if (i == n)
                n++;
            ptrs[i] = *p;
            sizes[i] = s;
            host[i] = h;
            if (!h)
                used += s;
        }
    }
    pthread_mutex_unlock(&lock);
    return r;
}
static cudaError_t release(void *p) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n; i++)
        if (ptrs[i] == p && p) {
            munmap(p, sizes[i]);
            if (!host[i])
                used -= sizes[i];
            ptrs[i] = 0;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
static __thread cudaError_t last = 0;
static __thread int current = 0;
#define FAIL(e) (last = (e))
cudaError_t cudaMalloc(void **p, size_t s) { return FAIL(alloc(p, s, 0)); }
cudaError_t cudaFree(void *p) { return release(p); }
cudaError_t cudaMallocAsync(void **p, size_t s, cudaStream_t st) { return FAIL(alloc(p, s, 0)); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return release(p); }
cudaError_t cudaHostAlloc(void **p, size_t s, unsigned f) { return alloc(p, s, 1); }
cudaError_t cudaFreeHost(void *p) { return release(p); }
cudaError_t cudaHostRegister(void *p, size_t s, unsigned f) { return 0; }
cudaError_t cudaHostUnregister(void *p) { return 0; }
cudaError_t cudaGetDeviceCount(int *c) {
    *c = 1;
    return 0;
}
cudaError_t cudaGetDevice(int *d) {
    *d = current;
    return 0;
}
cudaError_t cudaSetDevice(int d) {
    if (d != 0)
        return FAIL(cudaErrorInvalidDevice);
    return 0;
}
static void prop(struct cudaDeviceProp *p) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3");
    p->totalGlobalMem = total;
    p->major = 9;
    p->minor = 0;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = 65536;
    p->regsPerMultiprocessor = 65536;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->l2CacheSize = 52428800;
    p->maxBlocksPerMultiProcessor = 32;
    p->unifiedAddressing = 1;
    p->totalConstMem = 65536;
    p->textureAlignment = 512;
    p->memPitch = 2147483647;
    p->uuid.bytes[0] = 7;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    prop(p);
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    switch (a) {
    case cudaDevAttrComputeCapabilityMajor:
        *v = 9;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *v = 0;
        break;
    case cudaDevAttrMultiProcessorCount:
        *v = 132;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *v = 232448;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *v = 2048;
        break;
    case cudaDevAttrMaxThreadsPerBlock:
        *v = 1024;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *v = 49152;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *v = 233472;
        break;
    case cudaDevAttrWarpSize:
        *v = 32;
        break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
        *v = 32;
        break;
    case cudaDevAttrMaxGridDimX:
        *v = 2147483647;
        break;
    default:
        *v = 1;
    }
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int l, int d) {
    snprintf(s, l, "0000:01:00.0");
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
    *f = total - used;
    *t = total;
    return 0;
}
cudaError_t cudaDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = 13000;
    return 0;
}
cudaError_t cudaGetLastError(void) {
    cudaError_t e = last;
    last = 0;
    return e;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorString(cudaError_t e) { return e == 2 ? "out of memory" : "pretended error"; }
const char *cudaGetErrorName(cudaError_t e) { return "cudaErrorPretended"; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    *s = (cudaStream_t)calloc(1, 64);
    return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) {
    *s = (cudaStream_t)calloc(1, 64);
    return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
    *c = cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                     size_t *nd) {
    *c = cudaStreamCaptureStatusNone;
    if (id)
        *id = 0;
    if (nd)
        *nd = 0;
    return 0;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
    *p = 0;
    return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) {
    *a = 0;
    *b = -5;
    return 0;
}
struct ev {
    struct timespec t;
};
cudaError_t cudaEventCreate(cudaEvent_t *e) {
    *e = (cudaEvent_t)calloc(1, sizeof(struct ev) + 64);
    return 0;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    free(e);
    return 0;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    clock_gettime(CLOCK_MONOTONIC, &((struct ev *)e)->t);
    return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventElapsedTime(float *m, cudaEvent_t a, cudaEvent_t b) {
    struct ev *x = (void *)a, *y = (void *)b;
    *m = 1e-3f + (y->t.tv_sec - x->t.tv_sec) * 1e3 + (y->t.tv_nsec - x->t.tv_nsec) * 1e-6;
    return 0;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t c, enum cudaMemcpyKind k) {
    memcpy(d, s, c);
    return 0;
}
static int big(size_t c) { return c > (64u << 20); }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t c, enum cudaMemcpyKind k, cudaStream_t st) {
    if (!(k == cudaMemcpyDeviceToDevice && big(c)))
        memmove(d, s, c);
    return 0;
}
cudaError_t cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t c, cudaStream_t st) {
    memmove(d, s, c);
    return 0;
}
cudaError_t cudaMemset(void *d, int v, size_t c) {
    if (!big(c))
        memset(d, v, c);
    return 0;
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t c, cudaStream_t s) {
    if (!big(c))
        memset(d, v, c);
    return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n; i++)
        if (ptrs[i] && (char *)p >= (char *)ptrs[i] && (char *)p < (char *)ptrs[i] + sizes[i]) {
            a->type = host[i] ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
            a->devicePointer = (void *)p;
            a->hostPointer = (void *)p;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->maxDynamicSharedSizeBytes = 232448;
    a->binaryVersion = 90;
    a->ptxVersion = 90;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *b, const void *f, int s, size_t d,
                                                                   unsigned fl) {
    *b = 4;
    return 0;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *s) {
    *p = grab(1 << 20);
    return 0;
}
cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) {
    *c = 1;
    return 0;
}
cudaError_t __cudaLaunchKernel(void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return 0; }
cudaError_t __cudaGetKernel(void **k, const void *f) {
    *k = (void *)f;
    return 0;
}
cudaError_t cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return 0; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *d, unsigned fl) {
    f(s, 0, d);
    return 0;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *d) {
    f(d);
    return 0;
}
/* driver */
static int zero() { return 0; }
static int ctxstate(int d, unsigned *f, int *a) {
    *f = 0;
    *a = 1;
    return 0;
}
static int gran(size_t *g, void *p, int o) {
    *g = 2 << 20;
    return 0;
}
static int reserve(unsigned long long *p, size_t s, size_t al, unsigned long long a, unsigned long long f) {
    *p = (unsigned long long)grab(s);
    return *p ? 0 : 2;
}
static int unreserve(unsigned long long p, size_t s) {
    munmap((void *)p, s);
    return 0;
}
static int create(unsigned long long *h, size_t s, void *p, unsigned long long f) {
    pthread_mutex_lock(&lock);
    int r = 0;
    if (used + s > total)
        r = 2;
    else {
        used += s;
        *h = s;
    }
    pthread_mutex_unlock(&lock);
    return r;
}
static int destroy(unsigned long long h) {
    pthread_mutex_lock(&lock);
    used -= h;
    pthread_mutex_unlock(&lock);
    return 0;
}
static int unmap(unsigned long long p, size_t s) {
    madvise((void *)p, s, MADV_DONTNEED);
    return 0;
}
static int errstr(int e, const char **s) {
    *s = "pretended";
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long fl,
                                             enum cudaDriverEntryPointQueryResult *r) {
    *f = (void *)zero;
    if (r)
        *r = cudaDriverEntryPointSuccess;
    if (!strcmp(s, "cuDevicePrimaryCtxGetState"))
        *f = ctxstate;
    if (!strcmp(s, "cuMemGetAllocationGranularity"))
        *f = gran;
    if (!strcmp(s, "cuMemAddressReserve"))
        *f = reserve;
    if (!strcmp(s, "cuMemAddressFree"))
        *f = unreserve;
    if (!strcmp(s, "cuMemCreate"))
        *f = create;
    if (!strcmp(s, "cuMemRelease"))
        *f = destroy;
    if (!strcmp(s, "cuMemUnmap"))
        *f = unmap;
    if (!strcmp(s, "cuGetErrorString"))
        *f = errstr;
    return 0;
}
/* cublas */
int cublasCreate_v2(void **h) {
    *h = calloc(1, 4096);
    return 0;
}
int cublasLtCreate(void **h) {
    *h = calloc(1, 4096);
    return 0;
}
int cublasGetMathMode(void *h, int *m) {
    *m = 0;
    return 0;
}
int cublasGetPointerMode_v2(void *h, int *m) {
    *m = 0;
    return 0;
}
int cublasLtMatmulDescCreate(void **d, int a, int b) {
    *d = calloc(1, 512);
    return 0;
}
int cublasLtMatrixLayoutCreate(void **d, int a, unsigned long long r, unsigned long long c, long long l) {
    *d = calloc(1, 512);
    return 0;
}
int cublasLtMatmulPreferenceCreate(void **d) {
    *d = calloc(1, 512);
    return 0;
}
int cublasLtMatmulDescDestroy(void *d) {
    free(d);
    return 0;
}
int cublasLtMatrixLayoutDestroy(void *d) {
    free(d);
    return 0;
}
int cublasLtMatmulPreferenceDestroy(void *d) {
    free(d);
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int want, char *res,
                                   int *got) {
    memset(res, 0, 128 * 0 + 8);
    *got = 1;
    return 0;
}
size_t cudnnGetVersion(void) { return 90000; }
