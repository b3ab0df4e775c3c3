// Shared by the kernels that read packed weights; see packed_weights.py, packed_chain.py and packed_linear.py.
//
// Compiled for ROWS columns, after packed_piece.cuh and multiply_by. One program (thread block) per SM, in clusters of
// two that process the same k of two adjacent blocks of 128 lines (weight rows), and each load half of their input.
// Weights are wgmma's M and come from registers, where two warpgroups decode them: each has 64 lines of a unit (128
// lines by 128 of k), each warp two pieces. Each cluster gets equally many whole blocks; the rest is split along k into
// equal numbers of units, give or take one. Programs with a part of a block write their sums to memory, and each
// reduces a share of the block: before its last whole block, if it has several, while weights arrive. One warp loads
// weights, two units at a time, or as many as there is room for while inputs are not there yet; another loads inputs.

constexpr int THREADS = 256, LINES = 128;
constexpr int CLUSTERS = PROGRAMS / 2, SHARING = ROWS >= 32 ? 2 : 1;  // programs that share inputs
constexpr int TILE_OF_X = ROWS * LINE;
constexpr int FACTOR_THREADS = 64;            // that compute the rows' factors
constexpr int PART_FOURS = LINES * ROWS / 4;  // of a block's sums
static_assert(PROGRAMS % 2 == 0 && ROWS % (8 * SHARING) == 0, "packed_config.py");

enum Kind { ADDS, GATED, NORMED, PLAIN };  // out += product; SiLU(gate) * up of normed rows; of normed rows; of rows
// Pairs of blocks: WHOLE per cluster, and REST that are split, of STEPS units each. If the number of blocks is odd, the
// last one is computed twice and written once.
template <int ALL_LINES, int ALL_K, Kind KIND> struct Product {
  static constexpr int BLOCKS = ALL_LINES / LINES, PAIRS = (BLOCKS + 1) / 2, STEPS = ALL_K / 128;
  static constexpr int WHOLE = PAIRS / CLUSTERS, REST = PAIRS % CLUSTERS;
  static constexpr int CUT = REST * STEPS;  // units of split pairs
  static constexpr int OUTPUTS = KIND == Kind::GATED ? ALL_LINES / 2 : ALL_LINES;
  static constexpr bool ADDS = KIND == Kind::ADDS, GATED = KIND == Kind::GATED, NORMED = GATED || KIND == Kind::NORMED;
  static_assert(CUT == 0 || CUT >= CLUSTERS, "packed_config.py");
  static __device__ __forceinline__ int begin(int cluster) { return cluster * CUT / CLUSTERS; }
  static __device__ __forceinline__ int owner(int unit) { return ((unit + 1) * CLUSTERS - 1) / CUT; }
  // A cluster's units: those of split pairs, then whole blocks'.
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

__device__ __forceinline__ int cluster_of() { return blockIdx.x / 2; }
__device__ __forceinline__ int member() { return blockIdx.x % 2; }

// A ring buffer: one warp fills its stages, the warps that multiply release them.
template <int OF, int BYTES> struct Ring {
  u32 tiles, full, empty;
  int stage = 0, round = 0;

  __device__ __forceinline__ u32 at() const { return tiles + stage * BYTES; }
  __device__ __forceinline__ u32 bar() const { return full + 8 * stage; }
  __device__ __forceinline__ void next() {
    if (++stage == OF) stage = 0, round++;
  }
  // Waits until the stage is free, then sets how many bytes will arrive in it.
  __device__ __forceinline__ u32 fill(u32 bytes) const {
    barrier_wait(empty + 8 * stage, round & 1 ^ 1);
    barrier_expect(bar(), bytes);
    return bar();
  }
  __device__ __forceinline__ void wait() const { barrier_wait(bar(), round & 1); }
  // Waits until all filled stages are released. A release must not be sent to an exited program: its SM would fault.
  __device__ __forceinline__ void drain() {
#pragma unroll 1
    for (int s = 0; s < OF; s++, next()) barrier_wait(empty + 8 * stage, round & 1 ^ 1);
  }
};
typedef Ring<STAGES, UNIT_BYTES> Weights;  // one unit per stage
typedef Ring<INPUTS, TILE_OF_X> Inputs;    // 64 of k per stage
constexpr int RINGS_BYTES = 1024 + STAGES * UNIT_BYTES + INPUTS * TILE_OF_X;

// Sets up both ring buffers in shared memory, at kernel start; returns the address after them.
__device__ __forceinline__ unsigned char* make_rings(Weights& ring, Inputs& inputs) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * (STAGES + INPUTS)];
  inputs.tiles = (shared_address(memory) + 1023) & ~1023u, ring.tiles = inputs.tiles + INPUTS * TILE_OF_X;
  ring.full = shared_address(barriers), ring.empty = ring.full + 8 * STAGES;
  inputs.full = ring.empty + 8 * STAGES, inputs.empty = inputs.full + 8 * INPUTS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, THREADS / 32);
    for (int s = 0; s < INPUTS; s++)
      barrier_init(inputs.full + 8 * s, 1), barrier_init(inputs.empty + 8 * s, SHARING * THREADS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (SHARING > 1) cluster_meet();
  return memory + RINGS_BYTES;
}

