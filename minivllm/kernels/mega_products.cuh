// The products of megakernel.cu: taking in what the others made, multiplying by what mega_lines.cuh or mega_packed.cuh
// reads.

// How a product of so many lines goes through registers: batches of so many eights of lines, and stages of each.
template <int LINES, int K, int OF> struct Cut {
  static constexpr int PART = OF / WARPS, LOADS = PART / 32;  // of a stage a warp has so many elements of k
  static constexpr int AT_ONCE = 16 / LOADS < STAGES ? 16 / LOADS : STAGES;  // stages that registers hold
  static constexpr int STAGE = OF, STEP_BYTES = 2 * OF;
  static constexpr int EIGHTS = (LINES + 7) / 8, STEPS = (K + OF - 1) / OF;
  static constexpr int SETS_OF_STEPS = (STEPS + AT_ONCE - 1) / AT_ONCE;
  static constexpr int DEEP = (STEPS + SETS_OF_STEPS - 1) / SETS_OF_STEPS, MOST = AT_ONCE / DEEP;
  static constexpr int SETS = (EIGHTS + MOST - 1) / MOST, MANY = (EIGHTS + SETS - 1) / SETS;
  static_assert(MANY == 1 || SETS_OF_STEPS == 1, "stages come line by line");
  static_assert(OF % (32 * WARPS) == 0 && K % PART == 0, "megakernel.py");

  static __device__ __forceinline__ bool has(int set, int deep_set, int i, int step) {
    return (EIGHTS % MANY == 0 || set * MANY + i < EIGHTS) && (STEPS % DEEP == 0 || deep_set * DEEP + step < STEPS);
  }
  // Whether this warp has any of a stage: k may end before.
  static __device__ __forceinline__ bool mine(int deep_set, int step) {
    return K % OF == 0 || (deep_set * DEEP + step) * OF + (int)threadIdx.x / 32 * PART < K;
  }
};
// Of a lane's four words for a tile of the tensor cores two are k of one row of it, two of another, whose x stands in
// another column. So each row of x takes two columns of eight, and one lane of four has its sum.
template <class C> struct Batch {
  uint4 w[C::MANY][C::DEEP][C::LOADS];

  // Of stages that are there or come soon, which are let go.
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
              multiply(sums[i][X_TILES == 1 ? j % 2 : t], a.x, a.y, a.z, a.w, x[t].x, x[t].y);
            }
      }
    }
  }
};
// A product's sums, a part of each warp's, of x that is there, added to what is there of other pieces. batch: the first.
// only: the row, if but one has this product.
template <class C>
__device__ __forceinline__ void multiply_lines(Memory& memory, Ring& ring, Batch<C>& batch, u32 nothing,
                                               bool adds = false, int only = -1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 x_at =
      shared_address(memory.x) + lane / 8 % min(ROWS, 4) * X_BYTES + warp * C::PART * 2 + x_of_lane(lane);
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
// Four elements of this thread's row, the ``at``-th four.
__device__ __forceinline__ void put_four(Memory& memory, int at, u32 front, u32 back) {
  u32* to = (u32*)memory.x[threadIdx.x / TEAM] + x_of_four(at);
  to[0] = front, to[2] = back;
}
__device__ __forceinline__ float sum_of(const Memory& memory, int line, int row) {
  const float4 a = *(const float4*)memory.sums[line][row], b = *((const float4*)memory.sums[line][row] + 1);
  return (a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w));
}
// A program's output of one of its LINES of a product, whose sums and scales begin there.
template <int LINES, int SCALES, int SUMS = 0>
__device__ __forceinline__ float output(const Memory& memory, int line, int row) {
  return sum_of(memory, SUMS + first_sum<LINES>() + line, row) * scale_of(memory, SCALES + line);
}

// Puts a product's input where it is read: WORDS pairs of each row of so many, which other programs leave. Returns the
// squares of this thread's, which are of one row. by: what each row is multiplied by where it is read, if anything.
template <int WORDS, bool SQUARED, int OF_ROW = WORDS, bool SCALED = false>
__device__ __forceinline__ float take(Memory& memory, const u64* words, u32 flag, const u16* by = nullptr) {
  constexpr int TWOS = WORDS / 2, TIMES = (TWOS + TEAM - 1) / TEAM, ROUNDS = (TIMES + 7) / 8;
  constexpr int EACH = (TIMES + ROUNDS - 1) / ROUNDS;
  const int first = threadIdx.x % TEAM;
  words += threadIdx.x / TEAM * OF_ROW;
  float square = 0.f;
  u32 looks = 0;
  // One word a warp first: all programs looking at all words, again and again, fill L2's time. Of a short stream of x a
  // second look costs more than that.
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
  meet();
  return square;
}

__device__ constexpr int up(int threads) { return (threads + 31) / 32 * 32; }  // to whole warps

// Of qkv's outputs that this thread leaves: their biases, if there are any.
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

// Leaves pairs of a product's outputs, a row's: ``y`` is one of ``line``'s thread, of all threads of a warp.
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
// 1 / rms of a row of the input, once all have left their squares and met.
__device__ __forceinline__ float factor(const Memory& memory, int row, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS / ROWS; w++) sum += memory.squares[row * (WARPS / ROWS) + w];
  return rsqrtf(sum / HIDDEN + eps);
}
// SiLU of gate times up, of x that is still to be multiplied by a norm's factor.
__device__ __forceinline__ float activated(float gate, float up, float by) {
  gate *= by;
  return __fdividef(gate, 1.f + __expf(-gate)) * (up * by);
}

// The first layer's input, from the embedding, and zeros where there is no row.
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
