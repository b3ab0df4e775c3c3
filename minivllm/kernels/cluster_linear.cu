// out[r, f] = sum_k x[r, k] * weight[f, k]  (+ out[r, f]),  bfloat16, sums in float32.
// GATED: out = silu(x @ gate) * (x @ up), the weight's two halves. See cluster_linear.py.
//
// Compiled for one (GROUPS, COLUMNS, ROWS_FIRST, GATED) at a time, with `multiply` (wgmma.m64n{COLUMNS}k16) put in front.
// A program has GROUPS warpgroups that multiply, each 64 lines of one operand with COLUMNS lines of the other, and a warp
// that asks for tiles. The first operand is the weight, or x if ROWS_FIRST. Grid and cluster are (feature tiles, row
// tiles, splits of k). The programs of a cluster have one feature tile. Those of one split share the weight's tiles: each
// loads its part and sends it to all of them. The splits send each other the sums of the rows that the other finishes.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap { unsigned char bytes[128]; };

constexpr int FEATURES = ROWS_FIRST ? COLUMNS : 64 * GROUPS;
constexpr int ROWS = ROWS_FIRST ? 64 * GROUPS : COLUMNS;
constexpr int THREADS = 128 * GROUPS;    // that multiply; 32 more load
constexpr int LINE = 128;                // bytes of k a stage, 64 elements: what TMA swizzles
constexpr int W_BYTES = FEATURES * LINE;
constexpr int STAGE_BYTES = W_BYTES + ROWS * LINE;
constexpr int MAX_STAGES = 16;
constexpr int PITCH = FEATURES + (ROWS_FIRST ? 8 : 4);  // of the sums in shared memory, in floats: no bank conflicts
constexpr int OUTPUTS = GATED ? FEATURES / 2 : FEATURES;  // a gated tile holds as many lines of gate as of up
constexpr int WIDTH = OUTPUTS / 8;       // threads that finish a row, 8 outputs each
constexpr int TURN = THREADS / WIDTH;    // rows that are finished at once
constexpr int NEEDED = (ROWS + TURN - 1) / TURN, AT_ONCE = NEEDED < 4 ? NEEDED : 4;
constexpr int TURNS = (NEEDED + AT_ONCE - 1) / AT_ONCE * AT_ONCE;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni out;\nbra.uni again;\nout:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ u32 in_cluster(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
__device__ __forceinline__ void barrier_arrive(u32 bar, u32 rank) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_cluster(bar, rank)) : "memory");
}
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void load_tile(u32 to, const TensorMap* map, int k, int row, u32 bar, int sharing,
                                          u16 ranks) {
  if (sharing == 1)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
        "r"(to), "l"(map), "r"(bar), "r"(k), "r"(row) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "h"(ranks) : "memory");
}
// A tile of 128-byte lines, swizzled by TMA, 8 lines (1,024 bytes) after another.
__device__ __forceinline__ u64 matrix(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

__device__ __forceinline__ void read4(float (&d)[4], u32 from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(from));
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, MIN_PROGRAMS)
cluster_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, u16* out, int rows,
               int features, int steps_all, int tile_rows, int stages, int sharing, int splits, int add) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * MAX_STAGES + 1];
  asm volatile("griddepcontrol.launch_dependents;");

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int member = blockIdx.y % sharing, split = blockIdx.z;  // place in the cluster
  const u32 tiles = (shared_address(memory) + 1023) & ~1023u;
  const u32 full = shared_address(barriers), empty = full + 8 * MAX_STAGES, sent = empty + 8 * MAX_STAGES;
  const u32 received = tiles + stages * STAGE_BYTES;  // sums of the other splits, for this program's rows
  const int first = steps_all * split / splits, steps = steps_all * (split + 1) / splits - first;
  const int f0 = blockIdx.x * OUTPUTS, r0 = blockIdx.y * tile_rows;
  const bool alone = sharing * splits == 1;

  if (threadIdx.x == THREADS) {
    for (int s = 0; s < stages; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, sharing * GROUPS);
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

  if (warp == THREADS / 32) {  // loads
    if (lane == 0) {
      const int part = OUTPUTS / sharing, f = f0 + member * part;
      const u32 w_to = tiles + member * part * LINE, x_to = tiles + W_BYTES;
      const u32 bytes = W_BYTES + tile_rows * LINE;
      const u16 ranks = ((1 << sharing) - 1) << split * sharing;
      const int early = steps < stages ? steps : stages;
#pragma unroll 1
      for (int i = 0; i < early; i++) {  // no kernel writes weights: they come while the one before still runs
        barrier_expect(full + 8 * i, bytes);
        load_tile(w_to + i * STAGE_BYTES, &weight, (first + i) * 64, f, full + 8 * i, sharing, ranks);
        if (GATED)
          load_tile(w_to + OUTPUTS * LINE + i * STAGE_BYTES, &weight, (first + i) * 64, features + f, full + 8 * i,
                    sharing, ranks);
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
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
  } else {
    const int group = warp / 4, teller = threadIdx.x % 128;  // tells one of those that send here: fill a stage again
    int stage = 0, round = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
      barrier_wait(full + 8 * stage, round & 1);
      const u32 at = tiles + stage * STAGE_BYTES;
      const u64 a = matrix(at + group * 64 * LINE + (ROWS_FIRST ? W_BYTES : 0));
      const u64 b = matrix(at + (ROWS_FIRST ? 0 : W_BYTES));
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) multiply(sums, a + 2 * k, b + 2 * k);  // 16 of k: 32 bytes on
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (steps > stages) {  // else no stage is filled twice
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
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");  // every warp's products have read the tiles

    // Sums to shared memory, [row][feature], over the tiles.
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

    // This program finishes some of the tile's rows, and sends the others' sums to the programs that finish them.
    const int mine = (tile_rows + splits - 1) / splits, start = split * mine;
    const u32 part = mine * PITCH * 4;
    if (splits > 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    if (threadIdx.x < splits && threadIdx.x != split) {
      const u32 slot = split - (split > threadIdx.x), there = threadIdx.x * sharing + member;
      asm volatile(
          "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(in_cluster(received + slot * part, there)), "r"(tiles + threadIdx.x * part), "r"(part),
          "r"(in_cluster(sent, there)) : "memory");
    }
    const int f = threadIdx.x % WIDTH * 8, row = threadIdx.x / WIDTH;  // among mine
    int stop = start + mine < tile_rows ? mine : tile_rows - start;
    if (stop > rows - r0 - start) stop = rows - r0 - start;
    if (f0 + f >= features || row >= TURN) stop = 0;
    u16* to = out + (u64)(r0 + start + row) * features + f0 + f;
    uint4 old[TURNS];
    if (!GATED && add) {
#pragma unroll
      for (int t = 0; t < TURNS; t++)
        if (row + t * TURN < stop) old[t] = *(const uint4*)(to + (u64)(t * TURN) * features);
    }
    if (splits > 1) barrier_wait(sent, 0);
    const u32 at = (row * PITCH + f) * 4;
#pragma unroll
    for (int first_turn = 0; first_turn < TURNS; first_turn += AT_ONCE) {
      float y[AT_ONCE][8], up[AT_ONCE][8];
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++)
#pragma unroll
        for (int e = 0; e < 8; e++) y[t][e] = up[t][e] = 0.f;
      if (!GATED && add) {
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
          const uint4 r = old[first_turn + t];
          y[t][0] = low(r.x), y[t][1] = high(r.x), y[t][2] = low(r.y), y[t][3] = high(r.y);
          y[t][4] = low(r.z), y[t][5] = high(r.z), y[t][6] = low(r.w), y[t][7] = high(r.w);
        }
      }
#pragma unroll 1
      for (int s = 0; s < splits; s++) {
        const u32 from = at + (s == split ? tiles + start * PITCH * 4 : received + (s - (s > split)) * part);
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
          if (row + (first_turn + t) * TURN >= stop) continue;
          const u32 sums_of = from + (first_turn + t) * TURN * PITCH * 4;
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
        if (row + (first_turn + t) * TURN >= stop) continue;
        if (GATED) {
#pragma unroll
          for (int e = 0; e < 8; e++) y[t][e] = y[t][e] / (1.f + __expf(-y[t][e])) * up[t][e];
        }
        *(uint4*)(to + (u64)((first_turn + t) * TURN) * features) = make_uint4(
            pack(y[t][0], y[t][1]), pack(y[t][2], y[t][3]), pack(y[t][4], y[t][5]), pack(y[t][6], y[t][7]));
      }
    }
  }
  __syncwarp();
  if (!alone) cluster_meet();  // what this program sends has arrived, and nobody signals to one that is gone
}
