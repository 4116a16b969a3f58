// Programmatic dependent launch, for kernels of any architecture from sm_90 on.
#pragma once

namespace fmha {

// Returns once the kernels before this one in the stream are done and what they wrote can be seen. Nothing in global
// memory may be touched before.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel in the stream start. Its own wait still ends only when this kernel is done.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fmha
