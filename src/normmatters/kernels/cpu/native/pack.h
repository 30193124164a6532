// Packs: 16 elements in as many vectors as the instruction set needs, and sweeps over memory in packs.
//
// A pack has the same 16 lanes on every instruction set. So what is saved in bits, 16 at a time, has the same layout, and
// the sums of two instruction sets differ only in how many of them a sweep fills.
#pragma once

#include <cmath>

#include "common.h"

namespace nm {

constexpr int kPack = 16;

template <class C>
struct Pack {
  static constexpr int kVectors = kPack / kWidth<C>;
  Vec<C> v[kVectors];
};

#define NM_EACH(j) for (int j = 0; j < Pack<C>::kVectors; ++j)

// Which elements of a pack exist: all, or the first `count`.
struct Full {};
struct Partial {
  int64_t count;
};

template <class T, class C = Compute<T>>
NM_INLINE Pack<C> load_pack(const T* from, Full = {}) {
  Pack<C> x;
  NM_EACH(j) x.v[j] = load(from + j * kWidth<C>);
  return x;
}
template <class T, class C = Compute<T>>
NM_INLINE Pack<C> load_pack(const T* from, Partial part) {
  Pack<C> x;
  NM_EACH(j) {
    const int64_t count = part.count - j * kWidth<C>;
    x.v[j] = count <= 0 ? Vec<C>{} : load_first(from + j * kWidth<C>, count < kWidth<C> ? count : kWidth<C>);
  }
  return x;
}

template <class T, class C = Compute<T>>
NM_INLINE void store_pack(T* to, const Pack<C>& x, Full = {}) {
  NM_EACH(j) store(to + j * kWidth<C>, x.v[j]);
}
template <class T, class C = Compute<T>>
NM_INLINE void store_pack(T* to, const Pack<C>& x, Partial part) {
  NM_EACH(j) {
    const int64_t count = part.count - j * kWidth<C>;
    if (count > 0) store_first(to + j * kWidth<C>, x.v[j], count < kWidth<C> ? count : kWidth<C>);
  }
}

template <class C>
NM_INLINE Pack<C> loaded(Pack<C> x) {
  NM_EACH(j) x.v[j] = loaded(x.v[j]);
  return x;
}

// x, with 0 in the elements that do not exist.
template <class C>
NM_INLINE Pack<C> existing(const Pack<C>& x, Full) {
  return x;
}
template <class C>
NM_INLINE Pack<C> existing(Pack<C> x, Partial part) {
  NM_EACH(j) x.v[j] = first<C>(part.count - j * kWidth<C>) ? x.v[j] : Vec<C>{};
  return x;
}

template <class C>
NM_INLINE Pack<C> splat_pack(C value) {
  Pack<C> x;
  NM_EACH(j) x.v[j] = splat<C>(value);
  return x;
}
template <class C>
NM_INLINE Pack<C> operator+(Pack<C> a, const Pack<C>& b) {
  NM_EACH(j) a.v[j] += b.v[j];
  return a;
}
template <class C>
NM_INLINE Pack<C> operator-(Pack<C> a, const Pack<C>& b) {
  NM_EACH(j) a.v[j] -= b.v[j];
  return a;
}
template <class C>
NM_INLINE Pack<C> operator*(Pack<C> a, const Pack<C>& b) {
  NM_EACH(j) a.v[j] *= b.v[j];
  return a;
}
template <class C>
NM_INLINE Pack<C> fma(Pack<C> a, const Pack<C>& b, const Pack<C>& c) {
  NM_EACH(j) a.v[j] = fma(a.v[j], b.v[j], c.v[j]);
  return a;
}
template <class C>
NM_INLINE Pack<C> abs(Pack<C> a) {
  NM_EACH(j) a.v[j] = abs<C>(a.v[j]);
  return a;
}
// The larger and the smaller one; `b` where `a` is NaN.
template <class C>
NM_INLINE Pack<C> max(Pack<C> a, const Pack<C>& b) {
  NM_EACH(j) a.v[j] = max<C>(a.v[j], b.v[j]);
  return a;
}
template <class C>
NM_INLINE Pack<C> min(Pack<C> a, const Pack<C>& b) {
  NM_EACH(j) a.v[j] = min<C>(a.v[j], b.v[j]);
  return a;
}
template <class C>
NM_INLINE Pack<C> relu_gate(Pack<C> x, const Pack<C>& gate) {
  NM_EACH(j) x.v[j] = relu_gate<C>(x.v[j], gate.v[j]);
  return x;
}
// yes where a ≥ b, else no.
template <class C>
NM_INLINE Pack<C> where_at_least(const Pack<C>& a, const Pack<C>& b, const Pack<C>& yes, Pack<C> no) {
  NM_EACH(j) no.v[j] = a.v[j] >= b.v[j] ? yes.v[j] : no.v[j];
  return no;
}

// ---- bits: one per element of a pack --------------------------------------------------------------------------------

// The sign bits of a vector of integers.
template <class C>
NM_INLINE uint32_t vector_bits(Bits<C> mask) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == 4) return _mm512_movepi32_mask((__m512i)mask);
  else return _mm512_movepi64_mask((__m512i)mask);
