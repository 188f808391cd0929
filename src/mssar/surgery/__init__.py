"""MS-SAR in anyone's network: put in, the output unchanged, and taken out again."""

from mssar.surgery.insertion import insert, remove
from mssar.surgery.plan import Entry, Plan

__all__ = ["Entry", "Plan", "insert", "remove"]
