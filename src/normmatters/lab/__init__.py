"""The lab: config → data → model → trainer → run log → report."""
