// Four products of a decoder's layers, one behind another in one kernel, whose weights come packed; see
// packed_weights.py and packed_chain.py.
//   x += heads @ o;  hidden = silu(gate) * up of norm(x);  x += hidden @ down;  projection = norm(x) @ qkv of the next
//
// Compiled for one shape and ROWS columns, behind hopper.cuh and multiply_by. One program a multiprocessor, in clusters
// of two that go through the same k of two blocks of 128 lines beside each other, and each ask for half of their input.
// Weights are the tensor cores' M, and come from registers, where two warpgroups decode them: each has 64 lines of a
// unit, 128 of k. What is left when each cluster has as many whole blocks as any other is cut along k, so that each gets
// as many units, but for one; programs that have parts of a block leave their sums in memory, and each finishes a share
// of it, if it has several whole blocks before the last, while weights come. A warp asks for weights, two units at a
// time, and between products for as many as there is room for; another for inputs, and waits between products until all
// programs are done with the one before; two find the rows' factors meanwhile.

constexpr int THREADS = 256, LINES = 128, TILE_BYTES = 6144, TAIL = 4 * TILE_BYTES;
constexpr int CLUSTERS = PROGRAMS / 2, SHARING = ROWS >= 32 ? 2 : 1;  // programs that take the same input in
constexpr int TILE_OF_X = ROWS * LINE;
constexpr int FACTOR_THREADS = 64, PARTS = HIDDEN / 16;  // that a row's squares come in
constexpr int PART_FOURS = LINES * ROWS / 4;             // of a block's sums
static_assert(UNIT_BYTES == TAIL + 256, "packed_weights.py");
static_assert(PROGRAMS % 2 == 0 && ROWS % (8 * SHARING) == 0, "packed_chain.py");

// Pairs of blocks: WHOLE a cluster, REST that are cut, of STEPS units each.
template <int N_, int K_, bool GATED_, bool ADDS_> struct Product {
  static constexpr int PAIRS = N_ / LINES / 2, STEPS = K_ / 128, WHOLE = PAIRS / CLUSTERS, REST = PAIRS % CLUSTERS;
  static constexpr int CUT = REST * STEPS;  // units that are cut
  static constexpr bool GATED = GATED_, ADDS = ADDS_;
  static_assert(CUT == 0 || CUT >= CLUSTERS, "packed_chain.py");
  static __device__ __forceinline__ int begin(int cluster) { return cluster * CUT / CLUSTERS; }
  static __device__ __forceinline__ int owner(int unit) { return ((unit + 1) * CLUSTERS - 1) / CUT; }
  // Of a cluster's units, cut ones, then whole blocks'.
  static __device__ __forceinline__ int units(int cluster) {
    return begin(cluster + 1) - begin(cluster) + WHOLE * STEPS;
  }
  static __device__ __forceinline__ void unit(int cluster, int i, int& pair, int& k) {
    const int cut = begin(cluster + 1) - begin(cluster);
    const int at = i < cut ? WHOLE * CLUSTERS * STEPS + begin(cluster) + i : i - cut;
    pair = at / STEPS, k = at % STEPS;
    if (i >= cut) pair = pair * CLUSTERS + cluster;
  }
};
typedef Product<HIDDEN, WIDTH, false, true> O;
typedef Product<2 * INNER, HIDDEN, true, false> Gate;
typedef Product<HIDDEN, INNER, false, true> Down;
typedef Product<QKV, HIDDEN, false, false> Qkv;

__device__ __forceinline__ int cluster_of() { return blockIdx.x / 2; }
__device__ __forceinline__ int member() { return blockIdx.x % 2; }

// Stages that one warp fills and those that multiply let go.
template <int OF, int BYTES> struct Ring {
  u32 tiles, full, empty;
  int stage = 0, round = 0;

  __device__ __forceinline__ u32 at() const { return tiles + stage * BYTES; }
  __device__ __forceinline__ u32 bar() const { return full + 8 * stage; }
  __device__ __forceinline__ void next() {
    if (++stage == OF) stage = 0, round++;
  }
  // Once there is room: tells the stage's barrier how much comes.
  __device__ __forceinline__ u32 fill(u32 bytes) const {
    barrier_wait(empty + 8 * stage, round & 1 ^ 1);
    barrier_expect(bar(), bytes);
    return bar();
  }
  __device__ __forceinline__ void wait() const { barrier_wait(bar(), round & 1); }
};
typedef Ring<STAGES, UNIT_BYTES> Weights;  // of a unit each
typedef Ring<INPUTS, TILE_OF_X> Inputs;    // of 64 of k each

