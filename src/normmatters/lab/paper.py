"""What the paper shows, and what we add to it, as data: the report draws its figures and tables from this one file."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EXPERIMENTS", "Experiment", "Panel"]


@dataclass(frozen=True)
class Panel:
    """One set of axes. ``metric`` is a quantity of ``collect.METRICS``; ``cells`` are names in the experiment."""

    title: str
    cells: tuple[str, ...]
    metric: str = "error"


@dataclass(frozen=True)
class Experiment:
    """One figure or table. ``shows`` says in one sentence what the paper shows with it."""

    name: str
    title: str
    topic: str
    shows: str
    panels: tuple[Panel, ...] = ()
    rows: tuple[str, ...] = ()


_FIG1 = ("wd_on", "wd_off", "corrected", "norm_schedule", "wd_free", "angular")
_NORMS = ("l2", "l1", "topk", "linf")
_HALF = ("l2_fp32", "l1_fp32", "l1_fp16", "l2_fp16_acc32", "l2_fp16")
_UNITS = ("x128", "by65536")  # what the norms' inputs are multiplied with or divided by
_IN_UNITS = {u: tuple(f"{name}_{u}" for name in ("l1_fp16", "l2_fp16_acc32", "l2_fp16")) for u in _UNITS}
_GAP = ("", "_fp32", "_silent", "_decay_all")
_LEAN = ("native", "l2", "l1", "l1_lean")
_LSTM = ("bwn", "ln", "ln_l1")  # first in both panels: a cell has one look
_SOFT = ("soft_ln", "soft_ln_l1")
_WEIGHT_NORMS = ("bn", "wn", "bwn")
_WEIGHT_NORMS_18 = tuple(f"resnet18_{n}" for n in (*_WEIGHT_NORMS, "bwn_decay"))
_TRANSFORMER = ("ln", "bwn", "bwn_rho2", "none", "ln_dropout", "bwn_dropout")

EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "fig1",
        "Figure 1",
        "Weight decay is a step size",
        "Without weight decay the norm grows and the effective step η/‖w‖² shrinks. Put the step back, by correcting "
        "the learning rate or by scheduling the norm instead of it, and the accuracy comes back with it.",
        (
            Panel("Validation error", _FIG1),
            Panel("Training loss", _FIG1, "loss"),
            Panel("Weight norm, mean over channels", _FIG1, "norm"),
            Panel("Effective step size η/‖w‖²", _FIG1, "effective_step"),
        ),
        _FIG1,
    ),
    Experiment(
        "fig2",
        "Figure 2",
        "Batch norm in L1, L∞ and Top(10)",
        "L1 and the mean of the ten largest deviations train as well as L2; the single largest does not quite.",
        (
            Panel("ResNet-18", (*(f"resnet18_{n}" for n in _NORMS), "resnet18_linf_exact")),
            Panel("ResNet-50", tuple(f"resnet50_{n}" for n in _NORMS)),
        ),
        (*(f"resnet18_{n}" for n in _NORMS), "resnet18_linf_exact", *(f"resnet50_{n}" for n in _NORMS)),
    ),
    Experiment(
        "fig3",
        "Figure 3",
        "Batch norm in half precision",
        "With its arithmetic in fp16, L1 batch norm loses nothing, sums in fp16 included; L2 diverges even with an "
        "fp32 accumulator.",
        (
            Panel("Validation error", _HALF),
            Panel("In bfloat16 (ours)", ("l2_fp32", "l1_bf16", "l2_bf16")),
            Panel("Inputs × 128 (ours)", ("l2_fp32", "l1_fp32", *_IN_UNITS["x128"])),
            Panel("Inputs ÷ 65536 (ours)", ("l2_fp32", "l1_fp32", *_IN_UNITS["by65536"])),
        ),
        (*_HALF, "l1_bf16", "l2_bf16", *_IN_UNITS["x128"], *_IN_UNITS["by65536"]),
    ),
    Experiment(
        "fig4",
        "Figure 4",
        "Bounded weight norm",
        "Fixing the norm of each filter at its initial scale makes weight norm train a large network, not far behind "
        "batch norm; with a free scale it does not converge.",
        (Panel("Validation error", _WEIGHT_NORMS), Panel("ResNet-18 (ours)", _WEIGHT_NORMS_18)),
        (*_WEIGHT_NORMS, *_WEIGHT_NORMS_18),
    ),
    Experiment(
        "supp1",
        "Supplementary Figure 1",
        "The constant matters",
        "Left: without C = √(π/2) training is slower and ends worse, although C is only 1.25. Right: four times more "
        "or less is worse as well.",
        (
            Panel("With and without C", ("resnet56_l2", "resnet56_with_c", "resnet56_without_c")),
            Panel("C times ¼, 1 and 4", ("resnet18_c_1", "resnet18_c_quarter", "resnet18_c_4")),
        ),
        (
            *("resnet56_l2", "resnet56_with_c", "resnet56_without_c"),
            *("resnet18_c_1", "resnet18_c_quarter", "resnet18_c_4"),
        ),
    ),
    Experiment(
        "supp2",
        "Supplementary Figure 2",
        "Bounded weight norm in an LSTM",
        "Recurrent networks, where batch norm is hard to apply, train with bounded weight norm about as well as with "
        "layer norm.",
        (
            Panel("Validation perplexity", (*_LSTM, "none", "bwn_rho2", "bwn_rho4", "ln_l1_scaled"), "ppl"),
            Panel("Attention that begins soft (ours)", (*_LSTM, *_SOFT), "ppl"),
        ),
        ("none", "ln", "bwn", "bwn_rho2", "bwn_rho4", "ln_l1", "ln_l1_scaled", *_SOFT),
    ),
    Experiment(
        "table1",
        "Table 1",
        "Batch or layer norm, weight norm, bounded weight norm",
        "Bounded weight norm comes close to batch and layer norm on every network, and ahead of weight norm.",
        (
            Panel("ResNet-56, validation error", ("resnet56_bn", "resnet56_wn", "resnet56_bwn", "resnet56_bwn_decay")),
            Panel(
                "Transformer, validation perplexity",
                tuple(f"transformer_{n}" for n in _TRANSFORMER),
                "ppl",
            ),
        ),
        (
            *("resnet56_bn", "resnet56_wn", "resnet56_bwn", "resnet56_bwn_decay"),
            *("resnet50_bn", "resnet50_wn", "resnet50_bwn"),
            *(f"transformer_{n}" for n in _TRANSFORMER),
            *("lstm_ln", "lstm_bwn"),
        ),
    ),
    Experiment(
        "table2",
        "Table 2",
        "L2 against L1",
        "L1 batch norm and L1 layer norm reach the numbers of L2.",
        (
            Panel("ResNet-56, validation error", ("resnet56_l2", "resnet56_l1")),
            Panel("Transformer, validation perplexity", ("transformer_l2", "transformer_l1"), "ppl"),
        ),
        (
            *("resnet56_l2", "resnet56_l1", "resnet18_l2", "resnet18_l1", "resnet50_l2", "resnet50_l1"),
            *("transformer_l2", "transformer_l1"),
        ),
    ),
    Experiment(
        "lp_weight_norm",
        "Lp weight norm",
        "Weight norm in L1 and L∞",
        "In words only: the L1 norm serves as well as L2 for weight norm, L∞ degrades noticeably.",
        (Panel("Validation error", ("l2", "l1", "linf")),),
        ("l2", "l1", "linf"),
    ),
    Experiment(
        "speed",
        "Time and memory",
        "What L1 batch norm costs",
        "In words only: L1 batch norm was faster than L2 and took less memory. `normmatters bench` measures this "
        "properly; here are training runs themselves, one at a time, data and all.",
        (),
        ("native", "l2", "l1", "l1_lean"),
    ),
    Experiment(
        "l1_gap",
        "L1's gap",
        "Why L1 may train to a higher loss than L2 (ours)",
        "Not in the paper, which finds none. An L2 norm holds the mean square of x̂, an L1 norm mean |x̂|: under L2 a "
        "residual branch can fall silent by heavy tails, under L1 it cannot. Each pair takes away one possible cause.",
        (
            Panel("The scale", ("l2", "l1", "l1_quieter"), "loss"),
            Panel("The start", ("l2", "l1", "l2_silent", "l1_silent"), "loss"),
            Panel("The decay", ("l2", "l1", "l2_decay_all", "l1_decay_all"), "loss"),
            Panel("The arithmetic", ("l2", "l1", "l2_fp32", "l1_fp32"), "loss"),
        ),
        (*(f"{norm}{change}" for change in _GAP for norm in ("l2", "l1")), "l1_quieter"),
    ),
    Experiment(
        "lean",
        "Lean memory",
        "L1 that keeps a few bits (ours)",
        "Not in the paper: L1 batch norm that keeps no input for its backward pass, against the exact one and against "
        "torch.nn.BatchNorm2d.",
        (
            Panel("ResNet-56", tuple(f"resnet56_{n}" for n in _LEAN)),
            Panel("ResNet-18", tuple(f"resnet18_{n}" for n in _LEAN)),
        ),
        (*(f"resnet56_{n}" for n in _LEAN), *(f"resnet18_{n}" for n in _LEAN)),
    ),
    Experiment(
        "resnet56_norms",
        "Every norm",
        "ResNet-56 with every batch norm (ours)",
        "Not in the paper, whose constants of L∞ and Top(10) are too large by 18 to 47 %. Each norm with the paper's "
        "constant and with the exact one, and L1 with C wrong by four either way.",
        (
            Panel(
                "The paper’s constants and exact ones", ("l2", "linf_paper", "linf_exact", "topk_paper", "topk_exact")
            ),
            Panel("L1 and range", ("l2", "l1", "range", "l1_without_c", "l1_c_quarter", "l1_c_4")),
        ),
        (
            *("l2", "l1", "linf_paper", "linf_exact", "topk_paper", "topk_exact", "range"),
            *("l1_without_c", "l1_c_quarter", "l1_c_4"),
        ),
    ),
)
