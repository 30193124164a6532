// Layer norm and RMS norm in L1, L2 and Lp, forward and backward.
//
// A row is read from memory once per pass of the model: what is computed of it first (its mean, its deviation, the sums
// that its gradient needs) leaves it in the cache for the rest. So the forward pass reads x and writes y, and the
// backward pass reads g and x and writes dx. The gradients of weight and bias are summed on the way: in the compute type
// over a few rows, then in double, in an order that depends on the shape alone.
#include <cmath>
#include <initializer_list>
#include <limits>

#include "power.h"
#include "rows.h"

namespace nm {
namespace {

enum Kind : int64_t { kL1, kL2, kLp };

// Rows whose parts of the parameters' gradients are summed in the compute type.
constexpr int64_t kRowsInFloat = 128;
// Rows that the last pass of the backward takes together: it loads and stores the parameters' sums once for them.
constexpr int64_t kTogether = 4;

// What the backward pass needs of a row. The mean is high + low: at 1e6 ± 1 a float32 alone would be off by 0.03.
template <class C>
struct Row {
  C high, low, inverse, slope, statistic;
};

template <class C>
struct Shape {
  int64_t rows, n;
  double eps, constant, p;
  const C *weight, *bias;  // null for none
};

// x − mean
template <class C>
NM_INLINE Vec<C> centered(Vec<C> x, Vec<C> high, Vec<C> low) {
  return (x - high) - low;
}

// |y|^p, what the statistic is the mean of.
template <int kKind, class C>
NM_INLINE Vec<C> power_of(Vec<C> y, double p, Vec<C> unit) {
  if constexpr (kKind == kL1) return abs<C>(y);
  else if constexpr (kKind == kL2) return y * y;
  else return power(abs<C>(y) * unit, C(p));
}

template <class T, int kKind, bool kCentered>
Row<Compute<T>> statistics(const T* x, const Shape<Compute<T>>& shape) {
  using C = Compute<T>;
  const int64_t n = shape.n;
  double mean = 0;
  if (kCentered) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      Vec<C> sums[kUnroll] = {};
      for_each_vector<C>(begin, std::min(n, begin + kBlock),
                         [&](int64_t i, int k, auto lanes) NM_ALWAYS { sums[k] += lanes.load(x + i); });
      mean += sum_of<C>(sums);
    }
    mean /= double(n);
  }
  double total = 0, unit = 1, m = 0;
  Row<C> row{};
  for (int round = 0; round < 3; ++round) {
    row.high = C(mean);
    row.low = C(mean - double(row.high));
    const Vec<C> high = splat(row.high), low = splat(row.low);
    if (kKind == kLp) {  // powers of x/max|x| cannot overflow
      Vec<C> top = {};
      for_each_vector<C>(0, n, [&](int64_t i, int, auto lanes) NM_ALWAYS {
        top = max<C>(top, lanes.only(abs<C>(centered<C>(lanes.load(x + i), high, low))));
      });
      C largest = 0;
      for (int i = 0; i < kWidth<C>; ++i) largest = top[i] > largest || top[i] != top[i] ? top[i] : largest;
      unit = largest > 0 ? double(largest) : 1;  // of infinity all become NaN, as in the plain equation
    }
    const Vec<C> inverse_unit = splat(C(1 / unit));
    double offset = 0;
    total = 0;
    // The first round takes the mean without its low part, which then shows in the offset.
    auto measure = [&](auto first_round) NM_ALWAYS {
      for (int64_t begin = 0; begin < n; begin += kBlock) {
        Vec<C> powers[kUnroll] = {}, offsets[kUnroll] = {};
        for_each_vector<C>(begin, std::min(n, begin + kBlock), [&](int64_t i, int k, auto lanes) NM_ALWAYS {
          const Vec<C> value = lanes.load(x + i);
          const Vec<C> y = !kCentered ? value : lanes.only(first_round.value ? value - high : centered<C>(value, high, low));
          powers[k] = fma(power_of<kKind, C>(y, shape.p, inverse_unit), splat(C(1)), powers[k]);
          if (kCentered) offsets[k] += y;
        });
        total += sum_of<C>(powers);
        if (kCentered) offset += sum_of<C>(offsets);
      }
    };
    if (round == 0) {
      measure(std::true_type{});
      mean = double(row.high);
    } else {
      measure(std::false_type{});
    }
    total /= double(n);
    offset /= double(n);
    m = kKind == kL1 ? total : kKind == kL2 ? std::sqrt(total) : unit * std::pow(total, 1 / shape.p);
    // The first mean is rounded as sums of large numbers are; once it is nearly right, its error shows in the offset.
    mean += offset;
    if (!kCentered || !(std::abs(offset) > std::ldexp(m, -22))) break;
  }
  if (kCentered) {
    row.high = C(mean);
    row.low = C(mean - double(row.high));
  }
  const double s = shape.constant * m, root = std::sqrt(s * s + shape.eps);
  row.inverse = C(1 / root);
  // (s/√(s²+ε))·C, for L2 C²: what the deviation's own gradient is multiplied by.
  row.slope = C(shape.constant * (kKind == kL2 ? shape.constant : s / root));
  row.statistic = C(m > 1e-37 ? 1 / m : 0);
  return row;
}

