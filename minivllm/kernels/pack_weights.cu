// Packs a weight as packed_weights.py says, whose torch code writes the same bytes. A program has 128 lines: its warps
// count the exponents of 16 of them each, then all go through units, 128 of k. Of a unit a thread has what it has where
// that is multiplied: 16 pairs of each of two tiles.
//
// Compiled for any shape, behind hopper.cuh.

constexpr int WARPS = 8, LINES = 16 * WARPS, TILES = 4, WORD_BYTES = 2048, TILE_BYTES = 3 * WORD_BYTES;
constexpr int TAIL_WORDS = MOST_EXCEPTIONS + 2, EXPONENTS = 256;

__device__ __forceinline__ u32 exponent(u32 bits) { return bits >> 7 & 255; }
__device__ __forceinline__ bool inside(u32 bits, int base) { return exponent(bits) - base < WINDOW; }
__device__ __forceinline__ u32 code(u32 bits, int base) {
  return inside(bits, base) ? bits & 0x807F | exponent(bits) - base << 7 : 0;
}
__device__ __forceinline__ float scale_of(int base) {  // 2 ** (base - FIRST_EXPONENT)
  return base ? __uint_as_float((u32)(base - FIRST_EXPONENT + 127) << 23) : 0.f;
}

// The first of the WINDOW exponents that most of a line's weights have, zeros, denormals, infinities and NaN none; 0 if
// no weight has any. All of a warp; counts: its own.
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
  u32 best = 0;  // a number of weights, and EXPONENTS less the base: of as many the first
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

// weight (lines, k); data (units, UNIT_BYTES); scales (lines,), as units have them. failed: becomes 1 if that cannot
// be.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
pack_weights(const u16* weight, unsigned char* data, float* scales, u32* failed, int lines, int k, int gated) {
  extern __shared__ unsigned char memory[];
  __shared__ int bases[LINES];
  __shared__ u32 tail[TAIL_WORDS];
  __shared__ u32 of_warps[WARPS];  // exceptions of the first tile, and of the second in the upper half
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = warp / 4, block = blockIdx.x;
  u32* const counts = (u32*)memory + warp * EXPONENTS;
  const int first_line = gated ? block * 64 + warp * 8 : block * LINES + warp * 16;
  const int apart = gated ? lines / 2 : 8;  // lines from a warp's first eight to the others
#pragma unroll 1
  for (int i = 0; i < 16; i++) {
    const u16* line = weight + (u64)(first_line + i / 8 * apart + i % 8) * k;
    const int base = base_of(line, k, counts, failed);
    if (lane == 0) bases[warp * 16 + i] = base, scales[block * LINES + warp * 16 + i] = scale_of(base);
    __syncwarp();
  }
  const int of_lines[2] = {bases[warp * 16 + lane / 4], bases[warp * 16 + 8 + lane / 4]};

#pragma unroll 1
  for (int step = 0; step < k / 128; step++) {
    const u16* from = weight + (u64)(first_line + lane / 4) * k + step * 128 + lane % 4 * 2;
    unsigned char* unit = data + ((u64)block * (k / 128) + step) * UNIT_BYTES;
    if (thread < TAIL_WORDS) tail[thread] = 0;

    u32 pairs[2][16], outside[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < 2; t++) {
      u32 words[3][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 codes[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const u32 pair = *(const u32*)(from + (u64)(r % 2 * apart) * k + t * 64 + i * 16 + r / 2 * 8);
          const int base = of_lines[r % 2];
          outside[t] += !inside(pair & 0xFFFF, base) + !inside(pair >> 16, base);
          codes[r] = code(pair & 0xFFFF, base) | code(pair >> 16, base) << 16;
          pairs[t][4 * i + r] = pair;
        }
        words[0][i] = codes[0] | codes[3] << 4 & 0x78007800;
        words[1][i] = codes[1] | codes[3] << 8 & 0x78007800;
        words[2][i] = codes[2] | codes[3] << 11 & 0x38003800 | codes[3] >> 1 & 0x40004000;
      }
#pragma unroll
      for (int w = 0; w < 3; w++)
        *(uint4*)(unit + (group * 2 + t) * TILE_BYTES + w * WORD_BYTES + thread % 128 * 16) =
            uint4{words[w][0], words[w][1], words[w][2], words[w][3]};
    }

    u32 until = outside[0] | outside[1] << 16;  // this lane's, of its warp's
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const u32 others = __shfl_sync(~0u, until, lane - by & 31);
      if (lane >= by) until += others;
    }
    if (lane == 31) of_warps[warp] = until;
    __syncthreads();
    int begin = 0;
    for (int w = 0; w < warp; w++) begin += (of_warps[w] & 0xFFFF) + (of_warps[w] >> 16);
    const int first = of_warps[warp] & 0xFFFF, end = begin + first + (of_warps[warp] >> 16);
    if (lane == 0) ((unsigned char*)tail)[warp] = min(end, MOST_EXCEPTIONS);
    bool lost = end > MOST_EXCEPTIONS;
#pragma unroll
    for (int t = 0; t < 2; t++) {
      int place = t ? begin + first + (until >> 16) - outside[1] : begin + (until & 0xFFFF) - outside[0];
      if (outside[t] == 0) continue;
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const u32 bits = pairs[t][i / 2] >> i % 2 * 16 & 0xFFFF;
        const int base = of_lines[i / 2 % 2];
        if (inside(bits, base)) continue;
        const float scale = scale_of(base), its = __uint_as_float(bits << 16);
        const u32 moved = pack(its / scale, 0.f);
        lost |= !(low(moved) * scale == its);
        const u32 entry = moved << 16 | i % 2 << 10 | t << 9 | i / 2 << 5 | lane;
        if (place < MOST_EXCEPTIONS) tail[2 + place] = entry;
        place++;
      }
    }
    if (lost) *failed = 1;
    __syncthreads();
    if (thread < TAIL_WORDS) ((u32*)(unit + TILES * TILE_BYTES))[thread] = tail[thread];
    __syncthreads();
  }
}
