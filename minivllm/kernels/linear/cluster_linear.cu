// out[r, f] = sum_k x[r, k] * weight[f, k]  (+ out[r, f]),  bfloat16, sums in float32. FLOAT8: x and weight are float8
// (e4m3), and the sum is multiplied by x's scale of row r and the weight's of line f.
// GATED: out = silu(x @ gate) * (x @ up), the weight's two halves. HEAD: the features are heads of HEAD dimensions:
// queries, keys and values; queries and keys are normed and rotated, keys and values go to the cache. See
// cluster_linear.py.
//
// Compiled for one (GROUPS, COLUMNS, ROWS_FIRST, GATED, HEAD, FLOAT8), after hopper.cuh and `multiply`
// (wgmma.m64n{COLUMNS}, 32 bytes of k). Tensor maps take two float8 for one bfloat16. A program (thread block) has
// GROUPS warpgroups that multiply, each 64 lines of the first operand by COLUMNS lines of the second, and a warp that
// loads tiles. The first operand is the weight, or x if ROWS_FIRST. Grid and cluster are (feature tiles, row tiles,
// splits of k). The programs of a cluster have the same feature tile. Those of one split share the weight's tiles: each
// loads a part and multicasts it. For the reduction over splits, each program finishes some rows and receives the other
// splits' sums of these. With GATED or HEAD, SQUARING additional threads may be launched: then each row is divided by
// x's rms (a norm in front).

constexpr int FEATURES = ROWS_FIRST ? COLUMNS : 64 * GROUPS;
constexpr int ROWS = ROWS_FIRST ? 64 * GROUPS : COLUMNS;
constexpr int THREADS = 128 * GROUPS;    // that multiply; SQUARING more may square x, 32 load
constexpr int SQUARING = GROUPS > 2 ? 0 : ROWS_FIRST ? ROWS : 128;
constexpr int SQUARERS = SQUARING ? SQUARING / ROWS : 1;  // per row
constexpr int W_BYTES = FEATURES * LINE;
constexpr int STAGE_BYTES = W_BYTES + ROWS * LINE;
constexpr int MAX_STAGES = 16;
constexpr int PITCH = FEATURES + (ROWS_FIRST ? 8 : 4);  // of the sums in shared memory, in floats: no bank conflicts,
                                         // room for the sum of x's squares after a row's features
constexpr int OUTPUTS = GATED ? FEATURES / 2 : FEATURES;  // a gated tile has half its lines from gate, half from up
constexpr int WIDTH = OUTPUTS / 8;       // epilogue threads per row, 8 outputs each
constexpr int TURN = THREADS / WIDTH;    // rows in the epilogue at once
constexpr int NEEDED = (ROWS + TURN - 1) / TURN, AT_ONCE = HEAD ? 2 : NEEDED < 4 ? NEEDED : 4;
constexpr int TURNS = (NEEDED + AT_ONCE - 1) / AT_ONCE * AT_ONCE;

__device__ __forceinline__ float read1(u32 from) {
  float d;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(d) : "r"(from));
  return d;
}
__device__ __forceinline__ float2 rounded(float a, float b) {
  const u32 pair = pack(a, b);
  return make_float2(low(pair), high(pair));
}
struct Scales {  // of eight adjacent lines
  float4 its[2];

