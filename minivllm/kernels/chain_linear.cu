// Four products of a decoder's layers, one behind another in one kernel; see chain_linear.py.
//   x += heads @ o;  hidden = silu(gate) * up of norm(x);  x += hidden @ down;  projection = x @ qkv of the next layer
//
// Compiled for one shape of them, behind hopper.cuh and `multiply`. One program a multiprocessor, in clusters of two. A
// program has one unit of each product: ROWS rows, FEATURES lines of the weight, and k or half of it. Two warpgroups
// multiply (rows are the tensor cores' M), each half of its unit's rows or of its features. A warp asks for weights, as
// far ahead as there is room, from one product to the next; another asks for inputs, and waits between products until
// every program is done with the one before. What is added to x is split in k over a cluster, whose two programs send
// each other the sums of half of the rows.

constexpr int THREADS = 256;   // that multiply; 32 more ask for weights, 32 for inputs

template <int ROWS_, int FEATURES_, int AT_ONCE_, int SPLITS_, bool GATED_, int N_, int K_>
struct Product {
  static constexpr int ROWS = ROWS_, FEATURES = FEATURES_, SPLITS = SPLITS_, N = N_, K = K_;
  static constexpr bool GATED = GATED_;
  static constexpr bool APART = ROWS == 128;  // each warpgroup has 64 rows and all features, else half of the features
  static constexpr int COLUMNS = APART ? FEATURES : FEATURES / 2;  // of a warpgroup
  static constexpr int BOX = GATED ? COLUMNS / 2 : FEATURES;       // lines of the weight that TMA loads at once
  static constexpr int AT_ONCE = AT_ONCE_;                         // steps of k a stage
  static constexpr int STEP_BYTES = (ROWS + FEATURES) * LINE, FILLS = K / 64 / AT_ONCE / SPLITS;
};
typedef Product<ADD_ROWS, ADD_FEATURES, ADD_AT_ONCE, 2, false, HIDDEN, WIDTH> O;
typedef Product<GATE_ROWS, GATE_FEATURES, GATE_AT_ONCE, 1, true, 2 * INNER, HIDDEN> Gate;
typedef Product<ADD_ROWS, ADD_FEATURES, ADD_AT_ONCE, 2, false, HIDDEN, INNER> Down;
typedef Product<QKV_ROWS, QKV_FEATURES, QKV_AT_ONCE, 1, false, QKV, HIDDEN> Qkv;

constexpr int SENT_BYTES = THREADS * O::COLUMNS;  // a quarter of a thread's sums, in float32
constexpr int PARTS = HIDDEN / O::COLUMNS;        // that a row's squares come in

struct Ring {  // of stages: a product's next one
  u32 tiles, full, empty;
  int stage = 0, round = 0;

  __device__ __forceinline__ u32 at() const { return tiles + stage * STAGE_BYTES; }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, round++;
  }
  // Waits until the stage is free, then says how much of it the caller asks for.
  __device__ __forceinline__ u32 fill(u32 bytes) const {
    barrier_wait(empty + 8 * stage, round & 1 ^ 1);
    barrier_expect(full + 8 * stage, bytes);
    return full + 8 * stage;
  }
};

