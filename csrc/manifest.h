// The kernel manifest: the packed table of all rows of a family.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_index.h"
#include "row.h"

namespace fmha {

// Immutable once opened; rows and their strings live as long as the manifest.
class Manifest {
 public:
  // Checks every length, string and range in one pass over the bytes, which are not kept. Throws ManifestError.
  explicit Manifest(std::string_view bytes);
  Manifest(const Manifest&) = delete;
  Manifest& operator=(const Manifest&) = delete;

  // The bytes that open as these rows. Throws ManifestError for a value out of its column's range, a string longer
  // than 255 bytes, or two rows of one name.
  static std::string pack(const std::vector<Row>& rows);

  int size() const { return static_cast<int>(rows_.size()); }
  const Row& operator[](int index) const { return rows_[index]; }

  // Rows of the trtllm-gen family by key; empty for the others.
  const KernelIndex& index() const { return index_; }

 private:
  std::unique_ptr<char[]> text_;
  std::vector<Row> rows_;
  KernelIndex index_;
};

}  // namespace fmha
