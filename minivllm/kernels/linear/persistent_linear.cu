// y[r, f] = factors[r] * sum_k x[r, k] * weight[f, k] (without factors if null) for many rows, in bfloat16 with float32
// sums, and an epilogue. GATED: out = silu(gate) * up, y's two halves. HEAD: y's features are heads of HEAD dimensions:
// queries, keys and values; queries and keys are normed and rotated, queries go to out, keys and values to the cache.
// See persistent_linear.py.
//
// Compiled for GATED or one HEAD, x whole or in PARTS, and one tiling (GROUPS, LINES, CLUSTER, STAGES, EVEN), after
// hopper.cuh and `multiply` (wgmma.m64n{LINES}k16). Persistent: a program (thread block) loops over tiles of 64 *
// GROUPS rows by LINES lines (weight rows). A cluster of two has different rows and the same lines; each loads half of
// these and multicasts it to both. Warp-specialized: GROUPS warpgroups multiply 64 rows each and put the sums, rounded
// to bfloat16, in shared memory; one warp loads; three run the epilogue while the next tile is multiplied.

constexpr int ROWS = 64 * GROUPS;
constexpr int X_BYTES = ROWS * LINE, HALF_BYTES = LINES / 2 * LINE, STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr int PITCH = LINES * 2;  // bytes of a row of sums, in parts of 16
constexpr int MIXED = LINES % 64 == 0 ? 8 : LINES % 32 == 0 ? 4 : 2;  // parts that are swizzled to avoid bank conflicts
constexpr int FINISHING = 96, ACROSS = LINES / 16;  // epilogue threads; threads per row, two parts each
// Distance of the two parts that a thread handles: gate and up, or the halves of a head, which rotate together.
constexpr int PART = GATED ? ACROSS : HEAD / 16;
constexpr int TURN = FINISHING / ACROSS;  // rows in the epilogue side by side
constexpr int AT_ONCE = EVEN ? 4 : 2;     // rows per thread: one's loads overlap another's arithmetic

#if EVEN
// The rows are one tile, and there are no clusters. Lines are counted in units of 16, for 8 outputs: all programs have
// equally many units, or one less, and take them in equally many rounds of PART units or one less. With so few rows the
// kernel is bound by weights, so it starts loading them first.
struct Tiles {
  int start, units, first, stop, step;
  __device__ Tiles(int rows, int features, int rounds) : first(0), stop(rounds), step(1) {
    const int all = features / 8, programs = gridDim.x, program = blockIdx.x;
    start = all * program / programs, units = all * (program + 1) / programs - start;
  }
  __device__ int at(int tile, int member, int& r0, int& f0) const {  // returns the number of units in the tile
    const int before = units * tile / stop;
    r0 = 0, f0 = (start + before) * 8;
    return units * (tile + 1) / stop - before;
  }
};
#else
constexpr int OUTPUTS = GATED ? LINES / 2 : LINES;
constexpr int WIDE = 8;  // feature tiles that are computed before the next rows, so that their inputs stay in L2

struct Tiles {  // pairs of tiles, in the order of computation
  int columns, block, first, stop, step;  // tiles of features; pairs of tiles in WIDE of them
  __device__ Tiles(int rows, int features, int rounds)
      : columns((features + OUTPUTS - 1) / OUTPUTS), block((rows + 2 * ROWS - 1) / (2 * ROWS) * WIDE),
        first(blockIdx.x / 2), stop(block / WIDE * columns), step(gridDim.x / 2) {}
  __device__ int at(int tile, int member, int& r0, int& f0) const {
    const int before = tile / block * WIDE, beside = columns - before < WIDE ? columns - before : WIDE;
    r0 = (tile % block / beside * 2 + member) * ROWS;
    f0 = (before + tile % block % beside) * OUTPUTS;
    return PART;
  }
};
#endif

#if PARTS
// x and its factors arrive in parts of ``each`` rows (a multiple of a pair's), one per rank; the last may be shorter.
// This rank's own is there. A copy engine of another rank's GPU delivers that rank's part; it is complete when its
// ``arrived`` equals ``number``: see exchange.py.
struct Arrival {
  const u32* arrived;
  u32 number;
  int rank, ranks, each;
};

