// A piece of packed weights, eight lines (weight rows) by 128 of k: its layout, and how to decode it; see
// packed_weights.py.
//
// Compiled with PIECE_BYTES and FIRST_EXPONENT, after hopper.cuh.

constexpr int PIECE_K = 128, UNIT_BYTES = 16 * PIECE_BYTES;  // a unit has 128 lines
constexpr int PLANE_BYTES = 512;                  // of three: 16 bytes per lane, a word for each 32 of k
constexpr int EXCEPTIONS_AT = 3 * PLANE_BYTES;    // their number, 16 bits, then 16 bits each
constexpr int BELOW = 47, ABOVE = 31, ZERO = 63;  // how far exceptions may lie outside; the code for zero
constexpr u32 PLACES = 0x87FF87FF;                // of a pair in its word; the other bits of three words are a fourth
constexpr u32 BASE = FIRST_EXPONENT << 7 | FIRST_EXPONENT << 23;
static_assert(PIECE_BYTES >= EXCEPTIONS_AT + 4 && FIRST_EXPONENT > BELOW, "packed_weights.py");

// Decodes four pairs of a line, each weight times the line's power of two, from a word of each plane. nothing: a zero
// that the compiler must not know: an instruction takes only one constant, and it would rematerialize the others each
// time.
__device__ __forceinline__ void decode_four(u32 (&pairs)[4], u32 first, u32 second, u32 third, u32 nothing) {
  const u32 places = PLACES + nothing;  // not ^, which the compiler would split up
  pairs[0] = first & places | BASE, pairs[1] = second & places | BASE, pairs[2] = third & places | BASE;
  u32 fourth = first >> 4 & 0x07800780 | BASE;
  fourth |= second >> 8 & 0x00780078;
  fourth |= third >> 11 & 0x00070007;
  pairs[3] = fourth | third << 1 & 0x80008000;
}
__device__ __forceinline__ u32 read_half(u32 from) {
  u16 x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}

// Turns a decoded pair into the right one if one of its two weights is an exception.
struct Exception {
  u32 its;     // 32 * (word * 4 + pair of the word) if the pair is this lane's; else no multiple of 32
  u32 addend;  // to the exponent; a multiple of its unit, so that the other weight does not change

  __device__ __forceinline__ Exception(u32 entry) : its(entry & 511 ^ threadIdx.x % 32) {
    const int shift = entry >> 10, far = shift < BELOW ? -1 - shift : shift - ABOVE;
    addend = (u32)(shift == ZERO ? -FIRST_EXPONENT : far) << 7 << (entry >> 5 & 16);
  }
  // In PTX, because the compiler generates three instructions per pair, not two.
  __device__ __forceinline__ void put(u32& pair, int which) const {
    if (its == 32 * which) asm("add.u32 %0, %0, %1;" : "+r"(pair) : "r"(addend));
  }
};
// A piece's number of exceptions (lower half) and the first of them (upper half); 0 if there are none.
__device__ __forceinline__ u32 read_tail(u32 piece) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(piece + EXCEPTIONS_AT) : "memory");
  return x;
}
// Loops over the exceptions of a piece whose tail is not 0; not unrolled, to keep the code small.
template <class F> __device__ __forceinline__ void each_exception(u32 piece, u32 tail, const F& put) {
  const u32 first = piece + EXCEPTIONS_AT + 2, end = first + 2 * (tail & 0xFFFF);
  u32 entry = tail >> 16, at = first;
#pragma unroll 1
  do {
    if (at != first) entry = read_half(at);
    put(entry);
    at += 2;
  } while (at != end);
}
