// Python face of the pure core. Attribute names are those of the C++ structs; enum members have NVIDIA's names.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bind.h"
#include "followers.h"
#include "names.h"
#include "params.h"
#include "select.h"
#include "shape.h"
#include "tensor_maps.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmha {
namespace {

template <class E>
void bind_enum(nb::module_& m) {
  nb::enum_<E> type(m, EnumNames<E>::kType.data());
  for (int i = 0; i < num_values<E>(); ++i) type.value(EnumNames<E>::kNames[i].data(), static_cast<E>(i));
}

// Sets attributes by keyword, so that the list of fields is the list of bound attributes.
void set_attributes(nb::handle self, const nb::kwargs& fields) {
  const nb::handle type = self.type();
  for (auto [name, value] : fields) {
    if (!nb::hasattr(type, name)) {
      throw nb::type_error(
          ("no field named '" + nb::cast<std::string>(name) + "' in " + nb::cast<std::string>(type.attr("__name__")))
              .c_str());
    }
    nb::setattr(self, name, value);
  }
}

void bind_problem(nb::module_& m) {
  nb::class_<Problem> type(m, "Problem", "One attention call without its pointers; sizes in tokens, heads, elements.");
#define FMHA_FIELD(name) type.def_rw(#name, &Problem::name);
  FMHA_FIELD(dtype_q)
  FMHA_FIELD(dtype_k)
  FMHA_FIELD(dtype_v)
  FMHA_FIELD(dtype_o)
  FMHA_FIELD(layout)
  FMHA_FIELD(batch_size)
  FMHA_FIELD(max_seq_len_q)
  FMHA_FIELD(max_seq_len_kv)
  FMHA_FIELD(sum_seq_lens_q)
  FMHA_FIELD(num_heads_q)
  FMHA_FIELD(num_heads_kv)
  FMHA_FIELD(head_dim_qk)
  FMHA_FIELD(head_dim_v)
  FMHA_FIELD(page_size)
  FMHA_FIELD(num_pages_k)
  FMHA_FIELD(num_pages_v)
  FMHA_FIELD(max_pages_per_seq)
  FMHA_FIELD(window_left)
  FMHA_FIELD(uses_shared_paged_kv_idx)
  FMHA_FIELD(ragged_q)
  FMHA_FIELD(has_sinks)
  FMHA_FIELD(has_lse)
  FMHA_FIELD(kernel_type)
  FMHA_FIELD(mask)
  FMHA_FIELD(sparse_mla)
  FMHA_FIELD(sparse_top_k)
  FMHA_FIELD(sum_seq_lens_kv)
  FMHA_FIELD(stride_kv_sf_head)
  FMHA_FIELD(stride_kv_sf_page)
  FMHA_FIELD(sage_block_q)
  FMHA_FIELD(sage_block_k)
  FMHA_FIELD(sage_block_p)
  FMHA_FIELD(sage_block_v)
  FMHA_FIELD(skips_softmax)
  FMHA_FIELD(has_sliding_window_pool)
  FMHA_FIELD(allows_tile_size_kv_64)
#undef FMHA_FIELD
#define FMHA_STRIDE(tensor, axis)                                                           \
  type.def_prop_rw(                                                                         \
      "stride_" #tensor "_" #axis, [](const Problem& p) { return p.stride_##tensor.axis; }, \
      [](Problem& p, int64_t value) { p.stride_##tensor.axis = value; });
  FMHA_STRIDE(q, token)
  FMHA_STRIDE(q, head)
  FMHA_STRIDE(k, token)
  FMHA_STRIDE(k, head)
  FMHA_STRIDE(k, page)
  FMHA_STRIDE(v, token)
  FMHA_STRIDE(v, head)
  FMHA_STRIDE(v, page)
#undef FMHA_STRIDE
  type.def("__init__", [](nb::pointer_and_handle<Problem> self, const nb::kwargs& fields) {
    new (self.p) Problem();
    nb::inst_mark_ready(self.h);
    set_attributes(self.h, fields);
  });
}

void bind_buffers(nb::module_& m) {
  nb::class_<Buffers> type(m, "Buffers", "Device addresses (0: absent) and scalars of one call.");
#define FMHA_FIELD(name) type.def_rw(#name, &Buffers::name);
  FMHA_FIELD(q)
  FMHA_FIELD(k)
  FMHA_FIELD(v)
  FMHA_FIELD(o)
  FMHA_FIELD(seq_lens_kv)
  FMHA_FIELD(cum_seq_lens_q)
  FMHA_FIELD(block_tables)
  FMHA_FIELD(sinks)
  FMHA_FIELD(lse)
  FMHA_FIELD(counters)
  FMHA_FIELD(scratch)
  FMHA_FIELD(scale_softmax_log2_ptr)
  FMHA_FIELD(output_scale_ptr)
  FMHA_FIELD(scale_softmax_log2)
  FMHA_FIELD(output_scale)
  FMHA_FIELD(cum_seq_lens_kv)
  FMHA_FIELD(softmax_stats)
  FMHA_FIELD(sparse_top_k_lens)
  FMHA_FIELD(sliding_window_pool)
  FMHA_FIELD(o_sf)
  FMHA_FIELD(k_sf)
  FMHA_FIELD(v_sf)
  FMHA_FIELD(sage_sf_q)
  FMHA_FIELD(sage_sf_k)
  FMHA_FIELD(sage_sf_p)
  FMHA_FIELD(sage_sf_v)
  FMHA_FIELD(scale_sf_kv)
  FMHA_FIELD(scale_sf_o)
  FMHA_FIELD(skip_softmax_factor)
  FMHA_FIELD(start_token_sf_o)
#undef FMHA_FIELD
  type.def("__init__", [](nb::pointer_and_handle<Buffers> self, const nb::kwargs& fields) {
    new (self.p) Buffers();
    nb::inst_mark_ready(self.h);
    set_attributes(self.h, fields);
  });
}

template <class T>
T column_value(nb::handle value, const char* column) {
  T out{};
  if (!nb::try_cast(value, out)) {
    throw ManifestError("kernel manifest: " + std::string(column) + " cannot be " + nb::repr(value).c_str());
  }
  return out;
}

template <class E>
E enum_value(nb::handle value, const char* column) {
  if (!nb::isinstance<nb::str>(value)) return column_value<E>(value, column);
  const auto word = nb::cast<std::string>(value);
  for (int i = 0; i < num_values<E>(); ++i) {
    if (EnumNames<E>::kNames[i] == word) return static_cast<E>(i);
  }
  throw ManifestError("kernel manifest: " + std::string(column) + " has no value '" + word + "'");
}

// `strings` keeps what the views of the rows point to.
Row row_from_dict(const nb::dict& fields, std::vector<std::unique_ptr<std::string>>& strings) {
  Row row;
  size_t used = 0;
  const auto get = [&](const char* column, bool required) -> nb::object {
    if (fields.contains(column)) {
      ++used;
      return fields[column];
    }
    if (required) throw ManifestError("kernel manifest: a row lacks " + std::string(column));
    return nb::object();
  };
#define FMHA_GET(name)                                                                                  \
  strings.push_back(std::make_unique<std::string>(column_value<std::string>(get(#name, true), #name))); \
  row.name = *strings.back();
  FMHA_ROW_STRINGS(FMHA_GET)
#undef FMHA_GET
#define FMHA_GET(type, name)                                                                 \
  if (nb::object value = get(#name, !std::is_same_v<type, SparseMlaType>); value.is_valid()) \
    row.name = enum_value<type>(value, #name);
  FMHA_ROW_ENUMS(FMHA_GET)
#undef FMHA_GET
#define FMHA_GET(type, name, low, high) \
  if (nb::object value = get(#name, false); value.is_valid()) row.name = column_value<int>(value, #name);
  FMHA_ROW_INTS(FMHA_GET)
#undef FMHA_GET
#define FMHA_GET(name) \
  if (nb::object value = get(#name, false); value.is_valid()) row.name = column_value<bool>(value, #name);
  FMHA_ROW_FLAGS(FMHA_GET)
#undef FMHA_GET
  if (used != fields.size())
    throw ManifestError("kernel manifest: row " + std::string(row.name) + " has an unknown column");
  return row;
}

void bind_manifest(nb::module_& m) {
  nb::class_<Row> row(m, "Row", "One kernel of a manifest; columns as in csrc/manifest.h.");
#define FMHA_FIELD(name) row.def_ro(#name, &Row::name);
#define FMHA_ENUM_FIELD(type, name) FMHA_FIELD(name)
#define FMHA_INT_FIELD(type, name, low, high) FMHA_FIELD(name)
  FMHA_ROW_STRINGS(FMHA_FIELD)
  FMHA_ROW_ENUMS(FMHA_ENUM_FIELD)
  FMHA_ROW_INTS(FMHA_INT_FIELD)
  FMHA_ROW_FLAGS(FMHA_FIELD)
  row.def_prop_ro("key", [](const Row& r) { return key_of(r).choice; }, "What NVIDIA's metadata calls hashId.");
#undef FMHA_FIELD
#undef FMHA_ENUM_FIELD
#undef FMHA_INT_FIELD
  nb::class_<Manifest>(m, "Manifest",
                       "A packed table of kernels, checked as a whole when opened; ValueError if damaged.")
      .def(
          "__init__",
          [](Manifest* self, const nb::bytes& data) {
            try {
              new (self) Manifest(std::string_view(data.c_str(), data.size()));
            } catch (const ManifestError& error) {
              throw nb::value_error(error.what());
            }
          },
          "data"_a)
      .def("__len__", &Manifest::size)
      .def(
          "__getitem__",
          [](const Manifest& self, int index) -> const Row& {
            if (index < 0 || index >= self.size()) throw nb::index_error("row out of range");
            return self[index];
          },
          nb::rv_policy::reference_internal)
      .def_static(
          "pack",
          [](const nb::list& rows) {
            try {
              std::vector<std::unique_ptr<std::string>> strings;
              std::vector<Row> parsed;
              for (nb::handle row : rows) {
                nb::dict fields;
                if (!nb::try_cast(row, fields)) {
                  throw ManifestError(std::string("kernel manifest: no row: ") + nb::repr(row).c_str());
                }
                parsed.push_back(row_from_dict(fields, strings));
              }
              const std::string bytes = Manifest::pack(parsed);
              return nb::bytes(bytes.data(), bytes.size());
            } catch (const ManifestError& error) {
              throw nb::value_error(error.what());
            }
          },
          "rows"_a,
          "Bytes that open as these rows (dicts by column; enums as members or their names; ints and flags\n"
          "default to 0). ValueError for an unknown or missing column or a value out of range.");
}

// The decision's row, for a problem that the decision may have been made for.
const Row& row_of(const Problem& problem, const Manifest& manifest, const Decision& decision) {
  if (decision.row < 0) throw nb::value_error(("the decision is a refusal: " + decision.reason).c_str());
  if (decision.row >= manifest.size()) throw nb::value_error("the decision belongs to another manifest");
  if (problem.num_heads_kv < 1 || problem.num_heads_q < problem.num_heads_kv) {
    throw nb::value_error("the problem has no query heads for its KV heads");
  }
  return manifest[decision.row];
}

nb::bytes fill(const Problem& problem, const Manifest& manifest, const Decision& decision, const Buffers& buffers) {
  KernelParams params;
  fill_params(problem, row_of(problem, manifest, decision), decision.shape, buffers, &params);
  return nb::bytes(reinterpret_cast<const char*>(&params), sizeof params);
}

template <class T>
nb::list list_of(const T* values, int count) {
  nb::list list;
  for (int i = 0; i < count; ++i) list.append(values[i]);
  return list;
}

nb::list tensor_maps(const Problem& problem, const Manifest& manifest, const Decision& decision,
                     const Buffers& buffers) {
  TensorMapArgs maps[kMaxTensorMaps];
  const int count = encode_args(problem, row_of(problem, manifest, decision), buffers, maps);
  nb::list list;
  for (int i = 0; i < count; ++i) {
    const TensorMapArgs& map = maps[i];
    const std::string fault = tensor_map_fault(map);
    if (!fault.empty()) throw nb::value_error(fault.c_str());
    nb::dict entry;
    entry["slot"] = slot_name(map.slot);
    entry["dtype"] = map.dtype;
    entry["rank"] = map.rank;
    entry["addr"] = map.addr;
    entry["dims"] = list_of(map.dims, map.rank);
    entry["strides"] = list_of(map.strides, map.rank - 1);
    entry["box"] = list_of(map.box, map.rank);
    entry["elem_strides"] = list_of(map.elem_strides, map.rank);
    entry["interleave"] = map.interleave;
    entry["swizzle"] = map.swizzle;
    entry["l2"] = map.l2;
    entry["oob"] = map.oob;
    list.append(entry);
  }
  return list;
}

nb::object separate_reduction(const Problem& problem, const Manifest& manifest, const Decision& decision,
                              const Device& device) {
  const Row& row = row_of(problem, manifest, decision);
  if (!trtllm_gen::reduces_separately(row)) return nb::none();
  const trtllm_gen::Reduction r = trtllm_gen::separate_reduction(problem, row, decision.shape, device);
  nb::dict launch;
  launch["function"] = r.function;
  launch["grid"] = list_of(r.grid, 3);
  launch["block"] = r.block;
  launch["is_token_sparse"] = r.scalars.is_token_sparse;
  launch["groups_tokens_heads_q"] = r.scalars.groups_tokens_heads_q;
  launch["supports_var_sparse_top_k_lens"] = r.scalars.supports_var_sparse_top_k_lens;
  launch["num_ctas_for_reduction"] = r.scalars.num_ctas_for_reduction;
  launch["num_ctas_for_all_heads"] = r.scalars.num_ctas_for_all_heads;
  launch["head_dim_v"] = r.scalars.head_dim_v;
  launch["num_head_dim_ctas_v"] = r.scalars.num_head_dim_ctas_v;
  launch["tile_size_q"] = r.scalars.tile_size_q;
  launch["sum_scale"] = r.scalars.sum_scale;
  return launch;
}

nb::tuple followers(const Problem& problem, const Manifest& manifest, const Decision& decision) {
  const Row& row = row_of(problem, manifest, decision);
  nb::object reduction = nb::none(), lse = nb::none();
  if (trtllm_gen::reduces_separately(row)) reduction = nb::str(trtllm_gen::reduction_cubin(problem.dtype_o));
  if (is_trtllm_gen(row) && problem.has_lse) lse = nb::str(trtllm_gen::kLseCubin);
  return nb::make_tuple(reduction, lse);
}

nb::tuple lse_launch(const Problem& problem) {
  const trtllm_gen::LseLaunch launch = trtllm_gen::lse_launch(problem);
  return nb::make_tuple(launch.num_values, launch.grid, launch.block);
}

void bind_decision(nb::module_& m) {
  nb::class_<Shape>(m, "Shape", "Grid, cluster and scratch of one launch.")
      .def_prop_ro("grid", [](const Shape& s) { return nb::make_tuple(s.grid[0], s.grid[1], s.grid[2]); })
      .def_ro("cluster", &Shape::cluster)
      .def_ro("block", &Shape::block)
      .def_ro("smem_bytes", &Shape::smem_bytes)
      .def_ro("num_ctas_q", &Shape::num_ctas_q)
      .def_ro("num_ctas_kv", &Shape::num_ctas_kv)
      .def_ro("num_tokens_per_cta_q", &Shape::num_tokens_per_cta_q)
      .def_ro("num_counters", &Shape::num_counters)
      .def_ro("partial_stats_bytes", &Shape::partial_stats_bytes)
      .def_ro("partial_o_bytes", &Shape::partial_o_bytes)
      .def_ro("softmax_stats_bytes", &Shape::softmax_stats_bytes)
      .def_prop_ro("scratch_bytes", &Shape::scratch_bytes);
  nb::class_<Decision>(m, "Decision", "The selector's answer; row -1 is a refusal and `reason` says why.")
      .def_ro("row", &Decision::row)
      .def_prop_ro("shape",
                   [](nb::handle self) -> nb::object {
                     const Decision& d = *nb::inst_ptr<Decision>(self);
                     return d.row < 0 ? nb::none() : nb::cast(d.shape, nb::rv_policy::copy);
                   })
      .def_ro("code", &Decision::code)
      .def_ro("reason", &Decision::reason)
      .def_ro("steps", &Decision::steps)
      .def_prop_ro("rejected", [](const Decision& d) {
        nb::list list;
        for (const Rejection& r : d.rejected) list.append(nb::make_tuple(r.row, r.reason));
        return list;
      });
}

}  // namespace

void bind_core(nb::module_& m) {
  bind_enum<DataType>(m);
  bind_enum<QkvLayout>(m);
  bind_enum<KernelType>(m);
  bind_enum<TileScheduler>(m);
  bind_enum<MultiCtasKvMode>(m);
  bind_enum<MaskType>(m);
  bind_enum<SparseMlaType>(m);
  bind_problem(m);
  bind_buffers(m);
  nb::class_<Device>(m, "Device", "What the selector knows of a GPU; sm is major * 10 + minor.")
      .def(
          "__init__",
          [](Device* self, int sm, int sm_count, int max_smem_bytes, int max_cluster_size, std::vector<int> gpc_sms) {
            new (self) Device{sm, sm_count, max_smem_bytes, max_cluster_size, std::move(gpc_sms)};
          },
          "sm"_a, "sm_count"_a, "max_smem_bytes"_a, "max_cluster_size"_a = 8, "gpc_sms"_a = std::vector<int>())
      .def_rw("sm", &Device::sm)
      .def_rw("sm_count", &Device::sm_count)
      .def_rw("max_smem_bytes", &Device::max_smem_bytes)
      .def_rw("max_cluster_size", &Device::max_cluster_size)
      .def_rw("gpc_sms", &Device::gpc_sms);
  bind_manifest(m);
  bind_decision(m);
  m.def("select", &select, "problem"_a, "manifest"_a, "device"_a, "trace"_a = false,
        "The row that serves the problem, or a refusal in words. `trace` also gives a reason for every other row.");
  m.def("scratch_bound", &scratch_bound, "problem"_a, "manifest"_a, "device"_a,
        "Scratch bytes that no launch for the problem's dtypes and head dims exceeds, whatever batch and lengths.");
  m.def("fill", &fill, "problem"_a, "manifest"_a, "decision"_a, "buffers"_a,
        "The 1,280 bytes of KernelParams; tensor-map slots are zero. ValueError for a refusal.");
  m.def("tensor_maps", &tensor_maps, "problem"_a, "manifest"_a, "decision"_a, "buffers"_a,
        "Arguments of cuTensorMapEncodeTiled for every slot the kernel uses. ValueError if an address is not aligned.");
  m.def("separate_reduction", &separate_reduction, "problem"_a, "manifest"_a, "decision"_a, "device"_a,
        "Launch of the kernel that reduces partial results after a trtllm-gen MLA kernel, or None if it needs none.");
  m.def("followers", &followers, "problem"_a, "manifest"_a, "decision"_a,
        "Paths in the lock of the cubins to launch behind the decision's kernel: (reduction or None, LSE or None).");
  m.def("lse_launch", &lse_launch, "problem"_a,
        "(number of values, blocks, threads) of the kernel that makes LSE from trtllm-gen softmax statistics.");
}

}  // namespace fmha
