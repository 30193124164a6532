"""The lab reproduces the paper's experiments: config → plan → run → run folder → report. Read it in this order:

config.py, schema.py               what one run is; a table is checked and becomes that
cells.py, claims.py, figures.py    the files in ``experiments/``: cells with their presets, claims, panels of figures
plan.py                            which runs an experiment takes, and in which order
runner.py, processes.py            the runs of a plan, several at a time
run.py                             one run: data, model, regime, epochs, checkpoints
  data/, models/, norms.py           what is trained, on what
  regimes.py, objective.py, steps.py learning rate and weight decay; the loss; a training step
  execution.py                       the device, and torch's global switches
run_folder.py, checkpoint.py       what a run writes
recorded_runs.py, report/          runs are read, gathered by cell, judged, drawn, and written as pages
publish.py                         results to keep, as small files
side_by_side/                      what only many small networks on one GPU need; nothing else depends on it
"""
