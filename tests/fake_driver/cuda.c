// The part of libcuda that fmha_dispatch and cuda-python call, on the devices of state.c: checks what the real driver
// checks, records everything, computes nothing.
#define _GNU_SOURCE
#include <string.h>

#include "state.h"

typedef struct {
  unsigned id;
  char pad[4];
  union {
    char bytes[64];
    unsigned cluster[3];
    unsigned value;
  };
} LaunchAttribute;

typedef struct {
  unsigned grid[3], block[3], smem;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
} LaunchConfig;

enum { ATTRIBUTE_CLUSTER = 4 };
enum { FUNCTION_STATIC_SMEM = 1, FUNCTION_MAX_DYNAMIC_SMEM = 8, FUNCTION_NON_PORTABLE_CLUSTER = 14 };

#define ARGS(...) \
  (int)(sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t)), (uint64_t[]) { __VA_ARGS__ }
#define U(value) (uint64_t)(uintptr_t)(value)
#define BEGIN(name, stream, ...)                           \
  Record* record = begin(name, stream, ARGS(__VA_ARGS__)); \
  if (record->result != OK) return finish(record, record->result)
#define REQUIRE(condition, code) \
  if (!(condition)) return finish(record, code)

static int is_a(const void* handle, Kind kind) { return handle != NULL && *(const Kind*)handle == kind; }

int cuInit(unsigned flags) {
  BEGIN("cuInit", NULL, flags);
  REQUIRE(fake_num_devices != 0, NO_DEVICE);
  fake_initialised = 1;
  return finish(record, OK);
}

int cuDriverGetVersion(int* version) {
  BEGIN("cuDriverGetVersion", NULL, 0);
  *version = fake_version;
  return finish(record, OK);
}

int cuDeviceGetCount(int* count) {
  BEGIN("cuDeviceGetCount", NULL, 0);
  REQUIRE(fake_initialised, NOT_INITIALIZED);
  *count = fake_num_devices;
  return finish(record, OK);
}

int cuDeviceGet(int* device, int ordinal) {
  BEGIN("cuDeviceGet", NULL, ordinal);
  REQUIRE(ordinal >= 0 && ordinal < fake_num_devices, INVALID_DEVICE);
  *device = ordinal;
  return finish(record, OK);
}

int cuDeviceGetName(char* name, int size, int device) {
  BEGIN("cuDeviceGetName", NULL, device);
  strncpy(name, "Fake GPU", size);
  return finish(record, OK);
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN("cuDeviceGetAttribute", NULL, attribute, device);
  REQUIRE(device >= 0 && device < fake_num_devices, INVALID_DEVICE);
  const Device* properties = &fake_devices[device];
  switch (attribute) {
    case 75:
      *value = properties->major;
      break;
    case 76:
      *value = properties->minor;
      break;
    case 16:
      *value = properties->sm_count;
      break;
    case 97:
      *value = properties->max_smem;
      break;
    default:
      return finish(record, INVALID_VALUE);
  }
  return finish(record, OK);
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN("cuDevicePrimaryCtxRetain", NULL, device);
  REQUIRE(fake_initialised, NOT_INITIALIZED);
  REQUIRE(device >= 0 && device < fake_num_devices, INVALID_DEVICE);
  fake_contexts[device].active = 1;
  *context = &fake_contexts[device];
  return finish(record, OK);
}

int cuCtxGetCurrent(void** context) {
  BEGIN("cuCtxGetCurrent", NULL, 0);
  *context = current_context();
  return finish(record, OK);
}

int cuCtxPushCurrent_v2(void* context) {
  BEGIN("cuCtxPushCurrent_v2", NULL, U(context));
  REQUIRE(is_a(context, CONTEXT), INVALID_CONTEXT);
  REQUIRE(fake_context_depth < MAX_CONTEXT_DEPTH, INVALID_VALUE);
  fake_context_stack[fake_context_depth++] = context;
  return finish(record, OK);
}

int cuCtxPopCurrent_v2(void** context) {
  BEGIN("cuCtxPopCurrent_v2", NULL, 0);
  REQUIRE(fake_context_depth > 0, INVALID_CONTEXT);
  *context = fake_context_stack[--fake_context_depth];
  return finish(record, OK);
}

