/* The driver of a card that is not there: what triton and torch ask it. */

#include <stdlib.h>
#include <string.h>
int cuGetErrorString(int e, const char **s) {
    *s = "pretended";
    return 0;
}
int cuGetErrorName(int e, const char **s) {
    *s = "pretended";
    return 0;
}
int cuDeviceGet(int *d, int i) {
    *d = 0;
    return 0;
}
int cuDeviceGetCount(int *d) {
    *d = 1;
    return 0;
}
int cuDriverGetVersion(int *d) {
    *d = 13000;
    return 0;
}
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) {
    *f = 0;
    *a = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) {
    *c = (void *)8;
    return 0;
}
int cuCtxGetCurrent(void **c) {
    *c = (void *)8;
    return 0;
}
int cuCtxGetDevice(int *d) {
    *d = 0;
    return 0;
}
int cuModuleLoadData(void **m, const void *d) {
    *m = calloc(1, 8);
    return 0;
}
int cuModuleLoadDataEx(void **m, const void *d, unsigned n, void *o, void *v) {
    *m = calloc(1, 8);
    return 0;
}
int cuModuleLoad(void **m, const char *d) {
    *m = calloc(1, 8);
    return 0;
}
int cuModuleGetFunction(void **f, void *m, const char *n) {
    *f = calloc(1, 8);
    return 0;
}
int cuFuncGetAttribute(int *v, int a, void *f) {
    *v = a == 4 ? 64 : a == 0 ? 1024 : 0;
    return 0;
}
int cuDeviceGetAttribute(int *v, int a, int d) {
    switch (a) {
    case 75:
        *v = 9;
        break;
    case 76:
        *v = 0;
        break;
    case 16:
        *v = 132;
        break;
    case 97:
        *v = 232448;
        break;
    case 10:
        *v = 32;
        break;
    case 12:
    case 82:
        *v = 65536;
        break;
    case 36:
    case 13:
        *v = 1500000;
        break;
    case 37:
        *v = 5120;
        break;
    case 39:
        *v = 2048;
        break;
    case 1:
        *v = 1024;
        break;
    case 8:
        *v = 49152;
        break;
    case 81:
        *v = 233472;
        break;
    default:
        *v = 1;
    }
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *b, void *f, int s, unsigned long d) {
    *b = 2;
    return 0;
}
int cuOccupancyMaxActiveClusters(int *b, void *f, void *c) {
    *b = 132;
    return 0;
}
int cuStreamGetCtx(void *s, void **c) {
    *c = (void *)8;
    return 0;
}
int cuPointerGetAttribute(void *d, int a, unsigned long long p) {
    if (a == 3 || a == 4)
        *(unsigned long long *)d = p;
    else if (a == 2)
        *(unsigned *)d = 2;
    return 0;
}
