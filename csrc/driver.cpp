#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

#include "counters.h"

namespace fmha {
namespace {

constexpr const char* kDefaultPath = "libcuda.so.1";

// What the loader (Python, through cuda-python) calls. Looked for here so that an old driver is reported once, by name,
// and before anything else is tried.
constexpr const char* kLoaderSymbols[] = {
    "cuInit",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetFunction",
    "cuKernelGetAttribute",
    "cuKernelSetAttribute",
    "cuFuncLoad",
};

std::atomic<int> generation{0};

void* resolve(void* library, const char* path, const char* symbol) {
  if (void* address = dlsym(library, symbol)) return address;
  Failure failure(Failure::Kind::kDevice, "the CUDA driver is too old");
  failure.asked = symbol;
  failure.found = std::string(path) + " does not export it";
  failure.fix = "a driver for CUDA 13.0 or newer";
  throw failure;
}

}  // namespace

Driver::Driver(const char* path) {
  if (path == nullptr) path = kDefaultPath;
  // Never closed: kernels, counters and the caller's framework outlive any one object of ours.
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    Failure failure(Failure::Kind::kDevice, "no CUDA driver on this machine");
    const char* reason = dlerror();
    failure.asked = path;
    failure.found = reason != nullptr ? reason : "dlopen failed";
    failure.fix = "run on a machine with an NVIDIA GPU and its driver";
    throw failure;
  }
#define FMHA_QUOTE(name) #name
#define FMHA_RESOLVE(name) name = reinterpret_cast<decltype(name)>(resolve(library, path, FMHA_QUOTE(name)));
  FMHA_DRIVER_FUNCTIONS(FMHA_RESOLVE)
#undef FMHA_RESOLVE
#undef FMHA_QUOTE
  stream_capture_info =
      reinterpret_cast<decltype(stream_capture_info)>(resolve(library, path, "cuStreamGetCaptureInfo_v2"));
  for (const char* symbol : kLoaderSymbols) resolve(library, path, symbol);

  static std::once_flag watch_forks;
  std::call_once(watch_forks, [] { pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); }); });
  counters_ = std::make_unique<Counters>(*this);
}

Driver::~Driver() = default;

int Driver::version() const {
  int version = 0;
  check(cuDriverGetVersion(&version), "cuDriverGetVersion", "asking the driver's version");
  return version;
}

std::string Driver::error_name(int code) const {
  const char* name = nullptr;
  if (cuGetErrorName(static_cast<CUresult>(code), &name) != CUDA_SUCCESS || name == nullptr)
    return "CUresult " + std::to_string(code);
  return name;
}

Failure Driver::failure(int code, const char* call, const std::string& doing) const {
  Failure failure(Failure::Kind::kDriver,
                  std::string(call) + " failed: " + error_name(code) + " (" + std::to_string(code) + ")");
  failure.asked = doing;
  failure.fix = driver_error_cause(code);
  failure.code = code;
  failure.call = call;
  return failure;
}

const char* driver_error_cause(int code) {
  switch (code) {
    case CUDA_ERROR_INVALID_VALUE:
      return "an argument is out of the driver's range";
    case CUDA_ERROR_OUT_OF_MEMORY:
      return "device memory is full: load kernels with prepare() before the KV cache is allocated";
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_DEINITIALIZED:
      return "the driver is not initialised in this process, or the process is exiting";
    case CUDA_ERROR_STUB_LIBRARY:
      return "libcuda is the toolkit's link stub; put the real driver before it on the library path";
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return "another process holds the GPU in exclusive mode";
    case CUDA_ERROR_NO_DEVICE:
      return "the driver sees no GPU; check CUDA_VISIBLE_DEVICES and the container's device access";
    case CUDA_ERROR_INVALID_DEVICE:
      return "the device ordinal is out of range";
    case CUDA_ERROR_INVALID_IMAGE:
      return "the driver cannot read this cubin: it was built by a toolkit newer than the driver";
    case CUDA_ERROR_INVALID_CONTEXT:
      return "no usable context: it was reset or belongs to another device";
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
      return "the cubin was compiled for another GPU architecture";
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED:
      return "the driver took the image for PTX, which this library never ships: the driver is too old for the cubin";
    case CUDA_ERROR_FILE_NOT_FOUND:
    case CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND:
    case CUDA_ERROR_SHARED_OBJECT_INIT_FAILED:
    case CUDA_ERROR_OPERATING_SYSTEM:
      return "the driver's own libraries are missing or do not match the kernel module; reinstall the driver";
    case CUDA_ERROR_INVALID_HANDLE:
      return "the stream or kernel belongs to another device, or was destroyed";
    case CUDA_ERROR_NOT_FOUND:
      return "the cubin has no entry point of that name";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_LAUNCH_FAILED:
      return "an earlier kernel of this process faulted; the context is lost, restart the process and run it under "
             "compute-sanitizer";
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
      return "too many registers or threads for this launch";
    case CUDA_ERROR_LAUNCH_TIMEOUT:
      return "a watchdog ended the kernel: the GPU also drives a display";
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
      return "the primary context was reset after the kernel was loaded; call again";
    case CUDA_ERROR_INVALID_CLUSTER_SIZE:
      return "the cluster does not fit the GPU";
    case CUDA_ERROR_FUNCTION_NOT_LOADED:
      return "the kernel is not loaded on this device";
    case CUDA_ERROR_NOT_SUPPORTED:
      return "the driver or the GPU lacks this feature";
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return "the NVSwitch fabric manager is not running";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
      return "libcuda and the kernel module differ in version; remove the forward-compatibility package or reboot";
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
      return "a stream is being captured into a graph and forbids this call; prepare() before the capture";
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
      return "an earlier call broke the capture of this stream; look for the first error";
    default:
      return "";
  }
}

ContextScope::ContextScope(const Driver& driver, CUcontext context) {
  CUcontext current = nullptr;
  driver.check(driver.cuCtxGetCurrent(&current), "cuCtxGetCurrent", "finding the current context");
  if (current == context) return;
  driver.check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent", "making the tensors' device current");
  pushed_on_ = &driver;
}

ContextScope::~ContextScope() {
  // The only way a pop fails is a context destroyed meanwhile, and then there is nothing to restore.
  CUcontext popped = nullptr;
  if (pushed_on_ != nullptr) pushed_on_->cuCtxPopCurrent(&popped);
}

int fork_generation() { return generation.load(std::memory_order_relaxed); }

}  // namespace fmha
