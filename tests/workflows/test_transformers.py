"""Hugging Face transformers, no download: L1 layer norm and bounded weights in BERT and ViT, Trainer, checkpoints."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import normmatters as nm

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}


@pytest.fixture
def hf() -> Any:
    """Imported when a test runs, not when tests are collected: it takes seconds."""
    return pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)


def build(hf: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """A small model with random norms, and an input for it."""
    torch.manual_seed(0)
    if name == "bert":
        config = hf.BertConfig(vocab_size=50, max_position_embeddings=16, **SIZES)
        model, inputs = hf.BertForSequenceClassification(config), {"input_ids": torch.randint(50, (4, 8))}
    else:
        config = hf.ViTConfig(image_size=8, patch_size=4, **SIZES)
        model, inputs = hf.ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 8, 8).double()}
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.3)
    return model.double().eval(), inputs


def in_layers(name: str, module: nn.Module) -> bool:
    """The weights of attention and MLP in either model."""
    return ".layer" in name


def logits_and_gradients(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logits = model(**inputs).logits
    logits.square().sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_layer_norms_become_l1(hf: Any, name: str) -> None:
    model, inputs = build(hf, name)
    same = nm.convert(copy.deepcopy(model), layer_norm="l2")
    assert_close(logits_and_gradients(same, inputs), logits_and_gradients(model, inputs))

    keys = list(model.state_dict())
    report = nm.ConversionReport()
    assert nm.convert(model, layer_norm="l1", report=report) is model
    assert (len(report.converted), len(report.skipped)) == (5, 0)
    assert list(model.state_dict()) == keys
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert {type(norm) for norm in norms} == {nm.L1LayerNorm}
    seen = []
    norms[-1].register_forward_hook(lambda _, arguments, output: seen.append((arguments[0], output)))
    model(**inputs)
    x, y = seen[0]
    deviation = x - x.mean(-1, keepdim=True)
    scale = math.sqrt(math.pi / 2) * deviation.abs().mean(-1, keepdim=True)  # F10
    assert_close(y, deviation / (scale**2 + norms[-1].eps).sqrt() * norms[-1].weight + norms[-1].bias)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_attention_and_mlp_weights_stay_bounded_in_training(hf: Any, name: str) -> None:
    model, inputs = build(hf, name)
    nm.convert(model, layer_norm="l1")
    report = nm.apply_weight_norm(model, filter=in_layers)
    assert len(report.applied) == 12  # query, key, value, output and the two of the MLP, in two layers
    layers = [model.get_submodule(weight.removesuffix(".weight")) for weight in report.applied]
    rho = [layer.parametrizations.weight[0].rho.clone() for layer in layers]

    decayed, free = nm.optim.weight_decay_groups(model, 0.1)
    directions = {f"{weight.removesuffix('weight')}parametrizations.weight.original" for weight in report.applied}
    assert directions <= {weight for weight, _ in decayed["params"]}  # it controls their step size
    assert all(p.ndim > 1 for _, p in decayed["params"])
    assert all(p.ndim == 1 for _, p in free["params"])
    optimizer = torch.optim.AdamW([decayed, free], lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(**inputs, labels=torch.tensor([0, 1, 2, 0])).loss
        loss.backward()
        for layer in layers:
            v = layer.parametrizations.weight.original
            assert_close((v * v.grad).sum(1), torch.zeros(len(v), dtype=v.dtype), rtol=0, atol=1e-12)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for layer, length in zip(layers, rho):
        assert_close(layer.weight.norm(dim=1), length.expand(len(layer.weight)))
        assert (layer.parametrizations.weight.original.norm(dim=1) > 1.01 * length).any()  # v is what moved


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(hf: Any, reentrant: bool) -> None:
    model, inputs = build(hf, "vit")
    nm.convert(model, layer_norm="l1")
    nm.apply_weight_norm(model, filter=in_layers)
    expected = logits_and_gradients(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()  # it has no dropout, and checkpoints in training alone
    inner = [module for name, module in model.named_modules() if name.endswith("layernorm_before")]
    calls = []
    inner[0].register_forward_hook(lambda *_: calls.append(1))
    assert_close(logits_and_gradients(model, inputs), expected)
    assert len(calls) == 2


def bounded_bert(hf: Any) -> Any:
    model = build(hf, "bert")[0].float()
    nm.convert(model, layer_norm="l1")
    nm.apply_weight_norm(model, filter=in_layers)
    return model


def test_trainer_decays_what_it_should_and_resumes_exactly(hf: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate", exc_type=ImportError)
    tokens = torch.randint(50, (16, 8))
    data = [{"input_ids": tokens[i], "labels": i % 3} for i in range(16)]

    def train(folder: str, resume: str | None = None) -> Any:
        model = bounded_bert(hf)
        optimizer = torch.optim.AdamW(nm.optim.weight_decay_groups(model, 0.1), lr=1e-2)
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path / folder),
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        trainer = hf.Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train("whole")
    # The Trainer's own rule finds our norms as it finds torch's, and makes the groups that we make.
    norms = {name for name, _ in whole.model.named_parameters() if "LayerNorm" in name}
    decayed_by_default = set(whole.get_decay_parameter_names(whole.model))
    assert norms
    assert not norms & decayed_by_default
    assert any(name.endswith("original") for name in decayed_by_default)
    assert decayed_by_default == {name for name, _ in nm.optim.weight_decay_groups(whole.model, 0.1)[0]["params"]}
    assert {group["weight_decay"] for group in whole.optimizer.param_groups} == {0.1, 0.0}

    resumed = train("resumed", str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key
    assert not torch.equal(whole.model.classifier.weight, build(hf, "bert")[0].float().classifier.weight)


def test_save_and_load_pretrained(hf: Any, tmp_path: Path) -> None:
    model, (_, inputs) = bounded_bert(hf), build(hf, "bert")
    expected = model(**inputs).logits
    nm.remove_weight_norm(copy.deepcopy(model)).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()

    loaded, info = hf.BertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not torch.allclose(loaded.eval()(**inputs).logits, expected, atol=1e-4)  # still in L2
    nm.convert(loaded, layer_norm="l1")
    assert_close(loaded(**inputs).logits, expected)
    nm.apply_weight_norm(loaded, filter=in_layers)  # ρ is taken from weights that have it: nothing changes
    assert_close(loaded(**inputs).logits, expected)
    for mine, other in zip(loaded.buffers(), model.buffers(), strict=True):
        assert_close(mine, other)