template <class T, int kKind, bool kCentered>
void forward_row(const T* x, T* out, const Shape<Compute<T>>& shape, Row<Compute<T>>& saved, bool past) {
  using C = Compute<T>;
  saved = statistics<T, kKind, kCentered>(x, shape);
  const Vec<C> high = splat(saved.high), inverse = splat(saved.inverse), shift = splat(-saved.low * saved.inverse);
  auto write = [&](auto affine) NM_ALWAYS {
    for_each_vector<C>(0, shape.n, [&](int64_t i, int, auto lanes) NM_ALWAYS {
      const Vec<C> value = lanes.load(x + i);
      store_output(out + i, affine(i, kCentered ? fma(value - high, inverse, shift) : value * inverse, lanes), lanes, past);
    });
  };
  const C *weight = shape.weight, *bias = shape.bias;
  if (weight && bias)
    write([=](int64_t i, Vec<C> y, auto lanes) NM_ALWAYS { return fma(y, lanes.load(weight + i), lanes.load(bias + i)); });
  else if (weight)
    write([=](int64_t i, Vec<C> y, auto lanes) NM_ALWAYS { return y * lanes.load(weight + i); });
  else if (bias)
    write([=](int64_t i, Vec<C> y, auto lanes) NM_ALWAYS { return y + lanes.load(bias + i); });
  else
    write([](int64_t, Vec<C> y, auto) NM_ALWAYS { return y; });
}

// x with the sign of y, and 0 where y is 0.
template <class C>
NM_INLINE Vec<C> with_sign(Vec<C> x, Vec<C> y) {
  constexpr auto sign = std::conditional_t<sizeof(C) == 4, int32_t, int64_t>(1) << (8 * sizeof(C) - 1);
  return y != 0 ? bit_cast<Vec<C>>(bit_cast<Bits<C>>(x) ^ (bit_cast<Bits<C>>(y) & sign)) : Vec<C>{};
}

// `scale` times how the deviation changes with y, up to the row's slope: sign(y)·(|y|/m)^(p−1), for L2 y·(1/√(s²+ε)).
template <int kKind, class C>
NM_INLINE Vec<C> direction(Vec<C> y, C scale, const Row<C>& row, double p) {
  if constexpr (kKind == kL1) return with_sign<C>(splat(scale), y);
  else if constexpr (kKind == kL2) return y * (scale * row.inverse);
  else return with_sign<C>(splat(scale) * power(abs<C>(y) * row.statistic, C(p - 1)), y);
}

// dx = (1/√(s²+ε))·(ĝ − mean ĝ) − slope·(t − mean t), where ĝ = weight·g and t is the direction.
template <class C>
struct Gradient {
  C high, low, inverse, slope, shift;
};

