// The packed table: Header | string table | rows, little-endian.
// String table: sorted, front-coded (bytes shared with the string before, length of the rest, the rest). Kernel names
// differ in a few letters, so this takes a quarter of the plain text, and one pass of copies restores them.
#include "manifest.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "names.h"

namespace fmha {
namespace {

constexpr char kMagic[8] = {'F', 'M', 'H', 'A', 'R', 'O', 'W', 'S'};
constexpr uint32_t kVersion = 1;
constexpr size_t kMaxString = 255;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t row_bytes;
  uint32_t num_rows;
  uint32_t num_strings;
  uint32_t text_bytes;           // of the string table in the file
  uint32_t restored_text_bytes;  // after undoing the front coding
};
static_assert(sizeof(Header) == 32);

#pragma pack(push, 1)
struct PackedRow {
#define FMHA_MEMBER(name) uint32_t name;
  FMHA_ROW_STRINGS(FMHA_MEMBER)
#undef FMHA_MEMBER
#define FMHA_MEMBER(packed, name, low, high) packed name;
  FMHA_ROW_INTS(FMHA_MEMBER)
#undef FMHA_MEMBER
#define FMHA_MEMBER(type, name) uint8_t name;
  FMHA_ROW_ENUMS(FMHA_MEMBER)
#undef FMHA_MEMBER
  uint8_t flags;
};
#pragma pack(pop)

enum Flag {
#define FMHA_FLAG(name) kFlag_##name,
  FMHA_ROW_FLAGS(FMHA_FLAG)
#undef FMHA_FLAG
      kNumFlags
};
static_assert(kNumFlags <= 8);

// All of ' '..'~', eight bytes at a time: a megabyte is checked at every open.
bool is_printable(std::string_view text) {
  constexpr uint64_t kOnes = 0x0101010101010101u, kHigh = kOnes << 7;
  const auto suspicious = [](uint64_t w) { return (w | (w - kOnes * ' ') | (w + kOnes)) & kHigh; };
  uint64_t found = 0;
  size_t i = 0;
  for (; i + sizeof(uint64_t) <= text.size(); i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, text.data() + i, sizeof word);
    found |= suspicious(word);
  }
  for (; i < text.size(); ++i) found |= suspicious(kOnes * static_cast<uint8_t>(text[i]));
  return found == 0;
}

[[noreturn]] void fail(const std::string& what) { throw ManifestError("kernel manifest: " + what); }

[[noreturn, gnu::cold]] void fail_range(int64_t value, int64_t low, int64_t high, const char* column, size_t row) {
  fail("row " + std::to_string(row) + ": " + column + " is " + std::to_string(value) + ", allowed " +
       std::to_string(low) + ".." + std::to_string(high));
}

inline void check_range(int64_t value, int64_t low, int64_t high, const char* column, size_t row) {
  if (value < low || value > high) fail_range(value, low, high, column, row);
}

// Restores the strings into `text` of `size` bytes. A string that begins with all of the one before shares its bytes.
std::vector<std::string_view> restore_strings(std::string_view coded, uint32_t count, char* text, size_t size) {
  std::vector<std::string_view> strings;
  strings.reserve(count);
  size_t at = 0, filled = 0;
  std::string_view last;
  for (uint32_t i = 0; i < count; ++i) {
    if (coded.size() - at < 2) fail("string table is cut short");
    const size_t shared = static_cast<uint8_t>(coded[at]), rest = static_cast<uint8_t>(coded[at + 1]);
    at += 2;
    if (shared > last.size() || rest > coded.size() - at || shared + rest > kMaxString) fail("string table is damaged");
    const bool extends = shared == last.size();
    const size_t begin = extends ? filled - shared : filled;
    if (size - begin < shared + rest) fail("string table is longer than its header says");
    if (!extends) std::memcpy(text + begin, last.data(), shared);
    std::memcpy(text + begin + shared, coded.data() + at, rest);
    at += rest;
    filled = begin + shared + rest;
    last = std::string_view(text + begin, shared + rest);
    strings.push_back(last);
  }
  if (at != coded.size() || filled != size) fail("string table is shorter than its header says");
  if (!is_printable({text, size})) fail("string table holds bytes that are not printable ASCII");
  return strings;
}

std::string_view string_at(const std::vector<std::string_view>& strings, uint32_t index, const char* column,
                           size_t row) {
  if (index >= strings.size()) check_range(index, 0, static_cast<int64_t>(strings.size()) - 1, column, row);
  return strings[index];
}

size_t shared_prefix(std::string_view a, std::string_view b) {
  const size_t most = std::min(a.size(), b.size());
  size_t n = 0;
  while (n < most && a[n] == b[n]) ++n;
  return n;
}

}  // namespace

