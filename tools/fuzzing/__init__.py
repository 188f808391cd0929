"""What tools/fuzz-kernels is made of: cases, how they are drawn, memory that tells, a judge."""

KINDS = ("tail", "layer", "dense", "windows", "sliding")
