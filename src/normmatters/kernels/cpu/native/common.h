// What every kernel here shares: vectors of one instruction set, dtypes, and PyTorch's threads.
//
// A kernel is written once, on vectors of `kVectorBytes`. CMake compiles it once for each instruction set into a library
// of its own; the loader (../__init__.py) opens the best one that the processor can run. Compilation contracts nothing
// (-ffp-contract=off): `fma` is written where it is meant, so that two passes that compute the same number agree in
// every bit. On the baseline, which has no such instruction, `fma` is a multiplication and an addition.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define NM_EXPORT extern "C" __attribute__((visibility("default")))
#define NM_INLINE inline __attribute__((always_inline))
#define NM_ALWAYS __attribute__((always_inline))  // of a lambda

namespace nm {

// ---- dtypes ---------------------------------------------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// The numbers that Python passes (DTYPES in ../__init__.py).
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// What a dtype is computed in.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
struct Tag {
  using type = T;
};

// body(Tag<T>{}) for the type that `dtype` names.
template <class Body>
NM_INLINE void with_dtype(int64_t dtype, Body&& body) {
  switch (dtype) {
    case kFloat32: return body(Tag<float>{});
    case kBFloat16: return body(Tag<bfloat16>{});
    case kFloat16: return body(Tag<float16>{});
    default: return body(Tag<double>{});
  }
}

// ---- vectors --------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

// A vector of the compute type C (float or double), and of the integers that comparisons of it give (-1 or 0).
// Operators (+ - * / < ?:) work element by element; GCC's and Clang's vector extension.
template <class C>
constexpr int kWidth = kVectorBytes / int(sizeof(C));
template <class C>
using Vec = typename VectorOf<C, kWidth<C>>::type;
template <class C>
using Bits = typename VectorOf<std::conditional_t<sizeof(C) == 4, int32_t, int64_t>, kWidth<C>>::type;

template <class To, class From>
NM_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class C>
NM_INLINE Vec<C> splat(C value) {
  return value - Vec<C>{};
}

// a·b + c, rounded once where the instruction set can.
NM_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
NM_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__ARM_NEON)
  return vfmaq_f64(c, a, b);
#else
  return a * b + c;
#endif
}

template <class C>
NM_INLINE Vec<C> abs(Vec<C> x) {
  constexpr auto sign = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>(1) << (8 * sizeof(C) - 1);
  return bit_cast<Vec<C>>(bit_cast<Bits<C>>(x) & ~sign);
}

// The larger one; NaN if `b` is NaN, `b` if `a` is.
template <class C>
NM_INLINE Vec<C> max(Vec<C> a, Vec<C> b) {
  return a > b ? a : b;
}
template <class C>
NM_INLINE Vec<C> min(Vec<C> a, Vec<C> b) {
  return a < b ? a : b;
}

// x, or 0 where `gate` is 0 or less. Where `gate` is NaN x passes, as in PyTorch's ReLU and its gradient.
template <class C>
NM_INLINE Vec<C> relu_gate(Vec<C> x, Vec<C> gate) {
  return gate <= C(0) ? Vec<C>{} : x;
}

// The sum of a vector's elements, in double.
template <class C>
NM_INLINE double sum(Vec<C> x) {
  double total = 0;
  for (int i = 0; i < kWidth<C>; ++i) total += double(x[i]);
  return total;
}

// ---- loads and stores: any dtype in memory, the compute type in registers -------------------------------------------

template <class C>
using Half = typename VectorOf<uint16_t, kWidth<C>>::type;
using Words = typename VectorOf<uint32_t, kWidth<float>>::type;

NM_INLINE Vec<float> widen(Half<float> h, bfloat16) {
#if defined(__AVX512F__)
  // One instruction puts each number above 16 zero bits. GCC makes several of __builtin_convertvector.
  const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4,
                                         4, 3, 3, 2, 2, 1, 1, 0, 0);
  return (Vec<float>)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, twice, _mm512_castsi256_si512((__m256i)h));
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return bit_cast<Vec<float>>(__builtin_convertvector(h, Words) << 16);
#endif
}

