// Warpgroup matrix multiply of sm_90a: m64nNk16, 16-bit operands, float accumulators.
//
// Accumulator fragment: warp w, lane 4 g + q of a warpgroup holds, for each group j of 8 columns, rows 16 w + g (first
// two values) and 16 w + g + 8 (last two) of columns 8 j + 2 q and 8 j + 2 q + 1.
#pragma once

#include <cstdint>

namespace fmha::sm90 {

// Descriptor of a 128-byte-swizzled operand in shared memory, made of [rows][64 values] tiles as TMA writes them (8
// rows = one atom of 1024 bytes, tiles aligned to it). The values of a row are the contraction dimension for a K-major
// operand and rows/columns of the result for an MN-major one; `tile_stride` (bytes, MN-major only) leads from one
// 64-wide tile to the next.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address, uint32_t tile_stride = 16) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(tile_stride >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The compiler does not know that an accumulator is in flight between the instruction and the wait: pinning it on both
// sides keeps arithmetic on it from moving across.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void pin_registers(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Operand lists: register numbers as text, and the bindings that go with them.
// clang-format off
#define FMHA_REGS_4 "%0, %1, %2, %3"
#define FMHA_REGS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FMHA_REGS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FMHA_REGS_32 FMHA_REGS_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FMHA_REGS_64 \
  FMHA_REGS_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" ", " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FMHA_REGS_128 \
  FMHA_REGS_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" ", " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FMHA_BIND_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FMHA_BIND_8(d, i) FMHA_BIND_4(d, i), FMHA_BIND_4(d, i + 4)
#define FMHA_BIND_16(d, i) FMHA_BIND_8(d, i), FMHA_BIND_8(d, i + 8)
#define FMHA_BIND_32(d, i) FMHA_BIND_16(d, i), FMHA_BIND_16(d, i + 16)
#define FMHA_BIND_64(d, i) FMHA_BIND_32(d, i), FMHA_BIND_32(d, i + 32)
#define FMHA_BIND_128(d, i) FMHA_BIND_64(d, i), FMHA_BIND_64(d, i + 64)

// A and B from shared memory. Operands after the accumulators: a, b, accumulate, transpose-A.
#define FMHA_WGMMA_SS(N, TYPE, COUNT, A, B, ACCUMULATE, TRANSPOSE)                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FMHA_REGS_##COUNT "}, " \
               A ", " B ", p, 1, 1, " TRANSPOSE ", 0;\n}"                                                  \
               : FMHA_BIND_##COUNT(d, 0) : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA ? 1 : 0))

// A from registers, B MN-major. Operands after the accumulators: a0 a1 a2 a3, b.
#define FMHA_WGMMA_RS(N, TYPE, COUNT, A, B)                                                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FMHA_REGS_##COUNT "}, " \
               A ", " B ", 1, 1, 1, 1;"                                                                    \
               : FMHA_BIND_##COUNT(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// clang-format on

// d (+)= A B, A [64][16] K-major or (kTransposeA) M-major, B [N][16] K-major, both in shared memory.
template <bool kBf16, bool kTransposeA, int kCount>
__device__ __forceinline__ void wgmma_smem(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (kCount == 4) {
    if constexpr (kBf16) {
      FMHA_WGMMA_SS(8, "bf16", 4, "%4", "%5", "%6", "%7");
    } else {
      FMHA_WGMMA_SS(8, "f16", 4, "%4", "%5", "%6", "%7");
    }
  } else if constexpr (kCount == 8) {
    if constexpr (kBf16) {
      FMHA_WGMMA_SS(16, "bf16", 8, "%8", "%9", "%10", "%11");
    } else {
      FMHA_WGMMA_SS(16, "f16", 8, "%8", "%9", "%10", "%11");
    }
  } else if constexpr (kCount == 16) {
    if constexpr (kBf16) {
      FMHA_WGMMA_SS(32, "bf16", 16, "%16", "%17", "%18", "%19");
    } else {
      FMHA_WGMMA_SS(32, "f16", 16, "%16", "%17", "%18", "%19");
    }
  } else if constexpr (kCount == 32) {
    if constexpr (kBf16) {
      FMHA_WGMMA_SS(64, "bf16", 32, "%32", "%33", "%34", "%35");
    } else {
      FMHA_WGMMA_SS(64, "f16", 32, "%32", "%33", "%34", "%35");
    }
  } else {
    static_assert(kCount == 64);
    if constexpr (kBf16) {
      FMHA_WGMMA_SS(128, "bf16", 64, "%64", "%65", "%66", "%67");
    } else {
      FMHA_WGMMA_SS(128, "f16", 64, "%64", "%65", "%66", "%67");
    }
  }
}

// d += A B, A [64][16] in registers, B [16][N] with N contiguous in shared memory.
template <bool kBf16, int kCount>
__device__ __forceinline__ void wgmma_registers(float (&d)[kCount], uint32_t const* a, uint64_t b) {
  if constexpr (kCount == 32) {
    if constexpr (kBf16) {
      FMHA_WGMMA_RS(64, "bf16", 32, "{%32, %33, %34, %35}", "%36");
    } else {
      FMHA_WGMMA_RS(64, "f16", 32, "{%32, %33, %34, %35}", "%36");
    }
  } else if constexpr (kCount == 64) {
    if constexpr (kBf16) {
      FMHA_WGMMA_RS(128, "bf16", 64, "{%64, %65, %66, %67}", "%68");
    } else {
      FMHA_WGMMA_RS(128, "f16", 64, "{%64, %65, %66, %67}", "%68");
    }
  } else {
    static_assert(kCount == 128);
    if constexpr (kBf16) {
      FMHA_WGMMA_RS(256, "bf16", 128, "{%128, %129, %130, %131}", "%132");
    } else {
      FMHA_WGMMA_RS(256, "f16", 128, "{%128, %129, %130, %131}", "%132");
    }
  }
}

#undef FMHA_WGMMA_SS
#undef FMHA_WGMMA_RS

}  // namespace fmha::sm90
