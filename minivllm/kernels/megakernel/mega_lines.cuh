// Unpacked weights in megakernel.cu: a stage holds a chunk of k of eight lines (weight rows).

// Bytes of one line in a stage, padded so that the eight lines are in different banks.
__device__ constexpr int line_bytes(int chunk) { return BYTES * chunk + 64; }

// Loads a stage: ``elements`` of k, up to OF, of up to eight lines, each lane with one line's address. If each lane
// issues its own load, they take 400 cycles: too long for stages of 8 KB, but with larger ones it keeps programs at the
// same pace.
template <int OF>
__device__ __forceinline__ void load_lines(const Stored* from, int lines, Ring& ring, int lane, u64 policy,
                                           int elements = OF) {
  const int length = elements * BYTES;
  keep_pace<8 * OF * BYTES>(ring);
  const u32 bar = make_room(ring, lines * length, lane);
  if constexpr (OF * BYTES > 1024) {
    if (lane < lines) load_bytes(ring.at() + lane * line_bytes(OF), from, length, bar, policy);
  } else {
    const bool elected = is_elected();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const Stored* its = (const Stored*)__shfl_sync(~0u, (u64)from, i);
      if (elected && i < lines) load_bytes(ring.at() + i * line_bytes(OF), its, length, bar, policy);
    }
  }
  ring.next();
}
// Loads LINES lines of a weight, eight at a time, one piece of k after another. GATED: half are gate's lines, half
// up's.
template <int LINES, int K, int OF, bool GATED = false, int PIECES_ = 1>
__device__ __forceinline__ void load_weights(const Stored* weight, Ring& ring, int lane, u64 policy) {
  constexpr int OWN = GATED ? LINES / 2 : LINES, EIGHTS = (LINES + 7) / 8;
  constexpr int OF_PIECE = K / PIECES_;
  static_assert(OF_PIECE % (OF / WARPS) == 0 && STAGE_BYTES >= 8 * line_bytes(OF), "megakernel.py");
#pragma unroll 1
  for (int unit = 0; unit < PIECES_ * EIGHTS; unit++) {
    const int first = unit % EIGHTS * 8, begin = unit / EIGHTS * OF_PIECE;
    const int i = first + lane, some = min(LINES - first, 8);
    const int line = blockIdx.x * OWN + (GATED && i >= OWN ? INNER - OWN + i : i);
    const Stored* from = weight + (u64)line * K;
#pragma unroll 1
    for (int k = 0; k < OF_PIECE; k += OF)
      load_lines<OF>(from + begin + k, some, ring, lane, policy, OF_PIECE % OF ? min(OF_PIECE - k, OF) : OF);
  }
}

// Reads a lane's part of a stage, 16 bytes of one line at a time, which are MMA operands without rearranging; whatever
// was there before, if k ends before this warp's part. Returns a value that depends on every load.
template <int OF>
__device__ __forceinline__ u32 read_stage(uint4 (&w)[OF * BYTES / WARPS / 64], u32 stage, bool, u32) {
  const int lane = threadIdx.x % 32;
  const u32 from = stage + lane / 4 * line_bytes(OF) + threadIdx.x / 32 * (OF / WARPS) * BYTES + lane % 4 * 16;
  u32 seen = 0;
#pragma unroll
  for (int j = 0; j < OF * BYTES / WARPS / 64; j++) w[j] = read16(from + 64 * j), seen |= w[j].x;
  return seen;
}
// Byte offset of a lane's x in 64 bytes of k: of each four words the order is 0, 2, 1, 3.
__device__ __forceinline__ int x_of_lane(int lane) { return lane % 4 * 16 + lane / 4 % 2 * 8; }
__device__ __forceinline__ int x_of_four(int at) { return at / 2 * 4 + at % 2; }  // at: in fours; returns words

// Where a program's lines begin among its sums; see mega_packed.cuh.
template <int LINES> __device__ __forceinline__ int first_sum() { return 0; }
