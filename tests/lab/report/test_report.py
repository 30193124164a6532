"""The page and the numbers on it, from run folders of every kind, the user's own and damaged ones among them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from normmatters.lab.cells import load_cell
from normmatters.lab.config import to_json
from normmatters.lab.figures import EXPERIMENTS
from normmatters.lab.report import collect, write_report
from normmatters.lab.report.collect import describe, differences
from support.synthetic_runs import write_all, write_run


def test_an_experiment_of_borrowed_cells_alone_is_not_shown(tmp_path: Path) -> None:
    """ResNet-56's L1 and L2 are in five experiments; only those that these runs were made for get a section."""
    for cell in ("table1/resnet56_bn", "supp1/resnet56_with_c"):
        write_run(tmp_path, cell, preset="cifar")
    assert set(collect([tmp_path]).experiments) == {"supp1", "table1", "table2"}  # Table 2 judges them
    write_run(tmp_path, "lean/resnet56_l1_lean", preset="cifar")
    lean = write_report([tmp_path], tmp_path / "report").markdown.read_text().partition("Lean memory")[2]
    assert "ResNet-56, L2" in lean


def test_what_differs_from_the_paper_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "quick", "fig1/wd_on")
    write_run(tmp_path / "cifar", "fig1/wd_on", preset="cifar")
    quick = differences(collect([tmp_path / "quick"]).results.values())
    assert ("data", "scikit-learn digits (8×8 grey images)", "CIFAR-10") in quick
    assert {what for what, _, _ in quick} >= {"data", "network", "epochs"}
    departs = [(text, "", "") for text in load_cell("fig1/wd_on").paper.departs]
    assert len(departs) == 4
    cifar = differences(collect([tmp_path / "cifar"]).results.values())
    assert cifar == [("precision", "bf16 autocast", "fp32"), *departs]
    write_run(tmp_path / "full", "fig1/wd_on", preset="full")
    assert differences(collect([tmp_path / "full"]).results.values()) == departs
    page = write_report([tmp_path / "full"], tmp_path / "a").html.read_text()
    assert departs[0][0] in unescape(page)
    write_run(tmp_path / "own", "table2/transformer_l2", preset="full")
    assert differences(collect([tmp_path / "own"]).results.values()) == []
    page = write_report([tmp_path / "own"], tmp_path / "c").html.read_text()
    assert "The paper’s own setting" in page
    page = write_report([tmp_path / "quick"], tmp_path / "b").html.read_text()
    assert "scikit-learn digits (8×8 grey images) instead of CIFAR-10" in page
    assert ("augment", "none", "yes") in quick


def test_the_bodys_own_choices_are_differences_from_the_paper_too(tmp_path: Path) -> None:
    """The epoch in which the learning rate rises, and an attention that is not the paper's."""
    write_run(tmp_path, "table1/resnet56_wn", preset="full")
    write_run(tmp_path, "supp2/soft_ln", preset="full")
    found = collect([tmp_path]).results
    wn = differences([found["table1/resnet56_wn"]])
    assert ("warmup steps", "390", "0") in wn
    assert ("initial weights", "by fan-in × 1.71, branches ÷ √(their number)", "He's, by fan-out") in wn
    assert ("attention", "scaled", "additive (Bahdanau)") in differences([found["supp2/soft_ln"]])


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("s1/bn", {("network", "ResNet-20", "ResNet-56"), ("weight decay", "0.001", "0.0001")}),
        ("s1/bwn_both", {("weight decay", "0.001", "0"), ("weight decay of classifier", "0.001", "0.0001")}),
        ("s3/bn_wd_on", {("network", "VGG11 (width 0.25)", "VGG11"), ("weight decay", "0.001", "0.0005")}),
        ("s4/free_c_1", {("network", "ResNet-20", "ResNet-56"), ("weight decay", "0.001", "0.0001")}),
        ("s5/bwn_slow", {("learning rate", "0.03, ÷10 at 4, 8, 12", "0.1, ÷10 at 20, 40, 60")}),
        ("s5/bwn_slow", {("initial weights", "by fan-in × 1.71", "He's, by fan-out"), ("warmup steps", "390", "0")}),
        ("s7/angle_10", {("network", "VGG11 (width 0.25)", "VGG11"), ("weight decay", "0.0025", "0.0005")}),
    ],
)
def test_our_own_cells_differ_from_the_paper_and_not_from_their_file(
    tmp_path: Path, cell: str, said: set[tuple[str, str, str]]
) -> None:
    """The paper has no learning rate of 0.03 with drops at 20, 40 and 60."""
    write_run(tmp_path, cell, preset="small")
    assert set(differences(collect([tmp_path]).results.values())) >= said


