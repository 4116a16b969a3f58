// The CUDA driver, dlopened: importing the extension needs none, and no call of it is made before one is asked for.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace fmha {

class Counters;

// What the driver half throws. bind_driver.cpp raises the class of fmha_dispatch.errors that `kind` names.
struct Failure : std::runtime_error {
  enum class Kind { kDevice, kDriver, kNotPrepared, kInvalidArgument };

  Failure(Kind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}

  Kind kind;
  std::string asked, found, fix;  // empty: left out
  int code = 0;                   // kDriver: the CUresult
  std::string call;               // kDriver: the driver function
};

// Entry points that the hot path calls. Names go through cuda.h's macros, so the table holds the versions of the
// header that it was compiled with (cuMemAlloc is cuMemAlloc_v2).
#define FMHA_DRIVER_FUNCTIONS(X)       \
  X(cuGetErrorName)                    \
  X(cuDriverGetVersion)                \
  X(cuCtxGetCurrent)                   \
  X(cuCtxPushCurrent)                  \
  X(cuCtxPopCurrent)                   \
  X(cuCtxGetId)                        \
  X(cuStreamGetCtx)                    \
  X(cuStreamGetId)                     \
  X(cuStreamCreate)                    \
  X(cuStreamDestroy)                   \
  X(cuStreamSynchronize)               \
  X(cuStreamIsCapturing)               \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuMemAlloc)                        \
  X(cuMemFree)                         \
  X(cuMemsetD8Async)                   \
  X(cuTensorMapEncodeTiled)            \
  X(cuLaunchKernelEx)

class Driver {
 public:
  // Opens `path`, libcuda.so.1 if null, and resolves every entry point that this library and its loader need. Makes
  // no driver call. Throws Failure: kDevice if there is no driver or it lacks an entry point.
  explicit Driver(const char* path);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Members bear the headers' names, so cuda.h's version macros rename declaration and use alike.
#define FMHA_MEMBER(name) decltype(&::name) name;
  FMHA_DRIVER_FUNCTIONS(FMHA_MEMBER)
#undef FMHA_MEMBER
  // Third version in CUDA 13 headers, second in 12: the second, spelled out, is in every driver that has TMA.
  CUresult (*stream_capture_info)(CUstream, CUstreamCaptureStatus*, cuuint64_t* id, CUgraph*, const CUgraphNode**,
                                  size_t*);

  // CUDA version of the driver, 13000 for 13.0.
  int version() const;
  // "CUDA_ERROR_OUT_OF_MEMORY", or the number where the driver knows no name.
  std::string error_name(int code) const;
  // A kDriver failure that says what was being done, the error's name and number and what it usually means.
  Failure failure(int code, const char* call, const std::string& doing) const;
  // Throws `failure` unless `code` is success.
  void check(CUresult code, const char* call, const char* doing) const {
    if (code != CUDA_SUCCESS) throw failure(code, call, doing);
  }

  Counters& counters() const { return *counters_; }

 private:
  std::unique_ptr<Counters> counters_;
};

// Plain words for a CUresult: what usually causes it and what helps. Empty for a code without an entry.
const char* driver_error_cause(int code);

// Makes `context` current for a scope if it is not; restores the caller's also when the scope is left by a throw.
class ContextScope {
 public:
  ContextScope(const Driver& driver, CUcontext context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver* pushed_on_ = nullptr;  // null: nothing to restore
};

// Number of forks between this process and the one that imported the extension. Driver handles do not survive a fork.
int fork_generation();

}  // namespace fmha