template <class T, int kKind, bool kCentered>
Gradient<Compute<T>> gradient_of(const T* g, const T* x, const Row<Compute<T>>& row, const Shape<Compute<T>>& shape) {
  using C = Compute<T>;
  const Vec<C> high = splat(row.high), low = splat(row.low);
  const int64_t n = shape.n;
  const C* weight = shape.weight;
  double gs = 0, gy = 0, ts = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Vec<C> g_sums[kUnroll] = {}, gy_sums[kUnroll] = {}, t_sums[kUnroll] = {};
    for_each_vector<C>(begin, std::min(n, begin + kBlock), [&](int64_t i, int k, auto lanes) NM_ALWAYS {
      Vec<C> gamma_g = lanes.load(g + i);
      if (weight) gamma_g *= lanes.load(weight + i);
      const Vec<C> y = kCentered ? lanes.only(centered<C>(lanes.load(x + i), high, low)) : lanes.load(x + i);
      gy_sums[k] = fma(gamma_g, y, gy_sums[k]);
      if (kCentered) {
        g_sums[k] = fma(gamma_g, splat(C(1)), g_sums[k]);
        if (kKind != kL2) t_sums[k] += direction<kKind, C>(y, C(1), row, shape.p);
      }
    });
    gy += sum_of<C>(gy_sums);
    gs += sum_of<C>(g_sums);
    ts += sum_of<C>(t_sums);
  }
  const double inverse = double(row.inverse), count = double(n);
  const double slope = inverse * double(row.slope) * (gy * inverse) / count;
  return {row.high, row.low, row.inverse, C(slope), C(slope * ts / count - inverse * gs / count)};
}

// dx of `count` rows, and their parts of the gradients of weight and bias.
template <class T, int kKind, bool kCentered, bool kParameters, int kCount>
NM_INLINE void backward_rows(const T* g, const T* x, T* dx, const Row<Compute<T>>* saved, const Shape<Compute<T>>& shape,
                             Compute<T>* dweight, Compute<T>* dbias, bool past) {
  using C = Compute<T>;
  const int64_t n = shape.n;
  const C* weight = shape.weight;
  Gradient<C> of[kCount];
  for (int r = 0; r < kCount; ++r)
    of[r] = gradient_of<T, kKind, kCentered>(g + r * n, x + r * n, saved[r], shape);
  for_each_vector<C>(0, n, [&](int64_t i, int, auto lanes) NM_ALWAYS {
    const Vec<C> gamma = weight ? lanes.load(weight + i) : splat(C(1));
    Vec<C> dw = {}, db = {};
    for (int r = 0; r < kCount; ++r) {
      const Vec<C> grad = lanes.load(g + r * n + i), value = lanes.load(x + r * n + i);
      const Vec<C> y = kCentered ? centered<C>(value, splat(of[r].high), splat(of[r].low)) : value;
      Vec<C> d = direction<kKind, C>(y, -of[r].slope, saved[r], shape.p);
      if (kCentered) d += of[r].shift;
      store_output(dx + r * n + i, fma(grad * gamma, splat(of[r].inverse), d), lanes, past);
      if (kParameters) {
        dw = fma(grad * of[r].inverse, y, dw);
        db += grad;
      }
    }
    if (kParameters) {
      lanes.store(dweight + i, lanes.load(dweight + i) + dw);
      lanes.store(dbias + i, lanes.load(dbias + i) + db);
    }
  });
}

template <class Body>
void with_kind(int64_t kind, int64_t centered, Body&& body) {
  auto choose = [&](auto k) {
    if (centered) body(k, std::true_type{});
    else body(k, std::false_type{});
  };
  if (kind == kL1) choose(std::integral_constant<int, kL1>{});
  else if (kind == kL2) choose(std::integral_constant<int, kL2>{});
  else choose(std::integral_constant<int, kLp>{});
}

}  // namespace
}  // namespace nm

using namespace nm;

