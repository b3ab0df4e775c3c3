// The products of megakernel.cu: read what other programs made, multiply it by weights from mega_lines.cuh or
// mega_packed.cuh.

// How a product of LINES lines is blocked for registers: batches of MANY groups of eight lines, DEEP stages of each.
template <int LINES, int K, int OF> struct Cut {
  static constexpr int PART = OF / WARPS, LOADS = PART * BYTES / 64;  // a warp's elements of k in a stage
  static constexpr int HELD = FLOAT8 ? 10 : 16;  // loads in registers; with float8 more would spill
  static constexpr int AT_ONCE = HELD / LOADS < STAGES ? HELD / LOADS : STAGES;  // stages of them
  static constexpr int STAGE = OF, STEP_BYTES = BYTES * OF;
  static constexpr int EIGHTS = (LINES + 7) / 8, STEPS = (K + OF - 1) / OF;
  static constexpr int SETS_OF_STEPS = (STEPS + AT_ONCE - 1) / AT_ONCE;
  static constexpr int DEEP = (STEPS + SETS_OF_STEPS - 1) / SETS_OF_STEPS, MOST = AT_ONCE / DEEP;
  static constexpr int SETS = (EIGHTS + MOST - 1) / MOST, MANY = (EIGHTS + SETS - 1) / SETS;
  static_assert(MANY == 1 || SETS_OF_STEPS == 1, "stages come line by line");
  static_assert(OF * BYTES % (64 * WARPS) == 0 && K % PART == 0, "megakernel.py");

  static __device__ __forceinline__ bool has(int set, int deep_set, int i, int step) {
    return (EIGHTS % MANY == 0 || set * MANY + i < EIGHTS) && (STEPS % DEEP == 0 || deep_set * DEEP + step < STEPS);
  }
  // Whether this warp has any part of a stage: k may end before it.
  static __device__ __forceinline__ bool mine(int deep_set, int step) {
    return K % OF == 0 || (deep_set * DEEP + step) * OF + (int)threadIdx.x / 32 * PART < K;
  }
};
// A lane's four words of a line fill two rows of an MMA tile (g and g + 8) with different k. So each row of x takes two
// of the eight columns, one for either k, and one lane in four has the row's sum.
template <class C> struct Batch {
  uint4 w[C::MANY][C::DEEP][C::LOADS];

  // Reads stages as they arrive and releases them.
  __device__ __forceinline__ void read(Ring& ring, int set, int deep_set, u32 nothing) {
#pragma unroll
    for (int i = 0; i < C::MANY; i++)
#pragma unroll
      for (int step = 0; step < C::DEEP; step++)
        if (C::has(set, deep_set, i, step)) {
          barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
          // see `nothing` in megakernel.cu
          const u32 seen = read_stage<C::STAGE>(w[i][step], ring.at(), C::mine(deep_set, step), nothing);
          __syncwarp();
          if (threadIdx.x % 32 == 0) here_arrive(ring.empty + 8 * ring.stage + (seen & nothing));
          ring.next();
        }
  }
  __device__ __forceinline__ void multiply_by(u32 x_at, float (&sums)[C::MANY][SUMS_OF][4], int set, int deep_set) {
#pragma unroll
    for (int step = 0; step < C::DEEP; step++) {
      if (!C::mine(deep_set, step)) continue;
#pragma unroll
      for (int j = 0; j < C::LOADS; j++) {
        uint2 x[X_TILES];
#pragma unroll
        for (int t = 0; t < X_TILES; t++)
          x[t] = read8(x_at + 4 * X_BYTES * t + C::STEP_BYTES * (deep_set * C::DEEP + step) + 64 * j);
#pragma unroll
        for (int i = 0; i < C::MANY; i++)
          if (C::has(set, deep_set, i, step))
#pragma unroll
            for (int t = 0; t < X_TILES; t++) {
              const uint4 a = w[i][step][j];
              float(&its)[4] = sums[i][X_TILES == 1 ? j % 2 : t];
              if constexpr (FLOAT8)
                multiply_float8(its, a.x, a.y, a.z, a.w, x[t].x, x[t].y);
              else
                multiply(its, a.x, a.y, a.z, a.w, x[t].x, x[t].y);
            }
      }
    }
  }
};
// Multiplies x, which is in shared memory, and stores each warp's partial sums. batch: the first, already read. adds:
// to the sums of earlier pieces. only: the one row that has this product, or -1.
template <class C>
__device__ __forceinline__ void multiply_lines(Memory& memory, Ring& ring, Batch<C>& batch, u32 nothing,
                                               bool adds = false, int only = -1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 x_at =
      shared_address(memory.x) + lane / 8 % min(ROWS, 4) * X_BYTES + warp * C::PART * BYTES + x_of_lane(lane);
#pragma unroll 1
  for (int set = 0; set < C::SETS; set++) {
    float sums[C::MANY][SUMS_OF][4] = {};
#pragma unroll 1
    for (int deep_set = 0; deep_set < C::SETS_OF_STEPS; deep_set++) {
      batch.multiply_by(x_at, sums, set, deep_set);
      const bool deeper = deep_set + 1 < C::SETS_OF_STEPS;
      if (deeper || set + 1 < C::SETS) batch.read(ring, deeper ? set : set + 1, deeper ? deep_set + 1 : 0, nothing);
    }
#pragma unroll
    for (int i = 0; i < C::MANY; i++)
#pragma unroll
      for (int t = 0; t < X_TILES; t++) {
        float sum = sums[i][t][0] + sums[i][t][3];
        if (X_TILES == 1) sum += sums[i][1][0] + sums[i][1][3];
        const int row = 4 * t + lane % 4, first = 8 * (set * C::MANY + i);
        if (row < ROWS && (only < 0 || row == only) && C::has(set, 0, i, 0)) {
          float& all = memory.sums[first + lane / 4][row][warp];
          all = adds ? all + sum : sum;
        }
      }
  }
}
// Stores four elements of this thread's row, the ``at``-th four; if FLOAT8, for ``to_float8``.
__device__ __forceinline__ void put_four(Memory& memory, int at, u32 front, u32 back) {
  if constexpr (FLOAT8) {
    *((uint2*)memory.taken[threadIdx.x / TEAM] + at) = make_uint2(front, back);
    return;
  }
  u32* to = (u32*)memory.x[threadIdx.x / TEAM] + x_of_four(at);
  to[0] = front, to[2] = back;
}
__device__ __forceinline__ float sum_of(const Memory& memory, int line, int row) {
  const float4 a = *(const float4*)memory.sums[line][row], b = *((const float4*)memory.sums[line][row] + 1);
  return (a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w));
}
// A program's output of one of its LINES, whose sums and scales begin at SUMS and SCALES.
template <int LINES, int SCALES, int SUMS = 0>
__device__ __forceinline__ float output(const Memory& memory, int line, int row) {
  const float scale = scale_of(memory, SCALES + line) * (FLOAT8 ? memory.x_scales[row] : 1.f);
  return sum_of(memory, SUMS + first_sum<LINES>() + line, row) * scale;
}

