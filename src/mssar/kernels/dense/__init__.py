"""A dense block's recalibration: the main vector's means are carried along, step by step."""
