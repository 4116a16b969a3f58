#include "launch.h"

#include <cstring>
#include <utility>

#include "counters.h"
#include "params.h"
#include "shape.h"

namespace fmha {
namespace {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap),
              "TensorMap is not the driver's CUtensorMap");

constexpr uint64_t kTensorAlignment = 16;  // tensor maps, and the widest store of an output row
constexpr uint64_t kWordAlignment = 4;

template <class T>
std::string list(const T* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
  return text + "]";
}

// Lets the kernel start while the one before it ends; it waits for that one's results by itself.
CUlaunchAttribute programmatic_start(bool enable) {
  CUlaunchAttribute attribute;
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = enable;
  return attribute;
}

CUlaunchConfig launch_config(const int (&grid)[3], int block, int smem_bytes, CUstream stream,
                             CUlaunchAttribute* attributes, unsigned num_attributes) {
  CUlaunchConfig config;
  config.gridDimX = static_cast<unsigned>(grid[0]);
  config.gridDimY = static_cast<unsigned>(grid[1]);
  config.gridDimZ = static_cast<unsigned>(grid[2]);
  config.blockDimX = static_cast<unsigned>(block);
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(smem_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  return config;
}

// What must be there and what is: a launch without its followers would leave wrong results behind.
void check_followers(const Problem& problem, const Row& row, const Followers& followers) {
  const bool needs_reduction = trtllm_gen::reduces_separately(row);
  const bool needs_lse = is_trtllm_gen(row) && problem.has_lse;
  if (needs_reduction == (followers.reduction != nullptr) && needs_lse == (followers.lse != nullptr)) return;
  Failure failure(Failure::Kind::kInvalidArgument, "other kernels follow this one");
  const auto words = [](bool reduction, bool lse) {
    return std::string(reduction ? "a reduction, " : "no reduction, ") + (lse ? "an LSE kernel" : "no LSE kernel");
  };
  failure.asked = words(needs_reduction, needs_lse);
  failure.found = words(followers.reduction != nullptr, followers.lse != nullptr);
  throw failure;
}

}  // namespace

Launcher::Launcher(const Driver& driver, const Problem& problem, const Row& row, const Shape& shape, CUkernel kernel,
                   int device, CUcontext context, std::string kernel_name, const Followers& followers,
                   const Device& gpu)
    : driver_(driver),
      problem_(problem),
      row_(row),
      shape_(shape),
      kernel_(kernel),
      device_(device),
      context_(context),
      kernel_name_(std::move(kernel_name)),
      followers_(followers),
      reduction_(followers.reduction == nullptr ? trtllm_gen::Reduction{}
                                                : trtllm_gen::separate_reduction(problem, row, shape, gpu)),
      fork_generation_(fork_generation()) {
  check_followers(problem, row, followers);
}

void Launcher::launch(Buffers buffers, int64_t scratch_bytes, bool enable_pdl, CUstream stream) {
  check_process();
  check_pointers(buffers);
  place_scratch(&buffers, scratch_bytes);
  ContextScope scope(driver_, context_);
  check_stream(stream);
  buffers.counters =
      shape_.num_counters == 0 ? 0 : driver_.counters().acquire(context_id(), stream, shape_.num_counters);

  KernelParams params;
  fill_params(problem_, row_, shape_, buffers, &params);
  set_tensor_maps(buffers, &params);

  // Always all three, also at their defaults: one code path, and graphs record the same node whatever the call asks.
  CUlaunchAttribute attributes[3];
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[0].value.clusterDim.x = static_cast<unsigned>(shape_.cluster);
  attributes[0].value.clusterDim.y = 1;
  attributes[0].value.clusterDim.z = 1;
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE;
  attributes[1].value.clusterSchedulingPolicyPreference =
      shape_.cluster > 1 ? CU_CLUSTER_SCHEDULING_POLICY_SPREAD : CU_CLUSTER_SCHEDULING_POLICY_DEFAULT;
  attributes[2] = programmatic_start(enable_pdl);

  const CUlaunchConfig config = launch_config(shape_.grid, shape_.block, shape_.smem_bytes, stream, attributes, 3);
  void* arguments[] = {&params};
  try {
    enqueue(config, kernel_, arguments, "launching ");
  } catch (...) {
    if (buffers.counters != 0) driver_.counters().mark_dirty(buffers.counters);
    throw;
  }
  if (followers_.reduction != nullptr) launch_reduction(&params, enable_pdl, stream);
  if (followers_.lse != nullptr) launch_lse(buffers, enable_pdl, stream);
}

