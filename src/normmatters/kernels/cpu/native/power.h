// x^p of non-negative numbers, for Lp: by 2^(p·log2 x) in float32 (a few units in the last place), by libm in double.
#pragma once

#include "pack.h"

namespace nm {

NM_INLINE Vec<float> power(Vec<float> x, float p) {
  using I = Bits<float>;
  const I bits = bit_cast<I>(x);
  // x = 2^e·m with m in [√½, √2)
  const I shifted = bits - 0x3f3504f3;
  const I exponent = shifted >> 23;
  const Vec<float> m = bit_cast<Vec<float>>(bits - (exponent << 23));
  const Vec<float> f = m - 1.0f;
  // log(1 + f), Cephes' polynomial
  Vec<float> log = splat<float>(7.0376836292e-2f);
  for (float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                     2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    log = fma(log, f, splat<float>(next));
  const Vec<float> f2 = f * f;
  log = fma(log * f, f2, f2 * -0.5f) + f;
  // p·log2 x = whole + part: p·e in two pieces, so that a large exponent does not take digits
  const Vec<float> e = __builtin_convertvector(exponent, Vec<float>);
  const Vec<float> pe = e * p, pe_rest = fma(e, splat<float>(p), -pe);
  const Vec<float> small = fma(log * 1.44269504088896341f, splat<float>(p), pe_rest);
  Vec<float> whole = pe + small;
  whole = whole > 200.0f ? splat<float>(200.0f) : whole < -200.0f ? splat<float>(-200.0f) : whole;
  const I rounded = __builtin_convertvector(whole + (whole < 0.0f ? splat<float>(-0.5f) : splat<float>(0.5f)), I);
  whole = __builtin_convertvector(rounded, Vec<float>);
  const Vec<float> part = (pe - whole) + small;
  // 2^part, |part| ≤ ½
  Vec<float> exp = splat<float>(1.535336188319500e-4f);
  for (float next : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                     6.931472028550421e-1f, 1.0f})
    exp = fma(exp, part, splat<float>(next));
  // Two factors: 2^-126 and below are no normal numbers.
  const I half = rounded >> 1;
  exp = exp * bit_cast<Vec<float>>((half + 127) << 23) * bit_cast<Vec<float>>((rounded - half + 127) << 23);
  exp = x < 1.17549435e-38f ? Vec<float>{} : exp;
  return x <= 3.4028234e38f ? exp : x;  // infinity and NaN
}

NM_INLINE Vec<double> power(Vec<double> x, double p) {
  for (int i = 0; i < kWidth<double>; ++i) x[i] = std::pow(x[i], p);
  return x;
}

template <class C>
__attribute__((noinline)) Pack<C> power(Pack<C> x, C p) {
  NM_EACH(j) x.v[j] = power(x.v[j], p);
  return x;
}

}  // namespace nm