int cuCtxGetId(void* context, unsigned long long* id) {
  BEGIN("cuCtxGetId", NULL, U(context));
  REQUIRE(is_a(context, CONTEXT), INVALID_CONTEXT);
  REQUIRE(((Context*)context)->active, CONTEXT_IS_DESTROYED);
  *id = ((Context*)context)->id;
  return finish(record, OK);
}

int cuStreamCreate(void** stream, unsigned flags) {
  BEGIN("cuStreamCreate", NULL, flags);
  REQUIRE(current_context() != NULL, INVALID_CONTEXT);
  *stream = new_stream(current_context());
  return finish(record, OK);
}

int cuStreamDestroy_v2(void* stream) {
  BEGIN("cuStreamDestroy_v2", stream, 0);
  REQUIRE(as_stream(stream) != NULL, INVALID_HANDLE);
  as_stream(stream)->alive = 0;
  return finish(record, OK);
}

int cuStreamSynchronize(void* stream) {
  BEGIN("cuStreamSynchronize", stream, 0);
  Stream* own = as_stream(stream);
  if (own != NULL && own->capture == CAPTURE_ACTIVE) {
    own->capture = CAPTURE_INVALIDATED;
    return finish(record, CAPTURE_UNSUPPORTED);
  }
  return finish(record, OK);
}

int cuStreamGetCtx(void* stream, void** context) {
  BEGIN("cuStreamGetCtx", stream, 0);
  REQUIRE(stream_context(stream) != NULL, INVALID_HANDLE);
  *context = stream_context(stream);
  return finish(record, OK);
}

int cuStreamGetId(void* stream, unsigned long long* id) {
  BEGIN("cuStreamGetId", stream, 0);
  *id = as_stream(stream) != NULL ? as_stream(stream)->id : U(stream) << 32 | record->thread;
  return finish(record, OK);
}

int cuStreamIsCapturing(void* stream, int* status) {
  BEGIN("cuStreamIsCapturing", stream, 0);
  REQUIRE(stream_context(stream) != NULL, INVALID_CONTEXT);
  *status = as_stream(stream) != NULL ? as_stream(stream)->capture : CAPTURE_NONE;
  return finish(record, OK);
}

int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph, const void** nodes,
                              size_t* num_nodes) {
  BEGIN("cuStreamGetCaptureInfo_v2", stream, U(graph), U(nodes), U(num_nodes));
  REQUIRE(stream_context(stream) != NULL, INVALID_CONTEXT);
  Stream* own = as_stream(stream);
  *status = own != NULL ? own->capture : CAPTURE_NONE;
  if (id != NULL) *id = own != NULL ? own->capture_id : 0;
  return finish(record, OK);
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN("cuThreadExchangeStreamCaptureMode", NULL, *mode);
  const int before = fake_capture_mode;
  fake_capture_mode = *mode;
  *mode = before;
  return finish(record, OK);
}

int cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN("cuMemGetInfo_v2", NULL, 0);
  *total = (size_t)141 << 30;
  *free = *total - bytes_in_use();
  return finish(record, OK);
}

int cuMemAlloc_v2(uint64_t* address, size_t size) {
  BEGIN("cuMemAlloc_v2", NULL, size);
  REQUIRE(current_context() != NULL && size != 0, INVALID_VALUE);
  REQUIRE(!breaks_capture(), CAPTURE_UNSUPPORTED);
  *address = U(allocate(size, current_context()));
  return finish(record, OK);
}

int cuMemFree_v2(uint64_t address) {
  BEGIN("cuMemFree_v2", NULL, address);
  REQUIRE(!breaks_capture(), CAPTURE_UNSUPPORTED);
  return finish(record, release((void*)address));
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t size, void* stream) {
  BEGIN("cuMemsetD8Async", stream, address, value, size);
  REQUIRE(stream_context(stream) != NULL, INVALID_HANDLE);
  REQUIRE(is_allocated((void*)address, size), INVALID_VALUE);
  const Stream* own = as_stream(stream);
  if (own == NULL || own->capture == CAPTURE_NONE) memset((void*)address, value, size);
  return finish(record, OK);
}

