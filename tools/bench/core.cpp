// Time and heap allocations of the pure core, without Python, driver or GPU; with --fuzz, a hunt for undefined
// behaviour. Built and run by tools/bench/core.
//
//   core MANIFEST...         nanoseconds and allocations of select, fill_params, encode_args for each table
//   core --fuzz N MANIFEST   N problems of random values through the same functions
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <string>

#include "followers.h"
#include "manifest.h"
#include "params.h"
#include "select.h"
#include "tensor_maps.h"

namespace {
int64_t allocations = 0;
}

void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using namespace fmha;

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A decode call with four tokens a request over a dense cache: GPT-OSS on eight-way splits of a long context.
Problem reference_problem() {
  Problem p;
  p.dtype_q = p.dtype_k = p.dtype_v = p.dtype_o = DataType::kBf16;
  p.batch_size = 8;
  p.max_seq_len_q = 4;
  p.sum_seq_lens_q = 32;
  p.max_seq_len_kv = 8192;
  p.num_heads_q = 64;
  p.num_heads_kv = 8;
  p.head_dim_qk = p.head_dim_v = 64;
  p.page_size = 16;
  p.num_pages_k = p.num_pages_v = 4096;
  p.max_pages_per_seq = 512;
  p.stride_q = {64 * 64, 64, 0};
  p.stride_k = p.stride_v = {64, 16 * 64, 8 * 16 * 64};
  return p;
}

Device reference_device(const Manifest& manifest) {
  Device device;
  const bool trtllm = is_trtllm_gen(manifest[0]);
  device.sm = trtllm ? 100 : 90;
  device.sm_count = trtllm ? 148 : 132;
  device.max_smem_bytes = 232448;
  if (trtllm) device.gpc_sms = {20, 20, 20, 18, 18, 18, 18, 16};
  return device;
}

template <class F>
void report(const char* what, int repetitions, F&& call) {
  for (int i = 0; i < repetitions / 10; ++i) call();
  const int64_t before = allocations;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repetitions; ++i) call();
  const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
  std::printf("  %-34s %9.1f ns %6.1f allocations\n", what, ns / repetitions,
              static_cast<double>(allocations - before) / repetitions);
}

int measure(const char* path) {
  const std::string bytes = read_file(path);
  const Manifest manifest(bytes);
  const Problem problem = reference_problem();
  const Device device = reference_device(manifest);
  const Decision decision = select(problem, manifest, device, false);
  std::printf("%s: %d rows, %zu bytes\n", path, manifest.size(), bytes.size());
  if (decision.row < 0) {
    std::printf("  %s\n", decision.reason.c_str());
    return 1;
  }
  const Row& row = manifest[decision.row];
  KernelParams params;
  TensorMapArgs maps[kMaxTensorMaps];
  Buffers buffers;
  buffers.q = 1 << 20;
  report("open", 50, [&] { Manifest opened(bytes); });
  report("select (on a miss of the plan cache)", 20000, [&] { select(problem, manifest, device, false); });
  report("fill_params (warm)", 1000000, [&] { fill_params(problem, row, decision.shape, buffers, &params); });
  report("encode_args (warm)", 1000000, [&] { encode_args(problem, row, buffers, maps); });
  return 0;
}

// Plausible, extreme or arbitrary.
int64_t any_value(std::mt19937_64& random, int64_t plausible) {
  static constexpr int64_t kExtremes[] = {0, 1, -1, INT32_MAX, int64_t{INT32_MAX} + 1, INT64_MAX, INT64_MIN, 128, 576};
  switch (random() % 8) {
    case 0:
      return kExtremes[random() % std::size(kExtremes)];
    case 1:
      return static_cast<int64_t>(random() >> random() % 64);
    default:
      return plausible;
  }
}

int fuzz(int64_t count, const char* path) {
  const Manifest manifest(read_file(path));
  std::mt19937_64 random(1);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Problem p = reference_problem();
    for (int64_t* field :
         {&p.batch_size,     &p.max_seq_len_q,     &p.max_seq_len_kv,  &p.sum_seq_lens_q, &p.num_heads_q,
          &p.num_heads_kv,   &p.head_dim_qk,       &p.head_dim_v,      &p.page_size,      &p.num_pages_k,
          &p.num_pages_v,    &p.max_pages_per_seq, &p.window_left,     &p.stride_q.token, &p.stride_q.head,
          &p.stride_k.token, &p.stride_k.head,     &p.stride_k.page,   &p.stride_v.token, &p.stride_v.head,
          &p.stride_v.page,  &p.sparse_top_k,      &p.sum_seq_lens_kv, &p.sage_block_q,   &p.sage_block_k}) {
      if (random() % 8 == 0) *field = any_value(random, *field);
    }
    if (random() % 4 == 0) p.dtype_k = p.dtype_v = static_cast<DataType>(random() % 9);
    p.has_lse = random() % 8 == 0;
    if (random() % 8 == 0) p.kernel_type = KernelType::kContext;
    if (random() % 8 == 0) p.layout = static_cast<QkvLayout>(random() % 4);
    if (random() % 8 == 0) p.sparse_mla = static_cast<SparseMlaType>(random() % 3);
    if (random() % 4 == 0) {
      p.head_dim_qk = 576;
      p.head_dim_v = 512;
    }
    Device device = reference_device(manifest);
    if (random() % 8 == 0) device.sm_count = static_cast<int>(any_value(random, 1));
    if (random() % 8 == 0) device.max_cluster_size = static_cast<int>(any_value(random, 4));
    const Decision decision = select(p, manifest, device, random() % 64 == 0);
    if (decision.row < 0) continue;
    ++found;
    KernelParams params;
    TensorMapArgs maps[kMaxTensorMaps];
    fill_params(p, manifest[decision.row], decision.shape, Buffers{}, &params);
    const int used = encode_args(p, manifest[decision.row], Buffers{}, maps);
    for (int j = 0; j < used; ++j) tensor_map_fault(maps[j]);
    if (is_trtllm_gen(manifest[decision.row])) {
      trtllm_gen::separate_reduction(p, manifest[decision.row], decision.shape, device);
      if (p.has_lse) trtllm_gen::lse_launch(p);
    }
  }
  std::printf("%s: %lld problems, %lld with a kernel\n", path, static_cast<long long>(count),
              static_cast<long long>(found));
  return found == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--fuzz") == 0) return fuzz(std::atoll(argv[2]), argv[3]);
  int status = argc < 2;
  for (int i = 1; i < argc; ++i) status |= measure(argv[i]);
  return status;
}