template <class P>
__device__ __forceinline__ void load_weights(const unsigned char* weight, Weights& ring, u64 policy) {
  const int units = P::units(cluster_of());
  const auto place = [&](int i) {
    int pair, k;
    P::unit(cluster_of(), i, pair, k);
    return weight + (u64)((2 * pair + member()) * P::STEPS + k) * UNIT_BYTES;
  };
#pragma unroll 1
  for (int i = 0; i < units; i++, ring.next()) {
    if (AHEAD < STAGES && (ring.round || ring.stage >= AHEAD)) {
      const int before = ring.stage - AHEAD, its = before < 0 ? before + STAGES : before;
      barrier_wait(ring.full + 8 * its, (before < 0 ? ring.round - 1 : ring.round) & 1);
    }
    const u32 bar = ring.fill(UNIT_BYTES);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
        "r"(ring.at()), "l"(place(i)), "r"(UNIT_BYTES), "r"(bar), "l"(policy)
        : "memory");
  }
}
template <class P> __device__ __forceinline__ void load_inputs(const TensorMap& input, Inputs& ring) {
  constexpr int ITS_ROWS = ROWS / SHARING;
  const int units = P::units(cluster_of()), first = SHARING == 1 ? 0 : member() * ITS_ROWS;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    int pair, k;
    P::unit(cluster_of(), i, pair, k);
#pragma unroll
    for (int t = 0; t < 2; t++, ring.next()) {
      const u32 bar = ring.fill(TILE_OF_X);
      load_tile(ring.at() + first * LINE, &input, k * 128 + t * 64, first, bar, SHARING, 3);
    }
  }
}

// This thread's weights of a tile, 16 pairs, each times its line's power of two, see packed_weights.py.
__device__ __forceinline__ void decode(u32 (&a)[16], u32 from) {
  const uint4 first = read16(from), second = read16(from + 2048), third = read16(from + 4096);
  const u32 w0[4] = {first.x, first.y, first.z, first.w}, w1[4] = {second.x, second.y, second.z, second.w};
  const u32 w2[4] = {third.x, third.y, third.z, third.w};
  constexpr u32 PLACES = 0x87FF87FF, BASE = FIRST_EXPONENT << 7 | FIRST_EXPONENT << 23;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a[4 * i] = w0[i] & PLACES | BASE, a[4 * i + 1] = w1[i] & PLACES | BASE, a[4 * i + 2] = w2[i] & PLACES | BASE;
    u32 fourth = w0[i] >> 4 & 0x07800780 | BASE;
    fourth |= w1[i] >> 8 & 0x00780078;
    fourth |= w2[i] >> 11 & 0x00070007;
    a[4 * i + 3] = fourth | w2[i] << 1 & 0x80008000;
  }
}
__device__ __forceinline__ u32 read_word(u32 from) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
// Those of the tile's weights that are kept beside: this warp's from begin to end.
__device__ __forceinline__ void put_exceptions(u32 (&a)[16], u32 tail, int begin, int end, int tile) {
#pragma unroll 1
  for (int e = begin; e < end; e++) {
    const u32 entry = read_word(tail + 8 + 4 * e);
    if ((entry >> 9 & 1) != tile) continue;
    const int its = (entry & 31) == threadIdx.x % 32 ? (int)(entry >> 5 & 15) : -1;
    const u32 selector = entry >> 10 & 1 ? 0x7610 : 0x3276;
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (its == i) a[i] = __byte_perm(a[i], entry, selector);
  }
}

// This warp is done with a stage of inputs, which both programs fill.
__device__ __forceinline__ void leave(u32 bar) {
  const int lane = threadIdx.x % 32;
  if (SHARING == 1) {
    if (lane == 0) here_arrive(bar);
  } else if (lane < 2) {
    barrier_arrive(bar, lane);
  }
}
// A block's sums, or those of a part of k.
__device__ __forceinline__ void multiply_units(float (&sums)[ROWS / 2], Weights& ring, Inputs& inputs, int units) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = threadIdx.x / 32;
  u32 a[2][16], before[2] = {};  // of the last two tiles: inputs that are multiplied