template <class P>
__device__ __forceinline__ void load_weights(const unsigned char* weight, Weights& ring, u64 policy) {
  const int units = P::units(cluster_of());
  const auto place = [&](int i) {
    int pair, k;
    P::unit(cluster_of(), i, pair, k);
    return weight + (u64)(min(2 * pair + member(), P::BLOCKS - 1) * P::STEPS + k) * UNIT_BYTES;
  };
#pragma unroll 1
  for (int i = 0; i < units; i++, ring.next()) {
    if (AHEAD < STAGES && (ring.round || ring.stage >= AHEAD)) {
      const int before = ring.stage - AHEAD, its = before < 0 ? before + STAGES : before;
      barrier_wait(ring.full + 8 * its, (before < 0 ? ring.round - 1 : ring.round) & 1);
    }
    load_bytes(ring.at(), place(i), UNIT_BYTES, ring.fill(UNIT_BYTES), policy);
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

// Reads this thread's part of a unit: for each half of its warp's lines a piece, four words per plane.
__device__ __forceinline__ void read_words(u32 (&words)[2][3][4], u32 from) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int p = 0; p < 3; p++) {
      const uint4 four = read16(from + half * PIECE_BYTES + p * PLANE_BYTES);
      u32(&its)[4] = words[half][p];
      its[0] = four.x, its[1] = four.y, its[2] = four.z, its[3] = four.w;
    }
}
// Decodes its weights of a tile: 16 pairs, from two words per plane, in wgmma's order, where halves of lines alternate.
__device__ __forceinline__ void decode(u32 (&a)[16], const u32 (&words)[2][3][4], int tile, u32 nothing) {
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const auto& of = words[half];
      u32 pairs[4];
      decode_four(pairs, of[0][2 * tile + i], of[1][2 * tile + i], of[2][2 * tile + i], nothing);
#pragma unroll
      for (int r = 0; r < 4; r++) a[8 * i + 2 * r + half] = pairs[r];
    }
}
// Corrects the exponents of the tile's exceptions, in each half's piece.
__device__ __forceinline__ void put_exceptions(u32 (&a)[16], u32 pieces, const u32 (&tails)[2], int tile) {
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (tails[half])
      each_exception(pieces + half * PIECE_BYTES, tails[half], [&](u32 entry) {
        const Exception exception(entry);
#pragma unroll
        for (int i = 0; i < 8; i++) exception.put(a[2 * i + half], 8 * tile + i);
      });
}

// Releases a stage of inputs, which both programs fill, for this warp.
__device__ __forceinline__ void leave(u32 bar) {
  const int lane = threadIdx.x % 32;
  if (SHARING == 1) {
    if (lane == 0) here_arrive(bar);
  } else if (lane < 2) {
    barrier_arrive(bar, lane);
  }
}
// Computes a block's sums, or those of a part of k. nothing: see decode_four.
__device__ __forceinline__ void multiply_units(float (&sums)[ROWS / 2], Weights& ring, Inputs& inputs, int units,
                                               u32 nothing) {
  const u32 from = threadIdx.x / 32 * 2 * PIECE_BYTES, lane = threadIdx.x % 32;
  u32 a[2][16], before[2] = {};  // of the last two tiles: inputs being multiplied
#pragma unroll 1
  for (int u = 0; u < units; u++, ring.next()) {
    const u32 pieces = ring.at() + from;
    u32 words[2][3][4], tails[2];
#pragma unroll
    for (int t = 0; t < 2; t++, inputs.next()) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (u) leave(before[t]);
      before[t] = inputs.empty + 8 * inputs.stage;
      if (t == 0) {
        ring.wait();
        tails[0] = read_tail(pieces), tails[1] = read_tail(pieces + PIECE_BYTES);
        read_words(words, pieces + lane * 16);
      }
      decode(a[t], words, t, nothing);
      if (tails[0] | tails[1]) put_exceptions(a[t], pieces, tails, t);
      inputs.wait();
      const u64 x = matrix(inputs.at());
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++) multiply_by(sums, a[t] + 4 * k, x + 2 * k, k || t || u);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    __syncwarp();  // the weights are in registers by now: wgmma waits for that
    if (lane == 0) here_arrive(ring.empty + 8 * ring.stage);
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  leave(before[0]), leave(before[1]);
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

struct Step {  // arguments of a product
  u16* out;              // (rows, OUTPUTS)
  float* squares;        // (rows, OUTPUTS / 16): sums of squares, if it adds to out; else null
  float4* parts;         // partial sums, ABSENT between launches
  const float* factors;  // of the rows, if they are normed; complete after a barrier
  int factors_bar, rows;
  const u16* bias;       // per line, if rows are normed; or null
};

__device__ __forceinline__ u16 rounded(float y) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(y));
  return bits;
}
__device__ __forceinline__ float element(u16 bits) { return __uint_as_float((u32)bits << 16); }

