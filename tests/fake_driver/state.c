#define _GNU_SOURCE
#include "state.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STREAMS = 4096, MAX_LIBRARIES = 1024, MAX_FAILURES = 32, MAX_PARAMETERS = 64 };

typedef struct {
  char* address;
  size_t size;
  Context* context;
  uint64_t context_id;
} Allocation;

typedef struct {
  char name[48];
  int code, skip, times;  // times < 0: always
} Injected;

typedef struct {
  char name[48];
  long microseconds;
} Delay;

Device fake_devices[MAX_DEVICES];
Context fake_contexts[MAX_DEVICES];
int fake_num_devices, fake_version, fake_initialised;
__thread Context* fake_context_stack[MAX_CONTEXT_DEPTH];
__thread int fake_context_depth;
__thread int fake_capture_mode;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Record* records;
static size_t num_records, record_capacity;
static int recording = 1;
static Record unrecorded;
static Stream streams[MAX_STREAMS];
static size_t num_streams;
static Library* libraries[MAX_LIBRARIES];
static size_t num_libraries;
static Kernel* kernels[MAX_LIBRARIES];
static size_t num_kernels;
static Allocation* allocations;
static size_t num_allocations, allocation_capacity;
static Injected injected[MAX_FAILURES];
static size_t num_injected;
static Parameters parameters[MAX_PARAMETERS];
static size_t num_parameters;
static Delay delay;
static uint64_t last_id;

uint64_t next_id(void) { return ++last_id; }

Context* current_context(void) { return fake_context_depth == 0 ? NULL : fake_context_stack[fake_context_depth - 1]; }

static int injected_result(const char* name) {
  for (size_t i = 0; i < num_injected; ++i) {
    Injected* failure = &injected[i];
    if (strcmp(failure->name, name) != 0 || failure->times == 0) continue;
    if (failure->skip > 0) {
      --failure->skip;
      continue;
    }
    if (failure->times > 0) --failure->times;
    return failure->code;
  }
  return OK;
}

Record* begin(const char* name, void* stream, int num_args, const uint64_t* args) {
  if (delay.microseconds != 0 && strcmp(delay.name, name) == 0) {
    struct timespec pause = {delay.microseconds / 1000000, delay.microseconds % 1000000 * 1000};
    nanosleep(&pause, NULL);
  }
  pthread_mutex_lock(&lock);
  Record* record = &unrecorded;
  if (recording) {
    if (num_records == record_capacity) {
      record_capacity = record_capacity == 0 ? 1024 : 2 * record_capacity;
      records = realloc(records, record_capacity * sizeof(Record));
    }
    record = &records[num_records++];
    memset(record, 0, sizeof *record);
    strncpy(record->name, name, sizeof record->name - 1);
    record->thread = (uint64_t)syscall(SYS_gettid);
    record->context = (uint64_t)(uintptr_t)current_context();
    record->device = current_context() == NULL ? -1 : current_context()->device;
    record->stream = (uint64_t)(uintptr_t)stream;
    record->num_args = num_args;
    if (num_args != 0) memcpy(record->args, args, num_args * sizeof *args);
  }
  record->result = injected_result(name);
  return record;
}

int finish(Record* record, int result) {
  record->result = result;
  pthread_mutex_unlock(&lock);
  return result;
}

void attach_blob(Record* record, const void* data, size_t size) {
  if (record == &unrecorded) return;
  void* copy = malloc(size);
  memcpy(copy, data, size);
  record->blob = copy;
  record->blob_size = size;
}

Stream* new_stream(Context* context) {
  if (num_streams == MAX_STREAMS) abort();
  Stream* stream = &streams[num_streams++];
  *stream = (Stream){STREAM, 1, CAPTURE_NONE, context, next_id(), 0};
  return stream;
}

Stream* as_stream(void* stream) {
  return (uintptr_t)stream <= 2 || ((Stream*)stream)->kind != STREAM ? NULL : (Stream*)stream;
}

Context* stream_context(void* stream) {
  if ((uintptr_t)stream <= 2) return current_context();
  return as_stream(stream) == NULL || !as_stream(stream)->alive ? NULL : as_stream(stream)->context;
}

int breaks_capture(void) {
  int broken = 0;
  if (fake_capture_mode == CAPTURE_MODE_RELAXED) return 0;
  for (size_t i = 0; i < num_streams; ++i) {
    if (streams[i].capture != CAPTURE_ACTIVE) continue;
    streams[i].capture = CAPTURE_INVALIDATED;
    broken = 1;
  }
  return broken;
}

void* allocate(size_t size, Context* context) {
  if (num_allocations == allocation_capacity) {
    allocation_capacity = allocation_capacity == 0 ? 64 : 2 * allocation_capacity;
    allocations = realloc(allocations, allocation_capacity * sizeof *allocations);
  }
  char* address = aligned_alloc(256, (size + 255) / 256 * 256);
  memset(address, 0xAB, size);
  allocations[num_allocations++] = (Allocation){address, size, context, context->id};
  return address;
}

int release(void* address) {
  for (size_t i = 0; i < num_allocations; ++i) {
    if (allocations[i].address != address) continue;
    free(address);
    allocations[i] = allocations[--num_allocations];
    return OK;
  }
  return INVALID_VALUE;
}

int is_allocated(const void* address, size_t size) {
  const char* first = address;
  for (size_t i = 0; i < num_allocations; ++i) {
    const Allocation* block = &allocations[i];
    if (first >= block->address && first + size <= block->address + block->size)
      return block->context_id == block->context->id;  // memory of a context that was reset is gone
  }
  return 0;
}

