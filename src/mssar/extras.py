"""What an extra is installed by, where something that it brings is missing."""


def advice(extra: str) -> str:
    """From a clone: no index has the package yet."""
    return f"pip install '.[{extra}]' in a clone of mssar"