  __device__ __forceinline__ void load(const float* from) {
    its[0] = __ldg((const float4*)from), its[1] = __ldg((const float4*)from + 1);
  }
  __device__ __forceinline__ void apply(float (&y)[8], float of_row) const {
    const float all[8] = {its[0].x, its[0].y, its[0].z, its[0].w, its[1].x, its[1].y, its[1].z, its[1].w};
#pragma unroll
    for (int e = 0; e < 8; e++) y[e] *= all[e] * of_row;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32 + (GATED || HEAD ? SQUARING : 0), MIN_PROGRAMS)
cluster_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, u16* out,
               const float* row_scales, const float* line_scales, int rows, int features, int steps_all, int tile_rows,
               int stages, int sharing, int splits, int add, float inverse_k, float eps,
               const __grid_constant__ Heads heads) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * MAX_STAGES + 1];
  if (!HEAD) asm volatile("griddepcontrol.launch_dependents;");

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int workers = blockDim.x - 32;     // the last warp loads
  const bool scaled = (GATED || HEAD) && workers != THREADS;  // rows are divided by the rms of x
  const int member = blockIdx.y % sharing, split = blockIdx.z;  // place in the cluster
  const u32 tiles = (shared_address(memory) + 1023) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + 8 * MAX_STAGES, sent = empty + 8 * MAX_STAGES;
  const u32 received = tiles + stages * STAGE_BYTES;  // sums of the other splits, for this program's rows
  const int first = steps_all * split / splits, steps = steps_all * (split + 1) / splits - first;
  const int f0 = blockIdx.x * OUTPUTS, r0 = blockIdx.y * tile_rows;
  const bool alone = sharing * splits == 1;

  if (threadIdx.x == workers) {
    for (int s = 0; s < stages; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, sharing * (scaled ? GROUPS + SQUARING / 32 : GROUPS));
    }
    barrier_init(sent, 1);
    if (splits > 1) barrier_expect(sent, (splits - 1) * ((tile_rows + splits - 1) / splits) * PITCH * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
  }
  __syncthreads();
  if (!alone) cluster_meet();

  float sums[COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.f;

  if (warp == workers / 32) {  // loads
    if (lane == 0) {
      const int part = OUTPUTS / sharing, f = f0 + member * part;
      const u32 w_to = tiles + member * part * LINE, x_to = tiles + W_BYTES;
      const u32 bytes = W_BYTES + tile_rows * LINE;
      const u16 ranks = ((1 << sharing) - 1) << split * sharing;
      const int early = steps < stages ? steps : stages;
#pragma unroll 1
      for (int i = 0; i < early; i++) {  // no kernel writes weights: load them while the previous kernel still runs
        barrier_expect(full + 8 * i, bytes);
        load_tile(w_to + i * STAGE_BYTES, &weight, (first + i) * 64, f, full + 8 * i, sharing, ranks);
        if (GATED)
          load_tile(w_to + OUTPUTS * LINE + i * STAGE_BYTES, &weight, (first + i) * 64, features + f, full + 8 * i,
                    sharing, ranks);
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
      // Late: decode attention reads before its own wait, but nothing that the previous kernel wrote.
      if (HEAD) asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll 1
      for (int i = 0; i < early; i++)
        load_tile(x_to + i * STAGE_BYTES, &x, (first + i) * 64, r0, full + 8 * i, 1, 0);
      int stage = 0, round = 0;
#pragma unroll 1
      for (int i = early; i < steps; i++) {
        const u32 bar = full + 8 * stage, at = stage * STAGE_BYTES;
        barrier_wait(empty + 8 * stage, round & 1);
        barrier_expect(bar, bytes);
        load_tile(w_to + at, &weight, (first + i) * 64, f, bar, sharing, ranks);
        if (GATED)
          load_tile(w_to + OUTPUTS * LINE + at, &weight, (first + i) * 64, features + f, bar, sharing, ranks);
        load_tile(x_to + at, &x, (first + i) * 64, r0, bar, 1, 0);
        if (++stage == stages) { stage = 0; round++; }
      }
    }
    __syncwarp();
    asm volatile("griddepcontrol.wait;" ::: "memory");
  } else if (SQUARING && warp >= THREADS / 32) {  // squares x
    const int row = (threadIdx.x - THREADS) / SQUARERS, part = threadIdx.x % SQUARERS;
    const u32 line = W_BYTES + row * LINE;
    float squares[4] = {0.f, 0.f, 0.f, 0.f};
    int stage = 0, round = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      barrier_wait(full + 8 * stage, round & 1);
      const u32 at = tiles + stage * STAGE_BYTES + line;
      float d[8 / SQUARERS][4];
#pragma unroll
      for (int j = 0; j < 8 / SQUARERS; j++)  // any order of the line's parts will do; this one avoids bank conflicts
        read4(d[j], at + ((j * SQUARERS + part + row * SQUARERS) & 7) * 16);
#pragma unroll
      for (int j = 0; j < 8 / SQUARERS; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const u32 pair = __float_as_uint(d[j][e]);
          squares[e] += low(pair) * low(pair);
          squares[e] += high(pair) * high(pair);
        }
      if (steps > stages) {
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(squares[e])::"memory");  // what was read has arrived
        __syncwarp();
        if (lane < sharing) barrier_arrive(empty + 8 * stage, split * sharing + lane);
      }
      if (++stage == stages) { stage = 0; round++; }
    }
    float square = squares[0] + squares[1] + (squares[2] + squares[3]);
#pragma unroll
    for (int other = 1; other < SQUARERS; other *= 2) square += __shfl_xor_sync(~0u, square, other);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
    if (!part) *(float*)(memory + (tiles - shared_address(memory)) + (row * PITCH + FEATURES) * 4) = square;
    if (splits > 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
  } else {
    const int group = warp / 4, teller = threadIdx.x % 128;  // each frees a stage of one sender
    // This program finishes ``mine`` rows of the tile, from ``start`` on; this thread 8 outputs of every TURN-th of
    // them.
    const int mine = (tile_rows + splits - 1) / splits, start = split * mine;
    const int f = threadIdx.x % WIDTH * 8, row = threadIdx.x / WIDTH;
    int stop = start + mine < tile_rows ? mine : tile_rows - start;
    if (stop > rows - r0 - start) stop = rows - r0 - start;
    if (f0 + f >= features || row >= TURN) stop = 0;
    const int head = HEAD ? (f0 + f) / (HEAD + !HEAD) : 0, d0 = HEAD ? (f0 + f) % (HEAD + !HEAD) : 0;
    const bool turned = head < heads.queries + heads.keys_each;  // a query or a key
    const u16* norm = head < heads.queries ? heads.query_norm : turned ? heads.key_norm : nullptr;
    Scales by, up_by;  // of this thread's outputs
    if (FLOAT8 && f0 + f < features) {
      by.load(line_scales + f0 + f);
      if (GATED) up_by.load(line_scales + features + f0 + f);
    }
    int position[TURNS], slot[TURNS];
    uint4 norms = make_uint4(0, 0, 0, 0);
    if (HEAD) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
      for (int t = 0; t < TURNS; t++) {
        const bool live = row + t * TURN < stop;
        position[t] = live ? (int)heads.positions[r0 + start + row + t * TURN] : 0;
        slot[t] = live ? (int)heads.slots[r0 + start + row + t * TURN] : 0;
      }
      if (norm) norms = *(const uint4*)(norm + d0);
    }

    int stage = 0, round = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      barrier_wait(full + 8 * stage, round & 1);
      const u32 at = tiles + stage * STAGE_BYTES;
      const u64 a = matrix(at + group * 64 * LINE + (ROWS_FIRST ? W_BYTES : 0));
      const u64 b = matrix(at + (ROWS_FIRST ? 0 : W_BYTES));
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) multiply(sums, a + 2 * k, b + 2 * k);  // 32 bytes of k
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (steps > stages) {  // otherwise no stage is reused
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (i && teller < sharing)
          barrier_arrive(empty + 8 * (stage ? stage - 1 : stages - 1), split * sharing + teller);
      }
      if (++stage == stages) { stage = 0; round++; }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");  // every warp has read the tiles

    // Sums to shared memory, [row][feature], where the tiles were.
    float* partial = (float*)(memory + (tiles - shared_address(memory)));
    const int line = group * 64 + warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    if (ROWS_FIRST) {
      partial += line * PITCH + column;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        *(float2*)(partial + j * 8) = make_float2(sums[4 * j], sums[4 * j + 1]);
        *(float2*)(partial + j * 8 + 8 * PITCH) = make_float2(sums[4 * j + 2], sums[4 * j + 3]);
      }
    } else {
      partial += column * PITCH + line;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        partial[j * 8 * PITCH] = sums[4 * j];
        partial[j * 8 * PITCH + PITCH] = sums[4 * j + 1];
        partial[j * 8 * PITCH + 8] = sums[4 * j + 2];
        partial[j * 8 * PITCH + PITCH + 8] = sums[4 * j + 3];
      }
    }

    // Send the sums of the other rows to the programs that finish them.
    const u32 part = mine * PITCH * 4;
    if (splits > 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"r"(workers) : "memory");
    if (threadIdx.x < splits && threadIdx.x != split) {
      const u32 slot = split - (split > threadIdx.x), there = threadIdx.x * sharing + member;
      asm volatile(
          "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(in_cluster(received + slot * part, there)), "r"(tiles + threadIdx.x * part), "r"(part),
          "r"(in_cluster(sent, there)) : "memory");
    }
    u16* to = out + (u64)(r0 + start + row) * features + f0 + f;
    uint4 old[TURNS];
    float of_row[TURNS];
    if (FLOAT8) {
#pragma unroll
      for (int t = 0; t < TURNS; t++) of_row[t] = row + t * TURN < stop ? row_scales[r0 + start + row + t * TURN] : 0.f;
    }
    if (!GATED && !HEAD && add) {
#pragma unroll
      for (int t = 0; t < TURNS; t++)
        if (row + t * TURN < stop) old[t] = *(const uint4*)(to + (u64)(t * TURN) * features);
    }
    const u32 at = (row * PITCH + f) * 4;