#pragma unroll 1
  for (int u = 0; u < units; u++, ring.next()) {
    const u32 weights = ring.at(), tail = weights + TAIL;
    int begin, end;  // of this warp's exceptions
#pragma unroll
    for (int t = 0; t < 2; t++, inputs.next()) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (u) leave(before[t]);
      before[t] = inputs.empty + 8 * inputs.stage;
      if (t == 0) {
        ring.wait();
        const u64 ends = (u64)read_word(tail + 4) << 32 | read_word(tail);
        end = ends >> 8 * warp & 255, begin = warp ? ends >> 8 * (warp - 1) & 255 : 0;
      }
      decode(a[t], weights + (group * 2 + t) * TILE_BYTES + thread * 16);
      if (begin < end) put_exceptions(a[t], tail, begin, end, t);
      inputs.wait();
      const u64 x = matrix(inputs.at());
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_by(sums, a[t] + 4 * k, x + 2 * k, k || t || u);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    __syncwarp();  // what was read of the weights is in registers, or wgmma would not have begun
    if (threadIdx.x % 32 == 0) here_arrive(ring.empty + 8 * ring.stage);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  leave(before[0]), leave(before[1]);
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void tell(u32* count) {
  meet();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
// All programs run at once, so that the others get there. Warps that multiply have no such trap: two kinds of warps share
// it in machine code, and who may come there gets no more registers than the fewer of them have.
__device__ __forceinline__ void wait_for(const u32* count, u32 goal) {
  u32 there, looks = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
    if (++looks == PATIENCE) asm volatile("trap;");
  } while (there < goal);
}

struct Step {  // what a launch is told
  u16 *x, *hidden, *projection;
  float* squares;
  float4* parts;
  u32* counts;
  int rows;
};

__device__ __forceinline__ u16 rounded(float y) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(y));
  return bits;
}
__device__ __forceinline__ float element(u16 bits) { return __uint_as_float((u32)bits << 16); }

// The scales of this thread's two lines of a warp's; asked for here, not where they are needed.
__device__ __forceinline__ float2 read_scales(const float* scales, int block, int warp) {
  const float* at = scales + block * LINES + warp * 16 + threadIdx.x % 32 / 4;
  float2 its = make_float2(__ldg(at), __ldg(at + 8));
  asm volatile("" : "+f"(its.x), "+f"(its.y)::"memory");
  return its;
}
// What stands behind a block's sums: of a warp's 16 lines, or of eight of gate and of up, by eight rows.
template <class P> struct Piece {
  int block, part, warp;
  float2 scales;  // of the first half's lines, and of the other's
  float sums[4];

  __device__ __forceinline__ int row(int e) const { return part * 8 + threadIdx.x % 4 * 2 + e % 2; }
  __device__ __forceinline__ float scale(int e) const { return e < 2 ? scales.x : scales.y; }
  __device__ __forceinline__ u64 at(int e, int width) const {
    const int line = P::GATED ? block * 64 + warp * 8 : block * LINES + warp * 16 + e / 2 * 8;
    return (u64)row(e) * width + line + threadIdx.x % 32 / 4;
  }
  // What x has where this adds to it.
  __device__ __forceinline__ void read_stream(const Step& step, u16 (&stream)[4]) const {
    if constexpr (P::ADDS)
#pragma unroll
      for (int e = 0; e < 4; e++) stream[e] = row(e) < step.rows ? __ldcg(step.x + at(e, HIDDEN)) : 0;
  }
  __device__ __forceinline__ void write(const Step& step, const u16 (&stream)[4], const float* factors) const {
    float squares[2] = {};
#pragma unroll
    for (int e = 0; e < (P::GATED ? 2 : 4); e++) {
      const bool live = row(e) < step.rows;
      if constexpr (P::GATED) {
        const float factor = live ? factors[row(e)] : 0.f, gate = sums[e] * (scales.x * factor);
        const float y = __fdividef(gate, 1.f + __expf(-gate)) * (sums[2 + e] * (scales.y * factor));
        if (live) step.hidden[at(e, INNER)] = rounded(y);
      } else if constexpr (P::ADDS) {
        const u16 sum = rounded(element(stream[e]) + sums[e] * scale(e));
        if (live) step.x[at(e, HIDDEN)] = sum;
        squares[e % 2] += element(sum) * element(sum);
      } else if (live) {
        step.projection[at(e, QKV)] = rounded(sums[e] * (factors[row(e)] * scale(e)));
      }
    }
    if constexpr (P::ADDS)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int other = 4; other < 32; other *= 2) squares[e] += __shfl_xor_sync(~0u, squares[e], other);
        if (threadIdx.x % 32 < 4 && row(e) < step.rows)
          step.squares[row(e) * PARTS + block * 8 + warp] = squares[e];
      }
  }
};

