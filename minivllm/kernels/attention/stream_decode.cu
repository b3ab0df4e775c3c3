// Attention of one new token per sequence over a paged cache of 16-key pages, read as one stream; see stream_decode.py.
//
// Compiled for one (KV, G, D, QKV, SHARED, FLOAT8), after hopper.cuh: key heads, query heads per key head, their
// dimension, whether q is the packed projection, which is normed and rotated here, whether rows come with parts of
// attention over shared keys, and whether the cache is in float8 (e4m3), which is multiplied in float16. The pages of
// all sequences, one after another, are split into shares, one per program (thread block): equal ones, or nearly equal
// ones of one sequence each. In a program
// - one warp loads pages, keys and values of all heads, by TMA, as far ahead as there is room, across sequences;
// - HELPERS warps prepare queries in shared memory, a sequence ahead of its pages, and the new key and value, which
//   they also write to the cache if the sequence ends in this share;
// - WARPS warps process the pages, WARPS / KV per head: each computes all scores of its head and some dimensions of
//   the output. Scores are transposed, keys by query heads (S' = K q', out' = V' P'): the eight columns of an MMA tile
//   are the query heads of a key head. Before a sequence's last page, its new key and value are inserted.
// If a sequence spans several shares, each program writes its part, and the last one combines them, each warp on its
// own. It polls the parts' words themselves, so no fence and no counter is needed. A program processes its sequences
// from last to first: it writes a part early, before another program needs it, and waits for parts last. Programs
// before it are running by then, because they start in order.

constexpr int PAGE = 16;                        // keys
constexpr int HEAD_SIZE = FLOAT8 ? D : 2 * D;   // bytes of a head in a page
constexpr int PART_BYTES = KV * HEAD_SIZE * PAGE, STAGE_BYTES = 2 * PART_BYTES;  // keys, then values
constexpr int PER_HEAD = WARPS / KV, DIMS = D / PER_HEAD, TILES = DIMS / 16, STEPS = D / 16;
constexpr int HEADS = KV * (QKV ? G + 2 : G);   // in a row of q: queries, new keys, new values
constexpr int HEAD_BYTES = 2 * D, LANES = D / 8;  // a lane prepares eight dimensions of a head
constexpr int PIECE = (TILES + 1) * 32;         // float4s per warp and sequence: outputs; maxima and sums
constexpr u32 HEAD_START = 4000;                // cycles that loading pages waits for loading queries, at most

#if SHARED  // runs beside the kernel that makes the parts
#define BOUNDS __maxnreg__(120)
#else
#define BOUNDS __launch_bounds__(32 * (WARPS + 1 + HELPERS), 1)
#endif