NM_INLINE Half<float> narrow(Vec<float> x, bfloat16) {
  Words bits = bit_cast<Words>(x);
  Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  Words nan = (bits >> 16) | 0x40u;
  Words number = x == x ? rounded : nan;
#if defined(__AVX512F__)
  return (Half<float>)_mm512_cvtepi32_epi16((__m512i)number);
#else
  return __builtin_convertvector(number, Half<float>);
#endif
}

#if defined(__AVX2__) || defined(__AVX512F__)
#define NM_CONVERT NM_INLINE
#else
#define NM_CONVERT inline __attribute__((noinline))  // long without an instruction for it
#endif

NM_CONVERT Vec<float> widen(Half<float> h, float16) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)h);
#else
  Words bits = __builtin_convertvector(h, Words);
  Words magnitude = (bits & 0x7fffu) << 13;
  // 2^112 lifts the exponent's bias from 15 to 127, of subnormal numbers too.
  Vec<float> value = bit_cast<Vec<float>>(magnitude) * bit_cast<float>(0x77800000u);
  Words result = bit_cast<Words>(value);
  result = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000u) : result;  // infinity and NaN
  return bit_cast<Vec<float>>(result | ((bits & 0x8000u) << 16));
#endif
}

NM_CONVERT Half<float> narrow(Vec<float> x, float16) {
#if defined(__AVX512F__)
  return (Half<float>)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Half<float>)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  Words bits = bit_cast<Words>(x), magnitude = bits & 0x7fffffffu;
  Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 1/2 lets the hardware round a subnormal number: its last bit is then 2^-24.
  Words subnormal = bit_cast<Words>(bit_cast<Vec<float>>(magnitude) + 0.5f) - 0x3f000000u;
  Words half = magnitude < (113u << 23) ? subnormal : normal;
  half = half > 0x7c00u ? Words{} + 0x7c00u : half;
  half = magnitude >= (143u << 23) ? Words{} + 0x7c00u : half;
  half = magnitude > 0x7f800000u ? ((magnitude >> 13) & 0x3ffu) | 0x7e00u : half;
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000u), Half<float>);
#endif
}

// A vector at any address. To the compiler it aliases its elements' type only (a memcpy would alias everything, and
// every pointer and size would be read again after each store).
template <class V, class Element>
struct Unaligned {
  typedef Element type __attribute__((vector_size(sizeof(V)), aligned(alignof(Element))));
};

// One vector from memory.
template <class T>
NM_INLINE Vec<Compute<T>> load(const T* from) {
  if constexpr (sizeof(T) == sizeof(Compute<T>)) {
    return *reinterpret_cast<const typename Unaligned<Vec<T>, T>::type*>(from);
  } else {
    return widen(*reinterpret_cast<const typename Unaligned<Half<float>, uint16_t>::type*>(from), T{});
  }
}

// x, computed before what follows: else the compiler may make a load wait for the mask that is applied to it.
template <class V>
NM_INLINE V loaded(V x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#endif
  return x;
}

template <class T>
NM_INLINE void store(T* to, Vec<Compute<T>> x) {
  if constexpr (sizeof(T) == sizeof(Compute<T>)) {
    *reinterpret_cast<typename Unaligned<Vec<T>, T>::type*>(to) = x;
  } else {
    *reinterpret_cast<typename Unaligned<Half<float>, uint16_t>::type*>(to) = narrow(x, T{});
  }
}

// The first `count` elements, fewer than a vector has; 0 after them. Nothing beyond them is touched.
template <class T>
NM_INLINE Vec<Compute<T>> load_first(const T* from, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
  } else if constexpr (std::is_same_v<T, double>) {
    return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), from);
  } else {
    return widen((Half<float>)_mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), from), T{});
  }
#else
  T buffer[kWidth<Compute<T>>] = {};
  std::memcpy(buffer, from, size_t(count) * sizeof(T));
  return load(buffer);
#endif
}

template <class T>
NM_INLINE void store_first(T* to, Vec<Compute<T>> x, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)x);
  } else if constexpr (std::is_same_v<T, double>) {
    _mm512_mask_storeu_pd(to, __mmask8((1u << count) - 1), (__m512d)x);
  } else {
    _mm256_mask_storeu_epi16(to, __mmask16((1u << count) - 1), (__m256i)narrow(x, T{}));
  }
#else
  T buffer[kWidth<Compute<T>>];
  store(buffer, x);
  std::memcpy(to, buffer, size_t(count) * sizeof(T));
