// The question (Problem, Device, Buffers) and the answer (Decision with its Shape) of the dispatcher. Plain data: no
// driver, no Python, no globals.
#pragma once

#include <climits>
#include <cstdint>
#include <string>
#include <vector>

namespace fmha {

// Enum values are NVIDIA's (golden/enums.json): they enter hash keys and the packed manifest.
enum class DataType : uint8_t {
  kFp16 = 0,
  kBf16 = 1,
  kFp32 = 2,
  kInt8 = 3,
  kInt32 = 4,
  kE4m3 = 5,
  kE5m2 = 6,
  kE2m1 = 7,
  kUnknown = 8
};
enum class QkvLayout : uint8_t { kSeparateQkv = 0, kPackedQkv = 1, kPagedKv = 2, kContiguousKv = 3 };
enum class KernelType : uint8_t { kContext = 0, kGeneration = 1, kSwapsMmaAb = 2, kKeepsMmaAb = 3, kSpecDecoding = 4 };
enum class TileScheduler : uint8_t { kStatic = 0, kPersistent = 1 };
enum class MultiCtasKvMode : uint8_t {
  kDisabled = 0,
  kGmemReduction = 1,
  kGmemReductionWithSeparateKernel = 2,
  kCgaSmemReduction = 3
};
enum class MaskType : uint8_t { kDense = 0, kCausal = 1, kSlidingOrChunkedCausal = 2, kCustom = 3 };
enum class SparseMlaType : uint8_t { kNone = 0, kStaticTokenSparse = 1, kDynamicTokenSparse = 2 };

constexpr int bits(DataType type) {
  switch (type) {
    case DataType::kE2m1:
      return 4;
    case DataType::kInt8:
    case DataType::kE4m3:
    case DataType::kE5m2:
      return 8;
    case DataType::kFp16:
    case DataType::kBf16:
      return 16;
    default:
      return 32;
  }
}

// What the selector may know of a GPU. `sm` is major * 10 + minor.
struct Device {
  int sm = 0;
  int sm_count = 0;
  int max_smem_bytes = 0;    // per block, opt-in
  int max_cluster_size = 8;  // 8 is portable
  // SMs of each GPC that this process may use; empty: unknown. Bounds how many clusters run at once.
  std::vector<int> gpc_sms;
};

// Strides count elements (two per byte for E2M1).
struct TensorStrides {
  int64_t token = 0;  // between keys of a page, or between query tokens
  int64_t head = 0;
  int64_t page = 0;  // between pages; 0 for query
};

// One attention call without its pointers: everything that decides kernel, grid and tensor maps.
struct Problem {
  DataType dtype_q = DataType::kUnknown;
  DataType dtype_k = DataType::kUnknown;
  DataType dtype_v = DataType::kUnknown;
  DataType dtype_o = DataType::kUnknown;
  QkvLayout layout = QkvLayout::kPagedKv;
  int64_t batch_size = 0;
  int64_t max_seq_len_q = 1;   // query tokens of the longest request
  int64_t max_seq_len_kv = 0;  // drafts included
  int64_t sum_seq_lens_q = 0;  // rows of query
  int64_t num_heads_q = 0;
  int64_t num_heads_kv = 0;
  int64_t head_dim_qk = 0;
  int64_t head_dim_v = 0;
  int64_t page_size = 0;
  int64_t num_pages_k = 0;  // pages that the key tensor spans
  int64_t num_pages_v = 0;
  int64_t max_pages_per_seq = 0;
  int64_t window_left = -1;  // -1: no window; w: w + 1 keys, the row's own included
  bool uses_shared_paged_kv_idx = true;
  bool ragged_q = false;  // cum_seq_lens_q given
  bool has_sinks = false;
  bool has_lse = false;
  TensorStrides stride_q, stride_k, stride_v;

  // Beyond decode over one paged cache.
  KernelType kernel_type = KernelType::kGeneration;  // or kContext: the phase
  MaskType mask = MaskType::kCausal;                 // kDense or kCausal; window_left narrows it
  SparseMlaType sparse_mla = SparseMlaType::kNone;
  int64_t sparse_top_k = 0;
  int64_t sum_seq_lens_kv = 0;                                                     // rows of key; 0 when paged
  int64_t stride_kv_sf_head = 0, stride_kv_sf_page = 0;                            // of the E2M1 block scales
  int64_t sage_block_q = 0, sage_block_k = 0, sage_block_p = 0, sage_block_v = 0;  // elements a scale; 0: none
  bool skips_softmax = false;
  bool has_sliding_window_pool = false;  // a second K pool for the window's tokens
  bool allows_tile_size_kv_64 = false;   // MLA kernels with KV tiles of 64 keys
};

// Pointers (device addresses) and scalars of one call.
struct Buffers {
  uint64_t q = 0, k = 0, v = 0, o = 0;
  uint64_t seq_lens_kv = 0, cum_seq_lens_q = 0, block_tables = 0, sinks = 0, lse = 0;
  uint64_t counters = 0, scratch = 0;
  uint64_t scale_softmax_log2_ptr = 0, output_scale_ptr = 0;
  float scale_softmax_log2 = 0.f;  // bmm1_scale * log2(e)
  float output_scale = 1.f;

  uint64_t cum_seq_lens_kv = 0, softmax_stats = 0, sparse_top_k_lens = 0, sliding_window_pool = 0;
  uint64_t o_sf = 0, k_sf = 0, v_sf = 0;  // block scales of E2M1 tensors
  uint64_t sage_sf_q = 0, sage_sf_k = 0, sage_sf_p = 0, sage_sf_v = 0;
  float scale_sf_kv = 1.f;
  float scale_sf_o = -1.f;  // -1: the output is not block-scaled
  float skip_softmax_factor = 0.f;
  int64_t start_token_sf_o = 0;
};

// Scratch regions start on this boundary inside the caller's buffer.
constexpr int64_t kScratchAlignment = 256;

struct Shape {
  int grid[3] = {0, 0, 0};
  int cluster = 1;
  int block = 0;
  int smem_bytes = 0;
  int num_ctas_q = 0;
  int num_ctas_kv = 0;
  int num_tokens_per_cta_q = 1;
  int64_t num_counters = 0;         // int32 each, zero before and after every launch
  int64_t partial_stats_bytes = 0;  // at scratch + 0
  int64_t partial_o_bytes = 0;      // at scratch + partial_stats_bytes
  int64_t softmax_stats_bytes = 0;  // behind them on the next boundary: where an LSE kernel follows

  int64_t softmax_stats_offset() const {
    const int64_t partials = partial_stats_bytes + partial_o_bytes;
    return (partials + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  }
  // Scratch that the launch needs behind an aligned start.
  int64_t scratch_bytes() const {
    return softmax_stats_bytes == 0 ? partial_stats_bytes + partial_o_bytes
                                    : softmax_stats_offset() + softmax_stats_bytes;
  }
};

struct Rejection {
  int row = -1;
  std::string reason;
};

struct Decision {
  int row = -1;  // index into the manifest; -1: refused
  Shape shape;
  std::string code;    // of a refusal: a word that stays the same between versions
  std::string reason;  // one sentence: why this row, or why none
  // Only when a trace is asked for: why not the other rows, and how the rules came to their answer.
  std::vector<Rejection> rejected;
  std::vector<std::string> steps;
};

}  // namespace fmha