void Launcher::launch_reduction(KernelParams* params, bool enable_pdl, CUstream stream) const {
  CUlaunchAttribute attribute = programmatic_start(enable_pdl);
  const CUlaunchConfig config = launch_config(reduction_.grid, reduction_.block, 0, stream, &attribute, 1);
  trtllm_gen::ReductionScalars s = reduction_.scalars;
  void* arguments[] = {params,
                       &s.is_token_sparse,
                       &s.groups_tokens_heads_q,
                       &s.supports_var_sparse_top_k_lens,
                       &s.num_ctas_for_reduction,
                       &s.num_ctas_for_all_heads,
                       &s.head_dim_v,
                       &s.num_head_dim_ctas_v,
                       &s.tile_size_q,
                       &s.sum_scale};
  enqueue(config, followers_.reduction, arguments, "launching the reduction behind ");
}

void Launcher::launch_lse(const Buffers& buffers, bool enable_pdl, CUstream stream) const {
  const trtllm_gen::LseLaunch launch = trtllm_gen::lse_launch(problem_);
  CUlaunchAttribute attribute = programmatic_start(enable_pdl);
  const CUlaunchConfig config = launch_config({launch.grid, 1, 1}, launch.block, 0, stream, &attribute, 1);
  const int32_t num_heads = static_cast<int32_t>(problem_.num_heads_q);
  trtllm_gen::LseArguments lse{reinterpret_cast<const SoftmaxStats*>(buffers.softmax_stats),
                               reinterpret_cast<float*>(buffers.lse),
                               num_heads,
                               num_heads,
                               1,
                               static_cast<int32_t>(launch.num_values)};
  void* arguments[] = {&lse.stats, &lse.lse, &lse.num_heads, &lse.stride_tokens, &lse.stride_heads, &lse.num_values};
  enqueue(config, followers_.lse, arguments, "launching the LSE kernel behind ");
}

void Launcher::enqueue(const CUlaunchConfig& config, CUkernel kernel, void** arguments, const char* doing) const {
  const CUresult result = driver_.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), arguments, nullptr);
  if (result != CUDA_SUCCESS) throw driver_.failure(result, "cuLaunchKernelEx", doing + describe());
}

void Launcher::check_process() const {
  if (fork_generation_ == fork_generation()) return;
  Failure failure(Failure::Kind::kDevice, "this process was forked after the kernel was loaded");
  failure.found = kernel_name_ + ", loaded by the parent process";
  failure.fix = "start workers with the spawn or forkserver method, or load after the fork";
  throw failure;
}

void Launcher::check_pointers(const Buffers& buffers) const {
  // A misaligned access costs the whole context, so the few compares are worth it.
  const auto check = [this](const char* name, uint64_t address, uint64_t alignment, bool needed) {
    if (address % alignment == 0 && (address != 0 || !needed)) return;
    Failure failure(Failure::Kind::kInvalidArgument,
                    std::string(name) + (address == 0 ? " has no memory" : " is not aligned"));
    failure.asked = kernel_name_ + ": a multiple of " + std::to_string(alignment) + " bytes";
    failure.found = "address " + std::to_string(address);
    failure.fix = "pass a tensor with memory whose first element is aligned, such as a fresh allocation";
    throw failure;
  };
  check("query", buffers.q, kTensorAlignment, true);
  check("key cache", buffers.k, kTensorAlignment, true);
  check("value cache", buffers.v, kTensorAlignment, true);
  check("out", buffers.o, kTensorAlignment, true);
  check("seq_lens", buffers.seq_lens_kv, kWordAlignment, true);
  check("block_tables", buffers.block_tables, kWordAlignment, true);
  check("cum_seq_lens_q", buffers.cum_seq_lens_q, kWordAlignment, problem_.ragged_q);
  check("sinks", buffers.sinks, kWordAlignment, false);
  check("lse", buffers.lse, kWordAlignment, false);
  check("bmm1_scale", buffers.scale_softmax_log2_ptr, kWordAlignment, false);
  check("bmm2_scale", buffers.output_scale_ptr, kWordAlignment, false);
}

