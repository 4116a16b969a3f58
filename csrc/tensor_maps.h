// Arguments of cuTensorMapEncodeTiled for the tensor-map slots of KernelParams, as plain numbers: no driver here.
#pragma once

#include <cstdint>
#include <string>

#include "manifest.h"
#include "problem.h"

namespace fmha {

constexpr int kMaxTensorMaps = 7;

struct TensorMapArgs {
  int slot;   // byte offset of the descriptor in KernelParams
  int dtype;  // CUtensorMapDataType, and so on below: values of cuda.h
  int rank;
  uint64_t addr;
  uint64_t dims[5];     // elements, innermost first
  uint64_t strides[4];  // bytes, of dims 1..rank-1
  uint32_t box[5];
  uint32_t elem_strides[5];
  int interleave, swizzle, l2, oob;
};

// Fills `out` in encode order; returns how many slots the kernel of `row` uses. No heap allocation.
int encode_args(const Problem& problem, const Row& row, const Buffers& buffers, TensorMapArgs out[kMaxTensorMaps]);

// Of a tensor map, in bytes.
constexpr bool is_valid_stride(uint64_t bytes) { return bytes % 16 == 0 && bytes < uint64_t{1} << 40; }

// The rule of cuTensorMapEncodeTiled that `args` breaks, in words; empty if it breaks none.
std::string tensor_map_fault(const TensorMapArgs& args);

// The same over all maps of a launch, whatever its addresses will be.
std::string first_tensor_map_fault(const Problem& problem, const Row& row);

// "tmaQ_" for the slot at that offset.
const char* slot_name(int slot);

}  // namespace fmha
