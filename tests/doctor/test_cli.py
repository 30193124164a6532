"""``normmatters doctor`` as a user meets it: models by name, checkpoints, JSON, and errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from normmatters import cli
from normmatters.doctor import diagnose
from normmatters.doctor.cli import load_state_dict

NET = """
from torch import nn

ready = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
number = 7

def half():
    return net().half()

def net(width=3, kind="plain"):
    assert kind in ("plain", "wide")
    return nn.Sequential(nn.Linear(4, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, input, scale):
        return self.net(input) * scale.mean()

def keywords():
    return Keywords()

def tokens():
    return nn.Sequential(nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 2))

def nothing():
    return None

def plain():
    return nn.Sequential(nn.Linear(4, 2))

def others():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4))

def deep():
    part = nn.Module()
    part.normalization = nn.BatchNorm1d(4)
    part.forward = lambda x: part.normalization(x)
    outer = nn.Module()
    outer.and_its_part_that_is_longer_still = part
    model = nn.Sequential()
    model.a_name_that_is_long = outer
    outer.forward = part.forward
    return model
"""

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """The command, run in a folder with a file of models; its exit code and what it printed."""
    (tmp_path / "patients.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "patients", raising=False)
    for key, value in {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(key, value)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["normmatters", "doctor", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_model_by_name_is_explained(doctor: Doctor) -> None:
    code, out, err = doctor("patients:net", "--set", "width=5", "--input", "8,4", "--lr", "0.2", "--wd", "1e-3")
    assert code == 0, err
    assert "BatchNorm1d" in out
    assert "L1BatchNorm1d" in out
    assert "channel, dim 0" in out
    assert "5×4" in out
    assert "1 of 2 weights are scale invariant" in out
    assert "0.01451 rad" in out  # sqrt(2 * 0.2 * 1e-3 / 1.9)


def test_json_is_the_diagnosis(doctor: Doctor, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    words = ["patients:net", "--weights", "trained.pt", "--input", "8,4", "--quick", "--json", "--norm", "1.5"]
    code, out, err = doctor(*words, "--dtype", "float16")
    assert code == 0, err
    expected = diagnose(model, torch.randn(8, 4), norm=1.5, dtype=torch.float16, invariance=False)
    assert json.loads(out) == expected.as_dict()
    assert expected.norms[0].becomes == "LpBatchNorm1d"


def test_memory_of_a_model_in_half_precision_is_its_own(doctor: Doctor) -> None:
    def kept(*words: str) -> dict[str, int]:
        found: dict[str, int] = json.loads(doctor(*words, "--input", "16,4", "--json", "--quick")[1])["kept"]
        return found

    assert kept("patients:half") == kept("patients:net", "--dtype", "float16") != kept("patients:net")


def test_json_loses_nothing_in_a_pipe_of_another_encoding(doctor: Doctor, tmp_path: Path) -> None:
    torch.save({"größe.weight": torch.ones(1, 4)}, tmp_path / "state.pt")
    code, out, err = doctor("state.pt", "--json")
    assert code == 0, err
    assert out.isascii()
    assert json.loads(out)["weights"][0]["name"] == "größe.weight"


def test_token_numbers_as_input(doctor: Doctor) -> None:
    code, out, err = doctor("patients:tokens", "--input", "8,5", "--tokens", "11", "--layer-norm", "l1", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["norms"][0]["becomes"] == "L1LayerNorm"
    assert found["norms"][0]["input"] == [8, 5, 4]
    assert found["kept"]["now"] > 0
    assert found["notes"] == []


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors", "nested.pth"])
def test_a_checkpoint_alone(doctor: Doctor, tmp_path: Path, name: str) -> None:
    state = {"conv.weight": 2 * torch.ones(1, 4), "bn.running_mean": torch.zeros(1)}
    if name.endswith("safetensors"):
        save_file(state, tmp_path / name)
    else:
        whole = {"epoch": 3, "best": torch.tensor(76.1), "model": state}
        torch.save(whole if "nested" in name else state, tmp_path / name)
    code, out, err = doctor(name, "--lr", "0.4", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["norms"][0]["name"] == "bn"
    assert found["weights"][0]["length"]["median"] == 4
    assert found["weights"][0]["step"]["median"] == pytest.approx(0.4 / 16)


def test_a_file_with_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        load_state_dict(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet50"], "MODEL must be package.module:name"),
        (["./patients:net"], "MODEL must be package.module:name"),
        (["patients:missing"], "patients has no 'missing'"),
        (["no_such_package_x:net"], "No module named 'no_such_package_x'"),
        (["patients:number"], "neither a module nor something to call, but int"),
        (["patients:net", "--set", "kind=odd"], "patients:net raised AssertionError"),
        (["patients:net", "--input", "999999999999,4"], "--input 999999999999,4 cannot be made: "),
        (["patients:nothing"], "must give a torch.nn.Module, got NoneType"),
        (["patients:ready", "--set", "width=3"], "is a module already"),
        (["patients:net", "--set", "width"], "--set must be KEY=VALUE"),
        (
            ["patients:net", "--set", "depth=3"],
            "unexpected keyword argument 'depth'; its arguments are given with --set",
        ),
        (["torch.nn:Linear"], "missing a required argument: 'in_features'; its arguments are given with --set"),
        (["patients:net", "--input", "8,x"], "--input must be sizes"),
        (["patients:net", "--input", "0,4"], "--input must be sizes"),
        (["patients:net", "--tokens", "5"], "give its shape too"),
        (["patients:net", "--input", "absent.pt"], "no such file"),
        (["patients:net", "--input", "list.pt"], "must hold a tensor, or a list or dict of tensors"),
        (["patients:net", "--input", "other.pt", "--tokens", "5"], "give its shape too"),
        (["patients:net", "--dtype", "int8"], "--dtype must be one of"),
        (["patients:net", "--lr", "-1"], "lr"),
        (["patients:net", "--norm", "l7"], "norm must be one of"),
        (["patients:net", "--weights", "other.pt"], "does not fit the model"),
        (["absent.pt"], "no such file"),
        (["other.pt", "--weights", "other.pt"], "need a model"),
        (["list.pt"], "holds no state_dict"),
        (["broken.safetensors"], "is no safetensors file"),
        (["broken.pt"], "cannot be read as tensors and plain containers: Unsupported operand 110"),
        (["empty.pt"], "cannot be read as tensors and plain containers: EOFError"),
        (["text.pt"], "cannot be read as tensors and plain containers: "),
        (["model.pt"], "containers: it holds torch.nn.modules.linear.Linear; save a state_dict"),
    ],
)
def test_an_error_is_one_line(doctor: Doctor, tmp_path: Path, words: list[str], message: str) -> None:
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"not one")
    (tmp_path / "broken.pt").write_bytes(b"not one")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_bytes(b"hello")  # these bytes are a pickle's, of an unknown number
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    code, _, err = doctor(*words)
    assert code == 2
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("kind", ["tensor.pt", "list.pt", "keywords.pt", "one.safetensors"])
def test_a_batch_of_data_gives_tails(doctor: Doctor, tmp_path: Path, kind: str) -> None:
    x = torch.randn(50, 4).pow(5)
    if kind == "one.safetensors":
        save_file({"whatever": x}, tmp_path / kind)
    else:
        torch.save({"tensor.pt": x, "list.pt": [x], "keywords.pt": {"input": x, "scale": x[:1]}}[kind], tmp_path / kind)
    model = "patients:keywords" if kind == "keywords.pt" else "patients:net"
    code, out, err = doctor(model, "--input", kind, "--json", "--quick")
    assert code == 0, err
    (norm,) = json.loads(out)["norms"]
    assert norm["input"] == [50, 3]
    assert norm["tails"]["median"] > 1.1
    code, out, err = doctor("patients:net", "--input", "50,4", "--quick")  # noise: it would say nothing
    assert code == 0, err
    assert "tails" not in out


def test_a_module_that_is_there_already(doctor: Doctor) -> None:
    code, out, err = doctor("patients:ready")
    assert code == 0, err
    assert "without an input" in out
    code, _, err = doctor("patients:net", "--set", "kind=wide")  # no Python literal: a string
    assert code == 0, err


def test_a_pipe_gets_whole_names(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns they were folded inside words, and grep found none."""
    monkeypatch.delenv("COLUMNS")
    code, out, _ = doctor("patients:deep", "--input", "8,4")
    assert code == 0
    name = "a_name_that_is_long.and_its_part_that_is_longer_still.normalization"
    (line,) = [line for line in out.splitlines() if name in line]
    assert "BatchNorm1d" in line
    assert "L1BatchNorm1d" in line


def test_an_input_that_the_model_does_not_take_is_an_error(doctor: Doctor) -> None:
    code, out, _ = doctor("patients:net", "--input", "8,5")
    assert code == 1
    assert "Note: memory was not measured: " in out


def test_nothing_is_said_about_weights_that_are_not_there(doctor: Doctor) -> None:
    code, out, _ = doctor("patients:plain", "--input", "8,4")
    assert code == 0
    assert "0 of 1 weights are scale invariant.\n" in out
    assert "rad per step" not in out


def test_each_norm_that_stays_has_a_reason(doctor: Doctor) -> None:
    _, out, _ = doctor("patients:others", "--input", "8,4")
    assert "--layer-norm" in out
    assert "GroupNorm has no counterpart" in out


def test_help_teaches_by_example(doctor: Doctor) -> None:
    code, out, _ = doctor("--help")
    assert code == 0
    assert "normmatters doctor torchvision.models:resnet50" in out
