// Four products of decoder layers in one kernel, for layers with large weights; after chain.cuh. A unit has all rows,
// so that each weight is read by one program, and k is split so that a unit has many features as well as many rows.
// Splits exchange sums through memory, because clusters of four would not all be resident at once.

constexpr int PARTS = HIDDEN / O::COLUMNS * O::SPLITS;  // of a row's squares
typedef Squares<PARTS, 1> SquaresOfRows;                // added up at once to save registers

// This thread's part of a unit's sums, in the blocks of 8 features that its program finishes: per block two of the
// thread's first row, then two of the row 8 below. Programs with the other parts of k write theirs to memory.
template <class P> struct Share {
  static constexpr int COUNT = P::COLUMNS / 8 / P::SPLITS, OTHERS = P::SPLITS - 1;
  float sums[COUNT][4];

  __device__ __forceinline__ Share(const float (&all)[P::COLUMNS / 2], float4* parts, const Unit<P>& unit, int rows) {
    const bool live = unit.has(unit.line(), rows);
    const auto place = [&](int to, int i) {  // of the i-th other program
      return parts + ((unit.tile * P::SPLITS + to) * OTHERS + i) * COUNT * THREADS + threadIdx.x;
    };
#pragma unroll
    for (int to = 0; to < P::SPLITS; to++)
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        const float* y = all + (to * COUNT + c) * 4;
        if (to == unit.split) {
#pragma unroll
          for (int e = 0; e < 4; e++) sums[c][e] = y[e];
        } else if (live) {
          leave_four(place(to, unit.split - (unit.split > to)) + c * THREADS, y[0], y[1], y[2], y[3]);
        }
      }
    if (!live) return;
    float others[OTHERS][COUNT][4];
#pragma unroll
    for (int i = 0; i < OTHERS; i++) look(others[i], place(unit.split, i));
    u32 looks = 0;
#pragma unroll
    for (int i = 0; i < OTHERS; i++) {
      while (!are_there(others[i])) {
        look(others[i], place(unit.split, i));
        if (++looks == PATIENCE) asm volatile("trap;");
      }
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        take_away_four(place(unit.split, i) + c * THREADS);
#pragma unroll
        for (int e = 0; e < 4; e++) sums[c][e] += others[i][c][e];
      }
    }
  }
  // The first feature of a block.
  static __device__ __forceinline__ int feature(const Unit<P>& unit, int c) {
    return unit.feature() + (unit.split * COUNT + c) * 8 + unit.column();
  }

 private:
  static __device__ __forceinline__ void look(float (&y)[COUNT][4], const float4* from) {
#pragma unroll
    for (int c = 0; c < COUNT; c++) look_at_four(from + c * THREADS, y[c][0], y[c][1], y[c][2], y[c][3]);
  }
  static __device__ __forceinline__ bool are_there(const float (&y)[COUNT][4]) {
    bool there = true;
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) there &= is_there(y[c][e]);
    return there;
  }
};

// This thread's elements of x, to which it adds: in its two rows, two of each 8 features of its program's share.
struct Stream {
  static constexpr int COUNT = Share<O>::COUNT;
  u32 pairs[COUNT][2];

  template <class P> static __device__ __forceinline__ u64 place(const Unit<P>& unit, int line, int c) {
    return (u64)line * HIDDEN + Share<P>::feature(unit, c);
  }
  __device__ __forceinline__ void read(const u16* x, const Unit<O>& unit, int rows) {
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int line = unit.line() + 8 * half;
        pairs[c][half] = unit.has(line, rows) ? *(const u32*)(x + place(unit, line, c)) : 0;
      }
  }

  // Adds a product's sums; writes x and its rows' sums of squares.
  template <class P>
  __device__ __forceinline__ void add(const float (&all)[P::COLUMNS / 2], u16* x, float* squares, int rows,
                                      float4* parts) {
    const Unit<P> unit(rows);
    const Share<P> share(all, parts, unit, rows);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int line = unit.line() + 8 * half;
      float square = 0.f;
#pragma unroll
      for (int c = 0; c < COUNT; c++) {
        u32& pair = pairs[c][half];
        pair = pack(low(pair) + share.sums[c][2 * half], high(pair) + share.sums[c][2 * half + 1]);
        square += low(pair) * low(pair) + high(pair) * high(pair);
        if (unit.has(line, rows)) *(u32*)(x + place(unit, line, c)) = pair;
      }
      square += __shfl_xor_sync(~0u, square, 1), square += __shfl_xor_sync(~0u, square, 2);
      if (unit.has(line, rows) && !unit.column())
        squares[line * PARTS + Share<P>::feature(unit, 0) / (8 * COUNT)] = square;
    }
  }
};

