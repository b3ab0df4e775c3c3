// One product of rows by a packed weight with many lines; see packed_linear.py. Compiled for its sizes, after
// packed.cuh.

typedef Product<N, K, PLAIN> Its;

// parts: partial sums, ABSENT between launches.
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
packed_linear(const __grid_constant__ TensorMap input, const unsigned char* data, const float* scales, u16* out,
              float4* parts, int rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Weights ring;
  Inputs inputs;
  make_rings(ring, inputs);
  if (warp >= THREADS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == THREADS / 32 && lane == 0) load_weights<Its>(data, ring, read_once());
    if (warp == THREADS / 32 + 1 && lane == 0) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      load_inputs<Its>(input, inputs);
      asm volatile("griddepcontrol.launch_dependents;");
      if (SHARING > 1) inputs.drain();
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  run_product<Its>(Step{out, nullptr, parts, nullptr, 0, rows}, ring, inputs, scales);
}
