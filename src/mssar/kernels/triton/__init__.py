"""Device code alone. Whoever imports a module of this folder imports Triton.

All sizes are run-time numbers, and no kernel is compiled for a number that it was not told to be
compiled for: integers are never specialised, what must be known is a ``constexpr``.
"""