template <class P> struct Unit {  // this program's of a product
  int tile, first_row, tile_rows, split, programs;
  bool mine;

  __device__ __forceinline__ explicit Unit(int rows) {
    const int row_tiles = (rows + P::ROWS - 1) / P::ROWS, unit = blockIdx.x / P::SPLITS;
    tile_rows = ((rows + row_tiles - 1) / row_tiles + 7) / 8 * 8;  // TMA writes them in eights
    tile = unit / row_tiles, first_row = unit % row_tiles * tile_rows, split = blockIdx.x % P::SPLITS;
    programs = P::N / P::FEATURES * row_tiles * P::SPLITS;
    mine = blockIdx.x < programs;
  }
  // Of this thread's sums: the row of the first ones (others are 8 behind), and the column of 8.
  __device__ __forceinline__ int line() const {
    return (P::APART ? threadIdx.x / 128 * 64 : 0) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ int column() const { return threadIdx.x % 4 * 2; }
  __device__ __forceinline__ bool has(int line, int rows) const { return line < tile_rows && first_row + line < rows; }
  // The warpgroup's first feature, where a tile and a warpgroup have so many of them.
  __device__ __forceinline__ int feature(int of_tile, int of_group) const {
    return tile * of_tile + (P::APART ? 0 : threadIdx.x / 128 * of_group);
  }
};

template <class P> __device__ __forceinline__ void load_weights(const TensorMap& weight, int rows, Ring& ring) {
  const Unit<P> unit(rows);
  if (!unit.mine) return;
#pragma unroll 1
  for (int i = 0; i < P::FILLS; i++, ring.next()) {
    const u32 bar = ring.fill(P::AT_ONCE * P::FEATURES * LINE), to = ring.at() + P::ROWS * LINE;
#pragma unroll
    for (int s = 0; s < P::AT_ONCE; s++)
#pragma unroll
      for (int b = 0; b < P::FEATURES / P::BOX; b++) {  // gated: gate and up, of each warpgroup if it has its own
        const int line = P::GATED ? b % 2 * (P::N / 2) + unit.tile * (P::FEATURES / 2) + b / 2 * P::BOX
                                  : unit.tile * P::FEATURES;
        load_tile(to + s * P::STEP_BYTES + b * P::BOX * LINE, &weight,
                  ((unit.split * P::FILLS + i) * P::AT_ONCE + s) * 64, line, bar, 1, 0);
      }
  }
}

template <class P> __device__ __forceinline__ void load_inputs(const TensorMap& input, int rows, Ring& ring) {
  const Unit<P> unit(rows);
  if (!unit.mine) return;
#pragma unroll 1
  for (int i = 0; i < P::FILLS; i++, ring.next()) {
    const u32 bar = ring.fill(P::AT_ONCE * unit.tile_rows * LINE);
#pragma unroll
    for (int s = 0; s < P::AT_ONCE; s++)
      load_tile(ring.at() + s * P::STEP_BYTES, &input, ((unit.split * P::FILLS + i) * P::AT_ONCE + s) * 64,
                unit.first_row, bar, 1, 0);
  }
}

template <class P> __device__ __forceinline__ void multiply_unit(float (&sums)[P::COLUMNS / 2], Ring& ring) {
  const int group = threadIdx.x / 128;
#pragma unroll
  for (int i = 0; i < P::COLUMNS / 2; i++) sums[i] = 0.f;
  u32 before = 0;
#pragma unroll 1
  for (int i = 0; i < P::FILLS; i++, ring.next()) {
    barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
    const u64 a = matrix(ring.at() + (P::APART ? group * 64 * LINE : 0));
    const u64 b = matrix(ring.at() + P::ROWS * LINE + (P::APART ? 0 : group * P::COLUMNS * LINE));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = 0; s < P::AT_ONCE; s++)
#pragma unroll
      for (int k = 0; k < 4; k++)  // 16 of k: 32 bytes on
        multiply(sums, a + s * (P::STEP_BYTES >> 4) + 2 * k, b + s * (P::STEP_BYTES >> 4) + 2 * k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (i && threadIdx.x % 128 == 0) here_arrive(before);
    before = ring.empty + 8 * ring.stage;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (threadIdx.x % 128 == 0) here_arrive(before);
#pragma unroll
  for (int i = 0; i < P::COLUMNS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// What all threads that multiply wrote before is there for whoever waits for the count.
__device__ __forceinline__ void tell(u32* count) {
  asm volatile("bar.sync 1, %0;" ::"r"(THREADS) : "memory");
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// All programs run at once, so that the others get there.
__device__ __forceinline__ void wait_for(const u32* count, u32 goal) {
  u32 there, looks = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
    if (++looks == PATIENCE) asm volatile("trap;");
  } while (there < goal);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what others wrote
}

// Half of this thread's elements of x, those that it adds to: a row of its unit, two of each 8 columns.
struct Stream {
  u32 pairs[O::COLUMNS / 8];

  __device__ __forceinline__ void read(const u16* x, const Unit<O>& unit, int rows) {
    const int line = unit.line() + unit.split * 8;
    const u16* from = x + (u64)(unit.first_row + line) * HIDDEN + unit.feature(O::FEATURES, O::COLUMNS) + unit.column();
#pragma unroll
    for (int j = 0; j < O::COLUMNS / 8; j++) pairs[j] = unit.has(line, rows) ? *(const u32*)(from + j * 8) : 0;
  }

  // Adds a product's sums, of which the other program of the cluster has the other half of k, and writes x. Squares,
  // if there is room for them, become those of the rows' elements here.
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
    u16* to = x + (u64)row * HIDDEN + unit.feature(P::FEATURES, P::COLUMNS) + unit.column();
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
    if (live && !unit.column()) squares[row * PARTS + unit.feature(P::FEATURES, P::COLUMNS) / P::COLUMNS] = square;
  }
};

// The squares of this thread's two rows of x, a quarter of their parts; they are there when the first stage is. They are
// asked for ahead of the product, and added up behind it.
struct Squares {
  float4 parts[2][PARTS / 16];

  __device__ __forceinline__ void read(const float* squares, int rows, const Ring& ring) {
    const Unit<Gate> unit(rows);
    barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int line = unit.line() + 8 * half;
      const float* from = squares + (unit.first_row + line) * PARTS + unit.column() * 2;
#pragma unroll
      for (int i = 0; i < PARTS / 16; i++)
        parts[half][i] = unit.has(line, rows) ? *(const float4*)(from + i * 16) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  // 1 / rms.
  __device__ __forceinline__ float factor(int half, float eps) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS / 16; i++)
      sum += parts[half][i].x + parts[half][i].y + (parts[half][i].z + parts[half][i].w);
    sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
    return rsqrtf(sum * (1.f / HIDDEN) + eps);
  }
};

// SiLU(gate) * up of rows divided by their rms.
__device__ __forceinline__ void write_hidden(const float (&sums)[Gate::COLUMNS / 2], const Squares& squares,
                                             u16* hidden, int rows, float eps) {
  const Unit<Gate> unit(rows);
  constexpr int OUTPUTS = Gate::COLUMNS / 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int line = unit.line() + 8 * half;
    const float factor = squares.factor(half, eps);
    u16* to = hidden + (u64)(unit.first_row + line) * INNER + unit.feature(Gate::FEATURES / 2, OUTPUTS) + unit.column();
#pragma unroll
    for (int j = 0; j < OUTPUTS / 8; j++) {
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float gate = sums[4 * j + 2 * half + e] * factor;
        y[e] = __fdividef(gate, 1.f + __expf(-gate)) * (sums[4 * (j + OUTPUTS / 8) + 2 * half + e] * factor);
      }
      if (unit.has(line, rows)) *(u32*)(to + j * 8) = pack(y[0], y[1]);
    }
  }
}

