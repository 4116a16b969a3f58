#include "counters.h"

#include <algorithm>
#include <string>

#include "driver.h"

namespace fmha {
namespace {

// A split launch has fewer counters than the GPU has SMs, so one smallest set serves nearly every problem.
constexpr int64_t kMinCapacity = 1024;
constexpr int64_t kSlabBytes = 1 << 20;
constexpr int64_t kMinSetsPerSlab = 4;

int64_t round_up_to_power_of_two(int64_t value) {
  int64_t power = kMinCapacity;
  while (power < value) power *= 2;
  return power;
}

// Lets this thread allocate while it or another thread captures, which would otherwise fail here and break the capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    driver_.check(driver_.cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode",
                  "allocating counters");
  }
  ~RelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace

size_t Counters::KeyHash::operator()(const Key& key) const {
  uint64_t hash = key.stream;
  hash = (hash ^ key.context_id) * 0x9e3779b97f4a7c15;
  hash = (hash ^ key.capture_id ^ hash >> 32) * 0x9e3779b97f4a7c15;
  return hash ^ hash >> 29;
}

CUdeviceptr Counters::acquire(uint64_t context_id, CUstream stream, int64_t count) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t capture_id = 0;
  driver_.check(driver_.stream_capture_info(stream, &status, &capture_id, nullptr, nullptr, nullptr),
                "cuStreamGetCaptureInfo_v2", "asking whether the stream is captured");
  const bool captured = status != CU_STREAM_CAPTURE_STATUS_NONE;

  std::lock_guard<std::mutex> lock(mutex_);
  Set& set = sets_[Key{context_id, identity(stream), captured ? capture_id : 0}];
  if (set.capacity < count) {
    // The outgrown set is dropped, not re-used: a kernel in flight or a graph may still count in it.
    if (!take_spare(context_id, count, &set)) {
      allocate(context_id, count);
      take_spare(context_id, count, &set);
    }
  }
  if (set.dirty) {
    driver_.check(driver_.cuMemsetD8Async(set.address, 0, set.capacity * sizeof(int32_t), stream), "cuMemsetD8Async",
                  "zeroing counters after a failed launch");
    set.dirty = false;
  }
  return set.address;
}

void Counters::mark_dirty(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [key, set] : sets_)
    if (set.address == address) set.dirty = true;
}

// The per-thread default stream has one handle for as many streams as there are threads; its ids are made odd, as no
// other handle is but the legacy stream's 1.
uint64_t Counters::identity(CUstream stream) const {
  if (stream != CU_STREAM_PER_THREAD) return reinterpret_cast<uintptr_t>(stream);
  unsigned long long id = 0;
  driver_.check(driver_.cuStreamGetId(stream, &id), "cuStreamGetId", "telling per-thread streams apart");
  return id << 1 | 1;
}

bool Counters::take_spare(uint64_t context_id, int64_t count, Set* set) {
  std::vector<Set>& spares = spares_[context_id];
  for (auto spare = spares.rbegin(); spare != spares.rend(); ++spare) {
    if (spare->capacity < count) continue;
    *set = *spare;
    spares.erase(std::next(spare).base());
    return true;
  }
  return false;
}

void Counters::allocate(uint64_t context_id, int64_t count) {
  const int64_t capacity = round_up_to_power_of_two(count);
  const int64_t set_bytes = capacity * static_cast<int64_t>(sizeof(int32_t));
  const int64_t sets = std::max(kMinSetsPerSlab, kSlabBytes / set_bytes);
  const std::string doing = "allocating " + std::to_string(sets * set_bytes) + " bytes of split-KV counters";

  RelaxedCapture relaxed(driver_);
  // A stream of its own: the legacy stream would wait for, and break the capture of, the caller's streams.
  CUstream stream = nullptr;
  driver_.check(driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate", doing.c_str());
  CUdeviceptr slab = 0;
  const char* call = "cuMemAlloc";
  CUresult result = driver_.cuMemAlloc(&slab, sets * set_bytes);
  if (result == CUDA_SUCCESS) {
    call = "cuMemsetD8Async";
    result = driver_.cuMemsetD8Async(slab, 0, sets * set_bytes, stream);
    if (result == CUDA_SUCCESS) {
      call = "cuStreamSynchronize";
      result = driver_.cuStreamSynchronize(stream);
    }
    if (result != CUDA_SUCCESS) driver_.cuMemFree(slab);
  }
  driver_.cuStreamDestroy(stream);
  driver_.check(result, call, doing.c_str());

  std::vector<Set>& spares = spares_[context_id];
  spares.reserve(spares.size() + sets);
  for (int64_t index = 0; index < sets; ++index) spares.push_back({slab + index * set_bytes, capacity, false});
}

}  // namespace fmha
