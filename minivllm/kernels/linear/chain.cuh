// Shared by the kernels that chain four products; see chain_linear.py.
//   x += heads @ o;  hidden = silu(gate) * up of norm(x);  x += hidden @ down;  projection = x @ qkv of the next layer
//
// Compiled for one shape, after hopper.cuh and `multiply`. One program (thread block) per SM, in clusters of two. A
// program has one unit of each product: ROWS rows by FEATURES lines (weight rows), over all or part of k; it may
// compute gate and up in rounds of features. Warpgroups multiply (rows are M of wgmma), each 64 of the unit's rows or
// half of its features. One warp loads weights as far ahead as there is room, from one product to the next. Another
// loads inputs and waits between products until every program has finished the previous one.

constexpr int THREADS = 128 * GROUPS;  // that multiply; 32 more load weights, 32 load inputs

// OUTPUTS: output features of a round. A tile has TILE of them, which its program may compute in rounds.
template <int ROWS_, int FEATURES_, int AT_ONCE_, int SPLITS_, bool GATED_, int N_, int K_, int TILE_ = 0>
struct Product {
  static constexpr int ROWS = ROWS_, FEATURES = FEATURES_, SPLITS = SPLITS_, N = N_, K = K_;
  static constexpr bool GATED = GATED_;
  static constexpr int OUTPUTS = GATED ? FEATURES / 2 : FEATURES, TILE = TILE_ ? TILE_ : OUTPUTS;
  static constexpr bool APART = ROWS == 64 * GROUPS;  // each warpgroup has 64 rows and all features; else half of these
  static constexpr int COLUMNS = APART ? FEATURES : FEATURES / 2;  // of a warpgroup
  static constexpr int BOX = GATED ? COLUMNS / 2 : FEATURES;       // lines per TMA load
  static constexpr int AT_ONCE = AT_ONCE_;                         // steps of k per stage
  static constexpr int STEP_BYTES = (ROWS + FEATURES) * LINE, FILLS = K / 64 / AT_ONCE / SPLITS;
};
constexpr int GATE_TILE = (GATE_FEATURES * GATE_ROUNDS + LAST_FEATURES) / 2;
typedef Product<ADD_ROWS, ADD_FEATURES, ADD_AT_ONCE, ADD_SPLITS, false, HIDDEN, WIDTH> O;
typedef Product<GATE_ROWS, GATE_FEATURES, GATE_AT_ONCE, GATE_SPLITS, true, 2 * INNER, HIDDEN, GATE_TILE> Gate;
#if LAST_FEATURES  // gate's last round, if it differs from the others
typedef Product<GATE_ROWS, LAST_FEATURES, GATE_AT_ONCE, GATE_SPLITS, true, 2 * INNER, HIDDEN, GATE_TILE> Last;
#endif
typedef Product<ADD_ROWS, ADD_FEATURES, ADD_AT_ONCE, ADD_SPLITS, false, HIDDEN, INNER> Down;
typedef Product<QKV_ROWS, QKV_FEATURES, QKV_AT_ONCE, QKV_SPLITS, false, QKV, HIDDEN> Qkv;

struct Ring {  // a position in the ring buffer of stages
  u32 tiles, full, empty;
  int stage = 0, round = 0;

  __device__ __forceinline__ Ring(const void* memory, const u64* barriers)
      : tiles((shared_address(memory) + 1023) & ~1023u), full(shared_address(barriers)), empty(full + 8 * STAGES) {}
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 2), barrier_init(empty + 8 * s, GROUPS);
  }

  __device__ __forceinline__ u32 at() const { return tiles + stage * STAGE_BYTES; }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, round++;
  }
  // Waits until the stage is free, then sets how many bytes the caller loads into it.
  __device__ __forceinline__ u32 fill(u32 bytes) const {
    barrier_wait(empty + 8 * stage, round & 1 ^ 1);
    barrier_expect(full + 8 * stage, bytes);
    return full + 8 * stage;
  }
};

