// All layers of a decoder in one kernel, for the next token of up to ROWS sequences; see megakernel.py.
//
// Compiled for one shape, after hopper.cuh and the mega_*.cuh: mega_dense.cuh or mega_experts.cuh for the MLP,
// mega_lines.cuh or mega_packed.cuh for loading weights, mega_float8.cuh if x and weights are float8. FLOAT8_CACHE:
// keys and values are float8, which is multiplied in float16.
//
// PROGRAMS thread blocks run at once, one per SM. Each has equally many lines (weight rows, all of k) of each of a
// layer's four products. One warp loads weights as far ahead as its ring buffer has room, across products and layers:
// they depend only on which experts are selected. It also loads the pages that its program attends to. WARPS warps
// multiply, each a part of k, and attend, each to a page at a time.
// Programs exchange vectors as words in memory: two bfloat16 (or a float) and a flag in one 64-bit store. A word is
// valid if its flag is this step's and layer's, so there are no fences, counters or resets. (A flag repeats after 2^32
// layers.) Layers reuse the buffers: whoever writes a word has read what all programs made of its previous contents.
// What all programs read has COPIES copies, so that fewer poll one word.

// maps: of each layer's keys and values. words: see above. count: layers so far, in all launches with these words.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
megakernel(const Layer* layers, const TensorMap* maps, const u16* x, u16* y, const float* angles,
           const long long* positions, const long long* slots, const int* lengths, const int* tables, u64* words,
           u32* count, long long angles_stride, long long tables_stride, int rows, int num_layers, u32 zero, float eps,
           float heads_eps, float scale, u64* const* everywhere, int rank) {
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
    load_weights<QKV_LINES, HIDDEN, HIDDEN_CHUNK>(layers->qkv, ring, lane, policy);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const Share share = share_of(Shares(lengths, rows), program);
    const int* table = tables + max(share.row, 0) * tables_stride;
    MlpLoads mlp(memory, words, live_rows(slots, rows), *count + 1);
#pragma unroll 1
    for (int l = 0; l < num_layers; l++) {
      const Layer& its = layers[l];
      if (l) load_weights<QKV_LINES, HIDDEN, HIDDEN_CHUNK>(its.qkv, ring, lane, policy);
      if (share.row >= 0) load_pages(maps + 2 * l, table, share, ring, lane);
      load_weights<ADD_LINES, WIDTH, WIDTH_CHUNK>(its.o, ring, lane, policy);
      mlp.load(its, l, ring, lane, policy);
    }
    return;
  }

  // An arrival lets the next weights overwrite a stage, but does not wait for earlier loads. So its address includes a
  // value that depends on them: zero, which the compiler does not know.
  const u32 nothing = zero;
  const int own_row = threadIdx.x / ADD_LINES, own_line = threadIdx.x % ADD_LINES;  // of the residual stream
  const int at = program * ADD_LINES + own_line;
  const bool adds = own_row < ROWS;
  const Ranks ranks{everywhere, rank};
  u64* copies = words + ROWS * QKV_WORDS;
  const u64* its_copy = copies + program % COPIES * COPY_WORDS;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  make_plan(memory, Shares(lengths, rows), angles, angles_stride, positions, slots, lengths, rows);
  const u32 first_flag = *count + 1;
  float own = adds && own_row < rows ? low(x[own_row * HIDDEN + at]) : 0.f;
  float square = take_first(memory, x, rows);
#pragma unroll 1
  for (int l = 0; l < num_layers; l++) {
    // Without this the compiler computes all addresses once and spills them.
    asm volatile("" : "+l"(copies), "+l"(its_copy), "+l"(words));
    const Layer its = layers[l];
    const u32 flag = first_flag + l;
    const Scales scales(its);  // loaded here, used by put
    const Biases biases(its);  // likewise
    copy_norm(memory, its.input_norm);
    Batch<Cut<QKV_LINES, HIDDEN, HIDDEN_CHUNK>> qkv;
    qkv.read(ring, 0, 0, nothing);
    if (l) square = take<X_WORDS, true>(memory, its_copy + STREAM, flag - 1);
    if (FLOAT8 && !l) wait_for_copies(), meet();  // otherwise done by take
    to_float8<HIDDEN, true>(memory);
    scales.put(memory);
    multiply_lines(memory, ring, qkv, nothing);
    leave_squares(memory, square);
    square = 0.f;  // so that it is not kept through the layer
    meet();
    for (int i = threadIdx.x; i < up(ROWS * QKV_LINES); i += THREADS) {  // slower if unrolled
      const int row = i / QKV_LINES, line = i % QKV_LINES;
      float out = row < ROWS ? output<QKV_LINES, 0>(memory, line, row) * factor(memory, row, eps) : 0.f;
      if constexpr (BIASED) out += biases.its[i / THREADS];
      leave_pair<1>(words + row * QKV_WORDS + program * QKV_LINES / 2, line, out, row < ROWS, flag);
    }
    if (memory.share.row >= 0) attend(memory, its, ring, words, copies, heads_eps, scale, flag, nothing);

    Batch<Cut<ADD_LINES, WIDTH, WIDTH_CHUNK>> o;
    o.read(ring, 0, 0, nothing);
    take_heads(memory, copies, its_copy, flag);
    to_float8<WIDTH>(memory);
    multiply_lines(memory, ring, o, nothing);
    meet();
    if (threadIdx.x < up(ROWS * ADD_LINES)) {
      if (adds) {
        const float out = output<ADD_LINES, O_SCALES>(memory, own_line, own_row);
        own = rounded(own + ranks.sum(out, BEHIND_ATTENTION, own_row, at, flag));
      }
      leave_pair(copies + MIDDLE + own_row * X_WORDS + program * ADD_LINES / 2, own_line, own, adds, flag);
    }

    run_mlp(memory, ring, its, copies, its_copy, eps, flag, nothing);
    if (threadIdx.x < up(ROWS * ADD_LINES)) {
      if (adds) {
        const float out = output<ADD_LINES, DOWN_SCALES>(memory, own_line, own_row);
        own = rounded(own + ranks.sum(out, BEHIND_MLP, own_row, at, flag));
      }
      if (l + 1 < num_layers)
        leave_pair(copies + STREAM + own_row * X_WORDS + program * ADD_LINES / 2, own_line, own, adds, flag);
    }
  }
  if (adds && own_row < rows)
    y[own_row * HIDDEN + at] = (u16)(__float_as_uint(own) >> 16);
  if (program == 0 && threadIdx.x == 0) *count += num_layers;  // all have read it by now
  asm volatile("griddepcontrol.launch_dependents;");
}