#pragma unroll
    for (int first_turn = 0; first_turn < TURNS; first_turn += AT_ONCE) {
      if (first_turn * TURN >= mine) break;
      float y[AT_ONCE][8], up[AT_ONCE][8], square[AT_ONCE];
      float4 turns[AT_ONCE][4];  // cosines, then sines
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        square[t] = 0.f;
#pragma unroll
        for (int e = 0; e < 8; e++) y[t][e] = up[t][e] = 0.f;
        if (HEAD) {
          const float4* angles = (const float4*)(heads.angles + position[first_turn + t] * heads.angles_stride +
                                                 d0 % (HEAD / 2 + !HEAD));
#pragma unroll
          for (int i = 0; i < 4; i++) turns[t][i] = angles[i / 2 * (HEAD / 8) + i % 2];
        }
      }
      if (splits > 1) barrier_wait(sent, 0);
#pragma unroll 1
      for (int s = 0; s < splits; s++) {
        const u32 from = at + (s == split ? tiles + start * PITCH * 4 : received + (s - (s > split)) * part);
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
          if (row + (first_turn + t) * TURN >= stop) continue;
          const u32 sums_of = from + (first_turn + t) * TURN * PITCH * 4;
          if (scaled) square[t] += read1(sums_of + (FEATURES - f) * 4);
#pragma unroll
          for (int e = 0; e < 8; e += 4) {
            float d[4];
            read4(d, sums_of + e * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) y[t][e + i] += d[i];
            if (GATED) {
              read4(d, sums_of + (OUTPUTS + e) * 4);
#pragma unroll
              for (int i = 0; i < 4; i++) up[t][e + i] += d[i];
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++) {
        const int turn = first_turn + t;
        const bool live = row + turn * TURN < stop;
        if (!HEAD && !live) continue;  // a head spans several threads
        if (scaled) {
          const float scale = rsqrtf(square[t] * inverse_k + eps);
#pragma unroll
          for (int e = 0; e < 8; e++) y[t][e] *= scale, up[t][e] *= scale;
        }
        if (FLOAT8) by.apply(y[t], of_row[turn]);
        if (FLOAT8 && GATED) up_by.apply(up[t], of_row[turn]);
        if (GATED) {
#pragma unroll
          for (int e = 0; e < 8; e++) y[t][e] = y[t][e] / (1.f + __expf(-y[t][e])) * up[t][e];
        }
        if (!GATED && !HEAD && add) {
          const u32 pairs[4] = {old[turn].x, old[turn].y, old[turn].z, old[turn].w};
#pragma unroll
          for (int e = 0; e < 8; e += 2) y[t][e] += low(pairs[e / 2]), y[t][e + 1] += high(pairs[e / 2]);
        }
        u16* end = to + (u64)(turn * TURN) * features;
        if (HEAD) {
          if (heads.query_norm || heads.key_norm) {
            float sum = 0.f;
#pragma unroll
            for (int e = 0; e < 8; e++) sum += y[t][e] * y[t][e];
#pragma unroll
            for (int other = 1; other < HEAD / 8; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
            const float scale = rsqrtf(sum / (HEAD + !HEAD) + heads.eps);
            const u32 weights[4] = {norms.x, norms.y, norms.z, norms.w};
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
              if (!norm) break;
              float2 pair = rounded(y[t][e] * scale, y[t][e + 1] * scale);
              pair = rounded(pair.x * low(weights[e / 2]), pair.y * high(weights[e / 2]));
              y[t][e] = pair.x, y[t][e + 1] = pair.y;
            }
          }
          const float* cosines = (const float*)turns[t];
#pragma unroll
          for (int e = 0; e < 8; e++) {
            const float other = __shfl_xor_sync(~0u, y[t][e], HEAD / 16);
            if (turned)
              y[t][e] = y[t][e] * cosines[e] + (d0 < HEAD / 2 ? -other : other) * cosines[8 + e];
          }
          if (head < heads.queries) {
            end = out + (u64)(r0 + start + row + turn * TURN) * (heads.queries * HEAD) + f0 + f;
          } else {
            end = (turned ? heads.keys : heads.values) + slot[turn] / heads.block_size * heads.block_stride +
                  slot[turn] % heads.block_size * heads.slot_stride +
                  (head - heads.queries - (turned ? 0 : heads.keys_each)) * heads.head_stride + d0;
          }
        }
        if (live)
          *(uint4*)end = make_uint4(pack(y[t][0], y[t][1]), pack(y[t][2], y[t][3]), pack(y[t][4], y[t][5]),
                                    pack(y[t][6], y[t][7]));
      }
    }
  }
  __syncwarp();
  if (!alone) cluster_meet();  // what this program sends has arrived; no program may exit while another signals it
}