void Launcher::place_scratch(Buffers* buffers, int64_t scratch_bytes) const {
  const int64_t need = shape_.scratch_bytes();
  if (need == 0) return;
  constexpr uint64_t kAlignment = kScratchAlignment;
  const uint64_t aligned = (buffers->scratch + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t padding = static_cast<int64_t>(aligned - buffers->scratch);
  if (buffers->scratch == 0 || scratch_bytes < need + padding) {
    Failure failure(Failure::Kind::kInvalidArgument, "workspace_buffer is too small");
    failure.asked = std::to_string(need + padding) + " bytes: partial statistics " +
                    std::to_string(shape_.partial_stats_bytes) + ", partial outputs " +
                    std::to_string(shape_.partial_o_bytes) + ", softmax statistics " +
                    std::to_string(shape_.softmax_stats_bytes) + ", alignment " + std::to_string(padding);
    failure.found = std::to_string(buffers->scratch == 0 ? 0 : scratch_bytes) + " bytes";
    failure.fix = "allocate what workspace_bytes() says for this problem";
    throw failure;
  }
  buffers->scratch = aligned;
  if (shape_.softmax_stats_bytes != 0)
    buffers->softmax_stats = aligned + static_cast<uint64_t>(shape_.softmax_stats_offset());
}

void Launcher::check_stream(CUstream stream) const {
  // Default streams are of whatever context is current, which is ours by now.
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) return;
  CUcontext owner = nullptr;
  driver_.check(driver_.cuStreamGetCtx(stream, &owner), "cuStreamGetCtx", "finding the device of the stream");
  if (owner == context_) return;
  Failure failure(Failure::Kind::kInvalidArgument, "the stream belongs to another device or context");
  failure.asked = "a stream of the primary context of device " + std::to_string(device_);
  failure.found = "a stream of context " + std::to_string(reinterpret_cast<uintptr_t>(owner));
  failure.fix = "make the tensors' device current before taking its current stream";
  throw failure;
}

// Asked anew for every launch that counts: after a reset of the context its old counters are gone.
uint64_t Launcher::context_id() const {
  unsigned long long id = 0;
  driver_.check(driver_.cuCtxGetId(context_, &id), "cuCtxGetId", "asking for the identity of the context");
  return id;
}

void Launcher::set_tensor_maps(const Buffers& buffers, KernelParams* params) {
  TensorMapArgs args[kMaxTensorMaps];
  const int count = encode_args(problem_, row_, buffers, args);
  std::lock_guard<std::mutex> lock(maps_mutex_);
  for (int i = 0; i < count; ++i) {
    // An engine's K and V never move and allocators hand out the same query again, so most maps are known.
    if (maps_[i].addr != args[i].addr || args[i].addr == 0) {
      maps_[i].addr = 0;
      encode(args[i], &maps_[i].map);
      maps_[i].addr = args[i].addr;
    }
    std::memcpy(reinterpret_cast<char*>(params) + args[i].slot, &maps_[i].map, sizeof(TensorMap));
  }
}

void Launcher::encode(const TensorMapArgs& args, TensorMap* map) const {
  const CUresult result = driver_.cuTensorMapEncodeTiled(
      reinterpret_cast<CUtensorMap*>(map), static_cast<CUtensorMapDataType>(args.dtype),
      static_cast<cuuint32_t>(args.rank), reinterpret_cast<void*>(args.addr),
      reinterpret_cast<const cuuint64_t*>(args.dims), reinterpret_cast<const cuuint64_t*>(args.strides), args.box,
      args.elem_strides, static_cast<CUtensorMapInterleave>(args.interleave),
      static_cast<CUtensorMapSwizzle>(args.swizzle), static_cast<CUtensorMapL2promotion>(args.l2),
      static_cast<CUtensorMapFloatOOBfill>(args.oob));
  if (result == CUDA_SUCCESS) return;
  Failure failure = driver_.failure(
      result, "cuTensorMapEncodeTiled",
      "tensor map " + std::string(slot_name(args.slot)) + " (dtype " + std::to_string(args.dtype) + ", address " +
          std::to_string(args.addr) + ", dims " + list(args.dims, args.rank) + ", strides " +
          list(args.strides, args.rank - 1) + " bytes, box " + list(args.box, args.rank) + ", element strides " +
          list(args.elem_strides, args.rank) + ", interleave " + std::to_string(args.interleave) + ", swizzle " +
          std::to_string(args.swizzle) + ", L2 promotion " + std::to_string(args.l2) + ", fill " +
          std::to_string(args.oob) + ") for " + describe());
  failure.found = tensor_map_fault(args);
  throw failure;
}

std::string Launcher::describe() const {
  const Problem& p = problem_;
  return kernel_name_ + " on device " + std::to_string(device_) + ": grid " + list(shape_.grid, 3) + ", cluster " +
         std::to_string(shape_.cluster) + ", " + std::to_string(shape_.block) + " threads, " +
         std::to_string(shape_.smem_bytes) + " bytes of shared memory; batch " + std::to_string(p.batch_size) +
         ", s_qo " + std::to_string(p.max_seq_len_q) + ", s_kv " + std::to_string(p.max_seq_len_kv) + ", heads " +
         std::to_string(p.num_heads_q) + "/" + std::to_string(p.num_heads_kv) + ", head_dim " +
         std::to_string(p.head_dim_qk) + ", page " + std::to_string(p.page_size);
}

}  // namespace fmha
