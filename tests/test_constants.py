"""gaussian_scale against independent integrals, closed forms, samples and the paper's formulas (F5–F9)."""

import math

import pytest
import torch

from normmatters import constants
from normmatters.constants import gaussian_scale

INF = math.inf

# 1/E by mpmath with 60 digits, from integrals other than the library's: E Top(k) = (1/k) ∫₀^∞ E min(k, N(x)) dx with
# N ~ Binomial(n, erfc(x/√2)), its expectation summed term by term; E range = ∫ 1 − Φⁿ − (1−Φ)ⁿ dx.
REFERENCE = [
    (INF, 2, 1, 0.8862269254528),
    (INF, 3, 1, 0.7539279143284),
    (INF, 3, 2, 0.9714629145263),
    (INF, 5, 1, 0.6370101425608),
    (INF, 5, 2, 0.7650703298282),
    (INF, 10, 1, 0.5317124769498),
    (INF, 10, 2, 0.6051296396017),
    (INF, 32, 1, 0.4260614641846),
    (INF, 32, 2, 0.4636066687809),
    (INF, 32, 10, 0.6616884022286),
    (INF, 128, 1, 0.353662089108),
    (INF, 128, 10, 0.4666392060518),
    (INF, 128, 100, 1.018788037619),
    (INF, 1000, 1, 0.2910860550731),
    (INF, 1000, 10, 0.3478114454601),
    (INF, 10**5, 1, 0.2205883263438),
    (INF, 10**5, 2, 0.2258619503691),
    (INF, 10**5, 10, 0.2433393008772),
    (INF, 10**6, 1, 0.2000575598228),
    (INF, 10**6, 10, 0.216725725175),
    (INF, 10**6, 100, 0.2427064645354),
    (INF, 10**7, 1, 0.1842882390802),
    (INF, 10**7, 10, 0.197157905159),
    (INF, 10**9, 1, 0.1613463750044),
    (INF, 10**9, 2, 0.1634238743158),
    (INF, 10**9, 10, 0.1698486507139),
    (INF, 10**9, 100, 0.1817458895569),
    # k too large for mpmath: F8 itself by scipy, quad over binom.cdf, split around the k-th quantile.
    (INF, 10, 9, 1.144500419661),
    (INF, 1000, 999, 1.252062787952),
    (INF, 10**6, 5 * 10**5, 0.7867165135984),
    (INF, 10**6, 10**6 - 1, 1.253312884003),
    (INF, 10**9, 5 * 10**8, 0.7867162703837),
    (INF, 10**9, 10**9 - 1, 1.253314136062),
    # In the limit of large n: (k/n)/(2·p(x)) with P(|z| > x) = k/n.
    (INF, 10**15, 10**15 - 1, 1.2533141373155),
    (INF, 10**18, 10**18 - 10**12, 1.2533128840019),
    (INF, 10**15, 5 * 10**14, 0.7867162703837),
    ("range", 2, None, 0.8862269254528),
    ("range", 3, None, 0.5908179503018),
    ("range", 5, None, 0.4299357472501),
    ("range", 10, None, 0.324938497252),
    ("range", 32, None, 0.2415845439873),
    ("range", 128, None, 0.1927081272999),
    ("range", 1000, None, 0.1542526323555),
    ("range", 10**5, None, 0.1140427861268),
    ("range", 10**6, None, 0.1028193585037),
    ("range", 10**7, None, 0.09432264438447),
    ("range", 10**9, None, 0.08213303318597),
]


@pytest.mark.parametrize(("p", "n", "k", "expected"), REFERENCE)
def test_exact_agrees_with_reference_integrals(p, n, k, expected):
    assert gaussian_scale(p, n, k) == pytest.approx(expected, rel=2e-9)
    if k == 1:
        assert gaussian_scale(p, n) == gaussian_scale(p, n, k)


def test_closed_forms():
    root_pi = math.sqrt(math.pi)
    assert gaussian_scale(INF, 2) == pytest.approx(root_pi / 2, rel=1e-9)  # E max(|z1|, |z2|) = 2/√π
    assert gaussian_scale("range", 2) == pytest.approx(root_pi / 2, rel=1e-9)
    assert gaussian_scale("range", 3) == pytest.approx(root_pi / 3, rel=1e-9)  # E range of 3 = 3/√π
    e_max_4 = 3 / root_pi * (0.5 + math.asin(1 / 3) / math.pi)  # E max of 4
    assert gaussian_scale("range", 4) == pytest.approx(1 / (2 * e_max_4), rel=1e-9)


@pytest.mark.parametrize("n", [2, 7, 1000, 10**9])
def test_top_n_is_l1_and_top_1_is_linf(n):
    assert gaussian_scale(INF, n, n) == gaussian_scale(1, n) == math.sqrt(math.pi / 2)
    assert gaussian_scale(INF, n, 1) == gaussian_scale(INF, n)