// For rows divided by their rms. bias: per feature, or null.
__device__ __forceinline__ void write_projection(const float (&all)[Qkv::COLUMNS / 2], const SquaresOfRows& squares,
                                                 u16* projection, int rows, float eps, float4* parts,
                                                 const u16* bias) {
  typedef Share<Qkv> Shared;
  const Unit<Qkv> unit(rows);
  u32 biases[Shared::COUNT];  // loaded before the others' sums arrive
#pragma unroll
  for (int c = 0; c < Shared::COUNT; c++) biases[c] = bias ? __ldg((const u32*)(bias + Shared::feature(unit, c))) : 0;
  const Shared share(all, parts, unit, rows);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int line = unit.line() + 8 * half;
    const float factor = squares.factor(half, eps);
    u16* to = projection + (u64)line * QKV;
#pragma unroll
    for (int c = 0; c < Shared::COUNT; c++) {
      const float first = share.sums[c][2 * half] * factor + low(biases[c]);
      const float second = share.sums[c][2 * half + 1] * factor + high(biases[c]);
      if (unit.has(line, rows)) *(u32*)(to + Shared::feature(unit, c)) = pack(first, second);
    }
  }
}

// parts: partial sums, ABSENT between launches.
extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
large_chain(const __grid_constant__ TensorMap o, const __grid_constant__ TensorMap gate_up,
            const __grid_constant__ TensorMap last_gate_up, const __grid_constant__ TensorMap down,
            const __grid_constant__ TensorMap qkv, const __grid_constant__ TensorMap heads,
            const __grid_constant__ TensorMap x_to_gate, const __grid_constant__ TensorMap hidden_to_down,
            const __grid_constant__ TensorMap x_to_qkv, u16* x, u16* hidden, u16* projection, float* squares,
            float4* parts, const u16* bias, u32* counts, int rows, float eps, float eps_behind) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring(memory, barriers);
  if (threadIdx.x == 0) {
    ring.init();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Rows without input are multiplied, too: zeros use less power.
  const u32 filled = Unit<O>(rows).tile_rows * LINE;
#pragma unroll 1
  for (int s = 0; s < STAGES; s++)
    for (u32 at = filled + threadIdx.x * 16; at < O::ROWS * LINE; at += (THREADS + 64) * 16)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(ring.tiles + s * STAGE_BYTES + at), "r"(0)
                   : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  if (warp == THREADS / 32) {
    if (lane == 0) ask_for_weights(o, gate_up, last_gate_up, down, qkv, rows, ring);
  } else if (warp > THREADS / 32) {
    if (lane == 0) ask_for_inputs(heads, x_to_gate, hidden_to_down, x_to_qkv, counts, rows, ring);
  } else {
    const Unit<O> adding(rows);
    Stream stream;
    SquaresOfRows of_rows;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (adding.mine) {
      stream.read(x, adding, rows);
      float sums[O::COLUMNS / 2];
      multiply_unit<O>(sums, ring);
      stream.add<O>(sums, x, squares, rows, parts);
      tell(counts);
    }
    if (const Unit<Gate> unit(rows); unit.mine) {
      of_rows.read(squares, unit, rows, ring);
#pragma unroll 1
      for (int i = 0; i < GATE_ROUNDS; i++) {
        float sums[Gate::COLUMNS / 2];
        multiply_unit<Gate>(sums, ring);
        write_hidden<Gate>(sums, of_rows, hidden, rows, eps, i * Gate::OUTPUTS);
      }
#if LAST_FEATURES
      float sums[Last::COLUMNS / 2];
      multiply_unit<Last>(sums, ring);
      write_hidden<Last>(sums, of_rows, hidden, rows, eps, GATE_ROUNDS * Gate::OUTPUTS);
#endif
      tell(counts + 1);
    }
    if (adding.mine) {
      float sums[O::COLUMNS / 2];
      multiply_unit<Down>(sums, ring);
      stream.add<Down>(sums, x, squares, rows, parts);
      tell(counts + 2);
    }
    if (const Unit<Qkv> unit(rows); unit.mine) {
      float sums[Qkv::COLUMNS / 2];
      of_rows.read(squares, unit, rows, ring);
      multiply_unit<Qkv>(sums, ring);
      write_projection(sums, of_rows, projection, rows, eps_behind, parts, bias);
    }
  }
}
