"""Training: one loop for a CPU, a GPU, several runs on one GPU, and many machines."""
