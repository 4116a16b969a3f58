#include "bind.h"
namespace fmha { void bind_core(nanobind::module_&) {} }
