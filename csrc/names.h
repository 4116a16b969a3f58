// Enum values in words, as NVIDIA's metadata spells them.
#pragma once

#include <iterator>
#include <string_view>

#include "problem.h"

namespace fmha {

template <class E>
struct EnumNames;

#define FMHA_ENUM_NAMES(E, ...)                                 \
  template <>                                                   \
  struct EnumNames<E> {                                         \
    static constexpr std::string_view kType = #E;               \
    static constexpr std::string_view kNames[] = {__VA_ARGS__}; \
  };
FMHA_ENUM_NAMES(DataType, "FP16", "BF16", "FP32", "INT8", "INT32", "E4M3", "E5M2", "E2M1", "UNKNOWN")
FMHA_ENUM_NAMES(QkvLayout, "SeparateQkv", "PackedQkv", "PagedKv", "ContiguousKv")
FMHA_ENUM_NAMES(KernelType, "Context", "Generation", "SwapsMmaAbForGeneration", "KeepsMmaAbForGeneration",
                "SpecDecodingGeneration")
FMHA_ENUM_NAMES(TileScheduler, "Static", "Persistent")
FMHA_ENUM_NAMES(MultiCtasKvMode, "Disabled", "GmemReduction", "GmemReductionWithSeparateKernel", "CgaSmemReduction")
FMHA_ENUM_NAMES(MaskType, "Dense", "Causal", "SlidingOrChunkedCausal", "Custom")
FMHA_ENUM_NAMES(SparseMlaType, "None", "StaticTokenSparse", "DynamicTokenSparse")
#undef FMHA_ENUM_NAMES

template <class E>
constexpr int num_values() {
  return static_cast<int>(std::size(EnumNames<E>::kNames));
}

template <class E>
constexpr std::string_view name_of(E value) {
  return EnumNames<E>::kNames[static_cast<int>(value)];
}

}  // namespace fmha
