"""Setups and reports of `benchmarks/simulate.py`; the simulator itself is `asyncrl.verify.simulator`.

devices      the parameters of engine and trainer models, derived from a model's and a device's figures
scenarios    which runs the tables of docs/scale_runs.md are made of
report       their tables and plot
fit          real runs beside what a model of this machine predicts: `speed` measures the engine, `real` the runs
"""
