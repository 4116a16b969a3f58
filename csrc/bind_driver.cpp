#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bind.h"
#include "counters.h"
#include "driver.h"
#include "launch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace fmha {
namespace {

const char* class_of(Failure::Kind kind) {
  switch (kind) {
    case Failure::Kind::kDevice:
      return "DeviceError";
    case Failure::Kind::kDriver:
      return "DriverError";
    case Failure::Kind::kNotPrepared:
      return "NotPrepared";
    case Failure::Kind::kInvalidArgument:
      return "InvalidArgument";
  }
  return "FmhaError";
}

void raise_in_python(const Failure& failure) {
  nb::dict facts;
  if (!failure.asked.empty()) facts["asked"] = failure.asked;
  if (!failure.found.empty()) facts["found"] = failure.found;
  if (!failure.fix.empty()) facts["fix"] = failure.fix;
  if (failure.kind == Failure::Kind::kDriver) {
    facts["code"] = failure.code;
    facts["call"] = failure.call;
  }
  nb::object type = nb::module_::import_("fmha_dispatch.errors").attr(class_of(failure.kind));
  nb::object error = type(failure.what(), **facts);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    try {
      raise_in_python(failure);
    } catch (nb::python_error& error) {
      error.restore();  // what stopped the translation is better than nothing
    }
  }
}

void init_launcher(nb::pointer_and_handle<Launcher> self, const Driver& driver, const Problem& problem,
                   const Manifest& manifest, const Decision& decision, uint64_t function, int device, uint64_t context,
                   const std::string& kernel_name, uint64_t reduction, uint64_t lse, const Device& gpu) {
  if (decision.row < 0 || decision.row >= manifest.size()) {
    Failure failure(Failure::Kind::kInvalidArgument, "the decision names no row of this manifest");
    failure.found = "row " + std::to_string(decision.row) + " of " + std::to_string(manifest.size());
    throw failure;
  }
  if (problem.num_heads_kv < 1 || problem.num_heads_q < problem.num_heads_kv) {
    throw Failure(Failure::Kind::kInvalidArgument, "the problem has no query heads for its KV heads");
  }
  new (self.p) Launcher(driver, problem, manifest[decision.row], decision.shape, reinterpret_cast<CUkernel>(function),
                        device, reinterpret_cast<CUcontext>(context), kernel_name,
                        {reinterpret_cast<CUkernel>(reduction), reinterpret_cast<CUkernel>(lse)}, gpu);
}

void launch(Launcher& launcher, uint64_t q, uint64_t k, uint64_t v, uint64_t o, uint64_t seq_lens,
            uint64_t cum_seq_lens_q, uint64_t block_tables, uint64_t sinks, uint64_t lse, uint64_t scratch,
            int64_t scratch_bytes, double bmm1_scale, uint64_t bmm1_scale_log2_ptr, double bmm2_scale,
            uint64_t bmm2_scale_ptr, bool enable_pdl, uint64_t stream) {
  constexpr double kLog2E = 1.4426950408889634074;
  Buffers buffers;
  buffers.q = q;
  buffers.k = k;
  buffers.v = v;
  buffers.o = o;
  buffers.seq_lens_kv = seq_lens;
  buffers.cum_seq_lens_q = cum_seq_lens_q;
  buffers.block_tables = block_tables;
  buffers.sinks = sinks;
  buffers.lse = lse;
  buffers.scratch = scratch;
  buffers.scale_softmax_log2 = static_cast<float>(bmm1_scale * kLog2E);
  buffers.scale_softmax_log2_ptr = bmm1_scale_log2_ptr;
  buffers.output_scale = static_cast<float>(bmm2_scale);
  buffers.output_scale_ptr = bmm2_scale_ptr;
  launcher.launch(buffers, scratch_bytes, enable_pdl, reinterpret_cast<CUstream>(stream));
}

bool is_capturing(const Driver& driver, uint64_t stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  driver.check(driver.cuStreamIsCapturing(reinterpret_cast<CUstream>(stream), &status), "cuStreamIsCapturing",
               "asking whether the stream is captured");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace

void bind_driver(nb::module_& m) {
  nb::register_exception_translator(translate);
  m.attr("SCRATCH_ALIGNMENT") = kScratchAlignment;
  m.attr("KERNEL_PARAMS_BYTES") = sizeof(KernelParams);
  m.attr("REDUCTION_PARAM_BYTES") = trtllm_gen::kReductionParamBytes;
  m.attr("LSE_PARAM_BYTES") = trtllm_gen::kLseParamBytes;
  m.def("driver_error_cause", &driver_error_cause, "code"_a,
        "What usually causes a CUresult and what helps; empty for a code without an entry.");

  nb::class_<Driver>(m, "Driver",
                     "The CUDA driver library, opened at `path` (default libcuda.so.1). Makes no driver call.\n\n"
                     "Raises DeviceError if there is none or an entry point is missing.")
      .def(
          "__init__",
          [](nb::pointer_and_handle<Driver> self, const std::optional<std::string>& path) {
            new (self.p) Driver(path ? path->c_str() : nullptr);
          },
          "path"_a = nb::none())
      .def("version", &Driver::version, "CUDA version of the driver: 13000 for 13.0.")
      .def("error_name", &Driver::error_name, "code"_a, "Name of a CUresult.")
      .def("is_capturing", &is_capturing, "stream"_a, "Whether `stream` (a CUstream) is being captured into a graph.");

  nb::class_<Launcher>(
      m, "Launcher",
      "One loaded kernel for one Problem on one device; `function` (a CUkernel) and `context` are driver handles.\n"
      "`reduction` and `lse` are the CUkernels to launch behind it (0: none; followers() says which are needed),\n"
      "`gpu` is what the decision was made for. Launching is thread-safe and allocates nothing.")
      .def("__init__", &init_launcher, nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), "driver"_a, "problem"_a,
           "manifest"_a, "decision"_a, "function"_a, "device"_a, "context"_a, "kernel_name"_a, "reduction"_a = 0,
           "lse"_a = 0, "gpu"_a = Device{})
      .def(
          "launch", &launch, nb::call_guard<nb::gil_scoped_release>(), "q"_a, "k"_a, "v"_a, "o"_a, "seq_lens"_a,
          "cum_seq_lens_q"_a, "block_tables"_a, "sinks"_a, "lse"_a, "scratch"_a, "scratch_bytes"_a, "bmm1_scale"_a,
          "bmm1_scale_log2_ptr"_a, "bmm2_scale"_a, "bmm2_scale_ptr"_a, "enable_pdl"_a, "stream"_a,
          "Enqueues the kernel and its followers on `stream`. All but the scales are device addresses (0: absent),\n"
          "sizes and handles; bmm1_scale is the logit scale, bmm2_scale the output scale, their pointers win where "
          "given.\n\n"
          "Raises InvalidArgument (scratch too small, misaligned tensor, stream of another device), DriverError; then\n"
          "nothing was enqueued, or only kernels before the one that it names.")
      .def_prop_ro("kernel_name", &Launcher::kernel_name)
      .def_prop_ro("device", &Launcher::device);
}

}  // namespace fmha