__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_two_transposed(u32 (&a)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(a[0]), "=r"(a[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ u32 read1(u32 from) {
  u32 word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ __forceinline__ void read2(u32 (&words)[2], u32 from) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ void write1(u32 to, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ bool has_passed(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ u32 clock_now() {
  u32 c;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(c)::"memory");
  return c;
}
__device__ __forceinline__ u32 transposed(u32 pair) {  // transposes an 8 x 8 matrix, a pair per lane
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}
// Where byte ``at`` of a line of a page is: TMA swizzles columns of 128 bytes.
__device__ __forceinline__ u32 in_page(int line, int at) {
  return at / LINE * PAGE * LINE + line * LINE + (at % LINE / 16 ^ (line & 7)) * 16 + at % 16;
}
// Four dimensions of a head in float8, from bfloat16 in shared memory.
__device__ __forceinline__ u32 read_as_float8(u32 from) {
  u32 pairs[2];
  read2(pairs, from);
  return float8_four(pairs[0], pairs[1]);
}
__device__ __forceinline__ float column_max(float x) {  // over the lanes that hold a column
#pragma unroll
  for (int other = 4; other < 32; other *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int other = 4; other < 32; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

struct New {  // how to make q, k and v from a packed projection; strides in elements
  const u16* x;                        // (rows, size): its rms divides the projection; null: not divided
  const u16 *query_norm, *key_norm;    // (D,), or null: no norm
  const float* angles;                 // (positions, D) cosines of half a head's dimensions, then sines
  const long long *positions, *slots;  // (rows,)
  u16 *keys, *values;                  // (blocks, PAGE, KV, D); FLOAT8: bytes
  long long x_stride, angles_stride;
  int size;
  float eps, x_eps;
};

struct Shared {              // attention that rows have computed together
  const int* of_rows;        // (rows, 2): first part, number of parts
  const float *outs, *tops;  // (parts, KV * G, D) divided by their sums; (parts, KV * G) log-sum-exps in base 2
};

// 1 / rms of a row of x.
__device__ __forceinline__ float row_factor(const New& its, int row, int lane) {
  float square = 0.f;
  const u16* x = its.x + row * its.x_stride;
  for (int i = lane * 8; i < its.size; i += 256) {
    const uint4 eight = *(const uint4*)(x + i);
    square += square_of(eight.x) + square_of(eight.y) + (square_of(eight.z) + square_of(eight.w));
  }
  return rsqrtf(warp_sum(square) / its.size + its.x_eps);
}

// Where dimension d of a prepared head is in shared memory: swizzled, so that eight heads are in different banks.
__device__ __forceinline__ u32 element(u32 made_at, int head, int d) {
  return made_at + head * HEAD_BYTES + (d / 8 ^ (QKV ? head & 7 : 0)) * 16 + d % 8 * 2;
}

// A helper warp's lane: eight dimensions of every AT_ONCE-th head of a row.
struct Maker {
  const New& its;
  const int helper, lane, chunk;
  uint4 query_norm, key_norm;
  float4 cosines[2], sines[2];
  long long slot;
  int length, end;

  __device__ __forceinline__ Maker(const New& its, int helper, int lane)
      : its(its), helper(helper), lane(lane), chunk(lane % LANES) {
    if (QKV && its.query_norm) query_norm = *((const uint4*)its.query_norm + chunk);
    if (QKV && its.key_norm) key_norm = *((const uint4*)its.key_norm + chunk);
  }
  // Reads what is the same for a row in every layer.
  __device__ __forceinline__ void read(const int* lengths, const int* starts, int row) {
    length = lengths[row], end = starts[row + 1];
    if (!QKV) return;
    slot = its.slots[row];
    const float* angles = its.angles + its.positions[row] * its.angles_stride + chunk % (LANES / 2) * 8;
#pragma unroll
    for (int i = 0; i < 2; i++)
      cosines[i] = __ldg((const float4*)angles + i), sines[i] = __ldg((const float4*)(angles + D / 2) + i);
  }
  // Loads the row of q, and prefetches that of x.
  __device__ __forceinline__ void fetch(const u16* q, int row, u32 to, u32 bar) const {
    if (helper == 0 && lane == 0) {
      barrier_expect(bar, HEADS * HEAD_BYTES);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
                   "r"(to), "l"(q), "r"(HEADS * HEAD_BYTES), "r"(bar) : "memory");
    }
    if (QKV && its.x)
      for (int i = (helper * 32 + lane) * 16; i < its.size; i += HELPERS * 512) {
        u32 unread;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(unread) : "l"(its.x + row * its.x_stride + i) : "memory");
      }
  }
  // Applies factor, norm and rotary embedding to the heads in place; keeps: new ones also go to the cache.
  __device__ __forceinline__ void make(u32 made_at, float factor, bool keeps) const {
    constexpr int AT_ONCE = 32 / LANES * HELPERS, TIMES = (HEADS + AT_ONCE - 1) / AT_ONCE;
    constexpr int BATCH = TIMES < 7 ? TIMES : 5;  // independent heads in flight hide each other's latency
    const float c[8] = {cosines[0].x, cosines[0].y, cosines[0].z, cosines[0].w,
                        cosines[1].x, cosines[1].y, cosines[1].z, cosines[1].w};
    const float s[8] = {sines[0].x, sines[0].y, sines[0].z, sines[0].w, sines[1].x, sines[1].y, sines[1].z, sines[1].w};
#pragma unroll 1
    for (int start = 0; start < TIMES; start += BATCH) {
      uint4 heads[BATCH];
      float squares[BATCH];
      auto head_of = [&](int b) { return (start + b) * AT_ONCE + helper * (32 / LANES) + lane / LANES; };
#pragma unroll
      for (int b = 0; b < BATCH; b++)
        heads[b] = head_of(b) < HEADS ? read16(made_at + head_of(b) * HEAD_BYTES + chunk * 16) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int b = 0; b < BATCH; b++)
        squares[b] = square_of(heads[b].x) + square_of(heads[b].y) + (square_of(heads[b].z) + square_of(heads[b].w));
#pragma unroll
      for (int other = 1; other < LANES; other *= 2)
#pragma unroll
        for (int b = 0; b < BATCH; b++) squares[b] += __shfl_xor_sync(~0u, squares[b], other);
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int key = head_of(b) - KV * G;  // or a value
        const bool is_value = key >= KV, norms = !is_value && (key < 0 ? its.query_norm : its.key_norm);
        const float to_norm = factor * rsqrtf(squares[b] * factor * factor / D + its.eps);
        const float left = norms ? 1.f : factor;  // still to be applied
        const float back = chunk < LANES / 2 ? -left : left;
        const uint4 norm = key < 0 ? query_norm : key_norm;
        auto made = [&](u32 pair, u32 weight, int i) {
          const u32 with = normed(pair, to_norm, weight), mine = norms ? with : pair;
          const u32 other = __shfl_xor_sync(~0u, mine, LANES / 2);  // half a head away
          const u32 turned = pack(low(mine) * left * c[i] + low(other) * back * s[i],
                                  high(mine) * left * c[i + 1] + high(other) * back * s[i + 1]);
          return is_value ? scaled(mine, left) : turned;
        };
        heads[b] = make_uint4(made(heads[b].x, norm.x, 0), made(heads[b].y, norm.y, 2), made(heads[b].z, norm.z, 4),
                              made(heads[b].w, norm.w, 6));
      }
#pragma unroll
      for (int b = 0; b < BATCH; b++) {
        const int head = head_of(b), key = head - KV * G;
        if (head >= HEADS) continue;
        write16(element(made_at, head, chunk * 8), heads[b]);
        if (key < 0 || !keeps) continue;
        u16* cache = key < KV ? its.keys : its.values;
        const long long at = (slot * KV + key % KV) * D + chunk * 8;
        if (FLOAT8)
          *(uint2*)((unsigned char*)cache + at) =
              make_uint2(float8_four(heads[b].x, heads[b].y), float8_four(heads[b].z, heads[b].w));
        else
          *(uint4*)(cache + at) = heads[b];
      }
    }
  }
};

// A tile of outputs has 16 dimensions. Its lines `group` and group + 8 are these and those behind them: neighbours in
// float8, which is transposed in pairs.
constexpr int GROUP_DIMS = FLOAT8 ? 2 : 1, HALF_TILE = FLOAT8 ? 1 : 8;

struct State {  // of a warp and a sequence; each lane has two columns: query heads 2 * (lane % 4) and the next
  float out[TILES][4], top[2], sum[2];  // not yet divided by the sum; maxima in base 2

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < TILES; t++) out[t][0] = out[t][1] = out[t][2] = out[t][3] = 0.f;
    top[0] = top[1] = -1e30f, sum[0] = sum[1] = 0.f;
  }
  __device__ void scale(float first, float second) {
#pragma unroll
    for (int t = 0; t < TILES; t++) out[t][0] *= first, out[t][1] *= second, out[t][2] *= first, out[t][3] *= second;
    sum[0] *= first, sum[1] *= second;
  }
  // Raises the maxima to at least these.
  __device__ void raise(float first, float second) {
    first = fmaxf(first, top[0]), second = fmaxf(second, top[1]);
    scale(exp2_of(top[0] - first), exp2_of(top[1] - second));
    top[0] = first, top[1] = second;
  }
  __device__ void add(State& other) {
    raise(other.top[0], other.top[1]);
    other.raise(top[0], top[1]);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[t][i] += other.out[t][i];
    sum[0] += other.sum[0], sum[1] += other.sum[1];
  }

  // Adds parts [begin, end) that an earlier kernel has written; ``first`` is the lane's first dimension.
  __device__ __forceinline__ void add(const Shared& its, int begin, int end, int head, int pair, int first) {
    const int query[2] = {head * G + min(pair, G - 1), head * G + min(pair + 1, G - 1)};
    float highest[2] = {top[0], top[1]};
#pragma unroll 4
    for (long long p = begin; p < end; p++)
#pragma unroll
      for (int i = 0; i < 2; i++) highest[i] = fmaxf(highest[i], __ldcg(its.tops + p * KV * G + query[i]));
    raise(highest[0], highest[1]);
#pragma unroll 2
    for (long long p = begin; p < end; p++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float* from = its.outs + (p * KV * G + query[i]) * D + first;
        const float weight = exp2_of(__ldcg(its.tops + p * KV * G + query[i]) - top[i]);
        sum[i] += weight;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int j = 0; j < 2; j++) out[t][2 * j + i] += weight * __ldcg(from + 16 * t + HALF_TILE * j);
      }
  }

  // Exchange of a lane's part through memory; each word tells by itself whether it is there.
  __device__ void leave(float4* to) const {
#pragma unroll
    for (int t = 0; t < TILES; t++) leave_four(to + t * 32, out[t][0], out[t][1], out[t][2], out[t][3]);
    leave_four(to + TILES * 32, top[0], top[1], sum[0], sum[1]);
  }
  __device__ void look(const float4* from) {
#pragma unroll
    for (int t = 0; t < TILES; t++) look_at_four(from + t * 32, out[t][0], out[t][1], out[t][2], out[t][3]);
    look_at_four(from + TILES * 32, top[0], top[1], sum[0], sum[1]);
  }
  __device__ bool is_whole() const {
    bool whole = is_there(top[0]) && is_there(top[1]) && is_there(sum[0]) && is_there(sum[1]);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) whole &= is_there(out[t][i]);
    return whole;
  }
  static __device__ void take_away(float4* from) {
#pragma unroll
    for (int t = 0; t <= TILES; t++) take_away_four(from + t * 32);
  }
};

