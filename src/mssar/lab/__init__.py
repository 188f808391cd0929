"""Data, training, experiments, records and the report. Needs the extra ``lab``."""