def test_a_setting_of_the_users_is_not_called_the_papers(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on", preset="full")
    changed = ["model.norm=l1", "optim.momentum=0.5", "optim.nesterov=true", "optim.clip_norm=2", "data.dir=/elsewhere"]
    (folder / "config.json").write_text(to_json(load_cell("fig1/wd_on").config("full", 0, changed)))
    assert differences(collect([tmp_path]).results.values()) == [
        ("norm", "l1", "l2"),
        ("momentum", "0.5", "0.9"),
        ("nesterov", "yes", "no"),
        ("clip norm", "2", "usual"),
        *((text, "", "") for text in load_cell("fig1/wd_on").paper.departs),
    ]
    page = write_report([tmp_path], tmp_path / "out").html.read_text()
    assert "The paper’s own setting" not in page
    assert "Norm: l1 instead of l2" in page


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.ids: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id" and value:
                self.ids.append(value)
            if key in ("href", "src") and value:
                if value.startswith("#"):
                    self.targets.add(value[1:])
                elif not value.startswith("data:"):
                    self.outside.append(value)


def test_the_page_stands_alone_and_says_the_numbers(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_all(runs)
    write_run(runs, "fig1/wd_on", seed=7, error="no space left: <disk>")
    report = write_report([runs], tmp_path / "out", command="normmatters reproduce all")
    page = report.html.read_text()
    links = _Links()
    links.feed(page)
    assert links.outside == []
    assert links.targets <= set(links.ids)
    assert len(links.ids) == len(set(links.ids))
    for number in ("90.5 %", "75.3 %", "21.2 BLEU", "5.1 perplexity", "26.5 BLEU", "67 %"):  # the paper's
        assert number in page, number
    ours = report.collection.results["table1/resnet56_bn"].text("accuracy")
    assert " ± " in ours
    assert ours in page
    for verdict in report.verdicts:
        assert verdict.claim.rule_text in unescape(page)
    assert "no space left: &lt;disk&gt;" in page
    assert "normmatters reproduce all" in page
    text = report.markdown.read_text()
    assert ours in text
    assert text.count("## ") == len(EXPERIMENTS) + 1  # and what did not finish
    names = {p.name for p in report.figures}
    assert {"fig1-0.svg", "supp2-0.svg"} <= names
    for path in report.figures:
        assert path.stat().st_size > 1000
        assert f"figures/{path.with_suffix('.svg').name}" in text


def test_the_page_shows_figures_first_and_folds_the_rest(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / "runs", "fig2/resnet50_l2", seed=seed, final=0.9)
        write_run(tmp_path / "runs", "fig2/resnet50_l1", seed=seed, final=0.9)
        write_run(tmp_path / "runs", "fig1/wd_on", seed=seed, final=0.9)
    page = write_report([tmp_path / "runs"], tmp_path / "out").html.read_text()
    assert page.index('<svg class="chart"') < page.index("<details") < page.index("<table")
    assert page.count("Small networks on embedded data") == 1  # once for the page
    assert "ResNet-50: L1 equals L2 (here: ResNet-8 on scikit-learn digits (8×8 grey images))" in page
    assert "WD on in the paper: 9.5" in page  # 90.5 % accuracy, as an error
    (name, data) = re.findall(r'download="([^"]+)" href="data:text/csv;charset=utf-8,([^"]+)"', page)[0]
    rows = unquote(data).splitlines()
    assert name == "fig1-0.csv"
    assert rows[0] == "epoch,WD on (mean),WD on (lowest),WD on (highest)"
    assert rows[-1] == "6,10,10,10"


def test_a_caption_says_which_of_its_curves_were_not_run(tmp_path: Path) -> None:
    for cell in ("resnet56_l2", "resnet56_with_c"):
        write_run(tmp_path, f"supp1/{cell}", preset="cifar")
    page = write_report([tmp_path], tmp_path / "out").html.read_text()
    assert "Without C the curve comes down later and ends higher. Not run here: L1 without C. <a download" in page
    write_run(tmp_path, "supp1/resnet56_without_c", preset="cifar")
    page = write_report([tmp_path], tmp_path / "out").html.read_text()
    assert "comes down later and ends higher. <a download" in page


def test_runs_of_your_own_get_a_section(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on", final=0.97)
    config = json.loads((folder / "config.json").read_text())
    config |= {"experiment": "my runs", "cell": "try", "label": "My <try>"}
    (folder / "config.json").write_text(json.dumps(config))
    report = write_report([tmp_path], tmp_path / "out")
    page = report.html.read_text()
    assert 'id="my runs"' in page
    assert "(figures/my%20runs-0.svg)" in report.markdown.read_text()
    assert "My &lt;try&gt;" in page
    assert "97.00 %" in page
    assert report.verdicts == ()


def test_every_device_that_ran_is_named(tmp_path: Path) -> None:
    """The first run's was said to be that of the whole report."""
    for seed, device in enumerate(("cpu", "NVIDIA H200", "cpu")):
        write_run(tmp_path, "fig1/wd_on", seed=seed, device=device)
    report = write_report([tmp_path], tmp_path / "out")
    assert "Device: cpu, NVIDIA H200 · torch: 2.13.0 ·" in report.markdown.read_text()


def test_a_translation_of_your_own_is_measured_by_perplexity(tmp_path: Path) -> None:
    """It was by the share of right tokens, of which the table said only "%", beside a figure of perplexities."""
    folder = write_run(tmp_path, "supp2/ln", ppl=7.25)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "mine", "label": "My LSTM"}))
    report = write_report([tmp_path], tmp_path / "out")
    assert "| My LSTM | – | 7.25 perplexity | 1 |" in report.markdown.read_text()
    assert "7.25 perplexity" in report.html.read_text()


