// Counters of the split-KV reduction: int32 that kernels expect zero and leave zero. The library's own, never the
// caller's scratch, so nothing else writes them and no address moves between calls.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fmha {

class Driver;

// One set for each (context, stream), and one for each (context, stream, capture): launches of a stream run in order,
// and so do launches within one graph, but graphs that were captured on one stream may be replayed side by side. Sets
// are never freed, since a graph may hold any of them; they are small.
//
// A destroyed stream's set serves the next stream that gets its handle: the driver re-uses a handle only after the
// work of the old stream.
class Counters {
 public:
  explicit Counters(const Driver& driver) : driver_(driver) {}

  // Device address of `count` int32 that are zero for the next kernel on `stream`. The context of that id must be
  // current. Allocates on first use or growth, also under capture: on a stream of its own and in relaxed mode, so that
  // no allocation becomes part of a graph and no capture breaks.
  CUdeviceptr acquire(uint64_t context_id, CUstream stream, int64_t count);

  // The set at `address` was given to a launch that failed: zero it before its next use.
  void mark_dirty(CUdeviceptr address);

 private:
  struct Key {
    uint64_t context_id;  // ids, unlike handles, are not used again after a context is reset
    uint64_t stream;
    uint64_t capture_id;  // 0: not captured
    bool operator==(const Key& other) const {
      return context_id == other.context_id && stream == other.stream && capture_id == other.capture_id;
    }
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  struct Set {
    CUdeviceptr address = 0;
    int64_t capacity = 0;  // in counters
    bool dirty = false;
  };

  uint64_t identity(CUstream stream) const;
  bool take_spare(uint64_t context_id, int64_t count, Set* set);
  void allocate(uint64_t context_id, int64_t count);

  const Driver& driver_;
  std::mutex mutex_;
  std::unordered_map<Key, Set, KeyHash> sets_;
  std::unordered_map<uint64_t, std::vector<Set>> spares_;  // zeroed, of no stream yet
};

}  // namespace fmha
