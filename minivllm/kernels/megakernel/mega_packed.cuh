// Packed weights (packed_weights.py) in megakernel.cu: a stage holds a piece for each warp, eight lines (weight rows)
// by 128 of k, or fewer pieces at the end of k.
//
// Pieces begin at multiples of eight lines. If a program's lines do not, it shares its first or last eight with
// another.

static_assert(!EXPERTS && STAGE_BYTES >= WARPS * PIECE_BYTES, "megakernel.py");

constexpr int APART = BY_LINES ? PIECE_BYTES : UNIT_BYTES;  // distance of pieces of the same lines, adjacent along k

// Loads ``some`` pieces, one per warp.
__device__ __forceinline__ void load_pieces(const Stored* from, int some, Ring& ring, u32 bar, u64 policy) {
  if (!is_elected()) return;  // lanes that issue in turn take longer than a stage does
  if (BY_LINES) return load_bytes(ring.at(), from, some * PIECE_BYTES, bar, policy);
#pragma unroll
  for (int w = 0; w < WARPS; w++)
    if (w < some) load_bytes(ring.at() + w * PIECE_BYTES, from + w * UNIT_BYTES, PIECE_BYTES, bar, policy);
}
// Loads the pieces of LINES lines of a weight, eight at a time, one part of k after another. GATED: half are gate's and
// half up's, and their eights alternate in memory.
template <int LINES, int K, int OF, bool GATED = false, int PIECES_ = 1>
__device__ __forceinline__ void load_weights(const Stored* weight, Ring& ring, int lane, u64 policy) {
  constexpr int OWN = GATED ? LINES / 2 : LINES, EIGHTS = (OWN + 7) / 8, ALL_EIGHTS = GATED ? 2 * EIGHTS : EIGHTS;
  constexpr int UNITS = K / PIECE_K, SOME = UNITS / PIECES_;  // pieces along k: of a line, and of one part of k
  static_assert(OF == WARPS * PIECE_K && OWN % 4 == 0 && UNITS % PIECES_ == 0, "megakernel.py");
#pragma unroll 1
  for (int i = 0; i < PIECES_ * ALL_EIGHTS; i++) {
    const int e = i % ALL_EIGHTS, own = blockIdx.x * OWN / 8 + e % EIGHTS, eight = GATED ? 2 * own + e / EIGHTS : own;
    const u64 first = (u64)(BY_LINES ? eight : eight / 16) * UNITS + i / ALL_EIGHTS * SOME;
    const Stored* from = weight + first * APART + (BY_LINES ? 0 : eight % 16 * PIECE_BYTES);
#pragma unroll 1
    for (int unit = 0; unit < SOME; unit += WARPS, from += WARPS * APART) {
      const int some = min(SOME - unit, WARPS);
      keep_pace<WARPS * PIECE_BYTES>(ring);
      const u32 bar = make_room(ring, some * PIECE_BYTES, lane);
      load_pieces(from, some, ring, bar, policy);
      ring.next();
    }
  }
}

// Corrects the exponents of this warp's exceptions. Returns a value that depends on every load.
__device__ __forceinline__ u32 put_exceptions(uint4 (&w)[4], u32 piece, u32 tail) {
  u32 seen = 0;
  each_exception(piece, tail, [&](u32 entry) {
    const Exception exception(entry);
    seen |= entry;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      exception.put(w[i].x, 4 * i);
      exception.put(w[i].y, 4 * i + 1);
      exception.put(w[i].z, 4 * i + 2);
      exception.put(w[i].w, 4 * i + 3);
    }
  });
  return seen;
}
// Reads a lane's part of a stage: four pairs of one line for each 32 of k; undefined if the stage has no piece of this
// warp's. Returns a value that depends on every load.
template <int OF> __device__ __forceinline__ u32 read_stage(uint4 (&w)[4], u32 stage, bool mine, u32 nothing) {
  const u32 piece = stage + threadIdx.x / 32 * PIECE_BYTES, from = piece + threadIdx.x % 32 * 16;
  const uint4 first = read16(from), second = read16(from + PLANE_BYTES), third = read16(from + 2 * PLANE_BYTES);
  const u32 tail = mine ? read_tail(piece) : 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 pairs[4];
    decode_four(pairs, word(first, i), word(second, i), word(third, i), nothing);
    w[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  u32 seen = first.x | second.x | third.x | tail;
  if (tail) seen |= put_exceptions(w, piece, tail);
  return seen;
}
// Byte offset of a lane's x in 32 of k (64 bytes): pairs q and q + 8 are adjacent, those of q = 0 to 3 come first.
__device__ __forceinline__ int x_of_lane(int lane) { return lane / 4 % 2 * 32 + lane % 4 * 8; }
__device__ __forceinline__ int x_of_four(int at) {  // at: in fours; returns words
  return at / 8 * 16 + at / 2 % 2 * 8 + at % 2 * 4 + at / 4 % 2;
}

// Where a program's lines begin among its sums.
template <int LINES> __device__ __forceinline__ int first_sum() { return LINES % 8 ? blockIdx.x * LINES % 8 : 0; }