// Copies a product's input to shared memory: of each row, WORDS words (pairs) that other programs write. Returns the
// sum of squares of this thread's elements, which are of one row. by: factors for each row (SCALED), not for the
// squares.
template <int WORDS, bool SQUARED, int OF_ROW = WORDS, bool SCALED = false>
__device__ __forceinline__ float take(Memory& memory, const u64* words, u32 flag, const u16* by = nullptr) {
  constexpr int TWOS = WORDS / 2, TIMES = (TWOS + TEAM - 1) / TEAM, ROUNDS = (TIMES + 7) / 8;
  constexpr int EACH = (TIMES + ROUNDS - 1) / ROUNDS;
  const int first = threadIdx.x % TEAM;
  words += threadIdx.x / TEAM * OF_ROW;
  float square = 0.f;
  u32 looks = 0;
  // Poll one word per warp first: all programs polling all words would saturate L2. For a short x this extra read costs
  // more than it saves.
  if (TIMES > (SQUARED ? 4 : 1))
    while (!has(look(words + 2 * (first & ~31)), flag)) be_patient(looks);
#pragma unroll 1
  for (int start = 0; start < TIMES; start += EACH) {
    u64 two[EACH][2] = {};
    uint2 factors[EACH] = {};
    if (SCALED)
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (const int at = (start + i) * TEAM + first; at < TWOS) factors[i] = *((const uint2*)by + at);
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (const int at = (start + i) * TEAM + first; at < TWOS && !both(two[i], flag))
          look_at_two(words + 2 * at, two[i]);
#pragma unroll
      for (int i = 0; i < EACH; i++) there &= (start + i) * TEAM + first >= TWOS || both(two[i], flag);
      be_patient(looks);
    } while (!there);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (const int at = (start + i) * TEAM + first; at < TWOS) {
        if (SCALED)
          put_four(memory, at, product((u32)two[i][0], factors[i].x), product((u32)two[i][1], factors[i].y));
        else
          put_four(memory, at, (u32)two[i][0], (u32)two[i][1]);
        if (SQUARED) square += square_of((u32)two[i][0]) + square_of((u32)two[i][1]);
      }
  }
  if (FLOAT8 && SQUARED) wait_for_copies();  // of the norm's weights
  meet();
  return square;
}