Manifest::Manifest(std::string_view bytes) {
  Header header;
  if (bytes.size() < sizeof header) fail(std::to_string(bytes.size()) + " bytes are too few for a header");
  std::memcpy(&header, bytes.data(), sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) fail("wrong magic bytes");
  if (header.version != kVersion || header.row_bytes != sizeof(PackedRow)) {
    fail("version " + std::to_string(header.version) + " with rows of " + std::to_string(header.row_bytes) +
         " bytes; this build reads version " + std::to_string(kVersion) + " with rows of " +
         std::to_string(sizeof(PackedRow)));
  }
  const uint64_t expected =
      sizeof header + uint64_t{header.text_bytes} + uint64_t{header.num_rows} * uint64_t{sizeof(PackedRow)};
  if (expected != bytes.size()) {
    fail(std::to_string(bytes.size()) + " bytes, its header says " + std::to_string(expected));
  }
  // Each string takes two bytes at least and restores to 255 at most: no allocation beyond what the file justifies.
  if (header.num_strings > header.text_bytes / 2 ||
      header.restored_text_bytes > uint64_t{header.num_strings} * kMaxString) {
    fail("string table is larger than the file");
  }
  text_.reset(new char[header.restored_text_bytes]);  // not zeroed: this is megabytes
  const auto strings = restore_strings(bytes.substr(sizeof header, header.text_bytes), header.num_strings, text_.get(),
                                       header.restored_text_bytes);
  rows_.reserve(header.num_rows);
  const char* at = bytes.data() + sizeof header + header.text_bytes;
  for (size_t i = 0; i < header.num_rows; ++i, at += sizeof(PackedRow)) {
    PackedRow packed;
    std::memcpy(&packed, at, sizeof packed);
    Row& row = rows_.emplace_back();
#define FMHA_READ(name) row.name = string_at(strings, packed.name, #name, i);
    FMHA_ROW_STRINGS(FMHA_READ)
#undef FMHA_READ
#define FMHA_READ(type, name)                                    \
  check_range(packed.name, 0, num_values<type>() - 1, #name, i); \
  row.name = static_cast<type>(packed.name);
    FMHA_ROW_ENUMS(FMHA_READ)
#undef FMHA_READ
#define FMHA_READ(type, name, low, high)         \
  check_range(packed.name, low, high, #name, i); \
  row.name = static_cast<int>(packed.name);
    FMHA_ROW_INTS(FMHA_READ)
#undef FMHA_READ
    check_range(packed.flags, 0, (1 << kNumFlags) - 1, "flags", i);
#define FMHA_READ(name) row.name = (packed.flags >> kFlag_##name & 1) != 0;
    FMHA_ROW_FLAGS(FMHA_READ)
#undef FMHA_READ
  }
  if (std::any_of(rows_.begin(), rows_.end(), is_trtllm_gen)) index_ = KernelIndex(rows_);
}

std::string Manifest::pack(const std::vector<Row>& rows) {
  std::map<std::string_view, uint32_t> index;
  std::set<std::string_view> names;
  for (const Row& row : rows) {
#define FMHA_COLLECT(name) index[row.name] = 0;
    FMHA_ROW_STRINGS(FMHA_COLLECT)
#undef FMHA_COLLECT
    if (!names.insert(row.name).second) fail("two rows are named " + std::string(row.name));
  }
  std::string text;
  std::string_view last;
  size_t restored = 0;
  uint32_t next = 0;
  for (auto& [string, position] : index) {
    if (string.size() > kMaxString) fail("a string of " + std::to_string(string.size()) + " bytes; 255 at most");
    if (!is_printable(string)) fail("'" + std::string(string) + "' is not plain ASCII");
    position = next++;
    const size_t shared = shared_prefix(last, string);
    text += static_cast<char>(shared);
    text += static_cast<char>(string.size() - shared);
    text += string.substr(shared);
    restored += shared == last.size() ? string.size() - shared : string.size();
    last = string;
  }
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.row_bytes = sizeof(PackedRow);
  header.num_rows = static_cast<uint32_t>(rows.size());
  header.num_strings = static_cast<uint32_t>(index.size());
  header.text_bytes = static_cast<uint32_t>(text.size());
  header.restored_text_bytes = static_cast<uint32_t>(restored);
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes += text;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    PackedRow packed{};
#define FMHA_WRITE(name) packed.name = index[row.name];
    FMHA_ROW_STRINGS(FMHA_WRITE)
#undef FMHA_WRITE
#define FMHA_WRITE(type, name) packed.name = static_cast<uint8_t>(row.name);
    FMHA_ROW_ENUMS(FMHA_WRITE)
#undef FMHA_WRITE
#define FMHA_WRITE(type, name, low, high)     \
  check_range(row.name, low, high, #name, i); \
  packed.name = static_cast<type>(row.name);
    FMHA_ROW_INTS(FMHA_WRITE)
#undef FMHA_WRITE
#define FMHA_WRITE(name) packed.flags |= static_cast<uint8_t>(row.name << kFlag_##name);
    FMHA_ROW_FLAGS(FMHA_WRITE)
#undef FMHA_WRITE
    bytes.append(reinterpret_cast<const char*>(&packed), sizeof packed);
  }
  return bytes;
}

}  // namespace fmha
