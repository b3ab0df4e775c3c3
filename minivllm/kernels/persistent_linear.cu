// y[r, f] = factors[r] * sum_k x[r, k] * weight[f, k], without factors if there are none, bfloat16, sums in float32,
// for many rows, and what stands behind. GATED: out = silu(gate) * up, y's two halves. HEAD: y's features are heads of
// so many, of queries, keys and values; queries and keys are normed and rotated, queries go to out, keys and values to
// the cache. See persistent_linear.py.
//
// Compiled for GATED or one HEAD at a time, behind hopper.cuh and `multiply` (wgmma.m64n256k16). Clusters of two
// programs go through pairs of tiles: 128 rows for each program, and the same 256 lines of the weight, of which each
// loads half and sends it to both. A program has two warpgroups that multiply 64 rows each and leave the sums in shared
// memory, rounded to bfloat16, a warp that loads, and three that finish the sums while the next tile is multiplied.

constexpr int ROWS = 128, LINES = 256, STAGES = 3;
constexpr int OUTPUTS = GATED ? LINES / 2 : LINES;
constexpr int X_BYTES = ROWS * LINE, HALF_BYTES = LINES / 2 * LINE, STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr int PITCH = LINES * 2;  // bytes of a row of sums, in parts of 16; part p of row r lies at p ^ (r % 8)
// From a part to the one that it is finished with: gate and up, or the halves of a head, which turn together.
constexpr int PART = GATED ? 16 : HEAD / 16;
constexpr int FINISHING = 96;  // threads; 16 a row, so that TURN rows are finished side by side
constexpr int TURN = FINISHING / 16, AT_ONCE = 2;  // rows that a thread has in hand: one's loads beside another's sums
constexpr int WIDE = 8;  // feature tiles that take turns before the next rows: what they read stays in L2

struct Tiles {  // pairs of them, in the order in which they are computed
  int columns, block;  // tiles of features; pairs of tiles in WIDE of those
  __device__ Tiles(int rows, int features)
      : columns((features + OUTPUTS - 1) / OUTPUTS), block((rows + 2 * ROWS - 1) / (2 * ROWS) * WIDE) {}
  __device__ int all() const { return block / WIDE * columns; }
  __device__ void at(int tile, int member, int& r0, int& f0) const {
    const int before = tile / block * WIDE, beside = columns - before < WIDE ? columns - before : WIDE;
    r0 = (tile % block / beside * 2 + member) * ROWS;
    f0 = (before + tile % block % beside) * OUTPUTS;
  }
};