// y = (x − mean)/√(s² + eps)·weight + bias of each row. Weight, bias and `saved` [rows, 5] have the compute type.
NM_EXPORT void nm_layer_norm(const void* x, void* y, const void* weight, const void* bias, void* saved, int64_t rows,
                             int64_t n, int64_t dtype, int64_t kind, int64_t centered, double p, double constant,
                             double eps) {
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const Shape<C> shape{rows, n, eps, constant, p, (const C*)weight, (const C*)bias};
    prefer_large_pages(y, rows * n * int64_t(sizeof(T)));
    const bool past = leaves_cache(rows * n * int64_t(sizeof(T)));
    with_kind(kind, centered, [&](auto kind_tag, auto centered_tag) {
      parallel_for(
          rows,
          [&](int64_t r) {
            forward_row<T, kind_tag.value, centered_tag.value>((const T*)x + r * n, (T*)y + r * n, shape, ((Row<C>*)saved)[r],
                                                               past);
          },
          std::max<int64_t>(1, kElementsPerTask / n));
    });
  });
}

// dx, and if `dweight` is not null also dweight and dbias, in the compute type. `scratch`: `parts` · 2n doubles and as
// many numbers of the compute type. The parts of the rows are summed in the order of their numbers.
NM_EXPORT void nm_layer_norm_backward(const void* g, const void* x, void* dx, const void* weight, const void* saved,
                                      void* dweight, void* dbias, void* scratch, int64_t parts, int64_t rows, int64_t n,
                                      int64_t dtype, int64_t kind, int64_t centered, double p, double constant,
                                      double eps) {
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using C = Compute<T>;
    const Shape<C> shape{rows, n, eps, constant, p, (const C*)weight, nullptr};
    double* const totals = (double*)scratch;
    prefer_large_pages(dx, rows * n * int64_t(sizeof(T)));
    const bool past = leaves_cache(rows * n * int64_t(sizeof(T)));
    with_kind(kind, centered, [&](auto kind_tag, auto centered_tag) {
      constexpr int kKind = kind_tag.value;
      constexpr bool kCentered = centered_tag.value;
      parallel_for(parts, [&](int64_t part) {
        const int64_t begin = part_begin(rows, part, parts), end = part_begin(rows, part + 1, parts);
        double* total = totals + part * 2 * n;
        C* sums = (C*)(totals + parts * 2 * n) + part * 2 * n;
        auto run = [&](auto parameters) {
          auto take = [&](auto count, int64_t r) {
            backward_rows<T, kKind, kCentered, parameters.value, count.value>(
                (const T*)g + r * n, (const T*)x + r * n, (T*)dx + r * n, (const Row<C>*)saved + r, shape, sums, sums + n,
                past);
          };
          if (parameters.value) std::memset(total, 0, size_t(2 * n) * sizeof(double));
          for (int64_t r = begin; r < end;) {
            const int64_t stop = std::min(end, r + kRowsInFloat);
            if (parameters.value) std::memset(sums, 0, size_t(2 * n) * sizeof(C));
            for (; r + kTogether <= stop; r += kTogether) take(std::integral_constant<int, kTogether>{}, r);
            for (; r < stop; ++r) take(std::integral_constant<int, 1>{}, r);
            if (parameters.value)
              for (int64_t i = 0; i < 2 * n; ++i) total[i] += double(sums[i]);
          }
        };
        if (dweight) run(std::true_type{});
        else run(std::false_type{});
      });
    });
    if (!dweight) return;
    constexpr int64_t kColumns = 256;
    parallel_for((2 * n + kColumns - 1) / kColumns, [&](int64_t block) {
      const int64_t begin = block * kColumns, end = std::min(2 * n, begin + kColumns);
      double column[kColumns] = {};
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t i = begin; i < end; ++i) column[i - begin] += totals[part * 2 * n + i];
      for (int64_t i = begin; i < end; ++i) (i < n ? (C*)dweight + i : (C*)dbias + (i - n))[0] = C(column[i - begin]);
    }, std::max<int64_t>(1, kElementsPerTask / (parts * kColumns)));
  });
}