// The sums that all programs with a part of a block have left, of this program's share of it, which is as large as its
// part.
template <class P>
__device__ __forceinline__ void finish_share(const Step& step, const float* scales, const float* factors, int pair) {
  typedef Piece<P> Its;
  constexpr int MOST_UNITS = (P::CUT + CLUSTERS - 1) / CLUSTERS, WARPS = THREADS / 32, AT_ONCE = 8;
  constexpr int ROUNDS = (ROWS * MOST_UNITS / P::STEPS + 1 + WARPS - 1) / WARPS;
  const int start = pair * P::STEPS, block = 2 * (P::WHOLE * CLUSTERS + pair) + member(), lane = threadIdx.x % 32;
  const int items = (step.rows + 7) / 8 * WARPS, cluster = cluster_of();
  const int first = items * max(P::begin(cluster) - start, 0) / P::STEPS + threadIdx.x / 32;
  const int end = items * min(P::begin(cluster + 1) - start, P::STEPS) / P::STEPS;
  Its pieces[ROUNDS];
  u16 stream[ROUNDS][4];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++)
    if (const int item = first + i * WARPS; item < end) {
      pieces[i] = Its{block, item / WARPS, item % WARPS, read_scales(scales, block, item % WARPS), {}};
      pieces[i].read_stream(step, stream[i]);
    }
  const int from = P::owner(start), to = P::owner(start + P::STEPS - 1);
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    if (first + i * WARPS >= end) break;
    Its& piece = pieces[i];
    float4* at = step.parts + piece.part * THREADS + piece.warp * 32 + lane;
#pragma unroll 1
    for (int some = from; some <= to; some += AT_ONCE) {
      const auto place = [&](int c) {
        const int other = some + c, slot = 2 * (2 * other + (other == from && P::begin(from) < start)) + member();
        return at + (u64)slot * PART_FOURS;
      };
      float4 parts[AT_ONCE];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
          parts[c] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (some + c <= to) look_at_four(place(c), parts[c].x, parts[c].y, parts[c].z, parts[c].w);
        }
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++)
          there &= is_there(parts[c].x) && is_there(parts[c].y) && is_there(parts[c].z) && is_there(parts[c].w);
      } while (!there);
#pragma unroll
      for (int c = 0; c < AT_ONCE; c++) {
        if (some + c <= to) take_away_four(place(c));
        piece.sums[0] += parts[c].x, piece.sums[1] += parts[c].y;
        piece.sums[2] += parts[c].z, piece.sums[3] += parts[c].w;
      }
    }
    piece.write(step, stream[i], factors);
  }
}

