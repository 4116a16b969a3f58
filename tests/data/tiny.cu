// nvcc -cubin -gencode arch=compute_$A,code=sm_$A -o tiny_sm_$A.cubin tiny.cu     for A in 90 90a 100a 100f 103a (13.0.88)
struct alignas(128) Params {
  long long words[160];
};
extern "C" __global__ void tiny(const __grid_constant__ Params params) {
  *reinterpret_cast<int*>(params.words[1]) = static_cast<int>(params.words[159]);
}