extern "C" __global__ void BOUNDS
stream_decode(const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, const u16* q, u16* out,
              const int* tables, const int* lengths, const int* starts_of, const int* shares, float4* parts,
              long long table_stride, int q_stride, int out_stride, int rows, int stages, int early, float scale,
              const __grid_constant__ New its_new, const __grid_constant__ Shared its_shared) {
  extern __shared__ unsigned char memory[];
  __shared__ u64 barriers[2 * MAX_STAGES + 4];
  __shared__ int its_length;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 pages_at = (shared_address(memory) + 1023) & ~1023u, made_at = pages_at + stages * STAGE_BYTES;
  const u32 full = shared_address(barriers), empty = full + 8 * MAX_STAGES;
  const u32 asked_for = empty + 8 * MAX_STAGES, fetched = asked_for + 8, made = fetched + 8, taken = made + 8;  // queries
  int* starts = (int*)(memory + (made_at - shared_address(memory)) + HEADS * HEAD_BYTES);  // (rows + 1,) pages

  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, WARPS);
    barrier_init(asked_for, HELPERS), barrier_init(fetched, 1), barrier_init(made, HELPERS), barrier_init(taken, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (!early) asm volatile("griddepcontrol.wait;" ::: "memory");
  const int program = blockIdx.x;
  const int* its_share = shares + program * (SHARE + NAMED);  // as _shares_kernel writes it
  const int first = its_share[0], last = its_share[1], first_row = its_share[2], last_row = its_share[3];
  const int sequences = first < last ? last_row - first_row + 1 : 0;

  if (warp > WARPS) {  // prepares queries
    Maker maker(its_new, warp - WARPS - 1, lane);
    if (sequences) maker.read(lengths, starts_of, last_row);
    // SHARED: queries are complete when this starts, because the kernel that makes the parts has waited for them before
    // it triggered this one. Trigger the next kernel late: it may read before its own wait.
    auto wait_and_start_next = [] {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;");
    };
    if (!SHARED) wait_and_start_next();
    if (sequences) maker.fetch(q + (long long)last_row * q_stride, last_row, made_at, fetched);
    if (lane == 0) here_arrive(asked_for);
    for (int n = 0; n < sequences; n++) {
      const int row = last_row - n;
      const float factor = QKV && its_new.x ? row_factor(its_new, row, lane) : 1.f;
      barrier_wait(fetched, n & 1);
      if (QKV) maker.make(made_at, factor, maker.end <= last);
      if (maker.helper == 0) its_length = maker.length;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before TMA writes the next row
      __syncwarp();
      if (lane == 0) here_arrive(made);
      if (n + 1 == sequences) break;
      maker.read(lengths, starts_of, row - 1);
      barrier_wait(taken, n & 1);
      maker.fetch(q + (long long)(row - 1) * q_stride, row - 1, made_at, fetched);
    }
    if (SHARED) wait_and_start_next();
    return;
  }
  int stage = 0, round = 0;

  if (warp == WARPS) {  // loads pages
    // The share lists the blocks of the first pages. All but one are loaded after the queries, which would take long
    // behind all programs' pages, but HEAD_START cycles later at most, in case the previous kernel is still running.
    const int block = its_share[SHARE + lane], named = min(its_share[4] - (QKV || SHARED || !early ? 0 : its_share[5]), stages);
    int asked = 0;
    auto ask = [&](int most) {
      for (; asked < most; asked++) {
        const int its = __shfl_sync(~0u, block, asked);
        if (lane == 0) {
          const u32 bar = full + 8 * asked, to = pages_at + asked * STAGE_BYTES;
          barrier_expect(bar, STAGE_BYTES);
          load_page(to, &keys, 0, its, bar);
          load_page(to + PART_BYTES, &values, 0, its, bar);
        }
      }
    };
    ask(min(named, 1));
    if (lane == 0 && asked < named)
      for (const u32 begun = clock_now(); !has_passed(asked_for, 0) && clock_now() - begun < HEAD_START;);
    __syncwarp();
    ask(named);
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS + 32) : "memory");  // starts are complete
    stage = asked % stages, round = asked / stages;
    bool waited = SHARED || !early;
    for (int n = 0; n < sequences; n++) {
      const int row = last_row - n;
      const int begin = starts[row], end = starts[row + 1], stop = min(end, last);
      int page = max(begin, first) + (n ? 0 : asked);
      while (page < stop) {
        const int some = min(stop - page, 32);
        const int block = lane < some ? tables[row * table_stride + page - begin + lane] : 0;
        for (int i = 0; i < some; i++, page++) {
          const int its = __shfl_sync(~0u, block, i);
          if (!QKV && !waited && page == end - 1) {  // it holds the new token, written by the previous kernel
            asm volatile("griddepcontrol.wait;" ::: "memory");
            waited = true;
          }
          if (lane == 0) {
            const u32 bar = full + 8 * stage, to = pages_at + stage * STAGE_BYTES;
            barrier_wait(empty + 8 * stage, round & 1 ^ 1);
            barrier_expect(bar, STAGE_BYTES);
            load_page(to, &keys, 0, its, bar);
            load_page(to + PART_BYTES, &values, 0, its, bar);
          }
          if (++stage == stages) stage = 0, round++;
        }
      }
    }
    return;
  }

  for (int i = threadIdx.x; i <= rows; i += 32 * WARPS) starts[i] = starts_of[i];
  asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS + 32) : "memory");
  const int head = warp / PER_HEAD, part = warp % PER_HEAD, group = lane / 4, pair = lane % 4 * 2;
  // This lane's dimensions of the new key and value: FLOAT8: four; else two, and two that are half a head away.
  const int front = lane * (FLOAT8 ? 4 : 2), back = front + D / 2;
  const bool has_new = lane < D / 4;
  // An arrival lets TMA refill a stage, but does not wait for earlier loads. So its address includes a value that
  // depends on them: zero, which the compiler does not know.
  const u32 nothing = early >> 1;
  for (int n = 0; n < sequences; n++) {
    const int row = last_row - n;
    const int begin = starts[row], end = starts[row + 1], stop = min(end, last);
    int page = max(begin, first);
    barrier_wait(made, n & 1);
    const int length = its_length;
    u32 query[STEPS][2], new_key[2] = {0, 0}, new_value[2] = {0, 0};
#pragma unroll
    for (int s = 0; s < STEPS; s += FLOAT8 ? 1 : 2) {  // columns beyond the query heads repeat the last one
      if (FLOAT8) {  // four neighbours, as the words of keys have
        u32 two[2];
        read2(two, element(made_at, head * G + min(group, G - 1), 16 * s + 2 * pair));
        query[s][0] = half_pair(low(two[0]), high(two[0])), query[s][1] = half_pair(low(two[1]), high(two[1]));
        continue;
      }
      u32 four[4];
      load_matrices(four, element(made_at, head * G + min(lane % 8, G - 1), 16 * s + lane / 8 * 8));
      query[s][0] = four[0], query[s][1] = four[1], query[s + 1][0] = four[2], query[s + 1][1] = four[3];
    }
    if (QKV && stop == end && has_new) {
      const int key = KV * G + head, value = key + KV;
      if (FLOAT8)
        new_key[0] = read_as_float8(element(made_at, key, front)),
        new_value[0] = read_as_float8(element(made_at, value, front));
      else
        new_key[0] = read1(element(made_at, key, front)), new_key[1] = read1(element(made_at, key, back)),
        new_value[0] = read1(element(made_at, value, front)), new_value[1] = read1(element(made_at, value, back));
    }
    State state;
    state.clear();

#pragma unroll 1
    for (bool has_taken = false; page < stop; page++, has_taken = true) {
      barrier_wait(full + 8 * stage, round & 1);
      const u32 at = pages_at + stage * STAGE_BYTES;
      const bool ends = page == end - 1;
      const int left = length - (page - begin) * PAGE;  // keys in this page
      if (QKV && ends && left > 0) {
#pragma unroll
        for (int i = 0; i < (FLOAT8 ? 1 : 2); i++) {
          const u32 there = at + in_page(left - 1, head * HEAD_SIZE + (FLOAT8 ? front : 2 * (i ? back : front)));
          if (has_new) write1(there, new_key[i]), write1(there + PART_BYTES, new_value[i]);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before TMA refills the stage
        __syncwarp();
      }
      float scores[2][4] = {};
#pragma unroll
      for (int s = 0; s < STEPS; s += FLOAT8 ? 2 : 1) {
        u32 a[4];  // 32 bytes of each key
        load_matrices(a, at + in_page(lane % 16, head * HEAD_SIZE + HEAD_SIZE / STEPS * s + lane / 16 * 16));
        if (FLOAT8) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            u32 b[4];
            halves(a[2 * i], b[0], b[2]), halves(a[2 * i + 1], b[1], b[3]);
            multiply_halves(scores[i], b[0], b[1], b[2], b[3], query[s + i][0], query[s + i][1]);
          }
        } else {
          multiply(scores[s % 2], a[0], a[1], a[2], a[3], query[s][0], query[s][1]);
        }
      }
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        p[i] = (scores[0][i] + scores[1][i]) * scale;
        if (ends && group + i / 2 * 8 >= left) p[i] = -1e38f;
      }
      const float top[2] = {column_max(fmaxf(p[0], p[2])), column_max(fmaxf(p[1], p[3]))};
      state.raise(top[0], top[1]);
