// Four products of decoder layers in one kernel, for layers with small weights; after chain.cuh. Products that are
// added to x are split in k between the two programs of a cluster, which send each other the sums of half of the rows.

constexpr int SENT_BYTES = THREADS * O::COLUMNS;  // half of each thread's sums, in float32
constexpr int PARTS = HIDDEN / O::COLUMNS;        // of a row's squares

// Half of this thread's elements of x, to which it adds: one row of its unit, two of each 8 columns.
struct Stream {
  u32 pairs[O::COLUMNS / 8];

  __device__ __forceinline__ void read(const u16* x, const Unit<O>& unit, int rows) {
    const int line = unit.line() + unit.split * 8;
    const u16* from = x + (u64)(unit.first_row + line) * HIDDEN + unit.feature() + unit.column();
#pragma unroll
    for (int j = 0; j < O::COLUMNS / 8; j++) pairs[j] = unit.has(line, rows) ? *(const u32*)(from + j * 8) : 0;
  }

  // Adds a product's sums, whose other half of k the cluster's other program has, and writes x. Also writes the sums of
  // squares of the new elements, unless ``squares`` is null.
  template <class P>
  __device__ __forceinline__ void add(const float (&sums)[P::COLUMNS / 2], u16* x, float* squares, int rows, u32 received,
                                      u32 sent, int parity) {
    const Unit<P> unit(rows);
    const u32 here = received + threadIdx.x * 8, there = in_cluster(here, unit.split ^ 1);
    const u32 bar = in_cluster(sent, unit.split ^ 1);
    if (threadIdx.x == 0) barrier_expect(sent, SENT_BYTES);
#pragma unroll
    for (int j = 0; j < P::COLUMNS / 8; j++) {
      const float2 others = unit.split ? make_float2(sums[4 * j], sums[4 * j + 1])
                                       : make_float2(sums[4 * j + 2], sums[4 * j + 3]);
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
                   "r"(there + j * THREADS * 8), "f"(others.x), "f"(others.y), "r"(bar) : "memory");
    }
    const int line = unit.line() + unit.split * 8, row = unit.first_row + line;
    const bool live = unit.has(line, rows);
    u16* to = x + (u64)row * HIDDEN + unit.feature() + unit.column();
    barrier_wait(sent, parity);
    float square = 0.f;
#pragma unroll
    for (int j = 0; j < P::COLUMNS / 8; j++) {
      float first, second;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(here + j * THREADS * 8));
      first += unit.split ? sums[4 * j + 2] : sums[4 * j];
      second += unit.split ? sums[4 * j + 3] : sums[4 * j + 1];
      pairs[j] = pack(low(pairs[j]) + first, high(pairs[j]) + second);
      square += low(pairs[j]) * low(pairs[j]) + high(pairs[j]) * high(pairs[j]);
      if (live) *(u32*)(to + j * 8) = pairs[j];
    }
    if (!squares) return;
    square += __shfl_xor_sync(~0u, square, 1), square += __shfl_xor_sync(~0u, square, 2);
    if (live && !unit.column()) squares[row * PARTS + unit.feature() / P::COLUMNS] = square;
  }
};

__device__ __forceinline__ void write_projection(const float (&sums)[Qkv::COLUMNS / 2], u16* projection, int rows) {
  const Unit<Qkv> unit(rows);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int line = unit.line() + 8 * half;
    u16* to = projection + (u64)(unit.first_row + line) * QKV + unit.feature() + unit.column();
#pragma unroll
    for (int j = 0; j < Qkv::COLUMNS / 8; j++)
      if (unit.has(line, rows)) *(u32*)(to + j * 8) = pack(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
chain_linear(const __grid_constant__ TensorMap o, const __grid_constant__ TensorMap gate_up,
             const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap qkv,
             const __grid_constant__ TensorMap heads, const __grid_constant__ TensorMap x_to_gate,
             const __grid_constant__ TensorMap hidden_to_down, const __grid_constant__ TensorMap x_to_qkv, u16* x,
             u16* hidden, u16* projection, float* squares, u32* counts, int rows, float eps) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring(memory, barriers);
  const u32 sent = ring.empty + 8 * STAGES, received = ring.tiles + STAGES * STAGE_BYTES;
  if (threadIdx.x == 0) {
    ring.init();
    barrier_init(sent, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_meet();

  if (warp == THREADS / 32) {
    if (lane == 0) ask_for_weights(o, gate_up, gate_up, down, qkv, rows, ring);
  } else if (warp > THREADS / 32) {
    if (lane == 0) ask_for_inputs(heads, x_to_gate, hidden_to_down, x_to_qkv, counts, rows, ring);
  } else {
    const Unit<O> adding(rows);
    Stream stream;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (adding.mine) {
      stream.read(x, adding, rows);
      float sums[O::COLUMNS / 2];
      multiply_unit<O>(sums, ring);
      stream.add<O>(sums, x, squares, rows, received, sent, 0);
      tell(counts);
    }
    if (const Unit<Gate> unit(rows); unit.mine) {
      float sums[Gate::COLUMNS / 2];
      Squares<PARTS> of_rows;
      of_rows.read(squares, unit, rows, ring);
      multiply_unit<Gate>(sums, ring);
      write_hidden<Gate>(sums, of_rows, hidden, rows, eps, 0);
      tell(counts + 1);
    }
    if (adding.mine) {
      float sums[O::COLUMNS / 2];
      multiply_unit<Down>(sums, ring);
      stream.add<Down>(sums, x, nullptr, rows, received, sent, 1);
      tell(counts + 2);
    }
    if (Unit<Qkv>(rows).mine) {
      float sums[Qkv::COLUMNS / 2];
      multiply_unit<Qkv>(sums, ring);
      write_projection(sums, projection, rows);
    }
  }
  __syncwarp();
  cluster_meet();  // no program may exit while another sends to it
}