def test_the_regimes_of_cells_with_the_same_label_are_all_told(tmp_path: Path) -> None:
    """Figure 2 has an "L2" of ResNet-18 and one of ResNet-50, whose network was said to be that of all."""
    for cell in ("resnet18_l2", "resnet50_l2"):
        write_run(tmp_path, f"fig2/{cell}", preset="full")
    page = write_report([tmp_path], tmp_path / "out").html.read_text()
    told = "L2 (resnet18_l2): ResNet-18; L2 (resnet50_l2): ResNet-50"
    assert f"<tr><td>Network</td><td>{told}</td></tr>" in page


def test_an_lstm_has_as_many_layers_as_it_is_said_to_have(tmp_path: Path) -> None:
    write_run(tmp_path, "supp2/ln")
    here = collect([tmp_path]).results["supp2/ln"].words["network"]
    assert here == "1-layer LSTM with attention (d_model 48)"  # "2-layer LSTM with attention (layers 1, ...)"
    full = json.loads(to_json(load_cell("supp2/ln").config("full")))
    assert describe(full)["network"] == "2-layer LSTM with attention"


def test_text_of_many_lines_is_one_in_markdown(tmp_path: Path) -> None:
    """A label of two lines ended its table, and an error's second line its list."""
    folder = write_run(tmp_path, "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "mine", "label": "two\nlines"}))
    write_run(tmp_path, "fig1/wd_off", error="out of memory\n# tried to allocate 2 GiB")
    text = write_report([tmp_path], tmp_path / "out").markdown.read_text()
    assert "| two lines | – |" in text
    assert "- fig1/wd_off, seed 0: out of memory # tried to allocate 2 GiB\n" in text


def test_an_experiment_may_be_called_anything(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": 'R&D "x" (1)'}))
    report = write_report([tmp_path], tmp_path / "out")
    for figure in report.figures:
        ElementTree.parse(figure)
    page = report.html.read_text()
    links = _Links()
    links.feed(page)
    assert 'R&D "x" (1)' in links.ids
    assert 'clip-path="url(#clip-R-D--x---1--0)"' in page


def test_a_cell_of_your_own_in_one_of_the_papers_experiments_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, "fig1/wd_on", final=0.9)
    folder = write_run(tmp_path, "fig1/wd_off", final=0.97)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"cell": "mine", "label": "My own"}))
    report = write_report([tmp_path], tmp_path / "out")
    assert "| My own | – | 97.00 % | 1 |" in report.markdown.read_text()
    page = report.html.read_text()
    assert "97.00 %" in page
    assert "Validation error (your own)" in page


