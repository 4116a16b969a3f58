// State of the fake libcuda: what its devices, contexts, streams and kernels look like, what was called, what is to
// fail. One lock, held from begin() to finish(), makes the record a total order.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { MAX_DEVICES = 8, MAX_CONTEXT_DEPTH = 16, MAX_ARGS = 32 };

// Subset of CUresult.
enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  CONTEXT_IS_DESTROYED = 709,
  CAPTURE_UNSUPPORTED = 900,
  INVALID_CLUSTER_SIZE = 912,
};

enum { CAPTURE_MODE_GLOBAL = 0, CAPTURE_MODE_THREAD_LOCAL = 1, CAPTURE_MODE_RELAXED = 2 };
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };

// Every handle starts with its kind, so that a handle of one kind used as another is caught.
typedef enum { CONTEXT = 0x43545831, STREAM, LIBRARY, KERNEL, FUNCTION } Kind;

typedef struct {
  int major, minor, sm_count, max_smem;
} Device;

typedef struct {
  Kind kind;
  int device, active;
  uint64_t id;
} Context;

typedef struct {
  Kind kind;
  int alive, capture;
  Context* context;
  uint64_t id, capture_id;
} Stream;

typedef struct {
  Kind kind;
  int loaded;
  void* image;
  size_t size;
} Library;

typedef struct Kernel Kernel;

typedef struct {
  Kind kind;
  Kernel* kernel;
  Context* context;
  uint64_t context_id;
} Function;

struct Kernel {
  Kind kind;
  Library* library;
  char name[128];
  int max_dynamic_smem[MAX_DEVICES], non_portable_cluster[MAX_DEVICES];
  uint64_t resident_in[MAX_DEVICES];  // id of the context into which the code was loaded
  Function functions[MAX_DEVICES];
};

// Sizes of a kernel's parameters, which the real driver knows from the ELF.
typedef struct {
  char kernel[128];
  int count;
  int bytes[16];
} Parameters;

// One driver call. Mirrored by ctypes in driver.py.
typedef struct {
  char name[48];
  uint64_t thread, context, stream;
  int32_t device, result, num_args, reserved;
  uint64_t args[MAX_ARGS];
  const void* blob;  // copy of what the call pointed at
  uint64_t blob_size;
} Record;

extern Device fake_devices[MAX_DEVICES];
extern Context fake_contexts[MAX_DEVICES];
extern int fake_num_devices, fake_version, fake_initialised;
extern __thread Context* fake_context_stack[MAX_CONTEXT_DEPTH];
extern __thread int fake_context_depth;
extern __thread int fake_capture_mode;

// Locks and records; result is the injected failure, or OK. `stream` may be null.
Record* begin(const char* name, void* stream, int num_args, const uint64_t* args);
// Sets the result, unlocks, returns it.
int finish(Record* record, int result);
void attach_blob(Record* record, const void* data, size_t size);

Context* current_context(void);
Stream* new_stream(Context* context);
// Context of a stream handle, default streams included; null for a handle that is none.
Context* stream_context(void* stream);
Stream* as_stream(void* stream);  // null for default streams
// Whether the calling thread may not make an unsafe call now; the captures that it would break are broken.
int breaks_capture(void);
uint64_t next_id(void);
// Device memory is host memory that starts as 0xAB.
void* allocate(size_t size, Context* context);
int release(void* address);
int is_allocated(const void* address, size_t size);
Library* new_library(const void* image, size_t size);
Kernel* new_kernel(Library* library, const char* name);
// Those of the kernel behind a CUkernel or CUfunction: what fake_set_parameters said, else one KernelParams.
const Parameters* parameters_of(const void* function);
uint64_t bytes_in_use(void);