#ifndef WITHOUT_LIBRARIES
// An ELF tells its own length: the end of its section or program headers, whichever come last. The real driver crashes
// on anything else.
static uint64_t elf_size(const unsigned char* bytes) {
  uint64_t sections, segments;
  uint16_t section_bytes, num_sections, segment_bytes, num_segments;
  memcpy(&segments, bytes + 32, 8), memcpy(&segment_bytes, bytes + 54, 2), memcpy(&num_segments, bytes + 56, 2);
  memcpy(&sections, bytes + 40, 8), memcpy(&section_bytes, bytes + 58, 2), memcpy(&num_sections, bytes + 60, 2);
  sections += (uint64_t)section_bytes * num_sections;
  segments += (uint64_t)segment_bytes * num_segments;
  return sections > segments ? sections : segments;
}

int cuLibraryLoadData(void** library, const void* image, void* jit_options, void** jit_values, unsigned num_jit,
                      void* options, void** values, unsigned num_options) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  const unsigned char* bytes = image;
  const uint64_t size = memcmp(bytes, "\177ELF", 4) == 0 ? elf_size(bytes) : 0;
  BEGIN("cuLibraryLoadData", NULL, size, num_jit, num_options);
  attach_blob(record, image, size);
  REQUIRE(size != 0, 200);
  REQUIRE(!breaks_capture(), CAPTURE_UNSUPPORTED);
  *library = new_library(image, size);
  return finish(record, OK);
}
#endif

int cuLibraryUnload(void* library) {
  BEGIN("cuLibraryUnload", NULL, U(library));
  REQUIRE(is_a(library, LIBRARY), INVALID_HANDLE);
  ((Library*)library)->loaded = 0;
  return finish(record, OK);
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  BEGIN("cuLibraryGetKernel", NULL, U(library));
  attach_blob(record, name, strlen(name));
  REQUIRE(is_a(library, LIBRARY) && ((Library*)library)->loaded, INVALID_HANDLE);
  const Library* loaded = library;
  REQUIRE(memmem(loaded->image, loaded->size, name, strlen(name) + 1) != NULL, NOT_FOUND);
  *kernel = new_kernel(library, name);
  return finish(record, OK);
}

int cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  BEGIN("cuKernelGetAttribute", NULL, attribute, U(kernel), device);
  REQUIRE(is_a(kernel, KERNEL), INVALID_HANDLE);
  REQUIRE(attribute == FUNCTION_STATIC_SMEM, INVALID_VALUE);
  *value = 0;
  return finish(record, OK);
}

int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  BEGIN("cuKernelSetAttribute", NULL, attribute, value, U(kernel), device);
  REQUIRE(is_a(kernel, KERNEL), INVALID_HANDLE);
  REQUIRE(device >= 0 && device < fake_num_devices, INVALID_DEVICE);
  Kernel* own = kernel;
  if (attribute == FUNCTION_MAX_DYNAMIC_SMEM) {
    REQUIRE(value <= fake_devices[device].max_smem, INVALID_VALUE);
    own->max_dynamic_smem[device] = value;
  } else if (attribute == FUNCTION_NON_PORTABLE_CLUSTER) {
    own->non_portable_cluster[device] = value;
  } else {
    return finish(record, INVALID_VALUE);
  }
  return finish(record, OK);
}

int cuKernelGetFunction(void** function, void* kernel) {
  BEGIN("cuKernelGetFunction", NULL, U(kernel));
  Context* context = current_context();
  REQUIRE(context != NULL && context->active, INVALID_CONTEXT);
  REQUIRE(is_a(kernel, KERNEL), INVALID_HANDLE);
  Function* own = &((Kernel*)kernel)->functions[context->device];
  *own = (Function){FUNCTION, kernel, context, context->id};
  *function = own;
  return finish(record, OK);
}

int cuFuncLoad(void* function) {
  BEGIN("cuFuncLoad", NULL, U(function));
  REQUIRE(is_a(function, FUNCTION), INVALID_HANDLE);
  REQUIRE(!breaks_capture(), CAPTURE_UNSUPPORTED);
  const Function* own = function;
  own->kernel->resident_in[own->context->device] = own->context_id;
  return finish(record, OK);
}

