// Four products of a decoder's layers, one behind another in one kernel, whose weights come packed; see packed_weights.py
// and packed_chain.py.
//   x += heads @ o;  hidden = silu(gate) * up of norm(x);  x += hidden @ down;  projection = norm(x) @ qkv of the next
//
// Compiled for one shape and ROWS columns, behind hopper.cuh and multiply_by. One program a multiprocessor. Weights are
// the tensor cores' M, and come from registers, where two warpgroups decode them: each has 128 lines of a unit of 256.
// What is left when each program has as many whole blocks of 256 lines as any other is cut along k, so that each gets as
// many units, but for one; programs that have parts of a block leave their sums in memory, and each finishes a share of
// it. A warp asks for weights as far ahead as there is room, from one product to the next; another for inputs, and waits
// between products until all programs are done with the one before; two find the rows' factors meanwhile.

constexpr int THREADS = 256, LINES = 256, UNIT_BYTES = 24832, TILE_BYTES = 6144, TAIL = 4 * TILE_BYTES;
constexpr int X_BYTES = ROWS * LINE, STAGE_BYTES = X_BYTES + 25600;
constexpr int FACTOR_THREADS = 64, PARTS = HIDDEN / 16;  // that a row's squares come in
constexpr int PART_WORDS = THREADS * ROWS;              // floats of a block's sums

template <int N_, int K_, bool GATED_, int COUNTS_> struct Product {
  static constexpr int BLOCKS = N_ / LINES, STEPS = K_ / 64, WHOLE = BLOCKS / PROGRAMS, REST = BLOCKS % PROGRAMS;
  static constexpr int CUT = REST * STEPS, COUNTS = COUNTS_;  // units that are cut; where the counts of blocks are
  static constexpr bool GATED = GATED_;
  static_assert(CUT == 0 || CUT >= PROGRAMS, "packed_chain.py");
  static __device__ __forceinline__ int begin(int program) { return program * CUT / PROGRAMS; }
  static __device__ __forceinline__ int owner(int unit) { return ((unit + 1) * PROGRAMS - 1) / CUT; }
};
typedef Product<HIDDEN, WIDTH, false, 4> O;
typedef Product<2 * INNER, HIDDEN, true, O::COUNTS + O::REST> Gate;
typedef Product<HIDDEN, INNER, false, Gate::COUNTS + Gate::REST> Down;
typedef Product<QKV, HIDDEN, false, Down::COUNTS + Down::REST> Qkv;
constexpr int ALL_COUNTS = Qkv::COUNTS + Qkv::REST;

struct Ring {
  u32 tiles, full, empty;
  int stage = 0, round = 0;

  __device__ __forceinline__ u32 at() const { return tiles + stage * STAGE_BYTES; }
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, round++;
  }
  __device__ __forceinline__ u32 fill(u32 bytes) const {
    barrier_wait(empty + 8 * stage, round & 1 ^ 1);
    barrier_expect(full + 8 * stage, bytes);
    return full + 8 * stage;
  }
};

// Calls with each unit of this program: cut ones, then whole blocks'.
template <class P, class F> __device__ __forceinline__ void each_unit(const F& f) {
  const int end = P::begin(blockIdx.x + 1);
#pragma unroll 1
  for (int u = P::begin(blockIdx.x); u < end; u++) f(P::WHOLE * PROGRAMS * P::STEPS + u, u % (P::STEPS ? P::STEPS : 1));
#pragma unroll 1
  for (int w = 0; w < P::WHOLE; w++)
#pragma unroll 1
    for (int k = 0; k < P::STEPS; k++) f((w * PROGRAMS + blockIdx.x) * P::STEPS + k, k);
}
template <class P> __device__ __forceinline__ void load_weights(const unsigned char* weight, Ring& ring, u64 policy) {
  each_unit<P>([&](int unit, int) {
    if (AHEAD < STAGES && (ring.round || ring.stage >= AHEAD)) {
      const int before = ring.stage - AHEAD, its = before < 0 ? before + STAGES : before;
      barrier_wait(ring.full + 8 * its, (before < 0 ? ring.round - 1 : ring.round) & 1);
    }
    const u32 bar = ring.fill(UNIT_BYTES);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
        "r"(ring.at() + X_BYTES), "l"(weight + (u64)unit * UNIT_BYTES), "r"(UNIT_BYTES), "r"(bar), "l"(policy)
        : "memory");
    ring.next();
  });
}
template <class P> __device__ __forceinline__ void load_inputs(const TensorMap& input, Ring& ring) {
  each_unit<P>([&](int, int k) {
    const u32 bar = ring.fill(X_BYTES);
    load_tile(ring.at(), &input, k * 64, 0, bar, 1, 0);
    ring.next();
  });
}