#endif
}

// -1 (all bits) in the first `count` elements, 0 after them.
template <class C>
NM_INLINE Bits<C> first(int64_t count) {
  Bits<C> index;
  for (int i = 0; i < kWidth<C>; ++i) index[i] = i;
  return index < std::conditional_t<sizeof(C) == 4, int32_t, int64_t>(count);
}

// One number from memory.
template <class T>
NM_INLINE Compute<T> load_one(const T* from) {
  if constexpr (sizeof(T) == sizeof(Compute<T>)) {
    return *from;
  } else {
    return load_first(from, 1)[0];
  }
}

template <class T>
NM_INLINE void store_one(T* to, Compute<T> x) {
  if constexpr (sizeof(T) == sizeof(Compute<T>)) {
    *to = x;
  } else {
    store_first(to, splat<float>(x), 1);
  }
}

// ---- memory ---------------------------------------------------------------------------------------------------------

// Whether an output of so many bytes, and an input of as many, leave the cache before the output is read.
NM_INLINE bool leaves_cache(int64_t bytes) { return bytes >= (16 << 20); }

template <class T>
NM_INLINE bool is_aligned(const T* address) {
  return reinterpret_cast<uintptr_t>(address) % (kWidth<Compute<T>> * sizeof(T)) == 0;
}

// store(to, x) past the cache, so that what is replaced need not be read. `to` must be aligned to what is stored.
// `parallel_for` sees to it that other threads read it afterwards.
template <class T>
NM_INLINE void store_past_cache(T* to, Vec<Compute<T>> x) {
#if defined(__x86_64__)
  constexpr int kBytes = kWidth<Compute<T>> * int(sizeof(T));
  if constexpr (kBytes >= 16) {
    const auto bits = [&]() NM_ALWAYS {
      if constexpr (sizeof(T) == sizeof(Compute<T>)) return x;
      else return narrow(x, T{});
    }();
#if defined(__AVX512F__)
    if constexpr (kBytes == 64) return _mm512_stream_si512((__m512i*)to, (__m512i)bits);
#endif
#if defined(__AVX2__)
    if constexpr (kBytes == 32) return _mm256_stream_si256((__m256i*)to, (__m256i)bits);
#endif
    if constexpr (kBytes == 16) return _mm_stream_si128((__m128i*)to, (__m128i)bits);
  }
#endif
  store(to, x);
}

// Before an output is written: where its pages are not there yet, let them be large ones. A page fault for each 4 KiB
// costs several times as much as writing them.
void prefer_large_pages(const void* begin, int64_t bytes);

// ---- threads --------------------------------------------------------------------------------------------------------

// PyTorch's own, by pointers that the loader hands over: its stable C functions. They never throw here.
using ParallelBody = void (*)(int64_t begin, int64_t end, void* context);
extern int32_t (*torch_parallel_for)(int64_t begin, int64_t end, int64_t grain, ParallelBody body, void* context);
extern int32_t (*torch_get_num_threads)(uint32_t* count);

inline int64_t num_threads() {
  uint32_t count = 1;
  torch_get_num_threads(&count);
  return count;
}

// body(task) for each task in [0, tasks), on PyTorch's threads. What a task computes must depend on its number alone:
// then results are the same in every run. `grain`: a thread gets at least this many tasks.
template <class Body>
void parallel_for(int64_t tasks, Body&& body, int64_t grain = 1) {
  using Plain = std::remove_reference_t<Body>;
  const ParallelBody run = [](int64_t begin, int64_t end, void* context) {
    for (int64_t task = begin; task < end; ++task) (*static_cast<Plain*>(context))(task);
#if defined(__x86_64__)
    _mm_sfence();  // what was stored past the cache is there for other threads
#endif
  };
  void* context = const_cast<void*>(static_cast<const void*>(&body));
  if (tasks <= grain) run(0, tasks, context);
  else torch_parallel_for(0, tasks, grain, run, context);
}

// The bounds of part `i` of `parts` nearly equal parts of [0, n).
NM_INLINE int64_t part_begin(int64_t n, int64_t i, int64_t parts) { return n / parts * i + (i < n % parts ? i : n % parts); }

}  // namespace nm
