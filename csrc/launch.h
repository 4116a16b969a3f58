// The warm path: from pointers to a launched kernel. Nothing here allocates, selects, loads or blocks.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "driver.h"
#include "followers.h"
#include "kernel_params.h"
#include "manifest.h"
#include "problem.h"
#include "tensor_maps.h"

namespace fmha {

// Kernels to launch behind the attention kernel; null where none follows.
struct Followers {
  CUkernel reduction = nullptr;
  CUkernel lse = nullptr;
};

// One loaded kernel, and those that follow it, for one Problem on one device. Any thread may launch, on any stream of
// the device.
class Launcher {
 public:
  // `driver` and the manifest that `row`'s strings point into must outlive the launcher. A CUkernel, unlike a
  // CUfunction, survives a reset of `context`; launching one costs the same.
  Launcher(const Driver& driver, const Problem& problem, const Row& row, const Shape& shape, CUkernel kernel,
           int device, CUcontext context, std::string kernel_name, const Followers& followers, const Device& gpu);

  // Enqueues the kernel and its followers. `buffers.scratch` is the caller's buffer of `scratch_bytes`, any alignment;
  // its counters are ignored, the library brings its own. Throws Failure; then nothing was enqueued, or only kernels
  // before the one that it names.
  void launch(Buffers buffers, int64_t scratch_bytes, bool enable_pdl, CUstream stream);

  const std::string& kernel_name() const { return kernel_name_; }
  const Shape& shape() const { return shape_; }
  int device() const { return device_; }

 private:
  // The last descriptor of a slot and the address it was encoded for: all else is fixed by the problem.
  struct EncodedMap {
    uint64_t addr = 0;
    TensorMap map{};
  };

  void check_process() const;
  void check_pointers(const Buffers& buffers) const;
  void place_scratch(Buffers* buffers, int64_t scratch_bytes) const;
  void check_stream(CUstream stream) const;
  uint64_t context_id() const;
  void set_tensor_maps(const Buffers& buffers, KernelParams* params);
  void launch_reduction(KernelParams* params, bool enable_pdl, CUstream stream) const;
  void launch_lse(const Buffers& buffers, bool enable_pdl, CUstream stream) const;
  void enqueue(const CUlaunchConfig& config, CUkernel kernel, void** arguments, const char* doing) const;
  void encode(const TensorMapArgs& args, TensorMap* map) const;
  std::string describe() const;

  const Driver& driver_;
  const Problem problem_;
  const Row row_;
  const Shape shape_;
  const CUkernel kernel_;
  const int device_;
  const CUcontext context_;
  const std::string kernel_name_;
  const Followers followers_;
  const trtllm_gen::Reduction reduction_;
  const int fork_generation_;
  std::mutex maps_mutex_;
  EncodedMap maps_[kMaxTensorMaps];
};

}  // namespace fmha