// Half of a tile's weights of this thread, 16 pairs: times a power of two, see packed_weights.py.
__device__ __forceinline__ void decode(u32 (&a)[16], u32 from) {
  const uint4 first = read16(from), second = read16(from + 2048), third = read16(from + 4096);
  const u32 w0[4] = {first.x, first.y, first.z, first.w}, w1[4] = {second.x, second.y, second.z, second.w};
  const u32 w2[4] = {third.x, third.y, third.z, third.w};
  constexpr u32 PLACES = 0x87FF87FF, BASE = 0x38003800;  // 0x70, seven bits on
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a[4 * i] = w0[i] & PLACES | BASE, a[4 * i + 1] = w1[i] & PLACES | BASE, a[4 * i + 2] = w2[i] & PLACES | BASE;
    u32 fourth = w0[i] >> 4 & 0x07800780 | BASE;
    fourth |= w1[i] >> 8 & 0x00780078;
    fourth |= w2[i] >> 11 & 0x00070007;
    a[4 * i + 3] = fourth | w2[i] << 1 & 0x80008000;
  }
}
__device__ __forceinline__ u32 read4_of(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
// Those of the tile's weights that are kept beside: this warp's from begin to end.
__device__ __forceinline__ void put_exceptions(u32 (&a)[16], u32 tail, int begin, int end, int tile) {
#pragma unroll 1
  for (int e = begin; e < end; e++) {
    const u32 entry = read4_of(tail + 8 + 4 * e);
    if ((entry >> 9 & 1) != tile) continue;
    const int its = (entry & 31) == threadIdx.x % 32 ? (int)(entry >> 5 & 15) : -1;
    const u32 selector = entry >> 10 & 1 ? 0x7610 : 0x3276;
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (its == i) a[i] = __byte_perm(a[i], entry, selector);
  }
}

// A block's sums, or those of a part of k.
__device__ __forceinline__ void multiply_units(float (&sums)[2][ROWS / 2], Ring& ring, int units) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = threadIdx.x / 32;
  u32 a[2][16], before = 0;
#pragma unroll 1
  for (int u = 0; u < units; u++, ring.next()) {
    barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
    const u32 weights = ring.at() + X_BYTES, tail = weights + TAIL;
    const u64 ends = (u64)read4_of(tail + 4) << 32 | read4_of(tail);
    const int end = ends >> 8 * warp & 255, begin = warp ? ends >> 8 * (warp - 1) & 255 : 0;
    const u64 x = matrix(ring.at());
#pragma unroll
    for (int t = 0; t < 2; t++) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (t == 1) {
        if (u && thread % 32 == 0) here_arrive(before);
        before = ring.empty + 8 * ring.stage;
      }
      decode(a[t], weights + (group * 2 + t) * TILE_BYTES + thread * 16);
      if (begin < end) put_exceptions(a[t], tail, begin, end, t);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++)
        multiply_by(sums[t], a[t] + 4 * k, x + 2 * k, k || u);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (thread % 32 == 0) here_arrive(before);
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[t][i])::"memory");
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void tell(u32* count) {
  meet();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
__device__ __forceinline__ u32 counted(const u32* count) {
  u32 there;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
  return there;
}
// All programs run at once, so that the others get there. Not for warps that multiply: a trap of two kinds of warps is
// one in machine code, and who may come there gets no more registers than the fewer of them have.
__device__ __forceinline__ void wait_for(const u32* count, u32 goal) {
  u32 looks = 0;
  while (counted(count) < goal)
    if (++looks == PATIENCE) asm volatile("trap;");
}

struct Step {  // what a launch is told
  u16 *x, *hidden, *projection;
  float *squares, *parts;
  u32* counts;
  int rows;
};


__device__ __forceinline__ u16 rounded(float y) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(y));
  return bits;
}
__device__ __forceinline__ float element(u16 bits) { return __uint_as_float((u32)bits << 16); }