__device__ __forceinline__ void write_projection(const float (&sums)[Qkv::COLUMNS / 2], u16* projection, int rows) {
  const Unit<Qkv> unit(rows);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int line = unit.line() + 8 * half;
    u16* to = projection + (u64)(unit.first_row + line) * QKV + unit.feature(Qkv::FEATURES, Qkv::COLUMNS) + unit.column();
#pragma unroll
    for (int j = 0; j < Qkv::COLUMNS / 8; j++)
      if (unit.has(line, rows)) *(u32*)(to + j * 8) = pack(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
  }
}

// counts: programs done with each of the first three products, then those that wait no more; zeros between launches.
extern "C" __global__ void __launch_bounds__(THREADS + 64, 1)
chain_linear(const __grid_constant__ TensorMap o, const __grid_constant__ TensorMap gate_up,
             const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap qkv,
             const __grid_constant__ TensorMap heads, const __grid_constant__ TensorMap x_to_gate,
             const __grid_constant__ TensorMap hidden_to_down, const __grid_constant__ TensorMap x_to_qkv, u16* x,
             u16* hidden, u16* projection, float* squares, u32* counts, int rows, float eps) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring;
  ring.tiles = (shared_address(memory) + 1023) & ~1023u;
  ring.full = shared_address(barriers), ring.empty = ring.full + 8 * STAGES;
  const u32 sent = ring.empty + 8 * STAGES, received = ring.tiles + STAGES * STAGE_BYTES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(ring.full + 8 * s, 2), barrier_init(ring.empty + 8 * s, 2);
    barrier_init(sent, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_meet();

  if (warp == THREADS / 32) {
    if (lane == 0) {
      load_weights<O>(o, rows, ring);
      load_weights<Gate>(gate_up, rows, ring);
      load_weights<Down>(down, rows, ring);
      load_weights<Qkv>(qkv, rows, ring);
    }
  } else if (warp > THREADS / 32) {
    if (lane == 0) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      load_inputs<O>(heads, rows, ring);
      wait_for(counts, Unit<O>(rows).programs);
      load_inputs<Gate>(x_to_gate, rows, ring);
      wait_for(counts + 1, Unit<Gate>(rows).programs);
      load_inputs<Down>(hidden_to_down, rows, ring);
      // Late: decode attention reads what no kernel just before it wrote, ahead of its own wait.
      asm volatile("griddepcontrol.launch_dependents;");
      wait_for(counts + 2, Unit<Down>(rows).programs);
      u32 ended;
      asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(ended) : "l"(counts + 3), "r"(gridDim.x - 1) : "memory");
      if (ended == gridDim.x - 1) counts[0] = counts[1] = counts[2] = 0;
      load_inputs<Qkv>(x_to_qkv, rows, ring);
    }
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
    if (Unit<Gate>(rows).mine) {
      float sums[Gate::COLUMNS / 2];
      Squares of_rows;
      of_rows.read(squares, rows, ring);
      multiply_unit<Gate>(sums, ring);
      write_hidden(sums, of_rows, hidden, rows, eps);
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
  cluster_meet();  // nobody sends to a program that is gone
}
