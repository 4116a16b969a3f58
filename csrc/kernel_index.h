// Look-up of trtllm-gen rows by the columns that NVIDIA's selection decides.
#pragma once

#include <cstdint>
#include <vector>

#include "row.h"

namespace fmha {

struct KernelKey {
  uint64_t choice = 0;  // the 59 bits that NVIDIA's metadata calls hashId
  uint32_t types = 0;   // dtypes and SageAttention blocks
  bool operator==(const KernelKey& other) const { return choice == other.choice && types == other.types; }
};

// Key of a row, or of the row that is wished for.
KernelKey key_of(const Row& row);

// Chains of rows by hash of their key, built once.
class KernelIndex {
 public:
  KernelIndex() = default;
  // `rows` must outlive the index. Throws ManifestError if two rows of one architecture have the same key.
  explicit KernelIndex(const std::vector<Row>& rows);

  // Index of the row for `sm` (100 or 103), or -1. A row for exactly that architecture wins over a family row.
  int find(const KernelKey& key, int sm) const;

 private:
  size_t bucket_of(const KernelKey& key) const;

  const std::vector<Row>* rows_ = nullptr;
  std::vector<int32_t> first_;  // row of each bucket, -1: none
  std::vector<int32_t> next_;   // row after each row, -1: none
};

}  // namespace fmha
