"""act(MS-SAR(norm(x)) + shortcut) as one op."""