// The scales of this thread's two lines of a warp's; loaded here, ahead of their use.
template <class P> __device__ __forceinline__ float2 read_scales(const float* scales, int block, int warp) {
  const float* at = scales + min(block, P::BLOCKS - 1) * LINES + warp * 16 + threadIdx.x % 32 / 4;
  float2 its = make_float2(__ldg(at), __ldg(at + 8));
  asm volatile("" : "+f"(its.x), "+f"(its.y)::"memory");
  return its;
}
// Their biases, likewise; zeros if there are none.
template <class P> __device__ __forceinline__ float2 read_biases(const u16* bias, int block, int warp) {
  if (!P::NORMED || P::GATED || !bias) return make_float2(0.f, 0.f);
  const u16* at = bias + min(block, P::BLOCKS - 1) * LINES + warp * 16 + threadIdx.x % 32 / 4;
  float2 its = make_float2(element(__ldg(at)), element(__ldg(at + 8)));
  asm volatile("" : "+f"(its.x), "+f"(its.y)::"memory");
  return its;
}
// Epilogue of a block: of a warp's 16 lines, or of eight of gate and eight of up, by eight rows.
template <class P> struct Item {
  int block, part, warp;
  float2 scales, biases;  // of the lines' first half, and of the second
  float sums[4];

  __device__ __forceinline__ int row(int e) const { return part * 8 + threadIdx.x % 4 * 2 + e % 2; }
  __device__ __forceinline__ bool is_live(const Step& step, int e) const {
    return row(e) < step.rows && block < P::BLOCKS;
  }
  __device__ __forceinline__ float scale(int e) const { return e < 2 ? scales.x : scales.y; }
  __device__ __forceinline__ float bias(int e) const { return e < 2 ? biases.x : biases.y; }
  __device__ __forceinline__ u64 at(int e) const {
    const int line = P::GATED ? block * 64 + warp * 8 : block * LINES + warp * 16 + e / 2 * 8;
    return (u64)row(e) * P::OUTPUTS + line + threadIdx.x % 32 / 4;
  }
  // Reads what this adds to, if it does.
  __device__ __forceinline__ void read_stream(const Step& step, u16 (&stream)[4]) const {
    if constexpr (P::ADDS)
#pragma unroll
      for (int e = 0; e < 4; e++) stream[e] = is_live(step, e) ? __ldcg(step.out + at(e)) : 0;
  }
  __device__ __forceinline__ void write(const Step& step, const u16 (&stream)[4]) const {
    float squares[2] = {};
#pragma unroll
    for (int e = 0; e < (P::GATED ? 2 : 4); e++) {
      const bool live = is_live(step, e);
      const float factor = P::NORMED && live ? step.factors[row(e)] : 1.f;
      float y;
      if constexpr (P::GATED) {
        const float gate = sums[e] * (scales.x * factor);
        y = __fdividef(gate, 1.f + __expf(-gate)) * (sums[2 + e] * (scales.y * factor));
      } else {
        y = sums[e] * (factor * scale(e)) + bias(e);
      }
      if constexpr (P::ADDS) y += element(stream[e]);
      const u16 bits = rounded(y);
      if (live) step.out[at(e)] = bits;
      squares[e % 2] += element(bits) * element(bits);
    }
    if constexpr (P::ADDS)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int other = 4; other < 32; other *= 2) squares[e] += __shfl_xor_sync(~0u, squares[e], other);
        if (threadIdx.x % 32 < 4 && is_live(step, e))
          step.squares[row(e) * (P::OUTPUTS / 16) + block * 8 + warp] = squares[e];
      }
  }
};

