// Four products of decoder layers in one kernel, with packed weights; see packed_chain.py.
//   x += heads @ o;  hidden = silu(gate) * up of norm(x);  x += hidden @ down;  projection = norm(x) @ qkv of the next
//
// Compiled for one shape, after packed.cuh. Between products the warp that loads inputs waits until all programs have
// finished the previous one; meanwhile two warps compute the rows' factors.

typedef Product<HIDDEN, WIDTH, ADDS> O;
typedef Product<2 * INNER, HIDDEN, GATED> Gate;
typedef Product<HIDDEN, INNER, ADDS> Down;
typedef Product<QKV, HIDDEN, NORMED> Qkv;
constexpr int PARTS = HIDDEN / 16;  // of a row's squares

__device__ __forceinline__ void tell(u32* count) {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// Spinning is safe: all programs run at once. Warps that multiply have no such trap: both kinds of warps would share
// its machine code, and warps that can reach it get no more registers than the kind that has fewer.
__device__ __forceinline__ void wait_for(const u32* count, u32 goal) {
  u32 there, looks = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
    if (++looks == PATIENCE) asm volatile("trap;");
  } while (there < goal);
}

// 1 / rms of each row, eight lanes per row.
__device__ __forceinline__ void find_factors(const float* squares, float* factors, int rows, const u32* count,
                                             float eps, int bar) {
  const int thread = threadIdx.x % FACTOR_THREADS, lane = thread % 8;
  wait_for(count, PROGRAMS);
#pragma unroll 1
  for (int row = thread / 8; row < ROWS; row += FACTOR_THREADS / 8) {
    float sum = 0.f;
    if (row < rows)
#pragma unroll
      for (int i = 0; i < PARTS / 4; i += 8)
        if (i + lane < PARTS / 4) {
          const float4 four = __ldcg((const float4*)(squares + row * PARTS) + i + lane);
          sum += (four.x + four.y) + (four.z + four.w);
        }
#pragma unroll
    for (int other = 1; other < 8; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane == 0) factors[row] = rsqrtf(sum * (1.f / HIDDEN) + eps);
  }
  asm volatile("bar.arrive %0, %1;" ::"r"(bar), "n"(THREADS + FACTOR_THREADS) : "memory");
}

// o_scales etc.: per line, in the order of the units. parts: partial sums, ABSENT between launches. counts: programs
// that finished each of the first three products, and all; zeros between launches. bias: of qkv, or null.
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
packed_chain(const __grid_constant__ TensorMap heads, const __grid_constant__ TensorMap x_in,
             const __grid_constant__ TensorMap hidden_in, const unsigned char* o, const unsigned char* gate_up,
             const unsigned char* down, const unsigned char* qkv, const float* o_scales, const float* gate_up_scales,
             const float* down_scales, const float* qkv_scales, u16* x, u16* hidden, u16* projection, float* squares,
             float4* parts, u32* counts, const u16* bias, int rows, float eps, float eps_behind) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Weights ring;
  Inputs inputs;
  float* const factors = (float*)make_rings(ring, inputs);  // for two products
  if (warp >= THREADS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == THREADS / 32) {
      if (lane == 0) {
        const u64 policy = read_once();
        load_weights<O>(o, ring, policy);
        load_weights<Gate>(gate_up, ring, policy);
        load_weights<Down>(down, ring, policy);
        load_weights<Qkv>(qkv, ring, policy);
      }
    } else if (warp == THREADS / 32 + 1) {
      if (lane == 0) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        load_inputs<O>(heads, inputs);
        wait_for(counts, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Gate>(x_in, inputs);
        wait_for(counts + 1, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Down>(hidden_in, inputs);
        asm volatile("griddepcontrol.launch_dependents;");
        wait_for(counts + 2, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Qkv>(x_in, inputs);
        if (SHARING > 1) inputs.drain();
      }
    } else {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      find_factors(squares, factors, rows, counts, eps, 2);
      find_factors(squares, factors + ROWS, rows, counts + 2, eps_behind, 3);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const Step adding{x, squares, parts, nullptr, 0, rows};
  run_product<O>(adding, ring, inputs, o_scales);
  tell(counts);
  run_product<Gate>(Step{hidden, nullptr, parts, factors, 2, rows}, ring, inputs, gate_up_scales);
  tell(counts + 1);
  run_product<Down>(adding, ring, inputs, down_scales);
  tell(counts + 2);
  run_product<Qkv>(Step{projection, nullptr, parts, factors + ROWS, 3, rows, bias}, ring, inputs, qkv_scales);
  if (threadIdx.x == 0) {
    u32 ended;
    asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(ended) : "l"(counts + 3), "r"(PROGRAMS - 1) : "memory");
    if (ended == PROGRAMS - 1) counts[0] = counts[1] = counts[2] = 0;
  }
}
