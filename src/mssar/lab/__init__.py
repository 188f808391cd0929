"""Data, training, experiments, records and the report. Needs ``pip install 'mssar[lab]'``."""