@pytest.mark.parametrize("n", [3, 32, 4096])
def test_top_k_rises_with_k(n):
    values = [gaussian_scale(INF, n, k) for k in sorted({1, 2, 3, n // 2, n - 1, n})]
    assert values == sorted(values)
    assert len(set(values)) == len(values)


@pytest.mark.parametrize(
    ("p", "moment"), [(1, math.sqrt(2 / math.pi)), (2, 1.0), (3, 2 * math.sqrt(2 / math.pi)), (4, 3.0), (6, 15.0)]
)
def test_lp_constants_are_the_gaussian_moments(p, moment):
    for n in (2, 10**6):
        assert gaussian_scale(p, n) == pytest.approx(moment ** (-1 / p), rel=1e-14)
    assert gaussian_scale(float(p), 5) == gaussian_scale(p, 5)


def test_fractional_and_huge_p():
    # E|z|^1.5 by the trapezoid rule on the half line, 2e5 points to x = 20.
    x = torch.linspace(0, 20, 200_001, dtype=torch.float64)
    density = torch.exp(-x * x / 2) * math.sqrt(2 / math.pi)
    moment = torch.trapezoid(x**1.5 * density, x).item()
    assert gaussian_scale(1.5, 8) == pytest.approx(moment ** (-1 / 1.5), rel=1e-7)
    assert 0 < gaussian_scale(1e6, 8) < 0.01  # Γ(p/2) is far beyond a double


def test_scale_of_samples_is_sigma():
    torch.manual_seed(0)
    sigma, n, trials = 3.0, 48, 40_000
    x = sigma * torch.randn(trials, n, dtype=torch.float64)
    statistics = {
        (1, None): x.abs().mean(1),
        (INF, None): x.abs().amax(1),
        (INF, 5): x.abs().topk(5, 1).values.mean(1),
        ("range", None): x.amax(1) - x.amin(1),
    }
    for (p, k), statistic in statistics.items():
        estimate = gaussian_scale(p, n, k) * statistic
        error = estimate.std().item() / math.sqrt(trials)
        assert abs(estimate.mean().item() - sigma) < 4 * error, (p, k)


def test_paper_formulas_as_printed():
    c_l1 = math.sqrt(math.pi / 2)
    assert gaussian_scale(1, 7, method="paper") == c_l1
    assert gaussian_scale(2, 7, method="paper") == 1.0
    for n in (2, 32, 10**6):
        c_inf = (1 + math.sqrt(math.pi * math.log(4))) / (2 * math.sqrt(2 * math.log(n)))
        assert gaussian_scale(INF, n, method="paper") == pytest.approx(c_inf, rel=1e-15)
        assert gaussian_scale(INF, n, 1, method="paper") == pytest.approx(c_inf, rel=1e-15)
        assert gaussian_scale(INF, n, n, method="paper") == pytest.approx(c_l1, rel=1e-15)
    c_inf = gaussian_scale(INF, 101, method="paper")
    assert gaussian_scale(INF, 101, 11, method="paper") == pytest.approx(0.9 * c_inf + 0.1 * c_l1, rel=1e-15)


@pytest.mark.parametrize(("n", "k", "percent"), [(32, 1, 38), (10**6, 1, 47), (32, 10, 18), (10**6, 10, 35)])
def test_how_far_the_paper_overestimates_the_scale(n, k, percent):
    ratio = gaussian_scale(INF, n, k, method="paper") / gaussian_scale(INF, n, k)
    assert round(100 * (ratio - 1)) == percent


@pytest.mark.parametrize("p", ["range", 3, 1.5])
def test_paper_has_no_constant_for(p):
    with pytest.raises(ValueError, match="paper gives no constant"):
        gaussian_scale(p, 32, method="paper")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((1, 1), ValueError),
        ((1, 0), ValueError),
        ((1, -3), ValueError),
        ((1, 2.0), TypeError),
        ((1, "2"), TypeError),
        ((1, True), TypeError),
        ((0.5, 8), ValueError),
        ((math.nan, 8), ValueError),
        ((-INF, 8), ValueError),
        (("mean", 8), ValueError),
        (("max", 8), ValueError),
        ((None, 8), TypeError),
        ((True, 8), TypeError),
        ((INF, 8, 0), ValueError),
        ((INF, 8, 9), ValueError),
        ((INF, 8, 2.0), TypeError),
        ((1, 8, 2), ValueError),
        (("range", 8, 2), ValueError),
        ((1, 8, None, "exakt"), ValueError),
        ((1, 8, None, None), ValueError),
    ],
)
def test_bad_input(args, error):
    with pytest.raises(error):
        gaussian_scale(*args)


def test_integers_of_other_libraries_are_integers():
    assert gaussian_scale(INF, torch.tensor(32), torch.tensor(4)) == gaussian_scale(INF, 32, 4)


def test_is_cached():
    gaussian_scale(INF, 12347, 6)
    before = constants._cached_exact_scale.cache_info().hits
    gaussian_scale(INF, 12347, 6)
    assert constants._cached_exact_scale.cache_info().hits == before + 1


def test_compiles_as_a_constant():
    def scaled(x):
        return x * gaussian_scale(INF, x.shape[0], 3)

    compiled = torch.compile(scaled, fullgraph=True, backend="eager")
    for n in (16, 24, 40):  # the second size makes the batch dimension dynamic
        x = torch.ones(n)
        torch.testing.assert_close(compiled(x), scaled(x))