// What stands behind a block's sums: of 16 lines of a tile, or the same of gate and of up, by eight rows; a warp's. kind:
// which warp had them, and of which of its tiles they are.
template <class P> struct Piece {
  static constexpr int TILES = P::GATED ? 2 : 1, KINDS = 16 / TILES;
  static constexpr bool ADDS = !P::GATED && P::COUNTS != Qkv::COUNTS;
  int line, row, warp;
  float sums[TILES][4];
  u16 before[4];  // the residual stream's

  __device__ __forceinline__ void place(int block, int part, int kind) {
    const int lane = threadIdx.x % 32, tile = P::GATED ? 0 : kind % 2;
    warp = P::GATED ? kind : kind / 2;
    line = (P::GATED ? block * 128 + warp / 4 * 64 : block * LINES + (warp / 4 * 2 + tile) * 64) + warp % 4 * 16 + lane / 4;
    row = part * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ u64 at(int e, int width) const { return (u64)(row + e % 2) * width + line + e / 2 * 8; }
  __device__ __forceinline__ void read_stream(const Step& step) {
    if constexpr (ADDS)
#pragma unroll
      for (int e = 0; e < 4; e++) before[e] = row + e % 2 < step.rows ? __ldcg(step.x + at(e, HIDDEN)) : 0;
  }
  __device__ __forceinline__ void write(const Step& step, const float* factors, float scale, int block, int kind) {
    float squares[2] = {};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int r = row + e % 2;
      const bool live = r < step.rows;
      if constexpr (P::GATED) {
        const float factor = live ? factors[r] * scale : 0.f, gate = sums[0][e] * factor;
        const float y = __fdividef(gate, 1.f + __expf(-gate)) * (sums[1][e] * factor);
        if (live) step.hidden[at(e, INNER)] = rounded(y);
      } else if constexpr (ADDS) {
        const u16 sum = rounded(element(before[e]) + sums[0][e] * scale);
        if (live) step.x[at(e, HIDDEN)] = sum;
        squares[e % 2] += element(sum) * element(sum);
      } else if (live) {
        step.projection[at(e, QKV)] = rounded(sums[0][e] * (factors[r] * scale));
      }
    }
    if constexpr (ADDS)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int other = 4; other < 32; other *= 2) squares[e] += __shfl_xor_sync(~0u, squares[e], other);
        if (threadIdx.x % 32 < 4 && row + e < step.rows)
          step.squares[(row + e) * PARTS + block * 16 + kind] = squares[e];
      }
  }
};

// The sums that all programs with a part of a block have left, of this program's share of it, which is as large as its
// part.
template <class P>
__device__ __forceinline__ void finish_share(const Step& step, const float* factors, float scale, int block) {
  typedef Piece<P> Its;
  constexpr int EACH = (P::CUT + PROGRAMS - 1) / PROGRAMS, AT_ONCE = 8;
  constexpr int ROUNDS = (ROWS / 8 * Its::KINDS * EACH / P::STEPS + 1 + THREADS / 32 - 1) / (THREADS / 32);
  const int start = block * P::STEPS, whole = P::WHOLE * PROGRAMS + block, lane = threadIdx.x % 32;
  const int items = (step.rows + 7) / 8 * Its::KINDS;
  const int first = items * max(P::begin(blockIdx.x) - start, 0) / P::STEPS + threadIdx.x / 32;
  const int end = items * min(P::begin(blockIdx.x + 1) - start, P::STEPS) / P::STEPS;
  Its pieces[ROUNDS];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    const int item = first + i * (THREADS / 32);
    pieces[i].place(whole, item / Its::KINDS, item % Its::KINDS);
    if (item < end) pieces[i].read_stream(step);
  }
  const int from = P::owner(start), to = P::owner(start + P::STEPS - 1), others = to - from + 1;
  if (lane == 0)
    while (counted(step.counts + P::COUNTS + block) < others) {}
  __syncwarp();
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    Its& piece = pieces[i];
    const int item = first + i * (THREADS / 32), part = item / Its::KINDS, kind = item % Its::KINDS;
    if (item >= end) break;
    const int tile = P::GATED ? 0 : kind % 2;
    const float* at = step.parts + ((part * 2 + tile) * THREADS + piece.warp * 32 + lane) * 4;
