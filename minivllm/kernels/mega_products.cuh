// The products of megakernel.cu: asking for weights, taking in what the others made, multiplying.

// Asks for LINES lines of a weight, eight at a time; of gate and up a program has half of each.
template <int LINES, int K, bool GATED>
__device__ __forceinline__ void load_weights(const u16* weight, Ring& ring, int lane, u64 policy) {
  constexpr int OWN = GATED ? LINES / 2 : LINES;
#pragma unroll 1
  for (int first = 0; first < LINES; first += 8) {
    const int i = first + lane, some = min(LINES - first, 8);
    const int line = blockIdx.x * OWN + (GATED && i >= OWN ? INNER - OWN + i : i);
    const u16* from = weight + (u64)line * K;
#pragma unroll 1
    for (int k = 0; k < K; k += CHUNK, ring.next()) {
      const u32 bar = make_room(ring, some * CHUNK * 2, lane);
      if (lane < some)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            ::"r"(ring.at() + lane * LINE_BYTES), "l"(from + k), "r"(CHUNK * 2), "r"(bar), "l"(policy) : "memory");
    }
  }
}

// A product's sums, a part of each warp's. A lane reads 16 bytes of a line at once and hands them to the tensor cores
// as they are: two of their four words are k of one row of a tile, two of another, whose x stands in another column. So
// each row of x takes two columns, and their lane of a group of four has its sum.
// GROUPS times eight lines, CHUNKS stages each, which are there or come soon.
template <int GROUPS, int CHUNKS>
__device__ __forceinline__ void multiply_stages(float (&sums)[GROUPS][2][4], Ring& ring, u32 line_at, u32 x_at,
                                                u32 nothing) {
  uint4 w[GROUPS][CHUNKS][LOADS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++, ring.next()) {
      barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
      u32 seen = 0;  // see `nothing` in megakernel.cu
#pragma unroll
      for (int i = 0; i < LOADS; i++) w[g][c][i] = read16(ring.at() + line_at + 64 * i), seen |= w[g][c][i].x;
      __syncwarp();
      if (threadIdx.x % 32 == 0) here_arrive(ring.empty + 8 * ring.stage + (seen & nothing));
    }
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const uint2 x = read8(x_at + 2 * CHUNK * c + 64 * i);
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const uint4 a = w[g][c][i];
        multiply(sums[g][i % 2], a.x, a.y, a.z, a.w, x.x, x.y);
      }
    }
}
// So many lines from the first on.
template <int GROUPS, int K>
__device__ __forceinline__ void multiply_groups(Memory& memory, Ring& ring, int first, u32 line_at, u32 x_at,
                                                u32 nothing) {
  constexpr int CHUNKS = K / CHUNK, SOME = CHUNKS < AT_ONCE ? CHUNKS : AT_ONCE, REST = CHUNKS % SOME;
  float sums[GROUPS][2][4] = {};
#pragma unroll 1
  for (int c = 0; c + SOME <= CHUNKS; c += SOME)
    multiply_stages<GROUPS, SOME>(sums, ring, line_at, x_at + 2 * CHUNK * c, nothing);
  if constexpr (REST) multiply_stages<GROUPS, REST>(sums, ring, line_at, x_at + 2 * CHUNK * (CHUNKS - REST), nothing);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const float sum = (sums[g][0][0] + sums[g][1][0]) + (sums[g][0][3] + sums[g][1][3]);
    const int row = threadIdx.x % 4;
    if (row < ROWS) memory.sums[first + 8 * g + threadIdx.x % 32 / 4][row][threadIdx.x / 32] = sum;
  }
}
template <int LINES, int K> __device__ __forceinline__ void multiply_lines(Memory& memory, Ring& ring, u32 nothing) {
  constexpr int GROUPS = (LINES + 7) / 8, CHUNKS = K / CHUNK, SOME = AT_ONCE / CHUNKS > 1 ? AT_ONCE / CHUNKS : 1;
  constexpr int MANY = SOME < GROUPS ? SOME : GROUPS, REST = GROUPS % MANY;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 mine = warp * (CHUNK / WARPS) * 2 + lane % 4 * 16;
  const u32 x_at = shared_address(memory.x) + lane / 8 % ROWS * X_BYTES + mine + lane / 4 % 2 * 8;
  const u32 line_at = lane / 4 * LINE_BYTES + mine;
#pragma unroll 1
  for (int g = 0; g + MANY <= GROUPS; g += MANY)
    multiply_groups<MANY, K>(memory, ring, 8 * g, line_at, x_at, nothing);
  if constexpr (REST) multiply_groups<REST, K>(memory, ring, 8 * (GROUPS - REST), line_at, x_at, nothing);
}
// Where four elements of this thread's row stand: of each eight pairs the first, third, second and fourth.
__device__ __forceinline__ void put_four(Memory& memory, int at, u32 front, u32 back) {  // at: in fours
  u32* to = (u32*)memory.x[threadIdx.x / TEAM] + at / 2 * 4 + at % 2;
  to[0] = front, to[2] = back;
}
__device__ __forceinline__ float sum_of(const Memory& memory, int line, int row) {
  const float4 a = *(const float4*)memory.sums[line][row], b = *((const float4*)memory.sums[line][row] + 1);
  return (a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w));
}

// Puts a product's input where it is read: WORDS pairs of each row, which other programs leave. Returns the squares of
// this thread's, which are of one row.
template <int WORDS, bool SQUARED> __device__ __forceinline__ float take(Memory& memory, const u64* words, u32 flag) {
  constexpr int TWOS = WORDS / 2, TIMES = (TWOS + TEAM - 1) / TEAM, ROUNDS = (TIMES + 7) / 8;
  constexpr int AT_ONCE = (TIMES + ROUNDS - 1) / ROUNDS;
  const int first = threadIdx.x % TEAM;
  words += threadIdx.x / TEAM * WORDS;
  float square = 0.f;
  u32 looks = 0;
#pragma unroll 1
  for (int start = 0; start < TIMES; start += AT_ONCE) {
    u64 two[AT_ONCE][2] = {};
    bool there;
    do {
      there = true;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (const int at = (start + i) * TEAM + first; at < TWOS && !both(two[i], flag))
          look_at_two(words + 2 * at, two[i]);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) there &= (start + i) * TEAM + first >= TWOS || both(two[i], flag);
      be_patient(looks);
    } while (!there);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (const int at = (start + i) * TEAM + first; at < TWOS) {
        put_four(memory, at, (u32)two[i][0], (u32)two[i][1]);
        if (SQUARED) square += square_of((u32)two[i][0]) + square_of((u32)two[i][1]);
      }
  }
  meet();
  return square;
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
