// Why a row, or the whole manifest, does not serve a problem: as values first, then as one sentence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "manifest.h"

namespace fmha {

struct Mismatch {
  const char* field;
  std::string value;
  std::string allowed;  // what would be accepted; empty if `at_most` says it, or if `value` is a sentence
  int64_t at_most = 0;  // a limit instead of a set; 0: none
};

// "head_dim_qk=80 (allowed: 64), page_size=48 (allowed: 16, 32)"; empty for no mismatches.
std::string in_words(const std::vector<Mismatch>& mismatches);

// One sentence for a problem that no row serves. `faults` are those of the problem itself, `mismatches` those of each
// row. A field that all rows refuse is named with the union of what they allow; then come the nearest rows.
std::string refusal(const Manifest& manifest, const std::vector<Mismatch>& faults,
                    const std::vector<std::vector<Mismatch>>& mismatches);

}  // namespace fmha