#pragma unroll
    for (int t = 0; t < Its::TILES; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) piece.sums[t][e] = 0.f;
#pragma unroll 1
    for (int some = from; some <= to; some += AT_ONCE) {
      float4 others[AT_ONCE][Its::TILES];
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
#pragma unroll
        for (int t = 0; t < Its::TILES; t++) {
          const int slot = some + p == from && P::begin(from) < start ? 1 : 0;
          others[p][t] = some + p <= to ? __ldcg((const float4*)(at + (u64)(2 * (some + p) + slot) * PART_WORDS) + t * THREADS)
                                        : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
#pragma unroll
        for (int t = 0; t < Its::TILES; t++) {
          piece.sums[t][0] += others[p][t].x, piece.sums[t][1] += others[p][t].y;
          piece.sums[t][2] += others[p][t].z, piece.sums[t][3] += others[p][t].w;
        }
    }
    piece.write(step, factors, scale, whole, kind);
  }
}

template <class P>
__device__ __forceinline__ void run_product(const Step& step, Ring& ring, const float* factors, int factors_bar,
                                            float scale) {
  float sums[2][ROWS / 2];
  const int begin = P::begin(blockIdx.x), end = P::begin(blockIdx.x + 1);
  const int first = P::STEPS ? begin / P::STEPS : 0, last = (end - 1) / P::STEPS;
  if constexpr (P::REST > 0) {
#pragma unroll 1
    for (int block = first; block <= last; block++) {
      const int units = min(end, (block + 1) * P::STEPS) - max(begin, block * P::STEPS);
      multiply_units(sums, ring, units);
      float* to = step.parts + (u64)(2 * blockIdx.x + block - first) * PART_WORDS + threadIdx.x * 4;
#pragma unroll
      for (int part = 0; part < ROWS / 8; part++)
        if (part * 8 < step.rows)
#pragma unroll
          for (int t = 0; t < 2; t++)
            *(float4*)(to + (part * 2 + t) * THREADS * 4) = make_float4(
                sums[t][4 * part], sums[t][4 * part + 1], sums[t][4 * part + 2], sums[t][4 * part + 3]);
      tell(step.counts + P::COUNTS + block);
    }
  }
#pragma unroll 1
  for (int w = 0; w < P::WHOLE; w++) {
    multiply_units(sums, ring, P::STEPS);
    if (factors_bar && w == 0) asm volatile("bar.sync %0, %1;" ::"r"(factors_bar), "n"(THREADS + FACTOR_THREADS) : "memory");
#pragma unroll
    for (int part = 0; part < ROWS / 8; part++)
      if (part * 8 < step.rows) {
        const int block = w * PROGRAMS + blockIdx.x, warp = threadIdx.x / 32;
#pragma unroll
        for (int t = 0; t < (P::GATED ? 1 : 2); t++) {
          Piece<P> piece;
          const int kind = P::GATED ? warp : warp * 2 + t;
          piece.place(block, part, kind);
          piece.read_stream(step);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            piece.sums[0][e] = sums[t][4 * part + e];
            if (P::GATED) piece.sums[Piece<P>::TILES - 1][e] = sums[1][4 * part + e];
          }
          piece.write(step, factors, scale, block, kind);
        }
      }
  }
  if constexpr (P::REST > 0) {
    if (factors_bar && P::WHOLE == 0)
      asm volatile("bar.sync %0, %1;" ::"r"(factors_bar), "n"(THREADS + FACTOR_THREADS) : "memory");
#pragma unroll 1
    for (int block = first; block <= last; block++) finish_share<P>(step, factors, scale, block);
  }
}