Library* new_library(const void* image, size_t size) {
  if (num_libraries == MAX_LIBRARIES) abort();
  Library* library = calloc(1, sizeof *library);
  *library = (Library){LIBRARY, 1, malloc(size), size};
  memcpy(library->image, image, size);
  libraries[num_libraries++] = library;
  return library;
}

Kernel* new_kernel(Library* library, const char* name) {
  for (size_t i = 0; i < num_kernels; ++i)
    if (kernels[i]->library == library && strcmp(kernels[i]->name, name) == 0) return kernels[i];
  if (num_kernels == MAX_LIBRARIES) abort();
  Kernel* kernel = calloc(1, sizeof *kernel);
  kernel->kind = KERNEL;
  kernel->library = library;
  strncpy(kernel->name, name, sizeof kernel->name - 1);
  kernels[num_kernels++] = kernel;
  return kernel;
}

const Parameters* parameters_of(const void* function) {
  static const Parameters kernel_params = {"", 1, {1280}};
  const Kernel* kernel = function;
  if (kernel->kind == FUNCTION) kernel = ((const Function*)function)->kernel;
  if (kernel->kind == KERNEL)
    for (size_t i = 0; i < num_parameters; ++i)
      if (strcmp(parameters[i].kernel, kernel->name) == 0) return &parameters[i];
  return &kernel_params;
}

uint64_t bytes_in_use(void) {
  uint64_t total = 0;
  for (size_t i = 0; i < num_libraries; ++i) total += libraries[i]->loaded ? libraries[i]->size : 0;
  for (size_t i = 0; i < num_allocations; ++i) total += allocations[i].size;
  return total;
}

// ---- controls, called by tests through ctypes ----

static void fresh_context(int device) { fake_contexts[device] = (Context){CONTEXT, device, 0, next_id()}; }

void fake_clear_records(void) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < num_records; ++i) free((void*)records[i].blob);
  num_records = 0;
  pthread_mutex_unlock(&lock);
}

// A machine without history: `num_devices` H200s, CUDA 13.0. Handles given out before stay invalid but readable.
void fake_reset(int num_devices) {
  fake_clear_records();
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < num_streams; ++i) streams[i].alive = 0;
  for (size_t i = 0; i < num_libraries; ++i) libraries[i]->loaded = 0;
  num_streams = num_libraries = num_kernels = num_injected = num_parameters = 0;
  memset(&delay, 0, sizeof delay);
  recording = 1;
  fake_num_devices = num_devices;
  fake_version = 13000;
  fake_initialised = 0;
  fake_context_depth = 0;
  fake_capture_mode = CAPTURE_MODE_GLOBAL;
  for (int i = 0; i < MAX_DEVICES; ++i) {
    fake_devices[i] = (Device){9, 0, 132, 232448};
    fresh_context(i);
  }
  pthread_mutex_unlock(&lock);
}

void fake_set_device(int device, int major, int minor, int sm_count, int max_smem) {
  fake_devices[device] = (Device){major, minor, sm_count, max_smem};
}

void fake_set_parameters(const char* kernel, int count, const int* bytes) {
  if (num_parameters == MAX_PARAMETERS) abort();
  Parameters* set = &parameters[num_parameters++];
  memset(set, 0, sizeof *set);
  strncpy(set->kernel, kernel, sizeof set->kernel - 1);
  set->count = count;
  memcpy(set->bytes, bytes, count * sizeof *bytes);
}

void fake_set_version(int version) { fake_version = version; }
void fake_set_recording(int on) { recording = on; }

void fake_set_delay(const char* name, long microseconds) {
  strncpy(delay.name, name, sizeof delay.name - 1);
  delay.microseconds = microseconds;
}

// Calls of `name` fail with `code` after `skip` more that do not, `times` times or always (-1).
void fake_fail(const char* name, int code, int skip, int times) {
  pthread_mutex_lock(&lock);
  if (num_injected == MAX_FAILURES) abort();
  Injected* failure = &injected[num_injected++];
  *failure = (Injected){"", code, skip, times};
  strncpy(failure->name, name, sizeof failure->name - 1);
  pthread_mutex_unlock(&lock);
}

void fake_stop_failing(void) { num_injected = 0; }
size_t fake_num_records(void) { return num_records; }
const Record* fake_record(size_t index) { return &records[index]; }

// As cuDevicePrimaryCtxReset by someone else: memory and loaded code of the device are gone, its streams too.
void fake_reset_primary(int device) {
  for (size_t i = 0; i < num_streams; ++i)
    if (streams[i].context == &fake_contexts[device]) streams[i].alive = 0;
  fresh_context(device);
}

void* fake_context(int device) { return &fake_contexts[device]; }
void* fake_new_stream(int device) { return new_stream(&fake_contexts[device]); }

// Device -1: no context is current on the calling thread.
void fake_set_current(int device) {
  fake_context_depth = device < 0 ? 0 : 1;
  fake_context_stack[0] = device < 0 ? NULL : &fake_contexts[device];
}

int fake_current_device(void) { return current_context() == NULL ? -1 : current_context()->device; }

void fake_begin_capture(void* stream) {
  ((Stream*)stream)->capture = CAPTURE_ACTIVE;
  ((Stream*)stream)->capture_id = next_id();
}

// The status that the capture had come to.
int fake_end_capture(void* stream) {
  const int status = ((Stream*)stream)->capture;
  ((Stream*)stream)->capture = CAPTURE_NONE;
  return status;
}
