// What the driver can be asked by name: its errors and its entry points. Neither is recorded.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "state.h"

static const struct {
  int code;
  const char* name;
} kErrors[] = {
    {0, "CUDA_SUCCESS"},
    {1, "CUDA_ERROR_INVALID_VALUE"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {218, "CUDA_ERROR_INVALID_PTX"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND"},
    {303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED"},
    {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE"},
};

int cuGetErrorName(int code, const char** name) {
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; ++i) {
    if (kErrors[i].code != code) continue;
    *name = kErrors[i].name;
    return OK;
  }
  *name = NULL;
  return INVALID_VALUE;
}

// cuda-python resolves everything through this. Every entry point here has one version, whichever is asked for.
int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  Dl_info self;
  dladdr((void*)cuGetProcAddress_v2, &self);
  void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  char versioned[128];
  snprintf(versioned, sizeof versioned, "%s_v2", symbol);
  *function = dlsym(library, symbol);
  // The second version of the capture query has another signature than the one that CUDA 13 headers mean.
  if (*function == NULL && strcmp(symbol, "cuStreamGetCaptureInfo") != 0) *function = dlsym(library, versioned);
  dlclose(library);
  if (status != NULL) *status = *function == NULL;
  return *function == NULL ? NOT_FOUND : OK;
}
