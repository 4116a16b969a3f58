#include "refusal.h"

#include <algorithm>
#include <cstring>

namespace fmha {
namespace {

constexpr size_t kNumNearest = 3;

std::string allowed_in_words(const Mismatch& m) {
  if (m.at_most != 0) return "at most " + std::to_string(m.at_most);
  return m.allowed;
}

const Mismatch* find(const std::vector<Mismatch>& mismatches, const char* field) {
  for (const Mismatch& m : mismatches) {
    if (std::strcmp(m.field, field) == 0) return &m;
  }
  return nullptr;
}

// Fields that every row refuses, each with all that any row allows.
std::vector<Mismatch> refused_by_all(const std::vector<std::vector<Mismatch>>& mismatches) {
  std::vector<Mismatch> common;
  if (mismatches.empty()) return common;
  for (const Mismatch& first : mismatches.front()) {
    Mismatch merged{first.field, first.value, "", 0};
    std::vector<std::string> sets;
    bool all = true;
    for (const auto& row : mismatches) {
      const Mismatch* m = find(row, first.field);
      if (m == nullptr) {
        all = false;
        break;
      }
      merged.at_most = std::max(merged.at_most, m->at_most);
      if (!m->allowed.empty() && std::find(sets.begin(), sets.end(), m->allowed) == sets.end())
        sets.push_back(m->allowed);
    }
    if (!all) continue;
    for (const std::string& set : sets) merged.allowed += (merged.allowed.empty() ? "" : ", ") + set;
    common.push_back(std::move(merged));
  }
  return common;
}

}  // namespace

std::string in_words(const std::vector<Mismatch>& mismatches) {
  std::string text;
  for (const Mismatch& m : mismatches) {
    if (!text.empty()) text += ", ";
    const std::string allowed = allowed_in_words(m);
    text += std::string(m.field) + (allowed.empty() ? ": " : "=") + m.value;
    if (!allowed.empty()) text += " (allowed: " + allowed + ")";
  }
  return text;
}

std::string refusal(const Manifest& manifest, const std::vector<Mismatch>& faults,
                    const std::vector<std::vector<Mismatch>>& mismatches) {
  if (manifest.size() == 0) return "the kernel manifest has no rows";
  std::vector<Mismatch> named = faults;
  for (Mismatch& m : refused_by_all(mismatches)) {
    if (find(named, m.field) == nullptr) named.push_back(std::move(m));
  }
  std::vector<int> order(manifest.size());
  for (int i = 0; i < manifest.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const size_t left = mismatches[a].size(), right = mismatches[b].size();
    return left != right ? left < right : a < b;
  });
  // Every field has a row that takes it, only not one row all fields: then the nearest row is the explanation.
  std::string text = "no kernel for ";
  text += named.empty() ? in_words(mismatches[order[0]]) : in_words(named);
  // No other row would help a problem that is refused for itself alone.
  if (named.size() == faults.size() && !faults.empty()) return text;
  std::string near;
  std::vector<std::string_view> cubins;
  for (int i : order) {
    if (cubins.size() == kNumNearest) break;
    const Row& row = manifest[i];
    if (mismatches[i].empty() || std::find(cubins.begin(), cubins.end(), row.cubin) != cubins.end()) continue;
    cubins.push_back(row.cubin);
    std::string fields;
    for (const Mismatch& m : mismatches[i]) fields += (fields.empty() ? "" : ", ") + std::string(m.field);
    near += (near.empty() ? "" : "; ") + std::string(row.name) + " (differs in " + fields + ")";
  }
  if (!near.empty()) text += "; nearest kernels: " + near;
  return text;
}

}  // namespace fmha