// 1 / rms of each row, eight lanes a row.
__device__ __forceinline__ void find_factors(const Step& step, float* factors, const u32* count, float eps, int bar) {
  const int thread = threadIdx.x % FACTOR_THREADS, lane = thread % 8;
  wait_for(count, PROGRAMS);
#pragma unroll 1
  for (int row = thread / 8; row < ROWS; row += FACTOR_THREADS / 8) {
    float sum = 0.f;
    if (row < step.rows)
#pragma unroll
      for (int i = 0; i < PARTS / 4; i += 8)
        if (i + lane < PARTS / 4) {
          const float4 four = __ldcg((const float4*)(step.squares + row * PARTS) + i + lane);
          sum += (four.x + four.y) + (four.z + four.w);
        }
#pragma unroll
    for (int other = 1; other < 8; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (lane == 0) factors[row] = rsqrtf(sum * (1.f / HIDDEN) + eps);
  }
  asm volatile("bar.arrive %0, %1;" ::"r"(bar), "n"(THREADS + FACTOR_THREADS) : "memory");
}

// parts: of sums. counts: programs done with each of the first three products, those at the end, then of each block that
// is cut the parts that are there; zeros between launches.
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
packed_chain(const __grid_constant__ TensorMap heads, const __grid_constant__ TensorMap x_in,
             const __grid_constant__ TensorMap hidden_in, const unsigned char* o, const unsigned char* gate_up,
             const unsigned char* down, const unsigned char* qkv, u16* x, u16* hidden, u16* projection, float* squares,
             float* parts, u32* counts, int rows, float o_scale, float gate_scale, float down_scale, float qkv_scale,
             float eps, float eps_behind) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring;
  ring.tiles = (shared_address(memory) + 1023) & ~1023u;
  ring.full = shared_address(barriers), ring.empty = ring.full + 8 * STAGES;
  float* const factors = (float*)(memory + STAGES * STAGE_BYTES + 1024);  // of two products
  const Step step{x, hidden, projection, squares, parts, counts, rows};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(ring.full + 8 * s, 2), barrier_init(ring.empty + 8 * s, THREADS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp >= THREADS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == THREADS / 32) {
      if (lane == 0) {
        const u64 policy = read_once();
        load_weights<O>(o, ring, policy);
        load_weights<Gate>(gate_up, ring, policy);
        load_weights<Down>(down, ring, policy);
        load_weights<Qkv>(qkv, ring, policy);
      }
    } else if (warp == THREADS / 32 + 1) {
      if (lane == 0) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        load_inputs<O>(heads, ring);
        wait_for(counts, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Gate>(x_in, ring);
        wait_for(counts + 1, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Down>(hidden_in, ring);
        asm volatile("griddepcontrol.launch_dependents;");
        wait_for(counts + 2, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Qkv>(x_in, ring);
      }
    } else {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      find_factors(step, factors, counts, eps, 2);
      find_factors(step, factors + ROWS, counts + 2, eps_behind, 3);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  run_product<O>(step, ring, nullptr, 0, o_scale);
  tell(counts);
  run_product<Gate>(step, ring, factors, 2, gate_scale);
  tell(counts + 1);
  run_product<Down>(step, ring, nullptr, 0, down_scale);
  tell(counts + 2);
  run_product<Qkv>(step, ring, factors + ROWS, 3, qkv_scale);
  meet();
  if (threadIdx.x == 0) {
    u32 ended;
    asm volatile("atom.global.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(ended) : "l"(counts + 3), "r"(PROGRAMS - 1) : "memory");
    if (ended == PROGRAMS - 1)
      for (int i = 0; i < ALL_COUNTS; i++)
        if (i != 3) counts[i] = 0;
  }
}
