// Weight norm of many layers in one call: w = ρ·v/‖v‖_p for every row (F11–F13), and its gradient.
//
// With x̂ = v/‖v‖ and u = ∂‖v‖/∂v: dv = (ρ/‖v‖)·(g − u·⟨g, x̂⟩) and dρ = ⟨g, x̂⟩. A row of zeros has no norm: w = 0,
// dv = ρ·g and dρ = 0. A row stays in the cache between its two passes, so forward reads v and writes w, and backward
// reads g and v and writes dv.
#include <cmath>
#include <initializer_list>
#include <limits>

#include "power.h"
#include "rows.h"

namespace nm {
namespace {

struct Forward {
  const void* v;
  void* w;
  const void* learned;  // ρ of each row, as v; null for one ρ, which is in `rho`
  void* norm;           // [rows], compute type
  const double* rho;
  int64_t rows, length;
};

struct Backward {
  const void* g;
  const void* v;
  void* dv;
  const void* learned;
  void* dlearned;
  const void* norm;
  const double* rho;
  int64_t rows, length;
};

enum Order : int64_t { kOne, kTwo, kMax, kAny };

template <class C>
NM_INLINE C largest_of(Vec<C> x) {
  C largest = 0;
  for (int i = 0; i < kWidth<C>; ++i) largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
  return largest;
}

// Σ f(v) over a row, in the compute type over blocks, then in double.
template <class C, class T, class Term>
NM_INLINE double sum_over(const T* v, int64_t n, Term&& term) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Vec<C> parts[kUnroll] = {};
    for_each_vector<C>(begin, std::min(n, begin + kBlock), [&](int64_t i, int k, auto lanes) NM_ALWAYS {
      parts[k] += term(lanes.load(v + i));
    });
    total += sum_of<C>(parts);
  }
  return total;
}

template <class T, int kOrder>
double norm_of(const T* v, int64_t n, double p) {
  using C = Compute<T>;
  if constexpr (kOrder == kOne) return sum_over<C>(v, n, [](Vec<C> x) NM_ALWAYS { return abs<C>(x); });
  if constexpr (kOrder == kTwo) {
    const double squares = sum_over<C>(v, n, [](Vec<C> x) NM_ALWAYS { return x * x; });
    if (in_range(squares)) return std::sqrt(squares);
  }
  Vec<C> top = {};
  Bits<C> bad = {};
  for_each_vector<C>(0, n, [&](int64_t i, int, auto lanes) NM_ALWAYS {
    const Vec<C> x = abs<C>(lanes.load(v + i));
    top = max<C>(x, top);
    bad |= x != x;
  });
  double largest = double(largest_of<C>(top));
  for (int i = 0; i < kWidth<C>; ++i)
    if (bad[i]) largest = std::numeric_limits<double>::quiet_NaN();
  if (kOrder == kMax || !(largest > 0) || largest > double(std::numeric_limits<C>::max())) return largest;
  // Powers leave the range of numbers long before the numbers do, so they are taken of v/max|v|.
  const Vec<C> unit = splat(C(largest));
  if constexpr (kOrder == kTwo)
    return largest * std::sqrt(sum_over<C>(v, n, [=](Vec<C> x) NM_ALWAYS { return (x / unit) * (x / unit); }));
  const C order = C(p);
  return largest * std::pow(sum_over<C>(v, n, [=](Vec<C> x) NM_ALWAYS { return power(abs<C>(x) / unit, order); }), 1 / p);
}

template <class T>
NM_INLINE double rho_of(const void* learned, const double* rho, int64_t r) {
  return learned ? double(load_one((const T*)learned + r)) : *rho;
}