#elif defined(__AVX2__)
  if constexpr (sizeof(C) == 4) return uint32_t(_mm256_movemask_ps((__m256)mask));
  else return uint32_t(_mm256_movemask_pd((__m256d)mask));
#elif defined(__x86_64__)
  if constexpr (sizeof(C) == 4) return uint32_t(_mm_movemask_ps((__m128)mask));
  else return uint32_t(_mm_movemask_pd((__m128d)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kWidth<C>; ++i) bits |= uint32_t(mask[i] < 0) << i;
  return bits;
#endif
}

// Bit i is set where element i is greater than 0, or NaN: where a ReLU lets a gradient through.
template <class C>
NM_INLINE uint16_t bits_open(const Pack<C>& x) {
  uint32_t bits = 0;
  NM_EACH(j) bits |= vector_bits<C>(~(x.v[j] <= C(0))) << (j * kWidth<C>);
  return uint16_t(bits);
}
// Bit i is set where element i is not below that of `b`.
template <class C>
NM_INLINE uint16_t bits_at_least(const Pack<C>& a, const Pack<C>& b) {
  uint32_t bits = 0;
  NM_EACH(j) bits |= vector_bits<C>(a.v[j] >= b.v[j]) << (j * kWidth<C>);
  return uint16_t(bits);
}

// yes where the bit is set, else no.
template <class C>
NM_INLINE Pack<C> choose(uint16_t bits, Pack<C> yes, const Pack<C>& no) {
#if defined(__AVX512F__)
  NM_EACH(j) {
    if constexpr (sizeof(C) == 4)
      yes.v[j] = (Vec<C>)_mm512_mask_blend_ps(__mmask16(bits), (__m512)no.v[j], (__m512)yes.v[j]);
    else
      yes.v[j] = (Vec<C>)_mm512_mask_blend_pd(__mmask8(bits >> (8 * j)), (__m512d)no.v[j], (__m512d)yes.v[j]);
  }
#else
  using I = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>;
  NM_EACH(j) {
    Bits<C> lane;
    for (int i = 0; i < kWidth<C>; ++i) lane[i] = I(1) << (i + j * kWidth<C>);
    yes.v[j] = (lane & I(bits)) != 0 ? yes.v[j] : no.v[j];
  }
#endif
  return yes;
}

// ---- sums: float for a while, then added to double ------------------------------------------------------------------

template <class C>
NM_INLINE void add_to(double* lanes, const Pack<C>& x) {
  C buffer[kPack];
  NM_EACH(j) store(buffer + j * kWidth<C>, x.v[j]);
  for (int i = 0; i < kPack; ++i) lanes[i] += double(buffer[i]);
}
#if defined(__AVX512F__)
NM_INLINE void add_to(double* lanes, const Pack<float>& x) {
  const __m512 v = (__m512)x.v[0];
  const __m256 low = _mm512_castps512_ps256(v), high = _mm512_extractf32x8_ps(v, 1);
  _mm512_storeu_pd(lanes, _mm512_add_pd(_mm512_loadu_pd(lanes), _mm512_cvtps_pd(low)));
  _mm512_storeu_pd(lanes + 8, _mm512_add_pd(_mm512_loadu_pd(lanes + 8), _mm512_cvtps_pd(high)));
}
#endif

inline double sum_lanes(const double* lanes) {
  double total = 0;
  for (int i = 0; i < kPack; ++i) total += lanes[i];
  return total;
}

// f(i, u, part) for each pack of `count` elements; i is where it begins. u is 0, 1, 2 or 3 (a constant), so
// that four packs in a row can use four sums, which the processor adds at the same time.
template <class C, class F>
NM_INLINE void sweep(int64_t count, F&& f) {
  int64_t i = 0;
  if constexpr (Pack<C>::kVectors == 1) {  // a pack of more vectors has several sums by itself
    for (; i + 4 * kPack <= count; i += 4 * kPack) {
      f(i, std::integral_constant<int, 0>{}, Full{});
      f(i + kPack, std::integral_constant<int, 1>{}, Full{});
      f(i + 2 * kPack, std::integral_constant<int, 2>{}, Full{});
      f(i + 3 * kPack, std::integral_constant<int, 3>{}, Full{});
    }
  }
  for (; i + kPack <= count; i += kPack) f(i, std::integral_constant<int, 0>{}, Full{});
  if (i < count) f(i, std::integral_constant<int, 1>{}, Partial{count - i});
}

}  // namespace nm
