"""Sweeps: runs that are handed to other processes, on this machine or on a cluster's."""