__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d) : "memory");
}
__device__ __forceinline__ void read_eight(float (&y)[8], u32 from) {
  float words[4];
  read4(words, from);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 pair = __float_as_uint(words[i]);
    y[2 * i] = low(pair), y[2 * i + 1] = high(pair);
  }
}
__device__ __forceinline__ void multiply_eight(float (&y)[8], float factor) {
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] *= factor;
}
__device__ __forceinline__ uint4 packed(const float (&y)[8]) {
  return make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
}
__device__ __forceinline__ float square_sum(const float (&y)[8]) {
  float sums[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i % 2] += y[i] * y[i];
  return sums[0] + sums[1];
}
__device__ __forceinline__ void norm_eight(float (&y)[8], float factor, const uint4& weight) {
  const u32 weights[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 pair = pack(y[2 * i] * factor, y[2 * i + 1] * factor);
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(weights[i]));
    y[2 * i] = low(pair), y[2 * i + 1] = high(pair);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
persistent_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, u16* out,
                  const float* factors, int rows, int features, int steps, const __grid_constant__ Heads heads) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES + 4];
  const int lane = threadIdx.x % 32, member = blockIdx.x % 2;
  const u32 tiles = (shared_address(memory) + 1023) & ~1023u, sums_at = tiles + STAGES * STAGE_BYTES;
  // Of a tile's rows: where their keys and values go in the cache, where their angles are, and their factors.
  long long* places = (long long*)(memory + (sums_at - shared_address(memory)) + ROWS * PITCH);
  int* turns = (int*)(places + ROWS);
  float* scales = (float*)(turns + ROWS);
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
  const u32 summed = empty + 8 * STAGES, finished = summed + 16;  // of either warpgroup's rows
  const Tiles order(rows, features);
  const int all = order.all();

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4);  // two warpgroups of either program
    }
    for (int g = 0; g < 2; g++) {
      barrier_init(summed + 8 * g, 128);
      barrier_init(finished + 8 * g, FINISHING);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
  }
  __syncthreads();
  cluster_meet();
  int stage = 0, round = 0, r0, f0;

  if (threadIdx.x < 32) {  // loads
    if (lane == 0) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      // Late, as in cluster_linear.cu: attention reads what no kernel just before it wrote, ahead of its own wait.
      asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll 1
      for (int tile = blockIdx.x / 2; tile < all; tile += gridDim.x / 2) {
        order.at(tile, member, r0, f0);
        const int line = GATED ? f0 + member * features : f0 + member * (LINES / 2);
#pragma unroll 1
        for (int i = 0; i < steps; i++) {
          const u32 bar = full + 8 * stage, at = tiles + stage * STAGE_BYTES;
          barrier_wait(empty + 8 * stage, round & 1 ^ 1);
          barrier_expect(bar, STAGE_BYTES);
          load_tile(at, &x, i * 64, r0, bar, 1, 0);
          load_tile(at + X_BYTES + member * HALF_BYTES, &weight, i * 64, line, bar, 2, 3);
          if (++stage == STAGES) { stage = 0; round++; }
        }
      }
    }
    __syncwarp();
  } else if (threadIdx.x >= 128) {  // multiply
    const int half = threadIdx.x / 128 - 1, teller = threadIdx.x % 128;
    const int row = half * 64 + teller / 32 * 16 + lane % 16;  // stmatrix: of which this lane gives a part's address
    const u32 to = sums_at + row * PITCH;
    int turn = 0;
#pragma unroll 1
    for (int tile = blockIdx.x / 2; tile < all; tile += gridDim.x / 2) {
      float sums[LINES / 2];
#pragma unroll
      for (int i = 0; i < LINES / 2; i++) sums[i] = 0.f;
#pragma unroll 1
      for (int i = 0; i < steps; i++) {
        barrier_wait(full + 8 * stage, round & 1);
        const u32 at = tiles + stage * STAGE_BYTES;
        const u64 a = matrix(at + half * 64 * LINE), b = matrix(at + X_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) multiply(sums, a + 2 * k, b + 2 * k);  // 16 of k: 32 bytes on
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (i && teller < 2) barrier_arrive(empty + 8 * (stage ? stage - 1 : STAGES - 1), teller);
        if (++stage == STAGES) { stage = 0; round++; }
      }
      barrier_wait(finished + 8 * half, turn++ & 1 ^ 1);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < LINES / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
      if (teller < 2) barrier_arrive(empty + 8 * (stage ? stage - 1 : STAGES - 1), teller);
#pragma unroll
      for (int j = 0; j < LINES / 8; j += 2) {  // 16 rows of parts j and j + 1
        const float* y = sums + 4 * j;
        store_matrices(to + ((j + lane / 16) ^ (row & 7)) * 16, pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]),
                       pack(y[6], y[7]));
      }
      here_arrive(summed + 8 * half);
    }
  } else {  // finishes: each thread two parts of a row
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int worker = threadIdx.x - 32, first = worker / 16;
    const int part = worker % 16 / PART * (2 * PART) + worker % PART;
    int turn = 0;
#pragma unroll 1
    for (int tile = blockIdx.x / 2; tile < all; tile += gridDim.x / 2, turn++) {
      order.at(tile, member, r0, f0);
      const int f = f0 + part * 8, head = HEAD ? f / (HEAD + !HEAD) : 0, d = HEAD ? f % (HEAD + !HEAD) : 0;
      const int key = head - heads.queries;
      const bool turned = HEAD && key < heads.keys_each, there = f < features;
      const u16* norm = !HEAD || !there ? nullptr : key < 0 ? heads.query_norm : turned ? heads.key_norm : nullptr;
      const float* angles_at = heads.angles + d;
      uint4 norms[2];
      if (norm) norms[0] = __ldg((const uint4*)(norm + d)), norms[1] = __ldg((const uint4*)(norm + d + HEAD / 2));
      // Row r of the tile goes to ``to`` + places[r], or r * pitch if that is not 0.
      int pitch = HEAD ? heads.queries * HEAD : features;
      u16 *to = out + (long long)r0 * pitch + (HEAD ? head * HEAD + d : f), *kept = nullptr;
      if (HEAD && key >= 0) {
        pitch = 0;
        to = (turned ? heads.keys : heads.values) + (turned ? key : key - heads.keys_each) * heads.head_stride + d;
        if (heads.kept) kept = heads.kept + ((long long)r0 * 2 * heads.keys_each + key) * HEAD + d;
      }
      asm volatile("bar.sync 1, %0;" ::"n"(FINISHING) : "memory");  // nobody reads the last tile's any more
#pragma unroll 1
      for (int i = worker; i < ROWS; i += FINISHING) {
        const bool live = r0 + i < rows;
        scales[i] = factors && live ? factors[r0 + i] : 1.f;
        if (!HEAD) continue;
        const int slot = live ? (int)heads.slots[r0 + i] : 0;
        turns[i] = live ? (int)(heads.positions[r0 + i] * heads.angles_stride) : 0;
        places[i] = slot / heads.block_size * heads.block_stride + slot % heads.block_size * heads.slot_stride;
      }
      asm volatile("bar.sync 1, %0;" ::"n"(FINISHING) : "memory");
      float4 now[AT_ONCE][4], next[AT_ONCE][4];  // cosines, then sines
      const auto read_all_angles = [&](float4 (&angles)[AT_ONCE][4], int i) {
#pragma unroll
        for (int u = 0; u < (HEAD ? AT_ONCE : 0); u++) {
          const float4* from = (const float4*)(angles_at + turns[i + u * TURN < ROWS ? i + u * TURN : first]);
#pragma unroll
          for (int j = 0; j < 4; j++) angles[u][j] = __ldg(from + j / 2 * (HEAD / 8) + j % 2);
        }
      };
      const auto finish = [&](const float4 (&angles)[AT_ONCE][4], int i) {
        float a[AT_ONCE][8], b[AT_ONCE][8], factor[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
          const int line = i + u * TURN < ROWS ? i + u * TURN : first;
          factor[u] = scales[line];
          read_eight(a[u], sums_at + line * PITCH + (part ^ (line & 7)) * 16);
          read_eight(b[u], sums_at + line * PITCH + ((part + PART) ^ (line & 7)) * 16);
        }
        if (HEAD && (heads.query_norm || heads.key_norm)) {
          float square[AT_ONCE];
#pragma unroll
          for (int u = 0; u < AT_ONCE; u++) square[u] = square_sum(a[u]) + square_sum(b[u]);
#pragma unroll
          for (int other = 1; other < PART; other *= 2)
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) square[u] += __shfl_xor_sync(~0u, square[u], other);
          if (norm) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
              factor[u] *= rsqrtf(square[u] * factor[u] * factor[u] * (1.f / (HEAD + !HEAD)) + heads.eps);
              norm_eight(a[u], factor[u], norms[0]);
              norm_eight(b[u], factor[u], norms[1]);
            }
          }
        }
        if (!norm) {
#pragma unroll
          for (int u = 0; u < AT_ONCE; u++) multiply_eight(a[u], factor[u]), multiply_eight(b[u], factor[u]);
        }
        if (GATED || turned) {
#pragma unroll
          for (int u = 0; u < AT_ONCE; u++) {
            const float *cosines = (const float*)angles[u], *sines = cosines + 8;
#pragma unroll
            for (int e = 0; e < 8; e++) {
              const float x = a[u][e], y = b[u][e];
              if (GATED) a[u][e] = __fdividef(x, 1.f + __expf(-x)) * y;
              else a[u][e] = x * cosines[e] - y * sines[e], b[u][e] = y * cosines[e] + x * sines[e];
            }
          }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
          const int line = i + u * TURN;
          const uint4 front = packed(a[u]), back = packed(b[u]);
          if (line >= ROWS || r0 + line >= rows || !there) continue;
          u16* place = to + (!HEAD || pitch ? (long long)line * pitch : places[line]);
          *(uint4*)place = front;
          if (HEAD) *(uint4*)(place + HEAD / 2) = back;
          if (kept) {
            u16* copy = kept + line * (2 * heads.keys_each * HEAD);
            *(uint4*)copy = front, *(uint4*)(copy + HEAD / 2) = back;
          }
        }
      };
      read_all_angles(now, first);
      barrier_wait(summed, turn & 1);
      barrier_wait(summed + 8, turn & 1);
#pragma unroll 1
      for (int i = first; i < ROWS; i += 2 * AT_ONCE * TURN) {  // angles are read a pass ahead
        const int then = i + AT_ONCE * TURN;
        read_all_angles(next, then);
        finish(now, i);
        if (then >= ROWS) break;
        read_all_angles(now, then + AT_ONCE * TURN);
        finish(next, then);
      }
      here_arrive(finished);
      here_arrive(finished + 8);
    }
  }
  __syncwarp();
  cluster_meet();  // nobody sends to, or signals, a program that is gone
}