__device__ __forceinline__ void wait_for_factors(int bar) {
  asm volatile("bar.sync %0, %1;" ::"r"(bar), "n"(THREADS + FACTOR_THREADS) : "memory");
}
// factors_bar: where the rows' factors are told, if any.
template <class P>
__device__ __forceinline__ void run_product(const Step& step, Weights& ring, Inputs& inputs, const float* scales,
                                            const float* factors, int factors_bar) {
  float sums[ROWS / 2];
  const int begin = P::begin(cluster_of()), end = P::begin(cluster_of() + 1);
  const int first = begin / P::STEPS, last = (end - 1) / P::STEPS;  // pairs of which this has a part
  if constexpr (P::REST > 0) {
#pragma unroll 1
    for (int pair = first; pair <= last; pair++) {
      multiply_units(sums, ring, inputs, min(end, (pair + 1) * P::STEPS) - max(begin, pair * P::STEPS));
      float4* to = step.parts + (u64)(2 * (2 * cluster_of() + pair - first) + member()) * PART_FOURS + threadIdx.x;
#pragma unroll
      for (int part = 0; part < ROWS / 8; part++)
        if (part * 8 < step.rows)
          leave_four(to + part * THREADS, sums[4 * part], sums[4 * part + 1], sums[4 * part + 2], sums[4 * part + 3]);
    }
  }
  const auto finish = [&] {
    if constexpr (P::REST > 0)
#pragma unroll 1
      for (int pair = first; pair <= last; pair++) finish_share<P>(step, scales, factors, pair);
  };
#pragma unroll 1
  for (int w = 0; w < P::WHOLE; w++) {
    if (w && w == P::WHOLE - 1) finish();  // all have left theirs long since
    const int block = 2 * (w * CLUSTERS + cluster_of()) + member(), its_warp = threadIdx.x / 32;
    const float2 of_lines = read_scales(scales, block, its_warp);
    multiply_units(sums, ring, inputs, P::STEPS);
    if (factors_bar && w == 0) wait_for_factors(factors_bar);
#pragma unroll
    for (int part = 0; part < ROWS / 8; part++)
      if (part * 8 < step.rows) {
        const Piece<P> piece{block, part, its_warp, of_lines,
                             {sums[4 * part], sums[4 * part + 1], sums[4 * part + 2], sums[4 * part + 3]}};
        u16 stream[4];
        piece.read_stream(step, stream);
        piece.write(step, stream, factors);
      }
  }
  if (factors_bar && P::WHOLE == 0) wait_for_factors(factors_bar);
  if (P::WHOLE < 2) finish();
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

// o_scales and so on: of the lines, in the order of the units. parts: of sums, ABSENT between launches. counts: programs
// done with each of the first three products, and at the end; zeros between launches.
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
packed_chain(const __grid_constant__ TensorMap heads, const __grid_constant__ TensorMap x_in,
             const __grid_constant__ TensorMap hidden_in, const unsigned char* o, const unsigned char* gate_up,
             const unsigned char* down, const unsigned char* qkv, const float* o_scales, const float* gate_up_scales,
             const float* down_scales, const float* qkv_scales, u16* x, u16* hidden, u16* projection, float* squares,
             float4* parts, u32* counts, int rows, float eps, float eps_behind) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * (STAGES + INPUTS)];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Weights ring;
  Inputs inputs;
  inputs.tiles = (shared_address(memory) + 1023) & ~1023u, ring.tiles = inputs.tiles + INPUTS * TILE_OF_X;
  ring.full = shared_address(barriers), ring.empty = ring.full + 8 * STAGES;
  inputs.full = ring.empty + 8 * STAGES, inputs.empty = inputs.full + 8 * INPUTS;
  float* const factors = (float*)(memory + INPUTS * TILE_OF_X + STAGES * UNIT_BYTES + 1024);  // of two products
  const Step step{x, hidden, projection, squares, parts, counts, rows};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, THREADS / 32);
    for (int s = 0; s < INPUTS; s++)
      barrier_init(inputs.full + 8 * s, 1), barrier_init(inputs.empty + 8 * s, SHARING * THREADS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (SHARING > 1) cluster_meet();
  if (warp >= THREADS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
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
        load_inputs<O>(heads, inputs);
        wait_for(counts, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Gate>(x_in, inputs);
        wait_for(counts + 1, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Down>(hidden_in, inputs);
        asm volatile("griddepcontrol.launch_dependents;");
        wait_for(counts + 2, PROGRAMS);
        asm volatile("fence.proxy.async.global;" ::: "memory");
        load_inputs<Qkv>(x_in, inputs);
      }
    } else {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      find_factors(step, factors, counts, eps, 2);
      find_factors(step, factors + ROWS, counts + 2, eps_behind, 3);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  run_product<O>(step, ring, inputs, o_scales, nullptr, 0);
  tell(counts);
  run_product<Gate>(step, ring, inputs, gate_up_scales, factors, 2);
  tell(counts + 1);
  run_product<Down>(step, ring, inputs, down_scales, nullptr, 0);
  tell(counts + 2);
  run_product<Qkv>(step, ring, inputs, qkv_scales, factors + ROWS, 3);
  meet();
  if (SHARING > 1) cluster_meet();  // nobody sends to, or signals, a program that is gone
  if (threadIdx.x == 0) {
    u32 ended;
    asm volatile("atom.global.inc.u32 %0, [%1], %2;" : "=r"(ended) : "l"(counts + 3), "r"(PROGRAMS - 1) : "memory");
    if (ended == PROGRAMS - 1) counts[0] = counts[1] = counts[2] = 0;
  }
}
