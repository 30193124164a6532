"""What exists only to train many small networks at once on one GPU: threads, their lock, CUDA graphs, convolutions."""
