// A driver library without a GPU: enough that cuDNN compiles its kernels at run time and finalizes plans.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static int done;
static int one(void) { return 100; }
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = 0; return 0; }
int cuGetErrorName(int e, const char **s) { *s = "stub"; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "stub"; return 0; }
int cuCtxGetCurrent(void **c) { *c = &done; return 0; }
int cuCtxGetLimit(size_t *v, int w) { *v = 0; return 0; }
int cuCtxPopCurrent(void **c) { *c = &done; return 0; }
int cuCtxPushCurrent(void *c) { return 0; }
int cuKernelGetAttribute(int *v, int a, void *k, int d) { *v = 0; return 0; }
int cuKernelGetFunction(void **f, void *k) { *f = &done; return 0; }
int cuKernelSetAttribute(int a, int v, void *k, int d) { return 0; }
int cuLibraryLoadData(void **l) { *l = &done; return 0; }
int cuLibraryLoadFromFile(void **l) { *l = &done; return 0; }
int cuLibraryGetKernel(void **k, void *l, const char *n) { *k = &done; return 0; }
int cuLibraryUnload(void *l) { return 0; }
int cuModuleLoadData(void **m) { *m = &done; return 0; }
int cuModuleLoadDataEx(void **m) { *m = &done; return 0; }
int cuModuleGetFunction(void **f) { *f = &done; return 0; }
int cuFuncSetAttribute(void) { return 0; }
int cuFuncGetAttribute(int *v) { *v = 0; return 0; }
int cuLaunchKernel(void) { return 100; }
int cuLaunchKernelEx(void) { return 100; }
int cuLaunchCooperativeKernel(void) { return 100; }
int cuLinkAddData(void) { return 100; }
int cuLinkComplete(void) { return 100; }
int cuLinkCreate(void) { return 100; }
int cuLinkDestroy(void) { return 100; }
int cuOccupancyMaxPotentialClusterSize(int *n) { *n = 1; return 0; }
int cuStreamGetCtx(void) { return 100; }
// The runtime inside cuDNN asks for tables of functions; each begins with its size in bytes.
int cuGetExportTable(const void **t, const void *id) {
    static void *table[64] = {(void *)512};
    for (int i = 1; i < 64; i++) table[i] = one;
    *t = table;
    return 0;
}
int cuGetProcAddress_v2(const char *s, void **p, int v, long f, int *st) {
    void *h = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *p = h ? dlsym(h, s) : NULL;
    if (st) *st = *p ? 0 : 1;
    return *p ? 0 : 500;
}
int cuGetProcAddress(const char *s, void **p, int v, long f) { return cuGetProcAddress_v2(s, p, v, f, NULL); }
