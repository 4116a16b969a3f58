#include "bind.h"

NB_MODULE(_core, m) {
  m.doc() = "C++ core of fmha_dispatch: selection, launch shape, KernelParams, launch.";
  fmha::bind_core(m);
  fmha::bind_driver(m);
}