// Reduces what all programs with a part of a block have written, for this program's share of the block, which is as
// large as its part.
template <class P>
__device__ __forceinline__ void finish_share(const Step& step, const float* scales, int pair) {
  typedef Item<P> Its;
  constexpr int MOST_UNITS = (P::CUT + CLUSTERS - 1) / CLUSTERS, WARPS = THREADS / 32, AT_ONCE = 8;
  constexpr int ROUNDS = (ROWS * MOST_UNITS / P::STEPS + 1 + WARPS - 1) / WARPS;
  const int start = pair * P::STEPS, block = 2 * (P::WHOLE * CLUSTERS + pair) + member(), lane = threadIdx.x % 32;
  const int items = (step.rows + 7) / 8 * WARPS, cluster = cluster_of();
  const int first = items * max(P::begin(cluster) - start, 0) / P::STEPS + threadIdx.x / 32;
  const int end = items * min(P::begin(cluster + 1) - start, P::STEPS) / P::STEPS;
  Its mine[ROUNDS];
  u16 stream[ROUNDS][4];
#pragma unroll
  for (int i = 0; i < ROUNDS; i++)
    if (const int item = first + i * WARPS; item < end) {
      const int its_warp = item % WARPS;
      mine[i] = Its{block, item / WARPS, its_warp, read_scales<P>(scales, block, its_warp),
                    read_biases<P>(step.bias, block, its_warp), {}};
      mine[i].read_stream(step, stream[i]);
    }
  const int from = P::owner(start), to = P::owner(start + P::STEPS - 1);
#pragma unroll
  for (int i = 0; i < ROUNDS; i++) {
    if (first + i * WARPS >= end) break;
    Its& its = mine[i];
    float4* at = step.parts + its.part * THREADS + its.warp * 32 + lane;
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
        its.sums[0] += parts[c].x, its.sums[1] += parts[c].y;
        its.sums[2] += parts[c].z, its.sums[3] += parts[c].w;
      }
    }
    its.write(step, stream[i]);
  }
}

__device__ __forceinline__ void wait_for_factors(int bar) {
  asm volatile("bar.sync %0, %1;" ::"r"(bar), "n"(THREADS + FACTOR_THREADS) : "memory");
}
template <class P>
__device__ __forceinline__ void run_product(const Step& step, Weights& ring, Inputs& inputs, const float* scales) {
  float sums[ROWS / 2];
  const u32 nothing = (u32)step.rows >> 16;
  const int begin = P::begin(cluster_of()), end = P::begin(cluster_of() + 1);
  const int first = begin / P::STEPS, last = (end - 1) / P::STEPS;  // pairs of which this has a part
  if constexpr (P::REST > 0) {
#pragma unroll 1
    for (int pair = first; pair <= last; pair++) {
      multiply_units(sums, ring, inputs, min(end, (pair + 1) * P::STEPS) - max(begin, pair * P::STEPS), nothing);
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
      for (int pair = first; pair <= last; pair++) finish_share<P>(step, scales, pair);
  };
#pragma unroll 1
  for (int w = 0; w < P::WHOLE; w++) {
    if (w && w == P::WHOLE - 1) finish();  // all have written theirs long ago
    const int block = 2 * (w * CLUSTERS + cluster_of()) + member(), its_warp = threadIdx.x / 32;
    const float2 of_lines = read_scales<P>(scales, block, its_warp);
    const float2 biases = read_biases<P>(step.bias, block, its_warp);
    multiply_units(sums, ring, inputs, P::STEPS, nothing);
    if (P::NORMED && w == 0) wait_for_factors(step.factors_bar);
#pragma unroll
    for (int part = 0; part < ROWS / 8; part++)
      if (part * 8 < step.rows) {
        const Item<P> item{block, part, its_warp, of_lines, biases,
                           {sums[4 * part], sums[4 * part + 1], sums[4 * part + 2], sums[4 * part + 3]}};
        u16 stream[4];
        item.read_stream(step, stream);
        item.write(step, stream);
      }
  }
  if (P::NORMED && P::WHOLE == 0) wait_for_factors(step.factors_bar);
  if (P::WHOLE < 2) finish();
}