#pragma unroll
      for (int i = 0; i < 4; i++) p[i] = exp2_of(p[i] - state.top[i % 2]), state.sum[i % 2] += p[i];
      const u32 b0 = transposed(FLOAT8 ? half_pair(p[0], p[1]) : pack(p[0], p[1]));
      const u32 b1 = transposed(FLOAT8 ? half_pair(p[2], p[3]) : pack(p[2], p[3]));
      // A key that does not exist has weight 0, but its value may be NaN.
      u32 seen = b0 | b1;
      const u32 there[2] = {(pair < left ? 0xFFFFu : 0) | (pair + 1 < left ? 0xFFFF0000u : 0),
                            (pair + 8 < left ? 0xFFFFu : 0) | (pair + 9 < left ? 0xFFFF0000u : 0)};
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const int d = head * D + part * DIMS + 16 * t;
        u32 a[4];
        if (FLOAT8) {
          u32 pairs[2];  // dimensions 2 * group and the next one, of two keys each
          load_two_transposed(pairs, at + PART_BYTES + in_page(lane % 16, d));
          seen |= pairs[0];
          halves(__byte_perm(pairs[0], 0, 0x3120), a[0], a[1]), halves(__byte_perm(pairs[1], 0, 0x3120), a[2], a[3]);
        } else {
          load_transposed(a, at + PART_BYTES + in_page(lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2 * 16));
          seen |= a[0];
        }
        if (ends) a[0] &= there[0], a[1] &= there[0], a[2] &= there[1], a[3] &= there[1];
        if (FLOAT8)
          multiply_halves(state.out[t], a[0], a[1], a[2], a[3], b0, b1);
        else
          multiply(state.out[t], a[0], a[1], a[2], a[3], b0, b1);
      }
      __syncwarp();
      if (lane == 0) {
        here_arrive(empty + 8 * stage + (seen & nothing));
        if (!has_taken) here_arrive(taken + ((seen | new_key[0] | new_key[1] | new_value[0] | new_value[1]) & nothing));
      }
      if (++stage == stages) stage = 0, round++;
    }
    state.sum[0] = column_sum(state.sum[0]), state.sum[1] = column_sum(state.sum[1]);

    if (begin < first || end > last) {  // a part
      const bool holds = pair < G;
      float4* mine = parts + ((long long)program * WARPS + warp) * PIECE + lane % 4 * 8 + group;
      if (end > last) {
        if (holds) state.leave(mine);
        continue;
      }
      State coming;  // prefetches the next part while one is added
      coming.clear();
      const int from = its_share[6];  // the program with its first pages; all from there to this one have some
      for (int p = from; p < program; p++) {  // in a fixed order, whenever they arrive: reproducible
        float4* its_part = mine - (long long)(program - p) * WARPS * PIECE;
        if (p == from && holds) coming.look(its_part);
        for (u32 looks = 0; !__all_sync(~0u, !holds || coming.is_whole());) {
          if (++looks == PATIENCE) asm volatile("trap;");
          if (holds) coming.look(its_part);
        }
        State other = coming;
        if (p + 1 < program && holds) coming.look(its_part + WARPS * PIECE);
        if (holds) State::take_away(its_part);
        state.add(other);
      }
    }
    if (SHARED) {
      asm volatile("griddepcontrol.wait;" ::: "memory");  // for the parts; pages come first
      const int its_first = its_shared.of_rows[2 * row], count = its_shared.of_rows[2 * row + 1];
      state.add(its_shared, its_first, its_first + count, head, pair, part * DIMS + GROUP_DIMS * group);
    }
    state.scale(state.sum[0] > 0.f ? 1.f / state.sum[0] : 0.f, state.sum[1] > 0.f ? 1.f / state.sum[1] : 0.f);
    u16* to = out + (long long)row * out_stride + (head * G + group) * D + part * DIMS + GROUP_DIMS * pair;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      u32 two[2];  // dimensions of line `pair` and the next, then of those half a tile later
#pragma unroll
      for (int i = 0; i < 2; i++) two[i] = transposed(pack(state.out[t][2 * i], state.out[t][2 * i + 1]));
      if (FLOAT8) {
        const uint2 four = {__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[0], two[1], 0x7632)};
        if (group < G) *(uint2*)(to + 16 * t) = four;
      } else if (group < G) {
        *(u32*)(to + 16 * t) = two[0], *(u32*)(to + 16 * t + 8) = two[1];
      }
    }
  }
}