int cuTensorMapEncodeTiled(void* map, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                           int interleave, int swizzle, int l2, int oob) {
  uint64_t args[MAX_ARGS] = {dtype, rank, U(address), interleave, swizzle, l2, oob};
  for (uint32_t i = 0; i < rank && i < 5; ++i) {
    args[7 + i] = dims[i];
    args[12 + i] = i + 1 < rank ? strides[i] : 0;
    args[16 + i] = box[i];
    args[21 + i] = element_strides[i];
  }
  Record* record = begin("cuTensorMapEncodeTiled", NULL, 26, args);
  if (record->result != OK) return finish(record, record->result);
  REQUIRE(U(map) % 64 == 0 && address != NULL && U(address) % 16 == 0 && rank >= 1 && rank <= 5, INVALID_VALUE);
  for (uint32_t i = 0; i < rank; ++i) {
    REQUIRE(dims[i] >= 1 && dims[i] <= (uint64_t)1 << 32 && box[i] >= 1 && box[i] <= 256, INVALID_VALUE);
    REQUIRE(element_strides[i] >= 1 && element_strides[i] <= 8, INVALID_VALUE);
    if (i != 0) REQUIRE(strides[i - 1] % 16 == 0 && strides[i - 1] < (uint64_t)1 << 40, INVALID_VALUE);
  }
  // Recognisable in the parameters of a launch: where it points and which call made it.
  uint64_t words[16] = {0x54414D5045524F46, U(address), (uint64_t)rank << 32 | (unsigned)dtype, dims[0]};
  memcpy(map, words, sizeof words);
  return finish(record, OK);
}

// One behind the other, without padding.
static void attach_parameters(Record* record, void** params, const Parameters* layout) {
  char bytes[2048];
  size_t size = 0;
  for (int i = 0; i < layout->count; ++i) {
    memcpy(bytes + size, params[i], layout->bytes[i]);
    size += layout->bytes[i];
  }
  attach_blob(record, bytes, size);
}

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void** extra) {
  uint64_t args[MAX_ARGS] = {config->grid[0],  config->grid[1],       config->grid[2], config->block[0],
                             config->block[1], config->block[2],      config->smem,    U(function),
                             U(extra),         config->num_attributes};
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->num_attributes && i < 5; ++i) {
    const LaunchAttribute* attribute = &config->attributes[i];
    const int is_cluster = attribute->id == ATTRIBUTE_CLUSTER;
    args[10 + 4 * i] = attribute->id;
    for (int dim = 0; dim < (is_cluster ? 3 : 1); ++dim) args[11 + 4 * i + dim] = attribute->cluster[dim];
    if (is_cluster) cluster = attribute->cluster[0] * attribute->cluster[1] * attribute->cluster[2];
  }
  Record* record = begin("cuLaunchKernelEx", config->stream, 10 + 4 * (int)config->num_attributes, args);
  attach_parameters(record, params, parameters_of(function));
  if (record->result != OK) return finish(record, record->result);

  Context* context = current_context();
  REQUIRE(context != NULL, INVALID_CONTEXT);
  REQUIRE(context->active, CONTEXT_IS_DESTROYED);
  REQUIRE(stream_context(config->stream) == context, INVALID_HANDLE);
  const Kernel* kernel = function;
  if (is_a(function, FUNCTION)) {
    const Function* own = function;
    REQUIRE(own->context == context && own->context_id == context->id, INVALID_HANDLE);
    kernel = own->kernel;
  }
  REQUIRE(is_a(kernel, KERNEL) && kernel->library->loaded, INVALID_HANDLE);
  // Code that is not on the device yet would be loaded now, which capture forbids.
  if (kernel->resident_in[context->device] != context->id) REQUIRE(!breaks_capture(), CAPTURE_UNSUPPORTED);
  for (int i = 0; i < 3; ++i) {
    const unsigned limit = i == 0 ? 0x7fffffff : 65535;
    REQUIRE(config->grid[i] >= 1 && config->grid[i] <= limit && config->block[i] >= 1, INVALID_VALUE);
  }
  REQUIRE(config->block[0] * config->block[1] * config->block[2] <= 1024, INVALID_VALUE);
  const int smem_limit = kernel->max_dynamic_smem[context->device];
  REQUIRE((int)config->smem <= (smem_limit > 49152 ? smem_limit : 49152), INVALID_VALUE);
  REQUIRE(cluster >= 1 && config->grid[0] % cluster == 0, INVALID_CLUSTER_SIZE);
  REQUIRE(cluster <= (kernel->non_portable_cluster[context->device] ? 16u : 8u), INVALID_CLUSTER_SIZE);
  return finish(record, OK);
}
