#include "bind.h"

NB_MODULE(_core, m) {
  // Caches of the package live as long as the process; at exit they are no leak to report to a user.
  nanobind::set_leak_warnings(false);
  m.doc() = "C++ core of fmha_dispatch: selection, launch shape, KernelParams, launch.";
  fmha::bind_core(m);
  fmha::bind_driver(m);
}
