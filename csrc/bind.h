// The extension is bound in two halves so that the pure core never sees the driver.
#pragma once

#include <nanobind/nanobind.h>

namespace fmha {

void bind_core(nanobind::module_& m);    // bind_core.cpp: Problem, Device, Manifest, select, fill: no driver
void bind_driver(nanobind::module_& m);  // bind_driver.cpp: dlopened driver, tensor-map encoding, launch

}  // namespace fmha