__device__ constexpr int up(int threads) { return (threads + 31) / 32 * 32; }  // rounds up to whole warps

// The biases of the qkv outputs that this thread writes, if there are any.
struct Biases {
  static constexpr int EACH = (up(ROWS * QKV_LINES) + THREADS - 1) / THREADS;
  float its[EACH] = {};

  __device__ __forceinline__ Biases(const Layer& layer) {
    if constexpr (BIASED)
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const int line = blockIdx.x * QKV_LINES + (threadIdx.x + j * THREADS) % QKV_LINES;
        its[j] = __uint_as_float((u32)__ldg(layer.qkv_bias + line) << 16);
        asm volatile("" : "+f"(its[j])::"memory");
      }
  }
};

// Writes a row's outputs in pairs: each thread of a warp has ``y``, its ``line``'s output.
template <int COPIES_ = COPIES>
__device__ __forceinline__ void leave_pair(u64* words, int line, float y, bool live, u32 flag) {
  const float other = __shfl_down_sync(~0u, y, 1);
  if (live && line % 2 == 0)
#pragma unroll
    for (int c = 0; c < COPIES_; c++) leave(words + c * COPY_WORDS + line / 2, pack(y, other), flag);
}
__device__ __forceinline__ void leave_squares(Memory& memory, float square) {
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) memory.squares[threadIdx.x / 32] = square;
}
// 1 / rms of an input row; all threads must have stored their squares and synchronized.
__device__ __forceinline__ float factor(const Memory& memory, int row, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS / ROWS; w++) sum += memory.squares[row * (WARPS / ROWS) + w];
  return rsqrtf(sum / HIDDEN + eps);
}
// SiLU(gate) * up; ``by`` (1 / rms) is still to be applied to both.
__device__ __forceinline__ float activated(float gate, float up, float by) {
  gate *= by;
  return __fdividef(gate, 1.f + __expf(-gate)) * (up * by);
}

// Loads the first layer's input from the embedding; missing rows are zero.
__device__ __forceinline__ float take_first(Memory& memory, const u16* x, int rows) {
  const int row = threadIdx.x / TEAM;
  float square = 0.f;
  for (int i = threadIdx.x % TEAM; i < HIDDEN / 4; i += TEAM) {
    const uint2 four = row < rows ? *(const uint2*)(x + row * HIDDEN + 4 * i) : make_uint2(0, 0);
    put_four(memory, i, four.x, four.y);
    square += square_of(four.x) + square_of(four.y);
  }
  meet();
  return square;
}