def test_a_run_of_your_own_may_have_the_name_of_a_borrowed_cell(tmp_path: Path) -> None:
    """Table 2's ResNet-56 is Table 1's: a file of the user's with its name was counted, and shown nowhere."""
    folder = write_run(tmp_path, "table1/resnet56_bn", final=0.97)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"experiment": "table2", "cell": "resnet56_l2"}))
    report = write_report([tmp_path], tmp_path / "out")
    assert "| 97.00 % | 1 |" in report.markdown.read_text()


def test_runs_from_before_a_setting_was_there_are_runs_of_the_same_cell(tmp_path: Path) -> None:
    old, _ = (write_run(tmp_path, "fig1/wd_on", seed=seed) for seed in (0, 1))
    config = json.loads((old / "config.json").read_text())
    del config["model"]["rho"]
    (old / "config.json").write_text(json.dumps(config))
    assert len(collect([tmp_path]).results["fig1/wd_on"].runs) == 2
    config["model"]["width"] = 2.0
    (old / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="different settings"):
        collect([tmp_path])
    config["model"]["width"], config["runtime"]["beam"] = 1.0, 1  # another search, another BLEU
    (old / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="different settings"):
        collect([tmp_path])
    config["runtime"] |= {"beam": 4, "compile": "compile"}
    (old / "config.json").write_text(json.dumps(config))
    assert len(collect([tmp_path]).results["fig1/wd_on"].runs) == 2


def test_bad_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no run folders"):
        collect([tmp_path / "empty"])
    write_run(tmp_path / "a", "fig1/wd_on")
    write_run(tmp_path / "b", "fig1/wd_on", seed=1, preset="cifar")
    with pytest.raises(ValueError, match="different settings"):
        collect([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a" / "fig1" / "wd_on" / "seed0" / "summary.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"summary\.json"):
        write_report([tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_foreign_config_does_not_stop_the_report(tmp_path: Path) -> None:
    write_run(tmp_path, "fig1/wd_on")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.json").write_text('{"port": 8080}')
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "config.json").write_text('{"port": 8080,} // not JSON')
    report = write_report([tmp_path], tmp_path / "out")
    assert len(report.collection.runs) == 1
    assert "app: its config.json does not belong to a run" in report.markdown.read_text()
    assert "config.json does not belong to a run" in report.html.read_text()
    with pytest.raises(ValueError, match="not the config of a run"):
        collect([tmp_path / "app"])


def test_an_empty_summary_is_no_result(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on")
    (folder / "summary.json").write_text("{}")
    assert len(collect([tmp_path]).unfinished) == 1


@pytest.mark.parametrize("error", ['{"kind": 5, "message": [1], "metrics": 3}', '{"kind": {}}', "[]", "7"])
def test_an_error_of_wrong_types_is_left_out(error: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on")
    (folder / "summary.json").unlink()
    (folder / "error.json").write_text(error)
    report = write_report([tmp_path], tmp_path / "out")
    assert len(report.collection.unfinished) == 1
    assert "fig1/wd_on, seed 0: stopped" in report.markdown.read_text()


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    """The report waited for ever."""
    folder = write_run(tmp_path, "fig1/wd_on")
    (folder / "environment.json").unlink()
    os.mkfifo(folder / "environment.json")
    with pytest.raises(ValueError, match=r"environment\.json"):
        collect([tmp_path])


def test_reading_many_runs_says_how_far_it_is(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, "fig1/wd_on", seed=seed)
    said: list[str] = []
    runs = collect([tmp_path], progress=said.append).runs
    assert said == ["0 of 3 runs read"]
    assert runs[0].config.optim is runs[2].config.optim  # held once
    assert [run.seed for run in runs] == [0, 1, 2]


def test_one_run_is_one_seed_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "runs", "fig1/wd_on")
    write_run(tmp_path / "runs", "fig1/wd_on", seed=1)
    monkeypatch.chdir(tmp_path)
    assert len(collect(["runs", tmp_path / "runs" / "fig1"]).runs) == 2
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ValueError, match=r"fig1/wd_on has seed 0 more than once \(.*copy"):
        collect(["runs", "copy"])


def test_images_of_your_own_are_not_imagenet(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig2/resnet18_l2", preset="full")
    assert collect([tmp_path]).runs[0].val_examples == 50_000
    config = json.loads((folder / "config.json").read_text())
    config["data"]["dir"] = "/home/me/birds"
    (folder / "config.json").write_text(json.dumps(config))
    collection = collect([tmp_path])
    assert collection.runs[0].val_examples is None
    assert differences(collection.results.values()) == [("data", "birds", "ImageNet")]


@pytest.mark.parametrize(
    ("cell", "folder", "told"),
    [
        ("fig2/resnet18_l2", ".", "images"),  # what --data-dir names itself
        ("fig2/resnet18_l2", "imagenet/", "ImageNet"),
        ("supp2/ln", "wmt14/", "WMT14 de-en"),
        ("supp2/ln", ".", "parallel text de-en"),
        ("supp2/ln", None, "Multi30k de-en"),  # the usual folder
        ("s8/transformer_ln", "translation/tatoeba", "Tatoeba en-de"),
    ],
)
def test_a_data_set_is_called_by_its_folder(cell: str, folder: str | None, told: str) -> None:
    config = json.loads(to_json(load_cell(cell).config("full")))
    config["data"]["dir"] = folder
    assert describe(config)["data"] == told


def test_more_digits_than_there_are_leave_a_validation_set(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fig1/wd_on")
    config = json.loads((folder / "config.json").read_text())
    config["data"]["train_size"] = 5000
    (folder / "config.json").write_text(json.dumps(config))
    found = collect([tmp_path]).results["fig1/wd_on"].sampling_error("accuracy")
    assert found == pytest.approx(100 * math.sqrt(0.9 * 0.1 / 360))


@pytest.mark.parametrize(
    "line",
    [b'{"epoch": 7, "val_a', b"null\n", b'{"val_acc": 3.0}\n', b"\xff\xfe\n", b'{"epoch": NaN, "val_acc": 3.0}\n'],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, line: bytes) -> None:
    folder = write_run(tmp_path, "fig1/wd_on", finished=False)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line)
    runs = collect([tmp_path])
    assert len(runs.unfinished) == 1
    assert [p[0] for p in runs.results["fig1/wd_on"].curve("error")] == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_that_lost_epochs_is_told(tmp_path: Path) -> None:
    """Its last line would be taken for the run's end, and the accuracy of that epoch for its result."""
    folder = write_run(tmp_path, "fig1/wd_on")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "epoch": 6}))
    assert len(collect([tmp_path]).runs[0].metrics) == 6
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:4]))
    with pytest.raises(ValueError, match=r"seed0: finished with 6 epochs, but 4 are left .* remove summary.json"):
        collect([tmp_path])


_CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
_PROBE = """<script>addEventListener("load", function () {
  var svg = document.querySelector("svg.chart"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 20}));
  document.querySelector(".legend button").click();
  var out = {wide: document.documentElement.scrollWidth, width: innerWidth, errors: window.errors,
    tip: document.querySelector(".tip").textContent, off: document.querySelectorAll(".series.off").length,
    back: getComputedStyle(document.body).backgroundColor};
  document.getElementById("theme").click();
  out.switched = getComputedStyle(document.body).backgroundColor;
  document.title = JSON.stringify(out);
});</script></body>"""


@pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it(tmp_path: Path, width: int) -> None:
    runs = tmp_path / "runs"
    write_all(runs, seeds=1)
    page = write_report([runs], tmp_path / "out").html
    text = page.read_text().replace(
        "<head>", "<head><script>window.errors=[];onerror=function(m){errors.push(m)}</script>"
    )
    # A window cannot be narrower than 500 px in Chromium; a frame can.
    (tmp_path / "probe.html").write_text(text.replace("</body>", _PROBE))
    frame = f'<iframe id="f" src="probe.html" style="width:{width}px;height:900px;border:0"></iframe>'
    wait = "f.onload=function(){setTimeout(function(){document.body.append(f.contentDocument.title)},300)}"
    (tmp_path / "frame.html").write_text(f"<body>{frame}<script>var f=document.getElementById('f');{wait}</script>")
    command = [str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"\{.*\}", done.stdout.split("</iframe>")[-1].split("</script>")[-1])
    assert found is not None, done.stdout[-500:]
    seen = json.loads(found[0].replace("&amp;", "&"))
    assert seen["errors"] == []
    assert seen["width"] == width
    assert seen["wide"] <= width  # no sideways scrolling
    assert "epoch" in seen["tip"]
    assert "%" in seen["tip"]
    assert seen["off"] >= 1
    assert seen["back"] != seen["switched"]
