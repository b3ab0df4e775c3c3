// Packs a weight as packed_weights.py describes; its torch reference writes the same bytes. A program (thread block)
// has 128 lines (weight rows), a warp 16 of them in two eights: it counts their exponents, then writes piece after
// piece.
//
// Compiled once for all shapes, after packed_piece.cuh.

constexpr int WARPS = 8, LINES = 16 * WARPS, EXPONENTS = 256;

__device__ __forceinline__ u32 exponent(u32 bits) { return bits >> 7 & 255; }
__device__ __forceinline__ bool inside(u32 bits, int base) { return exponent(bits) - base < WINDOW; }
__device__ __forceinline__ u32 code(u32 bits, int base) {
  return bits & 0x807F | (inside(bits, base) ? exponent(bits) - base << 7 : 0);
}
__device__ __forceinline__ float scale_of(int base) {  // 2 ** (base - FIRST_EXPONENT)
  return base ? __uint_as_float((u32)(base - FIRST_EXPONENT + 127) << 23) : 0.f;
}

// The first of the WINDOW exponents that hold most of a line's weights; zeros, denormals, infinities and NaN do not
// count; 0 if none counts. Called by a whole warp; counts: the warp's own.
__device__ __forceinline__ int base_of(const u16* line, int k, u32* counts, u32* failed) {
  constexpr int EACH = EXPONENTS / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < EACH; i++) counts[lane * EACH + i] = 0;
  __syncwarp();
  u32 all = 0;
#pragma unroll 4
  for (int at = lane * 4; at < k; at += 128) {
    const uint2 four = *(const uint2*)(line + at);
    all |= (four.x | four.y) & 0x7FFF7FFF;
    atomicAdd(counts + exponent(four.x), 1u), atomicAdd(counts + exponent(four.x >> 16), 1u);
    atomicAdd(counts + exponent(four.y), 1u), atomicAdd(counts + exponent(four.y >> 16), 1u);
  }
  __syncwarp();
  u32 best = 0;  // number of weights << 8 | EXPONENTS - base: among equals the first base wins
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int base = lane * EACH + i;
    if (base == 0 || base + WINDOW > EXPONENTS - 1) continue;
    u32 number = 0;
#pragma unroll
    for (int e = 0; e < WINDOW; e++) number += counts[base + e];
    if (number) best = max(best, number << 8 | EXPONENTS - base);
  }
#pragma unroll
  for (int other = 1; other < 32; other *= 2) best = max(best, __shfl_xor_sync(~0u, best, other));
  if (!best && all) *failed = 1;
  return best ? EXPONENTS - (best & 255) : 0;
}

// Encodes how far an exponent is outside the window, as packed_piece.cuh decodes it; ``fits``: whether that is
// possible.
__device__ __forceinline__ u32 shift_of(u32 bits, int base, bool& fits) {
  if (!(bits & 0x7FFF)) return ZERO;
  const int its = exponent(bits), far = its - base;
  fits &= its != 0 && its != EXPONENTS - 1 && far >= -BELOW && far <= ABOVE;
  return (far < 0 ? -1 - far : ABOVE + far) & 63;
}

// Packs eight lines by 128 of k; ``from``: this lane's part of its line. Returns whether that is possible. Called by a
// whole warp.
__device__ __forceinline__ bool pack_piece(const u16* from, int base, unsigned char* piece) {
  const int lane = threadIdx.x % 32;
  u32 pairs[16], planes[3][4];
  int outside = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 codes[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u32 pair = *(const u32*)(from + i * 32 + r * 8);
      outside += !inside(pair & 0xFFFF, base) + !inside(pair >> 16, base);
      codes[r] = code(pair & 0xFFFF, base) | code(pair >> 16, base) << 16;
      pairs[4 * i + r] = pair;
    }
    planes[0][i] = codes[0] | codes[3] << 4 & 0x78007800;
    planes[1][i] = codes[1] | codes[3] << 8 & 0x78007800;
    planes[2][i] = codes[2] | codes[3] << 11 & 0x38003800 | codes[3] >> 1 & 0x40004000;
  }
#pragma unroll
  for (int p = 0; p < 3; p++)
    *(uint4*)(piece + p * PLANE_BYTES + lane * 16) = uint4{planes[p][0], planes[p][1], planes[p][2], planes[p][3]};

  int until = outside;  // inclusive prefix sum over lanes
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int others = __shfl_sync(~0u, until, lane - by & 31);
    if (lane >= by) until += others;
  }
  const int all = __shfl_sync(~0u, until, 31);
  u16* const exceptions = (u16*)(piece + EXCEPTIONS_AT);
  if (lane == 0) exceptions[0] = min(all, MOST_EXCEPTIONS);
  if (lane > all && lane <= MOST_EXCEPTIONS) exceptions[lane] = 0;
  bool fits = all <= MOST_EXCEPTIONS;
  if (outside == 0) return fits;
  int place = until - outside;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const u32 bits = pairs[i / 2] >> i % 2 * 16 & 0xFFFF;
    if (inside(bits, base)) continue;
    const u32 entry = shift_of(bits, base, fits) << 10 | i % 2 << 9 | i / 2 << 5 | lane;
    if (place < MOST_EXCEPTIONS) exceptions[1 + place] = entry;
    place++;
  }
  return fits;
}

// weight (lines, k); data: pieces as (lines / 128, k / 128, 16), or, by_lines, as (lines / 8, k / 128); scales
// (lines,), in data's order. failed: set to 1 if packing is impossible.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
pack_weights(const u16* weight, unsigned char* data, float* scales, u32* failed, int lines, int k, int gated,
             int by_lines) {
  extern __shared__ unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, steps = k / PIECE_K;
  const int apart = by_lines ? PIECE_BYTES : UNIT_BYTES;  // distance of pieces of the same lines
  u32* const counts = (u32*)memory + warp * EXPONENTS;
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    const int line = gated ? half * (lines / 2) + block * 64 + warp * 8 : block * LINES + warp * 16 + half * 8;
    const int which = warp * 2 + half;
    int its_base = 0;  // of this lane's line
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
      const int base = base_of(weight + (u64)(line + i) * k, k, counts, failed);
      if (lane == 0) scales[block * LINES + which * 8 + i] = scale_of(base);
      if (lane / 4 == i) its_base = base;
      __syncwarp();
    }
    const u16* from = weight + (u64)(line + lane / 4) * k + lane % 4 * 2;
    unsigned char* piece = data + (u64)block * steps * UNIT_BYTES + (by_lines ? which * steps : which) * PIECE_BYTES;
#pragma unroll 1
    for (int step = 0; step < steps; step++, from += PIECE_K, piece += apart)
      if (!pack_piece(from, its_base, piece)) *failed = 1;
  }
}