template <class T, class W, int kOrder>
void backward_row(const W* g, const T* v, T* dv, T* drho, double rho, double norm, int64_t n, double p, bool past) {
  using C = Compute<T>;
  const double inverse = norm == 0 ? 1 : 1 / norm;
  const Vec<C> size = splat(C(norm)), over_norm = splat(C(inverse));
  double along = 0, ties = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Vec<C> products[kUnroll] = {}, equal[kUnroll] = {};
    for_each_vector<C>(begin, std::min(n, begin + kBlock), [&](int64_t i, int k, auto lanes) NM_ALWAYS {
      const Vec<C> x = lanes.load(v + i);
      products[k] = fma(lanes.load(g + i), x * over_norm, products[k]);
      if (kOrder == kMax) equal[k] += lanes.only(abs<C>(x) == size ? splat(C(1)) : Vec<C>{});
    });
    along += sum_of<C>(products);
    if (kOrder == kMax) ties += sum_of<C>(equal);
  }
  if (drho) store_one(drho, C(along));
  if (kOrder == kMax) along /= ties;
  const Vec<C> scale = splat(C(rho * inverse)), share = splat(C(-along));
  const C exponent = C(p - 1);
  for_each_vector<C>(0, n, [&](int64_t i, int, auto lanes) NM_ALWAYS {
    const Vec<C> x = lanes.load(v + i);
    Vec<C> slope;
    if constexpr (kOrder == kTwo) {
      slope = x * over_norm;
    } else {
      slope = x > 0 ? splat(C(1)) : (x < 0 ? splat(C(-1)) : Vec<C>{});
      if constexpr (kOrder == kMax) slope = abs<C>(x) == size ? slope : Vec<C>{};
      if constexpr (kOrder == kAny) slope *= power(abs<C>(x) * over_norm, exponent);
    }
    prefetch(v + n + i);  // the next row
    prefetch(g + n + i);
    store_output(dv + i, fma(slope, share, lanes.load(g + i)) * scale, lanes, past);
  });
}

// body(v's type, w's type, order): weights have v's dtype, or another one of those that are computed in float32.
template <class Body>
void with_types(int64_t v_dtype, int64_t w_dtype, int64_t order, Body&& body) {
  auto with_order = [&](auto v, auto w) {
    if (order == kOne) body(v, w, std::integral_constant<int, kOne>{});
    else if (order == kTwo) body(v, w, std::integral_constant<int, kTwo>{});
    else if (order == kMax) body(v, w, std::integral_constant<int, kMax>{});
    else body(v, w, std::integral_constant<int, kAny>{});
  };
  with_dtype(v_dtype, [&](auto v) {
    if (v_dtype == w_dtype) return with_order(v, v);
    if constexpr (!std::is_same_v<typename decltype(v)::type, double>) {
      if (w_dtype == kFloat32) with_order(v, Tag<float>{});
      else if (w_dtype == kBFloat16) with_order(v, Tag<bfloat16>{});
      else if (w_dtype == kFloat16) with_order(v, Tag<float16>{});
    }
  });
}

}  // namespace
}  // namespace nm

using namespace nm;

NM_EXPORT void nm_weight_norm(const Forward* tensors, const int64_t* starts, int64_t count, int64_t v_dtype,
                              int64_t w_dtype, int64_t order, double p) {
  with_types(v_dtype, w_dtype, order, [&](auto v_tag, auto w_tag, auto order_tag) {
    using T = typename decltype(v_tag)::type;
    using W = typename decltype(w_tag)::type;
    using C = Compute<T>;
    const bool past = leaves_cache(starts[count] * int64_t(sizeof(W)));
    for_each_row(tensors, starts, count, [&](const Forward& x, int64_t r) {
      const T* v = (const T*)x.v + r * x.length;
      W* w = (W*)x.w + r * x.length;
      // Rounded first, so that backward divides by the same number.
      const C norm = C(norm_of<T, order_tag.value>(v, x.length, p));
      ((C*)x.norm)[r] = norm;
      const Vec<C> scale = splat(C(rho_of<T>(x.learned, x.rho, r) / (norm == 0 ? 1 : double(norm))));
      for_each_vector<C>(0, x.length, [&](int64_t i, int, auto lanes) NM_ALWAYS {
        prefetch(v + x.length + i);  // the next row
        store_output(w + i, lanes.load(v + i) * scale, lanes, past);
      });
    });
  });
}

NM_EXPORT void nm_weight_norm_backward(const Backward* tensors, const int64_t* starts, int64_t count, int64_t v_dtype,
                                       int64_t w_dtype, int64_t order, double p) {
  with_types(v_dtype, w_dtype, order, [&](auto v_tag, auto w_tag, auto order_tag) {
    using T = typename decltype(v_tag)::type;
    using W = typename decltype(w_tag)::type;
    const bool past = leaves_cache(starts[count] * int64_t(sizeof(T)));
    for_each_row(tensors, starts, count, [&](const Backward& x, int64_t r) {
      const int64_t at = r * x.length;
      T* drho = x.dlearned ? (T*)x.dlearned + r : nullptr;
      backward_row<T, W, order_tag.value>((const W*)x.g + at, (const T*)x.v + at, (T*)x.dv + at, drho,
                                          rho_of<T>(x.learned, x.rho, r), double(((const Compute<T>*)x.norm)[r]),
                                          x.length, p, past);
    });
  });
}