template <class P> struct Unit {  // this program's unit of a product
  int tile, first_row, tile_rows, split, programs;
  bool mine;

  __device__ __forceinline__ explicit Unit(int rows) {
    const int row_tiles = (rows + P::ROWS - 1) / P::ROWS, unit = blockIdx.x / P::SPLITS;
    tile_rows = ((rows + row_tiles - 1) / row_tiles + 7) / 8 * 8;  // TMA writes rows in eights
    tile = unit / row_tiles, first_row = unit % row_tiles * tile_rows, split = blockIdx.x % P::SPLITS;
    programs = (P::GATED ? P::N / 2 : P::N) / P::TILE * row_tiles * P::SPLITS;
    mine = blockIdx.x < programs;
  }
  // The row of this thread's first sums (the others are 8 below), and their column of 8.
  __device__ __forceinline__ int line() const {
    return (P::APART ? threadIdx.x / 128 * 64 : 0) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ int column() const { return threadIdx.x % 4 * 2; }
  __device__ __forceinline__ bool has(int line, int rows) const { return line < tile_rows && first_row + line < rows; }
  // The warpgroup's first output.
  __device__ __forceinline__ int feature() const {
    return tile * P::TILE + (P::APART ? 0 : threadIdx.x / 128 * (P::GATED ? P::COLUMNS / 2 : P::COLUMNS));
  }
};

template <class P> __device__ __forceinline__ void load_weights(const TensorMap& weight, int rows, Ring& ring,
                                                                 int first = 0) {
  const Unit<P> unit(rows);
  if (!unit.mine) return;
  const u64 policy = read_once();
#pragma unroll 1
  for (int i = 0; i < P::FILLS; i++, ring.next()) {
    const u32 bar = ring.fill(P::AT_ONCE * P::FEATURES * LINE), to = ring.at() + P::ROWS * LINE;
#pragma unroll
    for (int s = 0; s < P::AT_ONCE; s++)
#pragma unroll
      for (int b = 0; b < P::FEATURES / P::BOX; b++) {  // gated: gate and up, per warpgroup unless APART
        const int line = unit.tile * P::TILE + first + (P::GATED ? b % 2 * (P::N / 2) + b / 2 * P::BOX : 0);
        load_tile_once(to + s * P::STEP_BYTES + b * P::BOX * LINE, &weight,
                       ((unit.split * P::FILLS + i) * P::AT_ONCE + s) * 64, line, bar, policy);
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
      for (int k = 0; k < 4; k++)  // 16 of k: 32 bytes
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

// Counts this program as done; whoever waits for the count sees what its threads that multiply wrote.
__device__ __forceinline__ void tell(u32* count) {
  asm volatile("bar.sync 1, %0;" ::"r"(THREADS) : "memory");
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// Spinning is safe: all programs run at once.
__device__ __forceinline__ void wait_for(const u32* count, u32 goal) {
  u32 there, looks = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
    if (++looks == PATIENCE) asm volatile("trap;");
  } while (there < goal);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // so that TMA sees what others wrote
}

// Sums of squares of this thread's two rows of x, a quarter of their parts; complete once the first stage is full. They
// are loaded before the product, and the KEPT ones are added up after it.
template <int PARTS, int KEPT = PARTS / 16> struct Squares {
  float4 parts[2][KEPT];

  template <class P> __device__ __forceinline__ void read(const float* squares, const Unit<P>& unit, int rows,
                                                         const Ring& ring) {
    barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int line = unit.line() + 8 * half;
      const float* from = squares + (unit.first_row + line) * PARTS + unit.column() * 2;
#pragma unroll
      for (int i = 0; i < PARTS / 16; i++) {
        const float4 part = unit.has(line, rows) ? *(const float4*)(from + i * 16) : make_float4(0.f, 0.f, 0.f, 0.f);
        float4& sum = parts[half][i % KEPT];
        sum = i < KEPT ? part : make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
      }
    }
  }
  // 1 / rms of a row.
  __device__ __forceinline__ float factor(int half, float eps) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      sum += parts[half][i].x + parts[half][i].y + (parts[half][i].z + parts[half][i].w);
    sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
    return rsqrtf(sum * (1.f / HIDDEN) + eps);
  }
};

// SiLU(gate) * up of one round's features, from ``first`` on; rows are divided by their rms.
template <class P, class S>
__device__ __forceinline__ void write_hidden(const float (&sums)[P::COLUMNS / 2], const S& squares, u16* hidden,
                                             int rows, float eps, int first) {
  const Unit<P> unit(rows);
  constexpr int BLOCKS = P::COLUMNS / 16;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int line = unit.line() + 8 * half;
    const float factor = squares.factor(half, eps);
    u16* to = hidden + (u64)(unit.first_row + line) * INNER + unit.feature() + first + unit.column();
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
      float y[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float gate = sums[4 * j + 2 * half + e] * factor;
        y[e] = __fdividef(gate, 1.f + __expf(-gate)) * (sums[4 * (j + BLOCKS) + 2 * half + e] * factor);
      }
      if (unit.has(line, rows)) *(u32*)(to + j * 8) = pack(y[0], y[1]);
    }
  }
}

// One thread loads all weights, another all inputs. counts: programs that finished each of the first three products,
// then programs that no longer wait; zeros between launches.
__device__ __forceinline__ void ask_for_weights(const TensorMap& o, const TensorMap& gate_up,
                                                const TensorMap& last_gate_up, const TensorMap& down,
                                                const TensorMap& qkv, int rows, Ring& ring) {
  load_weights<O>(o, rows, ring);
#pragma unroll 1
  for (int i = 0; i < GATE_ROUNDS; i++) load_weights<Gate>(gate_up, rows, ring, i * Gate::OUTPUTS);
#if LAST_FEATURES
  load_weights<Last>(last_gate_up, rows, ring, GATE_ROUNDS * Gate::OUTPUTS);
#endif
  load_weights<Down>(down, rows, ring);
  load_weights<Qkv>(qkv, rows, ring);
}
__device__ __forceinline__ void ask_for_inputs(const TensorMap& heads, const TensorMap& x_to_gate,
                                               const TensorMap& hidden_to_down, const TensorMap& x_to_qkv, u32* counts,
                                               int rows, Ring& ring) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  load_inputs<O>(heads, rows, ring);
  wait_for(counts, Unit<O>(rows).programs);
#pragma unroll 1
  for (int i = 0; i < GATE_ROUNDS; i++) load_inputs<Gate>(x_to_gate, rows, ring);
#if LAST_FEATURES
  load_inputs<Last>(x_to_gate, rows, ring);
#endif
  wait_for(counts + 1, Unit<Gate>(rows).programs);
  load_inputs<Down>(hidden_to_down, rows, ring);
  // Late, because decode attention reads before its own wait: nothing, though, that the kernel just before it wrote.
  asm volatile("griddepcontrol.launch_dependents;");
  wait_for(counts + 2, Unit<Down>(rows).programs);
  u32 ended;
  asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(ended) : "l"(counts + 3), "r"(gridDim.x - 1) : "memory");
  if (ended == gridDim.x - 1) counts[0] = counts[1] = counts[2] = 0;
  load_inputs<Qkv>(x_to_qkv, rows, ring);
}
