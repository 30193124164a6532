"""Batch norm on GPUs, one file per stage.

==============  =====================================================================================================
statistics.py   μ and the scale of each channel: kernels and launches for large tensors and for small ones
select.py       L∞, Top(k) and range: the extreme elements, from what the pass over the tensor left
normalize.py    z = act((x−μ)/D·γ + β + residual), and what is saved for the backward pass
gradient.py     the backward pass: sums, coefficients, the input's gradient
operator.py     the stages in a row, as an eager autograd node and as operators for the compiler
pooled.py       L1, ReLU and max pool in one pass: kernels, launches and registration
twin.py         two L1 norms that are added before a ReLU, in one pass: kernels, launches and registration
layout.py       how a tensor is cut, and what all launches share
tiles.py        device functions that the kernels share
==============  =====================================================================================================
"""