struct PartedTiles : Tiles {  // part by part, starting with this rank's own
  const Arrival& parts;
  int rows, turn, row, before;  // turn: parts before this one; its first row; before: the tiles of those parts
  __device__ PartedTiles(int all, int features, int rounds, const Arrival& parts)
      : Tiles(all, features, rounds), parts(parts), rows(all), turn(0), before(0) { take(); }
  __device__ void take() {
    const int part = parts.rank + turn;
    row = (part < parts.ranks ? part : part - parts.ranks) * parts.each;
    const int left = rows - row < parts.each ? rows - row : parts.each;  // 0 or less: none
    block = left > 0 ? (left + 2 * ROWS - 1) / (2 * ROWS) * WIDE : 0;
  }
  // Waits until the rows of ``tile`` may be read, by TMA or otherwise. Must be called with ascending tiles.
  __device__ void reach(int tile) {
    const int last = turn;
    for (int size; tile - before >= (size = block / WIDE * columns); take()) before += size, turn++;
    if (turn == last) return;
    const int part = parts.rank + turn;
    const u32* told = parts.arrived + (part < parts.ranks ? part : part - parts.ranks);
    for (u32 number;; __nanosleep(64)) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(number) : "l"(told) : "memory");
      if (number == parts.number) break;
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
  __device__ int at(int tile, int member, int& r0, int& f0) const {
    const int units = Tiles::at(tile - before, member, r0, f0);
    r0 += row;
    return units;
  }
};
#endif

// Where part p of row r of the sums is in that row.
__device__ __forceinline__ int mixed(int p, u32 r) { return p ^ (r / (8 / MIXED) & (MIXED - 1)); }
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
    const u32 pair = product(pack(y[2 * i] * factor, y[2 * i + 1] * factor), weights[i]);
    y[2 * i] = low(pair), y[2 * i + 1] = high(pair);
  }
}

extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)
persistent_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap narrow,
                  const __grid_constant__ TensorMap x, u16* out, const float* factors, int rows, int features,
                  int steps, int tile_rows, int rounds, const __grid_constant__ Heads heads
#if PARTS
                  , const __grid_constant__ Arrival arrival
#endif
) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES + 2 * GROUPS];
  if (EVEN) asm volatile("griddepcontrol.launch_dependents;");
  const int lane = threadIdx.x % 32, member = blockIdx.x % CLUSTER;
  const u32 tiles = (shared_address(memory) + 1023) & ~1023u, sums_at = tiles + STAGES * STAGE_BYTES;
  // For a tile's rows: where their keys and values go in the cache, where their angles are, and their factors.
  long long* places = (long long*)(memory + (sums_at - shared_address(memory)) + ROWS * PITCH);
  int* turns = (int*)(places + ROWS);
  float* scales = (float*)(turns + ROWS);
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
  const u32 summed = empty + 8 * STAGES, finished = summed + 8 * GROUPS;  // of each warpgroup's rows
#if PARTS
  PartedTiles order(rows, features, rounds, arrival);
#else
  const Tiles order(rows, features, rounds);
