// All layers of a decoder for one token, in one kernel; see megakernel.py.
//
// Compiled for one shape, behind hopper.cuh and the mega_*.cuh. PROGRAMS of them, one a multiprocessor, all at once.
// Of each of a layer's four products a program has as many lines of the weight as any other, all of k. One warp asks
// for weights, which depend on nothing, as far ahead as there is room: from one product, and one layer, to the next;
// and for the pages of keys and values that its program attends to. WARPS multiply, each a part of k, and attend, each
// to a page at a time. What programs make for each other are words in memory, two bfloat16 (or a float) and a flag,
// written at once: a word is there when its flag is this step's and layer's, so that nothing is fenced, counted or
// cleared. (A flag comes back after 2^32 layers.) Buffers of words are used again in each layer: who writes one has
// read what all have made from what it held. What everybody reads is there COPIES times, so that fewer wait for one
// word.

// Leaves pairs of a product's outputs: ``y`` is one of ``line``'s thread, of all threads of a warp.
template <int COPIES_ = COPIES>
__device__ __forceinline__ void leave_pair(u64* words, int size, int line, float y, bool live, u32 flag) {
  const float other = __shfl_down_sync(~0u, y, 1);
  if (live && line % 2 == 0)
#pragma unroll
    for (int c = 0; c < COPIES_; c++) leave(words + c * size + line / 2, pack(y, other), flag);
}

// maps: of each layer's keys and values. words: see above; count: layers so far, of all launches with these words.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
megakernel(const Layer* layers, const TensorMap* maps, const u16* x, u16* y, const float* angles,
           const long long* positions, const long long* slots, const int* lengths, const int* table, u64* words,
           u32* count, long long angles_stride, int num_layers, u32 zero, float eps, float heads_eps, float scale) {
  extern __shared__ unsigned char dynamic[];
  const u32 base = (shared_address(dynamic) + 1023) & ~1023u;
  Memory& memory = *(Memory*)(dynamic + (base - shared_address(dynamic)));
  Ring ring;
  ring.tiles = base + MEMORY_BYTES;
  ring.full = shared_address(memory.barriers), ring.empty = ring.full + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, program = blockIdx.x;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(ring.full + 8 * s, 1), barrier_init(ring.empty + 8 * s, WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warp == WARPS) {
    const u64 policy = read_once();
#pragma unroll 1
    for (int l = 0; l < num_layers; l++) {
      const Layer& its = layers[l];
      load_weights<QKV_LINES, HIDDEN, false>(its.qkv, ring, lane, policy);
      if (l == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
      const Shares shares(lengths[0]);
      load_pages(maps + 2 * l, table, shares, ring, lane);
      load_weights<ADD_LINES, WIDTH, false>(its.o, ring, lane, policy);
      load_weights<GATE_LINES, HIDDEN, true>(its.gate_up, ring, lane, policy);
      load_weights<ADD_LINES, INNER, false>(its.down, ring, lane, policy);
    }
    return;
  }

  // An arrival does not wait for loads before it, and lets the next weights in: so it goes to an address that what was
  // loaded has a part in. The part is zero, which the compiler does not know.
  const u32 nothing = zero;
  const int line = threadIdx.x;
  const bool adds = line < ADD_LINES;
  u64 *projection = words, *parts = projection + QKV_WORDS, *sums = parts + COPIES * PART_WORDS;
  u64 *middle = sums + COPIES * SUM_WORDS, *hidden = middle + COPIES * X_WORDS;
  u64* stream = hidden + COPIES * INNER / 2;
  const int copy = program % COPIES;  // that it reads
  asm volatile("griddepcontrol.wait;" ::: "memory");
  Token token;
  token.length = lengths[0], token.slot = (int)slots[0];
  if (lane < D / 4) {
    const float* at = angles + positions[0] * angles_stride + lane * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) token.cosines[i] = at[i], token.sines[i] = at[D / 2 + i];
  }
  const Shares shares(token.length);
  const u32 first_flag = *count + 1;
  float own = adds ? low(x[program * ADD_LINES + line]) : 0.f;  // of the residual stream, this thread's
  float square = take_first(memory, x);
#pragma unroll 1
  for (int l = 0; l < num_layers; l++) {
    const Layer its = layers[l];
    const u32 flag = first_flag + l;
    if (l) square = take<X_WORDS, true>(memory, stream + copy * X_WORDS, flag - 1);
    multiply_lines<QKV_LINES, HIDDEN>(memory, ring, nothing);
    leave_squares(memory, square);
    meet();
    float by = factor(memory, eps);
    for (int i = line; i < (QKV_LINES + 31) / 32 * 32; i += THREADS) {
      const float out = i < QKV_LINES ? sum_of(memory, i) * by : 0.f;
      leave_pair<1>(projection + program * QKV_LINES / 2, 0, i, out, i < QKV_LINES, flag);
    }
    if (program / KV < shares.splits)
      attend(memory, its, token, shares, ring, projection, parts, sums, heads_eps, scale, flag, nothing);

    take_heads(memory, parts + copy * PART_WORDS, sums + copy * SUM_WORDS, shares.splits, flag);
    multiply_lines<ADD_LINES, WIDTH>(memory, ring, nothing);
    meet();
    if (line < (ADD_LINES + 31) / 32 * 32) {
      own = adds ? rounded(own + sum_of(memory, line)) : 0.f;
      leave_pair(middle + program * ADD_LINES / 2, X_WORDS, line, own, adds, flag);
    }

    square = take<X_WORDS, true>(memory, middle + copy * X_WORDS, flag);
    multiply_lines<GATE_LINES, HIDDEN>(memory, ring, nothing);
    leave_squares(memory, square);
    meet();
    by = factor(memory, eps);
    constexpr int OUTPUTS = GATE_LINES / 2;
    for (int i = line; i < (OUTPUTS + 31) / 32 * 32; i += THREADS) {
      float out = 0.f;
      if (i < OUTPUTS) {
        const float gate = sum_of(memory, i) * by;
        out = __fdividef(gate, 1.f + __expf(-gate)) * (sum_of(memory, OUTPUTS + i) * by);
      }
      leave_pair(hidden + program * OUTPUTS / 2, INNER / 2, i, out, i < OUTPUTS, flag);
    }

    take<INNER / 2, false>(memory, hidden + copy * (INNER / 2), flag);
    multiply_lines<ADD_LINES, INNER>(memory, ring, nothing);
    meet();
    if (line < (ADD_LINES + 31) / 32 * 32) {
      own = adds ? rounded(own + sum_of(memory, line)) : 0.f;
      if (l + 1 < num_layers) leave_pair(stream + program * ADD_LINES / 2, X_WORDS, line, own, adds, flag);
    }
  }
  if (adds) y[program * ADD_LINES + line] = (u16)(__float_as_uint(own) >> 16);
  if (program == 0 && threadIdx.x == 0) *count += num_layers;  // by now all have read it
  asm volatile("griddepcontrol.launch_dependents;");
}