#endif
  const int in_tile = EVEN ? tile_rows : ROWS;  // rows to load

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, GROUPS * CLUSTER);
    }
    for (int g = 0; g < GROUPS; g++) {
      barrier_init(summed + 8 * g, 128);
      barrier_init(finished + 8 * g, FINISHING);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
  }
  __syncthreads();
  if (CLUSTER > 1) cluster_meet();
  int stage = 0, round = 0, r0, f0;

  if (threadIdx.x < 32) {  // loads
    if (lane == 0) {
      const auto bytes = [&](int units) { return EVEN ? in_tile * LINE + units * (16 * LINE) : STAGE_BYTES; };
      const auto load_weight = [&](int to, int i, int f0, int units) {
#pragma unroll
        for (int half = member; half < member + 2 / CLUSTER; half++)
          load_tile(tiles + to * STAGE_BYTES + X_BYTES + half * HALF_BYTES, EVEN && units < PART ? &narrow : &weight,
                    i * 64, f0 + half * (GATED ? features : LINES / 2), full + 8 * to, CLUSTER, 3);
      };
      int asked = 0;  // stages whose weights are loading
      if (EVEN) {     // no kernel writes weights: load them while the previous kernel still runs
#pragma unroll 1
        for (int tile = order.first; tile < order.stop; tile += order.step) {
          const int units = order.at(tile, member, r0, f0);
#pragma unroll 1
          for (int i = 0; i < steps && asked < STAGES; i++, asked++) {
            barrier_expect(full + 8 * asked, bytes(units));
            load_weight(asked, i, f0, units);
          }
        }
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
      // Late, as in cluster_linear.cu: attention reads before its own wait, but nothing that the previous kernel wrote.
      if (!EVEN) asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll 1
      for (int tile = order.first; tile < order.stop; tile += order.step) {
#if PARTS
        order.reach(tile);
#endif
        const int units = order.at(tile, member, r0, f0);
#pragma unroll 1
        for (int i = 0; i < steps; i++) {
          const u32 bar = full + 8 * stage;
          const bool ask = !EVEN || asked-- <= 0;
          if (ask) {
            barrier_wait(empty + 8 * stage, round & 1 ^ 1);
            barrier_expect(bar, bytes(units));
          }
          load_tile(tiles + stage * STAGE_BYTES, &x, i * 64, r0, bar, 1, 0);
          if (ask) load_weight(stage, i, f0, units);
          if (++stage == STAGES) { stage = 0; round++; }
        }
      }
    }
    __syncwarp();
  } else if (threadIdx.x >= 128) {  // multiply
    const int group = threadIdx.x / 128 - 1, teller = threadIdx.x % 128;
    const int row = group * 64 + teller / 32 * 16 + lane % 16;  // whose part's address this lane gives to stmatrix
    const u32 to = sums_at + row * PITCH;
    const auto let_go = [&](u32 bar) {  // to whoever loads there
      if (CLUSTER == 1 && !teller) here_arrive(bar);
      if (CLUSTER > 1 && teller < CLUSTER) barrier_arrive(bar, teller);
    };
    int turn = 0;
#pragma unroll 1
    for (int tile = order.first; tile < order.stop; tile += order.step) {
      float sums[LINES / 2];
#pragma unroll
      for (int i = 0; i < LINES / 2; i++) sums[i] = 0.f;
#pragma unroll 1
      for (int i = 0; i < steps; i++) {
        barrier_wait(full + 8 * stage, round & 1);
        const u32 at = tiles + stage * STAGE_BYTES;
        const u64 a = matrix(at + group * 64 * LINE), b = matrix(at + X_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) multiply(sums, a + 2 * k, b + 2 * k);  // 16 of k: 32 bytes
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (i) let_go(empty + 8 * (stage ? stage - 1 : STAGES - 1));
        if (++stage == STAGES) { stage = 0; round++; }
      }
      barrier_wait(finished + 8 * group, turn++ & 1 ^ 1);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < LINES / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
      let_go(empty + 8 * (stage ? stage - 1 : STAGES - 1));
#pragma unroll
      for (int j = 0; j < LINES / 8; j += 2) {  // 16 rows of parts j and j + 1
        const float* y = sums + 4 * j;
        store_matrices(to + mixed(j + lane / 16, row) * 16, pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]),
                       pack(y[6], y[7]));
      }
      here_arrive(summed + 8 * group);
    }
  } else {  // epilogue: each thread has two parts of a row
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int worker = threadIdx.x - 32, first = worker / ACROSS;
    const int part = worker % ACROSS / PART * (2 * PART) + worker % PART;
    int turn = 0;
#pragma unroll 1
    for (int tile = order.first; tile < order.stop; tile += order.step, turn++) {
#if PARTS
      order.reach(tile);  // the factors of this part's rows are read, too
#endif
      const int units = order.at(tile, member, r0, f0);
      const int f = f0 + part * 8, head = HEAD ? f / (HEAD + !HEAD) : 0, d = HEAD ? f % (HEAD + !HEAD) : 0;
      const int key = head - heads.queries;
      const bool turned = HEAD && key < heads.keys_each, there = EVEN ? part < units && first < TURN : f < features;
      const u16* norm = !HEAD || !there ? nullptr : key < 0 ? heads.query_norm : turned ? heads.key_norm : nullptr;
      const float* angles_at = heads.angles + d;
      uint4 norms[2];
      if (norm) norms[0] = __ldg((const uint4*)(norm + d)), norms[1] = __ldg((const uint4*)(norm + d + HEAD / 2));
      // Row r of the tile goes to ``to`` + places[r], or to ``to`` + r * pitch if pitch is not 0.
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
          read_eight(a[u], sums_at + line * PITCH + mixed(part, line) * 16);
          read_eight(b[u], sums_at + line * PITCH + mixed(part + PART, line) * 16);
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
          if (line >= in_tile || r0 + line >= rows || !there) continue;
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
#pragma unroll
      for (int g = 0; g < GROUPS; g++) barrier_wait(summed + 8 * g, turn & 1);
#pragma unroll 1
      for (int i = first; i < in_tile; i += 2 * AT_ONCE * TURN) {  // angles are read one pass ahead
        const int then = i + AT_ONCE * TURN;
        read_all_angles(next, then);
        finish(now, i);
        if (then >= in_tile) break;
        read_all_angles(now, then + AT_ONCE * TURN);
        finish(next, then);
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) here_arrive(finished + 8 * g);
    }
  }
  __syncwarp();
  if (CLUSTER > 1) cluster_meet();  // no program may exit while another sends to it or signals it
}
